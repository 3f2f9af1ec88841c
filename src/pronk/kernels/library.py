"""The compiled kernels, loaded with :mod:`ctypes`: found, checked, and described to Python.

Everything crosses the border as plain data (``csrc/pronk.h``), so the library depends on the version of neither torch
nor Python. Where it cannot be had, is another version's, or fails its self-check, the torch path computes instead, and
whoever loads a model is told in one line.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pronk.errors import OptionError
from pronk.kernels.build import library_name
from pronk.kernels.structures import STRUCTURES, CDraftChain, CDraftTree, CForward, CWeights
from pronk.kernels.threads import num_threads

__all__ = [
    "CHOICES",
    "CODED_TYPES",
    "INSTRUCTION_SETS",
    "TYPES",
    "Kernels",
    "KernelsError",
    "candidates",
    "installed",
    "open_library",
]

VERSION = 5

# By their numbers in the library, each wider than the one before.
INSTRUCTION_SETS = ("portable", "avx2", "avx512", "avx512_bf16", "amx")
CHOICES = ("auto", *INSTRUCTION_SETS, "torch")

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 5}
# Of quantized weights, by their bits.
CODED_TYPES: dict[int, int] = {8: 3, 4: 4}

_MOST_HEAD_DIM = 512


class KernelsError(Exception):
    """The library is not there or is not to be trusted; the message is one line."""


@dataclass(frozen=True)
class Kernels:
    """The library, and which of its instruction sets to use.

    Attributes:
        library: the loaded file.
        path: where it is.
        isa: number of the instruction set in :data:`INSTRUCTION_SETS`.
    """

    library: Any = field(repr=False)
    path: Path
    isa: int

    @property
    def name(self) -> str:
        """The instruction set's name."""
        return INSTRUCTION_SETS[self.isa]

    @staticmethod
    def covers(head_dim: int) -> bool:
        """Whether attention with heads of this size is among the kernels."""
        return head_dim % 2 == 0 and head_dim <= _MOST_HEAD_DIM

    def run(self, ops: Any, count: int, call: CForward) -> None:
        """Execute ``count`` operations over a pass.

        Raises:
            MemoryError: the pass needs more than there is.
        """
        _succeed(self.library.pronk_run(ops, count, ctypes.byref(call)), call)

    def grow(self, ops: Any, count: int, call: CForward, growth: CDraftChain) -> int:
        """Execute a program again and again, each time for the token that was guessed from the time before.

        Returns:
            How many times.

        Raises:
            MemoryError: a pass needs more than there is.
        """
        return _succeed(self.library.pronk_grow(ops, count, ctypes.byref(call), ctypes.byref(growth)), call)

    def choose(self, logits: Tensor, temperature: float, key: int) -> int:
        """The first largest of ``logits / temperature + noise``, or at temperature 0 of the logits.

        Args:
            logits: float32 ``[vocab]``, contiguous.
            temperature: 0 or more.
            key: what the noise is a hash of, beside the token, in [0, 2**64); see :mod:`pronk.sampling.params`.

        Returns:
            The token; -1 if a number is not finite.
        """
        return int(self.library.pronk_choose(logits.data_ptr(), logits.numel(), temperature, key, self.isa))

    def guess(self, logits: Tensor, temperature: float, key: int | None) -> tuple[int, float, NDArray[np.float32]]:
        """The same with less precise noise, or none, for a draft model; a logit of ``-inf`` is a banned token.

        Returns:
            The token, or -1 if all are banned or a number is not finite; its share among the exponentials of the
            scores; the scores, float32 ``[vocab]``.
        """
        vocab, share = logits.numel(), c_float()
        scores = np.empty(vocab, np.float32)
        noise = None if key is None else ctypes.byref(c_uint64(key))
        token = self.library.pronk_guess(
            logits.data_ptr(), vocab, temperature, noise, scores.ctypes.data, ctypes.byref(share), self.isa
        )
        return int(token), share.value, scores

    def read(self, data: Tensor) -> None:
        """Read a tensor's bytes once on all threads: the memory floor of a pass over it."""
        self.library.pronk_read(data.data_ptr(), data.nbytes, num_threads())

    @property
    def workspace(self) -> int:
        """Bytes that the library holds between passes."""
        return int(self.library.pronk_workspace())


