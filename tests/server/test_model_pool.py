"""Several models behind one server: loading on demand, limits of memory, failures and clients that
leave.
"""

import asyncio
import re
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from errno import ENOSPC
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from checkpoints import MakeCheckpoint
from pronk import BITS, LLM, SamplingParams
from pronk.base.errors import CheckpointError, OptionError
from pronk.base.fair_executor import FairExecutor
from pronk.checkpoint.hub.clone_models import tiny_model
from pronk.drafting import Eagle3
from pronk.drafting.acceptance_file import AcceptanceFile
from pronk.models.pairs import Pair
from pronk.server import model_pool
from pronk.server.metrics import Metrics
from pronk.server.model_loader import ModelLoader
from pronk.server.model_pool import ModelPool, PooledModel
from pronk.server.names import AdapterNames, find_models
from pronk.server.service import Service
from pronk.server.settings import RequestLimits, ServerSettings
from server.serving import running_pool
from waiting import HUNG, eventually, until

OPTIONS: dict[str, Any] = {
    "drafter": "recycling",
    "dtype": "auto",
    "context": None,
    "kv_memory": 2**20,
    "kv_dtype": "auto",
    "prefix_cache": True,
    "max_batch": 8,
    "threads": 1,
    "budget": "all",
}


@dataclass(frozen=True)
class ObservedLoader(ModelLoader):
    """A loader that waits for ``gate`` before each load, counts its loads, and fails if ``fails``
    is set.
    """

    gate: threading.Event = field(default_factory=threading.Event)
    loads: list[weakref.ref[LLM]] = field(default_factory=list)
    attempts: list[str] = field(default_factory=list)  # names of the models
    fails: threading.Event = field(default_factory=threading.Event)

    def load(
        self,
        metrics: Metrics | None = None,
        progress: Callable[[int, int], None] | None = None,
        *,
        executor: FairExecutor | None = None,
    ) -> Service:
        self.attempts.append(self.settings.name)
        assert self.gate.wait(HUNG)
        if self.fails.is_set():
            msg = "expected a whole file, found a part"
            raise CheckpointError(msg)
        service = super().load(metrics, progress, executor=executor)
        assert isinstance(service.engine.llm, LLM)
        self.loads.append(weakref.ref(service.engine.llm))
        return service


