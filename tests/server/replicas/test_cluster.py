"""Replicas on a Ray test cluster of two nodes: routing, deaths, scaling and errors.

The nodes have different instruction sets, like machines of two ages.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socket import socket
from threading import Thread
from typing import Any

import pytest

from pronk import LLM, SamplingParams
from pronk.base.errors import OptionError, PronkError
from pronk.engine.outputs import Piece
from pronk.kernels.library import candidates
from pronk.server.replicas.dispatcher import Dispatcher, ModelReader
from pronk.server.replicas.messages import GenerateRequest, ReplicaMessage, RequestAccepted
from waiting import HUNG, eventually

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),  # of Ray
    pytest.mark.xdist_group("ray"),
]

# Instruction sets of the nodes: the widest, and AVX2 or the narrowest.
PORTABLE = [each.name for each in candidates(bits="portable")]
KERNELS = (PORTABLE[0], "avx2" if "avx2" in PORTABLE else PORTABLE[-1])
BEGINNINGS = [
    "def add(a, b):\n    return a + b\n\n\n" * 8,
    "class Stack:\n    def push(self, item):\n" * 8,
]
OPTIONS = {
    "model": "pronk-tiny",
    "bits": "portable",
    "threads": 1,
    "prefix_cache": True,
    "max_batch": 32,
    "drafter": "recycling",
    "budget": "all",
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Start two nodes with room for one replica each."""
    from ray.cluster_utils import Cluster

    from pronk.server.replicas.cluster import connect

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    connect(made.address, 2)
    yield made
    import ray

    ray.shutdown()
    made.shutdown()
    del made
    # Ray does not wait for its processes; a later test would fail because of the warning
    gc.collect()


def replica_of_its_node(kernels: Sequence[str]) -> type:
    """Return a class of replicas whose instruction set belongs to their node.

    Ray sends a class by value only if no module has it. Replicas cannot import this module.
    """
    from pronk.server.replicas.replica import Replica

    class ReplicaOfItsNode(Replica):
        def __init__(self, options: Mapping[str, Any], *others: Any) -> None:
            import ray

            nodes = sorted(node["NodeID"] for node in ray.nodes())
            number = nodes.index(ray.get_runtime_context().get_node_id())
            super().__init__({**options, "kernels": kernels[number % len(kernels)]}, *others)

    return ReplicaOfItsNode


@pytest.fixture(scope="module")
def dispatcher(cluster: Any) -> Iterator[Dispatcher]:
    from pronk.server.replicas import cluster as replicas

    del cluster
    plan = replicas.ReplicaPlan(OPTIONS, 2, drain=5.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "Replica", replica_of_its_node(KERNELS))
        with replicas.deploy(plan) as deployed:
            made = Dispatcher(
                ModelReader(LLM(threads=1).path, "recycling", deployed.about()),
                ObservedReplicas(deployed),
            )
            use_all_replicas(made, 2)
            yield made


def use_all_replicas(dispatcher: Dispatcher, count: int) -> None:
    """Wait until the router, which learns of replicas one by one, has sent equally many of the last
    prompts to each. Earlier prompts do not count, because a replica may end meanwhile.
    """
    recent = deque[str](maxlen=2 * count)
    replicas_of(dispatcher).on_accept = recent.extend

    def are_used_alike() -> bool:
        asyncio.run(collect(dispatcher, "x", params(0, 1)))
        return [*Counter(recent).values()] == [2] * count

    assert eventually(are_used_alike)
    replicas_of(dispatcher).on_accept = lambda _: None


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(threads=1, bits="portable")


def replicas_of(dispatcher: Dispatcher) -> ObservedReplicas:
    replicas = dispatcher._replicas
    assert isinstance(replicas, ObservedReplicas)
    return replicas


def params(seed: int, count: int = 48) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.8, seed=seed, ignore_eos=True)


async def collect(dispatcher: Dispatcher, prompt: str, own: SamplingParams) -> list[Piece]:
    return [piece async for pieces in dispatcher.steps([prompt], own) for piece in pieces]


