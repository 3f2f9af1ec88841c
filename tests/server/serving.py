"""Servers in a thread of the tests' own process."""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from pronk.aio import AsyncLLM
from pronk.llm import LLM
from pronk.server.run import Server
from pronk.server.service import Service
from pronk.server.settings import Limits, Settings

KEY = "a-key-for-tests"


@dataclass(frozen=True)
class Running:
    """A server that runs.

    Attributes:
        url: where.
        llm: its model.
        server: the server itself.
        thread: that it runs in.
    """

    url: str
    llm: LLM
    server: Server
    thread: threading.Thread

    def client(self, **options: Any) -> httpx.Client:
        """A client with the key."""
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.Client(**{"base_url": self.url, "headers": headers, "timeout": 60, **options})

    @property
    def idle(self) -> bool:
        """Whether nothing runs, nothing waits, and every block is back."""
        engine, blocks = self.llm.engine, self.llm.engine.cache.allocator
        return not (engine.scheduler.running or engine.scheduler.waiting) and blocks.num_free == blocks.num_blocks


@contextmanager
def running(llm: LLM, *, limits: Limits | None = None, drain_seconds: float = 5.0, **options: Any) -> Iterator[Running]:
    """Serve a model in a thread."""
    settings = Settings(**{"name": "tiny", "keys": (KEY,), "limits": limits or Limits(), **options})
    service = Service(AsyncLLM(llm, max_requests=settings.limits.requests), settings)
    started, where = threading.Event(), list[tuple[str, int]]()

    def on_start(host: str, port: int) -> None:
        where.append((host, port))
        started.set()

    server = Server(service, drain_seconds=drain_seconds, on_start=on_start)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert started.wait(30)
        yield Running(f"http://{where[0][0]}:{where[0][1]}", llm, server, thread)
    finally:
        server.stop()
        thread.join(30)
        if thread.is_alive():
            faulthandler.dump_traceback()
    assert not thread.is_alive()
