"""GPTQ and AWQ checkpoints, whose codes are packed into int32 words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from pronk.base.arrays import Array
from pronk.base.checks import check_flag, check_integer
from pronk.base.errors import ConfigError, refuse
from pronk.checkpoint.formats import matrix, scheme
from pronk.checkpoint.formats.matrix import Bits, QuantizedMatrix, to_quantized_matrix
from pronk.checkpoint.formats.scheme import FLOATS, LinearModule, Scheme, StoredTensor

# Number to add to a stored zero point to get the zero point, for each ``checkpoint_format``.
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
_REMEDY = (
    "use a GPTQ checkpoint with 4 or 8 bits in the format gptq or gptq_v2, "
    "or the model's 16-bit weights"
)
# Options that change the weights or the forward pass in ways that pronk does not implement.
_UNSUPPORTED_OPTIONS = ("adapter", "rotation", "is_marlin_format", "use_marlin")


@dataclass(frozen=True)
class GPTQ(Scheme):
    """Quantization of a GPTQ checkpoint, as AutoGPTQ and GPTQModel write it (Frantar et al. 2023).

    A word of int32 packs the codes of consecutive inputs, or the zero points of consecutive
    outputs::

        qweight    [inputs * bits / 32, outputs]
        qzeros     [groups, outputs * bits / 32]

    A weight is ``scales[g] * (code - zero[g])``, where ``g = g_idx[input]`` is its group. The
    format ``gptq`` stores ``zero - 1``, the format ``gptq_v2`` stores ``zero``.

    Attributes:
        bits: number of bits per code.
        group: number of inputs per group; -1: all inputs.
        zero_offset: number to add to a stored zero point.
        symmetric: whether all zero points must be ``2**(bits - 1)``.
        needs_index: whether the tensor ``g_idx``, the group of each input, must exist
            (``desc_act``).
        head: whether the LM head is quantized.
        excluded: patterns of names of unquantized modules.
        included: ends of the names of quantized modules, such as ``self_attn.q_proj``; ``None``:
            all linear modules of layers.
    """

    bits: Bits
    group: int
    zero_offset: int
    symmetric: bool
    needs_index: bool
    head: bool = False
    excluded: tuple[re.Pattern[str], ...] = ()
    included: frozenset[str] | None = None

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> GPTQ:
        """Return the scheme that a ``quantization_config`` describes.

        Older checkpoints have the same keys in ``quantize_config.json``.
        """
        bits = scheme.check_bits("bits", config.get("bits"), (4, 8), _REMEDY)
        layout = config.get("checkpoint_format") or config.get("format") or "gptq"
        if not isinstance(layout, str) or layout not in _ZERO_OFFSETS:
            scheme.refuse(f"checkpoint_format {' or '.join(_ZERO_OFFSETS)}", layout, _REMEDY)
        if config.get("pack_dtype") not in (None, "int32"):
            scheme.refuse("pack_dtype int32", config["pack_dtype"], _REMEDY)
        for key in _UNSUPPORTED_OPTIONS:
            if config.get(key):
                scheme.refuse(f"no {key}", config[key], _REMEDY)
        return cls(
            bits=bits,
            group=_parse_group_size(config.get("group_size", -1), _REMEDY),
            zero_offset=_ZERO_OFFSETS[layout],
            symmetric=_read_flag(config, "sym", default=True),
            needs_index=_read_flag(config, "desc_act", default=False),
            head=_read_flag(config, "lm_head", default=False),
            excluded=_parse_excluded(config.get("dynamic")),
            included=_parse_included(config),
        )

    @property
    def name(self) -> str:
        """Name of the format, such as ``GPTQ of 4 bits``."""
        return f"GPTQ of {self.bits} bits"

    def weight(self, module: LinearModule) -> _Weight | None:
        if module.head and not self.head:
            return None
        if any(pattern.match(module.name) for pattern in self.excluded):
            return None
        if not module.head and self.included is not None:
            is_included = any(module.name.endswith(f".{name}") for name in self.included)
            if not is_included:
                return None
        return _Weight(self, module, matrix.group_size(self.group, module.inputs))


class _Weight(NamedTuple):
    """Weight of a linear module in a GPTQ checkpoint, with ``group`` inputs per group."""

    scheme: GPTQ
    module: LinearModule
    group: int

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        outputs = self.module.outputs
        inputs = self.module.inputs
        bits = self.scheme.bits
        num_groups = ceil(inputs / self.group)
        return {
            "qweight": StoredTensor(((ceil(inputs * bits / 32), outputs),), ("I32",)),
            "qzeros": StoredTensor(((num_groups, ceil(outputs * bits / 32)),), ("I32",)),
            "scales": StoredTensor(((num_groups, outputs),)),
            "g_idx": StoredTensor(((inputs,),), ("I32", "I64"), required=self.scheme.needs_index),
            # AutoGPTQ writes a bias of zeros even for a module without a bias.
            "bias": StoredTensor(((outputs,),), FLOATS, required=False),
        }

    def read(self, tensors: Mapping[str, Array], codes: Array) -> QuantizedMatrix:
        scheme.check_zeros("bias", tensors, "as by config.json the module has no bias")
        bits = self.scheme.bits
        group = self.group
        matrix.unpack_into(codes, tensors["qweight"].T, bits)
        order = None
        if "g_idx" in tensors:
            order = matrix.input_order(
                "g_idx", tensors["g_idx"], group, required=self.scheme.needs_index
            )
        zeros = self._zeros(tensors["qzeros"])
        return to_quantized_matrix(codes, zeros, tensors["scales"].T, bits, group, order)

    def _zeros(self, packed: Array) -> Array:
        """Unpack and check the zero points; return them as int16 ``[outputs, groups]``."""
        bits = self.scheme.bits
        stored = matrix.unpack(packed, bits, self.module.outputs).T
        zeros = stored.astype(np.int16) + self.scheme.zero_offset
        lowest = int(zeros.min())
        highest = int(zeros.max())
        maximum = (1 << bits) - 1
        middle = 1 << (bits - 1)
        if highest > maximum:
            # A zero point of 0 was stored as -1. In the format gptq, its bits, which are all 1,
            # have overwritten the other zero points of the word, so they cannot be recovered.
            remedy = "use a checkpoint in the format gptq_v2"
            refuse("qzeros", f"expected 0..{maximum}, found {highest}; {remedy}")
        if self.scheme.symmetric and bool((zeros != middle).any()):
            expected = f"expected zero points of {middle}, as sym is true"
            remedy = "check sym and checkpoint_format in quantization_config"
            refuse("qzeros", f"{expected}, found {lowest}..{highest}; {remedy}")
        return zeros


def _parse_group_size(size: object, remedy: str) -> int:
    """Return ``group_size`` of a config: -1, or a multiple of 8.

    Any other value raises a ConfigError whose message ends with ``remedy``.
    """
    if size == -1 and not isinstance(size, bool):
        return -1
    group = check_integer("quantization_config: group_size", size, 8, error=ConfigError)
    if group % 8:
        scheme.refuse("a group_size of a multiple of 8, or -1", size, remedy)
    return group


def _read_flag(config: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        value = default
    return check_flag(f"quantization_config: {key}", value, error=ConfigError)


def _parse_excluded(dynamic: object) -> tuple[re.Pattern[str], ...]:
    """Return the patterns of unquantized modules.

    Args:
        dynamic: entry of ``quantization_config``: an object whose keys are rules ``-:PATTERN``.

    Raises:
        ConfigError: there is another kind of rule, or an invalid pattern.
    """
    if not dynamic:
        return ()
    if not isinstance(dynamic, dict):
        scheme.refuse("an object of rules as dynamic", dynamic)
    patterns = []
    for rule in dynamic:
        if not rule.startswith("-:"):
            remedy = "use a checkpoint with one bit width"
            scheme.refuse("only rules in dynamic that exclude modules (-:)", rule, remedy)
        try:
            patterns.append(re.compile(rule.removeprefix("-:")))
        except scheme.EXPRESSION_ERRORS as error:
            remedy = f"correct the expression ({error})"
            scheme.refuse("regular expressions in dynamic", rule, remedy)
    return tuple(patterns)


def _parse_included(config: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the names of quantized modules, or ``None`` if the config does not list any.

    The entry ``modules_in_block_to_quantize`` is a list of names, or a list of such lists.
    """
    blocks = config.get("modules_in_block_to_quantize") or config.get("inside_layer_modules")
    if not blocks:
        return None
    names: list[Any] = []
    for block in blocks if isinstance(blocks, list) else [None]:
        names += block if isinstance(block, list) else [block]
    if not all(isinstance(name, str) for name in names):
        scheme.refuse("lists of names as modules_in_block_to_quantize", blocks)
    return frozenset(names)


