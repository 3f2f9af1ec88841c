"""Python interface of the C++ merges of SentencePiece tokenizers (``csrc/merges.cpp``)."""

from __future__ import annotations

import ctypes
import secrets
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from pronk.kernels import library as kernels
from pronk.kernels.build import suffix_library
from pronk.kernels.library import load_library

_VERSION = 1  # version of the C interface: result of ``pronk_merges_version``
_NONE = -1  # stands for no token
_MAX_BYTES = 2**30  # of a text, so that numbers of its symbols and pairs fit in 32 bits

# Result type and argument types of each function, by its name without ``pronk_merges_``.
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "new": (c_void_p, (*[c_void_p] * 4, c_int32, c_int32, c_uint64, POINTER(c_int32))),
    "free": (None, (c_void_p,)),
    "find": (c_int32, (c_void_p, c_char_p, c_int32)),
    "encode": (c_int64, (c_void_p, c_char_p, c_int32, c_void_p)),
}


@cache
def _open_library(path: Path) -> Any:
    return load_library(path, "pronk_merges", _VERSION, (), _SIGNATURES)


class RepeatedTokenError(ValueError):
    """Two tokens have the same text.

    Attributes:
        token: the second one.
    """

    def __init__(self, token: int) -> None:
        super().__init__(f"expected every token once, found token {token} twice")
        self.token = token


class ScoreMerges:
    """Vocabulary of a SentencePiece BPE that splits texts into its tokens.

    The vocabulary is in memory once: no table of merges is built, because the two tokens of a merge
    are together the text of a token.
    """

    def __init__(
        self,
        data: NDArray[np.uint8],
        starts: NDArray[np.int32],
        stops: NDArray[np.int32],
        ranks: NDArray[np.int32],
        unknown: int | None,
    ) -> None:
        """Index a vocabulary.

        Args:
            data: UTF-8 bytes of all tokens.
            starts: place of each token in ``data``, ``[tokens]``.
            stops: end of each token in ``data``, ``[tokens]``; an empty token is left out.
            ranks: rank of each token, ``[tokens]``: tokens with smaller ranks are merged first.
            unknown: token of characters that have none; ``None``: they are left out.

        Raises:
            KernelsError: the library is missing or unusable.
            MemoryError: there is too little memory.
            RepeatedTokenError: two tokens have the same text.
        """
        library = _open_library(suffix_library(kernels.installed_library()))
        self._library = library
        self._arrays = (data, starts, stops, ranks)  # the library reads them
        addresses = [array.ctypes.data for array in self._arrays]
        repeated = c_int32()
        self._handle: int | None = library.pronk_merges_new(
            *addresses,
            len(ranks),
            _NONE if unknown is None else unknown,
            secrets.randbits(64),
            byref(repeated),
        )
        if self._handle is None:
            raise MemoryError
        finalize(self, library.pronk_merges_free, self._handle)
        if repeated.value != _NONE:
            raise RepeatedTokenError(repeated.value)

    def find(self, text: str) -> int | None:
        """Return the token with a text; ``None`` if there is none."""
        stored = text.encode()
        token = int(self._library.pronk_merges_find(self._handle, stored, len(stored)))
        return None if token == _NONE else token

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a normalized text. Other threads run meanwhile.

        Raises:
            MemoryError: there is too little memory.
        """
        stored = text.encode()
        if len(stored) > _MAX_BYTES:
            raise MemoryError
        ids = (c_int32 * len(stored))()
        count = self._library.pronk_merges_encode(
            self._handle, stored, len(stored), ctypes.addressof(ids)
        )
        if count < 0:
            raise MemoryError
        return ids[:count]
