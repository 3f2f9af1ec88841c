"""What happens, for Prometheus: under vLLM's names where it counts the same, so that its dashboards fit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pronk.engine.stats import Stats
from pronk.outputs import Piece
from pronk.sampling.params import SamplingParams
from pronk.server.errors import of_exception
from pronk.server.served_engine import ServedEngine

__all__ = ["Metrics"]

_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class Metrics:
    """Counters, gauges and histograms of one server, in a registry of their own."""

    def __init__(self, engine: ServedEngine, model: str) -> None:
        self._engine, self._model = engine, model
        self.registry = CollectorRegistry()
        self._gauges()
        self._prompt = self._counter("vllm:prompt_tokens", "Tokens of prompts.")
        self._generated = self._counter("vllm:generation_tokens", "Generated tokens.")
        self._preempted = self._counter("vllm:num_preemptions", "Requests that had to give their blocks away.")
        self._looked_up = self._counter("vllm:prefix_cache_queries", "Tokens that were looked for in the cache.")
        self._found = self._counter("vllm:prefix_cache_hits", "Tokens that were found there.")
        self._ended = self._counter("vllm:request_success", "Requests that ended well, by why.", "finished_reason")
        self._failed = self._counter("pronk:request_failure", "Requests that did not, by why.", "reason")
        self._answers = Counter(
            "http_requests", "Answers.", ["handler", "method", "status"], registry=self.registry
        )  # as prometheus-fastapi-instrumentator, which vLLM has, calls them
        self._steps = self._counter("pronk:steps", "Passes that chose tokens, of each request.")
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Passes that had guesses.")
        self._drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Guesses that were computed.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Guesses that were confirmed.")
        self._by_place = self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "The same by their place behind the text.", "position"
        )
        self._drafted_by = self._counter("pronk:draft_tokens", "Guesses that were computed, by who guessed.", "source")
        self._accepted_by = self._counter("pronk:accepted_tokens", "Guesses that were confirmed, likewise.", "source")
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._between = self._histogram("vllm:inter_token_latency_seconds", "Between tokens that came apart.", _SHORT)
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "After the first, for each.", _SHORT
        )
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", _SECONDS)
        self._prompts = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _COUNTS)
        self._outputs = self._histogram("vllm:request_generation_tokens", "Tokens of an output.", _COUNTS)
        self._most = self._histogram("vllm:request_params_max_tokens", "Tokens that were asked for.", _COUNTS)
        self._samples = self._histogram("vllm:request_params_n", "Samples that were asked for.", (1, 2, 4, 8, 16))

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self.registry)

    @contextmanager
    def request(self) -> Iterator[float]:
        """Count a client's request if it does not come to its end. Gives when it came, by ``perf_counter``."""
        try:
            yield perf_counter()
        except (GeneratorExit, asyncio.CancelledError):
            self._failed.labels(self._model, "abort").inc()
            raise
        except Exception as error:
            self._failed.labels(self._model, _reason(error)).inc()
            raise

    def observer(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, arrived: float
    ) -> Callable[[Sequence[Piece]], None]:
        """What is to be called with the pieces of each step of a request.

        Args:
            prompts: token ids of each.
            params: of all.
            arrived: see :meth:`request`.
        """
        self._most.labels(self._model).observe(params.max_tokens)
        self._samples.labels(self._model).observe(params.n)
        last: dict[int, float] = {}

        def observe(pieces: Sequence[Piece]) -> None:
            now = perf_counter()
            self._add(self._generated, len(pieces))
            for index in {piece.index for piece in pieces}:
                if index in last:
                    self._between.labels(self._model).observe(now - last[index])
                else:
                    self._begin(prompts[index // params.n], now - arrived, first=index % params.n == 0)
                last[index] = now
            for piece in pieces:
                if piece.completion is not None:
                    self._ended.labels(self._model, piece.completion.finish_reason).inc()
                    self._whole.labels(self._model).observe(now - arrived)
                    self._count(piece.completion.stats)

        return observe

    def answered(self, method: str, route: str, status: int) -> None:
        """Count an answer of HTTP."""
        self._answers.labels(route, method, str(status)).inc()

    def _begin(self, prompt: Sequence[int], seconds: float, *, first: bool) -> None:
        """A sample's first token has come."""
        self._ttft.labels(self._model).observe(seconds)
        self._prompts.labels(self._model).observe(len(prompt))
        self._add(self._prompt, len(prompt) if first else 0)

    def _count(self, stats: Stats) -> None:
        """A sample has come to its end."""
        self._add(self._preempted, stats.preemptions)
        self._add(self._looked_up, stats.prompt_tokens)
        self._add(self._found, min(stats.cached_tokens, stats.prompt_tokens))
        self._add(self._steps, stats.target_steps)
        self._add(self._drafts, sum(step.drafted > 0 for step in stats.steps))
        self._add(self._drafted, stats.drafted)
        self._add(self._accepted, stats.accepted)
        for place in range(max((step.accepted for step in stats.steps), default=0)):
            count = sum(step.accepted > place for step in stats.steps)
            self._by_place.labels(self._model, str(place)).inc(count)
        for name, source in stats.sources.items():
            self._drafted_by.labels(self._model, name).inc(source.drafted)
            self._accepted_by.labels(self._model, name).inc(source.accepted)
        self._outputs.labels(self._model).observe(stats.generated_tokens)
        if stats.generated_tokens > 1:
            seconds = (stats.steps[-1].clock if stats.steps else 0.0) - stats.ttft
            self._per_token.labels(self._model).observe(seconds / (stats.generated_tokens - 1))

    def _gauges(self) -> None:
        """What is read when somebody looks."""
        engine = self._engine
        for name, text, read in (
            ("vllm:num_requests_running", "Requests in the passes.", lambda: engine.load.running),
            ("vllm:num_requests_waiting", "Requests that wait for room.", lambda: engine.load.waiting),
            (
                "vllm:kv_cache_usage_perc",
                "Share of the cache's blocks that requests hold, 0..1.",
                lambda: engine.load.kv_used,
            ),
            (
                "pronk:kv_cache_idle_blocks",
                "Blocks kept for texts that begin alike.",
                lambda: engine.load.kv_idle,
            ),
            (
                "pronk:requests_resumed",
                "Times that requests were asked again elsewhere, as their replica had died.",
                lambda: engine.load.resumed,
            ),
        ):
            gauge = Gauge(name, text, ["model_name"], registry=self.registry)
            gauge.labels(self._model).set_function(read)

    def _add(self, counter: Counter, count: int) -> None:
        counter.labels(self._model).inc(count)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ["model_name", *labels], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(name, text, ["model_name"], buckets=tuple(buckets), registry=self.registry)


def _reason(error: Exception) -> str:
    """Why a request did not come to its end, in a word."""
    status = of_exception(error).status
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return "error"
    return {408: "timeout", 429: "overloaded"}.get(status, "refused")
