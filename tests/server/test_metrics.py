"""Metrics equal the usage and the statuses of responses."""

from threading import Event

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pronk.llm import LLM
from pronk.server.settings import RequestLimits
from server.serving import Running, running
from waiting import HUNG, ShiftedClock, eventually


def scraped(client: httpx.Client) -> dict[tuple[str, ...], float]:
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (
            sample.name,
            *(value for name, value in sorted(sample.labels.items()) if name != "model_name"),
        ): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_token_counters_equal_the_usage(model: LLM) -> None:
    with running(model) as made, made.client() as client:
        before = scraped(client)
        assert before["vllm:num_requests_running",] == before["vllm:kv_cache_usage_perc",] == 0.0
        body = {
            "prompt": "def f(x):\n    return x\n\ndef f(x):\n    return",
            "max_tokens": 40,
            "temperature": 0,
            "n": 2,
        }
        usage = [client.post("/v1/completions", json=body).json()["usage"] for _ in range(2)]
        after = scraped(client)
        for name, field in (
            ("vllm:prompt_tokens_total", "prompt_tokens"),
            ("vllm:generation_tokens_total", "completion_tokens"),
            ("vllm:spec_decode_num_draft_tokens_total", "drafted"),
            ("vllm:spec_decode_num_accepted_tokens_total", "accepted"),
            ("pronk:steps_total", "steps"),
        ):
            assert after[name,] == sum(each[field] for each in usage) > 0
        assert after["vllm:request_success_total", "length"] == 4
        assert after["http_requests_total", "/v1/completions", "POST", "200"] == 2
        assert (
            after["vllm:time_to_first_token_seconds_count",]
            == after["vllm:e2e_request_latency_seconds_count",]
            == 4
        )
        assert after["vllm:prefix_cache_hits_total",] > 0
        accepted = after["vllm:spec_decode_num_accepted_tokens_total",]
        assert (
            sum(value for key, value in after.items() if key[0].endswith("per_pos_total"))
            == accepted
        )
        assert (
            sum(value for key, value in after.items() if key[0] == "pronk:accepted_tokens_total")
            == accepted
        )


def test_timeout_is_counted_as_failure(model: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "temperature": 1.9}
    clock = ShiftedClock()
    step = model.engine.step

    def end_after_the_first_tokens() -> None:
        step()
        if any(request.num_generated for request in model.engine.scheduler.running):
            clock.shift = 3 * HUNG

    monkeypatch.setattr(model.engine.scheduler, "clock", clock)
    monkeypatch.setattr(model.engine, "step", end_after_the_first_tokens)
    with running(model, limits=RequestLimits(seconds=2 * HUNG)) as made, made.client() as client:
        assert client.post("/v1/completions", json=body).status_code == 408
        found = scraped(client)
        assert (
            found["pronk:request_failure_total", "timeout"]
            == found["vllm:time_to_first_token_seconds_count",]
            == 1
        )
        assert found["vllm:generation_tokens_total",] > 0  # also of unfinished samples


def test_failures_before_the_engine_are_counted(
    model: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = RequestLimits(seconds=2 * HUNG)
    late = Event()
    with running(model, limits=limits) as made, made.client() as client:
        assert (
            client.post(
                "/v1/completions", json={"prompt": "x", "logit_bias": {"99999999": 1}}
            ).status_code
            == 400
        )
        object.__setattr__(limits, "seconds", 0.2)
        monkeypatch.setattr(made.llm.tokenizer, "encode", lambda *_, **__: late.wait(HUNG))
        try:
            assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 408
        finally:
            late.set()
        found = scraped(client)
        assert (
            found["pronk:request_failure_total", "refused"]
            == found["pronk:request_failure_total", "timeout"]
            == 1
        )


def test_refusals_and_moderations_are_counted(model: LLM) -> None:
    with running(model) as made, made.client() as client:
        client.post("/v1/moderations", json={"input": ["a", "b"]})
        client.post("/v1/completions", json={"nonsense": 1})
        client.request("BREW", "/" + "x" * 50)
        httpx.get(f"{made.url}/v1/models")
        found = scraped(client)
        answers = {
            key[1:]: value for key, value in found.items() if key[0] == "http_requests_total"
        }
        assert found["vllm:request_success_total", "length"] == 2
        assert (
            answers["/v1/moderations", "POST", "200"]
            == answers["/v1/completions", "POST", "400"]
            == 1
        )
        assert answers["none", "other", "404"] == answers["none", "GET", "401"] == 1


def test_disconnect_is_counted_as_abort(served: Running, client: httpx.Client) -> None:
    before = scraped(client).get(("pronk:request_failure_total", "abort"), 0.0)
    body = {"prompt": "x", "max_tokens": 1900, "stream": True, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    with served.client() as other:
        assert eventually(
            lambda: scraped(other).get(("pronk:request_failure_total", "abort"), 0.0) != before
        )
    assert served.drained
