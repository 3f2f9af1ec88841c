"""Several keys: whatever one of them sends, requests of another one are accepted and answered."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import socket
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from pronk.async_llm import REQUEST_THREADS, AsyncLLM
from pronk.base.errors import DeadlineError
from pronk.base.fair_executor import SMALL_JOB, FairExecutor
from pronk.engine import engine_thread
from pronk.engine.request_factory import RequestFactory
from pronk.engine.scheduler import MAX_WAIT, ScheduledRequest, Scheduler
from pronk.llm import LLM
from pronk.server import app
from pronk.server.bodies import BodyReader
from pronk.server.protocol.completions import CompletionRequest
from pronk.server.protocol.small_routes import (
    EmbeddingRequest,
    ModerationRequest,
    TokenizeRequest,
)
from pronk.server.service import Service
from pronk.server.settings import RequestLimits, ServerSettings
from pronk.text.tokenizer import Tokenizer
from server.serving import KEY, Running, running
from waiting import HUNG, ShiftedClock, TimeLimits, eventually, until

OTHER = "another-key-for-tests"
SMALL = {"prompt": "Hi", "max_tokens": 2}
LONG = {"prompt": "def f(x):", "max_tokens": 1500, "ignore_eos": True, "temperature": 1.0}
TEXT = {"type": "string", "minLength": 1000}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"a": TEXT}, "required": ["a"]}},
}
CALL = {
    "messages": [{"role": "user", "content": "x"}],
    "tools": [TOOL],
    "tool_choice": "required",
    "max_tokens": 1500,
    "temperature": 1.0,
}


@pytest.fixture(scope="module")
def shared(model: LLM) -> Iterator[Running]:
    with running(model, keys=(KEY, OTHER), limits=RequestLimits(requests=64)) as made:
        yield made


def ask(made: Running, key: str, body: dict[str, Any]) -> httpx.Response:
    with httpx.Client(
        base_url=made.url, headers={"Authorization": f"Bearer {key}"}, timeout=HUNG
    ) as client:
        return client.post("/v1/completions", json=body)


def test_one_request_does_not_take_all_places(shared: Running) -> None:
    answer = ask(shared, KEY, LONG | {"prompt": ["a"] * 16, "n": 4})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(
        "n: expected at most 32 samples at a time, found 64"
    )


@contextmanager
def sent(made: Running, body: dict[str, Any]) -> Iterator[None]:
    """Send a request of the first key on a connection that is closed afterwards, without reading
    the answer.
    """
    url = httpx.URL(made.url)
    data = json.dumps(body).encode()
    route = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    head = [f"POST {route} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {KEY}"]
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
    "tools": [CALL] * 24,
    "high priority": [LONG | {"priority": 1000}] * 32,
    "long prompts": [LONG | {"prompt": "x " * 500}] * 20,
}


USUAL = {"prompts x n", "guides", "tools"}  # the other shapes are slow tests

PASS_SECONDS = 0.1  # that each forward pass takes at least, on the clock of the scheduler


class Passes:
    """Forward passes of a scheduler that take a time each, seen from one tenant.

    Attributes:
        clock: clock of the scheduler.
        num_without: number of passes in a row, up to now, in which the tenant waited.
        longest: largest value of ``num_without`` so far.
        num_with: number of passes that had a request of the tenant.
    """

    def __init__(self, scheduler: Scheduler, tenant: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = ShiftedClock()
        self.num_without = 0
        self.longest = 0
        self.num_with = 0
        self._tenant = tenant
        self._scheduler = scheduler
        self._schedule = scheduler.schedule
        monkeypatch.setattr(scheduler, "clock", self.clock)
        monkeypatch.setattr(scheduler, "schedule", self.schedule)

    def schedule(self) -> list[ScheduledRequest]:
        batch = self._schedule()
        self.clock.shift += PASS_SECONDS
        if any(each.request.tenant == self._tenant for each in batch):
            self.num_with += 1
            self.num_without = 0
        elif any(
            each.tenant == self._tenant
            for each in (*self._scheduler.running, *self._scheduler.waiting)
        ):
            self.num_without += 1
            self.longest = max(self.longest, self.num_without)
        return batch


@pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, marks=() if shape in USUAL else pytest.mark.slow) for shape in SHAPES],
)
def test_a_key_is_served_while_another_one_floods_the_server(
    shared: Running, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests wait for at most as many passes as ``max_wait`` has."""
    engine = shared.llm.engine
    passes = Passes(engine.scheduler, hashlib.sha256(OTHER.encode()).hexdigest(), monkeypatch)
    monkeypatch.setattr(engine.runner, "clock", passes.clock)
    with ExitStack() as closing:
        for body in SHAPES[shape]:
            closing.enter_context(sent(shared, body))
        assert eventually(
            lambda: len(engine.scheduler.running) >= min(engine.scheduler.max_batch, 8)
        )
        answer = ask(shared, OTHER, SMALL)
        assert answer.status_code == 200, answer.text
        assert engine.scheduler.running, "the other key's requests still run"
    assert shared.drained
    assert passes.num_with >= SMALL["max_tokens"], "a pass for each token, as without drafts"
    assert passes.longest <= MAX_WAIT / PASS_SECONDS


ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/moderations": {"input": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5]},
}
STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
PARTS = {
    "body": (BodyReader, "_read"),
    "prompt": (RequestFactory, "encode_prompt"),
    "reply": (app, "_json_response"),
    "report": (app, "_report_header"),
}


