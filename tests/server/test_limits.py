"""Limits, unknown fields and API keys: every refusal has its own status and code."""

import asyncio
import json
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from typing import Any

import httpx
import pytest

from pronk.base.errors import OptionError
from pronk.drafting.registry import REGISTRY, make_drafter
from pronk.llm import LLM
from pronk.server.settings import RequestLimits, ServerSettings
from server.serving import KEY, Running, hold_requests, running
from waiting import HUNG, ShiftedClock, TimeLimits, eventually

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
TEXT = {"prompt": "Hi", "max_tokens": 2}


def error(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    found = answer.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert found["code"] == code
    assert "\n" not in found["message"]
    assert len(found["message"]) <= 300
    return dict(found)


@pytest.mark.parametrize(
    ("route", "body", "code", "param"),
    [
        ("/v1/completions", TEXT | {"nonsense": 1}, "unknown_field", "nonsense"),
        ("/v1/completions", TEXT | {"chat_template": "{{ 1 }}"}, "unsupported", "chat_template"),
        ("/v1/completions", TEXT | {"max_tokens": "2"}, "invalid_value", "max_tokens"),
        ("/v1/completions", TEXT | {"max_tokens": True}, "invalid_value", "max_tokens"),
        ("/v1/completions", TEXT | {"max_tokens": 10**30}, "invalid_value", "max_tokens"),
        ("/v1/completions", TEXT | {"max_tokens": 0}, "invalid_value", "max_tokens"),
        ("/v1/completions", TEXT | {"n": 17}, "invalid_value", "n"),
        ("/v1/completions", TEXT | {"stop": ["a"] * 17}, "invalid_value", "stop"),
        ("/v1/completions", TEXT | {"stop": "a" * 257}, "invalid_value", "stop"),
        ("/v1/completions", TEXT | {"bad_words": ["a"] * 17}, "invalid_value", "bad_words"),
        ("/v1/completions", TEXT | {"logprobs": 21}, "invalid_value", "logprobs"),
        ("/v1/completions", TEXT | {"logit_bias": {"1": 101}}, "invalid_value", "logit_bias"),
        ("/v1/completions", TEXT | {"logit_bias": {"x": 1}}, "invalid_value", "logit_bias"),
        ("/v1/completions", TEXT | {"logit_bias": {"99999999": 1}}, "invalid_value", "logit_bias"),
        (
            "/v1/completions",
            TEXT | {"logit_bias": {str(i): 1 for i in range(1025)}},
            "invalid_value",
            "logit_bias",
        ),
        ("/v1/completions", TEXT | {"prompt": ["a"] * 65}, "invalid_value", "prompt"),
        ("/v1/completions", TEXT | {"prompt": []}, "invalid_value", "prompt"),
        ("/v1/completions", TEXT | {"prompt": ""}, "invalid_prompt", None),
        ("/v1/completions", TEXT | {"prompt": "a b " * 4000}, "context_length_exceeded", None),
        ("/v1/completions", TEXT | {"prompt": [10**9]}, "invalid_prompt", None),
        ("/v1/completions", TEXT | {"best_of": 3}, "unsupported", "best_of"),
        ("/v1/completions", TEXT | {"suffix": "x"}, "invalid_value", "suffix"),
        ("/v1/completions", TEXT | {"leaps": True}, "invalid_value", "leaps"),
        ("/v1/completions", TEXT | {"drafter": "nonsense"}, "invalid_value", "drafter"),
        ("/v1/completions", TEXT | {"drafter": "lookahead(window=-1)"}, "invalid_value", "drafter"),
        (
            "/v1/completions",
            TEXT | {"drafter": "draft_model(model='/etc')"},
            "drafter_not_allowed",
            "drafter",
        ),
        (
            "/v1/completions",
            TEXT | {"drafter": "suffix(store='/etc/passwd')"},
            "drafter_not_allowed",
            "drafter",
        ),
        (
            "/v1/completions",
            TEXT | {"drafter": "merged(suffix, glide)"},
            "drafter_not_allowed",
            "drafter",
        ),
        ("/v1/completions", TEXT | {"rule": "typical"}, "invalid_value", "rule"),
        ("/v1/completions", TEXT | {"priority": 10**6}, "invalid_value", "priority"),
        ("/v1/chat/completions", CHAT | {"messages": []}, "invalid_value", "messages"),
        ("/v1/chat/completions", CHAT | {"top_logprobs": 2}, "invalid_value", "top_logprobs"),
        ("/v1/chat/completions", CHAT | {"tools": [{}]}, "invalid_value", "tools.0.function"),
        (
            "/v1/responses",
            {"input": [{"type": "item_reference", "id": "x"}]},
            "unsupported",
            "input",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"tool_choice": "required"},
            "invalid_value",
            "tool_choice",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"parallel_tool_calls": 1},
            "invalid_value",
            "parallel_tool_calls",
        ),
        ("/v1/chat/completions", CHAT | {"reasoning_effort": []} | {"n": 0}, "invalid_value", "n"),
        ("/v1/completions", TEXT | {"prompt": [[1], ["a"]]}, "invalid_value", "prompt.1.0"),
        (
            "/v1/completions",
            TEXT
            | {"drafter": "merged(suffix,merged(suffix,merged(suffix,merged(suffix,suffix))))"},
            "invalid_value",
            "drafter",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "invalid_value",
            "messages.0.content.0.text",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": 5}]},
            "invalid_value",
            "messages.0.content",
        ),
        ("/v1/chat/completions", {}, "invalid_value", "messages"),
        (
            "/v1/chat/completions",
            CHAT | {"response_format": {"type": "xml"}},
            "invalid_value",
            "response_format.type",
        ),
        (
            "/v1/responses",
            {"input": "Hi", "previous_response_id": "x"},
            "unsupported",
            "previous_response_id",
        ),
        ("/v1/responses", {"input": "Hi", "n": 2}, "invalid_value", "n"),
        ("/v1/responses", {"input": []}, "invalid_value", "input"),
        ("/v1/moderations", {"input": []}, "invalid_value", "input"),
        ("/v1/embeddings", {"input": []}, "invalid_value", "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, "invalid_value", "input"),
        ("/v1/embeddings", {"input": [[1], []]}, "invalid_value", "input"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "invalid_value", "input"),
        ("/v1/embeddings", {"input": [5000]}, "invalid_prompt", "input"),
        ("/v1/embeddings", {"input": [1] * 2048}, "context_length_exceeded", "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "invalid_value", "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": 321}, "invalid_value", "dimensions"),
        (
            "/v1/embeddings",
            {"input": "a", "encoding_format": "int8"},
            "invalid_value",
            "encoding_format",
        ),
        ("/v1/embeddings", {"input": "a", "pooling": "cls"}, "invalid_value", "pooling"),
        ("/v1/embeddings", {}, "invalid_value", "input"),
        ("/tokenize", {}, "invalid_value", "prompt"),
        ("/detokenize", {"tokens": [-1]}, "invalid_value", "tokens"),
    ],
)
def test_invalid_field_is_refused_and_named(
    client: httpx.Client, route: str, body: dict[str, Any], code: str, param: str | None
) -> None:
    found = error(client.post(route, json=body), 400, code)
    if param is not None:
        assert found["param"] == param
    assert not any(
        word in found["message"]
        for word in ("Input should", "Value error", "Field required", "function-")
    )


@pytest.mark.parametrize(
    ("route", "body", "neutral"),
    [
        ("/v1/completions", TEXT, {"service_tier": "auto", "user": "me", "best_of": 1, "suffix": "", "seed": -1}),
        (
            "/v1/chat/completions",
            CHAT,
            {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "functions": [], "metadata": {"a": "b"},
             "modalities": ["text"], "response_format": {"type": "text"}, "store": False, "verbosity": "medium",
             "prompt_cache_key": "x", "safety_identifier": "y", "service_tier": "default", "reasoning_effort": "none"},
        ),
        (
            "/v1/responses",
            {"input": "Hi", "max_output_tokens": 2},
            {"tools": [], "tool_choice": "none", "text": {"format": {"type": "text"}}, "truncation": "disabled",
             "background": False, "reasoning": {"effort": "none"}, "store": False, "metadata": {"a": "b"}},
        ),
    ],
)  # fmt: skip
def test_unsupported_fields_are_accepted_with_neutral_values(
    client: httpx.Client, route: str, body: dict[str, Any], neutral: dict[str, Any]
) -> None:
    for given in (
        neutral,
        dict.fromkeys(neutral),
        *({name: value} for name, value in neutral.items()),
    ):
        answer = client.post(route, json=body | given)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "drafter",
    ["autoregressive", "recycling(num_nodes=7)", "merged(suffix, jacobi)", "draft_model", "jacobi"],
)
def test_request_selects_a_drafter_and_keeps_its_text(client: httpx.Client, drafter: str) -> None:
    body = {"prompt": "def f(x):", "max_tokens": 12, "seed": 1}
    plain = client.post("/v1/completions", json=body).json()
    got = client.post("/v1/completions", json=body | {"drafter": drafter}).json()
    assert got["choices"][0]["text"] == plain["choices"][0]["text"]
    assert (got["usage"]["drafted"] > 0) == (drafter != "autoregressive")


