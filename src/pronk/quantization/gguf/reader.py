"""Reader of the header of a GGUF file: its metadata and the places of its tensors.

::

    "GGUF"  version  tensors  pairs     4 + 4 + 8 + 8 bytes, little-endian
    key  type  value                    for each pair; a string is its length and its bytes
    name  dimensions  type  offset      for each tensor; the dimension with the smallest stride comes first
    padding
    tensors                             each at a multiple of general.alignment

Files are not trusted: each count or length is compared with the remaining bytes before memory is allocated for it.
Arrays are converted on access only. Source: ``docs/gguf.md`` of ggml, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pronk.errors import CheckpointError
from pronk.quantization.gguf.layout import ARRAY, BOOL, SCALARS, STRING, TENSOR_TYPES, TensorType

__all__ = ["GgufFile", "TensorInfo"]

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
# Minimum bytes of a pair and of a tensor's description: empty name, shortest value, one dimension.
_PAIR, _TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8
_LONGEST_NAME, _MOST_DIMENSIONS, _MOST_ALIGNMENT = 65_535, 4, 1 << 20
_LENGTH = struct.Struct("<Q")
_UNIT = 8  # divisor of every alignment, in bytes


@dataclass(frozen=True)
class TensorInfo:
    """Place of a tensor: ``start`` and ``size`` in bytes; ``shape`` in the order of torch, outputs first."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class _Array:
    """Array in the file: ``count`` values of a type, from byte ``start``."""

    type: int
    count: int
    start: int


