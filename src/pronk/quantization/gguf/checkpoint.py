"""Tensors of a GGUF model, in one file or in the parts that ``llama-gguf-split`` writes.

Tensors keep their GGUF names. For the architecture ``llama``, GGUF stores the rows of Q and K in the order for
interleaved RoPE; they are returned in the order for half-split RoPE. Opening a checkpoint reads the headers only.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pronk.errors import CheckpointError
from pronk.quantization.formats.matrix import QuantizedMatrix
from pronk.quantization.gguf.blocks import BLOCKS, unpack
from pronk.quantization.gguf.reader import GgufFile, TensorInfo

__all__ = ["GgufCheckpoint", "is_gguf"]

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
# Tensors with the row order of interleaved RoPE, and the keys of their numbers of heads.
_ROTATED = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}


def is_gguf(path: Path) -> bool:
    """Whether a path is an existing file with the suffix ``.gguf``."""
    return path.suffix.lower() == ".gguf" and path.is_file()


class GgufCheckpoint:
    """Tensors of a model, with the interface of :class:`pronk.models.checkpoint.Checkpoint`.

    Attributes:
        folder: path of the file, the first one if there are several parts.
        header: header of that file, with the metadata.
        says: source of the list of tensors, for messages.

    Raises:
        CheckpointError: a file is damaged or not supported, a part is missing, or the path is not the first part.
    """

    says = "its metadata"

    def __init__(self, path: Path) -> None:
        self.folder = path
        self.header = GgufFile(path)
        self._files = [self.header, *_other_parts(self.header)]
        self._infos: dict[str, tuple[GgufFile, TensorInfo]] = {}
        for file in self._files:
            for name, info in file.tensors.items():
                if name in self._infos:
                    file.refuse(f"expected tensor {name:.80} in one part, found it in two")
                self._infos[name] = file, info
        announced = self.header.get("split.tensors.count")
        if len(self._files) > 1 and announced != len(self._infos):
            self.header.refuse(f"expected {announced!r:.20} tensors in all parts, found {len(self._infos)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def __contains__(self, name: object) -> bool:
        return name in self._infos

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, outputs first."""
        return self._infos[name][1].shape

    def nbytes(self, name: str) -> int:
        """Return the size of a tensor in the file, in bytes."""
        return self._infos[name][1].size

    def type(self, name: str) -> str:
        """Return the GGUF type of a tensor, such as ``F32`` or ``Q4_K``."""
        return self._infos[name][1].type.name

    def check_dtype(self, name: str, dtypes: Sequence[str] = tuple(_DTYPES)) -> None:
        """Raise :class:`CheckpointError` unless the dtype is in ``dtypes`` or the block type is supported."""
        found = self.type(name)
        known = [*dtypes, *(BLOCKS if len(self.shape(name)) == 2 else ())]
        if found not in known:
            msg = (
                f"{self.folder}: tensor {name}: expected {', '.join(known)}, found {found}; take another file of this "
                "model, Q4_K_M or Q8_0, or convert the original: llama-quantize MODEL-F16.gguf OUT.gguf Q4_K_M"
            )
            raise CheckpointError(msg)

    def stored(self, name: str) -> Tensor:
        """Return the bytes of a tensor, uint8, as a view that keeps the file mapped."""
        file, info = self._infos[name]
        return torch.frombuffer(file.buffer, dtype=torch.uint8, count=info.size, offset=info.start)

    def tensor(self, name: str) -> Tensor:
        """Return an unquantized tensor in the file's dtype; a view of the file unless rows are permuted."""
        info = self._infos[name][1]
        values, rows = self.stored(name).view(_DTYPES[info.type.name]).view(info.shape), self._rows(name)
        return values if rows is None else values[rows]

    def has_blocks(self, name: str) -> bool:
        """Whether a tensor is block-quantized."""
        return self.type(name) not in _DTYPES

    def weight(self, name: str, codes: Tensor) -> QuantizedMatrix:
        """Return a block-quantized matrix, whose type :meth:`check_dtype` has accepted.

        Args:
            name: name of the tensor.
            codes: output buffer for the codes, uint8 ``[outputs, inputs]``.

        Raises:
            CheckpointError: a block is damaged, or the kernels do not support the matrix.
        """
        info = self._infos[name][1]
        try:
            return unpack(self.stored(name).view(info.shape[0], -1), info.type, codes, self._rows(name))
        except ValueError as error:
            msg = f"{self.folder}: tensor {name} ({info.type.name}): {error}; download the file again"
            raise CheckpointError(msg) from error

    def release(self) -> None:
        """Release the memory of the pages read so far; a later access reads them again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for file in self._files:
                file.buffer.madvise(mmap.MADV_DONTNEED)

    def _rows(self, name: str) -> Tensor | None:
        """Return the stored row of each row; ``None`` is the identity.

        Example with a head of 6: stored rows 0 1 2 3 4 5 are the rotated pairs (0, 3), (1, 4), (2, 5), so the result is
        0 2 4 1 3 5.
        """
        key = _ROTATED.get(name.split(".")[-2]) if "." in name else None
        if key is None or self.header.get("general.architecture") != "llama":
            return None
        heads = self.header.get(key)
        heads = self.header.get(_ROTATED["attn_q"]) if heads is None else heads
        heads = heads[0] if isinstance(heads, list) and heads else heads
        size = self.shape(name)[0]
        if not isinstance(heads, int) or heads < 1 or size % (2 * heads):
            msg = f"{self.folder}: tensor {name}: expected rows for {heads!r:.20} heads of an even size, found {size}"
            raise CheckpointError(msg)
        return torch.arange(size).view(heads, -1, 2).transpose(1, 2).reshape(-1)


def _other_parts(first: GgufFile) -> list[GgufFile]:
    """Open the parts after the first; empty if the file is not split."""
    count, number = first.get("split.count"), first.get("split.no")
    if not isinstance(count, int) or count < 2:
        return []
    name = _PART.fullmatch(first.path.name)
    if name is None or int(name[3]) != count:
        wanted = f"a name that ends in -00001-of-{count:05}.gguf, as it is the first of {count} files"
        first.refuse(f"expected {wanted}, found {first.path.name}", "rename the parts to their original names")
    names = [f"{name[1]}-{part:05}-of-{count:05}.gguf" for part in range(1, count + 1)]
    if number != 0 or int(name[2]) != 1:
        first.refuse(f"expected the first of {count} files, found another one", f"give {names[0]}")
    missing = [each for each in names[1:] if not (first.path.parent / each).is_file()]
    if missing:
        first.refuse(f"expected {count} files beside each other, found no {missing[0]}", "download it, too")
    return [GgufFile(first.path.parent / each) for each in names[1:]]
