"""Servers in a thread of the test process."""

import asyncio
import gc
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from pronk.async_llm import AsyncLLM
from pronk.llm import LLM
from pronk.server import garbage
from pronk.server.model_pool import ModelPool
from pronk.server.run import Server
from pronk.server.service import Service
from pronk.server.settings import RequestLimits, ServerSettings
from waiting import HUNG, eventually

KEY = "a-key-for-tests"


@dataclass(frozen=True)
class Running:
    """A running server.

    Attributes:
        url: address of the server.
        llm: model of the server.
        server: the server.
        thread: thread of the server.
    """

    url: str
    llm: LLM
    server: Server
    thread: threading.Thread

    def client(self, **options: Any) -> httpx.Client:
        """Return a client with the API key."""
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.Client(
            **{"base_url": self.url, "headers": headers, "timeout": HUNG, **options}
        )

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits and all KV blocks are free."""
        engine = self.llm.engine
        blocks = self.llm.engine.cache.allocator
        return (
            not (engine.scheduler.running or engine.scheduler.waiting)
            and blocks.num_free == blocks.num_blocks
        )

    @property
    def drained(self) -> bool:
        """Whether the server soon is idle: a client may read an answer before the engine removes
        its request.
        """
        return eventually(lambda: self.idle)


@contextmanager
def running(
    llm: LLM, *, limits: RequestLimits | None = None, drain_seconds: float = 5.0, **options: Any
) -> Iterator[Running]:
    """Serve a model in a thread, by default without limits of time that a test could reach."""
    limits = limits or RequestLimits(receive_seconds=2 * HUNG, send_seconds=2 * HUNG)
    settings = ServerSettings(**{"name": "tiny", "keys": (KEY,), "limits": limits, **options})
    engine = AsyncLLM(llm, max_requests=settings.limits.requests, shared=settings.is_shared)
    service = Service(engine, settings)
    with running_pool(ModelPool.of(service), drain_seconds=drain_seconds) as (url, server, thread):
        yield Running(url, llm, server, thread)


@contextmanager
def running_pool(
    pool: ModelPool, *, drain_seconds: float = 5.0
) -> Iterator[tuple[str, Server, threading.Thread]]:
    """Serve the models of a pool in a thread; yield the URL, the server and its thread."""
    started = threading.Event()
    where = list[tuple[str, int]]()

    def on_start(host: str, port: int) -> None:
        where.append((host, port))
        started.set()

    server = Server(pool, drain_seconds=drain_seconds, on_start=on_start)
    thread = threading.Thread(target=server.run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(garbage, "gc", _Thresholds)
        thread.start()
        try:
            assert started.wait(HUNG)
            yield f"http://{where[0][0]}:{where[0][1]}", server, thread
        finally:
            server.stop()
            thread.join(HUNG)
    assert not thread.is_alive(), _stacks(server)


class _Thresholds:
    """What a server uses of ``gc``, without collections.

    Each collection would visit the objects of all tests so far.
    """

    get_threshold = gc.get_threshold
    set_threshold = gc.set_threshold
    get_count = gc.get_count

    @staticmethod
    def collect() -> None:
        """Collect nothing; ``test_garbage.py`` tests when a server would."""

    freeze = unfreeze = collect


def hold_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch, num_tokens: int = 20) -> None:
    """Generate about ``num_tokens`` tokens of a request, then few in a second, so that it runs
    until it is aborted.

    A stream whose client has left ends when the next token is sent.
    """
    step = llm.engine.step
    pause = threading.Event()

    def hold_or_step() -> None:
        if any(request.num_generated >= num_tokens for request in llm.engine.scheduler.running):
            pause.wait(0.05)
        step()

    monkeypatch.setattr(llm.engine, "step", hold_or_step)


def _stacks(server: Server) -> str:
    """Return one line per thread and task of the server, with its innermost frames."""
    frames = sys._current_frames()
    main = threading.main_thread()
    threads = {
        each.name: frames.get(each.ident or 0) for each in threading.enumerate() if each is not main
    }
    places = {
        name: _places(traceback.extract_stack(frame))
        for name, frame in threads.items()
        if frame is not None
    }
    for each in server.servers:
        for task in asyncio.all_tasks(each.get_loop()):
            stack = traceback.StackSummary.extract(
                (frame, frame.f_lineno) for frame in task.get_stack()
            )
            places[task.get_name()] = _places(stack)
    state = {"exit": server.should_exit, "busy": server.models.is_busy}
    return "\n".join(f"{name}: {place}" for name, place in (state | places).items())


def _places(stack: traceback.StackSummary) -> str:
    return " < ".join(
        f"{Path(each.filename).stem}:{each.lineno} {each.name}" for each in [*reversed(stack)][:7]
    )