class GgufFile:
    """Checked header of one memory-mapped file.

    Attributes:
        path: path of the file.
        buffer: the whole file, mapped copy-on-write: writes change the memory, not the file.
        tensors: places of the tensors by name, in the order of the file.

    Raises:
        CheckpointError: the file is not GGUF, of another version or byte order, truncated or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.buffer = self._map()
        self._size, self._at = len(self.buffer), 0
        num_tensors, num_pairs = self._read_start()
        self._pairs = self._read_pairs(num_pairs)
        self.tensors = self._read_tensors(num_tensors)

    def __contains__(self, key: str) -> bool:
        return key in self._pairs

    def __iter__(self) -> Iterator[str]:
        return iter(self._pairs)

    def get(self, key: str) -> Any:
        """Return a metadata value (int, float, bool, str or a list of one of these), ``None`` if absent."""
        value = self._pairs.get(key)
        if isinstance(value, bytes):
            return self._decode(value, key)
        return self._values(value, key) if isinstance(value, _Array) else value

    def refuse(self, problem: str, remedy: str = "download it again") -> NoReturn:
        """Raise a :class:`CheckpointError` about this file."""
        msg = f"{self.path}: {problem}; {remedy}"
        raise CheckpointError(msg)

    def _map(self) -> mmap.mmap:
        try:
            with self.path.open("rb") as stream:
                size = stream.seek(0, 2)
                if size < 24:
                    self.refuse(f"expected a GGUF file, found {size} bytes")
                return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            msg = f"{self.path}: expected a readable file, found {getattr(error, 'strerror', None) or error}"
            raise CheckpointError(msg) from error

    def _read_start(self) -> tuple[int, int]:
        magic, version = self._take(4), self._number("I")
        if magic != _MAGIC:
            self.refuse(f"expected a GGUF file, found one that begins with {magic!r}", "check that it is the right one")
        if version & 0xFFFF == 0:
            remedy = "convert it with gguf-py: gguf-convert-endian MODEL little"
            self.refuse("expected a little-endian file, found a big-endian one", remedy)
        if version not in _VERSIONS:
            self.refuse(
                f"expected version 2 or 3 of GGUF, found {version}", "convert the model with a current llama.cpp"
            )
        num_tensors, num_pairs = self._number("Q"), self._number("Q")
        if num_pairs * _PAIR + num_tensors * _TENSOR > self._left:
            found = f"{num_tensors} tensors and {num_pairs} pairs of metadata announced"
            self.refuse(f"expected as many as {self._size} bytes can hold, found {found}")
        return num_tensors, num_pairs

    @property
    def _left(self) -> int:
        return self._size - self._at

    def _skip(self, size: int) -> int:
        """Advance by ``size`` bytes and return the previous position."""
        start = self._at
        if size > self._left:
            self.refuse(f"expected {size} bytes at {start}, found {self._left}: the file is truncated or damaged")
        self._at += size
        return start

    def _take(self, size: int) -> bytes:
        start = self._skip(size)
        return self.buffer[start : start + size]

    def _number(self, kind: str) -> int:
        start = self._skip(struct.calcsize(kind))
        value: int = struct.unpack_from(f"<{kind}", self.buffer, start)[0]
        return value

    def _decode(self, text: bytes, what: str) -> str:
        try:
            return text.decode()
        except UnicodeDecodeError:
            self.refuse(f"{what:.80}: expected text in UTF-8, found invalid bytes")

    def _name(self, what: str) -> str:
        size = self._number("Q")
        if size > _LONGEST_NAME:
            self.refuse(f"expected the name of {what} in at most {_LONGEST_NAME} bytes, found {size}")
        name = self._decode(self._take(size), f"the name of {what}")
        if not name.isprintable():
            self.refuse(f"expected the name of {what} in printable characters, found {name[:80]!r}")
        return name

    def _read_pairs(self, count: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        for _ in range(count):
            key = self._name("a value")
            if key in pairs:
                self.refuse(f"expected {key:.80} once, found it twice")
            pairs[key] = self._value(key, self._number("I"))
        return pairs

    def _value(self, key: str, kind: int) -> Any:
        if kind == STRING:
            return self._take(self._number("Q"))
        if kind == ARRAY:
            return self._array(key, self._number("I"), self._number("Q"))
        if kind not in SCALARS:
            self.refuse(f"{key:.80}: expected a value of a known type (0..12), found type {kind}")
        value = self._number(SCALARS[kind])
        if kind == BOOL and value > 1:
            self.refuse(f"{key:.80}: expected 0 or 1 for a bool, found {value}")
        return bool(value) if kind == BOOL else value

    def _array(self, key: str, kind: int, count: int) -> _Array:
        if kind in SCALARS:
            return _Array(kind, count, self._skip(count * struct.calcsize(SCALARS[kind])))
        if kind == ARRAY:
            self.refuse(f"{key:.80}: expected an array of numbers or strings, found an array of arrays")
        if kind != STRING:
            self.refuse(f"{key:.80}: expected an array of a known type (0..12), found type {kind}")
        if count * 8 > self._left:
            self.refuse(f"{key:.80}: expected as many strings as {self._left} bytes can hold, found {count} announced")
        start = at = self._at
        for _ in range(count):  # hundreds of thousands of tokens, so without Python calls
            if at + 8 > self._size:
                at = self._size + 1
                break
            at += 8 + _LENGTH.unpack_from(self.buffer, at)[0]
        self._skip(at - start)
        return _Array(kind, count, start)

    def _values(self, array: _Array, key: str) -> list[Any]:
        if array.type != STRING:
            values = struct.unpack_from(f"<{array.count}{SCALARS[array.type]}", self.buffer, array.start)
            return [value != 0 for value in values] if array.type == BOOL else list(values)
        texts, at = [], array.start
        for _ in range(array.count):
            (size,) = _LENGTH.unpack_from(self.buffer, at)
            texts.append(self._decode(self.buffer[at + 8 : at + 8 + size], key))
            at += 8 + size
        return texts

    def _read_tensors(self, count: int) -> dict[str, TensorInfo]:
        alignment = self._pairs.get("general.alignment", 32)
        if not isinstance(alignment, int) or not _UNIT <= alignment <= _MOST_ALIGNMENT or alignment & (alignment - 1):
            found = f"general.alignment = {alignment!r:.40}"
            self.refuse(f"expected a power of two in {_UNIT}..{_MOST_ALIGNMENT}, found {found}")
        infos: dict[str, TensorInfo] = {}
        for _ in range(count):
            info = self._read_info(alignment)
            if info.name in infos:
                self.refuse(f"expected tensor {info.name:.80} once, found it twice")
            infos[info.name] = info
        base = self._at + -self._at % alignment
        return self._place(infos, base)

    def _read_info(self, alignment: int) -> TensorInfo:
        """Read the description of a tensor, with ``start`` relative to the first tensor."""
        name = self._name("a tensor")
        num_dimensions = self._number("I")
        if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
            self.refuse(f"tensor {name:.80}: expected 1..{_MOST_DIMENSIONS} dimensions, found {num_dimensions}")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
        kind, start = self._number("I"), self._number("Q")
        if kind not in TENSOR_TYPES:
            self.refuse(f"tensor {name:.80}: expected a known type, found type {kind}", "use another file of the model")
        type_ = TENSOR_TYPES[kind]
        if 0 in shape or shape[-1] % type_.values:
            wanted = f"rows of whole blocks of {type_.values} ({type_.name})"
            self.refuse(f"tensor {name:.80}: expected {wanted}, found {list(shape)}")
        if start % alignment:
            self.refuse(f"tensor {name:.80}: expected an offset that is a multiple of {alignment}, found {start}")
        size = type_.size
        for length in (*shape[:-1], shape[-1] // type_.values):
            size *= length
        return TensorInfo(name, type_, shape, start, size)

    def _place(self, infos: dict[str, TensorInfo], base: int) -> dict[str, TensorInfo]:
        """Make ``start`` absolute; refuse tensors that overlap or exceed the file."""
        placed = {
            name: TensorInfo(name, info.type, info.shape, base + info.start, info.size) for name, info in infos.items()
        }
        end = 0
        for info in sorted(placed.values(), key=lambda info: info.start):
            if info.start < end:
                self.refuse(f"tensor {info.name:.80}: expected a place of its own, found an overlap with another one")
            end = info.start + info.size
            if end > self._size:
                found = f"its {info.size} bytes at {info.start} of {self._size}: the file is truncated or damaged"
                self.refuse(f"expected all of tensor {info.name:.80}, found {found}")
        return placed
