"""Prometheus metrics, under vLLM's names where vLLM has them, so that its dashboards work."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from http import HTTPStatus
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pronk import AsyncLLM, Piece, SamplingParams
from pronk.drafting import Regret
from pronk.server.errors import to_api_error
from pronk.server.replicas.dispatcher import Dispatcher
from pronk.serving import Stats

# Upper bounds of the buckets of histograms: _SECONDS for durations of requests, _TOKEN_SECONDS for
# seconds per token, _TOKEN_COUNTS for numbers of tokens.
_SHORT_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.3, 0.6, 1.2, 2.5, 5.0)
_LONG_SECONDS = (10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_SECONDS = _SHORT_SECONDS + _LONG_SECONDS
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0)
_TOKEN_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

# Name of each gauge, with its help text and the field of EngineLoad that has its value.
_GAUGES = {
    "vllm:num_requests_running": ("Running requests.", "running"),
    "vllm:num_requests_waiting": ("Queued requests.", "waiting"),
    "vllm:kv_cache_usage_perc": ("Fraction of KV blocks in use, 0..1.", "kv_used"),
    "pronk:kv_cache_idle_blocks": ("KV blocks that only the prefix cache holds.", "kv_idle"),
    "pronk:prompt_cache_hits": (
        "Texts of which blocks were read from the prompt cache on disk.",
        "disk_hits",
    ),
    "pronk:prompt_cache_blocks_read": (
        "KV blocks read from the prompt cache on disk.",
        "disk_blocks_read",
    ),
    "pronk:prompt_cache_bytes_read": (
        "Bytes read from the prompt cache on disk.",
        "disk_bytes_read",
    ),
    "pronk:prompt_cache_blocks_written": (
        "KV blocks written to the prompt cache on disk.",
        "disk_blocks_written",
    ),
    "pronk:prompt_cache_bytes_written": (
        "Bytes written to the prompt cache on disk.",
        "disk_bytes_written",
    ),
    "pronk:prompt_cache_blocks_evicted": (
        "KV blocks deleted to keep the size limit.",
        "disk_blocks_evicted",
    ),
    "pronk:prompt_cache_blocks_damaged": (
        "Damaged KV blocks found in the prompt cache.",
        "disk_blocks_damaged",
    ),
    "pronk:requests_resumed": (
        "Requests resumed on another replica after theirs had ended.",
        "resumed",
    ),
}


class Metrics:
    """Counters, gauges and histograms of one model; all models of a server share a registry."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()  # of its own, instead of Prometheus' global registry
        self._gauges = [(self._gauge(name, text), field) for name, (text, field) in _GAUGES.items()]
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Generated tokens.")
        self._preemptions = self._counter("vllm:num_preemptions", "Preemptions of requests.")
        self._prefix_queries = self._counter(
            "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache."
        )
        self._prefix_hits = self._counter(
            "vllm:prefix_cache_hits", "Tokens found in the prefix cache."
        )
        self._success = self._counter(
            "vllm:request_success", "Finished samples by reason.", "finished_reason"
        )
        self._failure = self._counter(
            "pronk:request_failure", "Failed requests by reason.", "reason"
        )
        # Metric and labels are named as in prometheus-fastapi-instrumentator, which vLLM uses.
        labels = ["handler", "method", "status"]
        self._responses = Counter(
            "http_requests", "HTTP responses.", labels, registry=self.registry
        )
        self._steps = self._counter("pronk:steps", "Decoding steps, summed over samples.")
        self._drafts = self._counter(
            "vllm:spec_decode_num_drafts", "Decoding steps with draft tokens."
        )
        self._drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Verified draft tokens.")
        self._accepted = self._counter(
            "vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens."
        )
        self._accepted_per_pos = self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position.",
            "position",
        )
        self._drafted_by = self._counter(
            "pronk:draft_tokens", "Verified draft tokens by drafter.", "source"
        )
        self._accepted_by = self._counter(
            "pronk:accepted_tokens", "Accepted draft tokens by drafter.", "source"
        )
        self._hindsight = self._gauge(
            "pronk:speed_in_hindsight",
            "Estimated speed of another choice of drafters, known in hindsight, divided by the "
            "speed reached.",
            "choice",
        )
        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "Arrival to the first token.", _SECONDS
        )
        self._inter_token = self._histogram(
            "vllm:inter_token_latency_seconds",
            "Time between steps with new tokens of a sample.",
            _TOKEN_SECONDS,
        )
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time per token after the first one.",
            _TOKEN_SECONDS,
        )
        self._latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to the last token.", _SECONDS
        )
        self._prompt_lengths = self._histogram(
            "vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKEN_COUNTS
        )
        self._output_lengths = self._histogram(
            "vllm:request_generation_tokens", "Tokens of an output.", _TOKEN_COUNTS
        )
        self._max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "max_tokens of a request.", _TOKEN_COUNTS
        )
        self._n = self._histogram("vllm:request_params_n", "n of a request.", (1, 2, 4, 8, 16))
        self._loaded = self._gauge("pronk:model_loaded", "1 if the model is in memory, else 0.")
        self._loads = self._counter(
            "pronk:model_loads", "Attempts to load the model by result.", "result"
        )
        self._set_model(model)

    def for_model(self, model: str) -> Metrics:
        """Return the metrics of another model of the same server."""
        other = copy(self)
        other._set_model(model)  # noqa: SLF001 - `other` is of this class
        return other

    def _set_model(self, model: str) -> None:
        regret = Regret()
        self._model = model
        self._regret = regret
        self._hindsight.labels(model, "best_drafter").set_function(
            lambda: 1.0 / (regret.against_drafter or 1.0)
        )
        self._hindsight.labels(model, "best_of_every_step").set_function(
            lambda: 1.0 / (regret.against_steps or 1.0)
        )
        self.count_load(None)

    def count_load(self, engine: AsyncLLM | Dispatcher | None, result: str | None = None) -> None:
        """Let this model's gauges show the load of ``engine``, or zero if ``engine`` is ``None``.

        ``result`` is the result of an attempt to load the model, ``loaded`` or ``failed``, which is
        counted; ``None`` counts nothing.
        """
        # A weak reference, so that the gauges do not keep the model in memory after it is unloaded.
        find = (lambda: None) if engine is None else weakref.ref(engine)
        for gauge, field in self._gauges:
            gauge.labels(self._model).set_function(partial(_read_load, find, field))
        self._loaded.labels(self._model).set(engine is not None)
        if result is not None:
            self._loads.labels(self._model, result).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    @contextmanager
    def request(self, arrived: float | None = None) -> Iterator[float]:
        """Count a failure if the ``with`` block raises an error or is cancelled.

        Yields the time of the request's arrival (``perf_counter``): ``arrived``, by default now.
        """
        try:
            yield perf_counter() if arrived is None else arrived
        except (GeneratorExit, asyncio.CancelledError):
            self._failure.labels(self._model, "abort").inc()
            raise
        except Exception as error:
            self._failure.labels(self._model, _failure_reason(error)).inc()
            raise

    def observer(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, arrived: float
    ) -> Callable[[Sequence[Piece]], None]:
        """Return a function that records the new tokens of each step of a request.

        Args:
            prompts: token ids of the request's prompts.
            params: sampling parameters of the request.
            arrived: time of the request's arrival, from :meth:`request`.
        """
        self._max_tokens.labels(self._model).observe(params.max_tokens)
        self._n.labels(self._model).observe(params.n)
        last_times: dict[int, float] = {}  # sample index to the time of the last new tokens

        def observe(pieces: Sequence[Piece]) -> None:
            now = perf_counter()
            self._add(self._generation_tokens, len(pieces))
            for index in {piece.index for piece in pieces}:
                if index in last_times:
                    self._inter_token.labels(self._model).observe(now - last_times[index])
                else:
                    prompt = prompts[index // params.n]
                    is_first = index % params.n == 0
                    self._ttft.labels(self._model).observe(now - arrived)
                    self._prompt_lengths.labels(self._model).observe(len(prompt))
                    # The tokens of a prompt count once for all its samples.
                    self._add(self._prompt_tokens, len(prompt) if is_first else 0)
                last_times[index] = now
            for piece in pieces:
                if piece.completion is not None:
                    self._success.labels(self._model, piece.completion.finish_reason).inc()
                    self._latency.labels(self._model).observe(now - arrived)
                    self._count_completion(piece.completion.stats)

        return observe

    def count_embeddings(self, prompts: Sequence[Sequence[int]], arrived: float) -> None:
        """Count the texts of an answered request for embeddings.

        ``arrived`` is the time of its arrival, from :meth:`request`.
        """
        for prompt in prompts:
            self._prompt_lengths.labels(self._model).observe(len(prompt))
            self._success.labels(self._model, "embedding").inc()
            self._add(self._prompt_tokens, len(prompt))
        self._latency.labels(self._model).observe(perf_counter() - arrived)

    def count_response(self, method: str, route: str, status: int) -> None:
        """Count an HTTP response by route, method and status."""
        self._responses.labels(route, method, str(status)).inc()

    def _count_completion(self, stats: Stats) -> None:
        self._add(self._preemptions, stats.preemptions)
        self._add(self._prefix_queries, stats.prompt_tokens)
        self._add(self._prefix_hits, min(stats.cached_tokens, stats.prompt_tokens))
        self._add(self._steps, stats.target_steps)
        self._add(self._drafts, sum(step.drafted > 0 for step in stats.steps))
        self._add(self._drafted, stats.drafted)
        self._regret.add(stats.regret)
        self._add(self._accepted, stats.accepted)
        most_accepted = max((step.accepted for step in stats.steps), default=0)
        for position in range(most_accepted):
            count = sum(step.accepted > position for step in stats.steps)
            self._accepted_per_pos.labels(self._model, str(position)).inc(count)
        for name, source in stats.sources.items():
            self._drafted_by.labels(self._model, name).inc(source.drafted)
            self._accepted_by.labels(self._model, name).inc(source.accepted)
        self._output_lengths.labels(self._model).observe(stats.generated_tokens)
        if stats.generated_tokens > 1:
            ended = stats.steps[-1].clock if stats.steps else 0.0
            seconds = ended - stats.ttft
            self._per_token.labels(self._model).observe(seconds / (stats.generated_tokens - 1))

    def _add(self, counter: Counter, count: int) -> None:
        counter.labels(self._model).inc(count)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ["model_name", *labels], registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, ["model_name", *labels], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(name, text, ["model_name"], buckets=tuple(buckets), registry=self.registry)


def _read_load(find: Callable[[], AsyncLLM | Dispatcher | None], field: str) -> float:
    """Return a gauge's value: the field ``field`` of the engine's ``EngineLoad``.

    ``find`` returns the engine. The value is 0 if ``find`` returns ``None``: the model is unloaded.
    """
    engine = find()
    return 0.0 if engine is None else float(getattr(engine.load, field))


def _failure_reason(error: Exception) -> str:
    status = to_api_error(error).status
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return "error"
    return {408: "timeout", 429: "overloaded"}.get(status, "refused")
