"""Loading of the compiled kernels with :mod:`ctypes`, and checks of their library.

The C interface (``csrc/pronk.h``) has no types of Python, so one library works with all versions of
Python.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
from array import array
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pronk.base.arrays import BFLOAT16, FLOAT16, FLOAT32, INT4, INT8, Array, DType, address_of
from pronk.base.checks import check_choice
from pronk.base.errors import OptionError, describe_error
from pronk.kernels.build import library_name
from pronk.kernels.structures import (
    STRUCTURES,
    CBlocks,
    CDraftChain,
    CForward,
    CSampling,
    CWeights,
)
from pronk.kernels.threads import num_threads

VERSION = 28  # version of the C interface: ``PRONK_VERSION`` of ``csrc/pronk.h``

# Names of the values of ``pronk_isa`` (``csrc/pronk.h``). A processor with an instruction set also
# has all earlier ones.
INSTRUCTION_SETS = ("portable", "avx2", "avx512", "avx512_bf16", "amx")
CHOICES = ("auto", *INSTRUCTION_SETS)  # values of the option ``kernels``
# Instruction sets with products of bfloat16, whose rounding differs from that of float32 products.
_BF16_PRODUCTS = ("avx512_bf16", "amx")

# How matrix products with bfloat16 weights round. "portable": as float32 products, with the same
# bits on every instruction set. "fast": as the bfloat16 products of the instruction set.
RoundingBits = Literal["portable", "fast"]

# Numbers of the weight formats (``pronk_type`` of ``csrc/pronk.h``): of a data type; of codes with
# this number of bits and a scale per group; of super-blocks of this GGUF type,
# and of those that other GGUF types are decoded to.
TYPES: dict[DType, int] = {FLOAT32: 0, BFLOAT16: 1, FLOAT16: 2, INT8: 5, INT4: 14}
CODED_TYPES: dict[int, int] = {8: 3, 5: 6, 4: 4}
SUPER_BLOCK_TYPES: dict[str, int] = {
    "Q2_K": 11,
    "Q3_K": 12,
    "Q4_K": 7,
    "Q5_K": 8,
    "Q6_K": 9,
    "IQ4_XS": 13,
    "decoded": 10,
}

MAX_HEAD_DIM = 576  # ``MAX_HEAD_DIM`` of ``csrc/common.h``


class KernelsError(Exception):
    """The kernels' library is missing or unusable; the message is one line."""


