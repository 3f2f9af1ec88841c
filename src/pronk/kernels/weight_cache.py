"""Packed weights of a model in a file, which later processes map instead of packing them again.

The file is a header, then the matrices, each at a multiple of 4 KiB (little-endian)::

    length of the JSON text 8   JSON: {"source": …, "matrices": {name: [offset, size]}}   padding   matrices

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

_ALIGNMENT = 4096
_MAX_HEADER_BYTES = 1 << 24


class WeightCache:
    """The packed matrices of one model: those of a file in ``folder``, and new ones until :meth:`save`.

    ``identity``: path, and other properties that change with the content, of each of the model's
    files.
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
        """Return the cache for the option ``weight_cache`` of :class:`pronk.LLM`.

        ``None`` for ``False``.

        ``identity`` is that of the class; ``None`` if the model's weights cannot be cached. Raises
        ``OptionError`` if the option is no bool or folder, the weights cannot be cached, or there
        is no home folder.
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
            folder = (
                Path.home() / ".cache" / "pronk" / "weights"
                if option is True
                else Path(option).expanduser()
            )
        except RuntimeError as error:
            msg = "weight_cache: expected a home folder, found none; name a folder"
            raise OptionError(msg) from error
        return cls(folder, identity)

    def find(self, name: str, size: int) -> Array | None:
        """Return a matrix of the file, uint8 ``[size]``; ``None`` if the file does not have it."""
        found = self._mapped.get(name)
        return found if found is not None and len(found) == size else None

    def add(self, name: str, data: Array) -> None:
        """Add a packed matrix, uint8 ``[size]``, that the file lacks."""
        self._new[name] = data

    def save(self) -> None:
        """Write the file, if matrices were added.

        Warn if this fails, for example on a full disk.
        """
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
        """Return the matrices as views of the mapped file.

        Empty if missing, damaged or of another source.
        """
        # RecursionError: deeply nested JSON.
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            with self.path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
                size = file.seek(0, 2)
                if header["source"] != self._source or not all(
                    0 < at <= at + count <= size and at % _ALIGNMENT == 0
                    for at, count in header["matrices"].values()
                ):
                    return {}
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if hasattr(mmap, "MADV_WILLNEED"):
                with suppress(OSError):
                    memory.madvise(mmap.MADV_WILLNEED)
            return {
                name: np.frombuffer(memory, np.uint8, count, at)
                for name, (at, count) in header["matrices"].items()
            }
        return {}


def _write(file: BinaryIO, source: Mapping[str, object], matrices: Mapping[str, Array]) -> None:
    sizes = {name: data.nbytes for name, data in matrices.items()}
    # The offsets depend on the header's length, which depends on their digits: leave room for
    # offsets of any length.
    longest = {name: [1 << 62, 1 << 62] for name in sizes}
    start = _align(8 + len(json.dumps({"source": source, "matrices": longest})))
    places = {}
    for name, size in sizes.items():
        places[name] = [start, size]
        start = _align(start + size)
    header = json.dumps({"source": source, "matrices": places}).encode()
    file.write(len(header).to_bytes(8, "little") + header)
    for name, data in matrices.items():
        file.seek(places[name][0])
        file.write(data.data)


def _align(offset: int) -> int:
    return (offset + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
