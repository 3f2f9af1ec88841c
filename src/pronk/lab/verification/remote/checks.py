"""Checks of a server: which of its answers must be equal, and which must differ.

A server may answer a prompt that is in its prefix cache differently from a new prompt, and some
servers cache only the last prompt. A *reference* is an answer with which others are compared. Its
prompt was sent directly before, so that the prompt is cached. Only the check ``cache`` compares the
first answer to a new prompt with later ones.
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
from pronk.lab.verification.remote.report import CheckResult, RemoteReport, RemoteSettings, Status

# Texts by name. Their lengths differ, so that the requests of a batch are at different positions.
TEXTS: Mapping[str, str] = {
    "sentence": "The three most important inventions of the nineteenth century were",
    "code": (
        'def fibonacci(n: int) -> list[int]:\n    """Return the first n Fibonacci numbers."""\n'
    ),
    "question": (
        "A shop sells apples for 40 cents and pears for 65 cents each. Tom buys five apples and "
        "four pears, and pays with a ten-euro note. How much change does he get? Explain each "
        "step of the calculation.\n\nAnswer: First,"
    ),
    "story": (
        "Write the next paragraph of this story.\n\nThe lighthouse had been dark for eleven years "
        "when Mara rowed out to it with a can of oil, a box of matches and her grandmother's "
        "logbook. The stairs were wet. On the third landing she found a chair, a lamp, and a cup "
        "of tea that was still warm.\n\nShe looked around, and"
    ),
}
_TRANSLATE = (
    "Translate into French: The weather is fine today, and we are going to the sea. Then "
    "explain the grammar."
)
# Texts of requests that only fill a batch. The number beside a text is the request's maximum number
# of tokens as a fraction of that of the compared requests.
FILLERS: tuple[tuple[str, float], ...] = (
    ("List the planets.", 0.1),
    ("Once upon a time, in a village at the edge of a forest,", 0.3),
    ("import numpy as np\n\n", 0.6),
    (_TRANSLATE, 0.9),
)
_PARAGRAPH = (
    "The committee met in the old library to discuss the plans for the harbour. The engineer "
    "explained that the northern pier would have to be rebuilt within two years, because its "
    "piles were rotten below the water. The mayor asked for the costs. A fisherman remembered "
    "the storm of 1953, which had torn away the lamp and half of the wall. "
)
# Parts of a text that begins with a random number ``{nonce}``, so that no prefix of the text is in
# any cache. The two endings share a prefix of several hundred tokens.
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
    needs: tuple[str, ...] = ()  # checks that must have passed, or this one is skipped
    # Whether the server has answered such requests in earlier checks: a server error (HTTP 500 and
    # up) then fails the check, rather than counting as "not supported".
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
    """Run all checks of a server on all routes, and yield the report after each check.

    ``texts`` are the prompts by name. ``progress`` receives the name of a check, the number of
    checks so far, and the number of all checks. Raises ServerUnreachableError if the connection
    fails, or the server does not answer in time.
    """
    report = RemoteReport(server.url, server.connect(), settings, texts)
    began = perf_counter()
    for route in ROUTES:
        verifier = _RouteVerifier(server, route, texts, settings)
        for name, check in CHECKS.items():
            num_checks = len(CHECKS) * len(ROUTES)
            progress(f"{route}: {check.title}", len(report.results), num_checks)
            report.results.append(_run(verifier, report, name))
            report.software = server.software
            report.num_requests = server.num_requests
            report.seconds = perf_counter() - began
            yield report
    report.complete = True
    yield report


def _run(verifier: _RouteVerifier, report: RemoteReport, name: str) -> CheckResult:
    """Run the check ``name`` on one route, unless an earlier check that it needs has not passed."""
    route = verifier.route
    for needed in CHECKS[name].needs:
        result = report.get(needed, route)
        if result is not None and result.status == "not supported":
            return CheckResult(name, route, "not supported")
        if result is not None and result.status != "passed":
            return CheckResult(name, route, "skipped", note=f"needs '{CHECKS[needed].title}'")
    result = CheckResult(name, route)
    try:
        getattr(verifier, f"check_{name}")(result)
    except UnsupportedError as error:
        has_failed = CHECKS[name].known and isinstance(error, ServerFaultError)
        status: Status = "failed" if has_failed else "not supported"
        return CheckResult(name, route, status, note=str(error))
    return result


@dataclass
class _RouteVerifier:
    """The checks of one route; a method ``check_NAME`` per key of :data:`CHECKS`."""

    server: RemoteServer
    route: Route
    texts: Mapping[str, str]
    settings: RemoteSettings
    # Greedy answers, by name of the prompt.
    _references: dict[str, Answer] = field(default_factory=dict)
    # Sampled answers, by name of the prompt and seed.
    _sampled: dict[tuple[str, int], Answer] = field(default_factory=dict)
    # Greedy answers with log-probabilities, by name of the prompt.
    _reported: dict[str, Answer] = field(default_factory=dict)

    def check_repeat(self, result: CheckResult) -> None:
        """Compare the second answer to each prompt with later ones.

        The first request of a prompt is not compared, because the server may cache the prompt.
        """
        for name in self.texts:
            self._greedy(name)
            reference = self._greedy(name)
            self._references[name] = reference
            for _ in range(self.settings.rounds):
                result.add(reference, self._greedy(name), name, "the same request again")
        empty = [name for name, answer in self._references.items() if not answer.text]
        if len(empty) == len(self.texts):
            result.fail("all texts are empty")
        elif empty:
            result.note = f"no text after prompt {', '.join(empty)}"

    def check_cache(self, result: CheckResult) -> None:
        """Compare the answer to a new long prompt with later ones, when a prefix may be cached."""
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
        """Check that the text of a smaller ``max_tokens`` is the beginning of the longer text."""
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
        """Compare streamed answers with those in one piece."""
        for name, text in self.texts.items():
            self._greedy(name)
            for _ in range(self.settings.rounds):
                streamed = self.server.stream(self.route, text, self.settings.max_tokens)
                result.add(self._references[name], streamed, name, "streamed")

    def check_n(self, result: CheckResult) -> None:
        """Compare both greedy samples of a request with ``n=2`` with the answer to ``n=1``."""
        for name, text in self._some():
            self._greedy(name)
            samples = self.server.ask(self.route, text, self.settings.max_tokens, n=2)
            if len(samples) != 2:
                msg = f"n=2 was answered with {len(samples)} choices"
                raise UnsupportedError(msg)
            for number, sample in enumerate(samples, 1):
                result.add(self._references[name], sample, name, f"sample {number} of n=2")

    def check_batch(self, result: CheckResult) -> None:
        """Compare answers in a batch with the answers to single requests."""
        wanted = {(name,): answer for name, answer in self._references.items()}
        self._compare_batch(result, wanted, self._greedy)
        most = self._most_streams_at_once()
        if most is None:
            unknown = "unknown how many texts the server generates at the same time"
            result.note = f"{unknown}, because concurrent streams failed"
        elif most == 1:
            result.note = "the server ran one request at a time"
        else:
            result.note = f"up to {most} texts at the same time"

    def check_seed(self, result: CheckResult) -> None:
        """Compare sampled answers of the same seed."""
        for name, _ in self._some():
            self._greedy(name)
            for seed in self._seeds():
                self._sampled[name, seed] = self._sample(name, seed)
            for seed in self._seeds()[: 1 + self.settings.rounds]:
                again = self._sample(name, seed)
                result.add(self._sampled[name, seed], again, name, f"seed {seed} again")

    def check_seeds(self, result: CheckResult) -> None:
        """Check that not all seeds have the same text.

        A server that ignores the seed, or samples greedily, would pass the check ``seed``.
        """
        seeds = self._seeds()
        for name, _ in self._some():
            sampled = {self._sampled[name, seed].text for seed in seeds}
            result.comparisons += 1
            if len(sampled) == 1:
                same = f"{len(seeds)} seeds have the same text at temperature 1"
                result.fail(f"{same}, prompt {name}")

    def check_seed_batch(self, result: CheckResult) -> None:
        """Compare sampled answers in a batch with the answers to single requests."""
        wanted = dict([*self._sampled.items()][: self.settings.batch // 2])
        self._compare_batch(result, wanted, self._sample)

    def check_logprobs(self, result: CheckResult) -> None:
        """Compare log-probabilities of equal requests, and texts with and without them."""
        tolerance = self.settings.tolerance
        for name, _ in self._some():
            self._greedy(name)
            reported = self._report(name)
            self._reported[name] = reported
            where = "with log-probabilities"
            result.add(self._references[name], reported, name, where, tolerance)
            for _ in range(self.settings.rounds):
                again = self._report(name)
                result.add(reported, again, name, "the same request again", tolerance)

    def check_logprobs_batch(self, result: CheckResult) -> None:
        """Compare log-probabilities in a batch with those of single requests."""
        wanted = {(name,): answer for name, answer in self._reported.items()}
        self._compare_batch(result, wanted, self._report, self.settings.tolerance)

    def check_likeliest(self, result: CheckResult) -> None:
        """Check that greedy tokens are the likeliest, and that no probabilities have a sum > 1."""
        sums = list[float]()
        reported = self._reported or {name: self._report(name) for name, _ in self._some()}
        for name, answer in reported.items():
            for position, token in enumerate(answer.tokens):
                result.comparisons += 1
                where = f"prompt {name}, token {position}"
                total = sum(map(exp, token.top))
                sums.append(total)
                if total > 1.0 + _ROUNDING:
                    result.fail(f"probabilities with the sum {total:.6f}, {where}")
                elif token.top and token.logprob < max(token.top) - _ROUNDING:
                    values = f"{token.logprob:.4f}, the likeliest {max(token.top):.4f}"
                    result.fail(f"token {token.text!r} has {values}, {where}")
        result.note = result.note or f"sums of the likeliest up to {max(sums, default=0.0):.4f}"

    def _some(self) -> list[tuple[str, str]]:
        """Return the names and texts of half of the prompts, at least two.

        Checks with many requests per prompt use these prompts only.
        """
        return [*self.texts.items()][: max(2, len(self.texts) // 2)]

    def _seeds(self) -> range:
        first = self.settings.seed
        return range(first, first + max(_NUM_SEEDS, 1 + self.settings.rounds))

    def _ask(self, prompt: str, max_tokens: int, **options: Any) -> Answer:
        """Return the first choice of the server's answer."""
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
        """Compare the answers of a batch with those of single requests.

        ``expected`` has the answers of single requests, by the arguments of ``ask``. Requests of
        other lengths fill the batch.
        """
        calls = [partial(ask, *key) for key in expected]
        for i in range(max(1, self.settings.batch - len(expected))):
            text, share = FILLERS[i % len(FILLERS)]
            calls.append(partial(self._ask, text, max(1, int(share * self.settings.max_tokens))))
        for _ in range(self.settings.rounds):
            answers = self.server.together(calls)
            for ((name, *seed), wanted), answer in zip(expected.items(), answers, strict=False):
                where = f"seed {seed[0]} in a batch" if seed else "in a batch"
                result.add(wanted, answer, name, where, tolerance)

    def _most_streams_at_once(self) -> int | None:
        """Return how many streams of a batch ran at the same time, at most.

        ``None`` if the streams failed, or had no text.
        """
        texts = [*self.texts.values()]
        prompts = [texts[number % len(texts)] for number in range(self.settings.batch)]
        stream = partial(self.server.stream, self.route)
        calls = [partial(stream, prompt, self.settings.short) for prompt in prompts]
        try:
            answers = self.server.together(calls)
        except (UnsupportedError, ServerUnreachableError):
            return None  # some servers end a stream when another request arrives
        periods = [answer.period for answer in answers if answer.text]
        # The number of running streams is largest at the beginning of one of them.
        counts = [sum(begin <= moment <= end for begin, end in periods) for moment, _ in periods]
        return max(counts, default=None)