@dataclass(frozen=True)
class Kernels:
    """A loaded library of kernels, and the instruction set to use.

    Attributes:
        library: the library, with the functions of ``csrc/pronk.h``.
        path: file of the library.
        isa: index of the instruction set in ``INSTRUCTION_SETS``.
        fast: whether products with bfloat16 weights are those of the instruction set, if it has
            such products.
    """

    library: Any = field(repr=False)
    path: Path
    isa: int
    fast: bool = False

    @property
    def name(self) -> str:
        """Name of the instruction set."""
        return INSTRUCTION_SETS[self.isa]

    @property
    def bits(self) -> RoundingBits:
        """Bits of the results; ``"portable"`` also if the instruction set has nothing faster."""
        return "fast" if self.fast and self.name in _BF16_PRODUCTS else "portable"

    @staticmethod
    def supports_head_dim(head_dim: int) -> bool:
        """Return whether the attention kernels support heads of this size."""
        return head_dim % 2 == 0 and head_dim <= MAX_HEAD_DIM

    def run(self, ops: Any, count: int, call: CForward) -> None:
        """Run a forward pass.

        Args:
            ops: array of operations (``COp``).
            count: number of operations.
            call: rows, inputs and results of the forward pass.

        Raises:
            MemoryError: memory is full.
        """
        code = self.library.pronk_run(ops, count, ctypes.byref(call))
        if code < 0:
            _check_status(code, call)

    def draft_chain(self, ops: Any, count: int, call: CForward, chain: CDraftChain) -> int:
        """Compute a chain of draft tokens, one forward pass per token; return the number of passes.

        The first forward pass computes the rows of ``call``, each further pass the last draft
        token. The chain ends after ``chain.steps`` tokens, or if ``chain.on_token`` returns 0.

        Raises:
            MemoryError: memory is full.
        """
        library = self.library
        code = library.pronk_draft_chain(ops, count, ctypes.byref(call), ctypes.byref(chain))
        return _check_status(code, call)

    def choose(self, logits: Array, temperature: float, key: int) -> int:
        """Return the first argmax of ``logits / temperature + noise``; -1 if a logit is not finite.

        Args:
            logits: float32 ``[vocab]``, contiguous.
            temperature: 0 or more; 0 means no noise.
            key: noise key of the position, in 0..2**64 - 1; see :mod:`pronk.sampling.noise`.
        """
        address = address_of(logits)
        return int(self.library.pronk_sample(address, logits.size, temperature, key, self.isa))

    def verify(
        self,
        sampling: CSampling,
        logits: Array,
        position: int,
        tokens: Sequence[int],
        parents: Sequence[int],
    ) -> tuple[list[int], int] | None:
        """Follow the target's tokens from the root of a token tree, as long as children have them.

        Args:
            sampling: options of the request.
            logits: float32 ``[nodes, vocab]``, contiguous: the logits after each node.
            position: index in the text of the token after the root.
            tokens: token id of each node.
            parents: parent of each node, -1 for the root and for nodes that may not be accepted.

        Returns:
            The accepted nodes, and the token after the last of them; ``None`` if logits on the path
            are not finite.

        Raises:
            MemoryError: memory is full.
        """
        num_nodes, vocab = logits.shape
        path = array("i", bytes(4 * num_nodes))
        token_ids = array("i", tokens)
        parent_nodes = array("i", parents)
        code = self.library.pronk_verify(
            ctypes.byref(sampling),
            address_of(logits),
            vocab,
            position,
            token_ids.buffer_info()[0],
            parent_nodes.buffer_info()[0],
            num_nodes,
            path.buffer_info()[0],
            self.isa,
        )
        if code < 0:
            _check_sampled(code)
            return None
        return path[:code].tolist(), path[code]

    def draft_token(
        self,
        sampling: CSampling,
        logits: Array,
        position: int,
        ids: NDArray[np.int32] | None = None,
    ) -> tuple[int, float, NDArray[np.float32]]:
        """Sample a draft token, with less precise noise than :meth:`choose`.

        A logit of ``-inf`` bans a token.

        Args:
            sampling: options of the request.
            logits: float32 ``[vocab]``, contiguous.
            position: index of the token in the text.
            ids: token id of each logit, ``[vocab]``; ``None``: 0, 1, ….

        Returns:
            The token, or -1 if all tokens are banned or a logit is NaN or ``inf``; its softmax
            probability over the scores; and the scores, float32 ``[vocab]``: the logits by the
            options plus noise.

        Raises:
            MemoryError: memory is full.
        """
        vocab = logits.size
        confidence = c_float()
        scores = np.empty(vocab, np.float32)
        token = self.library.pronk_sample_draft(
            ctypes.byref(sampling),
            address_of(logits),
            vocab,
            position,
            None if ids is None else address_of(ids),
            address_of(scores),
            ctypes.byref(confidence),
            self.isa,
        )
        _check_sampled(token)
        return int(token), confidence.value, scores

    def read(self, data: Array) -> None:
        """Read all bytes of an array on all threads, to measure the memory bandwidth."""
        self.library.pronk_read(address_of(data), data.nbytes, num_threads())

    def multiply(self, rounds: int) -> float:
        """Multiply 8-bit codes in registers on all threads; return the number of products.

        The number and the duration are proportional to ``rounds``. This is for measurements of the
        computing power. AMX tiles are not used.
        """
        return float(self.library.pronk_multiply(rounds, self.isa, num_threads()))


