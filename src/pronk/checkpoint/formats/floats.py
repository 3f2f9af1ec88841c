"""Checkpoints whose weights are short floats: FP8 (e4m3), MXFP4 and NVFP4 (both e2m1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from pronk.base.arrays import BFLOAT16, FLOAT32, UINT8, Array, is_finite
from pronk.base.errors import CheckpointError, refuse
from pronk.checkpoint.formats import scheme
from pronk.checkpoint.formats.matrix import SLICE_OUTPUTS, QuantizedMatrix
from pronk.checkpoint.formats.scheme import (
    FLOATS,
    LinearModule,
    Scheme,
    StoredTensor,
    matches_components,
)

FP8_NOTE = "FP8 weights are dequantized to bfloat16, which takes twice the memory of the file"

_REMEDY = "use a checkpoint of e4m3 weights with blocks, or the model's 16-bit weights"
_SCALE_NAMES = ("weight_scale_inv", "weight_scale")  # names that the tensor of scales may have
# Names of tensors with scales of activations, which a checkpoint may have; pronk ignores them.
_ACTIVATION_SCALES = ("activation_scale", "input_scale", "input_scale_ub")


@dataclass(frozen=True)
class FP8(Scheme):
    """Quantization of an FP8 checkpoint, as DeepSeek, Qwen, vLLM and FBGEMM write it.

    There is one scale per block of outputs and inputs (``weight_scale_inv``, usually 128 by 128),
    or one per output or per matrix (``weight_scale``). CPUs have no FP8 arithmetic, and the 8-bit
    kernels multiply integers. Loading therefore dequantizes the weights: ``weight * scale`` is
    computed in float32 and rounded to bfloat16.

    Attributes:
        block: outputs and inputs per scale; ``None``: one scale per output or per matrix.
        unquantized: patterns of names of modules without FP8; see :func:`matches_components`.
        notes: warnings about properties of the checkpoint that are ignored or converted.
    """

    block: tuple[int, int] | None
    unquantized: tuple[str, ...] = ()
    notes: tuple[str, ...] = (FP8_NOTE,)

    name = "fp8"

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> FP8:
        """Return the scheme that a ``quantization_config`` of an FP8 checkpoint describes."""
        if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            scheme.refuse("fmt e4m3", config["fmt"], _REMEDY)
        if config.get("modules_to_convert"):
            scheme.refuse("no modules_to_convert", config["modules_to_convert"], _REMEDY)
        block = config.get("weight_block_size")
        if block is not None:
            are_sizes = isinstance(block, list) and all(type(n) is int and n > 0 for n in block)
            if not are_sizes or len(block) != 2:
                scheme.refuse("two sizes as weight_block_size", block, _REMEDY)
            block = (block[0], block[1])
        unquantized = scheme.read_names(config, "modules_to_not_convert")
        unquantized += scheme.read_names(config, "ignored_layers")
        notes: tuple[str, ...] = (FP8_NOTE,)
        if config.get("activation_scheme") == "static":
            notes = (FP8_NOTE, scheme.STATIC_NOTE)
        return cls(block, tuple(unquantized), notes)

    def weight(self, module: LinearModule) -> FP8Weight | None:
        if module.head or module.transposed:
            return None
        if any(matches_components(module.name, name) for name in self.unquantized):
            return None
        scale_names = _SCALE_NAMES[:1] if self.block else _SCALE_NAMES
        return FP8Weight(module, self.block, scale_names)


class FP8Weight(NamedTuple):
    """Weight of a linear module, stored as e4m3 values and scales.

    Attributes:
        module: the linear module.
        block: outputs and inputs per scale; ``None``: one scale per output or per matrix.
        scale_names: allowed names of the tensor of scales; the checkpoint must have exactly one
            tensor with one of these names.
    """

    module: LinearModule
    block: tuple[int, int] | None
    scale_names: tuple[str, ...]

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        outputs = self.module.outputs
        inputs = self.module.inputs
        scale_shapes: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (outputs, 1), (outputs,))
        if self.block is not None:
            scale_shapes = ((ceil(outputs / self.block[0]), ceil(inputs / self.block[1])),)
        scale = StoredTensor(scale_shapes, FLOATS, required=len(self.scale_names) == 1)
        tensors = {"weight": StoredTensor(((outputs, inputs),), ("F8_E4M3",))}
        tensors |= dict.fromkeys(self.scale_names, scale)
        tensors |= dict.fromkeys(_ACTIVATION_SCALES, StoredTensor(None, FLOATS, required=False))
        return tensors

    def read(self, tensors: Mapping[str, Array], codes: Array) -> Array:
        """Return the dequantized weight, bfloat16 ``[outputs, inputs]``; ``codes`` is not used."""
        del codes  # FP8 weights have no integer codes
        names = [name for name in self.scale_names if name in tensors]
        if len(names) != 1:
            allowed = " and ".join(self.scale_names)
            msg = (
                f"expected one of {allowed}, found {len(names)}; check that the files are complete"
            )
            raise CheckpointError(msg)
        scale = tensors[names[0]].astype(FLOAT32)
        block = self.block or (1, self.module.inputs)
        return _dequantize(tensors["weight"], scale, block, names[0])


def _dequantize(weight: Array, scale: Array, block: tuple[int, int], name: str) -> Array:
    """Return ``weight * scale`` in bfloat16, computed in slices to keep float32 temporaries small.

    Args:
        weight: e4m3 ``[outputs, inputs]``.
        scale: float32, one for each block, or one per output, or one.
        block: outputs and inputs per scale.
        name: name of the tensor of scales, for an error message.

    Raises:
        CheckpointError: a product is not finite.
    """
    outputs, inputs = weight.shape
    block_outputs = min(block[0], outputs)
    block_inputs = min(block[1], inputs)
    if scale.ndim < 2 or scale.size == 1:
        scale = np.broadcast_to(scale.reshape(-1, 1), (outputs, 1))
    out = np.empty((outputs, inputs), BFLOAT16)
    for start in range(0, outputs, SLICE_OUTPUTS):
        rows = np.arange(start, min(start + SLICE_OUTPUTS, outputs)) // block_outputs
        products = weight[start : start + SLICE_OUTPUTS].astype(FLOAT32)
        with np.errstate(all="ignore"):
            products *= np.repeat(scale[rows], block_inputs, axis=1)[:, :inputs]
        if not is_finite(products):
            msg = (
                f"expected finite numbers in weight and {name}, found NaN or infinity; download "
                "the weights again"
            )
            raise CheckpointError(msg)
        out[start : start + SLICE_OUTPUTS] = products
    return out


_GROUP = 32  # number of weights that share a scale
# magnitudes of the 4-bit floats, times two: 0, 0.5, 1, 1.5, 2, 3, 4, 6
_MAGNITUDES = np.array([0, 1, 2, 3, 4, 6, 8, 12])
# Code of each of the 16 4-bit floats, by its bits: twice the float plus 16. The highest bit is the
# sign.
MXFP4_CODES = (16 + np.concatenate((_MAGNITUDES, -_MAGNITUDES))).astype(UINT8)
# The same as codes of 8 bits: twice the float plus 128.
_NVFP4_CODES = MXFP4_CODES + UINT8.type(128 - 16)


@dataclass(frozen=True)
class MXFP4(Scheme):
    """Quantization of a checkpoint (gpt-oss) whose experts are 4-bit floats (e2m1).

    Each group of 32 floats has a scale, a power of two. Two floats are a byte, the first one in its
    low half. Twice a float is an integer from -12 to 12. Loading keeps these integers as codes of 5
    bits, and half of the file's scale as their scale, so that the weights are exact.
    """

    name = "mxfp4"

    @classmethod
    def parse(cls, _: Mapping[str, Any]) -> MXFP4:
        """Return the scheme.

        Nothing is read from ``quantization_config``: the names of the tensors show which matrices
        are quantized.
        """
        return cls()

    def weight(self, module: LinearModule) -> _Weight | None:
        return _Weight(module) if module.experts else None


class _Weight(NamedTuple):
    """Matrix of one expert.

    The checkpoint has the codes of all experts in one tensor, and their scales in another.
    """

    module: LinearModule

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Tensors that the checkpoint must have, with the matrices of all experts."""
        module = self.module
        _, name = module.name.rsplit(".", 1)
        if module.inputs % _GROUP:
            problem = f"expected a multiple of {_GROUP} inputs, found {module.inputs}"
            refuse(module.name, problem)
        groups = (module.experts, module.outputs, module.inputs // _GROUP)
        blocks = StoredTensor(((*groups, _GROUP // 2),), ("U8",))
        return {f"{name}_blocks": blocks, f"{name}_scales": StoredTensor((groups,), ("U8",))}

    def read(self, tensors: Mapping[str, Array], codes: Array) -> QuantizedMatrix:
        """Return the weight of an expert.

        Args:
            tensors: the expert's parts of the two tensors: the blocks, then the scales.
            codes: uint8 ``[outputs, inputs]``, which receives the codes.
        """
        blocks, exponents = tensors.values()
        _unpack_floats(blocks.reshape(len(codes), -1), MXFP4_CODES, codes)
        return QuantizedMatrix(codes, mxfp4_scale(exponents), None, 5, _GROUP)


def mxfp4_scale(exponents: Array) -> Array:
    """Return the float32 scales by which codes are multiplied, half of the scales of the floats.

    ``exponents`` are the stored exponents of the groups (bias 127): a scale is
    ``2**(exponent - 127)``.
    """
    return np.ldexp(np.float32(0.5), exponents.astype(np.int32) - 127).astype(FLOAT32)


def _unpack_floats(pairs: Array, table: Array, codes: Array) -> None:
    """Write the codes of 4-bit floats to ``codes``, uint8 ``[outputs, inputs]``.

    Args:
        pairs: uint8 ``[outputs, inputs / 2]``; the low half of a byte is the first of two floats.
        table: uint8 ``[16]``, the code of each float.
        codes: receives the codes.
    """
    codes[:, 0::2] = table[pairs & 15]
    codes[:, 1::2] = table[pairs >> 4]


NVFP4_GROUP = 16  # number of weights that share a scale


class NVFP4Weight(NamedTuple):
    """Weight of a linear module, stored as 4-bit floats (e2m1) with scales on two levels.

    A scale (e4m3) belongs to 16 inputs of an output, a global scale (float32) to the matrix.
    Loading keeps twice a float as a code of 8 bits, and half the product of both scales as its
    scale. The global scale of inputs is not used: GPUs round inputs to 4 bits with it, and pronk
    rounds inputs to 8 bits by their own largest number.

    Attributes:
        module: the linear module.
        floats: last part of the name of the tensor of floats.
        global_scale: last part of the name of the tensor with the global scale.
        input_scale: last part of the name of a tensor with the global scale of inputs.
        divides: whether scales are divided by the global scale, instead of multiplied.
    """

    module: LinearModule
    floats: str
    global_scale: str
    input_scale: str
    divides: bool

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        outputs = self.module.outputs
        inputs = self.module.inputs
        if inputs % NVFP4_GROUP:
            problem = f"expected a multiple of {NVFP4_GROUP} inputs, found {inputs}"
            refuse(self.module.name, f"{problem}; use the model's 16-bit weights")
        groups = (outputs, inputs // NVFP4_GROUP)
        single = ((), (1,))
        return {
            self.floats: StoredTensor(((outputs, inputs // 2),), ("U8",)),
            "weight_scale": StoredTensor((groups,), ("F8_E4M3",)),
            self.global_scale: StoredTensor(single, ("F32",)),
            self.input_scale: StoredTensor(single, FLOATS, required=False),
        }

    def read(self, tensors: Mapping[str, Array], codes: Array) -> QuantizedMatrix:
        _unpack_floats(tensors[self.floats], _NVFP4_CODES, codes)
        scale = tensors["weight_scale"].astype(FLOAT32)
        global_scale = tensors[self.global_scale].reshape(())
        if not 0 < global_scale < np.inf:
            problem = f"expected a finite number above 0, found {global_scale:g}"
            refuse(self.global_scale, f"{problem}; download the weights again")
        with np.errstate(over="ignore"):  # QuantizedMatrix refuses infinities
            scale = scale / global_scale if self.divides else scale * global_scale
        try:
            return QuantizedMatrix(codes, scale * FLOAT32.type(0.5), None, 8, NVFP4_GROUP)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
