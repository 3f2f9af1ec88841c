"""A server under attack: malformed HTTP, streams that are not read, and the most costly bodies.

    python benchmarks/attack.py --out benchmarks/results/attack
    python benchmarks/attack.py --model MODEL.gguf --rounds 3 --out OUT

The script starts a `pronk serve` of its own, on the loopback address, and attacks nothing else.
Two clients have keys. While one of them attacks, the other reads a stream, and a probe requests
`/health`. The report has the answers to each attack, the delays of `/health`, the events of the
other client's stream, and the growth of the server's memory.

The delays are those of the server only on a machine without other load: a thread that holds the
interpreter's lock and waits for a processor stops the whole server. Beside processes of the same
real-time priority (``chrt --rr``), it waits for their turns, of 100 ms each.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from statistics import median
from typing import Any

from pronk.lab.bench.machine import describe_hardware

HOST = "127.0.0.1"
ATTACKER = "key-of-the-attacker"
OTHER = "key-of-another-client"
SECONDS = 10.0  # time limit for the answer to one malformed request
BODY = 4 * 2**20 - 1000  # bytes of the largest bodies that the server accepts
NUM_STREAMS = 12
NUM_BODIES = 16


@dataclass(frozen=True)
class Attack:
    """A malformed request: parts of bytes, sent with pauses between them."""

    kind: str
    parts: tuple[bytes, ...]
    pause: float = 0.0  # seconds between two parts
    leaves: bool = False  # close the connection instead of reading the answer


def head(
    *lines: str, route: str = "/v1/completions", version: str = "1.1", key: str = ATTACKER
) -> bytes:
    """Return the head of a POST request, with further lines."""
    first = [f"POST {route} HTTP/{version}", f"Host: {HOST}", f"Authorization: Bearer {key}"]
    text = "\r\n".join([*first, "Content-Type: application/json", *lines, "", ""])
    return text.encode("latin-1")


def whole(body: bytes, *lines: str, route: str = "/v1/completions") -> bytes:
    """Return a POST request with a body and its length."""
    return head(f"Content-Length: {len(body)}", *lines, route=route) + body


SHORT = b'{"prompt": "x", "max_tokens": 1}'
CHUNKED = "Transfer-Encoding: chunked"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(SHORT), SHORT)
PREFLIGHT = b"Host: evil.example\r\nOrigin: http://x\r\nAccess-Control-Request-Method: POST"
GET = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
NESTED = b'{"a":' * 500 + b"1" + b"}" * 500


def bad_requests() -> list[Attack]:
    """Return the malformed requests, several of each kind."""
    by_kind: dict[str, list[bytes]] = {
        "two lengths (smuggling)": [
            head("Content-Length: 5", CHUNKED) + CHUNKS + GET,
            head(CHUNKED, "Content-Length: 5") + CHUNKS + GET,
            head("Content-Length: 3", f"Content-Length: {len(SHORT)}") + SHORT + GET,
            head(f"Content-Length: {len(SHORT)}, 3") + SHORT + GET,
            head("Transfer-Encoding: identity, chunked") + CHUNKS + GET,
            head("Transfer-Encoding: xchunked") + CHUNKS + GET,
            head("Transfer-Encoding : chunked") + CHUNKS + GET,
            head(CHUNKED, version="1.0") + CHUNKS + GET,
            head(" Content-Length: 5") + SHORT + GET,
        ],
        "bad chunks": [
            head(CHUNKED) + b"zzz\r\n",
            head(CHUNKED) + b"-5\r\nxxxxx\r\n0\r\n\r\n",
            head(CHUNKED) + b"ffffffffffffffffffff\r\n",
            head(CHUNKED) + b"5\r\nxxxxxxxxxx\r\n0\r\n\r\n",
            head(CHUNKED) + b"0x5\r\nxxxxx\r\n0\r\n\r\n",
            head(CHUNKED) + b"1\r\n{\r\n" * 40_000,
            head(CHUNKED) + b"5;" + b"x" * 50_000 + b"\r\nxxxxx\r\n",
        ],
        "bad lengths": [
            head("Content-Length: -1") + SHORT,
            head("Content-Length: +32") + SHORT,
            head("Content-Length: 1e3") + SHORT,
            head("Content-Length: 99999999999999999999999999") + SHORT,
            head(f"Content-Length: {'9' * 5000}") + SHORT,
            head(f"Content-Length: {2 * BODY}") + b"x" * (2 * BODY),
        ],
        "huge or many headers": [
            head(f"X-Long: {'x' * 20_000}"),
            head(f"X-Long: {'x' * 200_000}"),
            head(*(f"X-{n}: y" for n in range(2000))),
            head(*(f"X-{n}: y" for n in range(20_000))),
            b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
            b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 10**6,
        ],
        "malformed heads": [
            b"\0\0\0\0\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00",
            b"GET / HTTP/nine\r\n\r\n",
            b"GET /\0 HTTP/1.1\r\nHost: x\r\n\r\n",
            b"GET / HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: a\r\nX: a\r\n\tb\r\n\0: c\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET / HTTP/1.1\nHost: x\n\n\n",
        ],
        "other hosts and keys": [
            GET.replace(b"Host: x", b"Host: evil.example"),
            whole(SHORT).replace(ATTACKER.encode(), b"another-key"),
            head(f"Content-Length: {BODY}", key="another-key") + b"x" * BODY,
            GET.replace(b"GET", b"OPTIONS").replace(b"Host: x", PREFLIGHT),
        ],
        "nested JSON": [
            whole(b'{"prompt": ' + b"[" * 100_000),
            whole(b'{"prompt": "x", "service_tier": ' + b'{"a":' * 960 + b"1" + b"}" * 960 + b"}"),
            whole(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
            whole(b'{"messages": ' + b"[" * 960 + b"]" * 960 + b"}", route="/v1/chat/completions"),
            whole(b'{"input": "x", "metadata": ' + NESTED + b"}", route="/v1/responses"),
        ],
        "invalid UTF-8 and JSON": [
            whole(b'{"prompt": "\xff\xfe"}'),
            whole(b'{"prompt": "\\ud800"}'),
            whole('{"prompt": "x"}'.encode("utf-16")),
            whole(b'{"prompt": "x", "seed": 1' + b"0" * 5000 + b"}"),
            whole(b'{"prompt": "x", "temperature": NaN}'),
        ],
        "pipelining": [
            GET * 200,
            whole(SHORT) * 20 + b"nonsense\r\n\r\n",
            whole(SHORT) + b"GET /" + b"x" * 60_000,
        ],
    }
    attacks = [Attack(kind, (data,)) for kind, datas in by_kind.items() for data in datas]
    slow = [whole(SHORT)[start : start + 8] for start in range(0, 64, 8)]
    attacks += [
        Attack("slowloris", tuple(slow), pause=0.2, leaves=True),
        Attack("slowloris", (head("Content-Length: 32"), b"{", b'"', b"p"), pause=0.3, leaves=True),
        Attack("early close", (whole(SHORT),), leaves=True),
        Attack("early close", (head("Content-Length: 1000") + b"{",), leaves=True),
        Attack("early close", (head(CHUNKED) + b"5\r\nxx",), leaves=True),
        Attack("early close", (b"GET /hea",), leaves=True),
    ]
    return attacks


def fill(begin: str, item: str, end: str, size: int = BODY) -> bytes:
    """Return a body of at most ``size`` bytes, with as many equal items in a list as fit."""
    count = (size - len(begin) - len(end)) // (len(item) + 1)
    return f"{begin}{','.join([item] * count)}{end}".encode()


def worst_bodies() -> list[tuple[str, bytes]]:
    """Return routes with the bodies that cost the server the most time.

    The server accepts them, or refuses them as late as possible.
    """
    turn = '{"role":"user","content":""}'
    function = '{"name":"f","arguments":"{}"}'
    calls = f'[{{"id":"x","type":"function","function":{function}}}]'
    call = f'{{"role":"assistant","tool_calls":{calls}}}'
    fields = ",".join(f'"k{n}":1' for n in range(250_000))
    short_chat = f'"messages":[{turn}],"max_tokens":1'
    part = '{"type":"text","text":""}'
    return [
        ("/v1/chat/completions", fill('{"messages":[', turn, "]}")),
        ("/v1/chat/completions", fill('{"messages":[', turn, "]}", 1_450_000)),
        ("/v1/chat/completions", fill('{"messages":[', call, "]}", 1_600_000)),
        ("/v1/messages", fill('{"max_tokens":1,"messages":[', turn, "]}", 1_450_000)),
        ("/v1/responses", fill('{"input":[', turn, "]}", 1_450_000)),
        (
            "/v1/responses",
            fill('{"input":"x","max_output_tokens":1,"metadata":{"x":"', "a b", '"}}'),
        ),
        ("/v1/chat/completions", f'{{{short_chat},"metadata":{{{fields}}}}}'.encode()),
        ("/v1/chat/completions", f'{{{short_chat},"logit_bias":{{{fields}}}}}'.encode()),
        (
            "/v1/chat/completions",
            fill('{"messages":[{"role":"user","content":[', part, "]}]}"),
        ),
        ("/v1/completions", fill('{"prompt":[', "1", "]}")),
        ("/v1/completions", fill('{"prompt":[', "[]", "]}")),
        ("/v1/completions", fill('{"prompt":"', "a b", '"}')),
        ("/v1/embeddings", fill('{"input":[', '"x"', "]}", 8 * 1024)),
        ("/v1/moderations", fill('{"input":[', '"x"', "]}")),
        ("/tokenize", fill('{"prompt":"', "a b", '"}', 150_000)),
        ("/detokenize", fill('{"tokens":[', "5", "]}")),
    ]


@dataclass
class Probe:
    """Client that requests /health, and reads streams with the other key, until it is stopped."""

    port: int
    delays: list[float] = field(default_factory=list)  # seconds until the answers of /health
    gaps: list[float] = field(default_factory=list)  # seconds before each event of the stream
    stopped: threading.Event = field(default_factory=threading.Event)

    def ask_health(self) -> None:
        """Request /health until the probe is stopped; a failure counts as an infinite delay."""
        while not self.stopped.wait(0.01):
            start = time.perf_counter()
            try:
                found = request(self.port, "GET", "/health", timeout=60.0)
            except (OSError, HTTPException):
                found = 0
            self.delays.append(time.perf_counter() - start if found == 200 else float("inf"))

    def read_stream(self) -> None:
        """Read streams of the other client, one after another, until the probe is stopped."""
        options = {"max_tokens": 256, "ignore_eos": True, "temperature": 1.0}
        body = {"prompt": "Once upon a time", "stream": True, **options}
        while not self.stopped.is_set():
            connection = HTTPConnection(HOST, self.port, timeout=60)
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {OTHER}"}
            last = time.perf_counter()
            with suppress(OSError, HTTPException):
                connection.request("POST", "/v1/completions", json.dumps(body), headers)
                for line in connection.getresponse():
                    if line.startswith(b"data: {"):
                        self.gaps.append(time.perf_counter() - last)
                        last = time.perf_counter()
                    if self.stopped.is_set():
                        break
            connection.close()


def request(
    port: int, method: str, route: str, body: bytes | None = None, timeout: float = 120.0
) -> int:
    """Return the HTTP status of the answer to a request with the attacker's key."""
    connection = HTTPConnection(HOST, port, timeout=timeout)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ATTACKER}"}
    try:
        connection.request(method, route, body, headers)
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def answer_to(port: int, attack: Attack) -> str:
    """Send a malformed request; return the first answer's HTTP status, or what came instead."""
    with socket.create_connection((HOST, port), SECONDS) as connection:
        try:
            for part in attack.parts:
                connection.sendall(part)
                time.sleep(attack.pause)
        except OSError:
            return "reset while sending"
        if attack.leaves:
            return "left"
        with suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        try:
            response = HTTPResponse(connection)
            response.begin()
            response.read()
        except TimeoutError:
            return "no answer"
        except (OSError, HTTPException):
            return "closed"
        return str(response.status)