def test_options_that_name_files_are_listed(served: Running) -> None:
    """A new text option must be checked: if it names a file, requests must not set it."""
    for name in REGISTRY:
        drafter = make_drafter(name)
        found = (
            {each.name for each in fields(drafter) if "str" in str(each.type)}
            if is_dataclass(drafter)
            else set()
        )
        assert found <= {
            "model",
            "datastore",
            "store",
            "table",
            "draft_text",
            "dtype",
            "weights",
            "sizes",
            "toward",
        }, (name, found)


def test_image_in_a_message_is_refused(client: httpx.Client) -> None:
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}
    error(
        client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": [image]}]}
        ),
        400,
        "invalid_value",
    )


def test_another_model_name_is_not_found(client: httpx.Client) -> None:
    for route, body in (
        ("/v1/completions", TEXT),
        ("/v1/chat/completions", CHAT),
        ("/tokenize", {"prompt": "x"}),
    ):
        error(client.post(route, json=body | {"model": "gpt-4"}), 404, "model_not_found")


# Media types of curl without -H, of fetch() in Node.js, and of clients that set none.
DEFAULT_TYPES = ["application/x-www-form-urlencoded", "text/plain;charset=UTF-8", "", None]


@pytest.mark.parametrize("kind", DEFAULT_TYPES)
def test_json_is_read_under_the_default_media_types_of_clients(
    client: httpx.Client, kind: str | None
) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    body = b'{"prompt": "x", "max_tokens": 1}'
    assert client.post("/v1/completions", content=body, headers=headers).status_code == 200
    error(
        client.post("/v1/completions", content=b"prompt=x", headers=headers), 400, "invalid_value"
    )