_AWQ_REMEDY = "use an AWQ checkpoint of 4 bits in the version gemm, or the model's 16-bit weights"
# Where eight consecutive outputs are in a word: the inverse of the permutation 0 2 4 6 1 3 5 7.
_POSITIONS = [0, 4, 1, 5, 2, 6, 3, 7]


@dataclass(frozen=True)
class AWQ(Scheme):
    """Quantization of an AWQ checkpoint (Lin et al. 2024) in the version ``gemm`` of AutoAWQ.

    A word of int32 packs the 4-bit codes, or the 4-bit zero points, of eight consecutive outputs.
    From the lowest bits up, the word holds the outputs 0 2 4 6 1 3 5 7::

        qweight    [inputs, outputs / 8]
        qzeros     [groups, outputs / 8]

    A weight is ``scales[g] * (code - zero[g])``, where ``g = input // group`` is its group.

    Attributes:
        group: number of inputs per group; -1: all inputs.
        unquantized: parts of module names; a module whose name contains one is not quantized.
    """

    group: int
    unquantized: tuple[str, ...] = ()

    name = "AWQ"

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> AWQ:
        """Return the scheme that a ``quantization_config`` describes.

        Older checkpoints have the same keys in ``quant_config.json``.
        """
        scheme.check_bits("bits", config.get("bits", config.get("w_bit", 4)), (4,), _AWQ_REMEDY)
        version = (
            config.get("checkpoint_format")
            or config.get("format")
            or config.get("version")
            or "gemm"
        )
        if str(version).lower() != "gemm":
            scheme.refuse("the version gemm", version, _AWQ_REMEDY)
        # The format of the backend llm-awq differs: a word packs consecutive inputs, not outputs.
        if config.get("backend", "autoawq") == "llm-awq":
            scheme.refuse("the backend autoawq", "llm-awq", _AWQ_REMEDY)
        if config.get("zero_point", True) is not True:
            scheme.refuse("zero_point true", config["zero_point"], _AWQ_REMEDY)
        size = config.get("group_size", config.get("q_group_size", 128))
        group = _parse_group_size(size, _AWQ_REMEDY)
        return cls(group, tuple(scheme.read_names(config, "modules_to_not_convert")))

    def weight(self, module: LinearModule) -> _AWQWeight | None:
        if module.head or module.transposed:
            return None
        if any(text in module.name for text in self.unquantized):
            return None
        if module.outputs % 8:
            problem = f"expected a multiple of 8 outputs, found {module.outputs}"
            refuse(module.name, f"{problem}; {_AWQ_REMEDY}")
        return _AWQWeight(module, matrix.group_size(self.group, module.inputs))


