"""Reader for the header of a GGUF file: metadata, and the shape, type and position of each tensor.

::

    "GGUF"  version  number of tensors  number of pairs     4 + 4 + 8 + 8 bytes, little-endian
    key  type  value                                        for each pair of metadata
    name  number of dimensions  dimensions  type  offset    for each tensor; smallest stride first
    padding
    values of the tensors                                   each at a multiple of the alignment

The alignment, in bytes, is the metadata value ``general.alignment``. A string is its length (8
bytes) and its UTF-8 bytes. A count or length is compared with the remaining bytes of the file
before memory is allocated for it. Metadata arrays are converted to lists on access. Source:
``docs/gguf.md`` of ggml.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from pronk.base.arrays import Array
from pronk.base.errors import CheckpointError, refuse
from pronk.checkpoint.gguf.blocks import (
    ARRAY,
    BOOL,
    REMOVED_TYPES,
    SCALARS,
    STRING,
    TENSOR_TYPES,
    TensorType,
)
from pronk.checkpoint.gguf.texts import Texts

# bytes of "GGUF", version, number of tensors, and number of metadata pairs
_HEADER_BYTES = 4 + 4 + 8 + 8
_MIN_PAIR_BYTES = 8 + 4 + 1  # smallest metadata pair: length of an empty key, type, one-byte value
# Bytes of the smallest description of a tensor: empty name, number of dimensions, one dimension,
# type, offset.
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
# Maximum number of bytes of a metadata key in GGUF; here it is the limit for names of tensors, too.
_MAX_NAME_BYTES = 65_535
# Limits against hostile files, far above the numbers in real models. Python objects need more
# memory than the bytes of the file, so the file's size alone does not limit the memory.
_MAX_ENTRIES = 100_000  # number of tensors, and number of metadata pairs
_MAX_ELEMENTS = 1 << 22  # elements of a metadata array; a vocabulary has less than a million tokens
_MAX_TEXT_BYTES = 1 << 30  # bytes of a metadata array of strings, which 32 bits can count
_CHUNK = 1 << 14  # strings whose lengths are checked at once
_MAX_DIMENSIONS = 4  # ggml's limit of a tensor's dimensions
# Keys whose values select how the model is parsed. When a file is opened, the values are checked to
# be strings, so that later code need not check it.
_NAME_KEYS = ("general.architecture", "tokenizer.ggml.model")
_ALIGNMENTS = [1 << bits for bits in range(3, 21)]  # possible values of general.alignment, in bytes


class TensorInfo(NamedTuple):
    """Place of a tensor in a file.

    Attributes:
        name: name of the tensor.
        type: type of its blocks.
        shape: its shape, with the largest stride first: a matrix is ``[outputs, inputs]``.
        start: offset in the file of the first byte of its values.
        size: number of bytes of its values.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    start: int
    size: int


class _Array(NamedTuple):
    """Metadata array that has not been converted to a list.

    Attributes:
        type: number of the GGUF type of the elements.
        length: number of elements.
        start: offset in the file of the first element.
        ends: for strings, the end of each element, in bytes behind ``start``.
    """

    type: int
    length: int
    start: int
    ends: NDArray[np.uint32] | None = None