def _succeed(code: int, call: CForward) -> int:
    if code < 0:
        reason = "memory" if code == -1 else "unsupported shape, or rows without a place"
        msg = f"kernels: pass of {call.rows} rows failed ({reason})"
        raise MemoryError(msg) if code == -1 else AssertionError(msg)
    return code


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "run": (c_int32, (c_void_p, c_int64, POINTER(CForward))),
    "grow": (c_int32, (c_void_p, c_int64, POINTER(CForward), POINTER(CDraftChain))),
    "pack": (None, (POINTER(CWeights), c_void_p, c_int64, c_void_p, c_int32)),
    "pack_codes": (None, (POINTER(CWeights), *[c_void_p] * 4, c_int32)),
    "packed_size": (c_int64, (POINTER(CWeights),)),
    "round": (c_int32, (c_void_p, c_int32, *[c_int64] * 3, c_int32, c_int64, c_int32, *[c_void_p] * 2, *[c_int32] * 2)),
    "unpack": (None, (POINTER(CWeights), c_int64, c_void_p)),
    "move": (c_int32, (*(c_void_p,) * 4, c_int64, c_void_p, c_void_p, c_int64)),
    "choose": (c_int32, (c_void_p, c_int64, c_float, c_uint64, c_int32)),
    "guess": (c_int32, (c_void_p, c_int64, c_float, *[c_void_p] * 3, c_int32)),
    "suffixes_new": (c_void_p, (c_int32,)),
    "suffixes_free": (None, (c_void_p,)),
    "suffixes_extend": (c_int32, (c_void_p, c_void_p, c_int64)),
    "suffixes_end_text": (None, (c_void_p,)),
    "suffixes_tokens": (c_int64, (c_void_p,)),
    "suffixes_equal": (c_int32, (c_void_p, c_void_p)),
    "suffixes_bytes": (c_int64, (c_void_p,)),
    "suffixes_grow": (c_int32, (POINTER(CDraftTree),)),
    "read": (c_double, (c_void_p, c_int64, c_int32)),
    "workspace": (c_int64, ()),
}


def _declare(library: Any) -> None:
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, f"pronk_{name}")
        function.restype, function.argtypes = result, arguments


@cache
def open_library(path: Path) -> Any:
    """The library, once it is known to be of this version.

    Raises:
        KernelsError: it is missing, damaged, or another version's.
    """
    again = "install pronk again"
    if not path.is_file():
        msg = f"found no compiled kernels at {path}; {again}, with a C++ compiler or from a wheel for this platform"
        raise KernelsError(msg)
    if not _is_whole(path):
        msg = f"{path}: expected pronk's kernels, found a part of the file; {again}"
        raise KernelsError(msg)
    try:
        library = ctypes.CDLL(str(path))
        version = int(library.pronk_version())
        sizes = (c_int32 * len(STRUCTURES))()
        library.pronk_sizes(sizes)
    except (OSError, AttributeError) as error:
        msg = f"{path}: expected pronk's kernels, found a file that cannot be loaded ({str(error)[:80]}); {again}"
        raise KernelsError(msg) from error
    if version != VERSION:
        msg = f"{path}: expected kernels of version {VERSION}, found version {version}; {again}"
        raise KernelsError(msg)
    mine = [ctypes.sizeof(each) for each in STRUCTURES]
    if list(sizes) != mine:
        msg = f"{path}: expected structures of {mine} bytes, found {list(sizes)}; {again}"
        raise KernelsError(msg)
    _declare(library)
    return library


def _is_whole(path: Path) -> bool:
    """Whether a file, if it is an ELF library, is as long as it says: loading a cut one ends the process."""
    with path.open("rb") as file:
        header = file.read(64)
    if header[:4] != b"\x7fELF":
        return True
    start, size, count = (int.from_bytes(header[a:b], "little") for a, b in ((40, 48), (58, 60), (60, 62)))
    return start + size * count <= path.stat().st_size and len(header) == 64


def installed() -> Path:
    """Where the library is that was compiled, or unpacked, when pronk was installed."""
    return Path(__file__).parent / library_name()


def candidates(choice: str = "auto", path: Path | None = None) -> list[Kernels]:
    """The kernels that a choice admits, the best first; they have yet to pass their self-check.

    Args:
        choice: ``"auto"`` is every instruction set of this processor; or the name of one.
        path: the library, if not the one that was installed.

    Raises:
        KernelsError: the library cannot be had.
        OptionError: ``choice`` is no instruction set, or not one of this processor's.
    """
    if choice not in CHOICES or choice == "torch":
        msg = f"kernels: expected {', '.join(CHOICES)}; found {choice!r}"
        raise OptionError(msg)
    place = path or installed()
    library = open_library(place)
    best = int(library.pronk_detect())
    if choice == "auto":
        return [Kernels(library, place, isa) for isa in range(best, -1, -1)]
    if INSTRUCTION_SETS.index(choice) > best:
        has = ", ".join(INSTRUCTION_SETS[: best + 1])
        msg = f"kernels: expected one that this processor has ({has}), found {choice!r}"
        raise OptionError(msg)
    return [Kernels(library, place, INSTRUCTION_SETS.index(choice))]