async def start_streams(
    dispatcher: Dispatcher, prompts: Sequence[str], options: Sequence[SamplingParams]
) -> list[asyncio.Task[list[Piece]]]:
    """Start a stream per prompt and return, once each has its first tokens, the tasks that collect
    the pieces.
    """
    begun = [asyncio.Event() for _ in prompts]

    async def collect(prompt: str, own: SamplingParams, event: asyncio.Event) -> list[Piece]:
        found = list[Piece]()
        async for pieces in dispatcher.steps([prompt], own):
            found += pieces
            event.set()
        return found

    tasks = [
        asyncio.create_task(collect(*each)) for each in zip(prompts, options, begun, strict=True)
    ]
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), HUNG)
    return tasks


class ObservedReplicas:
    """Replicas that record which of them accept requests."""

    def __init__(self, deployed: Any) -> None:
        self.deployed = deployed
        self.accepted = dict[str, RequestAccepted]()
        self.on_accept: Callable[[list[str]], None] = lambda _: None

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[ReplicaMessage]:
        async with aclosing(self.deployed.generate(request)) as messages:
            async for message in messages:
                if isinstance(message, RequestAccepted):
                    self.accepted[message.replica] = message
                    self.on_accept([message.replica])
                yield message

    def processes(self) -> list[int]:
        """Return the process ids of live replicas, the newest replica last."""
        return [each.process for each in self.accepted.values() if is_alive(each.process)]


def num_running() -> int:
    """Return the number of replicas that Ray Serve says are running."""
    from ray import serve

    applications = serve.status().applications.values()
    deployments = [
        each for application in applications for each in application.deployments.values()
    ]
    return sum(each.replica_states.get("RUNNING", 0) for each in deployments)


def is_alive(process: int) -> bool:
    try:
        return "Z (zombie)" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def check(
    llm: LLM,
    found: Sequence[list[Piece]],
    prompts: Sequence[str],
    options: Sequence[SamplingParams],
) -> None:
    for pieces, prompt, own in zip(found, prompts, options, strict=True):
        want = llm.generate(prompt, own, drafter="recycling")
        assert [piece.token_id for piece in pieces] == want.token_ids
        assert "".join(piece.text for piece in pieces) == want.text
        assert pieces[-1].completion is not None