class GgufFile:
    """Validated header of one memory-mapped GGUF file.

    Attributes:
        path: path of the file.
        buffer: the whole file, copy on write.
        state: result of ``stat`` for the file when it was opened.
        tensors: descriptions of the tensors by name, in the order of the file.

    Raises:
        CheckpointError: the file is not GGUF, has another version or byte order, or is truncated or
            damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.buffer = self._map_file()
        self._file_size = len(self.buffer)
        self._position = 0  # offset in the file of the next byte to read
        num_tensors, num_pairs = self._read_file_header()
        self._pairs = self._read_pairs(num_pairs)
        self.tensors = self._read_tensors(num_tensors)

    def get(self, key: str) -> Any:
        """Return a metadata value; ``None`` if the file does not have it.

        A value is an int, float, bool or str, or a list of elements of one of these types.
        """
        value = self._pairs.get(key)
        if isinstance(value, bytes):
            return self._decode(value, key)
        if isinstance(value, _Array):
            return self._array_values(value, key)
        return value

    def refuse(self, problem: str, remedy: str = "download it again") -> NoReturn:
        """Raise a CheckpointError with the message ``PATH: PROBLEM; REMEDY``."""
        refuse(self.path, f"{problem}; {remedy}")

    def _map_file(self) -> mmap.mmap:
        """Map the file into memory, and set ``state`` to the result of its ``stat``."""
        try:
            with self.path.open("rb") as stream:
                self.state = os.fstat(stream.fileno())
                size = self.state.st_size
                if size < _HEADER_BYTES:
                    self.refuse(f"expected a GGUF file, found {size} bytes")
                return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            msg = f"{self.path}: expected a readable file, found {reason}"
            raise CheckpointError(msg) from error

    def _read_file_header(self) -> tuple[int, int]:
        """Read and check the first 24 bytes; return numbers of tensors and of metadata pairs."""
        magic = self._read_bytes(4)
        version = self._read_number("I")
        if magic != b"GGUF":
            problem = f"expected a GGUF file, found one that begins with {magic!r}"
            self.refuse(problem, "check that it is the right one")
        if version & 0xFFFF == 0:
            remedy = "convert it with gguf-py: gguf-convert-endian MODEL little"
            self.refuse("expected a little-endian file, found a big-endian one", remedy)
        if version not in (2, 3):
            remedy = "convert the model with a current llama.cpp"
            self.refuse(f"expected version 2 or 3 of GGUF, found {version}", remedy)
        num_tensors = self._read_number("Q")
        num_pairs = self._read_number("Q")
        if num_pairs * _MIN_PAIR_BYTES + num_tensors * _MIN_TENSOR_BYTES > self._num_left:
            found = f"{num_tensors} tensors and {num_pairs} pairs of metadata announced"
            self.refuse(f"expected as many as {self._file_size} bytes can hold, found {found}")
        if max(num_tensors, num_pairs) > _MAX_ENTRIES:
            found = f"{num_tensors} tensors and {num_pairs} pairs of metadata"
            self.refuse(f"expected at most {_MAX_ENTRIES} of each, found {found}")
        return num_tensors, num_pairs

    @property
    def _num_left(self) -> int:
        """Number of bytes of the file after the current position."""
        return self._file_size - self._position

    def _advance(self, size: int) -> int:
        """Advance the position by ``size`` bytes; return the previous position.

        Raises:
            CheckpointError: the file ends before the new position.
        """
        start = self._position
        if size > self._num_left:
            problem = f"expected {size} bytes at {start}, found {self._num_left}"
            self.refuse(f"{problem}: the file is truncated or damaged")
        self._position += size
        return start

    def _read_bytes(self, size: int) -> bytes:
        start = self._advance(size)
        return self.buffer[start : start + size]

    def _read_number(self, format_char: str) -> int:
        """Read a little-endian number, given its format character of :mod:`struct`."""
        start = self._advance(struct.calcsize(format_char))
        (number,) = struct.unpack_from(f"<{format_char}", self.buffer, start)
        return number

    def _decode(self, text: bytes, name: str) -> str:
        """Decode UTF-8; raise a CheckpointError about ``name`` if the bytes are invalid."""
        try:
            return text.decode()
        except UnicodeDecodeError:
            self._refuse_text(name)

    def _refuse_text(self, name: str) -> NoReturn:
        self.refuse(f"{name:.80}: expected text in UTF-8, found invalid bytes")

    def _read_name(self, owner: str) -> str:
        """Read a string; an error message names it as the name of ``owner``, such as "a tensor"."""
        expected = f"expected the name of {owner}"
        size = self._read_number("Q")
        if size > _MAX_NAME_BYTES:
            self.refuse(f"{expected} in at most {_MAX_NAME_BYTES} bytes, found {size}")
        name = self._decode(self._read_bytes(size), f"the name of {owner}")
        if not name.isprintable():
            self.refuse(f"{expected} in printable characters, found {name[:80]!r}")
        return name

    def _read_pairs(self, count: int) -> dict[str, Any]:
        """Read the metadata: values by key, with strings as bytes and arrays as :class:`_Array`."""
        pairs: dict[str, Any] = {}
        for _ in range(count):
            key = self._read_name("a value")
            if key in pairs:
                self.refuse(f"expected {key:.80} once, found it twice")
            kind = self._read_number("I")
            pairs[key] = self._read_value(key, kind)
        return pairs

    def _read_value(self, key: str, kind: int) -> Any:
        if key in _NAME_KEYS and kind != STRING:
            found = "an array" if kind == ARRAY else f"a value of type {kind}"
            self.refuse(f"{key}: expected a string, found {found}")
        if kind == STRING:
            size = self._read_number("Q")
            return self._read_bytes(size)
        if kind == ARRAY:
            element_kind = self._read_number("I")
            count = self._read_number("Q")
            return self._read_array(key, element_kind, count)
        if kind not in SCALARS:
            self.refuse(f"{key:.80}: expected a value of a known type (0..12), found type {kind}")
        value = self._read_number(SCALARS[kind])
        if kind == BOOL and value > 1:
            self.refuse(f"{key:.80}: expected 0 or 1 for a bool, found {value}")
        return bool(value) if kind == BOOL else value

    def _read_array(self, key: str, kind: int, count: int) -> _Array:
        """Skip an array, and return its place in the file, so that it is converted only on access.

        Args:
            key: metadata key of the array.
            kind: number of the GGUF type of the elements.
            count: number of elements.
        """
        if kind in SCALARS:
            size = struct.calcsize(SCALARS[kind])
            return _Array(kind, count, self._advance(count * size))
        if kind == ARRAY:
            expected = "an array of numbers or strings"
            self.refuse(f"{key:.80}: expected {expected}, found an array of arrays")
        if kind != STRING:
            self.refuse(f"{key:.80}: expected an array of a known type (0..12), found type {kind}")
        if count * 8 > self._num_left:
            expected = f"as many strings as {self._num_left} bytes can hold"
            self.refuse(f"{key:.80}: expected {expected}, found {count} announced")
        start = self._position
        ends = self._short_ends(start, count)
        if ends is None:
            ends = self._all_ends(key, start, count)
        self._position = start
        self._advance(int(ends[-1]) if count else 0)
        return _Array(kind, count, start, ends)

    def _short_ends(self, start: int, count: int) -> NDArray[np.uint32] | None:
        """Return the ends of ``count`` strings, if each has less than 256 bytes; else ``None``.

        Only the first byte of each length is read one by one, because a vocabulary has hundreds of
        thousands of strings.
        """
        ends = np.zeros(count + 1, np.uint32)
        stored = memoryview(self.buffer)[start : start + _MAX_TEXT_BYTES]
        end = 0
        try:
            for number in range(1, count + 1):
                end += 8 + stored[end]
                ends[number] = end
        except IndexError:
            return None
        if end > len(stored):
            return None
        values = np.frombuffer(stored, np.uint8)
        for first in range(0, count, _CHUNK):
            begins = ends[first : min(first + _CHUNK, count)]
            if any(values[begins + np.uint32(place)].any() for place in range(1, 8)):
                return None
        return ends[1:]

    def _all_ends(self, key: str, start: int, count: int) -> NDArray[np.uint32]:
        """Return the ends of ``count`` strings; refuse a file that ends before."""
        ends = np.empty(count, np.uint32)
        self._position = start
        for number in range(count):
            self._advance(self._read_number("Q"))
            if self._position - start > _MAX_TEXT_BYTES:
                self.refuse(f"{key:.80}: expected at most {_MAX_TEXT_BYTES} bytes, found more")
            ends[number] = self._position - start
        return ends

    def texts(self, key: str) -> Texts | None:
        """Return a metadata array of strings; ``None`` if the file has none with this key."""
        value = self._pairs.get(key)
        if not isinstance(value, _Array) or value.type != STRING:
            return None
        self._check_length(value, key)
        return self._array_texts(value, key)

    def numbers(self, key: str) -> Array | None:
        """Return a metadata array of numbers or flags, in the file's type.

        ``None`` if the file has none with this key.
        """
        value = self._pairs.get(key)
        if not isinstance(value, _Array) or value.type == STRING:
            return None
        self._check_length(value, key)
        dtype = np.dtype("?" if value.type == BOOL else f"<{SCALARS[value.type]}")
        stored = np.frombuffer(self.buffer, np.uint8, value.length * dtype.itemsize, value.start)
        return (stored != 0) if value.type == BOOL else stored.copy().view(dtype)

    def _check_length(self, array: _Array, key: str) -> None:
        if array.length > _MAX_ELEMENTS:
            expected = f"at most {_MAX_ELEMENTS} elements"
            self.refuse(f"{key:.80}: expected {expected}, found {array.length}")

    def _array_values(self, array: _Array, key: str) -> list[Any]:
        """Convert a metadata array to a list; ``key`` is for error messages."""
        self._check_length(array, key)
        if array.type == STRING:
            return list(self._array_texts(array, key))
        values_format = f"<{array.length}{SCALARS[array.type]}"
        values = struct.unpack_from(values_format, self.buffer, array.start)
        if array.type == BOOL:
            return [value != 0 for value in values]
        return list(values)

    def _array_texts(self, array: _Array, key: str) -> Texts:
        """Return an array of strings without their lengths; ``key`` is for error messages."""
        if array.ends is None or not array.length:
            return Texts.of([])
        stored = self.buffer[array.start : array.start + int(array.ends[-1])]
        begins = np.concatenate([np.zeros(1, np.uint32), array.ends[:-1]])
        is_text = np.ones(len(stored), np.bool_)
        for place in range(8):
            is_text[begins + np.uint32(place)] = False
        data = np.frombuffer(stored, np.uint8)[is_text]
        sizes = (array.ends - begins).astype(np.int32) - np.int32(8)
        stops = np.add.accumulate(sizes, dtype=np.int32)
        starts = stops - sizes
        try:
            data.tobytes().decode()
        except UnicodeDecodeError:
            self._refuse_text(key)
        # Each text is valid if all are valid together and no character lies in two texts.
        first_bytes = data[starts[sizes > 0]]
        if ((first_bytes & 0xC0) == 0x80).any():
            self._refuse_text(key)
        return Texts(data, starts, stops)

    def _read_tensors(self, count: int) -> dict[str, TensorInfo]:
        """Read the descriptions of all tensors, and check that their values lie in the file."""
        alignment = self._pairs.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment not in _ALIGNMENTS:
            expected = f"a power of two in {_ALIGNMENTS[0]}..{_ALIGNMENTS[-1]}"
            self.refuse(f"expected {expected}, found general.alignment = {alignment!r:.40}")
        infos: dict[str, TensorInfo] = {}
        for _ in range(count):
            info = self._read_info(alignment)
            if info.name in infos:
                self.refuse(f"expected tensor {info.name:.80} once, found it twice")
            infos[info.name] = info
        base = self._position + -self._position % alignment
        located = {name: info._replace(start=base + info.start) for name, info in infos.items()}
        self._check_places(located.values())
        return located

    def _read_info(self, alignment: int) -> TensorInfo:
        """Read the description of a tensor.

        In the result, ``start`` counts from the end of the padding after all descriptions.
        """
        name = self._read_name("a tensor")
        where = f"tensor {name:.80}"
        num_dimensions = self._read_number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            expected = f"1..{_MAX_DIMENSIONS} dimensions"
            self.refuse(f"{where}: expected {expected}, found {num_dimensions}")
        shape = tuple(self._read_number("Q") for _ in range(num_dimensions))[::-1]
        kind = self._read_number("I")
        start = self._read_number("Q")
        if kind not in TENSOR_TYPES:
            name_of_kind = REMOVED_TYPES.get(kind, "no type of this version of pronk")
            problem = f"{where}: expected a known type, found type {kind} ({name_of_kind})"
            self.refuse(problem, "use another file of the model")
        type_ = TENSOR_TYPES[kind]
        if 0 in shape or shape[-1] % type_.values:
            expected = f"rows of whole blocks of {type_.values} ({type_.name})"
            self.refuse(f"{where}: expected {expected}, found {list(shape)}")
        if start % alignment:
            expected = f"an offset that is a multiple of {alignment}"
            self.refuse(f"{where}: expected {expected}, found {start}")
        num_blocks = math.prod(shape) // type_.values
        return TensorInfo(name, type_, shape, start, num_blocks * type_.size)

    def _check_places(self, infos: Iterable[TensorInfo]) -> None:
        """Raise a CheckpointError if the values of two tensors overlap, or exceed the file."""
        end = 0
        for info in sorted(infos, key=lambda info: info.start):
            if info.start < end:
                problem = f"tensor {info.name:.80}: expected a place of its own"
                self.refuse(f"{problem}, found an overlap with another one")
            end = info.start + info.size
            if end > self._file_size:
                expected = f"all of tensor {info.name:.80}"
                found = f"its {info.size} bytes at {info.start} of {self._file_size}"
                self.refuse(f"expected {expected}, found {found}: the file is truncated or damaged")
