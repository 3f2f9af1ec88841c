"""What a load test measured: a call for each request, a window for each stretch of calls to one server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pronk.bench.load.levels import Level

__all__ = ["Call", "Counted", "Targets", "Window"]

# How the tokens of an answer are known, best first: from the server; because it ended at max_tokens; or not at all,
# and then each chunk with text is taken for one.
Counted = Literal["usage", "length", "chunks"]


@dataclass(frozen=True, slots=True)
class Call:
    """One request and its answer. Times are in seconds.

    Attributes:
        id: the prompt's.
        due: when it was meant to be sent, since the window's start.
        late: how much later it was sent.
        ttft: from ``due`` to the first text; of an answer without text, to its end.
        last: from ``due`` to the last text.
        e2e: from ``due`` to the end of the answer.
        gaps: between neighbouring chunks with text.
        chunks: how many chunks had text.
        tokens: of the output; ``counted`` says how they are known.
        prompt_tokens: of the prompt, ``cached_tokens`` of them found in the server's cache, if it says so.
        steps: passes of the target; ``drafted`` and ``accepted`` are guesses. Of servers that say so.
        finish: why the answer ended, in the protocol's words.
        error: what went wrong, in few words that many calls share; ``reason`` is the server's own.
    """

    id: str
    due: float
    late: float
    ttft: float = 0.0
    last: float = 0.0
    e2e: float = 0.0
    gaps: tuple[float, ...] = ()
    chunks: int = 0
    tokens: int = 0
    counted: Counted = "usage"
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    steps: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    finish: str | None = None
    error: str | None = None
    reason: str = ""

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; ``None`` if there is none after it."""
        return (self.last - self.ttft) / (self.tokens - 1) if self.tokens > 1 else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without the gaps, of which there are many."""
        return {name: value for name, value in asdict(self).items() if name != "gaps"}


@dataclass(frozen=True)
class Targets:
    """What a request must keep, all of it, to count for goodput; in seconds, ``None`` asks nothing."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def met_by(self, call: Call) -> bool:
        """Whether a call keeps them; one that failed keeps none, a single token has no time per further token."""
        pairs = ((self.ttft, call.ttft), (self.tpot, call.tpot), (self.e2e, call.e2e))
        return call.error is None and all(most is None or found is None or found <= most for most, found in pairs)

    def __str__(self) -> str:
        wanted: Mapping[str, float] = {name: value for name, value in asdict(self).items() if value is not None}
        return ", ".join(f"{name.upper()} ≤ {1e3 * value:g} ms" for name, value in wanted.items())


@dataclass
class Window:
    """The calls to one server at one level in one round.

    Attributes:
        server: its name.
        turn: the round's number, from 0.
        seconds: from the start to the end of the last call.
        busy: seconds that the client's own process computed in them.
        calls: in the order in which they ended.
    """

    server: str
    level: Level
    turn: int
    seconds: float = 0.0
    busy: float = 0.0
    calls: list[Call] = field(default_factory=list)