class _AWQWeight(NamedTuple):
    """Weight of a linear module in an AWQ checkpoint, with ``group`` inputs per group."""

    module: LinearModule
    group: int

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        outputs = self.module.outputs
        inputs = self.module.inputs
        num_groups = ceil(inputs / self.group)
        return {
            "qweight": StoredTensor(((inputs, outputs // 8),), ("I32",)),
            "qzeros": StoredTensor(((num_groups, outputs // 8),), ("I32",)),
            "scales": StoredTensor(((num_groups, outputs),)),
        }

    def read(self, tensors: Mapping[str, Array], codes: Array) -> QuantizedMatrix:
        outputs = self.module.outputs
        packed = tensors["qweight"]
        for start in range(0, outputs, matrix.SLICE_OUTPUTS):
            stop = min(start + matrix.SLICE_OUTPUTS, outputs)
            codes[start:stop] = _unpack(packed[:, start // 8 : stop // 8], stop - start).T
        zeros = _unpack(tensors["qzeros"], outputs).T
        return to_quantized_matrix(codes, zeros, tensors["scales"].T, 4, self.group)


def _unpack(packed: Array, outputs: int) -> Array:
    """Unpack the words of AWQ, int32 ``[rows, outputs / 8]``, to uint8 ``[rows, outputs]``."""
    words = matrix.unpack(packed, 4, outputs).reshape(len(packed), -1, 8)
    return words[..., _POSITIONS].reshape(len(packed), outputs)