@pytest.mark.parametrize("name", ["Origin", "Referer", "Sec-Fetch-Site"])
@pytest.mark.parametrize("kind", DEFAULT_TYPES)
def test_requests_of_browsers_need_the_media_type_of_json(
    client: httpx.Client, kind: str | None, name: str
) -> None:
    """A page of another origin can send the default media types without a preflight request."""
    body = b'{"prompt": "x", "max_tokens": 1}'
    headers = {name: "http://127.0.0.1"}
    plain = headers if kind is None else {**headers, "Content-Type": kind}
    error(
        client.post("/v1/completions", content=body, headers=plain), 415, "unsupported_media_type"
    )
    as_json = {**headers, "Content-Type": "application/json; charset=utf-8"}
    assert client.post("/v1/completions", content=body, headers=as_json).status_code == 200


def test_other_media_types_are_refused(client: httpx.Client) -> None:
    for kind in ("multipart/form-data; boundary=x", "image/png", "json"):
        answer = client.post(
            "/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": kind}
        )
        assert (
            repr(kind.partition(";")[0]) in error(answer, 415, "unsupported_media_type")["message"]
        )


def test_curl_needs_no_media_type(served: Running) -> None:
    command = [
        "curl",
        "-s",
        f"{served.url}/v1/completions",
        "-H",
        f"Authorization: Bearer {KEY}",
        "-d",
        "@-",
    ]
    done = subprocess.run(
        command, input=json.dumps(TEXT), capture_output=True, text=True, timeout=HUNG, check=True
    )
    assert json.loads(done.stdout)["object"] == "text_completion"


