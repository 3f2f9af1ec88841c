"""Servers in a thread of the test process."""

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from pronk.async_llm import AsyncLLM
from pronk.llm import LLM
from pronk.server.model_pool import ModelPool
from pronk.server.run import Server
from pronk.server.service import Service
from pronk.server.settings import RequestLimits, ServerSettings

KEY = "a-key-for-tests"


def eventually(fine: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Wait for a condition; return whether it became true in time."""
    end = time.monotonic() + seconds
    while not (is_fine := fine()) and time.monotonic() < end:
        time.sleep(0.005)
    return is_fine


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
        return httpx.Client(**{"base_url": self.url, "headers": headers, "timeout": 60, **options})

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits and all KV blocks are free."""
        engine, blocks = self.llm.engine, self.llm.engine.cache.allocator
        return not (engine.scheduler.running or engine.scheduler.waiting) and blocks.num_free == blocks.num_blocks

    @property
    def drained(self) -> bool:
        """Whether the server soon is idle: a client may read an answer before the engine removes its request."""
        return eventually(lambda: self.idle)


@contextmanager
def running(
    llm: LLM, *, limits: RequestLimits | None = None, drain_seconds: float = 5.0, **options: Any
) -> Iterator[Running]:
    """Serve a model in a thread."""
    settings = ServerSettings(**{"name": "tiny", "keys": (KEY,), "limits": limits or RequestLimits(), **options})
    engine = AsyncLLM(llm, max_requests=settings.limits.requests, shared=settings.is_shared)
    service = Service(engine, settings)
    with running_pool(ModelPool.of(service), drain_seconds=drain_seconds) as (url, server, thread):
        yield Running(url, llm, server, thread)


@contextmanager
def running_pool(pool: ModelPool, *, drain_seconds: float = 5.0) -> Iterator[tuple[str, Server, threading.Thread]]:
    """Serve the models of a pool in a thread; yield the URL, the server and its thread."""
    started, where = threading.Event(), list[tuple[str, int]]()

    def on_start(host: str, port: int) -> None:
        where.append((host, port))
        started.set()

    server = Server(pool, drain_seconds=drain_seconds, on_start=on_start)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert started.wait(30)
        yield f"http://{where[0][0]}:{where[0][1]}", server, thread
    finally:
        server.stop()
        thread.join(30)
    assert not thread.is_alive(), _stacks(server)


def _stacks(server: Server) -> str:
    """Return one line per thread and task of the server, with its innermost frames."""
    frames, main = sys._current_frames(), threading.main_thread()
    threads = {each.name: frames.get(each.ident or 0) for each in threading.enumerate() if each is not main}
    places = {name: _places(traceback.extract_stack(frame)) for name, frame in threads.items() if frame is not None}
    for each in server.servers:
        for task in asyncio.all_tasks(each.get_loop()):
            stack = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in task.get_stack())
            places[task.get_name()] = _places(stack)
    state = {"exit": server.should_exit, "busy": server.models.is_busy}
    return "\n".join(f"{name}: {place}" for name, place in (state | places).items())


def _places(stack: traceback.StackSummary) -> str:
    return " < ".join(f"{Path(each.filename).stem}:{each.lineno} {each.name}" for each in [*reversed(stack)][:7])