@pytest.mark.parametrize(
    ("route", "stream"),
    [*((route, False) for route in ROUTES), *((route, True) for route in STREAMED)],
)
def test_what_depends_on_the_size_of_a_request_takes_turns(
    shared: Running, monkeypatch: pytest.MonkeyPatch, route: str, stream: bool
) -> None:
    """Nothing of it runs on the event loop, or in its threads, in which keys do not take turns."""
    threads = dict[str, set[str]]()

    def noted(part: str, function: Any) -> Any:
        def note(*given: Any, **options: Any) -> Any:
            threads.setdefault(part, set()).add(threading.current_thread().name.rpartition("_")[0])
            return function(*given, **options)

        return note

    for part, (owner, name) in PARTS.items():
        monkeypatch.setattr(owner, name, noted(part, getattr(owner, name)))
    body = {**ROUTES[route], "metadata": {"x": "x" * 20_000}}
    with shared.client() as client, monkeypatch.context() as patch:
        patch.setattr(
            asyncio, "to_thread", lambda *_: pytest.fail("expected the threads with turns")
        )
        answer = client.post(route, json={**body, "stream": True} if stream else body)
        assert answer.status_code in (200, 400), answer.text
    assert "body" in threads
    assert set.union(*threads.values()) == {"pronk-requests"}


