"""Writing a checkpoint tensor by tensor, as safetensors in shards.

A tensor is built when its turn comes and is gone when it is written, so that memory stays small.
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
    """A tensor to write: what it is made of, its name in the file, its dtype."""

    piece: CheckpointTensor
    name: str
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.piece.shape) * self.dtype.itemsize


def write_weights(
    folder: Path, entries: list[ShardEntry], build: Callable[[CheckpointTensor], Tensor], limit: int, progress: Progress
) -> None:
    """Build and write every entry, in files of at most ``limit`` bytes unless one tensor is larger."""
    shards: list[list[ShardEntry]] = [[]]
    for entry in entries:
        if shards[-1] and sum(e.size for e in shards[-1]) + entry.size > limit:
            shards.append([])
        shards[-1].append(entry)
    done, total = 0, sum(entry.size for entry in entries)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        shard.sort(key=lambda entry: -entry.dtype.itemsize)  # whatever the sizes, every tensor is aligned
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
    """Of a safetensors file: its length, then JSON, padded to eight bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in shard:
        at = [start, start := start + entry.size]
        header[entry.name] = {"dtype": _SAFETENSORS[entry.dtype], "shape": entry.piece.shape, "data_offsets": at}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def check_target(out: Path, size: int) -> None:
    """Raise :class:`~pronk.errors.OptionError` unless ``out`` is new or empty and has ``size`` bytes to spare."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        msg = f"out: expected a new or empty folder, found {out} in use; choose another name or remove it"
        raise OptionError(msg)
    there = next(folder for folder in out.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(there).free
    if free < size:
        msg = f"out: expected {size / 1e9:.2f} GB of free disk space in {there}, found {free / 1e9:.2f} GB"
        raise OptionError(msg)
