"""The output of a request that the client already has, from which another replica resumes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from time import perf_counter

from pronk import Piece
from pronk.base import ResumeError
from pronk.server.replicas.messages import (
    GenerateRequest,
    ReplicaMessage,
    RequestAccepted,
    RequestFailed,
)
from pronk.serving import SourceStats, Stats, StepStats

_MAX_PRIORITY = 2**31


class ReplicaMismatchError(Exception):
    """Error that a replica has another model or other bits than the one that began the text."""


class ResumableStream:
    """Pieces of one request that the client has, and the request for the next replica.

    A resumed request does not compute ``prompt_logprobs``. If the client wants them, the next
    replica generates the text from the beginning (a replay), and the pieces that the client already
    has are dropped.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self.replica = ""  # name of the current replica; empty before it accepts the request
        # Whether the current replica still generates pieces that the client already has.
        self.replaying = False
        self._from_start = request.params.prompt_logprobs is not None
        self._given: dict[int, list[Piece]] = {}  # pieces that the client has, by sample index
        # By sample index, the number of pieces that a replay has yet to drop.
        self._skip: dict[int, int] = {}
        self._avoid = frozenset[str]()
        self._identity = ""  # ``RequestAccepted.identity`` of the last replica
        self._exact = True  # ``RequestAccepted.exact`` of the last replica
        self._attempts = 0  # number of replicas that got the request, the current one included
        self._first_step = 0  # number of decoding steps that earlier replicas delivered
        self._started = perf_counter()
        self._resumed = self._started  # time at which the current replica got the request
        # Time of each step, by its number, in seconds since the start of the request.
        self._clocks: dict[int, float] = {}

    def next_request(self, deadline: float | None, num_failures: int) -> GenerateRequest:
        """Return the request for the next replica, with a priority higher by ``num_failures``.

        Args:
            deadline: seconds left for the request; ``None`` sets no limit.
            num_failures: number of failed attempts since the last new token.

        Raises:
            ResumeError: no other replica can continue the text.
        """
        if self._given and self._from_start and self._request.params.rejects:
            rule = self._request.params.rule
            msg = (
                'prompt_logprobs: expected rule="coupled" to resume on another replica, found '
                f'"{rule}"; try again'
            )
            raise ResumeError(msg)
        if self._given and not self._exact and not self._request.params.rejects:
            msg = (
                "expected bits that do not depend on the batch to resume on another replica, "
                "found others; try again"
            )
            raise ResumeError(msg)
        self.replica = ""
        self.replaying = self._from_start and bool(self._given)
        self._attempts += 1
        self._resumed = perf_counter()
        steps = [piece.step for pieces in self._given.values() for piece in pieces]
        self._first_step = 1 + max(steps, default=-1)
        self._skip = {}
        if self._from_start:
            self._skip = {index: len(pieces) for index, pieces in self._given.items()}
        return replace(
            self._request,
            given={} if self._from_start else self._given,
            identity=self._identity if self._given else None,
            avoid=self._avoid,
            deadline=deadline,
            priority=min(_MAX_PRIORITY, self._request.priority + num_failures),
        )

    def avoid_replica(self) -> None:
        """Let the next attempts use the current replica only if no other one is available."""
        self._avoid |= {self.replica}

    @property
    def finished(self) -> bool:
        """Whether all samples are complete."""
        complete = sum(pieces[-1].completion is not None for pieces in self._given.values())
        return complete == len(self._request.prompts) * self._request.params.n

    def receive(self, message: ReplicaMessage) -> list[Piece]:
        """Record a replica's message; return the pieces in it that the client does not have yet.

        Raises:
            ReplicaMismatchError: the replica cannot continue the text of the replica before it.
            ResumeError: in a replay, a token differs from the token that the client already has.
            PronkError: the request failed.
        """
        if isinstance(message, RequestFailed):
            raise message.error
        if isinstance(message, RequestAccepted):
            self.replica = message.replica
            if self._given and message.identity != self._identity:
                raise ReplicaMismatchError(_difference(message.identity, self._identity))
            self._identity = message.identity
            self._exact = message.exact
            return []
        return [new for piece in message.pieces if (new := self._deliver(piece)) is not None]

    def _deliver(self, piece: Piece) -> Piece | None:
        """Return a piece with ``step`` counted over all replicas.

        Returns ``None`` for a piece that the client already has.
        """
        given = self._given.setdefault(piece.index, [])
        skip = self._skip.get(piece.index, 0)
        if skip:
            self._skip[piece.index] = skip - 1
            if given[-skip].token_id != piece.token_id:
                msg = "expected the tokens of the replica that ended, found others; try again"
                raise ResumeError(msg)
            return None
        self.replaying = False
        piece = replace(piece, step=piece.step + self._first_step)
        self._clocks.setdefault(piece.step, perf_counter() - self._started)
        if piece.completion is not None and self._attempts > 1:
            stats = self._total_stats(given, piece.completion.stats)
            piece = replace(piece, completion=replace(piece.completion, stats=stats))
        given.append(piece)
        return piece

    def _total_stats(self, given: Sequence[Piece], last: Stats) -> Stats:
        """Return the statistics of the last replica plus the steps of the earlier replicas.

        ``given`` are the pieces of one sample. Rejected draft tokens of earlier replicas are not
        counted, because their numbers are unknown.
        """
        since = self._resumed - self._started
        total = perf_counter() - self._started
        later = [step._replace(clock=since + step.clock) for step in last.steps]
        if self._from_start:
            return replace(last, steps=later, total_seconds=total)
        steps = list[StepStats]()
        sources = dict(last.sources)
        earlier = (piece for piece in given if piece.step < self._first_step)
        for number, group in groupby(earlier, lambda piece: piece.step):
            pieces = list(group)
            accepted = [piece.source for piece in pieces if piece.source is not None]
            count = len(accepted)
            clock = self._clocks[number]
            steps.append(StepStats(1 + count, count, count, count, len(pieces), 0.0, 0.0, clock))
            for source in accepted:
                counts = sources.get(source, SourceStats(0, 0))
                sources[source] = SourceStats(counts.drafted + 1, counts.accepted + 1)
        merged = replace(last, steps=steps + later, sources=sources, total_seconds=total)
        if not steps:
            return merged
        # After a resumption, the number of cached prompt tokens is unknown, because the number of
        # the last replica includes output tokens.
        return replace(merged, cached_tokens=0, disk_tokens=0)


def _difference(found: str, expected: str) -> str:
    """Describe how two identities differ, for example ``weights int8 instead of plain``."""
    own = json.loads(found)
    other = json.loads(expected)
    different = [key for key in own if own[key] != other.get(key)]
    return "; ".join(f"{key} {own[key]} instead of {other.get(key)}" for key in different)