@pytest.fixture
def patient_router(dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the router, which waits for a replica's number of requests as long as it takes.

    On a busy machine, replicas may miss any limit of time.
    """
    from pronk.server.replicas.routing import PrefixRouter

    for name in ("queue_len_response_deadline_s", "max_queue_len_response_deadline_s"):
        monkeypatch.setattr(PrefixRouter, name, HUNG)
    handle = replicas_of(dispatcher).deployed.handle
    found = handle._router._asyncio_router.request_router
    assert isinstance(found, PrefixRouter)
    return found


@pytest.mark.usefixtures("patient_router")
def test_prompts_go_to_the_node_with_their_prefix(dispatcher: Dispatcher, llm: LLM) -> None:
    options = [params(seed, 12) for seed in range(8)]
    prompts = [BEGINNINGS[seed % 2] + str(seed) for seed in range(8)]

    async def main() -> list[list[Piece]]:
        return [
            await collect(dispatcher, prompt, own)
            for prompt, own in zip(prompts, options, strict=True)
        ]

    accepted = list[str]()
    replicas_of(dispatcher).on_accept = accepted.extend
    found = asyncio.run(main())
    check(llm, found, prompts, options)
    nodes = [replicas_of(dispatcher).accepted[replica].node for replica in accepted]
    assert len({*nodes}) == 2
    assert nodes == nodes[:2] * 4
    cached = [pieces[-1].completion.stats.cached_tokens for pieces in found]  # type: ignore[union-attr]
    assert cached[:2] == [0, 0]
    assert all(each > 30 for each in cached[2:])


def test_the_router_waits_longer_for_a_busy_replica_than_ray() -> None:
    from ray.serve.request_router import RequestRouter

    from pronk.server.replicas.routing import PrefixRouter

    assert PrefixRouter.queue_len_response_deadline_s >= 1.0
    assert PrefixRouter.queue_len_response_deadline_s > RequestRouter.queue_len_response_deadline_s


def test_a_prompt_waits_for_the_busy_replica_with_its_prefix(
    dispatcher: Dispatcher, patient_router: Any
) -> None:
    from ray.serve.request_router import RequestRouter

    accepted = list[str]()
    replicas_of(dispatcher).on_accept = accepted.extend

    async def main() -> None:
        await collect(dispatcher, BEGINNINGS[0], params(0, 1))
        process = replicas_of(dispatcher).accepted[accepted[0]].process
        for replica in patient_router.curr_replicas:
            patient_router.replica_queue_len_cache.invalidate_key(replica)  # else Ray does not ask
        os.kill(process, signal.SIGSTOP)
        try:
            second = asyncio.create_task(collect(dispatcher, BEGINNINGS[0], params(1, 1)))
            await asyncio.sleep(3 * RequestRouter.queue_len_response_deadline_s)
        finally:
            os.kill(process, signal.SIGCONT)
        await second

    try:
        asyncio.run(main())
    finally:
        replicas_of(dispatcher).on_accept = lambda _: None
    assert len(accepted) == 2
    assert accepted[0] == accepted[1]


def test_simultaneous_requests_are_spread(dispatcher: Dispatcher, llm: LLM) -> None:
    """The router counts a request when it selects a replica, before the replica accepts it."""
    options = [params(seed, 24) for seed in range(24)]
    prompts = [f"{seed} is a prompt without a cached prefix" for seed in range(24)]

    async def main() -> list[list[Piece]]:
        return await asyncio.gather(
            *(collect(dispatcher, *each) for each in zip(prompts, options, strict=True))
        )

    counts = Counter[str]()
    replicas_of(dispatcher).on_accept = counts.update  # type: ignore[assignment]
    try:
        check(llm, asyncio.run(main()), prompts, options)
    finally:
        replicas_of(dispatcher).on_accept = lambda _: None
    assert sum(counts.values()) == 24
    assert max(counts.values()) <= 15


def test_replicas_have_the_instruction_sets_of_their_nodes(dispatcher: Dispatcher) -> None:
    """Non-vacuity: the other tests hold for mixed instruction sets."""
    deployed = replicas_of(dispatcher).deployed
    found = set[str]()

    def are_met() -> bool:
        found.add(deployed.about().kernels)
        return found == {*KERNELS}

    assert eventually(are_met), found


@pytest.mark.slow  # the next test kills both replicas of one stream
def test_streams_continue_when_a_replica_is_killed(dispatcher: Dispatcher, llm: LLM) -> None:
    options = [params(seed, 200) for seed in range(12)]
    prompts = [BEGINNINGS[seed % 2] for seed in range(12)]

    async def main() -> list[list[Piece]]:
        tasks = await start_streams(dispatcher, prompts, options)
        os.kill(replicas_of(dispatcher).processes()[0], signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(*tasks), HUNG)

    before = dispatcher.resumed
    check(llm, asyncio.run(main()), prompts, options)
    assert dispatcher.resumed > before
    assert dispatcher.num_requests == 0


@pytest.mark.slow  # test_dispatcher.py has deaths of replicas
def test_a_stream_continues_when_its_replicas_are_killed_in_turn(
    dispatcher: Dispatcher, llm: LLM
) -> None:
    """The first replica and the second have different instruction sets; a third ends the text."""
    replicas = replicas_of(dispatcher)
    use_all_replicas(dispatcher, 2)
    own = params(5, 1200)
    met = list[RequestAccepted]()
    replicas.on_accept = lambda names: met.extend(replicas.accepted[name] for name in names)

    async def main() -> list[Piece]:
        found = list[Piece]()
        killed = set[int]()
        async for pieces in dispatcher.steps([BEGINNINGS[0]], own):
            found += pieces
            process = met[-1].process
            if len(killed) < 2 and len(found) > 100 * (1 + len(killed)) and process not in killed:
                os.kill(process, signal.SIGKILL)
                killed.add(process)
        return found

    try:
        found = asyncio.run(main())
    finally:
        replicas.on_accept = lambda _: None
    check(llm, [found], BEGINNINGS[:1], [own])
    assert len({each.process for each in met}) == 3
    assert met[0].node != met[1].node


def test_cancelled_requests_end_on_their_replica(dispatcher: Dispatcher) -> None:
    long = params(1, 1500)

    async def main() -> None:
        steps = dispatcher.steps([BEGINNINGS[0]], long)
        async with aclosing(steps):
            await anext(steps)
            assert dispatcher.load.running == 1
        for _ in range(200):
            pieces = await collect(dispatcher, BEGINNINGS[0], params(2, 2))
            if dispatcher.num_requests == 0 and pieces:
                break
        # More tokens than one step can accept, so that the request still runs after its first step.
        async with aclosing(dispatcher.steps([BEGINNINGS[0]], params(3, 200))) as steps:
            await anext(steps)
            assert dispatcher.load.running == 1

    asyncio.run(main())
    assert dispatcher.load.running == 0


@pytest.mark.slow
def test_stalled_replica_is_replaced(dispatcher: Dispatcher, llm: LLM) -> None:
    """Its streams continue on another replica."""
    options = [params(seed, 200) for seed in range(8)]
    prompts = [BEGINNINGS[seed % 2] for seed in range(8)]

    async def main() -> list[list[Piece]]:
        tasks = await start_streams(dispatcher, prompts, options)
        for victim in replicas_of(dispatcher).processes()[-1:]:
            os.kill(victim, signal.SIGSTOP)
        return await asyncio.wait_for(asyncio.gather(*tasks), HUNG)

    check(llm, asyncio.run(main()), prompts, options)


@pytest.mark.slow
def test_two_hundred_streams_and_a_death_every_ten_seconds(
    dispatcher: Dispatcher, llm: LLM
) -> None:
    """Each request ends with its own text, once."""
    options = [params(seed, 400) for seed in range(200)]
    prompts = [BEGINNINGS[seed % 2] + str(seed) for seed in range(200)]
    deaths = 0

    async def reap() -> None:
        nonlocal deaths
        while True:
            await asyncio.sleep(10.0)
            victims = replicas_of(dispatcher).processes()
            # the other one goes on, however long a replacement takes to start
            if victims and num_running() == 2:
                os.kill(victims[deaths % len(victims)], signal.SIGKILL)
                deaths += 1

    async def main() -> list[list[Piece]]:
        reaper = asyncio.create_task(reap())
        found = list[list[Piece]]()
        while deaths < 3:
            found += await asyncio.gather(
                *(collect(dispatcher, *each) for each in zip(prompts, options, strict=True))
            )
        reaper.cancel()
        return found

    before = dispatcher.resumed
    found = asyncio.run(main())
    rounds = len(found) // len(prompts)
    check(llm, found, prompts * rounds, options * rounds)
    assert dispatcher.resumed > before


@pytest.mark.slow
def test_number_of_replicas_follows_the_load(dispatcher: Dispatcher, llm: LLM) -> None:
    """Streams of a replica that is removed continue on the other one."""
    from ray import serve

    from pronk.server.replicas.cluster import ReplicaPlan, deploy

    del dispatcher
    serve.shutdown()  # type: ignore[no-untyped-call]  # frees both cores
    prompts = [f"{seed} def f(" for seed in range(40)]
    many = [params(seed, 600) for seed in range(40)]
    with deploy(
        ReplicaPlan(OPTIONS, 2, min_replicas=1, drain=1.0, downscale_delay=4.0)
    ) as deployed:
        made = Dispatcher(
            ModelReader(llm.path, "recycling", deployed.about()), ObservedReplicas(deployed)
        )

        async def main() -> tuple[list[list[Piece]], list[list[Piece]]]:
            while len(replicas_of(made).processes()) < 2:
                crowd = await asyncio.gather(
                    *(collect(made, *each) for each in zip(prompts, many, strict=True))
                )
            # Two long streams keep both replicas busy until the low load removes one of them.
            few = list[list[Piece]]()
            while len(replicas_of(made).processes()) > 1:
                few += await asyncio.gather(*(collect(made, prompts[i], many[i]) for i in range(2)))
            return crowd, few

        crowd, few = asyncio.run(asyncio.wait_for(main(), HUNG))
    check(llm, crowd, prompts, many)
    assert few
    check(llm, few, prompts[:2] * (len(few) // 2), many[:2] * (len(few) // 2))


@pytest.mark.slow
def test_application_behind_the_proxy_of_ray_serve(dispatcher: Dispatcher, llm: LLM) -> None:
    from ray import serve

    from pronk.server.replicas.application import ApplicationArgs, app

    del dispatcher
    serve.shutdown()  # type: ignore[no-untyped-call]
    with socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    serve.start(proxy_location="HeadOnly", http_options={"port": port})
    options = {"threads": 1, "budget": "all"}
    with pytest.raises(
        OptionError, match="expected api_key_file=FILE with the keys of clients, found none"
    ):
        app(ApplicationArgs())
    serve.run(
        app(
            ApplicationArgs(
                model=str(llm.path), replicas=1, name="tiny", open_to_all=True, options=options
            )
        ),
        name="other",
        route_prefix="/tiny",
    )
    data = b'{"prompt": "def f(", "max_tokens": 8, "temperature": 0, "stream": false}'
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/tiny/v1/completions", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=HUNG) as answer:
        body = answer.read().decode()
    want = llm.generate("def f(", SamplingParams(max_tokens=8, temperature=0.0)).text
    assert want.encode("unicode_escape").decode() in body or want in body
    assert status_of(f"http://127.0.0.1:{port}/tiny/ready") == 200
    (replica,) = replicas_named("other:model")
    os.kill(replica, signal.SIGSTOP)  # a killed replica may be replaced before /ready asks again
    assert eventually(lambda: status_of(f"http://127.0.0.1:{port}/tiny/ready") == 503)
    assert status_of(f"http://127.0.0.1:{port}/tiny/health") == 200
    os.kill(replica, signal.SIGKILL)
    assert eventually(lambda: status_of(f"http://127.0.0.1:{port}/tiny/ready") == 200)
    serve.delete("other")


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=HUNG) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return int(error.code)


def replicas_named(name: str) -> list[int]:
    """Return the processes of the replicas of a deployment of Ray Serve."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"ray::ServeReplica:{name}".encode() in (place / "cmdline").read_bytes():
                found.append(int(place.name))
    return found


@pytest.mark.slow
def test_missing_model_is_a_one_line_error(cluster: Any) -> None:
    from pronk.server.replicas.cluster import ReplicaPlan, deploy

    del cluster
    plan = replace(ReplicaPlan({**OPTIONS, "model": "/nowhere"}, 1), cpus=0.1)
    message = (
        r"replicas: expected 1 with the model loaded, found an error: .*no such folder: '/nowhere'"
    )
    with pytest.raises(PronkError, match=message) as found, deploy(plan):
        pass
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("replicas", "cpus", "message"),
    [
        (3, 2.0, "replicas: expected at least 6 cores in the cluster, found 2; use fewer replicas"),
        (
            1,
            2.0,
            (
                "replicas: expected room for 1 of 2 cores each, found machines of at most 1 cores; "
                "use "
                "fewer threads"
            ),
        ),
        (
            1,
            1.0,
            (
                "replicas: expected 1 free cores, found 0 of 2; use fewer replicas, "
                "or stop other programs"
            ),
        ),
    ],
)
def test_too_few_cores_are_a_one_line_error(
    dispatcher: Dispatcher,
    replicas: int,
    cpus: float,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pronk.server.replicas import cluster

    del dispatcher  # the fixture's replicas occupy both cores
    monkeypatch.setattr(cluster, "_FREE_CORES_TIMEOUT", 0.2)
    with (
        pytest.raises(OptionError, match=message),
        cluster.deploy(cluster.ReplicaPlan(OPTIONS, replicas, cpus=cpus)),
    ):
        pass


def test_address_of_another_service_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from pronk.server.replicas import cluster

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Write no log."""

    monkeypatch.setattr(cluster, "_CONNECT_TIMEOUT", 0.2)
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"127.0.0.1:{server.server_address[1]}"
            message = (
                f"ray-address: expected a Ray cluster at {address}, found none: the service at "
                "this port is not Ray"
            )
            with pytest.raises(OptionError, match=message) as caught:
                cluster.connect(address, 1)
            assert "\n" not in str(caught.value)
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
def test_replicas_end_when_their_server_is_killed(cluster: Any) -> None:
    """Ray keeps the application of a server that was killed; the replicas end it."""
    from ray import serve

    serve.shutdown()  # type: ignore[no-untyped-call]
    options = ["--ray-address", cluster.address, "--threads", "1", "--port", "0", "--drain", "1"]
    command = [sys.executable, "-m", "pronk", "serve", "--model", "pronk-tiny", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        assert server.stdout is not None
        assert any("http://" in line for line in server.stdout)
        assert len(serve.status().applications) == 1
        server.kill()
    assert eventually(lambda: not serve.status().applications)
