"""HTTP servers that imitate an engine, each with at most one planted fault."""

import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest.mock import patch

from pronk.lab.verification.remote.client import Answer, RemoteServer
from waiting import HUNG

WORDS = "the a sea lamp wind red stone tree light of and on under before river bird".split()


class FakeEngine:
    """Deterministic text of random words, in which ``fault`` plants a deviation.

    Faults: ``batch``, ``batch logprobs``, ``cache``, ``constant seed``, ``random seed``,
    ``stream``, ``max_tokens``, ``n``, ``random``, ``logprobs``, ``not greedy``, ``sum``, ``text of
    logprobs``, ``empty``, ``error in a batch``, ``logprobs unasked`` (they differ from those of
    requests that ask for them).
    """

    def __init__(self, fault: str = "", *, refused: tuple[str, ...] = ()) -> None:
        self.fault = fault
        self.refused = refused  # fields of requests, or routes, that are answered with 400
        self.seen = set[str]()
        self.running = list[threading.Event]()
        self.most = 0  # largest number of requests at the same time
        self.num_arrived = 0
        # value of ``num_arrived`` at which the batch is complete; 0 without a batch
        self.num_expected = 0
        self.arrival = threading.Condition()

    def answer(
        self, prompt: str, body: dict[str, Any]
    ) -> list[list[tuple[str, float, list[float]]]]:
        """Return the tokens of each choice, with their log-probabilities and those of the likeliest
        tokens.
        """
        overlapped = threading.Event()  # set once another request runs at the same time
        with self.arrival:
            self.running.append(overlapped)
            self.most = max(self.most, len(self.running))
            if len(self.running) > 1:
                for each in self.running:
                    each.set()
            self.arrive()
            assert self.arrival.wait_for(lambda: self.num_arrived >= self.num_expected, HUNG)
            self.running.remove(overlapped)
        is_batch = overlapped.is_set()
        is_cached = prompt in self.seen
        self.seen.add(prompt)
        if is_batch and self.fault == "error in a batch":
            raise RuntimeError
        return [
            self._choice(prompt, body, index, batch=is_batch, cached=is_cached)
            for index in range(body["n"])
        ]

    def arrive(self) -> None:
        """Count a request; the caller holds ``arrival``."""
        self.num_arrived += 1
        self.arrival.notify_all()

    def _choice(
        self, prompt: str, body: dict[str, Any], index: int, *, batch: bool, cached: bool
    ) -> list[tuple[str, float, list[float]]]:
        sampled = body["temperature"] > 0
        fault = self.fault
        seed: Any = f"{body.get('seed')} {index}" if sampled else ""
        if sampled and fault == "constant seed":
            seed = "constant"
        if (sampled and fault == "random seed") or fault == "random":
            seed = random.random()
        draw = random.Random(f"{prompt} {seed}")
        words = [" " + draw.choice(WORDS) for _ in range(body["max_tokens"])]
        middle = min(2, body["max_tokens"] - 1)
        if fault == "empty":
            words = [""] * len(words)
        changed = (
            (fault == "batch" and batch)
            or (fault == "cache" and cached)
            or (fault == "max_tokens" and body["max_tokens"] == 4)
            or (fault == "n" and index == 1)
            or (fault == "text of logprobs" and body["top"])
        )
        if changed:
            words[middle] = " changed"
        values = [-0.1 - draw.random() / 10 for _ in words]
        if (fault == "batch logprobs" and batch) or fault == "logprobs":
            values[middle] -= random.uniform(0.001, 0.01)
        if fault == "logprobs unasked" and body["top"]:
            values[middle] -= 0.005
        tops = [[value, -3.0, -4.0] for value in values]
        if fault == "not greedy":
            tops[middle][1] = values[middle] + 0.05
        if fault == "sum":
            tops[middle] = [values[middle], values[middle] - 0.001, -3.0]
        return list(zip(words, values, tops, strict=True))


