"""Writing a checkpoint as safetensors shards.

Each tensor is built, written and freed before the next one, so that memory use stays small.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pronk.errors import OptionError
from pronk.files.atomic import write_json
from pronk.models.checkpoint import INDEX, SINGLE
from pronk.models.families import CheckpointTensor

__all__ = ["Progress", "ShardEntry", "check_target", "write_weights"]

Progress = Callable[[int, int], None]

_SAFETENSORS = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
}


class ShardEntry(NamedTuple):
    """Tensor to write: its source, its name in the file, its dtype."""

    piece: CheckpointTensor
    name: str
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.piece.shape) * self.dtype.itemsize


def write_weights(
    folder: Path, entries: list[ShardEntry], build: Callable[[CheckpointTensor], Tensor], limit: int, progress: Progress
) -> None:
    """Build and write all entries; a file exceeds ``limit`` bytes only if it holds a single tensor."""
    shards: list[list[ShardEntry]] = [[]]
    for entry in entries:
        if shards[-1] and sum(e.size for e in shards[-1]) + entry.size > limit:
            shards.append([])
        shards[-1].append(entry)
    done, total = 0, sum(entry.size for entry in entries)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        shard.sort(key=lambda entry: -entry.dtype.itemsize)  # largest dtype first keeps every tensor aligned
        weight_map |= {entry.name: file for entry in shard}
        with (folder / file).open("wb") as stream:
            stream.write(_header(shard))
            for entry in shard:
                stream.write(build(entry.piece).view(-1).view(torch.uint8).numpy().data)
                done += entry.size
                progress(done, total)
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)


def _header(shard: Iterable[ShardEntry]) -> bytes:
    """Return the header of a safetensors file: its length, then JSON, padded to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in shard:
        at = [start, start := start + entry.size]
        header[entry.name] = {"dtype": _SAFETENSORS[entry.dtype], "shape": entry.piece.shape, "data_offsets": at}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def check_target(out: Path, size: int) -> None:
    """Raise ``OptionError`` unless ``out`` is new or empty and has ``size`` free bytes."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        msg = f"out: expected a new or empty folder, found {out} in use; choose another name or remove it"
        raise OptionError(msg)
    parent = next(folder for folder in out.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(parent).free
    if free < size:
        msg = f"out: expected {size / 1e9:.2f} GB of free disk space in {parent}, found {free / 1e9:.2f} GB"
        raise OptionError(msg)
