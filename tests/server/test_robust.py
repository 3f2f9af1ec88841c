"""Robustness: malformed requests, slow clients, disconnects, signals, full disks, clock jumps."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

import httpx
import pytest

from pronk.engine.request import Request
from pronk.llm import LLM
from pronk.server import run
from pronk.server.settings import RequestLimits
from server.serving import KEY, Running, hold_requests, running
from waiting import HUNG, eventually, processor_limit

LONG = {
    "prompt": "def f(x):",
    "max_tokens": 1800,
    "ignore_eos": True,
    "temperature": 1.0,
    "drafter": "autoregressive",
}


def shorten_stop_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let servers that stop wait only a little for clients that read nothing and engines that
    hang.
    """
    for name in ("_FLUSH_SECONDS", "_STOP_SECONDS"):
        monkeypatch.setattr(run, name, 0.1)


@contextmanager
def connected(made: Running) -> Iterator[socket.socket]:
    url = httpx.URL(made.url)
    with socket.create_connection((url.host, url.port or 80), HUNG) as sock:
        yield sock


def head(route: str, length: int | str, *more: str) -> bytes:
    lines = [
        f"POST {route} HTTP/1.1",
        "Host: 127.0.0.1",
        f"Authorization: Bearer {KEY}",
        f"Content-Length: {length}",
    ]
    return "\r\n".join([*lines, "Content-Type: application/json", *more, "", ""]).encode()


def status(sock: socket.socket) -> int:
    """Return the status of the response, or 0 if the connection is closed without one."""
    answer = http.client.HTTPResponse(sock)
    try:
        answer.begin()
        answer.read()
    except (http.client.HTTPException, OSError):
        return 0
    return answer.status


