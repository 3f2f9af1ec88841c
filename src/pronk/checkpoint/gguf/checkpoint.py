"""Tensors of a GGUF model, in one file or in the parts that ``llama-gguf-split`` writes."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from pronk.base.arrays import BFLOAT16, FLOAT16, FLOAT32, UINT8, Array
from pronk.base.errors import locate_error, refuse
from pronk.base.files.regular import is_file
from pronk.checkpoint.formats.matrix import QuantizedMatrix
from pronk.checkpoint.gguf.blocks import BLOCKS, PACKED_BLOCKS, BlockMatrix, BlockRows, unpack
from pronk.checkpoint.gguf.reader import GgufFile, TensorInfo
from pronk.checkpoint.gguf.vocabulary import Vocabulary
from pronk.checkpoint.rows import HeadRows

_DTYPES = {"F32": FLOAT32, "F16": FLOAT16, "BF16": BFLOAT16}
# Pattern of the file name of a part of a model, such as model-00001-of-00003.gguf.
_PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


def is_gguf(path: Path) -> bool:
    """Return whether a path is a file with the suffix ``.gguf``."""
    return path.suffix.lower() == ".gguf" and is_file(path)


def file_identity(path: Path, state: os.stat_result | None = None) -> tuple[str, int, int, int]:
    """Return path, inode number, size (bytes) and time of modification (ns) of a file.

    Together they show whether the file was replaced or changed. ``state`` is the result of an
    earlier ``stat`` of the file; by default the file is looked up now.
    """
    state = path.stat() if state is None else state
    return str(path), state.st_ino, state.st_size, state.st_mtime_ns


class GgufCheckpoint:
    """The tensors of a GGUF model, by name; see also :class:`pronk.checkpoint.tensors.Checkpoint`.

    A tensor ``[experts, outputs, inputs]`` has the matrices of all experts; the argument ``expert``
    of a method is the number of one of them. The argument ``rows`` selects the rows of a matrix;
    ``None``: all, in the order of the file. Opening a model reads the headers of its files only.

    Raises:
        CheckpointError: a part of the model is damaged or missing, or the path is that of a later
            part.
    """

    config_source = "its metadata"  # origin of the model's configuration, for error messages

    def __init__(self, path: Path) -> None:
        # path of the first file; the name is that of the attribute of ``Checkpoint``
        self.folder = path
        self.header = GgufFile(path)
        self._files = [self.header, *_other_parts(self.header)]
        self._infos: dict[str, tuple[GgufFile, TensorInfo]] = {}
        for file in self._files:
            for name, info in file.tensors.items():
                if name in self._infos:
                    file.refuse(f"expected tensor {name:.80} in one part, found it in two")
                self._infos[name] = file, info
        count = self.header.get("split.tensors.count")
        if len(self._files) > 1 and count != len(self._infos):
            self.header.refuse(
                f"expected {count!r:.20} tensors in all parts, found {len(self._infos)}"
            )

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the tokenizer, empty if the file has none.

        Raises:
            TokenizerError: the vocabulary is inconsistent.
        """
        return Vocabulary.read(self.header)

    def drop_vocabulary(self) -> None:
        """Free the memory of the vocabulary; a later access reads it again."""
        self.__dict__.pop("vocabulary", None)

    @property
    def identity(self) -> list[tuple[str, int, int, int]]:
        """Path, inode, size and time of change of each file, from when the model was opened."""
        return [file_identity(file.path.resolve(), file.state) for file in self._files]

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def __contains__(self, name: object) -> bool:
        return name in self._infos

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; a matrix is ``[outputs, inputs]``."""
        return self._infos[name][1].shape

    def nbytes(self, name: str) -> int:
        """Return the size of a tensor in the file, in bytes."""
        return self._infos[name][1].size

    def type(self, name: str) -> str:
        """Return the GGUF type of a tensor, such as ``F32`` or ``Q4_K``."""
        return self._infos[name][1].type.name

    def check_dtype(self, name: str, dtypes: Sequence[str] = tuple(_DTYPES)) -> None:
        """Raise a CheckpointError if a tensor has an unsupported GGUF type.

        Supported are the names of types in ``dtypes``, by default the float types, and for matrices
        also the quantized types in :data:`BLOCKS`.
        """
        found = self.type(name)
        types = list(dtypes)
        if len(self.shape(name)) > 1:
            types += BLOCKS
        if found not in types:
            command = "llama-quantize MODEL-F16.gguf OUT.gguf Q4_K_M"
            remedy = f"use a Q4_K_M or Q8_0 file of this model, or convert the original: {command}"
            expected = ", ".join(types)
            refuse(self.folder, f"tensor {name}: expected {expected}, found {found}; {remedy}")

    def raw_bytes(self, name: str) -> Array:
        """Return the bytes of a tensor, uint8, as a view that keeps the file mapped."""
        file, info = self._infos[name]
        return np.frombuffer(file.buffer, UINT8, info.size, info.start)

    def tensor(self, name: str) -> Array:
        """Return a float tensor as a view of the file, in the file's dtype."""
        info = self._infos[name][1]
        return self.raw_bytes(name).view(_DTYPES[info.type.name]).reshape(info.shape)

    def has_blocks(self, name: str) -> bool:
        """Return whether a tensor is stored in quantized blocks, not as floats."""
        return self.type(name) not in _DTYPES

    def weight(
        self, name: str, codes: Array, expert: int | None = None, rows: HeadRows | None = None
    ) -> QuantizedMatrix:
        """Convert quantized blocks to a quantized matrix.

        Args:
            name: name of a tensor with quantized blocks (:meth:`has_blocks`).
            codes: uint8 ``[outputs, inputs]``, which receives the codes.
            expert: number of the expert, if the tensor has the matrices of all experts.
            rows: the rows of the matrix, which are as many as ``codes`` has.

        Raises:
            CheckpointError: the blocks are damaged, or the kernels do not support the matrix.
        """
        info = self._infos[name][1]
        tensor = f"{self.folder}: tensor {name} ({info.type.name})"
        with locate_error(tensor, ValueError, remedy="; download the file again"):
            stored = self._stored_rows(name, expert)
            order = None if rows is None else rows.order(len(stored))
            return unpack(stored, info.type, codes, order)

    def blocks(
        self, name: str, expert: int | None = None, rows: HeadRows | None = None
    ) -> BlockMatrix | None:
        """Return a matrix in its quantized blocks; ``None`` if the kernels cannot pack its blocks.

        Args:
            name: name of the tensor.
            expert: number of the expert, if the tensor has the matrices of all experts.
            rows: rows of each head to take, and their order in the file; ``None``: all, in order.
        """
        info = self._infos[name][1]
        if info.type.name not in PACKED_BLOCKS:
            return None
        own = name if expert is None else f"{name}[{expert}]"
        parts = _block_rows(self._stored_rows(name, expert), rows, own)
        return BlockMatrix(info.type.name, info.shape[-1], parts, self.release)

    def release(self) -> None:
        """Free the memory of all pages of the files that were read.

        A later access reads a page again.
        """
        if hasattr(mmap, "MADV_DONTNEED"):
            for file in self._files:
                file.buffer.madvise(mmap.MADV_DONTNEED)

    def _stored_rows(self, name: str, expert: int | None) -> Array:
        """Return the rows of a matrix as bytes, uint8 ``[outputs, bytes of a row]``."""
        stored = self.raw_bytes(name).reshape(*self.shape(name)[:-1], -1)
        return stored.reshape(-1, stored.shape[-1]) if expert is None else stored[expert]


