"""Checkpoints in the format compressed-tensors, which LLM Compressor writes.

Each entry of ``config_groups`` in ``config.json`` is a rule for the modules that its ``targets``
match, except modules that ``ignore`` matches. A target is a module name, ``re:`` with a regular
expression, or a class name. A weight is ``scale * (code - zero_point)`` with signed codes. The
codes are stored as int8, or in packed words as ``code + 2**(bits - 1)``.
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
from pronk.checkpoint.formats.floats import FP8_NOTE, NVFP4_GROUP, FP8Weight, NVFP4Weight
from pronk.checkpoint.formats.matrix import Bits, QuantizedMatrix, to_quantized_matrix
from pronk.checkpoint.formats.scheme import FLOATS, LinearModule, Scheme, StoredTensor, StoredWeight


class PackedIntegers(NamedTuple):
    """Weight of a linear module, stored as integer codes, scales and perhaps zero points.

    Packed codes, ``weight_packed``, are int32 ``[outputs, inputs * bits / 32]``, with the first
    code in the lowest bits. Their zero points are int32 ``[outputs * bits / 32, groups]``. If codes
    are not packed, both tensors are int8.

    Attributes:
        module: the linear module.
        bits: number of bits per code.
        group: number of inputs per group.
        packed: whether codes are packed into 32-bit words.
        symmetric: whether the zero points of the signed codes are all 0.
        single_scale: whether the matrix has only one scale, instead of one per output and group.
    """

    module: LinearModule
    bits: Bits
    group: int
    packed: bool
    symmetric: bool
    single_scale: bool

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        outputs = self.module.outputs
        inputs = self.module.inputs
        num_groups = ceil(inputs / self.group)
        scale_shapes: tuple[tuple[int, ...], ...] = ((outputs, num_groups),)
        if self.single_scale:
            scale_shapes = ((), (1,), (1, 1))
        zero_shapes = scale_shapes
        if self.packed and not self.single_scale:
            # compressed-tensors packs the zero points since version 0.9.
            zero_shapes += ((ceil(outputs * self.bits / 32), num_groups),)
        integers = ("I8", "I32")
        tensors = {
            "weight_scale": StoredTensor(scale_shapes),
            # Old versions of compressed-tensors write zeros for symmetric weights, newer ones
            # nothing.
            "weight_zero_point": StoredTensor(zero_shapes, integers, required=not self.symmetric),
            "input_scale": StoredTensor(None, FLOATS, required=False),
            "input_zero_point": StoredTensor(None, (*integers, "I64", *FLOATS), required=False),
            "weight_g_idx": StoredTensor(((inputs,),), ("I32", "I64"), required=False),
        }
        if not self.packed:
            return {"weight": StoredTensor(((outputs, inputs),), ("I8",)), **tensors}
        packed_shape = (outputs, ceil(inputs * self.bits / 32))
        tensors["weight_shape"] = StoredTensor(((2,),), ("I64", "I32"))
        return {"weight_packed": StoredTensor((packed_shape,), ("I32",)), **tensors}

    def read(self, tensors: Mapping[str, Array], codes: Array) -> QuantizedMatrix:
        outputs = self.module.outputs
        inputs = self.module.inputs
        if self.packed:
            shape = tensors["weight_shape"].tolist()
            if shape != [outputs, inputs]:
                problem = f"expected [{outputs}, {inputs}] from config.json, found {shape}"
                refuse("weight_shape", problem)
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
        """Return the zero points of the codes as unsigned integers, uint8 ``[outputs, groups]``.

        ``None`` if all zero points are ``2**(bits - 1)``.
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
        if self.single_scale:
            return np.broadcast_to(unsigned.reshape(1, 1), (outputs, 1))
        return unsigned

    def _to_unsigned(self, name: str, integers: Array, codes: Array) -> None:
        """Write ``integers + 2**(bits - 1)`` to ``codes``, uint8.

        Raises:
            CheckpointError: an integer of the tensor ``name`` has more than ``bits`` bits.
        """
        middle = 1 << (self.bits - 1)
        low = int(integers.min())
        high = int(integers.max())
        if low < -middle or high >= middle:
            expected = f"{self.bits}-bit integers of {-middle}..{middle - 1}"
            refuse(name, f"expected {expected}, found {low}..{high}")
        # The sums are in 0..255. The addition of uint8 numbers, which is modulo 256, is therefore
        # exact, and needs no temporary array of wider integers.
        np.add(integers.astype(INT8, copy=False).view(UINT8), middle, out=codes)


