"""Interface of the suffix automaton in C++ (``csrc/suffix.cpp``), an index of the substrings of texts.

Where the last tokens of a request's text occur in an indexed text (a *match*), the tokens after the
occurrences become draft tokens. Acceptance is counted in *buckets*: by the source (the request's
own text or other texts), the length of the match, and the share of the token: its count after the
match, divided by 1 plus the counts of all tokens there. A draft token's *gain* is the product of
the estimated acceptance probabilities along its path from the root.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import POINTER, Structure, c_double, c_int32, c_int64, c_void_p, memset, sizeof
from typing import Any, NamedTuple
from weakref import finalize

from pronk.kernels import library as kernels
from pronk.kernels.build import suffix_library
from pronk.kernels.library import load_library
from pronk.kernels.structures import structure_fields

_VERSION = 1  # version of the C interface: result of ``pronk_suffixes_version``

NUM_BUCKETS = 32  # 2 kinds of sources × 4 ranges of match lengths × 4 ranges of shares
_NUM_DEPTHS = 4  # depths 1, 2 and 3 have separate priors; all depths from 4 on share one

# Initial cache of the priors, by bucket and depth; NaN: the library calls ``prior`` and stores the
# result.
_UNKNOWN_PRIORS: list[c_double | float] = [float("nan")] * (NUM_BUCKETS * _NUM_DEPTHS)

# Type of the C function ``prior(bucket, depth)``, which returns the prior acceptance probability of
# a draft token.
_Prior = ctypes.CFUNCTYPE(c_double, c_int32, c_int32)


class _TreeCall(Structure):
    """``pronk_suffix_tree`` of ``csrc/suffix.cpp``, which documents the fields."""

    _fields_ = structure_fields(
        ("sources", POINTER(c_void_p)),
        ("tail", POINTER(c_int32)),
        ("num_sources tail_tokens width max_depth min_match", c_int32),
        ("depth_factor min_gain weight", c_double),
        ("offered accepted priors", POINTER(c_double)),
        ("prior", _Prior),
        ("tokens parents buckets", POINTER(c_int32)),
        ("gains", POINTER(c_double)),
    )


# Result type and argument types of each function, by its name without ``pronk_suffixes_``.
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "new": (c_void_p, (c_int32,)),
    "free": (None, (c_void_p,)),
    "extend": (c_int32, (c_void_p, c_void_p, c_int64)),
    "end_text": (None, (c_void_p,)),
    "tokens": (c_int64, (c_void_p,)),
    "equal": (c_int32, (c_void_p, c_void_p)),
    "bytes": (c_int64, (c_void_p,)),
    "grow": (c_int32, (POINTER(_TreeCall),)),
}


def open_suffix_library() -> Any:
    """Load the suffix automaton's library; the errors are those of :func:`load_library`."""
    path = suffix_library(kernels.installed_library())
    return load_library(path, "pronk_suffixes", _VERSION, (_TreeCall,), _SIGNATURES)


