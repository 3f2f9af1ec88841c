"""Suffix automata of the compiled kernels, and the trees that they grow (``csrc/suffix.cpp``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import c_double, c_int32, c_void_p, memset, sizeof
from typing import Any, NamedTuple
from weakref import finalize

from pronk.kernels.structures import CDraftTree, Prior

__all__ = ["NUM_WAYS", "CompiledSuffixes", "CompiledTreeGrower", "GrownTree"]

# Kinds of guesses, and classes of depths that make a difference to how often they are right.
NUM_WAYS, _DEPTHS = 32, 4

_UNKNOWN: list[c_double | float] = [float("nan")] * (NUM_WAYS * _DEPTHS)


class CompiledSuffixes:
    """The strings of some texts, their counts and what follows them.

    Attributes:
        max_match: longest match that is looked for, at least 1 token.
        handle: what the library knows it by.
    """

    def __init__(self, library: Any, max_match: int) -> None:
        """Empty.

        Raises:
            MemoryError: there is none.
        """
        self.max_match, self._library = max_match, library
        self.handle: int | None = library.pronk_suffixes_new(max_match)
        if self.handle is None:
            raise MemoryError
        finalize(self, library.pronk_suffixes_free, self.handle)

    def __eq__(self, other: object) -> bool:
        """Whether it was made from the same texts."""
        if not isinstance(other, CompiledSuffixes):
            return NotImplemented
        return bool(self._library.pronk_suffixes_equal(self.handle, other.handle))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Its size, as its contents are long."""
        return f"{type(self).__name__}(max_match={self.max_match}, num_tokens={self.num_tokens})"

    def extend(self, tokens: Iterable[int]) -> None:
        """The text goes on. For each token amortized constant time, plus ``max_match`` steps.

        Args:
            tokens: ids, each at least 0 and below 2**31.

        Raises:
            MemoryError: there is none, and this is of no use any more.
        """
        ids = [*tokens]
        if self._library.pronk_suffixes_extend(self.handle, (c_int32 * len(ids))(*ids), len(ids)):
            raise MemoryError

    def end_text(self) -> None:
        """The next token begins another text: no string goes across."""
        self._library.pronk_suffixes_end_text(self.handle)

    @property
    def num_tokens(self) -> int:
        """Tokens it was extended by; the library counts them, as an interruption may come right after it was."""
        return int(self._library.pronk_suffixes_tokens(self.handle))

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it holds."""
        return int(self._library.pronk_suffixes_bytes(self.handle))


class GrownTree(NamedTuple):
    """A tree as plain lists, the root first and parents before their children."""

    tokens: list[int]
    parents: list[int]
    gains: list[float]
    ways: list[int]


class CompiledTreeGrower:
    """Grows trees for one request.

    A guess of a way is right with a probability of ``(taken + prior * weight) / (offered + weight)``.
    """

    def __init__(self, library: Any, weight: float, prior: Callable[[int, int], float]) -> None:
        """A request.

        Args:
            library: the compiled kernels.
            weight: how many observations a prior is worth.
            prior: of a way, below ``NUM_WAYS``, and a depth, from 1 on; asked once for each of both, until
                :meth:`forget`.
        """
        self._library = library
        self._offered, self._taken = (c_double * NUM_WAYS)(), (c_double * NUM_WAYS)()
        self._priors = (c_double * len(_UNKNOWN))(*_UNKNOWN)
        self._call = CDraftTree(offered=self._offered, taken=self._taken, priors=self._priors, weight=weight)
        self._raised: list[BaseException] = []
        raised = self._raised

        def ask(way: int, depth: int) -> float:
            try:
                return prior(way, depth)
            except BaseException as error:  # noqa: BLE001 - nothing can be raised through the kernels
                raised.append(error)
                return 0.0

        self._call.prior = Prior(ask)
        self._room = 0

    def forget(self) -> None:
        """Priors may have changed."""
        self._priors[:] = _UNKNOWN

    def learn(self, offered: Mapping[int, float], taken: Mapping[int, float]) -> None:
        """How many guesses of each way were seen, and how many of these were right."""
        for seen, known in ((self._offered, offered), (self._taken, taken)):
            memset(seen, 0, sizeof(seen))
            for way, count in known.items():
                seen[way] = count

    def grow(
        self,
        sources: Sequence[CompiledSuffixes],
        tail: Sequence[int],
        *,
        width: int,
        max_depth: int,
        min_match: int,
        depth_factor: float,
        least: float,
    ) -> GrownTree:
        """What followed the longest ends of a text, likeliest first.

        Args:
            sources: the text's own strings first.
            tail: the text's last tokens, at least one.
            width: most guesses.
            max_depth: most guesses above one another.
            min_match: shortest match that counts.
            depth_factor: a match supports guesses to so many times its length.
            least: guesses of a smaller gain do not count.

        Raises:
            MemoryError: there is none.
        """
        call = self._call
        self._make_room(width + 1)
        call.sources = (c_void_p * len(sources))(*[each.handle for each in sources])
        call.tail, call.tail_tokens, call.num_sources = (c_int32 * len(tail))(*tail), len(tail), len(sources)
        call.width, call.max_depth, call.min_match = width, max_depth, min_match
        call.depth_factor, call.least = depth_factor, least
        nodes = self._library.pronk_suffixes_grow(call)
        if self._raised:
            self.forget()
            raise self._raised.pop()
        if nodes < 0:
            raise MemoryError
        return GrownTree(call.tokens[:nodes], call.parents[:nodes], call.gains[:nodes], call.ways[:nodes])

    def _make_room(self, nodes: int) -> None:
        if nodes > self._room:
            call = self._call
            call.tokens, call.parents, call.ways = ((c_int32 * nodes)() for _ in range(3))
            call.gains = (c_double * nodes)()
            self._room = nodes  # at last: an interruption may come in between
