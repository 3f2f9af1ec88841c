"""What has been given out of a request by replicas that may die, and what another one is asked for then."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from time import perf_counter

from pronk.engine.stats import SourceStats, Stats, StepStats
from pronk.errors import ResumeError
from pronk.outputs import Piece
from pronk.replicas.messages import GenerateRequest, RequestAccepted, RequestFailed, Said

__all__ = ["ReplicaMismatchError", "ResumableStream"]

_MOST_PRIORITY = 2**31


class ReplicaMismatchError(Exception):
    """The replica is of another model than the one that has begun the text, or computes otherwise."""


class ResumableStream:
    """What has been given out of one request, by whom, and how another one is asked for the rest.

    Attributes:
        replica: the name of who speaks.
        repeats: whether what it says has been given out before.
    """

    def __init__(self, ask: GenerateRequest) -> None:
        self._ask, self.replica, self.repeats = ask, "", False
        self._given: dict[int, list[Piece]] = {}
        self._avoid = frozenset[str]()
        self._identity: str | None = None
        self._exact = True
        self._step = 0  # before which steps are another replica's
        # Reports on the prompt come with the last token, and of a text that is gone on with there would be none: it is
        # said again from its beginning, and what was given out is left out.
        self._again = ask.params.prompt_logprobs is not None
        self._skip: dict[int, int] = {}
        self._began = self._asked = perf_counter()
        self._asks = 0
        self._heard: dict[int, float] = {}  # when a step's first token came

    def ask(self, deadline: float | None, deaths: int) -> GenerateRequest:
        """For all that is still to come, before others that have waited less.

        Raises:
            ResumeError: of such a request nobody can go on with a text.
        """
        if self._again and self._given and self._ask.params.rejects:
            msg = "prompt_logprobs: a text that is drawn by rejection cannot be said again after its replica; ask again"
            raise ResumeError(msg)
        if self._given and not self._exact and not self._ask.params.rejects:
            msg = "expected kernels of equal bits to go on with a text whose replica has ended, found torch; ask again"
            raise ResumeError(msg)
        self.repeats, self._asked = self._again and bool(self._given), perf_counter()
        self._asks += 1
        self._step = 1 + max((piece.step for pieces in self._given.values() for piece in pieces), default=-1)
        self._skip = {index: len(pieces) for index, pieces in self._given.items()} if self._again else {}
        return replace(
            self._ask,
            given={} if self._again else self._given,
            identity=self._identity if self._given else None,
            avoid=self._avoid,
            deadline=deadline,
            priority=min(_MOST_PRIORITY, self._ask.priority + deaths),
        )

    def avoid(self) -> None:
        """Whoever speaks now cannot go on."""
        self._avoid |= {self.replica}

    @property
    def ended(self) -> bool:
        """Whether nothing is still to come."""
        ends = [pieces for pieces in self._given.values() if pieces[-1].completion is not None]
        return len(ends) == len(self._ask.prompts) * self._ask.params.n

    def hear(self, said: Said) -> list[Piece]:
        """What is new of what a replica says.

        Raises:
            ReplicaMismatchError: the replica is of another model than the text.
            ResumeError: it says something else than was given out.
            PronkError: the request has failed.
        """
        if isinstance(said, RequestFailed):
            raise said.error
        if isinstance(said, RequestAccepted):
            self.replica = said.replica
            if self._given and said.identity != self._identity:
                raise ReplicaMismatchError(_difference(said.identity, self._identity))
            self._identity, self._exact = said.identity, said.exact
            return []
        return [piece for each in said.pieces if (piece := self._new(each)) is not None]

    def _new(self, piece: Piece) -> Piece | None:
        given = self._given.setdefault(piece.index, [])
        left = self._skip.get(piece.index, 0)
        if left:
            self._skip[piece.index] = left - 1
            if given[len(given) - left].token_id != piece.token_id:
                msg = "expected the text that was given out before, found another; ask again"
                raise ResumeError(msg)
            return None
        self.repeats = False
        piece = replace(piece, step=piece.step + self._step)
        self._heard.setdefault(piece.step, perf_counter() - self._began)
        if piece.completion is not None and self._asks > 1:
            piece = replace(piece, completion=replace(piece.completion, stats=self._all(given, piece.completion.stats)))
        given.append(piece)
        return piece

    def _all(self, given: Sequence[Piece], rest: Stats) -> Stats:
        """What a text has cost whose end ``rest`` is of; of what others did, that which was accepted is known."""
        since, total = self._asked - self._began, perf_counter() - self._began
        later = [step._replace(clock=since + step.clock) for step in rest.steps]
        if self._again:
            return replace(rest, steps=later, total_seconds=total)
        steps, sources = list[StepStats](), dict(rest.sources)
        for number, group in groupby((piece for piece in given if piece.step < self._step), lambda piece: piece.step):
            pieces = list(group)
            taken = [piece.source for piece in pieces if piece.source is not None]
            count = len(taken)
            steps.append(StepStats(1 + count, count, count, count, len(pieces), 0.0, 0.0, self._heard[number]))
            for source in taken:
                drafted, accepted = sources.get(source, SourceStats(0, 0))
                sources[source] = SourceStats(drafted + 1, accepted + 1)
        # What it found in the cache is its own text, if not what nobody knows any more.
        cached = 0 if steps else rest.cached_tokens
        return replace(rest, steps=steps + later, sources=sources, cached_tokens=cached, total_seconds=total)


def _difference(found: str, expected: str | None) -> str:
    """In what two identities differ."""
    try:
        own, other = json.loads(found), json.loads(expected or "{}")
        return "; ".join(
            f"{what} {own[what]} instead of {other.get(what)}" for what in own if own[what] != other.get(what)
        )
    except (ValueError, TypeError, AttributeError):
        return f"{found} instead of {expected}"