def _check_sampled(code: int) -> None:
    """Raise ``MemoryError`` if a function that samples had no memory."""
    if code == -2:
        msg = "kernels: no memory to sample"
        raise MemoryError(msg)


def _check_status(code: int, call: CForward) -> int:
    """Return the result of a kernel; raise an error if it is negative.

    -1 means too little memory, other codes a mistake in the call.
    """
    if code >= 0:
        return code
    failure = f"kernels: pass of {call.rows} rows failed"
    if code == -1:
        msg = f"{failure} (memory)"
        raise MemoryError(msg)
    msg = f"{failure} (unsupported shape, or rows without a cache slot)"
    raise AssertionError(msg)


# Result type and argument types of each function, by its name without ``pronk_``.
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "run": (c_int32, (c_void_p, c_int64, POINTER(CForward))),
    "draft_chain": (c_int32, (c_void_p, c_int64, POINTER(CForward), POINTER(CDraftChain))),
    "pack": (None, (POINTER(CWeights), c_void_p, c_int64, c_void_p, c_int32)),
    "pack_blocks": (
        c_int32,
        (POINTER(CWeights), POINTER(CBlocks), c_int64, c_int32, *[c_int64] * 2, c_void_p, c_int32),
    ),
    "pack_codes": (None, (POINTER(CWeights), *[c_void_p] * 4, c_int32)),
    "packed_size": (c_int64, (POINTER(CWeights),)),
    "round": (
        c_int32,
        (
            c_void_p,
            c_int32,
            *[c_int64] * 3,
            c_int32,
            c_int64,
            c_int32,
            *[c_void_p] * 2,
            *[c_int32] * 2,
        ),
    ),
    "unpack": (None, (POINTER(CWeights), c_int64, c_void_p)),
    "move": (c_int32, (*(c_void_p,) * 4, c_int64, c_void_p, c_void_p, c_int64)),
    "sample": (c_int32, (c_void_p, c_int64, c_float, c_uint64, c_int32)),
    "truncate": (c_int64, (c_void_p, *[c_int64] * 2, c_double, c_float, c_void_p, c_int32)),
    "likeliest": (None, (c_void_p, *[c_int64] * 3, *[c_void_p] * 2)),
    "verify": (
        c_int32,
        (
            POINTER(CSampling),
            c_void_p,
            *[c_int64] * 2,
            *[c_void_p] * 2,
            c_int32,
            c_void_p,
            c_int32,
        ),
    ),
    "sample_draft": (
        c_int32,
        (POINTER(CSampling), c_void_p, *[c_int64] * 2, *[c_void_p] * 3, c_int32),
    ),
    "exp": (None, (c_void_p, c_int64, c_int32)),
    "log": (None, (c_void_p, c_int64, c_int32)),
    "total": (c_double, (c_void_p, c_int64, c_int32)),
    "exp_total": (c_double, (c_void_p, c_int64, c_float, c_int32)),
    "read": (c_double, (c_void_p, c_int64, c_int32)),
    "multiply": (c_double, (c_int64, c_int32, c_int32)),
    "workspace": (c_int64, ()),
}


@cache
def open_library(path: Path) -> Any:
    """Load the kernels' library, once per process; the errors are those of :func:`load_library`."""
    return load_library(path, "pronk", VERSION, STRUCTURES, _SIGNATURES)