@pytest.mark.parametrize("name", ["tiny", "TINY", "tiny.gguf", "Tiny.GGUF"])
def test_model_names_match_in_any_case_and_with_the_ending_of_a_file(
    client: httpx.Client, name: str
) -> None:
    reply = client.post("/v1/completions", json=TEXT | {"model": name}).json()
    assert reply["model"] == "tiny"
    assert client.get(f"/v1/models/{name}").json()["id"] == "tiny"
    error(client.post("/v1/completions", json=TEXT | {"model": name + "2"}), 404, "model_not_found")


def test_keys_in_the_header_of_anthropic(served: Running) -> None:
    for headers, status in (
        ({"X-Api-Key": KEY}, 200),
        ({"X-Api-Key": "other-key"}, 401),
        ({}, 401),
    ):
        with httpx.Client(base_url=served.url, headers=headers, timeout=HUNG) as other:
            assert other.get("/v1/models").status_code == status
            answer = other.post("/v1/messages", json=CHAT)
            assert answer.status_code == status
            assert answer.json()["type"] == ("message" if status == 200 else "error")


def test_unknown_routes_and_methods_are_refused(client: httpx.Client) -> None:
    error(client.get("/v1/nonsense"), 404, "not_found")
    error(client.get("/docs"), 404, "not_found")
    error(client.delete("/v1/models"), 405, "method_not_allowed")