@pytest.fixture(scope="module")
def paths(checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return three models, and one whose weights are missing."""
    broken = tmp_path_factory.mktemp("broken")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (broken / name).write_bytes((tiny_model() / name).read_bytes())
    return {
        "tiny": tiny_model(),
        "llama": checkpoint("llama"),
        "qwen": checkpoint("qwen2"),
        "broken": broken,
    }


def make_pool(
    paths: dict[str, Path], names: str, room: int | None = None, **options: Any
) -> ModelPool:
    """Return a pool of the named models, with memory for the ``room`` largest ones."""
    limits = options.pop("limits", RequestLimits())
    keys = options.pop("keys", ())
    settings = ServerSettings(name="", limits=limits, keys=keys)
    pins = options.pop("pins", ())
    loaders = {
        name: ObservedLoader(paths[name], OPTIONS, replace(settings, name=name))
        for name in names.split()
    }
    memory = None
    if room is not None:
        sizes = [loader.estimate().total for name, loader in loaders.items() if name != "broken"]
        memory = sum(sorted(sizes)[-room:])
    models = [
        PooledModel(AdapterNames(name, ()), replace(each, memory=memory), name in pins)
        for name, each in loaders.items()
    ]
    for each in loaders.values():
        each.gate.set()
    return ModelPool(models, settings, memory=memory, **options)


def loader_of(pool: ModelPool, name: str) -> ObservedLoader:
    loader = pool.find(name).loader
    assert isinstance(loader, ObservedLoader)
    return loader


@contextmanager
def serving(pool: ModelPool) -> Iterator[httpx.Client]:
    try:
        with running_pool(pool) as (url, _, _), httpx.Client(base_url=url, timeout=HUNG) as client:
            yield client
    finally:
        pool.finish()


def ask(client: httpx.Client, model: str | None, seed: int = 0, **more: Any) -> httpx.Response:
    body = {
        "prompt": f"def f{seed}(x):",
        "max_tokens": 12,
        "temperature": 0.9,
        "seed": seed,
        "ignore_eos": True,
    }
    return client.post(
        "/v1/completions", json=body | ({} if model is None else {"model": model}) | more
    )


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def error(answer: httpx.Response, status: int, code: str) -> str:
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["code"] == code
    return str(answer.json()["error"]["message"])


def states(client: httpx.Client) -> dict[str, str]:
    return {each["id"]: each["state"] for each in client.get("/v1/models").json()["data"]}


@pytest.mark.parametrize("count", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_many_requests_for_three_models_with_room_for_two(
    count: int, paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request is lost, each text is that of the model alone, and the memory stays within its
    limit.
    """
    pool = make_pool(paths, "tiny llama qwen broken", room=2)
    used = list[tuple[int, int]]()
    set_loaded = pool._set_loaded

    def observe(model: PooledModel, service: Service) -> None:
        set_loaded(model, service)
        num_bytes = sum(each.num_bytes for each in pool.models)
        used.append((num_bytes, sum(each.service is not None for each in pool.models)))

    monkeypatch.setattr(pool, "_set_loaded", observe)
    dice = Random(5)
    names = ["tiny", "llama", "qwen"] * (3 * count // 10) + ["broken"] * (count // 10)
    dice.shuffle(names)
    with serving(pool) as client, ThreadPoolExecutor(16) as threads:
        answers = [*threads.map(lambda pair: ask(client, pair[1], pair[0]), enumerate(names))]
        loads = {
            name: len(loader_of(pool, name).loads) for name in ("tiny", "llama", "qwen", "broken")
        }
        assert states(client)["broken"] == "failed"
    assert loads["broken"] == 0
    assert min(loads["tiny"], loads["llama"], loads["qwen"]) >= 1
    assert max(loads.values()) >= 2  # a model was unloaded and loaded again
    assert pool.memory is not None
    assert max(num_bytes for num_bytes, _ in used) <= pool.memory
    assert max(count for _, count in used) == 2
    alone = {name: LLM(paths[name], **OPTIONS) for name in ("tiny", "llama", "qwen")}
    for seed, (name, answer) in enumerate(zip(names, answers, strict=True)):
        if name == "broken":
            assert "model broken: " in error(answer, 503, "model_not_loaded")
        else:
            params = SamplingParams(max_tokens=12, temperature=0.9, seed=seed, ignore_eos=True)
            assert text(answer) == alone[name].generate(f"def f{seed}(x):", params).text


def test_unloading_frees_the_model(paths: dict[str, Path]) -> None:
    pool = make_pool(paths, "tiny llama", room=1)
    with serving(pool) as client:
        first = text(ask(client, "tiny", 3))
        (held,) = loader_of(pool, "tiny").loads
        assert held() is not None
        text(ask(client, "llama"))
        assert states(client) == {"tiny": "unloaded", "llama": "loaded"}
        assert held() is None
        assert text(ask(client, "tiny", 3)) == first


def test_idle_models_are_unloaded_and_pinned_ones_stay(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(model_pool, "monotonic", lambda: now)
    pool = make_pool(paths, "tiny llama qwen", idle_seconds=0.3, pins=("llama",))
    with serving(pool) as client:
        text(ask(client, "llama"))
        text(ask(client, "tiny"))
        now += 0.2
        text(ask(client, "qwen"))
        assert set(states(client).values()) == {"loaded"}
        now += 0.2
        assert eventually(lambda: states(client)["tiny"] == "unloaded")
        assert states(client) == {"tiny": "unloaded", "llama": "loaded", "qwen": "loaded"}
        now += 0.2
        assert eventually(lambda: states(client)["qwen"] == "unloaded")
        assert states(client)["llama"] == "loaded"
        assert client.get("/ready").status_code == 200
        with client.stream(
            "POST", "/v1/completions", json={"prompt": "x", "stream": True, "model": "tiny"}
        ) as stream:
            assert any(line.startswith("data: {") for line in stream.iter_lines())


def test_the_least_recently_used_model_goes_and_a_pinned_one_stays(paths: dict[str, Path]) -> None:
    pool = make_pool(paths, "tiny llama qwen", room=2, pins=("qwen",))
    pool.memory = sum(loader_of(pool, name).estimate().total for name in ("tiny", "qwen"))
    with serving(pool) as client:
        for name in ("qwen", "tiny", "llama"):  # qwen is the least recently used one
            text(ask(client, name))
        assert states(client) == {"tiny": "unloaded", "llama": "loaded", "qwen": "loaded"}


def test_a_model_that_never_fits_is_refused_with_the_sizes(paths: dict[str, Path]) -> None:
    pool = make_pool(paths, "tiny llama")
    pool.memory = loader_of(pool, "llama").estimate().total
    with serving(pool) as client:
        text(ask(client, "llama"))
        message = error(ask(client, "tiny"), 503, "model_not_loaded")
        for part in (
            "memory: expected at most 1.46 MiB",
            "found 21.4 MiB",
            "weights 20.4 MiB",
            "KV cache",
            "--memory higher",
        ):
            assert part in message
        assert states(client) == {"tiny": "failed", "llama": "loaded"}
        assert not loader_of(pool, "tiny").attempts
    with pytest.raises(OptionError, match="memory: expected at most"):
        pool.preload(pool.find("tiny"))


def test_statistics_that_cannot_be_saved_keep_no_model_in_memory(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: AcceptanceFile) -> None:
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr(AcceptanceFile, "save", fail)
    pool = make_pool(paths, "tiny llama", room=1)
    with serving(pool) as client:
        for name in ("tiny", "llama", "tiny"):
            text(ask(client, name))
    assert "No space left" in caplog.text


def test_a_failed_load_is_tried_again_after_a_pause(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(model_pool, "monotonic", lambda: now)
    pool = make_pool(paths, "tiny llama")
    loader_of(pool, "llama").fails.set()
    with serving(pool) as client:
        answers = [ask(client, "llama") for _ in range(3)]
        assert "model llama: expected a whole file, found a part" in error(
            answers[0], 503, "model_not_loaded"
        )
        assert [answer.headers["Retry-After"] for answer in answers] == ["30"] * 3
        assert len(loader_of(pool, "llama").attempts) == 1
        assert states(client) == {"tiny": "unloaded", "llama": "failed"}
        assert "a part" in client.get("/v1/models/llama").json()["error"]
        now += 29.5
        assert ask(client, "llama").headers["Retry-After"] == "1"
        now += 0.5
        loader_of(pool, "llama").fails.clear()
        assert text(ask(client, "llama"))
        assert "error" not in client.get("/v1/models/llama").json()


def test_streams_go_on_and_other_models_answer_while_a_model_loads(paths: dict[str, Path]) -> None:
    pool = make_pool(paths, "tiny llama")
    loader_of(pool, "llama").gate.clear()
    with serving(pool) as client, ThreadPoolExecutor(4) as threads:
        body = {
            "prompt": "x",
            "max_tokens": 400,
            "stream": True,
            "model": "tiny",
            "ignore_eos": True,
        }
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            waiting = [threads.submit(ask, client, "llama", seed) for seed in range(3)]
            assert eventually(lambda: states(client)["llama"] == "loading")
            assert client.get("/health").status_code == client.get("/ready").status_code == 200
            assert text(ask(client, "tiny"))
            assert sum(line.startswith("data: {") for line in lines) > 10
        assert not any(each.done() for each in waiting)
        loader_of(pool, "llama").gate.set()
        assert all(text(each.result(HUNG)) for each in waiting)
        assert len(loader_of(pool, "llama").attempts) == 1


def test_a_busy_model_is_unloaded_after_its_request(paths: dict[str, Path]) -> None:
    """A model waits for memory until the request of the other one has ended; a new request of that
    one comes later.
    """
    pool = make_pool(paths, "tiny llama", room=1)

    async def main() -> None:
        order = list[str]()
        pool.preload(pool.find("tiny"))
        async with pool.use("tiny"):
            other = asyncio.ensure_future(_use(pool, "llama", order))
            await until(lambda: pool.find("tiny").retiring)
            later = asyncio.ensure_future(_use(pool, "tiny", order))
            await until(lambda: pool.find("tiny").num_waiting == 1)
            assert pool.find("tiny").state == "loaded"
            assert not other.done()
        await asyncio.gather(other, later)
        assert order == ["llama", "tiny"]
        assert [len(loader_of(pool, name).loads) for name in ("tiny", "llama")] == [2, 1]
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), HUNG))
    pool.finish()


def test_a_client_that_disconnects_leaves_the_queue(paths: dict[str, Path]) -> None:
    pool = make_pool(paths, "tiny llama qwen")
    loader_of(pool, "tiny").gate.clear()
    with serving(pool) as client, ThreadPoolExecutor(2) as threads:
        first = threads.submit(ask, client, "tiny")
        assert eventually(lambda: states(client)["tiny"] == "loading")
        with socket.create_connection(
            (client.base_url.host, client.base_url.port or 80)
        ) as impatient:
            body = b'{"prompt": "x", "model": "llama"}'
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            impatient.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            assert eventually(lambda: pool.find("llama").num_waiting == 1)
        assert eventually(lambda: pool.find("llama").num_waiting == 0)
        loader_of(pool, "tiny").gate.set()
        assert text(first.result(HUNG))
        assert text(ask(client, "qwen"))
        assert not loader_of(pool, "llama").attempts


def test_limits_of_waiting_requests(paths: dict[str, Path]) -> None:
    limits = RequestLimits(requests=2, seconds=0.2)
    pool = make_pool(paths, "tiny llama", limits=limits)
    loader_of(pool, "llama").gate.clear()
    with serving(pool) as client, ThreadPoolExecutor(4) as threads:
        for _ in range(2):
            assert "llama was not loaded by the deadline" in error(
                ask(client, "llama"), 408, "timeout"
            )
        object.__setattr__(limits, "seconds", 2 * HUNG)
        waiting = [threads.submit(ask, client, "llama") for _ in range(2)]
        assert eventually(lambda: pool.find("llama").num_waiting == 2)
        error(ask(client, "llama"), 429, "overloaded")
        loader_of(pool, "llama").gate.set()
        assert all(text(each.result(HUNG)) for each in waiting)
        found = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(client.get("/metrics").text)
            for sample in family.samples
        }
        assert found["pronk:request_failure_total", "llama", "timeout"] == 2
        assert found["pronk:request_failure_total", "llama", "overloaded"] == 1