class _Handler(BaseHTTPRequestHandler):
    engine: FakeEngine

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._reply(
            {"object": "list", "data": [{"id": "fake"}]}
            if "models" not in self.engine.refused
            else {"data": []}
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        chat = self.path == "/v1/chat/completions"
        if (
            "key" in self.engine.refused
            and self.headers.get("Authorization") != "Bearer the-right-key"
        ):
            self._reply({"error": "no key"}, 401)
            return
        found = [
            name
            for name in (*body, "chat" if chat else "completions")
            if name in self.engine.refused
        ]
        if found:
            with self.engine.arrival:
                self.engine.arrive()
            self._reply({"error": {"message": f"no {found[0]} here"}}, 400)
            return
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        top = body.get("top_logprobs", 0) if chat else body.get("logprobs", 0)
        try:
            choices = self.engine.answer(prompt, {"n": 1, **body, "top": top})
        except RuntimeError:
            self._reply({"error": "out of memory"}, 500)
            return
        if body.get("stream"):
            self._stream(choices[0], chat=chat)
            return
        shown = top or 5 * (self.engine.fault == "logprobs unasked")
        reply = [
            self._choice(index, tokens, shown, chat=chat) for index, tokens in enumerate(choices)
        ]
        self._reply({"choices": reply, "usage": {"prompt_tokens_details": {"cached_tokens": 7}}})

    def _choice(
        self, index: int, tokens: list[tuple[str, float, list[float]]], top: int, *, chat: bool
    ) -> Any:
        text = "".join(token for token, _, _ in tokens)
        report: Any = None
        if top and chat:
            content = [
                {
                    "token": token,
                    "logprob": value,
                    "top_logprobs": [
                        {"token": str(n), "logprob": each} for n, each in enumerate(tops)
                    ],
                }
                for token, value, tops in tokens
            ]
            report = {"content": content}
        elif top:
            report = {
                "tokens": [token for token, _, _ in tokens],
                "token_logprobs": [value for _, value, _ in tokens],
                "top_logprobs": [
                    {str(n): each for n, each in enumerate(tops)} for _, _, tops in tokens
                ],
            }
        choice = {"index": index, "logprobs": report, "finish_reason": "length"}
        return choice | (
            {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        )

    def _stream(self, tokens: list[tuple[str, float, list[float]]], *, chat: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for number, (token, _, _) in enumerate(tokens):
            if self.engine.fault == "stream" and number == 3:
                continue
            choice = (
                {"index": 0, "delta": {"content": token}} if chat else {"index": 0, "text": token}
            )
            self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def _reply(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Server(ThreadingHTTPServer):
    request_queue_size = 64


@contextmanager
def _overlapping_batches(engine: FakeEngine) -> Iterator[None]:
    """Let the requests of a batch overlap in the engine, and its streams in the client, however
    busy the machine is.
    """
    run_together = RemoteServer.together
    read_events = RemoteServer._events
    begun: threading.Barrier | None = None  # each stream of the batch has its first text

    def together(server: RemoteServer, calls: Sequence[Callable[[], Answer]]) -> list[Answer]:
        nonlocal begun
        begun = threading.Barrier(len(calls))
        engine.num_expected = engine.num_arrived + len(calls)
        try:
            return run_together(server, calls)
        finally:
            engine.num_expected = 0
            begun = None

    def events(server: RemoteServer, path: str, body: Any) -> Iterator[Mapping[str, Any]]:
        for number, event in enumerate(read_events(server, path, body)):
            if number == 1 and begun is not None:
                begun.wait(HUNG)
            yield event

    with (
        patch.object(RemoteServer, "together", together),
        patch.object(RemoteServer, "_events", events),
    ):
        yield


@contextmanager
def fake_server(engine: FakeEngine) -> Iterator[str]:
    """Serve an engine; yield the address."""
    handler = type(
        "Handler", (_Handler,), {"engine": engine, "server_version": "fake/1", "sys_version": ""}
    )
    with _overlapping_batches(engine), _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
