"""Checkpoints in the format compressed-tensors, as LLM Compressor writes them.

Each entry of ``config_groups`` in ``config.json`` is a rule for the modules that its ``targets``
match, unless ``ignore`` matches them too. A target is a module name, ``re:`` with a regular
expression, or a class name. A weight is ``scale * (code - zero_point)`` with signed codes, which
are stored as int8, or packed as ``code + 2**(bits - 1)``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from pronk.base.arrays import INT8, UINT8, Array
from pronk.base.checks import check_choice, check_flag, check_integer
from pronk.base.errors import ConfigError, refuse
from pronk.checkpoint.formats import matrix, scheme
from pronk.checkpoint.formats.floats import FP8_NOTE, FP8Weight
from pronk.checkpoint.formats.matrix import Bits, QuantizedMatrix, to_quantized_matrix
from pronk.checkpoint.formats.scheme import FLOATS, LinearModule, Scheme, StoredTensor, StoredWeight


class PackedIntegers(NamedTuple):
    """Weight of a linear module, stored as integer codes, scales and perhaps zero points.

    If packed, the codes ``weight_packed`` are int32 ``[outputs, inputs * bits / 32]``, the first
    code in the lowest bits, and the zero points are int32 ``[outputs * bits / 32, groups]``.
    Otherwise, both tensors are int8.
    """

    module: LinearModule
    bits: Bits  # number of bits per code
    group: int  # number of inputs per group
    packed: bool  # whether codes are packed into 32-bit words
    symmetric: bool  # whether the zero points of the signed codes are all 0
    single_scale: bool  # whether the matrix has only one scale; if not, one per output and group

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        _, outputs, inputs, *_ = self.module
        num_groups = ceil(inputs / self.group)
        shapes: tuple[tuple[int, ...], ...] = (
            ((), (1,), (1, 1)) if self.single_scale else ((outputs, num_groups),)
        )
        packed_shapes = (
            ((ceil(outputs * self.bits / 32), num_groups),)
            if self.packed and not self.single_scale
            else ()
        )
        tensors = {
            "weight_scale": StoredTensor(shapes),
            # compressed-tensors packs this tensor since version 0.9. For symmetric weights, older
            # versions write zeros.
            "weight_zero_point": StoredTensor(
                shapes + packed_shapes, ("I8", "I32"), required=not self.symmetric
            ),
            "input_scale": StoredTensor(None, FLOATS, required=False),
            "input_zero_point": StoredTensor(None, ("I8", "I32", "I64", *FLOATS), required=False),
            "weight_g_idx": StoredTensor(((inputs,),), ("I32", "I64"), required=False),
        }
        if not self.packed:
            return {"weight": StoredTensor(((outputs, inputs),), ("I8",)), **tensors}
        tensors["weight_shape"] = StoredTensor(((2,),), ("I64", "I32"))
        return {
            "weight_packed": StoredTensor(((outputs, ceil(inputs * self.bits / 32)),), ("I32",)),
            **tensors,
        }

    def read(self, tensors: Mapping[str, Array], codes: Array) -> QuantizedMatrix:
        _, outputs, inputs, *_ = self.module
        if self.packed:
            if (shape := tensors["weight_shape"].tolist()) != [outputs, inputs]:
                refuse(
                    "weight_shape",
                    f"expected [{outputs}, {inputs}] from config.json, found {shape}",
                )
            matrix.unpack_into(codes, tensors["weight_packed"], self.bits)
        else:
            self._to_unsigned("weight", tensors["weight"], codes)
        index = tensors.get("weight_g_idx")
        order = None if index is None else matrix.input_order("weight_g_idx", index, self.group)
        scale = tensors["weight_scale"]
        if self.single_scale:
            scale = np.broadcast_to(scale.reshape(1, 1), (outputs, 1))
        return to_quantized_matrix(codes, self._zeros(tensors), scale, self.bits, self.group, order)

    def _zeros(self, tensors: Mapping[str, Array]) -> Array | None:
        """Return zero points of unsigned codes, ``[outputs, groups]``.

        ``None`` if all are ``2**(bits - 1)``.
        """
        outputs = self.module.outputs
        if self.symmetric:
            scheme.check_zeros("weight_zero_point", tensors, "as the weights are symmetric")
            return None
        zeros = tensors["weight_zero_point"]
        if self.packed and not self.single_scale and zeros.dtype == np.int32:
            return matrix.unpack(zeros.T, self.bits, outputs).T
        unsigned = np.empty(zeros.shape, UINT8)
        self._to_unsigned("weight_zero_point", zeros, unsigned)
        return (
            np.broadcast_to(unsigned.reshape(1, 1), (outputs, 1)) if self.single_scale else unsigned
        )

    def _to_unsigned(self, name: str, integers: Array, codes: Array) -> None:
        """Write ``integers + 2**(bits - 1)`` to ``codes``, uint8.

        Refuse integers of more than ``bits`` bits.
        """
        middle = 1 << (self.bits - 1)
        low = int(integers.min())
        high = int(integers.max())
        if low < -middle or high >= middle:
            refuse(
                name,
                f"expected {self.bits}-bit integers of {-middle}..{middle - 1}, found "
                f"{low}..{high}",
            )
        # The sum is in 0 .. 255, so uint8 addition, which is modulo 256, needs no temporary array
        # of wider integers.
        np.add(integers.astype(INT8, copy=False).view(UINT8), middle, out=codes)


# Supported formats, each with the type of its weights: ``int``, ``float``, or ``None`` for either.
_FORMATS = {
    "pack-quantized": "int",
    "int-quantized": "int",
    "float-quantized": "float",
    "naive-quantized": None,
}
_REMEDY = f"use a checkpoint in the format {', '.join(_FORMATS)}, or the model's 16-bit weights"
# Options that change the weights or the forward pass in ways that are not implemented here.
_UNSUPPORTED_OPTIONS = ("transform_config", "moe_sparsity_config")

# Names of the scales of a quantized KV cache, such as ``layers.0.self_attn.k_scale``.
_CACHE_SCALES = re.compile(
    r"layers\.\d+\.self_attn\.([qkv]_proj\.output_|[qkv]_)(scale|zero_point)"
)
_CACHE_NOTE = "kv_cache_scheme is ignored: its scales are not used"


class _Rule(NamedTuple):
    """Entry of ``config_groups``."""

    targets: tuple[str, ...]
    format: str = ""
    bits: Bits | None = None  # number of bits per weight; ``None`` if the weights are not quantized
    floats: bool = False  # whether the weights are FP8 numbers, not integer codes
    symmetric: bool = True  # whether codes have a fixed zero point
    # extent of a scale: ``tensor``, ``channel`` (one output), ``group`` or ``block``
    strategy: str = "tensor"
    group: int = -1  # number of inputs per scale if the strategy is ``group``, else -1
    block: tuple[int, int] | None = None  # (outputs, inputs) per scale if the strategy is ``block``
    # whether the checkpoint has fixed scales of activations, which are not used
    has_static_scales: bool = False

    def weight(self, module: LinearModule) -> StoredWeight | None:
        """Return how the module's weight is stored; ``None`` if it is not quantized."""
        if self.bits is None:
            return None
        if self.floats:
            block = (1, self.group) if self.strategy == "group" else self.block
            return FP8Weight(module, block, ("weight_scale",))
        size = matrix.group_size(self.group, module.inputs)
        packed = self.format == "pack-quantized"
        return PackedIntegers(
            module, self.bits, size, packed, self.symmetric, self.strategy == "tensor"
        )