def test_two_large_bodies_are_read_at_once_and_the_server_answers_beside_them(
    model: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop waits for each thread that runs Python code, so that their number is its
    delay.
    """
    gate = threading.Event()
    lock = threading.Lock()
    num_now = 0
    most = 0
    read = BodyReader._read

    def wait(*given: Any) -> Any:
        nonlocal num_now, most
        with lock:
            num_now += 1
            most = max(most, num_now)
        assert gate.wait(HUNG)
        with lock:
            num_now -= 1
        return read(*given)

    monkeypatch.setattr(BodyReader, "_read", wait)
    large = SMALL | {"metadata": {"x": "x" * 20_000}}
    with running(model, keys=(KEY, OTHER)) as made, ThreadPoolExecutor(16) as clients:
        answers = [clients.submit(ask, made, key, large) for key in (KEY, OTHER) * 8]
        assert eventually(lambda: num_now == REQUEST_THREADS)
        assert httpx.get(f"{made.url}/health", timeout=HUNG).status_code == 200
        gate.set()
        assert {each.result(HUNG).status_code for each in answers} == {200}
    assert most == REQUEST_THREADS == 2


@pytest.mark.parametrize("keys", [(), (KEY,), (KEY, OTHER)], ids=["no key", "one key", "keys"])
def test_a_small_request_waits_for_no_large_body(
    model: LLM, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...]
) -> None:
    """Not even one of the same key, from its body to the end of its stream."""
    gate = threading.Event()
    begun = threading.Event()
    read = BodyReader._read

    def wait(reader: BodyReader, kind: Any, data: bytes, objects: list[Any]) -> None:
        if len(data) > SMALL_JOB:
            begun.set()
            assert gate.wait(HUNG)
        read(reader, kind, data, objects)

    monkeypatch.setattr(BodyReader, "_read", wait)
    large = SMALL | {"metadata": {"x": "x" * 2 * SMALL_JOB}}
    with running(model, keys=keys) as made, ThreadPoolExecutor(8) as clients:
        try:
            answers = [clients.submit(ask, made, KEY, large) for _ in range(8)]
            assert begun.wait(HUNG)
            with made.client() as client:
                for route, body in small_bodies():
                    answer = client.post(route, json=body)
                    assert answer.status_code == 200, (route, answer.text)
            assert not any(each.done() for each in answers)
        finally:
            gate.set()
        assert {each.result(HUNG).status_code for each in answers} == {200}


def small_bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield routes and bodies that the event loop reads, and longer ones that a thread reads."""
    for route, body in ROUTES.items():
        if route not in STREAMED:
            yield route, body
            continue
        for size in (1, 10_000):
            yield route, {**body, "stream": True, "metadata": {"x": "x" * size}}


def many_texts(kind: str) -> tuple[Any, str]:
    """Return a request with 200 texts, and the name of the method that answers it."""
    texts = [f"text {number}" for number in range(200)]
    match kind:
        case "embeddings":
            return EmbeddingRequest.model_validate({"input": texts}), "embed"
        case "moderations":
            return ModerationRequest.model_validate({"input": texts}), "moderate"
        case _:
            fields = {"prompt": texts, "max_tokens": 1}
            return CompletionRequest.model_validate(fields), "complete"


KINDS = ("embeddings", "moderations", "completions")


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_many_texts_are_read_in_turns(
    model: LLM, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A job reads 64 of them at most, so that other requests have their turns between two jobs."""
    num_read = [0]
    services = list[Service]()
    encode = RequestFactory.encode_prompt
    submit = FairExecutor.submit

    def count(factory: RequestFactory, prompt: Any) -> list[int]:
        num_read[-1] += services[0]._reading.num_admitted  # not where the engine checks token ids
        return encode(factory, prompt)

    def begin(executor: FairExecutor, *job: Any, **options: Any) -> Any:
        num_read.append(0)
        return submit(executor, *job, **options)

    monkeypatch.setattr(RequestFactory, "encode_prompt", count)
    monkeypatch.setattr(FairExecutor, "submit", begin)
    request, method = many_texts(kind)

    async def main() -> None:
        async with AsyncLLM(model) as engine:
            settings = ServerSettings("tiny", limits=RequestLimits(prompts=200))
            services.append(Service(engine, settings))
            await getattr(services[0], method)(request, "a")

    asyncio.run(main())
    assert sum(num_read) == 200
    assert max(num_read) <= 64


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_ends_after_a_slow_text(
    model: LLM, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Another request is read before the other texts, by the same thread."""
    monkeypatch.setattr("pronk.server.service._TURN_SECONDS", 0.0)
    gate = threading.Event()
    begun = threading.Event()
    order = list[str]()
    encode = RequestFactory.encode_prompt

    def wait(factory: RequestFactory, prompt: Any) -> list[int]:
        begun.set()
        assert gate.wait(HUNG)
        order.append("text")
        return encode(factory, prompt)

    monkeypatch.setattr(RequestFactory, "encode_prompt", wait)
    request, method = many_texts(kind)

    async def main() -> None:
        async with AsyncLLM(model, executor=FairExecutor(1, "one")) as engine:
            settings = ServerSettings("tiny", limits=RequestLimits(prompts=200))
            answer = getattr(Service(engine, settings), method)
            answering = asyncio.ensure_future(answer(request, "a"))
            await asyncio.to_thread(begun.wait, HUNG)
            job = engine.executor.submit("a", lambda: order.append("other"))
            gate.set()
            await asyncio.wrap_future(job)
            await answering
            engine.executor.shutdown()

    asyncio.run(main())
    assert order.index("other") <= 2


@pytest.mark.parametrize("end", ["time", "client"])
@pytest.mark.parametrize("kind", KINDS)
def test_reading_ends_between_texts(
    model: LLM, monkeypatch: pytest.MonkeyPatch, kind: str, end: str
) -> None:
    """When the time of the request is over, or its client is gone."""
    gate = threading.Event()
    begun = threading.Event()
    num_read = 0
    encode = RequestFactory.encode_prompt

    def wait(factory: RequestFactory, prompt: Any) -> list[int]:
        nonlocal num_read
        num_read += 1
        begun.set()
        assert gate.wait(HUNG)
        return encode(factory, prompt)

    monkeypatch.setattr(RequestFactory, "encode_prompt", wait)
    request, method = many_texts(kind)
    times = TimeLimits()

    async def main() -> None:
        async with AsyncLLM(model) as engine:
            limits = RequestLimits(prompts=200)
            service = Service(engine, ServerSettings("tiny", limits=limits))
            answering = asyncio.ensure_future(getattr(service, method)(request, "a"))
            await asyncio.to_thread(begun.wait, HUNG)
            if end == "client":
                answering.cancel()
            else:
                times.end()
            with pytest.raises(DeadlineError if end == "time" else asyncio.CancelledError):
                await answering
            gate.set()
            await until(lambda: not service.is_busy)
        assert 1 <= num_read <= 64

    monkeypatch.setattr(asyncio, "timeout", times)
    asyncio.run(main())


def test_the_threads_of_a_server_end_with_it(model: LLM) -> None:
    before = {*threading.enumerate()}
    with running(model, keys=(KEY, OTHER)) as made:
        large = SMALL | {"metadata": {"x": "x" * 20_000}}
        for key in (KEY, OTHER):
            assert ask(made, key, large).status_code == 200
    assert eventually(
        lambda: not any(each.name.startswith("pronk") for each in {*threading.enumerate()} - before)
    )


def test_reading_keeps_its_place_until_its_thread_has_ended(
    model: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the time of the request is over, so that such requests do not take all threads."""
    begun = threading.Event()
    gate = threading.Event()

    def wait(*_: Any) -> list[int]:
        begun.set()
        assert gate.wait(HUNG)
        return [1]

    async def main() -> None:
        async with AsyncLLM(model, shared=True) as engine:
            service = Service(engine, ServerSettings("tiny", keys=(KEY, OTHER)))
            monkeypatch.setattr(service, "_tokenize", wait)
            request = TokenizeRequest.model_validate({"prompt": "Hi"})
            reading = asyncio.ensure_future(service.tokenize(request, "a"))
            await asyncio.to_thread(begun.wait, HUNG)
            times.end()
            with pytest.raises(DeadlineError, match="expected the prompt to be read within"):
                await reading
            assert service.is_busy
            gate.set()
            await until(lambda: not service.is_busy)

    times = TimeLimits()
    monkeypatch.setattr(asyncio, "timeout", times)
    asyncio.run(main())


def test_the_end_of_a_service_ends_texts_that_are_being_tokenized(
    model: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = list[Any]()

    def stop(tokenizer: Tokenizer) -> None:
        stopped.append(tokenizer)

    monkeypatch.setattr(Tokenizer, "stop", stop, raising=False)

    async def main() -> None:
        async with AsyncLLM(model) as engine:
            Service(engine, ServerSettings("tiny")).close()

    asyncio.run(main())
    assert stopped == [model.tokenizer]


@pytest.mark.parametrize("where", ["first chunk", "header"])
def test_a_stream_whose_client_leaves_before_the_response_is_closed(where: str) -> None:
    """Without the response, nothing else would close it before the garbage collector does."""
    closed = list[str]()

    async def stream(*_: Any) -> AsyncGenerator[list[dict[str, Any]]]:
        try:
            if where == "first chunk":
                raise asyncio.CancelledError
            yield []
        finally:
            await asyncio.sleep(0)
            closed.append(where)

    async def run(*_: Any, **__: Any) -> dict[str, str]:
        raise asyncio.CancelledError

    models: Any = SimpleNamespace(stream=stream, executor=SimpleNamespace(run=run))
    request: Any = SimpleNamespace(scope={}, url=httpx.URL("http://x/v1/completions"))
    body = CompletionRequest.model_validate({"prompt": "Hi", "stream": True})

    async def main() -> None:
        with pytest.raises(asyncio.CancelledError):
            await app._reply(models, request, body)
        assert closed == [where]

    asyncio.run(main())


def test_a_server_restores_the_settings_of_the_process(model: LLM) -> None:
    seconds = sys.getswitchinterval()
    thresholds = gc.get_threshold()
    try:
        sys.setswitchinterval(0.02)
        gc.set_threshold(701, 11, 12)
        with running(model):
            assert sys.getswitchinterval() < 0.02
            assert gc.get_threshold() != (701, 11, 12)
        assert sys.getswitchinterval() == pytest.approx(0.02)
        assert gc.get_threshold() == (701, 11, 12)
    finally:
        sys.setswitchinterval(seconds)
        gc.set_threshold(*thresholds)


def test_a_stream_that_nobody_reads_is_paused(
    shared: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is generated up to what buffers take, and then its place in the batch is free for
    others.
    """
    monkeypatch.setattr(engine_thread, "MAX_UNREAD", 4)
    with sent(shared, LONG | {"stream": True, "logprobs": 20}):
        scheduler = shared.llm.engine.scheduler
        assert eventually(
            lambda: any(each.paused for each in (*scheduler.running, *scheduler.waiting))
        )
        (request,) = (*scheduler.running, *scheduler.waiting)

        def stands_still_beside_another_request() -> bool:
            generated = request.num_generated
            assert generated < 1500
            assert ask(shared, KEY, SMALL).status_code == 200
            return request in scheduler.waiting and request.num_generated == generated

        assert eventually(stands_still_beside_another_request), "its place in the batch is free"
    assert shared.drained
    assert request.aborted