def _block_rows(stored: Array, rows: HeadRows | None, name: str) -> tuple[BlockRows, ...]:
    """Return the rows of a matrix that are taken, as views of the file."""
    if rows is None:
        return (BlockRows(stored, name=name),)
    if rows.pairs and len(stored) == rows.count(len(stored)):
        return (BlockRows(stored, rows.heads, name),)
    # The name tells different rows of one tensor apart in the cache of packed weights.
    size = len(stored) // rows.heads
    stop = size if rows.stop is None else rows.stop
    own = f"{name}[{rows.start}:{stop} of each {size}]"
    return tuple(BlockRows(stored[run], int(rows.pairs), own) for run in rows.runs(len(stored)))


def _other_parts(first: GgufFile) -> list[GgufFile]:
    """Open the other files of a split model, in order; none if the model is one file.

    Raises:
        CheckpointError: ``first`` is not the first part, or another part is missing or damaged.
    """
    count = first.get("split.count")
    number = first.get("split.no")
    if not isinstance(count, int) or count < 2:
        return []
    match = _PART_NAME.fullmatch(first.path.name)
    if match is None or int(match[3]) != count:
        expected = (
            f"a name that ends in -00001-of-{count:05}.gguf, as it is the first of {count} files"
        )
        remedy = "restore the original names of the parts"
        first.refuse(f"expected {expected}, found {first.path.name}", remedy)
    names = [f"{match[1]}-{part:05}-of-{count:05}.gguf" for part in range(1, count + 1)]
    if number != 0 or int(match[2]) != 1:
        first.refuse(f"expected the first of {count} files, found another one", f"give {names[0]}")
    paths = [first.path.parent / name for name in names[1:]]
    for path in paths:
        if not path.is_file():
            problem = f"expected {count} files in the same folder, found no {path.name}"
            first.refuse(problem, "download the missing file")
    return [GgufFile(path) for path in paths]