@dataclass(frozen=True)
class CompressedTensors(Scheme):
    """Scheme of a compressed-tensors checkpoint."""

    rules: tuple[_Rule, ...]  # rules in the order of ``config_groups``
    ignore: tuple[str, ...] = ()  # targets of modules that are not quantized
    notes: tuple[str, ...] = ()  # parts of the config that are ignored, for a warning
    ignored: re.Pattern[str] = scheme.MATCHES_NOTHING  # names of tensors that are not loaded

    name = "compressed-tensors"

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> CompressedTensors:
        """Parse a ``quantization_config``."""
        for key in _UNSUPPORTED_OPTIONS:
            if config.get(key):
                scheme.refuse(f"no {key}", config[key], _REMEDY)
        sparsity = config.get("sparsity_config")
        if sparsity and (
            not isinstance(sparsity, dict) or sparsity.get("format") not in (None, "dense")
        ):
            scheme.refuse("no sparse weights in sparsity_config", sparsity, _REMEDY)
        groups = config.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            scheme.refuse("an object of rules as config_groups", groups)
        rules = tuple(_parse_rule(group, config.get("format")) for group in groups.values())
        cache = bool(config.get("kv_cache_scheme"))
        notes = (
            (FP8_NOTE, any(rule.floats for rule in rules)),
            (scheme.STATIC_NOTE, any(rule.has_static_scales for rule in rules)),
            (_CACHE_NOTE, cache),
        )
        ignore = _check_targets(scheme.read_names(config, "ignore"))
        applying = tuple(note for note, holds in notes if holds)
        return cls(rules, ignore, applying, _CACHE_SCALES if cache else scheme.MATCHES_NOTHING)

    def weight(self, module: LinearModule) -> StoredWeight | None:
        # compressed-tensors quantizes the classes Linear and Embedding only; GPT-2's matrices are
        # of the class Conv1D.
        if module.transposed or any(
            _match_rank(target, module.name) is not None for target in self.ignore
        ):
            return None
        # As in the library, of several matches the lowest rank applies, then the first target in
        # alphabetical order, then the last rule: the minimum of (rank, target, -index).
        matches = [
            (rank, target, -index)
            for index, rule in enumerate(self.rules)
            for target in rule.targets
            if (rank := _match_rank(target, module.name)) is not None
        ]
        return self.rules[-min(matches)[2]].weight(module) if matches else None