def test_every_route_but_health_requires_a_key(served: Running) -> None:
    posts = {
        "/v1/completions": TEXT,
        "/v1/chat/completions": CHAT,
        "/v1/moderations": {"input": "x"},
    }
    gets = ("/v1/models", "/metrics", "/openapi.json", "/v1/models/tiny", "/nonsense")
    for key in (None, "a-key-for-test", f"{KEY}x", f"{KEY} {KEY}", "ä"):
        headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
        with httpx.Client(base_url=served.url, headers=headers) as other:
            answers = [other.get(route) for route in gets] + [
                other.post(r, json=b) for r, b in posts.items()
            ]
            for answer in answers:
                error(answer, 401, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
            assert other.get("/health").json() == {"status": "ok"}
            assert other.get("/ready").status_code == 200
    with httpx.Client(base_url=served.url, headers={"Authorization": f"Basic {KEY}"}) as other:
        error(other.get("/v1/models"), 401, "invalid_api_key")


def test_large_headers_and_bodies_are_refused(client: httpx.Client) -> None:
    for size in (20_000, 60_000):  # refused by the guard, and by h11
        error(client.get("/health", headers={"X-Long": "x" * size}), 431, "headers_too_large")
    error(
        client.post("/v1/completions", json={"prompt": "x" * (4 * 2**20 + 1)}),
        413,
        "body_too_large",
    )

    def parts() -> Any:
        for _ in range(80):
            yield b"x" * 2**16

    error(
        client.post(
            "/v1/completions", content=parts(), headers={"Content-Type": "application/json"}
        ),
        413,
        "body_too_large",
    )


def test_unknown_host_header_is_refused(model: LLM) -> None:
    with (
        running(model, keys=(), hosts={"127.0.0.1", "localhost"}) as made,
        httpx.Client(base_url=made.url) as other,
    ):
        assert other.get("/v1/models").status_code == 200
        for host in ("evil.example", "evil.example:80", "[::1]:1", ""):
            error(other.get("/v1/models", headers={"Host": host}), 421, "unknown_host")
            assert other.get("/health", headers={"Host": host}).status_code == 200
        assert other.head("/ready").status_code == 200


def test_samples_beyond_the_limit_are_refused(model: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        running(model, limits=RequestLimits(requests=3, max_tokens=1500)) as made,
        made.client() as other,
    ):
        error(other.post("/v1/completions", json=TEXT | {"n": 4}), 400, "invalid_value")
        hold_requests(model, monkeypatch)
        busy = {"prompt": "Hi", "max_tokens": 1500, "n": 3, "ignore_eos": True, "stream": True}
        with other.stream("POST", "/v1/completions", json=busy), made.client() as late:
            answer = late.post("/v1/completions", json=TEXT)
            error(answer, 429, "overloaded")
            assert answer.headers["retry-after"] == "1"
        assert made.drained
        monkeypatch.undo()
        assert other.post("/v1/completions", json=TEXT | {"n": 3}).status_code == 200


def test_request_beyond_the_time_limit_ends_with_408(
    model: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ShiftedClock()
    monkeypatch.setattr(model.engine.scheduler, "clock", clock)
    with running(model, limits=RequestLimits(seconds=2 * HUNG)) as made, made.client() as other:
        short = {"prompt": "Hi", "max_tokens": 4}
        assert other.post("/v1/completions", json=short).status_code == 200
        clock.shift = 3 * HUNG
        answer = other.post("/v1/completions", json=short)
        error(answer, 408, "timeout")
        assert answer.headers["x-should-retry"] == "false"
        assert made.drained


def test_connections_beyond_the_limit_are_refused(model: LLM) -> None:
    with running(model, limits=RequestLimits(connections=2)) as made:
        clients = [made.client() for _ in range(3)]  # each has a connection with a request before
        try:
            answers = [each.get("/v1/models") for each in clients]
            assert [answer.status_code for answer in answers] == [200, 200, 429]
            error(answers[2], 429, "too_many_connections")
            assert clients[1].get("/health").status_code == 200
        finally:
            for each in clients:
                each.close()


@pytest.mark.parametrize("key", ["short", "with space in it", "umläut-umläut", "a\nnewline-in"])
def test_invalid_api_key_is_refused(key: str) -> None:
    with pytest.raises(OptionError, match="at least 8 printable ASCII characters"):
        ServerSettings(name="x", keys=(key,))


@pytest.mark.parametrize(
    ("name", "value"), [("body", 0), ("n", 1.5), ("seconds", 0.0), ("receive_seconds", -1)]
)
def test_invalid_limit_is_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name):
        RequestLimits(**{name: value})


def test_allowed_drafters_stay_loaded(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """An allowed drafter is not loaded again after the proposer cache has dropped it."""
    service = served.server.models.models[0].service
    assert service is not None
    select: Any = service._select_drafter
    held = select.__wrapped__("draft_model")
    assert held is served.llm.get_proposer("draft_model")
    monkeypatch.setattr(served.llm._proposers, "_cached", {})
    assert select.__wrapped__("draft_model") is held


class Held(threading.Event):
    """Event that tokenization of prompts waits for; ``begun`` is set when it begins to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()


@pytest.fixture
def held(model: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    event = Held()
    read = model.request_factory.encode_prompt

    def slow(prompt: Any) -> list[int]:
        event.begun.set()
        event.wait(HUNG)
        return read(prompt)

    monkeypatch.setattr(model.request_factory, "encode_prompt", slow)
    yield event
    event.set()


def _ask(made: Running) -> httpx.Response:
    with made.client() as client:
        return client.post("/v1/completions", json=TEXT)


def test_requests_beyond_the_limit_are_refused_before_tokenization(model: LLM, held: Held) -> None:
    with running(model, limits=RequestLimits(requests=2)) as made, ThreadPoolExecutor(2) as pool:
        service = made.server.models.models[0].service
        assert service is not None
        first = [pool.submit(_ask, made) for _ in range(2)]
        try:
            assert eventually(lambda: service._reading.num_admitted == 2)
            error(_ask(made), 429, "overloaded")
        finally:
            held.set()
        assert [each.result().status_code for each in first] == [200, 200]
        assert not service.is_busy


def test_slow_tokenization_ends_with_408(
    model: LLM, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = TimeLimits()
    monkeypatch.setattr(asyncio, "timeout", times)
    with running(model) as made, ThreadPoolExecutor(1) as pool:
        try:
            asked = pool.submit(_ask, made)
            assert held.begun.wait(HUNG)
            times.end()
            assert asked.result(HUNG).status_code == 408
            assert made.server.models.is_busy, "its thread still works"
        finally:
            held.set()
        assert eventually(lambda: not made.server.models.is_busy)