def answer_to_body(port: int, route: str, body: bytes) -> str:
    """Send a body; return the HTTP status of the answer, or the name of an error."""
    try:
        return str(request(port, "POST", route, body))
    except (OSError, HTTPException) as error:
        return type(error).__name__


@contextmanager
def unread_streams(port: int, count: int) -> Iterator[None]:
    """Keep a number of the attacker's streams open, without reading them, within the block."""
    body = {
        "prompt": "x",
        "max_tokens": 1500,
        "n": 4,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 20,
    }
    data = whole(json.dumps(body).encode())
    connections = [socket.socket() for _ in range(count)]
    try:
        for connection in connections:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.connect((HOST, port))
            connection.sendall(data)
        yield
    finally:
        for connection in connections:
            connection.close()


def memory(process: int) -> float | None:
    """Return the resident memory of a process in MiB; ``None`` where /proc is missing."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
    return None


def wait_until_served(probe: Probe) -> None:
    """Wait for the first answers of /health and of the other stream, at most ``SECONDS``."""
    end = time.perf_counter() + SECONDS
    while not (probe.delays and probe.gaps) and time.perf_counter() < end:
        time.sleep(0.01)


def phase(name: str, port: int, process: int, attack: Callable[[], Counter[str]]) -> dict[str, Any]:
    """Run an attack beside the probe; return a row of the report."""
    before = memory(process)
    probe = Probe(port)
    jobs = (probe.ask_health, probe.read_stream)
    threads = [threading.Thread(target=job, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    wait_until_served(probe)
    start = time.perf_counter()
    answers = attack()
    seconds = time.perf_counter() - start
    probe.stopped.set()
    for thread in threads:
        thread.join(60)
    after = memory(process)
    return {
        "attack": name,
        "answers": dict(sorted(answers.items())),
        "seconds": seconds,
        "health_median": median(probe.delays) if probe.delays else None,
        "health_max": max(probe.delays, default=None),
        "other_events": len(probe.gaps),
        "other_median": median(probe.gaps) if probe.gaps else None,
        "other_max": max(probe.gaps, default=None),
        "memory_growth": None if before is None or after is None else after - before,
    }


def run_attacks(
    port: int, process: int, rounds: int, *, one_per_kind: bool
) -> list[dict[str, Any]]:
    """Run all attacks; return the rows of the report."""
    attacks = bad_requests()
    bodies = worst_bodies()
    streams = NUM_STREAMS
    if one_per_kind:
        attacks = list({each.kind: each for each in attacks}.values())
        bodies = bodies[:1]
        streams = 1

    def idle() -> Counter[str]:
        time.sleep(0.5 if one_per_kind else 5.0)
        return Counter()

    def malformed(kind: str) -> Counter[str]:
        own = [each for each in attacks if each.kind == kind] * rounds
        return Counter(answer_to(port, each) for each in own)

    def unread() -> Counter[str]:
        with unread_streams(port, streams):
            time.sleep(0.5 if one_per_kind else 10.0)
        return Counter({"not read": streams})

    def at_once() -> Counter[str]:
        with ThreadPoolExecutor(len(bodies)) as pool:
            jobs = [pool.submit(answer_to_body, port, *each) for each in bodies * rounds]
            return Counter(job.result() for job in jobs)

    rows = [phase("none", port, process, idle)]
    kinds = dict.fromkeys(each.kind for each in attacks)
    rows += [phase(kind, port, process, partial(malformed, kind)) for kind in kinds]
    rows.append(phase(f"{streams} unread streams of 4 samples", port, process, unread))
    rows.append(phase(f"{len(bodies)} worst bodies at once", port, process, at_once))
    return rows


@contextmanager
def served(model: str, threads: int) -> Iterator[tuple[int, int]]:
    """Run `pronk serve` with two keys; yield its port and the id of its process."""
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        log = Path(folder) / "log"
        keys.write_text(f"{ATTACKER}\n{OTHER}\n")
        command = [sys.executable, "-m", "pronk", "serve", "--model", model]
        command += ["--threads", str(threads), "--port", str(port), "--api-key-file", str(keys)]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file)  # noqa: S603 - our own
            try:
                wait_until_ready(port, process, log)
                yield port, process.pid
            finally:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                process.kill()
                process.wait()


def wait_until_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server accepts requests; exit with the end of its log if it has ended."""
    while not is_ready(port):
        if process.poll() is not None:
            end = log.read_text()[-2000:]
            sys.exit(f"expected pronk serve to run, found that it ended:\n{end}")
        time.sleep(0.1)


