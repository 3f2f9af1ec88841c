"""Several keys: whatever one of them sends, requests of another one are accepted and answered."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from pronk import engine_thread
from pronk.llm import LLM
from pronk.server.settings import RequestLimits
from server.serving import KEY, Running, running
from waiting import HUNG, eventually

OTHER = "another-key-for-tests"
SMALL = {"prompt": "Hi", "max_tokens": 2}
LONG = {"prompt": "def f(x):", "max_tokens": 1500, "ignore_eos": True, "temperature": 1.0}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}


@pytest.fixture(scope="module")
def shared(model: LLM) -> Iterator[Running]:
    with running(model, keys=(KEY, OTHER), limits=RequestLimits(requests=64)) as made:
        yield made


def ask(made: Running, key: str, body: dict[str, Any]) -> httpx.Response:
    with httpx.Client(base_url=made.url, headers={"Authorization": f"Bearer {key}"}, timeout=HUNG) as client:
        return client.post("/v1/completions", json=body)


def test_one_request_does_not_take_all_places(shared: Running) -> None:
    answer = ask(shared, KEY, LONG | {"prompt": ["a"] * 16, "n": 4})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("n: expected at most 32 samples at a time, found 64")


@contextmanager
def sent(made: Running, body: dict[str, Any]) -> Iterator[None]:
    """Send a request of the first key on a connection that is closed afterwards, without reading the answer."""
    url, data = httpx.URL(made.url), json.dumps(body).encode()
    head = ["POST /v1/completions HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {KEY}"]
    head += [f"Content-Length: {len(data)}", "Content-Type: application/json", "", ""]
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((url.host, url.port or 80))
        sock.sendall("\r\n".join(head).encode() + data)
        yield


SHAPES: dict[str, list[dict[str, Any]]] = {
    "prompts x n": [LONG | {"prompt": ["a", "b"] * 4, "n": 4}],
    "long streams": [LONG | {"stream": True}] * 32,
    "guides": [LONG | {"guided_regex": "a{1000,1500}", "ignore_eos": False}] * 24,
    "high priority": [LONG | {"priority": 1000}] * 32,
    "long prompts": [LONG | {"prompt": "x " * 500}] * 20,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_key_is_served_while_another_one_floods_the_server(shared: Running, shape: str) -> None:
    scheduler = shared.llm.engine.scheduler
    flood = SHAPES[shape]
    with ExitStack() as closing:
        for body in flood:
            closing.enter_context(sent(shared, body))
        assert eventually(lambda: len(scheduler.running) >= min(scheduler.max_batch, 8))
        answer = ask(shared, OTHER, SMALL)
        assert answer.status_code == 200, answer.text
        assert scheduler.running, "the other key's requests still run"
    assert shared.drained


def test_a_stream_that_nobody_reads_is_paused(shared: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is generated up to what buffers take, and then its place in the batch is free for others."""
    monkeypatch.setattr(engine_thread, "MAX_UNREAD", 4)
    with sent(shared, LONG | {"stream": True, "logprobs": 20}):
        scheduler = shared.llm.engine.scheduler
        assert eventually(lambda: any(each.paused for each in (*scheduler.running, *scheduler.waiting)))
        (request,) = (*scheduler.running, *scheduler.waiting)

        def stands_still_beside_another_request() -> bool:
            generated = request.num_generated
            assert generated < 1500
            assert ask(shared, KEY, SMALL).status_code == 200
            return request in scheduler.waiting and request.num_generated == generated

        assert eventually(stands_still_beside_another_request), "its place in the batch is free"
    assert shared.drained
    assert request.aborted