_NVFP4 = "nvfp4-pack-quantized"
# Supported formats, each with the type of its weights: ``int``, ``float``, or ``None`` if it may be
# either.
_FORMATS = {
    "pack-quantized": "int",
    "int-quantized": "int",
    "float-quantized": "float",
    "naive-quantized": None,
    _NVFP4: "float",
}
_REMEDY = f"use a checkpoint in the format {', '.join(_FORMATS)}, or the model's 16-bit weights"
# Values that compressed-tensors gives all weights in the format NVFP4.
_NVFP4_VALUES = {"num_bits": 4, "strategy": "tensor_group", "group_size": NVFP4_GROUP}
# Options that change the weights or the forward pass in ways that pronk does not implement.
_UNSUPPORTED_OPTIONS = ("transform_config", "moe_sparsity_config")

# Pattern of the names of scales for a quantized KV cache, such as ``layers.0.self_attn.k_scale``.
_CACHE_SCALES = re.compile(
    r"layers\.\d+\.self_attn\.([qkv]_proj\.output_|[qkv]_)(scale|zero_point)"
)


class _Rule(NamedTuple):
    """An entry of ``config_groups``: how the weights of some modules are stored.

    Attributes:
        targets: the modules, by name, regular expression or class name.
        format: key of ``_FORMATS``.
        bits: number of bits per weight; ``None`` if the weights are not quantized.
        floats: whether the weights are floats (FP8 or NVFP4) instead of integer codes.
        symmetric: whether the zero points of the signed codes are all 0.
        strategy: extent of a scale: ``tensor``, ``channel`` (one output), ``group`` or ``block``;
            ``tensor_group``: two levels, of a group and of the tensor.
        group: number of inputs per scale if the strategy is ``group`` or ``tensor_group``, else -1.
        block: number of outputs and of inputs per scale if the strategy is ``block``.
        has_static_scales: whether the checkpoint has fixed scales of activations; they are not
            used.
    """

    targets: tuple[str, ...]
    format: str = ""
    bits: Bits | None = None
    floats: bool = False
    symmetric: bool = True
    strategy: str = "tensor"
    group: int = -1
    block: tuple[int, int] | None = None
    has_static_scales: bool = False

    def weight(self, module: LinearModule) -> StoredWeight | None:
        """Return how the checkpoint stores the module's weight; ``None`` if it is not quantized."""
        if self.bits is None:
            return None
        if self.format == _NVFP4:
            names = ("weight_packed", "weight_global_scale", "input_global_scale")
            return NVFP4Weight(module, *names, divides=True)
        if self.floats:
            block = (1, self.group) if self.strategy == "group" else self.block
            return FP8Weight(module, block, ("weight_scale",))
        size = matrix.group_size(self.group, module.inputs)
        packed = self.format == "pack-quantized"
        single_scale = self.strategy == "tensor"
        return PackedIntegers(module, self.bits, size, packed, self.symmetric, single_scale)


@dataclass(frozen=True)
class CompressedTensors(Scheme):
    """Quantization of a compressed-tensors checkpoint.

    Attributes:
        rules: the entries of ``config_groups``, in their order.
        ignore: targets of modules that are not quantized.
        notes: warnings about properties of the checkpoint that are ignored or converted.
        ignored: names of tensors that are not loaded.
    """

    rules: tuple[_Rule, ...]
    ignore: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ignored: re.Pattern[str] = scheme.MATCHES_NOTHING

    name = "compressed-tensors"

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> CompressedTensors:
        """Return the scheme that a ``quantization_config`` of this format describes."""
        for key in _UNSUPPORTED_OPTIONS:
            if config.get(key):
                scheme.refuse(f"no {key}", config[key], _REMEDY)
        sparsity = config.get("sparsity_config")
        if sparsity:
            is_dense = isinstance(sparsity, dict) and sparsity.get("format") in (None, "dense")
            if not is_dense:
                scheme.refuse("no sparse weights in sparsity_config", sparsity, _REMEDY)
        groups = config.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            scheme.refuse("an object of rules as config_groups", groups)
        default_format = config.get("format")
        rules = tuple(_parse_rule(group, default_format) for group in groups.values())
        ignore = _check_targets(scheme.read_names(config, "ignore"))
        notes = []
        if any(rule.floats and rule.bits == 8 for rule in rules):
            notes.append(FP8_NOTE)
        if any(rule.has_static_scales for rule in rules):
            notes.append(scheme.STATIC_NOTE)
        ignored = scheme.MATCHES_NOTHING
        if config.get("kv_cache_scheme"):
            notes.append(scheme.CACHE_NOTE)
            ignored = _CACHE_SCALES
        return cls(rules, ignore, tuple(notes), ignored)

    def weight(self, module: LinearModule) -> StoredWeight | None:
        # compressed-tensors quantizes only the classes Linear and Embedding. A transposed matrix
        # is of GPT-2's class Conv1D, so it is not quantized.
        if module.transposed:
            return None
        if any(_match_rank(target, module.name) is not None for target in self.ignore):
            return None
        # If several targets match, compressed-tensors uses the rule whose target has the lowest
        # rank; among these, the first target in alphabetical order; among these, the last rule.
        # This is the minimum of (rank, target, -index).
        matches = []
        for index, rule in enumerate(self.rules):
            for target in rule.targets:
                rank = _match_rank(target, module.name)
                if rank is not None:
                    matches.append((rank, target, -index))
        if not matches:
            return None
        _, _, negative_index = min(matches)
        return self.rules[-negative_index].weight(module)


