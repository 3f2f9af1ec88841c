"""Memory-mapped access to the safetensors files of a model folder.

Opening a checkpoint reads only the headers of its files. A tensor is a view of the mapped file: the
operating system loads its pages on access, and :meth:`Checkpoint.release` frees them.
"""

from __future__ import annotations

import codecs
import json
import math
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from safetensors import SafetensorError, safe_open

from pronk.base.arrays import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, INT8, UINT8, Array
from pronk.base.errors import (
    CheckpointError,
    describe_error,
    describe_json_error,
    describe_reason,
    refuse,
)
from pronk.base.files.regular import is_file, read_input
from pronk.checkpoint.formats.scheme import FLOATS
from pronk.checkpoint.gguf.checkpoint import GgufCheckpoint, is_gguf

SINGLE = "model.safetensors"  # file name if one file has all tensors
# file name of the index, which lists the files if there are several
INDEX = "model.safetensors.index.json"
# Maximum bytes of a JSON file or header. Parsed values need up to 30 times as much memory. The
# largest known index of a model has 5 MB.
MAX_JSON_BYTES = 1 << 24
# Maximum nesting of a JSON file. Recursive functions, such as repr, fail at a depth of about 1000.
_MAX_NESTING = 100
_PICKLE_FILES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# Supported data types by their names in safetensors. Unquantized weights may have those in FLOATS.
DTYPES = {
    "F32": FLOAT32,
    "F16": FLOAT16,
    "BF16": BFLOAT16,
    "F8_E4M3": FLOAT8,
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": INT8,
    "U8": UINT8,
    "BOOL": np.dtype(np.bool_),
}


class _MappedTensor(NamedTuple):
    """A tensor in a mapped file.

    Attributes:
        file: the mapped file.
        dtype: key of ``DTYPES``.
        shape: shape of the tensor.
        start: position of the first byte in the file.
        size: number of bytes.
    """

    file: mmap.mmap
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


class Checkpoint:
    """The tensors of a model folder, by name."""

    config_source = "config.json"  # origin of the expected shapes, named in error messages

    def __init__(
        self, folder: Path, remedy: str = "download it again", files: Sequence[Path] | None = None
    ) -> None:
        """Map the safetensors files of a folder.

        Args:
            folder: the model folder.
            remedy: end of an error message about an incomplete file.
            files: the safetensors files; by default ``model.safetensors`` or those of the index.

        Raises:
            CheckpointError: a file is missing, truncated or damaged, or contradicts the index.
        """
        self.folder = folder
        self._entries: dict[str, _MappedTensor] = {}
        for path in files or _safetensors_files(folder, remedy):
            entries = _map_file(path, remedy)
            for name in entries.keys() & self._entries.keys():
                problem = f"expected tensor {name} in one file, found it in two"
                refuse(folder, f"{problem}; remove the leftover shards")
            self._entries |= entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._entries[name].shape

    def nbytes(self, name: str) -> int:
        """Return the size of a tensor in the file, in bytes."""
        return self._entries[name].size

    def type(self, name: str) -> str:
        """Return the type of a tensor, such as ``BF16`` or ``I32``."""
        return self._entries[name].dtype

    def check_dtype(self, name: str, dtypes: Sequence[str] = FLOATS) -> None:
        """Raise a CheckpointError if the dtype of a tensor is not in ``dtypes``.

        ``dtypes`` are names in safetensors, by default the types of unquantized weights.
        """
        found = self._entries[name].dtype
        if found in dtypes:
            return
        if tuple(dtypes) == FLOATS:
            expected = f"float32, float16 or bfloat16 ({', '.join(dtypes)})"
            remedy = "convert the checkpoint to one of them"
        else:
            expected = f"the type {' or '.join(dtypes)}"
            remedy = "check that quantization_config and the weights belong together"
        refuse(self.folder, f"tensor {name}: expected {expected}, found {found}; {remedy}")

    def tensor(self, name: str) -> Array:
        """Return a tensor as a view of the mapped file, in its stored dtype.

        The view keeps the file mapped.
        """
        entry = self._entries[name]
        flat = np.frombuffer(entry.file, DTYPES[entry.dtype], math.prod(entry.shape), entry.start)
        return flat.reshape(entry.shape)

    def release(self) -> None:
        """Free the memory of all pages of the files that were read.

        A later access reads a page again.
        """
        if hasattr(mmap, "MADV_DONTNEED"):
            files = {id(entry.file): entry.file for entry in self._entries.values()}
            for file in files.values():
                file.madvise(mmap.MADV_DONTNEED)


AnyCheckpoint = Checkpoint | GgufCheckpoint


def open_checkpoint(path: Path) -> AnyCheckpoint:
    """Open a model folder or a GGUF file.

    Raises:
        CheckpointError: the folder or file is damaged or incomplete.
    """
    return GgufCheckpoint(path) if is_gguf(path) else Checkpoint(path)


