"""The tensors of a model folder: safetensors only, in one file or in shards, memory-mapped.

Nothing is read here except the headers. A tensor is a view of the mapped file, whose pages come from disk when they are
touched, and can be given back at any time.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pronk.errors import CheckpointError
from pronk.quantization.gguf.checkpoint import GgufCheckpoint, is_gguf

__all__ = ["AnyCheckpoint", "Checkpoint", "open_checkpoint", "read_json"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_FLOATS = ("F32", "F16", "BF16")
# The others are parts of quantized weights.
_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}


@dataclass(frozen=True)
class _Entry:
    """Where a tensor is: ``start`` and ``size`` in bytes within the mapped file."""

    file: mmap.mmap
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


class Checkpoint:
    """Read access to the tensors of a folder, by the names they have there.

    Attributes:
        says: what says which tensors there are.

    Raises:
        CheckpointError: no safetensors file, a missing, truncated or damaged one, or an index that does not fit.
    """

    says = "config.json"

    def __init__(self, folder: Path, again: str = "download it again") -> None:
        """``again`` is what to do about files that are not whole."""
        self.folder = folder
        self._entries: dict[str, _Entry] = {}
        for path in _paths(folder, again):
            entries = _map_file(path, again)
            for name in entries.keys() & self._entries.keys():
                msg = f"{folder}: expected tensor {name} in one file, found it in two; remove the leftover shards"
                raise CheckpointError(msg)
            self._entries |= entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._entries[name].shape

    def nbytes(self, name: str) -> int:
        """Size of a tensor in the file."""
        return self._entries[name].size

    def check_dtype(self, name: str, dtypes: Sequence[str] = _FLOATS) -> None:
        """Raise a :class:`CheckpointError` unless the tensor is of one of the types, as safetensors calls them."""
        found = self._entries[name].dtype
        if found in dtypes:
            return
        if tuple(dtypes) == _FLOATS:
            msg = (
                f"{self.folder}: tensor {name}: expected float32, float16 or bfloat16 ({', '.join(_FLOATS)}), "
                f"found {found}; convert the checkpoint to one of them"
            )
        else:
            msg = (
                f"{self.folder}: tensor {name}: expected the type {' or '.join(dtypes)}, found {found}; check that "
                "quantization_config and the weights belong together"
            )
        raise CheckpointError(msg)

    def tensor(self, name: str) -> Tensor:
        """The tensor as a view of the mapped file, in the file's dtype; it keeps the file mapped."""
        entry = self._entries[name]
        count = math.prod(entry.shape)
        if count == 0:
            return torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
        flat = torch.frombuffer(entry.file, dtype=_DTYPES[entry.dtype], count=count, offset=entry.start)
        return flat.view(entry.shape)

    def release(self) -> None:
        """Give back the memory into which tensors were read so far; a later access reads them again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for file in {id(entry.file): entry.file for entry in self._entries.values()}.values():
                file.madvise(mmap.MADV_DONTNEED)


AnyCheckpoint = Checkpoint | GgufCheckpoint


def open_checkpoint(path: Path) -> AnyCheckpoint:
    """The tensors of a model folder, or of a GGUF file.

    Raises:
        CheckpointError: see :class:`Checkpoint` and :class:`~pronk.quantization.gguf.checkpoint.GgufCheckpoint`.
    """
    return GgufCheckpoint(path) if is_gguf(path) else Checkpoint(path)


def read_json(path: Path, error: type[CheckpointError] = CheckpointError) -> dict[str, Any]:
    """A JSON file that must hold an object.

    Raises:
        CheckpointError: (or the given subclass) it cannot be read, or is something else.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        msg = f"{path}: expected a readable file, found {problem.strerror or problem}"
        raise error(msg) from problem
    except (ValueError, RecursionError) as problem:
        msg = f"{path}: expected JSON, found something else ({problem}); restore the file from its source"
        raise error(msg) from problem
    if not isinstance(document, dict):
        msg = f"{path}: expected a JSON object, found {type(document).__name__}"
        raise error(msg)
    return document


def _paths(folder: Path, again: str) -> list[Path]:
    """The safetensors files of a folder; the single file wins over an index, as in transformers."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        raise CheckpointError(_no_weights(folder))
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        msg = f"{folder / INDEX}: expected an object 'weight_map' of file names, found {type(weight_map).__name__}"
        raise CheckpointError(msg)
    names = sorted(set(weight_map.values()))
    for name in names:
        # A name with a folder in it could point anywhere.
        if Path(name).name != name or not (folder / name).is_file():
            msg = f"{folder}: expected the {len(names)} shards that {INDEX} lists, found no {name}; {again}"
            raise CheckpointError(msg)
    return [folder / name for name in names]


def _no_weights(folder: Path) -> str:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder}: expected {SINGLE}, found {pickles[0]}; pickle files can run code and are not loaded: "
            "convert the checkpoint to safetensors"
        )
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    listed = f"only {', '.join(found[:3])}" if found else "no safetensors file"
    return f"{folder}: expected {SINGLE} or {INDEX}, found {listed}"


def _map_file(path: Path, again: str) -> dict[str, _Entry]:
    """The tensors of one file: eight bytes of header length, a JSON header, then the data."""
    try:
        # Checks the header: offsets in order and within the file, sizes that follow from shapes and dtypes.
        with safe_open(path, framework="pt"):
            pass
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
            # A private mapping: writing to a weight changes the memory, never the file.
            file = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    except (SafetensorError, OSError, ValueError) as error:
        msg = (
            f"{path}: expected a complete safetensors file, found a truncated or damaged one "
            f"({path.stat().st_size} bytes: {error}); {again}"
        )
        raise CheckpointError(msg) from error
    header.pop("__metadata__", None)
    return {
        name: _Entry(file, at["dtype"], tuple(at["shape"]), 8 + length + begin, end - begin)
        for name, at in header.items()
        for begin, end in (at["data_offsets"],)
    }
