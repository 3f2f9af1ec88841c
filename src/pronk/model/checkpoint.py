"""The tensors of a model folder: safetensors only, in one file or in shards, memory-mapped.

Nothing is read here except the headers. A tensor is a view of the mapped file: its pages come from disk when they
are touched, and they are the page cache's, not this process's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pronk.errors import CheckpointError

__all__ = ["Checkpoint", "read_json"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_DTYPES = {"F32": 4, "F16": 2, "BF16": 2}


class Checkpoint:
    """Read access to the tensors of a folder, by the names they have there.

    Raises:
        CheckpointError: no safetensors file, a missing, truncated or damaged one, or an index that does not fit.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        for path in _paths(folder):
            file = _open(path)
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if name in self._files:
                    msg = f"{folder}: tensor {name} is in two files; expected one, remove the leftover shards"
                    raise CheckpointError(msg)
                self._files[name] = file

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def itemsize(self, name: str) -> int:
        """Bytes per element.

        Raises:
            CheckpointError: the tensor is not float32, float16 or bfloat16.
        """
        dtype = self._files[name].get_slice(name).get_dtype()
        if dtype not in _DTYPES:
            msg = (
                f"{self.folder}: tensor {name}: expected float32, float16 or bfloat16 (F32, F16, BF16), found {dtype}; "
                "convert the checkpoint to one of them"
            )
            raise CheckpointError(msg)
        return _DTYPES[dtype]

    def tensor(self, name: str) -> Tensor:
        """The tensor as a view of the mapped file, in the file's dtype."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


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
    except ValueError as problem:
        msg = f"{path}: expected JSON, found something else ({problem}); restore the file from its source"
        raise error(msg) from problem
    if not isinstance(document, dict):
        msg = f"{path}: expected a JSON object, found {type(document).__name__}"
        raise error(msg)
    return document


def _paths(folder: Path) -> list[Path]:
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
            msg = f"{folder}: expected the {len(names)} shards that {INDEX} lists, found no {name}; download it again"
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


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        msg = (
            f"{path}: expected a complete safetensors file, found a truncated or damaged one "
            f"({path.stat().st_size} bytes: {error}); download it again"
        )
        raise CheckpointError(msg) from error
