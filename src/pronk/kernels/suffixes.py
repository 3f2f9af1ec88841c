"""Python interface of the C++ suffix automaton, an index of all substrings of a text.

``csrc/suffix.cpp`` implements the automaton.

An occurrence of a text's last tokens in an indexed text is a *match*; the tokens after it become
draft tokens. Acceptance is counted in *buckets*. A draft token's bucket depends on the indexed text
(the request's own text or another), the length of the match, and the token's share: its count after
the match, divided by 1 plus the counts of all tokens there. A draft token's *gain* is the product
of the estimated acceptance probabilities along its path from the root.
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

_VERSION = 2  # version of the C interface: result of ``pronk_suffixes_version``

NUM_BUCKETS = 32  # 2 kinds of indexed texts × 4 ranges of match lengths × 4 ranges of shares
_NUM_DEPTHS = 4  # depths 1, 2 and 3 have separate priors; all depths from 4 on share one

# Initial cache of the prior acceptance probabilities, by bucket and depth. Where an entry is NaN,
# the library calls ``prior`` and stores the result.
_UNKNOWN_PRIORS: list[c_double | float] = [float("nan")] * (NUM_BUCKETS * _NUM_DEPTHS)

# Type of a function ``prior(bucket, depth)`` for C, which returns the prior acceptance probability
# of a draft token.
_Prior = ctypes.CFUNCTYPE(c_double, c_int32, c_int32)


class _TreeCall(Structure):
    """Arguments and results of a call that builds a draft tree, as C structure.

    Its name in C is ``pronk_suffix_tree``; ``csrc/suffix.cpp`` documents the fields.
    """

    _fields_ = structure_fields(
        ("sources", POINTER(c_void_p)),
        ("appended", POINTER(c_int32)),
        ("first_appended num_appended", c_int64),
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
    """Suffix automaton of texts: an index of their substrings, with counts and following tokens."""

    def __init__(self, library: Any, max_match: int) -> None:
        """Create an empty automaton.

        Args:
            library: result of :func:`open_suffix_library`.
            max_match: maximum number of tokens of a substring that can be found, at least 1.

        Raises:
            MemoryError: there is too little memory.
        """
        self.max_match = max_match
        # Number of tokens whose appending has returned. After Ctrl-C in a call, the automaton may
        # have more (``num_tokens``).
        self.num_known = 0
        self._library = library
        # Address of the automaton in the library.
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
        """Append tokens, with ids in 0..2**31 - 1, to the current text.

        Raises:
            MemoryError: there is too little memory; the automaton cannot be used any more.
        """
        ids = list(tokens)
        c_ids = (c_int32 * len(ids))(*ids)
        if self._library.pronk_suffixes_extend(self.handle, c_ids, len(ids)):
            raise MemoryError
        self.num_known = self.num_tokens

    def end_text(self) -> None:
        """End the current text: later tokens begin another text, and no substring spans both."""
        self._library.pronk_suffixes_end_text(self.handle)

    @property
    def num_tokens(self) -> int:
        """Number of appended tokens.

        The library counts them, because a count in Python would be wrong after Ctrl-C.
        """
        return int(self._library.pronk_suffixes_tokens(self.handle))

    @property
    def nbytes(self) -> int:
        """Size of the automaton in bytes."""
        return int(self._library.pronk_suffixes_bytes(self.handle))


class TreeLimits(NamedTuple):
    """Limits of a draft tree, and of the matches from which it is built.

    Attributes:
        max_nodes: maximum number of draft tokens.
        max_depth: maximum number of draft tokens on a path.
        min_match: minimum length of a match in tokens.
        depth_factor: maximum depth divided by the length of the match; depth 1 is always allowed.
        min_gain: minimum gain of a node, 0..1: the estimated probability that the node and all its
            ancestors are accepted.
    """

    max_nodes: int
    max_depth: int
    min_match: int
    depth_factor: float
    min_gain: float


class NativeTree(NamedTuple):
    """A draft tree as lists with one entry per node; each node comes after its parent.

    Attributes:
        tokens: token ids; the first one is the root, the last token of the text.
        parents: index of each node's parent; -1 for the root.
        gains: estimated probability that the node and all its ancestors are accepted.
        buckets: number of each node's bucket.
    """

    tokens: list[int]
    parents: list[int]
    gains: list[float]
    buckets: list[int]


class NativeTreeBuilder:
    """Builder of the draft trees of one request.

    The estimated acceptance probability of a draft token is ``(accepted + prior * prior_weight) /
    (verified + prior_weight)``, where ``accepted`` and ``verified`` are numbers of draft tokens of
    its bucket.
    """

    def __init__(
        self, library: Any, prior: Callable[[int, int], float], prior_weight: float
    ) -> None:
        """Prepare the calls of the library.

        Args:
            library: result of :func:`open_suffix_library`.
            prior: function of a bucket (0..31) and a depth (1..4; 4 stands for all greater depths,
                too) that returns the prior acceptance probability. It is called once per pair.
            prior_weight: number of verified draft tokens that the prior counts for.
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
        # Exceptions of ``prior``, which cannot propagate through C++; ``build`` raises the first.
        self._raised: list[BaseException] = []
        raised = self._raised  # ``self`` in ``call_prior`` would be a reference cycle

        def call_prior(bucket: int, depth: int) -> float:
            try:
                return prior(bucket, depth)
            except BaseException as error:  # noqa: BLE001 - raised later
                raised.append(error)
                return 0.0

        self._call.prior = _Prior(call_prior)
        self._capacity = 0
        self._handles: list[int | None] = []  # addresses of the last call's automata
        self._tail = (c_int32 * 0)()

    def set_counts(
        self, num_verified: Mapping[int, float], num_accepted: Mapping[int, float]
    ) -> None:
        """Set the numbers of verified and of accepted draft tokens by bucket; other buckets get 0.

        Negative bucket numbers are ignored.
        """
        pairs = ((self._num_verified, num_verified), (self._num_accepted, num_accepted))
        for counts, new_counts in pairs:
            memset(counts, 0, sizeof(counts))
            for bucket, count in new_counts.items():
                if bucket >= 0:
                    counts[bucket] = count

    def build(
        self,
        sources: Sequence[CompiledSuffixes],
        tail: Sequence[int],
        limits: TreeLimits,
        appended: Sequence[int] = (),
    ) -> NativeTree:
        """Build a draft tree from the tokens after earlier occurrences of the text's last tokens.

        Draft tokens are added one by one, always the one with the largest gain.

        Args:
            sources: the automaton of the request's own text, then the automata of other texts.
            tail: the last tokens of the text, at least one; the very last is the root of the tree.
            limits: limits of the tree.
            appended: tokens of the request's text after the first ``sources[0].num_known``. The
                call first appends those of them that this automaton lacks.

        Raises:
            MemoryError: there is too little memory.
        """
        # In the next two blocks, Ctrl-C may end the method before the last assignment; the next
        # call then repeats the block.
        call = self._call
        if limits.max_nodes >= self._capacity:
            capacity = limits.max_nodes + 1
            call.tokens = (c_int32 * capacity)()
            call.parents = (c_int32 * capacity)()
            call.buckets = (c_int32 * capacity)()
            call.gains = (c_double * capacity)()
            self._capacity = capacity
        handles = [source.handle for source in sources]
        if handles != self._handles:
            call.sources = (c_void_p * len(handles))(*handles)
            call.num_sources = len(handles)
            self._handles = handles
        if len(tail) > len(self._tail):
            longer = (c_int32 * len(tail))()
            call.tail = longer
            self._tail = longer
        self._tail[: len(tail)] = list(tail)
        call.tail_tokens = len(tail)
        call.width, call.max_depth, call.min_match, call.depth_factor, call.min_gain = limits
        own = sources[0]
        call.appended = (c_int32 * len(appended))(*appended)
        call.first_appended = own.num_known
        call.num_appended = len(appended)
        num_nodes = self._library.pronk_suffixes_grow(call)
        if self._raised:
            self._priors[:] = _UNKNOWN_PRIORS  # the failed call has stored 0 as a prior
            error = self._raised[0]
            self._raised.clear()
            raise error
        if num_nodes < 0:
            raise MemoryError
        own.num_known = call.first_appended + len(appended)
        return NativeTree(
            call.tokens[:num_nodes],
            call.parents[:num_nodes],
            call.gains[:num_nodes],
            call.buckets[:num_nodes],
        )