def test_known_drafters_of_a_model(
    paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loaded model lists heads that are published for it; no folder of the server is named."""
    target = f"owner/{paths['llama'].name}"
    pair = Pair(target, "eagle3", "heads/first", "MIT", "https://example.org/heads")
    monkeypatch.setattr("pronk.models.pairs.all_pairs", lambda: (pair,))
    head = tmp_path / "eagle3"
    found = {Eagle3(str(head)): head}
    with serving(make_pool(paths, "tiny llama")) as client:
        assert "known_drafters" not in client.get("/v1/models/llama").json()
        ask(client, "llama")
        listed = {"drafter": "eagle3", "source": "heads/first", "here": False}
        assert client.get("/v1/models/llama").json()["known_drafters"] == [listed]
        head.mkdir()
        monkeypatch.setattr("pronk.drafting.known_drafters.find_heads", lambda *_: found)
        ask(client, "tiny")
        own = {"drafter": "eagle3", "source": "eagle3", "here": True}
        assert client.get("/v1/models/tiny").json()["known_drafters"] == [own]


def test_names_and_metrics_of_several_models(paths: dict[str, Path]) -> None:
    pool = make_pool(paths, "tiny llama")
    with serving(pool) as client:
        assert states(client) == {"tiny": "unloaded", "llama": "unloaded"}
        message = error(ask(client, "gpt-5"), 404, "model_not_found")
        assert message == "model: expected 'tiny' or 'llama', found 'gpt-5'"
        assert client.get("/v1/models/gpt-5").status_code == 404
        replies = [ask(client, name).json() for name in (None, "LLAMA.gguf", "tiny")]
        assert [reply["model"] for reply in replies] == ["tiny", "llama", "tiny"]
        described = client.get("/v1/models/llama").json()
        assert (described["max_model_len"], described["drafter"], described["state"]) == (
            256,
            "recycling",
            "loaded",
        )
        assert described["bits"] in ("portable", "fast")
        arithmetic = {reply["system_fingerprint"].split("-", 2)[2] for reply in replies}
        assert (f"portable-{BITS}" in arithmetic) == (described["bits"] == "portable")
        for route, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
            assert client.post(route, json=body | {"model": "llama"}).status_code == 200
        scraped = client.get("/metrics").text
        for name, value in (("tiny", 2), ("llama", 1)):
            assert (
                f'vllm:request_success_total{{finished_reason="length",model_name="{name}"}} '
                f"{value}.0" in scraped
            )
            assert f'pronk:model_loaded{{model_name="{name}"}} 1.0' in scraped
            assert f'pronk:model_loads_total{{model_name="{name}",result="loaded"}} 1.0' in scraped


def test_a_model_whose_engine_has_ended_is_loaded_again(paths: dict[str, Path]) -> None:
    pool = make_pool(paths, "tiny llama")
    with serving(pool) as client:
        first = text(ask(client, "tiny"))
        service = pool.find("tiny").service
        assert service is not None
        service.engine.stop()
        assert eventually(lambda: not service.engine.alive)
        assert text(ask(client, "tiny")) == first


def test_a_single_model_whose_engine_has_ended_is_not_ready(paths: dict[str, Path]) -> None:
    pool = make_pool(paths, "tiny", pins=("tiny",))
    pool.preload(pool.models[0])
    with serving(pool) as client:
        assert client.get("/ready").json() == {"status": "ready"}
        service = pool.models[0].service
        assert service is not None
        service.engine.stop()
        assert eventually(lambda: client.get("/ready").status_code == 503)
        assert client.get("/ready").json() == {"status": "not ready"}
        error(ask(client, "tiny"), 503, "closed")


def test_a_request_that_ends_before_the_load_does_not_load(paths: dict[str, Path]) -> None:
    """The loader waits for memory; the only request that needs it is cancelled; the other model
    stays loaded.
    """
    pool = make_pool(paths, "tiny llama", room=1)

    async def main() -> None:
        pool.preload(pool.find("tiny"))
        async with pool.use("tiny"):
            task = asyncio.ensure_future(_use(pool, "llama"))
            await until(lambda: pool.find("tiny").retiring)
            task.cancel()
            await until(lambda: not pool.find("tiny").retiring)
        assert pool.find("llama").state == "unloaded"
        assert pool.find("tiny").state == "loaded"
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), HUNG))
    pool.finish()


KEYS = ("key-of-client-a", "key-of-client-b")


def test_tenants_share_the_places_to_wait_for_a_model(paths: dict[str, Path]) -> None:
    """However many requests of a tenant wait, one of another tenant may wait, too."""
    pool = make_pool(paths, "tiny llama", limits=RequestLimits(requests=8), keys=KEYS)
    gate = loader_of(pool, "llama").gate
    gate.clear()

    async def main() -> None:
        pool.preload(pool.find("tiny"))
        waiting = [asyncio.ensure_future(_use(pool, "llama", tenant="a")) for _ in range(30)]
        await until(lambda: sum(task.done() for task in waiting) == 26)
        other = asyncio.ensure_future(_use(pool, "llama", tenant="b"))
        await _use(pool, "tiny", tenant="a")  # a loaded model needs no place
        gate.set()
        await other
        found = await asyncio.gather(*waiting, return_exceptions=True)
        refused = [str(each) for each in found if each is not None]
        assert len(refused) == 26
        assert {text.partition(",")[0] for text in refused} == {
            "expected at most 4 requests of one key now"
        }
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), HUNG))
    pool.finish()


@pytest.mark.parametrize(
    ("asked", "loaded"),
    [
        ("a1 a2 a3 b1", "a1 b1 a2 a3"),
        ("a1 a2 b1 b2 c1", "a1 b1 c1 a2 b2"),
        ("a1 a2 a3", "a1 a2 a3"),
    ],
)
def test_models_are_loaded_for_tenants_in_turns(
    paths: dict[str, Path], asked: str, loaded: str
) -> None:
    names = asked.split()
    pool = make_pool(dict.fromkeys(names, paths["tiny"]), asked, keys=KEYS)
    gate = loader_of(pool, "a1").gate
    gate.clear()
    order = list[str]()

    async def main() -> None:
        tasks = [asyncio.ensure_future(_use(pool, name, order, tenant=name[0])) for name in names]
        await until(lambda: all(model.num_waiting for model in pool.models))
        gate.set()
        await asyncio.gather(*tasks)
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), HUNG))
    assert " ".join(order) == loaded
    pool.finish()


async def _use(
    pool: ModelPool, name: str, order: list[str] | None = None, tenant: str = ""
) -> None:
    async with pool.use(name, tenant) as (service, _):
        if order is not None:
            order.append(service.settings.name)


def test_names_of_models(paths: dict[str, Path], tmp_path: Path) -> None:
    tiny = str(paths["tiny"])
    llama = str(paths["llama"])
    assert find_models([tiny]) == [("pronk-tiny", paths["tiny"])]
    assert find_models([f"a={tiny}", f"b/c.d={tiny}", llama])[:2] == [
        ("a", paths["tiny"]),
        ("b/c.d", paths["tiny"]),
    ]
    for values in ([tiny, tiny], [f"A={tiny}", f"a.gguf={llama}"], [tiny, f"pronk-tiny={llama}"]):
        with pytest.raises(
            OptionError, match=r"model: expected distinct names, found .*use --model NAME="
        ) as caught:
            find_models(values)
        assert str(paths["tiny"]) in str(caught.value)
    for name in ("one", "two"):
        (tmp_path / name).symlink_to(paths["tiny"])
    (tmp_path / "notes").mkdir()
    assert [name for name, _ in find_models([str(tmp_path)])] == ["one", "two"]
    (tmp_path / "a=b").symlink_to(paths["tiny"])
    assert find_models([str(tmp_path / "a=b")]) == [("a=b", tmp_path / "a=b")]
    with pytest.raises(CheckpointError, match="no such folder: 'nowhere'"):
        find_models(["x=nowhere"])


def test_the_command_serves_several_models() -> None:
    """The first model and the pinned one are loaded at the start, the third one on demand."""
    models = [
        word
        for name in ("pronk-tiny", "pinned=pronk-tiny", "third=pronk-tiny")
        for word in ("--model", name)
    ]
    options = [
        "--pin",
        "pinned",
        "--port",
        "0",
        "--threads",
        "1",
        "--kv-memory",
        "4MiB",
        "--idle-minutes",
        "10",
    ]
    command = [sys.executable, "-m", "pronk", "serve", *models, *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.match(r"pronk-tiny, pinned, third · (http://127\.0\.0\.1:\d+)/v1", line)
            assert found is not None, line + process.stdout.read()
            with httpx.Client(base_url=found[1], timeout=HUNG) as client:
                assert states(client) == {
                    "pronk-tiny": "loaded",
                    "pinned": "loaded",
                    "third": "unloaded",
                }
                texts = {text(ask(client, name)) for name in ("pronk-tiny", "pinned", "third")}
                assert len(texts) == 1
                assert {*states(client).values()} == {"loaded"}
        finally:
            process.terminate()
        assert process.wait(HUNG) == 0
