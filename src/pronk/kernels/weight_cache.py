"""File with the packed weights of a model: later processes map it instead of packing them again.

The file consists of these parts::

    length of the JSON text, 8 bytes, little-endian
    JSON text: {"source": …, "matrices": {name: [offset, size]}}
    the matrices, each at a multiple of 4 KiB

``source`` identifies the model's files and the packed layout. A file with another ``source`` is
replaced. Mapped matrices are read from the page cache, so processes that map the same file share
its memory. The time of access of a file is set when a process maps it; when a new file exceeds the
size of the folder, the files that were not used for longest are deleted.
"""

from __future__ import annotations

import json
import mmap
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pronk.base.arrays import Array
from pronk.base.errors import OptionError, describe_error
from pronk.base.files.atomic import replace_file
from pronk.kernels.library import VERSION

_ALIGNMENT = 4096  # bytes; each matrix begins at a multiple of this in the file
_MAX_HEADER_BYTES = 1 << 24
_SUFFIX = ".packed"  # of the files' names
_DEFAULT_SIZE = 16 << 30  # bytes of all files of a folder: those of two models of 14B in 4 bits


class WeightCache:
    """The packed matrices of one model: those in its cache file, and new ones to be written to it.

    Args:
        folder: folder of the file.
        identity: for each of the model's files its path, and numbers that change with its content.
        size: maximum number of bytes of all files of packed weights in the folder.
    """

    def __init__(
        self,
        folder: Path,
        identity: Sequence[tuple[str, int, int, int]],
        size: int = _DEFAULT_SIZE,
    ) -> None:
        self.path = folder / f"{sha256(os.fsencode(identity[0][0])).hexdigest()[:32]}{_SUFFIX}"
        self._size = size
        self._source = {"version": VERSION, "files": [list(file) for file in identity]}
        self._mapped = self._map()
        self._new: dict[str, Array] = {}

    @classmethod
    def open(
        cls,
        option: bool | str | Path,
        identity: Sequence[tuple[str, int, int, int]] | None,
        size: int | None = None,
    ) -> WeightCache | None:
        """Return the cache that the option ``weight_cache`` of :class:`pronk.LLM` asks for, if any.

        Args:
            option: False for no cache, True for the default folder, or a folder.
            identity: as in the constructor; ``None`` if the weights of this model cannot be cached.
            size: maximum number of bytes of the folder; ``None``: 16 GiB.

        Raises:
            OptionError: the option has another type, the weights cannot be cached, there is a size
                without a cache, or there is no home folder.
        """
        if option is False:
            if size is not None:
                msg = (
                    "weight_cache_size: expected weight_cache with it, found it alone; "
                    "turn weight_cache on"
                )
                raise OptionError(msg)
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
            folder = default_folder() if option is True else Path(option).expanduser()
        except RuntimeError as error:
            msg = "weight_cache: expected a home folder, found none; name a folder"
            raise OptionError(msg) from error
        return cls(folder, identity, _DEFAULT_SIZE if size is None else size)

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
        """Write the file if matrices were added; warn on a failure, such as a full disk.

        A file that is larger than the folder may be is not written. Files of other models are
        deleted, the least recently used first, until all files fit the folder's size.
        """
        if not self._new:
            return
        matrices = self._mapped | self._new
        needed = sum(_align(data.nbytes) for data in matrices.values())
        if needed > self._size:
            warnings.warn(
                f"{self.path}: packed weights not kept: expected at most {self._size} bytes, "
                f"found {needed}; give a larger weight_cache_size",
                stacklevel=2,
            )
            self._new.clear()
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._make_room(needed)
            with replace_file(self.path, shared=True) as file:
                _write(file, self._source, matrices)
        except OSError as error:
            reason = describe_error(error)
            warnings.warn(f"{self.path}: cannot keep the packed weights ({reason})", stacklevel=2)
        self._new.clear()

    def _make_room(self, needed: int) -> None:
        """Delete files of other models until ``needed`` bytes fit the folder's size."""
        others = [path for path in self.path.parent.glob(f"*{_SUFFIX}") if path != self.path]
        states = {path: path.stat() for path in others}
        used = needed + sum(state.st_size for state in states.values())
        for path in sorted(others, key=lambda path: states[path].st_atime_ns):
            if used <= self._size:
                break
            path.unlink(missing_ok=True)
            used -= states[path].st_size

    def _map(self) -> dict[str, Array]:
        """Return the matrices of the file as views of its mapping, by name.

        There are none if the file is missing or damaged, or belongs to another model or layout.
        """
        # RecursionError: the JSON text is deeply nested.
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            with self.path.open("rb") as file:
                header = _read_header(file)
                file_size = file.seek(0, os.SEEK_END)
                if header["source"] != self._source:
                    return {}
                for start, size in header["matrices"].values():
                    is_inside = 0 < start <= start + size <= file_size
                    if not is_inside or start % _ALIGNMENT:
                        return {}
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            written = self.path.stat().st_mtime_ns
            with suppress(OSError):  # the file of another user
                os.utime(self.path, ns=(time.time_ns(), written))
            if hasattr(mmap, "MADV_WILLNEED"):
                with suppress(OSError):
                    memory.madvise(mmap.MADV_WILLNEED)
            return {
                name: np.frombuffer(memory, np.uint8, size, start)
                for name, (start, size) in header["matrices"].items()
            }
        return {}


def default_folder() -> Path:
    """Return the folder of the option ``weight_cache=True``.

    Raises:
        RuntimeError: there is no home folder.
    """
    return Path.home() / ".cache" / "pronk" / "weights"


def remove_orphans(folder: Path) -> int:
    """Delete the packed weights in a folder whose model is gone; return the number of bytes freed.

    Damaged files are deleted, too.
    """
    freed = 0
    for path in folder.glob(f"*{_SUFFIX}"):
        with suppress(OSError):
            if not _has_model(path):
                size = path.stat().st_size
                path.unlink()
                freed += size
    return freed


def _has_model(path: Path) -> bool:
    """Return whether all files of the model exist from which a file was packed."""
    with suppress(ValueError, KeyError, TypeError, IndexError, RecursionError):
        with path.open("rb") as file:
            header = _read_header(file)
        return all(Path(source[0]).exists() for source in header["source"]["files"])
    return False


def _read_header(file: BinaryIO) -> Any:
    """Return the JSON document at the beginning of a file."""
    length = int.from_bytes(file.read(8), "little")
    return json.loads(file.read(min(length, _MAX_HEADER_BYTES)))


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
