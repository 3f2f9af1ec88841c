"""``pronk serve --replicas``: streams outlive replicas, the cluster is private, no process
remains.
"""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest

from pronk import LLM, SamplingParams
from sockets import sockets
from waiting import HUNG, eventually

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of Ray
    pytest.mark.xdist_group("ray"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each replica"),
    pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc/net/tcp"),
]

TOKENS = 600


@dataclass(frozen=True)
class Served:
    """A running ``pronk serve``: its process, its URL, and the text that marks its processes'
    environment.
    """

    command: subprocess.Popen[str]
    url: str
    mark: str

    def processes(self, name: str = "") -> list[int]:
        """Return the processes of the server with ``name`` in their command line."""
        found = list[int]()
        for place in Path("/proc").glob("[0-9]*"):
            try:
                own = self.mark.encode() in (place / "environ").read_bytes()
                if own and name.encode() in (place / "cmdline").read_bytes():
                    found.append(int(place.name))
            except OSError:
                continue
        return found

    def environment(self, name: str) -> str:
        """Return an environment variable of the first replica."""
        (process, *_) = self.processes("ray::ServeReplica")
        entries = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        (found,) = [
            entry.partition(b"=")[2] for entry in entries if entry.startswith(name.encode() + b"=")
        ]
        return found.decode()


@contextmanager
def serving(*more: str) -> Iterator[Served]:
    mark = token_hex(8)
    options = [
        "--replicas",
        "2",
        "--threads",
        "1",
        "--port",
        "0",
        "--drafter",
        "recycling",
        "--budget",
        "all",
    ]
    command = subprocess.Popen(
        [sys.executable, "-m", "pronk", "serve", "--model", "pronk-tiny", *options, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PRONK_TEST": mark},
    )
    assert command.stdout is not None
    output = ""
    for line in command.stdout:
        output += line
        if found := re.search(r"(http://127\.0\.0\.1:\d+)/v1", line):
            yield Served(command, found[1], mark)
            break
    else:
        pytest.fail(output)
    if command.poll() is None:
        command.kill()
        command.wait()
    command.stdout.close()


def post(served: Served, prompt: str, seed: int) -> Any:
    own = {
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0.8,
        "seed": seed,
        "stream": True,
        "ignore_eos": True,
    }
    body = json.dumps(own).encode()
    return urllib.request.urlopen(
        urllib.request.Request(
            f"{served.url}/v1/completions", body, {"Content-Type": "application/json"}
        ),
        timeout=HUNG,
    )


def texts(stream: Any) -> Iterator[str]:
    for line in stream:
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                yield choice["text"]


@pytest.mark.slow  # test_cluster.py has replicas in processes
def test_a_server_until_its_end() -> None:
    """One server has all checks: pytest-xdist would give each process that runs one of several tests
    a server of its own, whose cluster takes half a minute to start.
    """
    # At the end, replicas that still start in place of killed ones have a second.
    with serving("--drain", "1") as served:
        client_sees_one_stream_when_replicas_are_killed(served)
        cluster_is_private(served)
        sigterm_ends_all_processes(served)


def client_sees_one_stream_when_replicas_are_killed(served: Served) -> None:
    prompt = "def add(a, b):\n    return a + b\n"
    before = {*served.processes("ray::ServeReplica")}
    assert len(before) == 2
    with post(served, prompt, 5) as stream:
        pieces = texts(stream)
        found = [next(pieces)]
        for process in before:
            os.kill(process, signal.SIGKILL)
        found += pieces
    params = SamplingParams(max_tokens=TOKENS, temperature=0.8, seed=5, ignore_eos=True)
    assert "".join(found) == LLM(threads=1).generate(prompt, params).text
    assert not before & {*served.processes("ray::ServeReplica")}
    with urllib.request.urlopen(f"{served.url}/metrics", timeout=HUNG) as answer:
        assert re.search(
            r'pronk:requests_resumed\{model_name="pronk-tiny"\} [1-9]', answer.read().decode()
        )


def cluster_is_private(served: Served) -> None:
    """All processes listen on the loopback except Ray Serve's replicas, which require the token."""
    import grpc

    replicas = served.processes("ray::ServeReplica")
    listening = [*sockets(served.processes())]
    assert len(listening) > 5
    open_to_all = [
        (process, port) for process, address, port in listening if not address.is_loopback
    ]
    assert {process for process, _ in open_to_all} <= {*replicas}
    token = served.environment("RAY_AUTH_TOKEN")
    assert len(token) == 64
    for _, port in open_to_all:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
            codes = []
            for metadata in (
                None,
                [("authorization", "Bearer 0")],
                [("authorization", f"Bearer {token}")],
            ):
                with pytest.raises(grpc.RpcError) as error:
                    call(b"", metadata=metadata, timeout=HUNG)
                codes.append(error.value.code())
        refused = grpc.StatusCode.UNAUTHENTICATED
        assert codes[:2] == [refused, refused]
        assert codes[2] != refused


def sigterm_ends_all_processes(served: Served) -> None:
    assert served.processes("raylet")
    served.command.send_signal(signal.SIGTERM)
    assert served.command.wait(HUNG) == 0
    assert eventually(lambda: not served.processes())


@pytest.mark.slow  # test_cluster.py kills a server whose cluster remains
def test_killing_the_server_ends_the_replicas_and_the_cluster() -> None:
    """Two agents of Ray remain for a minute, in which they try to report the end of the cluster to
    the cluster.
    """
    with serving() as made:
        names = ("ray::ServeReplica", "raylet", "gcs_server")
        assert all(made.processes(name) for name in names)
        made.command.kill()
        made.command.wait()
        assert eventually(lambda: not any(made.processes(name) for name in names))
