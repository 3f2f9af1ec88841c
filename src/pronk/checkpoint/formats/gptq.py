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

# checkpoint_format to the number to add to a stored zero point
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
_REMEDY = (
    "use a GPTQ checkpoint with 4 or 8 bits in the format gptq or gptq_v2, "
    "or the model's 16-bit weights"
)
# Options that change the weights or the forward pass in ways that are not implemented here.
_UNSUPPORTED_OPTIONS = ("adapter", "rotation", "is_marlin_format", "use_marlin")


@dataclass(frozen=True)
class GPTQ(Scheme):
    """Scheme of a GPTQ checkpoint, as AutoGPTQ and GPTQModel write them (Frantar et al. 2023).

    One int32 word packs the codes of consecutive inputs (``qweight`` ``[inputs * bits / 32,
    outputs]``) or the zero points of consecutive outputs (``qzeros`` ``[groups, outputs * bits /
    32]``). A weight is ``scales[g] * (code - zero[g])``, where ``g = g_idx[input]`` is its group.
    The format ``gptq`` stores ``zero - 1``, the format ``gptq_v2`` stores ``zero``.
    """

    bits: Bits  # number of bits per code
    group: int  # number of inputs per group; -1 means all inputs
    zero_offset: int  # number to add to a stored zero point
    symmetric: bool  # whether all zero points must be ``2**(bits - 1)``
    needs_index: bool  # whether the tensor ``g_idx`` (group of each input) must exist: ``desc_act``
    head: bool = False  # whether the LM head is quantized
    excluded: tuple[re.Pattern[str], ...] = ()  # patterns of names of unquantized modules
    # Suffixes of the names of quantized modules, such as ``self_attn.q_proj``; ``None``: all linear
    # modules of layers.
    included: frozenset[str] | None = None

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> GPTQ:
        """Parse a ``quantization_config``, or the ``quantize_config.json`` of older checkpoints."""
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
        if any(pattern.match(module.name) for pattern in self.excluded) or (
            module.head and not self.head
        ):
            return None
        included = (
            module.head
            or self.included is None
            or any(module.name.endswith(f".{n}") for n in self.included)
        )
        return (
            _Weight(self, module, matrix.group_size(self.group, module.inputs))
            if included
            else None
        )


