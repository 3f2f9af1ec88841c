"""Tensors of a GGUF model, in one file or in the parts that ``llama-gguf-split`` writes.

RoPE rotates pairs of a head's values. In pronk, the values i and i + size / 2 of a head are a pair.
For some architectures, GGUF permutes the rows of the query and key projections so that the values
2i and 2i + 1 are a pair. The methods of :class:`GgufCheckpoint` undo this permutation if their
argument ``permuted_heads`` is the number of heads.
"""

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
    of a method is the number of one of them. Opening a model reads the headers of its files only.

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

    def tensor(self, name: str, permuted_heads: int = 0) -> Array:
        """Return an unquantized tensor in the file's dtype.

        It is a view of the file, unless its rows are permuted.
        """
        info = self._infos[name][1]
        values = self.raw_bytes(name).view(_DTYPES[info.type.name]).reshape(info.shape)
        order = row_order(len(values), permuted_heads)
        return values if order is None else values[order]

    def has_blocks(self, name: str) -> bool:
        """Return whether a tensor is stored in quantized blocks, not as floats."""
        return self.type(name) not in _DTYPES

    def weight(
        self, name: str, codes: Array, expert: int | None = None, permuted_heads: int = 0
    ) -> QuantizedMatrix:
        """Convert quantized blocks to a quantized matrix.

        Args:
            name: name of a tensor with quantized blocks (:meth:`has_blocks`).
            codes: uint8 ``[outputs, inputs]``, which receives the codes.
            expert: number of the expert, if the tensor has the matrices of all experts.
            permuted_heads: number of heads whose rows are permuted.

        Raises:
            CheckpointError: the blocks are damaged, or the kernels do not support the matrix.
        """
        info = self._infos[name][1]
        tensor = f"{self.folder}: tensor {name} ({info.type.name})"
        with locate_error(tensor, ValueError, remedy="; download the file again"):
            rows = self._stored_rows(name, expert)
            return unpack(rows, info.type, codes, row_order(len(rows), permuted_heads))

    def blocks(
        self, name: str, expert: int | None = None, permuted_heads: int = 0
    ) -> BlockMatrix | None:
        """Return a matrix in its quantized blocks; ``None`` if the kernels cannot pack its blocks.

        Args:
            name: name of the tensor.
            expert: number of the expert, if the tensor has the matrices of all experts.
            permuted_heads: number of heads whose rows are permuted; 0 if the rows are in order.
        """
        info = self._infos[name][1]
        if info.type.name not in PACKED_BLOCKS:
            return None
        own = name if expert is None else f"{name}[{expert}]"
        rows = BlockRows(self._stored_rows(name, expert), permuted_heads, own)
        return BlockMatrix(info.type.name, info.shape[-1], (rows,))

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
        return stored if expert is None else stored[expert]


def row_order(num_rows: int, permuted_heads: int) -> Array | None:
    """Return where the file has each row of a permuted matrix, int64 ``[num_rows]``.

    For a head of size 6, the file holds the rows 0 3 1 4 2 5, and the result is 0 2 4 1 3 5.
    The result is ``None`` if ``permuted_heads`` is 0: the rows are in order.
    """
    if permuted_heads == 0:
        return None
    stored = np.arange(num_rows).reshape(permuted_heads, -1, 2)
    return stored.swapaxes(1, 2).reshape(-1)


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