class CompiledSuffixes:
    """Suffix automaton of one or more texts: their substrings, with counts and following tokens."""

    def __init__(self, library: Any, max_match: int) -> None:
        """Create an empty automaton; ``library`` is from :func:`open_suffix_library`.

        ``max_match`` is the maximum number of tokens of a substring that can be found, at least 1.
        """
        self.max_match = max_match
        self._library = library
        # address of the automaton in the library
        self.handle: int | None = library.pronk_suffixes_new(max_match)
        if self.handle is None:
            raise MemoryError
        finalize(self, library.pronk_suffixes_free, self.handle)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CompiledSuffixes):
            return NotImplemented
        return bool(self._library.pronk_suffixes_equal(self.handle, other.handle))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_match={self.max_match}, num_tokens={self.num_tokens})"

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens, with ids in [0, 2**31), to the current text; unusable after a MemoryError."""
        ids = [*tokens]
        if self._library.pronk_suffixes_extend(self.handle, (c_int32 * len(ids))(*ids), len(ids)):
            raise MemoryError

    def end_text(self) -> None:
        """End the current text; later tokens begin another text, and no substring spans both."""
        self._library.pronk_suffixes_end_text(self.handle)

    @property
    def num_tokens(self) -> int:
        """Number of appended tokens.

        A count in Python would be wrong if Ctrl-C ended :meth:`extend`.
        """
        return int(self._library.pronk_suffixes_tokens(self.handle))

    @property
    def nbytes(self) -> int:
        """Size of the automaton in bytes."""
        return int(self._library.pronk_suffixes_bytes(self.handle))


class TreeLimits(NamedTuple):
    """Limits of a tree, and of the matches that the tree is built from."""

    max_nodes: int  # maximum number of draft tokens
    max_depth: int  # maximum number of draft tokens on a path
    min_match: int  # minimum match length in tokens
    depth_factor: float  # maximum depth divided by the match length; depth 1 is always allowed
    # minimum gain of a node (probability that it and all its ancestors are accepted), 0..1
    min_gain: float


class NativeTree(NamedTuple):
    """A draft tree as lists with one entry per node, each node after its parent.

    The root's parent is -1.
    """

    tokens: list[int]
    parents: list[int]
    gains: list[float]
    buckets: list[int]


class NativeTreeBuilder:
    """Builds one request's draft trees with the library.

    A draft token's estimated acceptance probability is ``(accepted + prior * prior_weight) /
    (verified + prior_weight)``, with the numbers of accepted and verified draft tokens of its
    bucket.
    """

    def __init__(
        self, library: Any, prior: Callable[[int, int], float], prior_weight: float
    ) -> None:
        """Prepare the calls of ``library`` for one request.

        ``prior`` maps a bucket, 0 .. ``NUM_BUCKETS - 1``, and a depth, 1 or more, to the prior
        acceptance probability, which counts like ``prior_weight`` verified draft tokens. It is
        called once per pair, with depths from 4 on as one.
        """
        self._library = library
        self._num_verified = (c_double * NUM_BUCKETS)()
        self._num_accepted = (c_double * NUM_BUCKETS)()
        self._priors = (c_double * len(_UNKNOWN_PRIORS))(*_UNKNOWN_PRIORS)
        self._call = _TreeCall(
            offered=self._num_verified,
            accepted=self._num_accepted,
            priors=self._priors,
            weight=prior_weight,
        )
        # exceptions of ``prior``; :meth:`build` raises the first one
        self._raised: list[BaseException] = []
        raised = self._raised  # ``self`` in ``call_prior`` would be a reference cycle

        def call_prior(bucket: int, depth: int) -> float:
            try:
                return prior(bucket, depth)
            except BaseException as error:  # noqa: BLE001 - exceptions cannot propagate through C++
                raised.append(error)
                return 0.0

        self._call.prior = _Prior(call_prior)
        self._capacity = 0
        self._handles: list[int | None] = []  # automata of the last call
        self._tail = (c_int32 * 0)()

    def set_counts(
        self, num_verified: Mapping[int, float], num_accepted: Mapping[int, float]
    ) -> None:
        """Set the numbers of verified and of accepted draft tokens, by bucket; 0 for other buckets."""
        for counts, new_counts in (
            (self._num_verified, num_verified),
            (self._num_accepted, num_accepted),
        ):
            memset(counts, 0, sizeof(counts))
            for bucket, count in new_counts.items():
                if bucket >= 0:
                    counts[bucket] = count

    def build(
        self, sources: Sequence[CompiledSuffixes], tail: Sequence[int], limits: TreeLimits
    ) -> NativeTree:
        """Build a draft tree from the tokens after earlier occurrences of the text's longest suffixes.

        Draft tokens are added one by one, the one with the largest gain first. Raises
        ``MemoryError``. ``sources`` are the automaton of the request's own text, then those of
        other texts. ``tail`` are the last tokens of the text, at least one; the very last is the
        root of the tree.
        """
        call = self._call
        if limits.max_nodes >= self._capacity:
            call.tokens, call.parents, call.buckets = (
                (c_int32 * (limits.max_nodes + 1))() for _ in range(3)
            )
            call.gains = (c_double * (limits.max_nodes + 1))()
            # set last: if Ctrl-C prevents this, the next call allocates again
            self._capacity = limits.max_nodes + 1
        handles = [source.handle for source in sources]
        # what is compared is set last: after Ctrl-C, the next call sets all again
        if handles != self._handles:
            call.sources = (c_void_p * len(handles))(*handles)
            call.num_sources = len(handles)
            self._handles = handles
        if len(tail) > len(self._tail):
            call.tail = longer = (c_int32 * len(tail))()
            self._tail = longer
        self._tail[: len(tail)] = [*tail]
        call.tail_tokens = len(tail)
        call.width, call.max_depth, call.min_match, call.depth_factor, call.min_gain = limits
        num_nodes = self._library.pronk_suffixes_grow(call)
        if self._raised:
            self._priors[:] = _UNKNOWN_PRIORS  # the failed call has stored 0
            error = self._raised[0]
            self._raised.clear()
            raise error
        if num_nodes < 0:
            raise MemoryError
        return NativeTree(
            call.tokens[:num_nodes],
            call.parents[:num_nodes],
            call.gains[:num_nodes],
            call.buckets[:num_nodes],
        )
