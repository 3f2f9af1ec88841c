"""File with the packed weights of a model: later processes map it instead of packing them again.

The file consists of these parts::

    length of the JSON text, 8 bytes, little-endian
    JSON text: {"source": …, "matrices": {name: [offset, size]}}
    the matrices, each at a multiple of 4 KiB

``source`` identifies the model's files and the packed layout. A file with another ``source`` is
replaced. Mapped matrices are read from the page cache, so processes that map the same file share
its memory.
"""

from __future__ import annotations

import json
import mmap
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pronk.base.arrays import Array
from pronk.base.errors import OptionError, describe_error
from pronk.base.files.atomic import replace_file
from pronk.kernels.library import VERSION

_ALIGNMENT = 4096  # bytes; each matrix begins at a multiple of this in the file
_MAX_HEADER_BYTES = 1 << 24


class WeightCache:
    """The packed matrices of one model: those in its cache file, and new ones to be written to it.

    Args:
        folder: folder of the file.
        identity: for each of the model's files its path, and numbers that change with its content.
    """

    def __init__(self, folder: Path, identity: Sequence[tuple[str, int, int, int]]) -> None:
        self.path = folder / f"{sha256(os.fsencode(identity[0][0])).hexdigest()[:32]}.packed"
        self._source = {"version": VERSION, "files": [list(file) for file in identity]}
        self._mapped = self._map()
        self._new: dict[str, Array] = {}

    @classmethod
    def open(
        cls, option: bool | str | Path, identity: Sequence[tuple[str, int, int, int]] | None
    ) -> WeightCache | None:
        """Return the cache that the option ``weight_cache`` of :class:`pronk.LLM` asks for, if any.

        Args:
            option: False for no cache, True for the default folder, or a folder.
            identity: as in the constructor; ``None`` if the weights of this model cannot be cached.

        Raises:
            OptionError: the option has another type, the weights cannot be cached, or there is no
                home folder.
        """
        if option is False:
            return None
        if identity is None:
            msg = (
                "weight_cache: expected a GGUF file, pronk's kernels and no tensor parallelism; "
                "leave the option out"
            )
            raise OptionError(msg)
        if option is not True and not (isinstance(option, str | Path) and str(option)):
            msg = f"weight_cache: expected True, False or a folder, found {option!r}"
            raise OptionError(msg)
        try:
            if option is True:
                folder = Path.home() / ".cache" / "pronk" / "weights"
            else:
                folder = Path(option).expanduser()
        except RuntimeError as error:
            msg = "weight_cache: expected a home folder, found none; name a folder"
            raise OptionError(msg) from error
        return cls(folder, identity)

    def find(self, name: str, size: int) -> Array | None:
        """Return a matrix of the file, uint8 ``[size]``; ``None`` if the file does not have it."""
        found = self._mapped.get(name)
        if found is None or len(found) != size:
            return None
        return found

    def add(self, name: str, data: Array) -> None:
        """Add a packed matrix, uint8 ``[size]``, that the file lacks; :meth:`save` writes it."""
        self._new[name] = data

    def save(self) -> None:
        """Write the file if matrices were added; warn on a failure, such as a full disk."""
        if not self._new:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(self.path, shared=True) as file:
                _write(file, self._source, self._mapped | self._new)
        except OSError as error:
            reason = describe_error(error)
            warnings.warn(f"{self.path}: cannot keep the packed weights ({reason})", stacklevel=2)
        self._new.clear()

    def _map(self) -> dict[str, Array]:
        """Return the matrices of the file as views of its mapping, by name.

        There are none if the file is missing or damaged, or belongs to another model or layout.
        """
        # RecursionError: the JSON text is deeply nested.
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            with self.path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
                file_size = file.seek(0, os.SEEK_END)
                if header["source"] != self._source:
                    return {}
                for start, size in header["matrices"].values():
                    is_inside = 0 < start <= start + size <= file_size
                    if not is_inside or start % _ALIGNMENT:
                        return {}
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if hasattr(mmap, "MADV_WILLNEED"):
                with suppress(OSError):
                    memory.madvise(mmap.MADV_WILLNEED)
            return {
                name: np.frombuffer(memory, np.uint8, size, start)
                for name, (start, size) in header["matrices"].items()
            }
        return {}


def _write(file: BinaryIO, source: Mapping[str, object], matrices: Mapping[str, Array]) -> None:
    """Write a file of packed weights: the header with ``source``, and the matrices."""
    # The offsets depend on the length of the header, which contains the offsets. The place of the
    # first matrix therefore leaves room for a header with the longest offsets.
    longest = {name: [1 << 62, 1 << 62] for name in matrices}
    longest_header = json.dumps({"source": source, "matrices": longest})
    start = _align(8 + len(longest_header))
    places = {}
    for name, data in matrices.items():
        places[name] = [start, data.nbytes]
        start = _align(start + data.nbytes)
    header = json.dumps({"source": source, "matrices": places}).encode()
    file.write(len(header).to_bytes(8, "little"))
    file.write(header)
    for name, data in matrices.items():
        file.seek(places[name][0])
        file.write(data.data)


def _align(offset: int) -> int:
    """Return the next multiple of 4 KiB from ``offset`` on."""
    return (offset + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