def _match_rank(target: str, name: str) -> int | None:
    """Return how a target matches a module name, as a rank; ``None`` if it does not match.

    0: equal names; 1: a regular expression that matches; 2: the name of a class of linear modules.
    The rule with the lowest rank applies.
    """
    if target == name:
        return 0
    if target.startswith("re:"):
        return 1 if re.match(target.removeprefix("re:"), name) else None
    if target in ("Linear", "LinearBase", "LinearModule"):  # LinearBase is a class of vLLM
        return 2
    return None


def _check_targets(targets: Sequence[str]) -> tuple[str, ...]:
    """Return ``targets``; raise a ConfigError for an invalid regular expression."""
    for target in targets:
        if target.startswith("re:"):
            try:
                re.compile(target.removeprefix("re:"))
            except scheme.EXPRESSION_ERRORS as error:
                remedy = f"correct the expression ({error})"
                scheme.refuse("regular expressions after re:", target, remedy)
    return tuple(targets)


def _parse_rule(group: object, default: object) -> _Rule:
    """Parse an entry of ``config_groups``.

    ``default`` is the format of the whole checkpoint, for an entry that names none.
    """
    if not isinstance(group, dict):
        remedy = "write out the fields of the preset scheme"
        scheme.refuse("objects in config_groups", group, remedy)
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
    # "local": the scales of groups are dynamic, that of the tensor is static
    has_static_scales = isinstance(inputs, dict) and inputs.get("dynamic") in (False, "local")
    fields = _parse_weights(weights, weight_format)
    return _Rule(targets, weight_format, has_static_scales=has_static_scales, **fields)


def _parse_weights(weights: Mapping[str, Any], weight_format: str) -> dict[str, Any]:
    """Return the fields of a :class:`_Rule` that the object ``weights`` of an entry determines.

    ``weight_format`` is the format of the entry, a key of ``_FORMATS``.
    """
    kind = check_choice(
        "quantization_config: type", weights.get("type", "int"), ("int", "float"), error=ConfigError
    )
    if _FORMATS[weight_format] not in (None, kind):
        scheme.refuse(f"weights of the type {_FORMATS[weight_format]} for {weight_format}", kind)
    floats = kind == "float"
    symmetric = check_flag(
        "quantization_config: symmetric", weights.get("symmetric", True), error=ConfigError
    )
    if floats and not symmetric:
        scheme.refuse("symmetric floats", weights, _REMEDY)
    if weights.get("dynamic"):
        scheme.refuse("weights that are not dynamic", weights["dynamic"], _REMEDY)
    if weight_format == _NVFP4:
        return _parse_nvfp4(weights)
    name = f"{kind} weights with num_bits"
    allowed = (8,) if floats else (4, 8)
    bits = scheme.check_bits(name, weights.get("num_bits", 8), allowed, _REMEDY)
    scales = _parse_strategy(weights, floats=floats)
    return {"bits": bits, "floats": floats, "symmetric": symmetric, **scales}


def _parse_nvfp4(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a :class:`_Rule` for weights in the format NVFP4."""
    for key, value in _NVFP4_VALUES.items():
        if weights.get(key) != value:
            scheme.refuse(f"{key} {value} for {_NVFP4}", weights.get(key), _REMEDY)
    return {"bits": 4, "floats": True, "strategy": "tensor_group", "group": NVFP4_GROUP}


def _parse_strategy(weights: Mapping[str, Any], *, floats: bool) -> dict[str, Any]:
    """Return the fields of a :class:`_Rule` that say which weights share a scale."""
    size = weights.get("group_size")
    strategy = weights.get("strategy")
    if strategy is None and size is None:
        strategy = "tensor"
    elif strategy is None:
        strategy = "channel" if size == -1 else "group"
    strategies = ["tensor", "channel", "group"]
    if floats:
        strategies.append("block")
    check_choice("quantization_config: strategy", strategy, strategies, error=ConfigError)
    fields: dict[str, Any] = {"strategy": strategy}
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
    """Return the outputs and inputs of a block: (128, 64) for ``[128, 64]`` or ``"128x64"``."""
    sizes = structure
    if isinstance(structure, str):
        match = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", structure)
        sizes = [int(size) for size in match.groups()] if match else None
    if not isinstance(sizes, list) or len(sizes) != 2:
        scheme.refuse("two sizes as block_structure", structure, _REMEDY)
    name = "quantization_config: block_structure"
    outputs = check_integer(name, sizes[0], 1, error=ConfigError)
    inputs = check_integer(name, sizes[1], 1, error=ConfigError)
    return outputs, inputs