DEEP = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe\x00",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "prompt": 5}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "top_p": -0.1}',
        b'{"prompt": "x", "max_tokens": 1' + b"0" * 5000 + b"}",
        b'{"prompt": "x", "seed": 18446744073709551616}',
        b'{"prompt": "x", "seed": -9223372036854775809}',
        b'{"prompt": [1' + b"0" * 400 + b"]}",
        b'{"prompt": [[[1]]]}',
        b'{"prompt": [1, "a"]}',
        b'{"prompt": {"a": 1}}',
        b'{"prompt": "x", "logit_bias": {"' + b"9" * 5000 + b'": 1}}',
        b'{"prompt": "x", "stop": [null]}',
        b'{"prompt": "x", "stop": "\\ud800"}',
        b'{"prompt": "x", "stop": [[]]}',
        b'{"prompt": "x", "drafter": "' + b"merged(" * 30 + b'"}',
        b'{"prompt": "x", "drafter": "__import__(\'os\')"}',
        b'{"prompt": "x", "drafter": {"a": 1}}',
        DEEP,
        b'{"a": ' * 20_000 + b"1" + b"}" * 20_000,
    ],
)
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_malformed_body_is_refused(client: httpx.Client, body: bytes, route: str) -> None:
    if route == "/v1/chat/completions":
        body = body.replace(b'"prompt": "x"', b'"messages": [{"role": "user", "content": "x"}]')
        body = body.replace(b'"prompt"', b'"messages"')
    answer = client.post(route, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


ODD = [
    "\0", "a\0b", "\u202e\u200d", "\U0001f469\u200d\U0001f467" * 50, "e\u0301", "\ufffd", "\x1b[2J", " ", "\n" * 99,
]  # fmt: skip


@pytest.mark.parametrize("text", ODD, ids=range(9))
def test_unusual_unicode_is_kept(client: httpx.Client, text: str) -> None:
    for route, body in (
        ("/v1/completions", {"prompt": text, "stop": [text], "echo": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "stop": [text]}),
        ("/v1/responses", {"input": text}),
    ):
        most = "max_output_tokens" if route == "/v1/responses" else "max_tokens"
        answer = client.post(route, json={**body, "temperature": 0, most: 3})
        assert answer.status_code == 200, answer.text
    ids = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": ids}).json()["prompt"] == text


@pytest.mark.parametrize(
    "data",
    [
        b"\0\0\0\0\r\n\r\n",
        b"GET / HTTP/nine\r\n\r\n",
        b"GET /\0 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: "
            b"chunked\r\n\r\nzzz"
        ),
        b"GET /" + b"x" * 200_000,
        b"\x16\x03\x01\x02\x00\x01\x00",
    ],
)
def test_malformed_http_is_refused(served: Running, data: bytes) -> None:
    with connected(served) as sock:
        with suppress(OSError):
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        assert 400 <= (status(sock) or 400) < 500
    with served.client() as other:
        assert other.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("stream", "more"),
    [(True, b""), (False, b""), (False, b"GET /health HTTP/1.1\r\n")],
    ids=["stream", "whole", "more"],
)
def test_disconnect_aborts_the_request(
    stream: bool, more: bytes, served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is also aborted if the head of a pipelined request has arrived."""
    hold_requests(served.llm, monkeypatch)
    body = json.dumps({**LONG, "stream": stream}).encode()
    with connected(served) as sock:
        sock.sendall(head("/v1/completions", len(body)) + body)
        assert eventually(lambda: len(served.llm.engine.scheduler.running) == 1)
        sock.sendall(more)
        (request,) = served.llm.engine.scheduler.running
    assert served.drained
    assert request.aborted


def test_refused_request_does_not_wait_for_its_body(served: Running) -> None:
    with connected(served) as sock:
        sock.sendall(head("/v1/completions", 1000).replace(KEY.encode(), b"another-key"))
        assert status(sock) == 401
        with suppress(ConnectionError):
            sock.sendall(b"{")
            assert sock.recv(1) == b""


SHORT = json.dumps({"prompt": "x", "max_tokens": 2}).encode()


def received(sock: socket.socket) -> bytes:
    """Return all that the server sends until it closes the connection."""
    sock.settimeout(HUNG)
    parts = [*iter(lambda: sock.recv(2**16), b"")]
    return b"".join(parts)


@pytest.mark.parametrize("options", [{}, {"stream": True}, {"max_tokens": 300, "ignore_eos": True}])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_client_that_has_closed_its_sending_half_gets_its_answer(
    served: Running, options: dict[str, Any], version: str
) -> None:
    body = json.dumps(json.loads(SHORT) | options).encode()
    with connected(served) as sock:
        sock.sendall(head("/v1/completions", len(body)).replace(b"1.1", version.encode()) + body)
        sock.shutdown(socket.SHUT_WR)
        answer = received(sock)
    assert b"finish_reason" in answer
    assert answer.count(b" 200 OK\r\n") == 1


def test_all_pipelined_requests_before_the_end_of_the_sending_half_are_answered(
    served: Running,
) -> None:
    with connected(served) as sock:
        sock.sendall((head("/v1/completions", len(SHORT)) + SHORT) * 3 + b"GET /hea")
        sock.shutdown(socket.SHUT_WR)
        assert received(sock).count(b" 200 OK\r\n") == 3
    assert eventually(lambda: not served.server.server_state.connections)


LARGE = 24 * 2**20  # bytes that no buffer of the kernel holds
CHUNKED = head("/v1/completions", 0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")


@pytest.mark.parametrize(
    ("start", "found"),
    [
        (head("/v1/completions", LARGE), 413),
        (CHUNKED + b"%x\r\n" % LARGE, 413),
        (head("/v1/completions", 2 * 10**6).replace(KEY.encode(), b"another-key"), 401),
        (head("/v1/completions", LARGE).replace(KEY.encode(), b"another-key"), 401),
        (
            head("/v1/completions", LARGE, "Origin: http://x").replace(
                b"application/json", b"text/plain"
            ),
            415,
        ),
        (b"GET /health HTTP/1.1\r\nX-Long: ", 431),
        (b"nonsense\r\n\r\n", 400),
        (CHUNKED + b"zzz\r\n", 400),
        (CHUNKED + b"1" * 10**5, 400),
        (CHUNKED.replace(b"chunked", b"chunked\r\nContent-Length: 3") + b"%x\r\n" % LARGE, 400),
    ],
)
def test_a_client_that_is_still_sending_can_read_the_refusal(
    served: Running, start: bytes, found: int
) -> None:
    """The client reads after it has sent everything; a reset would delete the response that it has
    received.
    """
    with connected(served) as sock:
        sock.sendall(start)
        for _ in range(LARGE // 2**20):
            sock.sendall(b"x" * 2**20)
        assert status(sock) == found
        sock.settimeout(HUNG)
        assert sock.recv(1) == b""


def test_a_refused_client_that_sends_without_end_is_disconnected(model: LLM) -> None:
    with running(model, limits=RequestLimits(body=1024)) as made, connected(made) as sock:
        sock.settimeout(HUNG)
        with pytest.raises(ConnectionError):
            sock.sendall(head("/v1/completions", 10**9) + b"x" * 10**8)


@pytest.mark.parametrize(
    "more",
    [
        CHUNKED.replace(b"chunked", b"chunked\r\nContent-Length: 5"),
        CHUNKED.replace(b"Transfer", b"Content-Length: 0\r\nTransfer"),
        CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0"),
        CHUNKED.replace(b"chunked", b"identity, chunked"),
        CHUNKED.replace(b"chunked", b"chunked\r\nTransfer-Encoding: chunked"),
        head("/v1/completions", len(SHORT)).replace(b"Length", b"Length: 3\r\nContent-Length"),
        head("/v1/completions", len(SHORT)).replace(b"Content-Length: ", b"Content-Length: +"),
        head("/v1/completions", len(SHORT)).replace(b"Content-Length:", b"Content-Length :"),
    ],
)
def test_requests_with_two_ends_of_the_body_close_the_connection(
    served: Running, more: bytes
) -> None:
    """A proxy that sees another end would take the rest for a request of its own (request
    smuggling).
    """
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(SHORT), SHORT)
    with connected(served) as sock:
        sock.sendall(
            more
            + (chunks if b"chunked" in more else SHORT)
            + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        )
        sock.shutdown(socket.SHUT_WR)
        answer = received(sock)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 501 "))
    assert b"connection: close" in answer.lower()


def test_body_of_tiny_chunks_is_refused(served: Running) -> None:
    """A chunk per byte costs the server far more time than the client; a few such bytes are
    accepted. The client can read the refusal while it is still sending.
    """
    start = head("/v1/completions", 0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    body = json.dumps({"prompt": "x" * 100, "max_tokens": 2}).encode()
    with connected(served) as sock:
        sock.sendall(start + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        assert status(sock) == 200
    extension = b"1;" + b"a" * 4000 + b"\r\n{\r\n"
    for chunks in (b"1\r\n{\r\n" * 300_000, extension * 500):
        with connected(served) as sock:
            sock.sendall(start + chunks)
            assert status(sock) == 400
    with connected(served) as sock:
        chunk = b"2000\r\n" + b" " * 0x2000 + b"\r\n"
        sock.sendall(start + chunk * 300 + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        assert status(sock) == 200


def test_malformed_chunk_after_a_refusal(served: Running, caplog: pytest.LogCaptureFixture) -> None:
    start = head("/v1/completions", 0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    with connected(served) as sock:
        sock.sendall(start.replace(KEY.encode(), b"another-key"))
        assert status(sock) == 401
        with suppress(ConnectionError):
            sock.sendall(b"zzz\r\n")
            assert sock.recv(1) == b""
    with served.client() as other:
        assert other.get("/health").status_code == 200
    assert not caplog.text


@pytest.mark.parametrize(
    ("route", "item"),
    [
        ("/v1/completions", '{"prompt": [%s]}'),
        ("/v1/chat/completions", '{"messages": [%s]}'),
        ("/v1/responses", '{"input": [%s]}'),
        ("/v1/moderations", '{"input": [%s]}'),
    ],
)
@pytest.mark.parametrize(
    "kind", ["[]", *(pytest.param(each, marks=pytest.mark.slow) for each in ("1.5", "{}", "null"))]
)
def test_many_invalid_items_give_one_short_error(
    client: httpx.Client, route: str, item: str, kind: str
) -> None:
    body = (item % ",".join([kind] * 300_000)).encode()
    with processor_limit(20):
        answer = client.post(route, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert len(answer.content) < 1000


def test_disconnect_within_the_body(served: Running) -> None:
    with connected(served) as sock:
        sock.sendall(head("/v1/completions", 1000) + b'{"prompt": "')
    with connected(served) as sock:  # the client closes its sending half
        sock.sendall(head("/v1/completions", 1000) + b'{"prompt": "')
        sock.shutdown(socket.SHUT_WR)
        assert status(sock) in {0, 400}
    assert served.drained


def is_closed(sock: socket.socket) -> bool:
    """Wait for the server; return whether it closes the connection without an answer."""
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


def test_clients_that_send_no_head_are_disconnected(model: LLM) -> None:
    with running(model, limits=RequestLimits(receive_seconds=0.3)) as made:
        with connected(made) as sock:  # the client sends nothing
            assert is_closed(sock)
        with connected(made) as sock:  # the client sends half of a head
            with suppress(ConnectionError):  # the time may be over before
                sock.sendall(b"GET /health HTTP/1.1\r\nHo")
            assert is_closed(sock)
        assert eventually(lambda: not made.server.server_state.connections)


@contextmanager
def connected_before_the_limit(made: Running, limits: RequestLimits) -> Iterator[socket.socket]:
    """Connect, then shorten the time to receive: it applies to what follows the first head, which
    has more time.
    """
    object.__setattr__(limits, "receive_seconds", 2 * HUNG)
    with connected(made) as sock:
        assert eventually(lambda: len(made.server.server_state.connections) == 1)
        object.__setattr__(limits, "receive_seconds", 0.3)
        yield sock
    assert eventually(lambda: not made.server.server_state.connections)


def test_clients_that_send_half_of_the_rest_are_disconnected(model: LLM) -> None:
    limits = RequestLimits()
    with running(model, limits=limits) as made:
        # half of a head after a whole request
        with connected_before_the_limit(made, limits) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /hea")
            assert status(sock) == 200
            assert sock.recv(1) == b""
        with connected_before_the_limit(made, limits) as sock:  # half of a body
            sock.sendall(head("/v1/completions", 100) + b"{")
            assert status(sock) == 408


def test_clients_that_read_nothing_are_disconnected(
    model: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = list[Request]()
    add = model.engine.add

    def observe(request: Request) -> None:
        added.append(request)
        add(request)

    monkeypatch.setattr(model.engine, "add", observe)
    body = json.dumps(
        {**LONG, "stream": True, "logprobs": 20, "max_tokens": 1500, "n": 4, "leaps": True}
    ).encode()
    limits = RequestLimits(receive_seconds=2 * HUNG, send_seconds=0.3)
    with running(model, limits=limits) as made, connected(made) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.sendall(head("/v1/completions", len(body)) + body)
        assert eventually(lambda: len(added) == 4 and made.idle)
        assert all(request.aborted for request in added)
        assert eventually(lambda: not made.server.server_state.connections)


@pytest.mark.parametrize("signals", [1, 2])
def test_a_client_that_reads_nothing_does_not_delay_shutdown(
    model: LLM, signals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pipelined responses fill all buffers; without a limit, shutdown would wait a minute for the
    client.
    """
    shorten_stop_limits(monkeypatch)
    body = json.dumps(
        {"prompt": "x y z " * 200, "max_tokens": 1, "echo": True, "logprobs": 20}
    ).encode()
    with running(model, drain_seconds=0.1) as made, connected(made) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.sendall((head("/v1/completions", len(body)) + body) * 6)
        connections = made.server.server_state.connections
        assert eventually(lambda: any(each.flow.write_paused for each in connections))
        for _ in range(signals):
            made.server.stop()
        made.thread.join(HUNG)
        assert not made.thread.is_alive()


def test_incomplete_body_is_answered_with_503_at_shutdown(
    model: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_stop_limits(monkeypatch)
    with running(model, drain_seconds=0.0) as made, connected(made) as sock:
        sock.sendall(head("/v1/completions", 100) + b"{")
        assert eventually(lambda: bool(made.server.server_state.tasks))
        made.server.stop()
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        assert answer.status == 503
        assert json.loads(answer.read())["error"]["code"] == "closed"


def test_answers_beside_aborted_and_failed_requests(served: Running, model: LLM) -> None:
    options = {"max_tokens": 24, "temperature": 0.8, "logprobs": 0}

    def ask(seed: int) -> Any:
        with served.client() as other:
            body = {"prompt": f"def f{seed % 5}(x):", "seed": seed, **options}
            if seed % 3 == 1:
                with other.stream(
                    "POST", "/v1/completions", json={**body, "stream": True, "max_tokens": 500}
                ) as answer:
                    next(answer.iter_lines())
                return None
            if seed % 3 == 2:
                return other.post("/v1/completions", json={**body, "prompt": [10**9]}).status_code
            return other.post("/v1/completions", json=body).json()["choices"][0]

    with ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(ask, range(24))]
    assert answers[2::3] == [400] * 8
    for seed in range(0, 24, 3):
        alone = ask(seed)
        assert (answers[seed]["text"], answers[seed]["logprobs"]) == (
            alone["text"],
            alone["logprobs"],
        )
    assert served.drained


def test_jumps_of_the_system_clock_end_no_request(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time
    with served.client() as other:
        for shift in (-1e9, 1e9, -now()):
            monkeypatch.setattr(time, "time", lambda shift=shift: now() + shift)
            assert (
                other.post("/v1/completions", json={"prompt": "x", "max_tokens": 4}).status_code
                == 200
            )


def test_internal_error_reveals_no_prompt(
    served: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        msg = "SECRET PROMPT"
        raise RuntimeError(msg)

    monkeypatch.setattr(served.llm.request_factory, "create_samples", fail)
    with served.client() as other:
        answer = other.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
        assert "SECRET" not in answer.text
        assert "SECRET" not in caplog.text
        assert "RuntimeError" in caplog.text
        monkeypatch.undo()
        assert (
            other.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
        )


class Process:
    """Process of ``pronk serve``."""

    def __init__(self, *options: str, stderr: Any = subprocess.PIPE) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        start = "from pronk.cli.main import main; main()"
        command = [
            sys.executable,
            "-c",
            start,
            "serve",
            "--model",
            "pronk-tiny",
            "--port",
            str(self.port),
        ]
        command += ["--threads", "1", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr)
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        assert eventually(self.ready), self.process.stderr and self.process.stderr.read()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def ready(self) -> bool:
        return self.state("/ready") == 200 or self.process.poll() is not None

    def state(self, route: str, body: Any = None) -> int:
        """Return the status of a route, or 0 if the server does not answer."""
        # creating an httpx client takes 50 ms
        ask = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HUNG)
        try:
            ask.request(
                "GET" if body is None else "POST",
                route,
                json.dumps(body),
                {"Content-Type": "application/json"},
            )
            return ask.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            ask.close()


def lines_of(
    made: Process, body: dict[str, Any], found: list[str], begun: Event, resumed: Event
) -> None:
    """Collect the lines of a stream, of which only the first one is read before ``resumed``."""
    with (
        suppress(httpx.HTTPError),
        httpx.stream("POST", f"{made.url}/v1/completions", json=body, timeout=HUNG) as answer,
    ):
        for line in answer.iter_lines():
            found.append(line)
            begun.set()
            assert resumed.wait(HUNG)


@pytest.mark.parametrize("signals", [(signal.SIGTERM,), (signal.SIGINT, signal.SIGINT)])
def test_the_first_signal_drains_and_the_second_stops(
    signals: tuple[signal.Signals, ...],
) -> None:
    """The stream is longer than all buffers, so that it ends only after the client has read on."""
    with Process("--access-log", "--drain", str(HUNG)) as made:
        found = list[str]()
        begun = Event()
        resumed = Event()
        body = {**LONG, "max_tokens": 1000, "logprobs": 20, "stream": True}
        thread = Thread(target=lines_of, args=(made, body, found, begun, resumed))
        thread.start()
        assert begun.wait(HUNG)
        made.process.send_signal(signals[0])
        assert eventually(lambda: made.state("/ready") == 503)
        assert made.state("/health") == 200
        assert made.state("/v1/completions", {"prompt": "x"}) == 503
        for each in signals[1:]:
            made.process.send_signal(each)
        resumed.set()
        _, log = made.process.communicate(timeout=HUNG)
        thread.join(HUNG)
        assert made.process.returncode == 0
        assert (found[-2:] == ["data: [DONE]", ""]) == (len(signals) == 1)
        if len(signals) == 2:  # a short request may end before the server sees the signal
            assert b"waiting for 1 request; press Ctrl-C again to stop now" in log
        assert b"/v1/completions" in log
        assert b"def f(x)" not in log
        assert b"Traceback" not in log, log.decode()
        assert b" ERROR " not in log, log.decode()


ASKS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1900},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1900},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1900},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1900},
}