def load_library(
    path: Path,
    prefix: str,
    version: int,
    structures: Sequence[type[Structure]],
    signatures: Mapping[str, Any],
) -> Any:
    """Load a compiled library, and declare the signatures of its functions.

    Args:
        path: file of the library.
        prefix: beginning of the functions' names, without the underscore.
        version: expected result of the function ``{prefix}_version``.
        structures: structures whose sizes the function ``{prefix}_sizes`` must return.
        signatures: result type and argument types of each function, by its name without the prefix.

    Raises:
        KernelsError: the library is missing or damaged, or has another version or other structures.
    """
    remedy = "install pronk again"
    if not path.is_file():
        msg = f"found no compiled kernels at {path}; {remedy}"
        msg += ", with a C++ compiler or from a wheel for this platform"
        raise KernelsError(msg)
    if not _is_complete(path):
        msg = f"{path}: expected pronk's kernels, found a part of the file; {remedy}"
        raise KernelsError(msg)
    try:
        library = ctypes.CDLL(str(path))
        found_version = int(getattr(library, f"{prefix}_version")())
        sizes = (c_int32 * len(structures))()
        getattr(library, f"{prefix}_sizes")(sizes)
    except (OSError, AttributeError) as error:
        found = f"a file that cannot be loaded ({describe_error(error)[:80]})"
        msg = f"{path}: expected pronk's kernels, found {found}; {remedy}"
        raise KernelsError(msg) from error
    if found_version != version:
        found = f"version {found_version}"
        msg = f"{path}: expected kernels of version {version}, found {found}; {remedy}"
        raise KernelsError(msg)
    expected = [ctypes.sizeof(structure) for structure in structures]
    if list(sizes) != expected:
        msg = f"{path}: expected structures of {expected} bytes, found {list(sizes)}; {remedy}"
        raise KernelsError(msg)
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"{prefix}_{name}")
        function.restype = result
        function.argtypes = arguments
    return library


def _is_complete(path: Path) -> bool:
    """Return whether an ELF file is complete; True for other files.

    Loading a truncated ELF file would crash the process.
    """
    with path.open("rb") as file:
        header = file.read(64)
    if header[:4] != b"\x7fELF":
        return True
    # The section headers end the file; e_shoff, e_shentsize and e_shnum are their offset, the size
    # of one of them, and their number.
    start = int.from_bytes(header[40:48], "little")
    size = int.from_bytes(header[58:60], "little")
    count = int.from_bytes(header[60:62], "little")
    return start + size * count <= path.stat().st_size and len(header) == 64


def installed_library() -> Path:
    """Return the path of the kernels' library that the installation compiled or unpacked."""
    return Path(__file__).parent / library_name()


def candidates(
    choice: str = "auto", path: Path | None = None, bits: RoundingBits = "fast"
) -> list[Kernels]:
    """Return the kernels of each instruction set that is allowed, the best first.

    They are not tested by a computation; :func:`pronk.models.kernels.load_kernels` does that.

    Args:
        choice: ``"auto"`` for all instruction sets of this processor, or the name of one.
        path: file of the library; by default the installed one.
        bits: bits of products with bfloat16 weights.

    Raises:
        KernelsError: the library cannot be loaded.
        OptionError: ``choice`` is not an instruction set, or this processor lacks it.
    """
    check_choice("kernels", choice, CHOICES)
    location = path or installed_library()
    library = open_library(location)
    best = int(library.pronk_detect())
    usable = [Kernels(library, location, isa, bits == "fast") for isa in range(best, -1, -1)]
    found = [kernels for kernels in usable if choice in ("auto", kernels.name)]
    if not found:
        available = ", ".join(kernels.name for kernels in reversed(usable))
        msg = f"kernels: expected one that this processor has ({available}), found {choice!r}"
        raise OptionError(msg)
    return found


def arithmetic_digest(kernels: Kernels) -> str:
    """Return a digest of the code that computes, and of the processor.

    It covers the kernels' library, the instruction set, the bits, the version of NumPy and the
    processor.
    """
    digest = hashlib.sha256(kernels.path.read_bytes())
    names = f"{kernels.name} {kernels.bits}"
    digest.update(f"{names}\n{np.__version__}\n{_processor()}".encode())
    return digest.hexdigest()


def _processor() -> str:
    """Return the processor's model, flags and microcode, on which the results may depend."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    names = ("model name", "flags", "microcode", "Features", "CPU part")
    return "\n".join(line for line in lines if line.startswith(names))
