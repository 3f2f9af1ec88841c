"""The one document that a load test gives: what ``--json`` writes and what tables and the page are made from.

Times are in seconds. ``None`` stands for what was not or cannot be measured: a server that tells nothing of its steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from pronk.bench.document import Range
from pronk.bench.load.levels import Level
from pronk.bench.load.records import Call, Targets

__all__ = ["FORMAT", "LoadDocument", "LoadFigures", "Problem", "ServerFacts", "Summary", "unique_levels"]

FORMAT = "pronk-load/1"


@dataclass(frozen=True)
class Summary:
    """Of ``count`` values: their mean and percentiles, between neighbours by a straight line as NumPy has it."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


@dataclass(frozen=True)
class Problem:
    """What went wrong in so many calls, and what the server said to the first of them."""

    label: str
    count: int
    reason: str


@dataclass(frozen=True)
class LoadFigures:
    """One server at one level, over all rounds.

    Attributes:
        server: its name.
        level: the load.
        rounds: in which anything was measured.
        sent: requests that have ended, ``answered`` of them well.
        problems: of the others.
        seconds: of all rounds, each from its start to the end of its last answer.
        requests_per_second, tokens_per_second, prompt_tokens_per_second: of what was answered; median of the rounds.
        ratio: tokens per second over the first server's in the same round.
        ttft: to the first text; ``tpot``: per output token after the first; ``gap``: between chunks; ``e2e``: to the
            end. Of what was answered, counted from when it was to be sent.
        good: share of the requests sent that were answered within all targets; ``goodput``: how many a second.
        tokens: of the answers, ``prompt_tokens`` of what they answer, ``cached_tokens`` of those from its cache.
        counted: answers by how their tokens are known.
        steps: passes of the target; ``S``: tokens per pass; ``drafted`` and ``accepted`` are guesses.
        late: 99th percentile of how late the client was to send, which is in the latencies.
        busy: share of the time that the client's own process computed.
        calls: each of them.
    """

    server: str
    level: Level
    rounds: int
    sent: int
    answered: int
    problems: tuple[Problem, ...]
    seconds: float
    requests_per_second: Range
    tokens_per_second: Range
    prompt_tokens_per_second: Range | None
    ratio: Range | None
    ttft: Summary | None
    tpot: Summary | None
    gap: Summary | None
    e2e: Summary | None
    good: float | None
    goodput: Range | None
    tokens: int
    prompt_tokens: int | None
    cached_tokens: int | None
    counted: dict[str, int]
    steps: int | None
    S: float | None
    drafted: int | None
    accepted: int | None
    late: float
    busy: float
    calls: tuple[Call, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        found = {name: value for name, value in vars(self).items() if name != "calls"}
        plain = asdict(LoadFigures(**found, calls=()))
        return plain | {"calls": [call.to_dict() for call in self.calls]}


@dataclass(frozen=True)
class ServerFacts:
    """A server: its name and address, the model that answered, the fields that it refused and did without."""

    name: str
    url: str
    model: str
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadDocument:
    """A load test.

    Attributes:
        started: in ISO 8601, UTC.
        arguments: the command's, without keys.
        versions, hardware: of the client.
        servers: the first is what the others are compared with.
        targets: for goodput.
        interrupted: whether it was stopped before its end.
        figures: by level, then by server.
        sustained: server to the most requests a second of an open loop at which nine of ten kept the targets.
    """

    started: str
    arguments: dict[str, Any]
    versions: dict[str, str]
    hardware: dict[str, Any]
    servers: tuple[ServerFacts, ...]
    targets: Targets
    interrupted: bool
    figures: tuple[LoadFigures, ...]
    sustained: dict[str, float | None]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        rest = {name: value for name, value in vars(self).items() if name not in ("figures", "servers", "targets")}
        return {
            "format": FORMAT,
            **rest,
            "targets": asdict(self.targets),
            "servers": [asdict(server) for server in self.servers],
            "figures": [figures.to_dict() for figures in self.figures],
        }


def unique_levels(figures: Iterable[LoadFigures]) -> list[Level]:
    """The levels in the order in which they come."""
    return list(dict.fromkeys(f.level for f in figures))
