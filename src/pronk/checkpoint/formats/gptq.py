"""GPTQ checkpoints, whose codes are packed into int32 words along the inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from pronk.base.arrays import Array
from pronk.base.checks import check_flag
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
            group=scheme.parse_group_size(config.get("group_size", -1), _REMEDY),
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
        if not self._is_quantized(module):
            return None
        return _Weight(self, module, matrix.group_size(self.group, module.inputs))

    def _is_quantized(self, module: LinearModule) -> bool:
        if any(pattern.match(module.name) for pattern in self.excluded):
            return False
        if module.head:
            return self.head
        if self.included is None:
            return True
        return any(module.name.endswith(f".{name}") for name in self.included)


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
    if not isinstance(blocks, list):
        scheme.refuse("lists of names as modules_in_block_to_quantize", blocks)
    names = list[Any]()
    for block in blocks:
        names += block if isinstance(block, list) else [block]
    if not all(isinstance(name, str) for name in names):
        scheme.refuse("lists of names as modules_in_block_to_quantize", blocks)
    return frozenset(names)
