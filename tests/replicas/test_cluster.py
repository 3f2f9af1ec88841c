"""Replicas on a cluster of two nodes, as Ray has it for tests: who gets what, and what becomes of it when one dies."""

from __future__ import annotations

import asyncio
import os
import signal
import urllib.request
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socket import socket
from threading import Thread
from time import perf_counter
from typing import Any

import pytest

from pronk import LLM, SamplingParams
from pronk.errors import OptionError, PronkError
from pronk.outputs import Piece
from pronk.replicas.dispatcher import Dispatcher, ModelReader
from pronk.replicas.messages import GenerateRequest, RequestAccepted, Said

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Ray's own
    pytest.mark.xdist_group("ray"),
]

BEGINNINGS = ["def add(a, b):\n    return a + b\n\n\n" * 8, "class Stack:\n    def push(self, item):\n" * 8]
OPTIONS = {"threads": 1, "prefix_cache": True, "max_batch": 32, "drafter": "recycling", "budget": "all"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes, on each of which there is room for one replica."""
    from ray.cluster_utils import Cluster

    from pronk.replicas.cluster import connect

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    connect(made.address, 2)
    yield made
    import ray

    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def front(cluster: Any) -> Iterator[Dispatcher]:
    from pronk.replicas.cluster import ReplicaPlan, deploy

    del cluster
    with deploy(ReplicaPlan(OPTIONS, 2, drain=5.0)) as deployed:
        yield Dispatcher(ModelReader(LLM(threads=1).path, "recycling", deployed.about()), Seen(deployed))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(threads=1)


def seen(front: Dispatcher) -> Seen:
    found = front._replicas
    assert isinstance(found, Seen)
    return found


def params(seed: int, count: int = 48) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.8, seed=seed, ignore_eos=True)


async def collect(front: Dispatcher, prompt: str, own: SamplingParams) -> list[Piece]:
    return [piece async for pieces in front.steps([prompt], own) for piece in pieces]


class Seen:
    """Replicas, and those who have spoken."""

    def __init__(self, deployed: Any) -> None:
        self.deployed, self.begun = deployed, dict[str, RequestAccepted]()
        self.heard: Callable[[list[str]], None] = lambda _: None

    async def ask(self, ask: GenerateRequest) -> AsyncGenerator[Said]:
        async with aclosing(self.deployed.ask(ask)) as said:
            async for each in said:
                if isinstance(each, RequestAccepted):
                    self.begun[each.replica] = each
                    self.heard([each.replica])
                yield each

    def processes(self) -> list[int]:
        """Of those that are alive, the latest last."""
        return [each.process for each in self.begun.values() if is_alive(each.process)]


def is_alive(process: int) -> bool:
    try:
        return "Z (zombie)" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def check(llm: LLM, found: Sequence[list[Piece]], prompts: Sequence[str], asked: Sequence[SamplingParams]) -> None:
    for pieces, prompt, own in zip(found, prompts, asked, strict=True):
        want = llm.generate(prompt, own, drafter="recycling")
        assert [piece.token_id for piece in pieces] == want.token_ids
        assert "".join(piece.text for piece in pieces) == want.text
        assert pieces[-1].completion is not None


def test_each_node_has_one_and_prompts_go_where_they_were_read(front: Dispatcher, llm: LLM) -> None:
    asked = [params(seed, 12) for seed in range(8)]
    prompts = [BEGINNINGS[seed % 2] + str(seed) for seed in range(8)]

    async def main() -> list[list[Piece]]:
        return [await collect(front, prompt, own) for prompt, own in zip(prompts, asked, strict=True)]

    found = asyncio.run(main())
    check(llm, found, prompts, asked)
    assert len({each.node for each in seen(front).begun.values()}) == 2
    cached = [pieces[-1].completion.stats.cached_tokens for pieces in found]  # type: ignore[union-attr]
    assert cached[:2] == [0, 0]
    assert all(each > 30 for each in cached[2:])


def test_those_that_come_together_are_spread(front: Dispatcher, llm: LLM) -> None:
    """Each is counted where it is chosen, before any replica has heard of it."""
    asked = [params(seed, 24) for seed in range(24)]
    prompts = [f"{seed} is a prompt that nobody has read" for seed in range(24)]

    async def main() -> list[list[Piece]]:
        return await asyncio.gather(*(collect(front, *each) for each in zip(prompts, asked, strict=True)))

    counts = Counter[str]()
    seen(front).heard = counts.update  # type: ignore[assignment]
    try:
        check(llm, asyncio.run(main()), prompts, asked)
    finally:
        seen(front).heard = lambda _: None
    assert sum(counts.values()) == 24
    assert max(counts.values()) <= 15


def test_streams_go_on_when_a_replica_is_killed(front: Dispatcher, llm: LLM) -> None:
    asked, prompts = [params(seed, 200) for seed in range(12)], [BEGINNINGS[seed % 2] for seed in range(12)]

    async def main() -> list[list[Piece]]:
        tasks = [asyncio.create_task(collect(front, *each)) for each in zip(prompts, asked, strict=True)]
        await asyncio.sleep(0.5)
        os.kill(victim, signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(*tasks), 120)

    (victim, *_), before = seen(front).processes(), front.resumed
    check(llm, asyncio.run(main()), prompts, asked)
    assert front.resumed > before
    assert front.num_requests == 0


def test_whoever_leaves_is_forgotten_there(front: Dispatcher) -> None:
    """Their place is free as soon as they have left."""
    long = params(1, 1500)

    async def main() -> None:
        steps = front.steps([BEGINNINGS[0]], long)
        async with aclosing(steps):
            await anext(steps)
            assert front.load.running == 1
        for _ in range(200):
            pieces = await collect(front, BEGINNINGS[0], params(2, 2))
            if front.num_requests == 0 and pieces:
                break
        async with aclosing(front.steps([BEGINNINGS[0]], params(3, 4))) as steps:
            await anext(steps)
            assert front.load.running == 1

    asyncio.run(main())
    assert front.load.running == 0


@pytest.mark.slow
def test_a_replica_that_stands_still(front: Dispatcher, llm: LLM) -> None:
    """It is found out, and replaced; its streams go on elsewhere."""
    asked, prompts = [params(seed, 200) for seed in range(8)], [BEGINNINGS[seed % 2] for seed in range(8)]

    async def main() -> list[list[Piece]]:
        tasks = [asyncio.create_task(collect(front, *each)) for each in zip(prompts, asked, strict=True)]
        await asyncio.sleep(0.5)
        for victim in seen(front).processes()[-1:]:
            os.kill(victim, signal.SIGSTOP)
        return await asyncio.wait_for(asyncio.gather(*tasks), 120)

    began = perf_counter()
    check(llm, asyncio.run(main()), prompts, asked)
    assert perf_counter() - began < 90


@pytest.mark.slow
def test_two_hundred_streams_and_a_death_every_ten_seconds(front: Dispatcher, llm: LLM) -> None:
    """No request is lost, none is doubled."""
    asked = [params(seed, 400) for seed in range(200)]
    prompts = [BEGINNINGS[seed % 2] + str(seed) for seed in range(200)]
    deaths = 0

    async def reap() -> None:
        nonlocal deaths
        while True:
            await asyncio.sleep(10.0)
            victims = seen(front).processes()
            if victims:
                os.kill(victims[deaths % len(victims)], signal.SIGKILL)
                deaths += 1

    async def main() -> list[list[Piece]]:
        reaper = asyncio.create_task(reap())
        tasks = [collect(front, *each) for each in zip(prompts, asked, strict=True)]
        found = await asyncio.wait_for(asyncio.gather(*tasks), 550)
        reaper.cancel()
        return found

    before = front.resumed
    found = asyncio.run(main())
    check(llm, found, prompts, asked)
    assert deaths >= 3
    assert front.resumed > before


@pytest.mark.slow
def test_there_are_more_when_many_come_and_fewer_when_it_is_quiet(front: Dispatcher, llm: LLM) -> None:
    """Streams of the one that goes go on with the other."""
    from ray import serve

    from pronk.replicas.cluster import ReplicaPlan, deploy

    del front
    serve.shutdown()  # type: ignore[no-untyped-call]  # whose replicas have both cores
    prompts = [f"{seed} def f(" for seed in range(40)]
    many = [params(seed, 600) for seed in range(40)]
    with deploy(ReplicaPlan(OPTIONS, 2, least=1, drain=1.0, quiet=4.0)) as deployed:
        made = Dispatcher(ModelReader(llm.path, "recycling", deployed.about()), Seen(deployed))

        async def main() -> tuple[list[list[Piece]], list[list[Piece]]]:
            while len(seen(made).processes()) < 2:
                crowd = await asyncio.gather(*(collect(made, *each) for each in zip(prompts, many, strict=True)))
            # One long stream after the other, on both, until one of them is gone.
            few = list[list[Piece]]()
            while len(seen(made).processes()) > 1:
                few += await asyncio.gather(*(collect(made, prompts[i], many[i]) for i in range(2)))
            return crowd, few

        crowd, few = asyncio.run(asyncio.wait_for(main(), 240))
    check(llm, crowd, prompts, many)
    assert few
    check(llm, few, prompts[:2] * (len(few) // 2), many[:2] * (len(few) // 2))


@pytest.mark.slow
def test_an_application_for_a_cluster(front: Dispatcher, llm: LLM) -> None:
    """The same server, behind Ray Serve's own proxy."""
    from ray import serve

    from pronk.replicas.application import ApplicationArgs, app

    del front
    serve.shutdown()  # type: ignore[no-untyped-call]
    with socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    serve.start(proxy_location="HeadOnly", http_options={"port": port})
    options = {"threads": 1, "budget": "all"}
    with pytest.raises(OptionError, match="expected api_key_file=… for who may ask, found none"):
        app(ApplicationArgs())
    serve.run(
        app(ApplicationArgs(replicas=1, name="tiny", open_to_all=True, options=options)),
        name="other",
        route_prefix="/tiny",
    )
    body = b'{"prompt": "def f(", "max_tokens": 8, "temperature": 0, "stream": false}'
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/tiny/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        said = answer.read().decode()
    want = llm.generate("def f(", SamplingParams(max_tokens=8, temperature=0.0)).text
    assert want.encode("unicode_escape").decode() in said or want in said
    serve.delete("other")


@pytest.mark.slow
def test_a_model_that_is_none_is_one_line(cluster: Any) -> None:
    from pronk.replicas.cluster import ReplicaPlan, deploy

    del cluster
    plan = replace(ReplicaPlan({**OPTIONS, "model": "/nowhere"}, 1), cpus=0.1)
    said = r"replicas: expected 1 that load the model.*no such folder: '/nowhere'"
    with pytest.raises(PronkError, match=said) as found, deploy(plan):
        pass
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("replicas", "cpus", "message"),
    [
        (3, 2.0, "replicas: expected a cluster of at least 6 cores, found one of 2; ask for fewer"),
        (
            1,
            2.0,
            "replicas: expected room for 1 of 2 cores each, found 1 at most on one machine; ask for fewer threads",
        ),
        (1, 1.0, "replicas: expected 1 free cores, found 0 of 2; end what has the others, or ask for fewer"),
    ],
)
def test_a_cluster_without_room_is_one_line(
    front: Dispatcher, replicas: int, cpus: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pronk.replicas import cluster

    del front  # which has both cores
    monkeypatch.setattr(cluster, "_SETTLING", 1.0)
    with pytest.raises(OptionError, match=message), cluster.deploy(cluster.ReplicaPlan(OPTIONS, replicas, cpus=cpus)):
        pass


def test_an_address_where_somebody_else_listens_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from pronk.replicas import cluster

    class Silent(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Nothing."""

    monkeypatch.setattr(cluster, "_KNOCKS", 1.0)
    with HTTPServer(("127.0.0.1", 0), Silent) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"127.0.0.1:{server.server_address[1]}"
            said = f"ray-address: expected a Ray cluster at {address}, found none: who listens there does not speak as "
            with pytest.raises(OptionError, match=said) as caught:
                cluster.connect(address, 1)
            assert "\n" not in str(caught.value)
        finally:
            server.shutdown()
            thread.join()
