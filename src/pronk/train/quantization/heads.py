"""Quantization of an EAGLE-3 or MTP head to the format compressed-tensors, and back to bfloat16."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pronk import ConfigError, OptionError
from pronk.backends import load_kernels
from pronk.base import (
    ShardEntry,
    check_output_folder,
    convert_write_errors,
    locate_error,
    new_folder,
    refuse,
    write_json,
    write_text,
    write_weights,
)
from pronk.base.arrays import BFLOAT16, FLOAT32, UINT8, Array
from pronk.checkpoint import (
    Checkpoint,
    CheckpointTensor,
    Inventory,
    QuantizedMatrix,
    parse_dtype,
    read_json,
)
from pronk.drafting import (
    ACCEPTANCE_FILE,
    EAGLE_KINDS,
    EagleConfig,
    default_sources,
    plan_head,
)
from pronk.train.quantization.rounding import (
    WHOLE_ROW,
    RoundingRule,
    choose_group,
    pack_codes,
    quantization_config,
)

_EMBEDDING = "embed_tokens.weight"


class QuantizedHead(NamedTuple):
    """Sizes and error of a head that :func:`quantize_head` has written."""

    rule: RoundingRule
    num_bytes: int  # size of the quantized weights in bytes
    source_bytes: int  # size of the weights before quantization in bytes
    error: float  # relative error of the weights: √(sum of squared errors / sum of squared weights)


def find_head_kind(folder: Path) -> str | None:
    """Return ``"eagle3"`` or ``"mtp"`` for the folder of a head, ``None`` for other checkpoints."""
    if not (folder / "config.json").is_file():
        return None
    document = read_json(folder / "config.json", ConfigError)
    kind = document.get("speculators_model_type")
    architectures = [str(name).lower() for name in document.get("architectures") or ()]
    if kind is None and any("eagle3" in name for name in architectures):
        return "eagle3"
    return kind if kind in EAGLE_KINDS else None


def quantize_head(
    folder: Path, out: Path, bits: int, group: int | None, command: str = ""
) -> QuantizedHead:
    """Write a head to the folder ``out``, with all matrices but an embedding in 8 or 4 bits.

    ``folder`` has an unquantized head, in any layout that the drafter reads; ``out`` does not exist
    or is empty. ``group`` is the number of inputs per scale
    (:func:`~pronk.train.quantization.rounding.choose_group`). ``command`` is shown in the card, if
    it is not empty.

    Raises:
        OptionError: ``bits``, ``group`` or ``out`` is invalid.
        CheckpointError: the head is unreadable or already quantized, or ``out`` cannot be written.
    """
    checkpoint, document, config = _open(folder)
    if config.layers.quantization is not None:
        refuse(
            folder,
            "expected plain weights, found a quantized head; "
            "give the bfloat16 head that it was made from",
        )
    # An embedding is not quantized: its rows are read, not multiplied.
    matrices = {
        name
        for name in checkpoint
        if len(checkpoint.shape(name)) == 2 and not name.endswith(_EMBEDDING)
    }
    inputs = sorted({checkpoint.shape(name)[1] for name in matrices})
    checked_bits, size = choose_group(inputs, bits, group)
    rule = RoundingRule(load_kernels(), checked_bits, size, parse_dtype("auto", config.layers))
    tensors = dict[str, Array]()
    errors = 0.0
    squares = 0.0
    for name in checkpoint:
        tensor = checkpoint.tensor(name)
        if name not in matrices:
            tensors[name] = tensor
            continue
        weight = tensor.astype(FLOAT32)
        with locate_error(f"tensor {name}", ValueError):
            matrix = rule.nearest(weight)
        errors += float(np.square(matrix.dequantize() - weight, dtype=np.float64).sum())
        squares += float(np.square(weight, dtype=np.float64).sum())
        tensors |= pack_codes(name.removesuffix("weight"), matrix, rule.dtype)
    num_bytes = sum(each.nbytes for each in tensors.values())
    relative = math.sqrt(errors / squares) if squares else 0.0
    result = QuantizedHead(rule, num_bytes, sum(map(checkpoint.nbytes, checkpoint)), relative)
    document = {**document, "quantization_config": quantization_config(rule, ())}
    _write(folder, out, tensors, document, _note(result, command))
    return result


def dequantize_head(folder: Path, out: Path, command: str = "") -> int:
    """Write a quantized head with bfloat16 weights, for other engines; return the size in bytes.

    Raises:
        OptionError: ``out`` is in use, or the disk is full.
        CheckpointError: the head is unreadable or not quantized, or ``out`` cannot be written.
    """
    _, document, config = _open(folder)
    if config.layers.quantization is None:
        refuse(
            folder,
            "expected a quantized head, found plain weights, which need no export; copy the folder",
        )
    tensors = plain_tensors(folder)
    document.pop("quantization_config", None)
    note = f"\n## Export\n\nWeights in bfloat16.\n\n```\n{command}\n```\n"
    _write(folder, out, tensors, document, note)
    return sum(each.nbytes for each in tensors.values())


def plain_tensors(folder: Path) -> dict[str, Array]:
    """Return all tensors of a head by their names in its layout; quantized ones become bfloat16.

    Raises OptionError if ``folder`` has no head; CheckpointError if it is unreadable.
    """
    checkpoint, _, config = _open(folder)
    if config.layers.quantization is None:
        return {name: checkpoint.tensor(name) for name in checkpoint}
    stored = {config.names.canonical(name): name for name in checkpoint}
    parts = [*plan_head(config, len(config.sources or default_sources(1)), stored)]
    inventory = Inventory(checkpoint, config.layers, parts, config.names)
    tensors = dict[str, Array]()
    for source in (tensor for part in parts for tensor in part.tensors):
        if not inventory.is_quantized(source):
            tensors[source.name] = inventory.tensor(source)
            continue
        weight = inventory.weight(source, np.empty(source.shape, UINT8))
        plain = weight.dequantize() if isinstance(weight, QuantizedMatrix) else weight
        tensors[source.name] = plain.astype(BFLOAT16)
    own = {name: checkpoint.tensor(name) for name in checkpoint if name in {"d2t", "t2d"}}
    # The new names are those in the file, without the suffix of compressed-tensors.
    for name, each in tensors.items():
        stored_name = stored.get(name, stored.get(f"{name}_packed", name))
        own[stored_name.removesuffix("_packed")] = each
    return own


def _open(folder: Path) -> tuple[Checkpoint, dict[str, Any], EagleConfig]:
    """Return the tensors of a head, its ``config.json``, and the parsed configuration."""
    kind = find_head_kind(folder)
    if kind is None:
        refuse(
            folder,
            "expected the folder of an EAGLE-3 or MTP head, found another checkpoint",
            OptionError,
        )
    checkpoint = Checkpoint(folder)
    document = read_json(folder / "config.json", ConfigError)
    return checkpoint, document, EagleConfig.parse(kind, document, tuple(checkpoint))


def _write(
    folder: Path, out: Path, tensors: Mapping[str, Array], document: Mapping[str, Any], note: str
) -> None:
    """Write a head to the folder ``out``.

    Its card is that of the head in ``folder`` with ``note`` at the end, and its acceptance counts
    are those of that head; ``document`` is its ``config.json``.
    """
    entries = [
        ShardEntry(CheckpointTensor(name, each.shape), name, each.dtype)
        for name, each in tensors.items()
    ]
    num_bytes = sum(entry.num_bytes for entry in entries)
    check_output_folder(out, num_bytes)
    with convert_write_errors(out, "the head"), new_folder(out) as partial:
        write_weights(
            partial, entries, lambda tensor: tensors[tensor.name], num_bytes, lambda *_: None
        )
        write_json(partial / "config.json", document, indent=2)
        card = folder / "README.md"
        text = card.read_text(encoding="utf-8") if card.is_file() else f"# {out.name}\n"
        write_text(partial / "README.md", text + note)
        # Rounding the weights hardly changes the acceptance.
        acceptance = folder / ACCEPTANCE_FILE
        if acceptance.is_file():
            write_text(partial / ACCEPTANCE_FILE, acceptance.read_text(encoding="utf-8"))


def _note(result: QuantizedHead, command: str) -> str:
    rule = result.rule
    groups = "whole rows" if rule.group == WHOLE_ROW else f"groups of {rule.group} inputs"
    sizes = f"{result.num_bytes / 1e6:.1f} MB instead of {result.source_bytes / 1e6:.1f}"
    error = f"relative error of the weights {result.error:.2%}"
    text = f"{rule.bits} bits in {groups} (compressed-tensors), {sizes}; {error}."
    shown = f"\n```\n{command}\n```\n" if command else ""
    return f"\n## Quantization\n\n{text}\n{shown}"