class _Weight(NamedTuple):
    scheme: GPTQ
    module: LinearModule
    group: int  # number of inputs per group

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        _, outputs, inputs, *_ = self.module
        bits = self.scheme.bits
        num_groups = ceil(inputs / self.group)
        return {
            "qweight": StoredTensor(((ceil(inputs * bits / 32), outputs),), ("I32",)),
            "qzeros": StoredTensor(((num_groups, ceil(outputs * bits / 32)),), ("I32",)),
            "scales": StoredTensor(((num_groups, outputs),)),
            "g_idx": StoredTensor(((inputs,),), ("I32", "I64"), required=self.scheme.needs_index),
            # For a module without a bias, AutoGPTQ writes a bias of zeros.
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
        return to_quantized_matrix(
            codes, self._zeros(tensors["qzeros"]), tensors["scales"].T, bits, group, order
        )

    def _zeros(self, packed: Array) -> Array:
        """Unpack and check the zero points; return them as int16 ``[outputs, groups]``."""
        bits = self.scheme.bits
        zeros = (
            matrix.unpack(packed, bits, self.module.outputs).T.astype(np.int16)
            + self.scheme.zero_offset
        )
        maximum = (1 << bits) - 1
        middle = 1 << (bits - 1)
        if int(zeros.max()) > maximum:
            # Cause: the format gptq stores a zero point of 0 as -1, whose one bits overwrite other
            # zero points.
            refuse(
                "qzeros",
                f"expected 0..{maximum}, found {int(zeros.max())}; "
                "use a checkpoint in the format gptq_v2",
            )
        if self.scheme.symmetric and bool((zeros != middle).any()):
            found = (
                f"{int(zeros.min())}..{int(zeros.max())}; check sym and checkpoint_format in "
                "quantization_config"
            )
            refuse("qzeros", f"expected zero points of {middle}, as sym is true, found {found}")
        return zeros


def _parse_group_size(size: object, remedy: str) -> int:
    if size == -1 and not isinstance(size, bool):
        return -1
    group = check_integer("quantization_config: group_size", size, 8, error=ConfigError)
    if group % 8:
        scheme.refuse("a group_size of a multiple of 8, or -1", size, remedy)
    return group


def _read_flag(config: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = config.get(key)
    return check_flag(
        f"quantization_config: {key}", default if value is None else value, error=ConfigError
    )


def _parse_excluded(dynamic: object) -> tuple[re.Pattern[str], ...]:
    """Compile the patterns of unquantized modules: rules ``-:PATTERN`` in ``dynamic``.

    Refuse other rules.
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
            scheme.refuse(
                "regular expressions in dynamic", rule, f"correct the expression ({error})"
            )
    return tuple(patterns)


def _parse_included(config: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the names in ``modules_in_block_to_quantize``, a list or a list of lists.

    ``None`` if absent.
    """
    blocks = config.get("modules_in_block_to_quantize") or config.get("inside_layer_modules")
    if not blocks:
        return None
    lists: list[Any] = blocks if isinstance(blocks, list) else [None]
    names = [name for block in lists for name in (block if isinstance(block, list) else [block])]
    if not all(isinstance(name, str) for name in names):
        scheme.refuse("lists of names as modules_in_block_to_quantize", blocks)
    return frozenset(names)


_AWQ_REMEDY = "use an AWQ checkpoint of 4 bits in the version gemm, or the model's 16-bit weights"
# Entry i is the position of output i in a word: the inverse of the permutation 0 2 4 6 1 3 5 7.
_POSITIONS = [0, 4, 1, 5, 2, 6, 3, 7]


@dataclass(frozen=True)
class AWQ(Scheme):
    """Scheme of an AWQ checkpoint in the version ``gemm``, as AutoAWQ writes them (Lin et al. 2024).

    One int32 word packs the 4-bit codes (``qweight`` ``[inputs, outputs / 8]``) or the 4-bit zero
    points (``qzeros`` ``[groups, outputs / 8]``) of eight consecutive outputs. From the lowest bits
    up, the word holds the outputs 0 2 4 6 1 3 5 7. A weight is ``scales[g] * (code - zero[g])``,
    where ``g = input // group`` is its group.
    """

    group: int  # number of inputs per group; -1 means all inputs
    # parts of module names; a module whose name has one is not quantized
    unquantized: tuple[str, ...] = ()

    name = "AWQ"

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> AWQ:
        """Parse a ``quantization_config``, or the ``quant_config.json`` of older checkpoints."""
        scheme.check_bits("bits", config.get("bits", config.get("w_bit", 4)), (4,), _AWQ_REMEDY)
        version = (
            config.get("checkpoint_format")
            or config.get("format")
            or config.get("version")
            or "gemm"
        )
        if str(version).lower() != "gemm":
            scheme.refuse("the version gemm", version, _AWQ_REMEDY)
        # its words pack consecutive inputs, not outputs
        if config.get("backend", "autoawq") == "llm-awq":
            scheme.refuse("the backend autoawq", "llm-awq", _AWQ_REMEDY)
        if config.get("zero_point", True) is not True:
            scheme.refuse("zero_point true", config["zero_point"], _AWQ_REMEDY)
        size = _parse_group_size(
            config.get("group_size", config.get("q_group_size", 128)), _AWQ_REMEDY
        )
        return cls(size, tuple(scheme.read_names(config, "modules_to_not_convert")))

    def weight(self, module: LinearModule) -> _AWQWeight | None:
        if (
            module.head
            or module.transposed
            or any(text in module.name for text in self.unquantized)
        ):
            return None
        if module.outputs % 8:
            refuse(
                module.name,
                f"expected a multiple of 8 outputs, found {module.outputs}; {_AWQ_REMEDY}",
            )
        return _AWQWeight(module, matrix.group_size(self.group, module.inputs))


class _AWQWeight(NamedTuple):
    module: LinearModule
    group: int

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        _, outputs, inputs, *_ = self.module
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
        return to_quantized_matrix(
            codes, _unpack(tensors["qzeros"], outputs).T, tensors["scales"].T, 4, self.group
        )


def _unpack(packed: Array, outputs: int) -> Array:
    """Unpack int32 ``[rows, outputs / 8]`` to uint8 ``[rows, outputs]``, in the order of the outputs."""
    return (
        matrix.unpack(packed, 4, outputs)
        .reshape(len(packed), -1, 8)[..., _POSITIONS]
        .reshape(len(packed), outputs)
    )
