"""Checks of a server: which of its answers must be equal, and which must differ.

Servers may cache prompts, some only the last one. A reference therefore answers a prompt that was
sent directly before, and only the check ``cache`` compares the first request of a prompt with later
ones.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import exp
from time import perf_counter
from typing import Any, NamedTuple

from pronk.lab.verification.remote.client import (
    ROUTES,
    Answer,
    RemoteServer,
    Route,
    ServerFaultError,
    ServerUnreachableError,
    UnsupportedError,
)
from pronk.lab.verification.remote.report import CheckResult, RemoteReport, RemoteSettings

# Texts by name. Their lengths differ, so that the requests of a batch are at different positions.
TEXTS: Mapping[str, str] = {
    "sentence": "The three most important inventions of the nineteenth century were",
    "code": (
        'def fibonacci(n: int) -> list[int]:\n    """Return the first n Fibonacci numbers."""\n'
    ),
    "question": (
        "A shop sells apples for 40 cents and pears for 65 cents each. Tom buys five apples and "
        "four pears, and pays "
        "with a ten-euro note. How much change does he get? Explain each step of the "
        "calculation.\n\nAnswer: First,"
    ),
    "story": (
        "Write the next paragraph of this story.\n\nThe lighthouse had been dark for eleven years "
        "when Mara rowed out "
        "to it with a can of oil, a box of matches and her grandmother's logbook. The stairs were "
        "wet. On the third "
        "landing she found a chair, a lamp, and a cup of tea that was still warm.\n\nShe looked "
        "around, and"
    ),
}
# Texts of requests that only fill a batch, each with its number of tokens, relative to that of the
# compared requests.
FILLERS: tuple[tuple[str, float], ...] = (
    ("List the planets.", 0.1),
    ("Once upon a time, in a village at the edge of a forest,", 0.3),
    ("import numpy as np\n\n", 0.6),
    (
        (
            "Translate into French: The weather is fine today, and we are going to the sea. Then "
            "explain the grammar."
        ),
        0.9,
    ),
)
_PARAGRAPH = (
    "The committee met in the old library to discuss the plans for the harbour. The engineer "
    "explained that the "
    "northern pier would have to be rebuilt within two years, because its piles were rotten below "
    "the water. The mayor "
    "asked for the costs. A fisherman remembered the storm of 1953, which had torn away the lamp "
    "and half of the wall. "
)
# Parts of a text that begins with a number of its own: ``{nonce}`` is random, so that no prefix is
# in any cache. The two endings share a prefix of several hundred tokens.
NEVER_SEEN = (
    "Record {nonce}. " + _PARAGRAPH * 4,
    (
        "Question: what did the engineer explain?",
        "Question: which storm did the fisherman remember?",
    ),
)

_NUM_SEEDS = 4  # number of seeds whose texts must not all be equal
_TOP = 5  # number of likeliest tokens to report
_ROUNDING = 1e-4  # tolerance for sums of probabilities, which servers round
_SAMPLED: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0}


class _Check(NamedTuple):
    title: str
    needs: tuple[str, ...] = ()  # checks without whose success this one is skipped
    # whether its requests are like those answered before, except for their number and time
    known: bool = False


CHECKS: Mapping[str, _Check] = {
    "repeat": _Check("same request, same text"),
    "cache": _Check(
        "same text for the first and for later requests of a prompt", ("repeat",), known=True
    ),
    "max_tokens": _Check("a shorter text begins a longer one", ("repeat",), known=True),
    "stream": _Check("same text streamed", ("repeat",)),
    "n": _Check("same text of two greedy samples", ("repeat",)),
    "batch": _Check("same text alone and in a batch", ("repeat",), known=True),
    "seed": _Check("same seed, same text", ("repeat",)),
    "seeds": _Check("different seeds, different texts", ("seed",)),
    "seed_batch": _Check("same seed, same text in a batch", ("seed", "batch"), known=True),
    "logprobs": _Check("same request, same log-probabilities", ("repeat",)),
    "logprobs_batch": _Check(
        "same log-probabilities in a batch", ("logprobs", "batch"), known=True
    ),
    "likeliest": _Check("greedy tokens are the likeliest, sums at most 1", ("repeat",)),
}
Progress = Callable[[str, int, int], None]


def verify_server_steps(
    server: RemoteServer,
    texts: Mapping[str, str],
    settings: RemoteSettings,
    progress: Progress = lambda _label, _done, _total: None,
) -> Iterator[RemoteReport]:
    """Yield the report after each check of the prompts ``texts``, by name.

    ``progress`` receives the name of a check, the number of checks so far, and the number of all
    checks. Raises ``ServerUnreachableError`` if the connection fails, or the server does not answer
    in time.
    """
    report = RemoteReport(server.url, server.connect(), settings, texts)
    began = perf_counter()
    for route in ROUTES:
        verifier = _RouteVerifier(server, route, texts, settings)
        for name in CHECKS:
            progress(
                f"{route}: {CHECKS[name].title}", len(report.results), len(CHECKS) * len(ROUTES)
            )
            report.results.append(_run(verifier, report, name))
            report.software = server.software
            report.num_requests = server.num_requests
            report.seconds = perf_counter() - began
            yield report
    report.complete = True
    yield report


def _run(verifier: _RouteVerifier, report: RemoteReport, name: str) -> CheckResult:
    for needed in CHECKS[name].needs:
        result = report.get(needed, verifier.route)
        if result is not None and result.status == "not supported":
            return CheckResult(name, verifier.route, "not supported")
        if result is not None and result.status != "passed":
            return CheckResult(
                name, verifier.route, "skipped", note=f"needs '{CHECKS[needed].title}'"
            )
    result = CheckResult(name, verifier.route)
    try:
        getattr(verifier, f"check_{name}")(result)
    except UnsupportedError as error:
        failed = CHECKS[name].known and isinstance(error, ServerFaultError)
        return CheckResult(
            name, verifier.route, "failed" if failed else "not supported", note=str(error)
        )
    return result


@dataclass
class _RouteVerifier:
    """The checks of one route; a method ``check_NAME`` per key of :data:`CHECKS`."""

    server: RemoteServer
    route: Route
    texts: Mapping[str, str]
    settings: RemoteSettings
    _references: dict[str, Answer] = field(default_factory=dict)  # by name of the prompt
    # by name of the prompt and seed
    _sampled: dict[tuple[str, int], Answer] = field(default_factory=dict)
    # with log-probabilities, by name of the prompt
    _reported: dict[str, Answer] = field(default_factory=dict)

    def check_repeat(self, result: CheckResult) -> None:
        """Send each prompt once before, because a server may cache it, then compare further answers."""
        for name in self.texts:
            self._greedy(name)
            self._references[name] = self._greedy(name)
            for _ in range(self.settings.rounds):
                result.add(
                    self._references[name], self._greedy(name), name, "the same request again"
                )
        empty = [name for name, answer in self._references.items() if not answer.text]
        if len(empty) == len(self.texts):
            result.fail("all texts are empty")
        elif empty:
            result.note = f"no text after prompt {', '.join(empty)}"

    def check_cache(self, result: CheckResult) -> None:
        """Compare the first sight of a long text with later ones, when a part of it may be cached."""
        beginning, endings = NEVER_SEEN
        cached = list[int]()
        for _ in range(self.settings.rounds):
            nonce = secrets.token_hex(4)
            prompts = [f"{beginning.format(nonce=nonce)}\n\n{ending}\n\n" for ending in endings]
            first = [self._ask(prompt, self.settings.short * 2) for prompt in prompts]
            for _ in range(2):
                for prompt, before in zip(prompts, first, strict=True):
                    after = self._ask(prompt, self.settings.short * 2)
                    result.add(before, after, f"Record {nonce} …", "a later sight of the prompt")
                    cached.append(after.cached_tokens or 0)
        if any(cached):
            result.note = f"up to {max(cached)} cached tokens"

    def check_max_tokens(self, result: CheckResult) -> None:
        for name in self.texts:
            self._greedy(name)
            short = self._greedy(name, self.settings.short)
            # The last token may end in the middle of a character.
            text = short.text.rstrip("\ufffd")
            whole = self._references[name].text
            where = f"max_tokens {self.settings.short} instead of {self.settings.max_tokens}"
            result.add(Answer(whole[: len(text)]), Answer(text), name, where)
            if not text and whole:
                result.fail(f"{where}: no text")

    def check_stream(self, result: CheckResult) -> None:
        for name, text in self.texts.items():
            self._greedy(name)
            for _ in range(self.settings.rounds):
                streamed = self.server.stream(self.route, text, self.settings.max_tokens)
                result.add(self._references[name], streamed, name, "streamed")

    def check_n(self, result: CheckResult) -> None:
        for name, text in self._some():
            self._greedy(name)
            samples = self.server.ask(self.route, text, self.settings.max_tokens, n=2)
            if len(samples) != 2:
                msg = f"n=2 was answered with {len(samples)} choices"
                raise UnsupportedError(msg)
            for number, sample in enumerate(samples, 1):
                result.add(self._references[name], sample, name, f"sample {number} of n=2")

    def check_batch(self, result: CheckResult) -> None:
        self._compare_batch(
            result, {(name,): answer for name, answer in self._references.items()}, self._greedy
        )
        most = self._most_streams_at_once()
        result.note = (
            "the server ran one request at a time"
            if most == 1
            else f"up to {most} texts at the same time"
        )
        if most is None:
            unknown = "unknown how many texts the server generates at the same time"
            result.note = f"{unknown}, because concurrent streams failed"

    def check_seed(self, result: CheckResult) -> None:
        for name, _ in self._some():
            self._greedy(name)
            for seed in self._seeds():
                self._sampled[name, seed] = self._sample(name, seed)
            for seed in self._seeds()[: 1 + self.settings.rounds]:
                result.add(
                    self._sampled[name, seed], self._sample(name, seed), name, f"seed {seed} again"
                )

    def check_seeds(self, result: CheckResult) -> None:
        """Check that not all seeds have the same text: otherwise equal texts of one seed show nothing."""
        for name, _ in self._some():
            sampled = {self._sampled[name, seed].text for seed in self._seeds()}
            result.comparisons += 1
            if len(sampled) == 1:
                result.fail(
                    f"{len(self._seeds())} seeds have the same text at temperature 1, prompt {name}"
                )

    def check_seed_batch(self, result: CheckResult) -> None:
        self._compare_batch(
            result, dict([*self._sampled.items()][: self.settings.batch // 2]), self._sample
        )

    def check_logprobs(self, result: CheckResult) -> None:
        """Compare log-probabilities of equal requests, and their text with that of a request without."""
        tolerance = self.settings.tolerance
        for name, _ in self._some():
            self._greedy(name)
            self._reported[name] = self._report(name)
            result.add(
                self._references[name],
                self._reported[name],
                name,
                "with log-probabilities",
                tolerance,
            )
            for _ in range(self.settings.rounds):
                result.add(
                    self._reported[name],
                    self._report(name),
                    name,
                    "the same request again",
                    tolerance,
                )

    def check_logprobs_batch(self, result: CheckResult) -> None:
        wanted = {(name,): answer for name, answer in self._reported.items()}
        self._compare_batch(result, wanted, self._report, self.settings.tolerance)

    def check_likeliest(self, result: CheckResult) -> None:
        """Check that greedy tokens are the likeliest, and that no probabilities have a sum above 1."""
        sums = list[float]()
        for name, answer in (
            self._reported or {name: self._report(name) for name, _ in self._some()}
        ).items():
            for position, token in enumerate(answer.tokens):
                result.comparisons += 1
                sums.append(sum(map(exp, token.top)))
                if sums[-1] > 1.0 + _ROUNDING:
                    result.fail(
                        f"probabilities with the sum {sums[-1]:.6f}, prompt {name}, "
                        f"token {position}"
                    )
                elif token.top and token.logprob < max(token.top) - _ROUNDING:
                    values = f"{token.logprob:.4f}, the likeliest {max(token.top):.4f}"
                    result.fail(
                        f"token {token.text!r} has {values}, prompt {name}, token {position}"
                    )
        result.note = result.note or f"sums of the likeliest up to {max(sums, default=0.0):.4f}"

    def _some(self) -> list[tuple[str, str]]:
        """Return the prompts, by name, of checks that need more requests per prompt."""
        return [*self.texts.items()][: max(2, len(self.texts) // 2)]

    def _seeds(self) -> range:
        return range(
            self.settings.seed, self.settings.seed + max(_NUM_SEEDS, 1 + self.settings.rounds)
        )

    def _ask(self, prompt: str, max_tokens: int, **options: Any) -> Answer:
        answers = self.server.ask(self.route, prompt, max_tokens, **options)
        if not answers:
            msg = "the answer has no choices"
            raise UnsupportedError(msg)
        return answers[0]

    def _greedy(self, name: str, max_tokens: int | None = None) -> Answer:
        return self._ask(self.texts[name], max_tokens or self.settings.max_tokens)

    def _sample(self, name: str, seed: int) -> Answer:
        return self._ask(self.texts[name], self.settings.max_tokens // 2, seed=seed, **_SAMPLED)

    def _report(self, name: str) -> Answer:
        answer = self._ask(self.texts[name], self.settings.max_tokens, top=_TOP)
        if not answer.tokens:
            msg = "the answer has no log-probabilities"
            raise UnsupportedError(msg)
        return answer

    def _compare_batch(
        self,
        result: CheckResult,
        expected: Mapping[Any, Answer],
        ask: Callable[..., Answer],
        tolerance: float = 0.0,
    ) -> None:
        """Compare answers to ``ask(*key)`` that run at the same time, among requests of other lengths."""
        others = [
            FILLERS[i % len(FILLERS)] for i in range(max(1, self.settings.batch - len(expected)))
        ]
        fillers = [
            partial(self._ask, text, max(1, int(share * self.settings.max_tokens)))
            for text, share in others
        ]
        for _ in range(self.settings.rounds):
            answers = self.server.together([*(partial(ask, *key) for key in expected), *fillers])
            for ((name, *seed), wanted), answer in zip(expected.items(), answers, strict=False):
                where = f"seed {seed[0]} in a batch" if seed else "in a batch"
                result.add(wanted, answer, name, where, tolerance)

    def _most_streams_at_once(self) -> int | None:
        """Return the largest number of streams at the same time.

        ``None`` if the server cannot stream.
        """
        texts = [*self.texts.values()]
        prompts = [texts[number % len(texts)] for number in range(self.settings.batch)]
        calls = [
            partial(self.server.stream, self.route, prompt, self.settings.short)
            for prompt in prompts
        ]
        try:
            periods = [answer.period for answer in self.server.together(calls) if answer.text]
        except (UnsupportedError, ServerUnreachableError):
            # some servers end a stream when another request arrives
            return None
        return max(
            (sum(begin <= moment <= end for begin, end in periods) for moment, _ in periods),
            default=None,
        )
