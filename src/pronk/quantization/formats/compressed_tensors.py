"""Checkpoints in the format compressed-tensors, as LLM Compressor writes them.

Each of the ``config_groups`` in ``config.json`` is a rule for the modules that its ``targets`` match and ``ignore``
does not; a target is a module name, ``re:`` and a regular expression, or a class. A weight is
``scale * (code - zero_point)`` with signed codes. Packed codes are stored with an offset of ``2**(bits - 1)``, int8
codes without.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pronk.checks import check_choice, check_flag, check_integer
from pronk.errors import ConfigError
from pronk.quantization.formats.fp8 import FP8_NOTE, FP8Weight
from pronk.quantization.formats.integers import PackedIntegers
from pronk.quantization.formats.matrix import Bits
from pronk.quantization.formats.scheme import (
    NO_EXPRESSION,
    NOTHING,
    STATIC_NOTE,
    LinearModule,
    StoredWeight,
    check_bits,
    listed,
    refuse,
)

__all__ = ["CompressedTensors"]

_FORMATS = {"pack-quantized": "int", "int-quantized": "int", "float-quantized": "float", "naive-quantized": None}
_INSTEAD = f"use a checkpoint in the format {', '.join(_FORMATS)}, or the model's 16-bit weights"
# Options that change the forward pass or the weights in ways that are not implemented.
_REFUSED = ("transform_config", "moe_sparsity_config")

# Scales of a quantized KV cache, stored beside the projections or at their outputs.
_CACHE_SCALES = re.compile(r"layers\.\d+\.self_attn\.([qkv]_proj\.output_|[qkv]_)(scale|zero_point)")
_CACHE_NOTE = "kv_cache_scheme is ignored: the KV cache is not quantized"


@dataclass(frozen=True)
class _Rule:
    """One of the ``config_groups``; ``bits`` is ``None`` if the weights are not quantized."""

    targets: tuple[str, ...]
    format: str = ""
    bits: Bits | None = None
    floats: bool = False
    symmetric: bool = True
    strategy: str = "tensor"
    group: int = -1
    block: tuple[int, int] | None = None
    static: bool = False

    def weight(self, module: LinearModule) -> StoredWeight | None:
        if self.bits is None:
            return None
        if self.floats:
            block = (1, self.group) if self.strategy == "group" else self.block
            return FP8Weight(module, block, ("weight_scale",))
        size = self.group if self.strategy == "group" else -1
        packed = self.format == "pack-quantized"
        return PackedIntegers(module, self.bits, size, packed, self.symmetric, self.strategy == "tensor")


@dataclass(frozen=True)
class CompressedTensors:
    """Scheme of a compressed-tensors checkpoint.

    Attributes:
        rules: rules in the order of ``config_groups``.
        ignore: targets of modules that are not quantized.
        notes: deviations from ``config.json``, one line each.
        ignored: pattern of the names of unused tensors.
    """

    rules: tuple[_Rule, ...]
    ignore: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ignored: re.Pattern[str] = NOTHING

    name = "compressed-tensors"

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> CompressedTensors:
        """Parse a ``quantization_config``."""
        for key in _REFUSED:
            if config.get(key):
                refuse(f"no {key}", config[key], _INSTEAD)
        sparsity = config.get("sparsity_config")
        if sparsity and (not isinstance(sparsity, dict) or sparsity.get("format") not in (None, "dense")):
            refuse("no sparse weights in sparsity_config", sparsity, _INSTEAD)
        groups = config.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            refuse("an object of rules as config_groups", groups, "restore config.json from its source")
        rules = tuple(_rule(group, config.get("format")) for group in groups.values())
        cache = bool(config.get("kv_cache_scheme"))
        notes = (
            (FP8_NOTE, any(rule.floats for rule in rules)),
            (STATIC_NOTE, any(rule.static for rule in rules)),
            (_CACHE_NOTE, cache),
        )
        return cls(
            rules,
            _targets(listed(config, "ignore")),
            tuple(note for note, holds in notes if holds),
            _CACHE_SCALES if cache else NOTHING,
        )

    def weight(self, module: LinearModule) -> StoredWeight | None:
        """Implement :meth:`Scheme.weight <pronk.quantization.formats.scheme.Scheme.weight>`."""
        # compressed-tensors matches the classes Linear and Embedding only; GPT-2's matrices are of the class Conv1D.
        if module.transposed or any(_rank(target, module.name) is not None for target in self.ignore):
            return None
        matches = [
            (rank, target, -number)  # closest match; ties go to the first target by name, then to the last rule
            for number, rule in enumerate(self.rules)
            for target in rule.targets
            if (rank := _rank(target, module.name)) is not None
        ]
        return self.rules[-min(matches)[2]].weight(module) if matches else None


def _rank(target: str, name: str) -> int | None:
    """Return 0 for a match by name, 1 by regular expression, 2 by class, ``None`` for no match."""
    if target == name:
        return 0
    if target.startswith("re:"):
        return 1 if re.match(target.removeprefix("re:"), name) else None
    return 2 if target in ("Linear", "LinearBase", "LinearModule") else None


def _targets(targets: Sequence[str]) -> tuple[str, ...]:
    for target in targets:
        if target.startswith("re:"):
            try:
                re.compile(target.removeprefix("re:"))
            except NO_EXPRESSION as error:
                refuse("regular expressions after re:", target, f"correct the expression ({error})")
    return tuple(targets)


def _rule(group: object, default: object) -> _Rule:
    if not isinstance(group, dict):
        refuse("objects in config_groups", group, "write out the fields of the preset scheme")
    targets = _targets(listed(group, "targets"))
    weights = group.get("weights")
    if group.get("output_activations"):
        refuse("no output_activations", group["output_activations"], _INSTEAD)
    if weights is None:
        return _Rule(targets)
    if not isinstance(weights, dict):
        refuse("an object as weights", weights, "restore config.json from its source")
    layout = group.get("format") or default
    if not isinstance(layout, str) or layout not in _FORMATS:
        refuse(f"the format {' or '.join(_FORMATS)}", layout, _INSTEAD)
    inputs = group.get("input_activations")
    static = isinstance(inputs, dict) and inputs.get("dynamic") is False
    return _Rule(targets, layout, static=static, **_weights(weights, layout))


def _weights(weights: Mapping[str, Any], layout: str) -> dict[str, Any]:
    """Parse the ``weights`` of a rule into arguments of :class:`_Rule`."""
    kind = check_choice("quantization_config: type", weights.get("type", "int"), ("int", "float"), error=ConfigError)
    if _FORMATS[layout] not in (None, kind):
        refuse(f"weights of the type {_FORMATS[layout]} for {layout}", kind, "restore config.json from its source")
    floats = kind == "float"
    bits = check_bits(f"{kind} weights with num_bits", weights.get("num_bits", 8), (8,) if floats else (4, 8), _INSTEAD)
    symmetric = check_flag("quantization_config: symmetric", weights.get("symmetric", True), error=ConfigError)
    if floats and not symmetric:
        refuse("symmetric floats", weights, _INSTEAD)
    if weights.get("dynamic"):
        refuse("weights that are not dynamic", weights["dynamic"], _INSTEAD)
    size, strategy = weights.get("group_size"), weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    known = ("tensor", "channel", "group", *(("block",) if floats else ()))
    check_choice("quantization_config: strategy", strategy, known, error=ConfigError)
    made = {"bits": bits, "floats": floats, "symmetric": symmetric, "strategy": strategy}
    if strategy == "group":
        made["group"] = check_integer("quantization_config: group_size", size, 8, error=ConfigError)
        if made["group"] % 8:
            refuse("a group_size of a multiple of 8", size, _INSTEAD)
    if strategy == "block":
        made["block"] = _block(weights.get("block_structure"))
    return made


def _block(structure: object) -> tuple[int, int]:
    """Parse ``[128, 128]``, or ``"128x128"`` of older versions, as outputs and inputs of a block."""
    found = structure
    if isinstance(structure, str):
        text = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", structure)
        found = [int(size) for size in text.groups()] if text else None
    if not isinstance(found, list) or len(found) != 2:
        refuse("two sizes as block_structure", structure, _INSTEAD)
    high, wide = (check_integer("quantization_config: block_structure", n, 1, error=ConfigError) for n in found)
    return high, wide