def is_ready(port: int) -> bool:
    try:
        return request(port, "GET", "/ready", timeout=5.0) == 200
    except (OSError, HTTPException):
        return False


def to_markdown(report: dict[str, Any]) -> str:
    """Return the report as a Markdown table.

    `tools/docs/blocks.py` copies the table into the threat model.
    """
    delays = "`/health`: median, longest | other client: events, longest gap"
    lines = [f"| attack | answers | {delays} | memory |", "|---|---|---|---|---|"]
    for row in report["rows"]:
        counts = [f"{count} × {name}" for name, count in row["answers"].items()]
        answers = ", ".join(counts) or "–"
        health = f"{milliseconds(row['health_median'])}, {milliseconds(row['health_max'])}"
        other = f"{row['other_events']}, {milliseconds(row['other_max'])}"
        growth = "–" if row["memory_growth"] is None else f"{row['memory_growth']:+.0f} MiB"
        lines.append(f"| {row['attack']} | {answers} | {health} | {other} | {growth} |")
    ends = "still answers" if report["answers_after"] else "no longer answers"
    lines += ["", f"After all attacks, the server {ends}."]
    return "\n".join(lines)


def milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.0f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="pronk-tiny", help="model of the server, as in pronk serve"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=max(1, (os.cpu_count() or 2) // 2),
        help="threads of the server",
    )
    parser.add_argument(
        "--rounds", type=int, default=1, help="number of times that each request is sent"
    )
    parser.add_argument("--quick", action="store_true", help="one request of each kind")
    parser.add_argument("--out", type=Path, help="write the report to OUT.json and OUT.md")
    parser.add_argument("--host", default=HOST, help=f"address of the server: {HOST} alone")
    options = parser.parse_args()
    if options.host != HOST:
        sys.exit(
            f"host: expected {HOST}, found {options.host}; the script attacks a server of its own, "
            "and no other"
        )
    with served(options.model, options.threads) as (port, process):
        rows = run_attacks(port, process, options.rounds, one_per_kind=options.quick)
        answers_after = is_ready(port) and answer_to_body(port, "/v1/completions", SHORT) == "200"
    report = {
        "model": Path(options.model).name,
        "machine": describe_hardware("cpu")["processor"],
        "date": datetime.now(UTC).date().isoformat(),
        "threads": options.threads,
        "rounds": options.rounds,
        "answers_after": answers_after,
        "rows": rows,
    }
    table = to_markdown(report)
    print(table)
    if options.out is not None:
        options.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        arguments = f"--model {report['model']} --rounds {options.rounds}"
        command = f"`python benchmarks/attack.py {arguments}`"
        about = f"{report['machine']}, {options.threads} threads, {report['date']}: {command}"
        page = f"# A server under attack\n\n{about}\n\n{table}\n"
        options.out.with_suffix(".md").write_text(page)


if __name__ == "__main__":
    main()