def last_event(answer: httpx.Response, stop: Any) -> dict[str, Any]:
    """Read a stream to its end, after ``stop()`` at its first line; return the last event."""
    lines = answer.iter_lines()
    next(lines)
    stop()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return dict(json.loads(events[-1]))


@pytest.mark.few(3)
@pytest.mark.parametrize("engine_ends", [True, False], ids=["engine ends", "engine hangs"])
@pytest.mark.parametrize("route", ASKS)
def test_streams_end_with_an_error_when_the_server_stops(
    model: LLM, route: str, engine_ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not engine_ends:
        monkeypatch.setattr("pronk.server.model_pool.ModelPool.stop", lambda _: None)
        shorten_stop_limits(monkeypatch)
    body = {
        **ASKS[route],
        "stream": True,
        "ignore_eos": True,
        "temperature": 1.0,
        "drafter": "autoregressive",
    }
    with running(model) as made, made.client() as client:

        def stop_twice() -> None:
            made.server.stop()
            made.server.stop()

        with client.stream("POST", route, json=body) as answer:
            event = last_event(answer, stop_twice)
        made.thread.join(HUNG)
        assert not made.thread.is_alive()
        monkeypatch.undo()
        made.server.models.stop()
    if route == "/v1/messages":
        assert (event["type"], event["error"]["type"]) == ("error", "api_error")
    elif route == "/v1/responses":
        assert (event["type"], event["code"]) == ("error", "closed")
        assert event["sequence_number"] > 0
    else:
        assert event["error"]["code"] == "closed"


def test_requests_without_a_response_get_an_error_when_the_server_stops(model: LLM) -> None:
    waiting = list[int]()
    with running(model) as made, ThreadPoolExecutor(1) as pool, made.client() as client:
        made.server._on_wait = waiting.append
        body = {
            **ASKS["/v1/completions"],
            "ignore_eos": True,
            "temperature": 1.0,
            "drafter": "autoregressive",
        }
        answer = pool.submit(client.post, "/v1/completions", json=body)
        assert eventually(lambda: bool(model.engine.scheduler.running))
        made.server.stop()
        assert eventually(lambda: bool(waiting))
        made.server.stop()
        assert answer.result(HUNG).status_code == 503
        assert answer.result().json()["error"]["code"] == "closed"
    assert waiting == [1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_full_disk_of_the_log_and_no_remaining_process() -> None:
    with Path("/dev/full").open("wb") as full, Process("--access-log", stderr=full) as made:
        for _ in range(3):
            assert (
                httpx.post(
                    f"{made.url}/v1/completions", json={"prompt": "x", "max_tokens": 2}
                ).status_code
                == 200
            )
            assert httpx.post(f"{made.url}/v1/completions", json={"nonsense": 2}).status_code == 400
        children = Path(f"/proc/{made.process.pid}/task/{made.process.pid}/children")
        if children.exists():
            assert children.read_text() == ""
        os.kill(made.process.pid, signal.SIGKILL)
        made.process.communicate(timeout=HUNG)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{made.url}/health")


def test_connections_without_a_request_shut_nobody_out(model: LLM) -> None:
    with running(model, limits=RequestLimits(connections=8)) as made, ExitStack() as idle:
        for _ in range(20):
            idle.enter_context(connected(made))
        with made.client() as client:
            assert (
                client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code
                == 200
            )
            assert client.get("/health").status_code == 200
