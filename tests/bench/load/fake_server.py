"""A server of OpenAI's protocol that says nothing sensible, at known moments, with known counts; and a broken one."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Fake:
    """How it behaves, and what it was asked.

    Attributes:
        first, each: seconds before the first chunk, and before each other one.
        tokens, chunk: of an answer, and of one of its chunks.
        slots: answers that it computes at a time; the others wait.
        refuses: fields that it says 422 to; ``silent`` sends no usage, ``steps`` tells passes in it.
        fails: the status that every such request gets, by its number from 0, warm-ups included.
        breaks: the request whose stream has an error in its middle; ``cuts``: whose stream stops there.
        html: speaks something else entirely; ``plain`` answers without a stream.
        on: what to do when the request of a number comes.
        asked: bodies of requests.
    """

    models: tuple[str, ...] | None = ("tiny",)
    key: str | None = None
    first: float = 0.0
    each: float = 0.0
    tokens: int = 8
    chunk: int = 2
    slots: int = 1000
    refuses: tuple[str, ...] = ()
    silent: bool = False
    steps: bool = False
    fails: dict[int, int] = field(default_factory=dict)
    breaks: int | None = None
    cuts: int | None = None
    html: bool = False
    plain: bool = False
    on: dict[int, Callable[[], None]] = field(default_factory=dict)
    asked: list[dict[str, Any]] = field(default_factory=list)
    connections: int = 0
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await self._answer(lines[0], headers, body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, line: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> None:
        if self.html:
            await _send(writer, 200, b"<html>hello</html>", "text/html")
        elif self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            await _send(writer, 401, json.dumps({"error": {"message": "no such key"}}).encode())
        elif line.startswith("GET /v1/models ") and self.models is not None:
            await _send(writer, 200, json.dumps({"data": [{"id": name} for name in self.models]}).encode())
        elif line.startswith(("POST /v1/chat/completions ", "POST /v1/completions ")):
            await self._complete(json.loads(body), "chat" in line, writer)
        else:
            await _send(writer, 404, b'{"detail": "Not Found"}')

    async def _complete(self, body: dict[str, Any], chat: bool, writer: asyncio.StreamWriter) -> None:
        number = len(self.asked)
        self.asked.append(body)
        self.on.get(number, lambda: None)()
        refused = [name for name in self.refuses if name in body]
        if self.models and body["model"] not in self.models:
            await _send(writer, 404, json.dumps({"error": {"message": f"no model {body['model']}"}}).encode())
        elif refused:
            await _send(writer, 422, json.dumps({"detail": f"Unexpected fields: {refused}"}).encode())
        elif number in self.fails:
            await _send(writer, self.fails[number], json.dumps({"error": {"message": "busy"}}).encode())
        elif self.plain:
            await _send(writer, 200, b'{"choices": [{"text": "all at once"}]}')
        else:
            await self._stream(number, body, chat, writer)

    async def _stream(self, number: int, body: dict[str, Any], chat: bool, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        async with self._slots:
            async for data in self._events(number, body, chat):
                writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                await writer.drain()
        if number == self.cuts:
            writer.close()
            return
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _events(self, number: int, body: dict[str, Any], chat: bool) -> AsyncIterator[bytes]:
        if chat:
            yield _event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        total = min(self.tokens, body["max_tokens"])
        for start in range(0, total, self.chunk):
            await asyncio.sleep(self.first if start == 0 else self.each)
            text = "ha" * min(self.chunk, total - start)
            yield _event({"choices": [{"delta": {"content": text}} if chat else {"text": text}]})
            if start >= total // 2 and number in (self.breaks, self.cuts):
                if number == self.breaks:
                    yield _event({"error": {"message": "out of memory"}})
                return
        yield _event({"choices": [{"delta": {}, "finish_reason": "length" if total < self.tokens else "stop"}]})
        if not self.silent and body.get("stream_options", {}).get("include_usage"):
            steps = {"steps": -(-total // self.chunk), "drafted": total, "accepted": total // 2} if self.steps else {}
            details = {"prompt_tokens_details": {"cached_tokens": 4}}
            yield _event({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": total} | details | steps})
        yield b": the end\r\n\r\ndata: [DONE]\r\n\r\n"

    async def start(self) -> asyncio.Server:
        self._slots = asyncio.Semaphore(self.slots)
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server


def _event(chunk: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


async def _send(writer: asyncio.StreamWriter, status: int, body: bytes, kind: str = "application/json") -> None:
    head = f"HTTP/1.1 {status} Status\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


@contextmanager
def running(*fakes: Fake) -> Iterator[None]:
    """Serve them in a thread of their own; they have their addresses inside the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    servers = [asyncio.run_coroutine_threadsafe(fake.start(), loop).result() for fake in fakes]
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(_stop(servers), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _stop(servers: list[asyncio.Server]) -> None:
    for server in servers:
        server.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