def read_json(path: Path, error_type: type[CheckpointError] = CheckpointError) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        error_type: the file cannot be read, or is no JSON object, or has more than 16 MiB or 100
            nested brackets.
    """
    document = _read_document(path, error_type)
    if not isinstance(document, dict):
        refuse(path, f"expected a JSON object, found {type(document).__name__}", error_type)
    return document


def read_json_list(path: Path, error_type: type[CheckpointError] = CheckpointError) -> list[Any]:
    """Return the JSON list in a file; errors as in :func:`read_json`."""
    document = _read_document(path, error_type)
    if not isinstance(document, list):
        refuse(path, f"expected a JSON list, found {type(document).__name__}", error_type)
    return document


def _read_document(path: Path, error_type: type[CheckpointError]) -> Any:
    """Return the JSON value in a file, within the limits of :func:`read_json`."""
    remedy = "restore the file from its source"
    try:
        data = read_input(path, MAX_JSON_BYTES + 1)
        if len(data) > MAX_JSON_BYTES:
            expected = f"expected at most {MAX_JSON_BYTES >> 20} MiB of JSON"
            refuse(path, f"{expected}, found more; {remedy}", error_type)
        document = json.loads(data.removeprefix(codecs.BOM_UTF8).decode())
    except OSError as problem:
        msg = f"{path}: expected a readable file, found {describe_reason(problem)}"
        raise error_type(msg) from problem
    except (ValueError, RecursionError, MemoryError) as problem:
        msg = f"{path}: expected JSON, found {describe_json_error(problem)}; {remedy}"
        raise error_type(msg) from problem
    if _is_deeper(document, _MAX_NESTING):
        expected = f"expected at most {_MAX_NESTING} nested brackets"
        refuse(path, f"{expected}, found more; {remedy}", error_type)
    return document


def _is_deeper(document: object, limit: int) -> bool:
    """Return whether objects and lists of a JSON document are nested deeper than ``limit``."""
    level: list[Any] = [document]  # the values at one depth
    for _ in range(limit + 1):
        next_level: list[Any] = []
        has_container = False
        for value in level:
            if isinstance(value, dict | list):
                has_container = True
                next_level += value.values() if isinstance(value, dict) else value
        if not has_container:
            return False
        level = next_level
    return True


def _safetensors_files(folder: Path, remedy: str) -> list[Path]:
    """Return the safetensors files of a model folder.

    If a folder has ``model.safetensors``, an index is ignored, as in transformers.
    """
    if is_file(folder / SINGLE):
        return [folder / SINGLE]
    if not is_file(folder / INDEX):
        _refuse_missing_weights(folder)
    weight_map = read_json(folder / INDEX).get("weight_map")
    shards: list[Any] = list(weight_map.values()) if isinstance(weight_map, dict) else [None]
    if not all(isinstance(name, str) for name in shards):
        found = type(weight_map).__name__
        refuse(folder / INDEX, f"expected an object 'weight_map' of file names, found {found}")
    names = sorted(set(shards))
    for name in names:
        # A name with a path separator could lead out of the folder.
        if Path(name).name != name or not is_file(folder / name):
            expected = f"expected the {len(names)} shards that {INDEX} lists"
            refuse(folder, f"{expected}, found no {name:.80}; {remedy}")
    return [folder / name for name in names]


def _refuse_missing_weights(folder: Path) -> NoReturn:
    """Raise a CheckpointError about a folder that has no safetensors files of a model."""
    pickles = sorted(path.name for pattern in _PICKLE_FILES for path in folder.glob(pattern))
    if pickles:
        remedy = (
            "pickle files can run code and are not loaded: convert the checkpoint to safetensors"
        )
        refuse(folder, f"expected {SINGLE}, found {pickles[0]}; {remedy}")
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    listed = f"only {', '.join(found[:3])}" if found else "no safetensors file"
    refuse(folder, f"expected {SINGLE} or {INDEX}, found {listed}")


def _check_header_size(path: Path) -> None:
    """Raise a ValueError if the header of a safetensors file exceeds ``MAX_JSON_BYTES``."""
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
    if size > MAX_JSON_BYTES:
        msg = f"a header of {size} bytes, of which at most {MAX_JSON_BYTES >> 20} MiB are read"
        raise ValueError(msg)


def _map_file(path: Path, remedy: str) -> dict[str, _MappedTensor]:
    """Map a safetensors file, and return its tensors by name.

    The file consists of 8 bytes with the length of the header, the JSON header, and the tensors.
    """
    try:
        _check_header_size(path)
        # safe_open checks the header: all offsets are in the file, and the sizes match shapes and
        # dtypes.
        with safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
            # Copy on write: a change of a weight in memory does not change the file.
            file = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    except (SafetensorError, OSError, ValueError, MemoryError) as error:
        found = f"a truncated or damaged one ({path.stat().st_size} bytes: {describe_error(error)})"
        msg = f"{path}: expected a complete safetensors file, found {found}; {remedy}"
        raise CheckpointError(msg) from error
    header.pop("__metadata__", None)
    first = 8 + length  # offset of the first tensor in the file
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        tensors[name] = _MappedTensor(file, entry["dtype"], shape, first + begin, end - begin)
    return tensors
