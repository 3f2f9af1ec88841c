"""Result of the verification of a server: one row per check and route."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import zip_longest
from platform import machine, system
from typing import Any, Literal

from pronk import __version__
from pronk.base.checks import check_integer, check_number
from pronk.lab.verification.remote.client import Answer, Route

Status = Literal["passed", "failed", "not supported", "skipped"]
_EXCERPT = 40  # characters of a text to quote around the first difference


@dataclass(frozen=True)
class RemoteSettings:
    """Settings of the verification of a server."""

    max_tokens: int = 48  # number of tokens per text
    rounds: int = 1  # number of repetitions of each comparison
    batch: int = 8  # number of requests at the same time
    tolerance: float = 1e-5  # largest difference of two log-probabilities that count as equal
    seed: int = 1  # first seed of sampled texts

    def __post_init__(self) -> None:
        check_integer("max_tokens", self.max_tokens, 8, 4096)
        check_integer("rounds", self.rounds, 1, 1000)
        check_integer("batch", self.batch, 2, 256)
        check_integer("seed", self.seed, 0, 2**31)
        check_number("tolerance", self.tolerance, 0.0, 1.0)

    @property
    def short(self) -> int:
        """Number of tokens of shorter texts: a quarter of ``max_tokens``, at least 4."""
        return max(4, self.max_tokens // 4)


@dataclass(frozen=True)
class Difference:
    """First difference between two answers that should be equal.

    ``kind`` is ``"text"`` if the texts differ, and ``"log-probabilities"`` if only these do.
    """

    kind: Literal["text", "log-probabilities"]
    prompt: str  # name of the prompt
    where: str  # how the second answer was made, such as "in a batch"
    position: int  # character of the text, or number of the token, of the first difference, from 0
    expected: str  # quoted text, or a log-probability, of the first answer
    found: str  # the same of the second answer

    def __str__(self) -> str:
        unit = "character" if self.kind == "text" else "token"
        what = "text differs" if self.kind == "text" else "only log-probabilities differ"
        return (
            f"{what}: {self.where}, prompt {self.prompt}, {unit} {self.position}: {self.expected} "
            f"/ {self.found}"
        )


def compare(
    expected: Answer, found: Answer, prompt: str, where: str, tolerance: float = 0.0
) -> Difference | None:
    """Return the first difference of two answers; ``None`` if they are equal.

    Log-probabilities are compared where both answers have them; a gap up to ``tolerance`` is no
    difference. ``prompt`` and ``where`` are the fields of :class:`Difference`.
    """
    if expected.text != found.text:
        pairs = enumerate(zip_longest(expected.text, found.text))
        position = next(place for place, (a, b) in pairs if a != b)
        excerpt = slice(max(0, position - 8), position + _EXCERPT)
        quoted = [repr(text[excerpt]) for text in (expected.text, found.text)]
        return Difference("text", prompt, where, position, *quoted)
    for position, (a, b) in enumerate(zip(expected.tokens, found.tokens, strict=False)):
        if abs(a.logprob - b.logprob) > tolerance:
            values = (f"{a.logprob:.6f}", f"{b.logprob:.6f}")
            return Difference("log-probabilities", prompt, where, position, *values)
    return None


@dataclass
class CheckResult:
    """Result of one check on one route."""

    check: str  # name of the check
    route: Route
    status: Status = "passed"
    comparisons: int = 0  # number of compared pairs
    differences: int = 0  # number of pairs that differ
    first: Difference | None = None  # difference of the first pair that differs
    # The server's answer if the check is not supported, the reason of a failure or skip, or a
    # measurement.
    note: str = ""
    # Largest difference of log-probabilities in answers of equal texts; ``None`` without any.
    max_logprob_difference: float | None = None

    def add(
        self, expected: Answer, found: Answer, prompt: str, where: str, tolerance: float = 0.0
    ) -> None:
        """Compare two answers that should be equal; for the arguments, see :func:`compare`."""
        self.comparisons += 1
        difference = compare(expected, found, prompt, where, tolerance)
        if difference is not None:
            self.status = "failed"
            self.differences += 1
            self.first = self.first or difference
        if expected.text == found.text and expected.tokens and found.tokens:
            pairs = zip(expected.tokens, found.tokens, strict=False)
            gaps = [abs(a.logprob - b.logprob) for a, b in pairs]
            self.max_logprob_difference = max(self.max_logprob_difference or 0.0, *gaps)

    def fail(self, reason: str) -> None:
        """Set the status to "failed", for a reason other than a difference of two answers."""
        self.status = "failed"
        self.note = reason

    @property
    def kind(self) -> str | None:
        """Kind of the first difference, ``"text"`` or ``"log-probabilities"``; ``None``: none."""
        return None if self.first is None else self.first.kind

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and ``kind`` as JSON values."""
        return asdict(self) | {"kind": self.kind}


@dataclass
class RemoteReport:
    """Results of all checks on all routes, in the order of their execution."""

    url: str
    model: str
    settings: RemoteSettings
    prompts: Mapping[str, str]  # text by id
    results: list[CheckResult] = field(default_factory=list)
    software: str = ""  # name and version of the server's software, from its header ``Server``
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    seconds: float = 0.0  # duration of the run
    num_requests: int = 0  # number of requests sent to the server
    complete: bool = False  # whether all checks have run: the run was not interrupted

    def get(self, check: str, route: Route) -> CheckResult | None:
        """Return the result of a check on a route; ``None`` if the check has not run."""
        for result in self.results:
            if (result.check, result.route) == (check, route):
                return result
        return None

    @property
    def failed(self) -> Sequence[CheckResult]:
        """Results of the checks that failed."""
        return [each for each in self.results if each.status == "failed"]

    @property
    def tested(self) -> bool:
        """Whether at least one check was carried out."""
        return any(each.status in ("passed", "failed") for each in self.results)

    @property
    def passed(self) -> bool:
        """Whether all checks that the server supports have passed, and at least one has run."""
        return self.complete and self.tested and not self.failed

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "passed": self.passed,
            "complete": self.complete,
            "url": self.url,
            "server": self.software,
            "model": self.model,
            "date": self.started.isoformat(timespec="seconds"),
            "seconds": round(self.seconds, 1),
            "requests": self.num_requests,
            "pronk": __version__,
            "client": f"{system()} {machine()}",
            "settings": asdict(self.settings),
            "prompts": dict(self.prompts),
            "checks": [each.to_dict() for each in self.results],
        }