def _match_rank(target: str, name: str) -> int | None:
    """Return 0 if ``target`` matches by name, 1 by regular expression, 2 by class.

    ``None`` if not at all.
    """
    if target == name:
        return 0
    if target.startswith("re:"):
        return 1 if re.match(target.removeprefix("re:"), name) else None
    # LinearBase is vLLM's class
    return 2 if target in ("Linear", "LinearBase", "LinearModule") else None


def _check_targets(targets: Sequence[str]) -> tuple[str, ...]:
    """Return ``targets``; raise a ConfigError for an invalid regular expression."""
    for target in targets:
        if target.startswith("re:"):
            try:
                re.compile(target.removeprefix("re:"))
            except scheme.EXPRESSION_ERRORS as error:
                scheme.refuse(
                    "regular expressions after re:", target, f"correct the expression ({error})"
                )
    return tuple(targets)


def _parse_rule(group: object, default: object) -> _Rule:
    """Parse an entry of ``config_groups``.

    If the entry names no format, ``default`` is its format.
    """
    if not isinstance(group, dict):
        scheme.refuse(
            "objects in config_groups", group, "write out the fields of the preset scheme"
        )
    targets = _check_targets(scheme.read_names(group, "targets"))
    weights = group.get("weights")
    if group.get("output_activations"):
        scheme.refuse("no output_activations", group["output_activations"], _REMEDY)
    if weights is None:
        return _Rule(targets)
    if not isinstance(weights, dict):
        scheme.refuse("an object as weights", weights)
    weight_format = group.get("format") or default
    if not isinstance(weight_format, str) or weight_format not in _FORMATS:
        scheme.refuse(f"the format {' or '.join(_FORMATS)}", weight_format, _REMEDY)
    inputs = group.get("input_activations")
    has_static_scales = isinstance(inputs, dict) and inputs.get("dynamic") is False
    return _Rule(
        targets,
        weight_format,
        has_static_scales=has_static_scales,
        **_parse_weights(weights, weight_format),
    )


def _parse_weights(weights: Mapping[str, Any], weight_format: str) -> dict[str, Any]:
    """Convert the object ``weights`` of an entry of ``config_groups`` to arguments of :class:`_Rule`."""
    kind = check_choice(
        "quantization_config: type", weights.get("type", "int"), ("int", "float"), error=ConfigError
    )
    if _FORMATS[weight_format] not in (None, kind):
        scheme.refuse(f"weights of the type {_FORMATS[weight_format]} for {weight_format}", kind)
    floats = kind == "float"
    name = f"{kind} weights with num_bits"
    allowed = (8,) if floats else (4, 8)
    bits = scheme.check_bits(name, weights.get("num_bits", 8), allowed, _REMEDY)
    symmetric = check_flag(
        "quantization_config: symmetric", weights.get("symmetric", True), error=ConfigError
    )
    if floats and not symmetric:
        scheme.refuse("symmetric floats", weights, _REMEDY)
    if weights.get("dynamic"):
        scheme.refuse("weights that are not dynamic", weights["dynamic"], _REMEDY)
    size = weights.get("group_size")
    strategy = weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    strategies = ("tensor", "channel", "group", *(("block",) if floats else ()))
    check_choice("quantization_config: strategy", strategy, strategies, error=ConfigError)
    fields = {"bits": bits, "floats": floats, "symmetric": symmetric, "strategy": strategy}
    if strategy == "group":
        fields["group"] = check_integer(
            "quantization_config: group_size", size, 8, error=ConfigError
        )
        if fields["group"] % 8:
            scheme.refuse("a group_size of a multiple of 8", size, _REMEDY)
    if strategy == "block":
        fields["block"] = _parse_block(weights.get("block_structure"))
    return fields


def _parse_block(structure: object) -> tuple[int, int]:
    """Parse the outputs and inputs of a block: ``[128, 64]`` or ``"128x64"`` gives ``(128, 64)``."""
    sizes = structure
    if isinstance(structure, str):
        match = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", structure)
        sizes = [int(size) for size in match.groups()] if match else None
    if not isinstance(sizes, list) or len(sizes) != 2:
        scheme.refuse("two sizes as block_structure", structure, _REMEDY)
    outputs, inputs = (
        check_integer("quantization_config: block_structure", n, 1, error=ConfigError)
        for n in sizes
    )
    return outputs, inputs
