"""Whole benchmarks on pronk-tiny: reproducible counts, records, peers, early ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import MakeCheckpoint
from lab.bench.bench_cases import DRAFTER, figures, pronk_tiny
from pronk import diagnosis
from pronk.base.arrays import FLOAT32
from pronk.base.errors import CheckpointError
from pronk.cache.layout import kv_bytes_per_token
from pronk.checkpoint.tensors import Checkpoint
from pronk.drafting import PromptLookup
from pronk.lab.bench import measure, run
from pronk.lab.bench.figures import summarize
from pronk.lab.bench.machine import PeakMemory
from pronk.lab.bench.measure import Options
from pronk.lab.bench.methods import DrafterMethod, Item
from pronk.lab.bench.peers.engines.contract import PeerRequest, PeerResult
from pronk.lab.bench.peers.process import PEERS, PeerError, PeerSpec
from pronk.lab.bench.prompts import Prompt
from pronk.lab.bench.records import (
    PLAIN,
    Bandwidth,
    DivergenceRecord,
    End,
    Model,
    PassTime,
    PeerRecord,
    Sample,
    Start,
    Trace,
)
from pronk.lab.bench.run import Plan
from pronk.llm import LLM
from pronk.models.decoder import forward_weights
from pronk.sampling.params import SamplingParams
from tiny_models import kernels

TASKS = {
    "code": [Prompt("sum", "code", text="total = a + b + c\nprint(total)\ntotal = a + b +")],
    "chat": [Prompt("count", "chat", turns=("Say: one two three one two three one two", "Again."))],
}
OPTIONS = Options(max_tokens=12, repeats=2, ignore_eos=True)
LOOKUP = "prompt_lookup(min_ngram=1)"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read little memory and time few forward passes."""
    monkeypatch.setattr(diagnosis, "_BUFFER_BYTES", 2**20)
    monkeypatch.setattr(measure, "_ROUNDS", 1)
    monkeypatch.setattr(measure, "ROWS", (1, 4))


def plan(*drafters: str, peers: tuple[str, ...] = (), tasks: Any = TASKS, **options: Any) -> Plan:
    return Plan(drafters, tasks, replace(OPTIONS, **options), tuple(PEERS[peer] for peer in peers))


def measured(made: Plan, progress: run.Progress = lambda *_: None) -> Trace:
    trace = Trace()
    run.run({"tiny": lambda _: pronk_tiny()}, made, trace, {"seed": 7, "device": "cpu"}, progress)
    return trace


@cache
def usual(time: int) -> tuple[Trace, list[tuple[str, int, int]]]:
    """Run the benchmark that several tests share, once per ``time``; return its trace and its
    progress calls.
    """
    progress_calls: list[tuple[str, int, int]] = []
    return measured(
        plan(LOOKUP, PLAIN, LOOKUP), lambda *what: progress_calls.append(what)
    ), progress_calls


def of(trace: Trace, kind: type[Any]) -> list[Any]:
    return [record for record in trace.records if isinstance(record, kind)]


def test_tokens_and_counts_are_reproducible() -> None:
    """Draft tokens are accepted and change no token."""
    first, second = (usual(time)[0] for time in (1, 2))
    outputs = [
        [(s.id, s.method, s.temperature, s.repeat, s.seed, s.tokens) for s in of(t, Sample)]
        for t in (first, second)
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 3 * 2 * 2 * 2
    assert not of(first, DivergenceRecord)
    for temperature in (0.0, 0.8):
        found, again = (
            figures(summarize(trace.records), LOOKUP, "all", temperature)
            for trace in (first, second)
        )
        counts = [
            (f.S, f.alpha, f.drafted, f.accepted, f.acceptance, f.steps, f.tokens)
            for f in (found, again)
        ]
        assert counts[0] == counts[1]
        assert (found.same, found.compared) == (3, 3)
        assert found.accepted
        assert found.S is not None
        assert found.S > 1
        assert found.alpha is not None
        assert 0 < found.alpha <= 1
    tokens = {s.tokens for s in of(first, Sample)}
    assert len(tokens) == 6  # all outputs differ: 3 turns at 2 temperatures


def test_records_of_a_benchmark() -> None:
    trace, progress_calls = usual(1)
    kinds = [type(record) for record in trace.records]
    assert kinds[:4] == [Start, Model, PassTime, PassTime]
    assert kinds[-1] is End
    assert (kinds.count(Start), kinds.count(Model), kinds.count(End)) == (1, 1, 1)
    assert {record.rows for record in of(trace, PassTime)} == {1, 4}
    assert len(of(trace, Bandwidth)) == 6  # one measurement per turn (3) and temperature (2)
    assert (of(trace, End)[0].interrupted, of(trace, Start)[0].arguments) == (
        False,
        {"seed": 7, "device": "cpu"},
    )
    assert progress_calls[-1] == ("tiny", 24, 24)

    (one,) = of(trace, Model)
    stored = Checkpoint(pronk_tiny().path)
    assert one.parameters == sum(math.prod(stored.shape(name)) for name in stored)
    assert (one.kv_bytes_per_token, one.dtype, one.context) == (
        2 * 8 * 2 * 32 * 2,
        "bfloat16",
        2048,
    )
    assert (one.methods, one.inflated) == ((PLAIN, LOOKUP), None)
    assert one.kernels == kernels().name


def test_clocks_of_a_sample_are_consistent() -> None:
    for sample in of(usual(1)[0], Sample):
        assert sample.error is None
        assert sample.steps
        assert sum(step.tokens for step in sample.steps) == len(sample.tokens) == 12
        last = sample.steps[-1]
        assert 0 < last.target_clock <= last.clock <= sample.total_seconds <= sample.seconds
        assert last.draft_clock + last.target_clock <= last.clock
        assert sample.ttft == sample.steps[0].clock
        assert sample.prompt_tokens > 5


def test_the_time_of_a_batch_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = pronk_tiny()
    num_steps = 0
    step = llm.engine.step

    def counted() -> None:
        nonlocal num_steps
        num_steps += 1
        step()

    monkeypatch.setattr(llm.engine, "step", counted)
    item = Item(
        [5, 6, 7],
        SamplingParams(max_tokens=8, ignore_eos=True),
        Sample("t", "x", "", "", 0.0, 0, 0),
    )
    items = [replace(item, ids=[5, 6, i], sample=replace(item.sample, id=str(i))) for i in range(3)]
    done = DrafterMethod(llm, PLAIN, PeakMemory("cpu")).run(items)
    assert [s.id for s in done] == ["0", "1", "2"]
    assert len({s.seconds for s in done}) == 1
    whole = sum(s.seconds for s in done)
    assert max(s.total_seconds for s in done) <= whole
    assert num_steps <= 2 * 8, "the requests ran in one batch"
    assert [list(s.tokens) for s in done] == [
        llm.generate(i.ids, i.params, drafter=PLAIN).token_ids for i in items
    ]


def test_a_sample_has_the_actual_size_of_its_batch() -> None:
    trace = measured(plan(batch=512, repeats=1, temperatures=(0.0,), tasks={"code": TASKS["code"]}))
    assert [sample.batch for sample in of(trace, Sample)] == [1]


def test_a_drafter_that_raises_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine decodes its requests without draft tokens, so their times must not count as the
    drafter's.
    """

    def propose(self: PromptLookup, contexts: Sequence[Any]) -> None:
        raise ValueError("no\nguess")

    monkeypatch.setattr(PromptLookup, "propose", propose)
    trace = measured(plan("prompt_lookup"))
    errors = {(sample.method, sample.error) for sample in of(trace, Sample)}
    found = "found ValueError: no guess; nothing was measured, fix the drafter"
    assert errors == {(PLAIN, None), ("prompt_lookup", f"drafter: expected no exception, {found}")}


def test_float16_weights(checkpoint: MakeCheckpoint, fake: type[FakePeer]) -> None:
    """The kernels widen the weights; keys and values are float32, and peers get float16."""
    folder = checkpoint("llama", save_dtype=torch.float16)
    trace = Trace()
    llm = LLM(folder, kv_memory="4MiB", budget="all")
    made = plan(LOOKUP, peers=("openvino",), repeats=1, temperatures=(0.0,))
    run.run({"half": lambda _: llm}, made, trace, {})
    (one,) = of(trace, Model)
    assert (one.dtype, llm.engine.runner.dtype) == ("float16", FLOAT32)
    weights = forward_weights(llm.engine.runner.decoder)
    assert (one.weights, one.pass_bytes) == ("float16", weights.floor_bytes)
    assert weights.floor_bytes < weights.nbytes  # padding is not in the file
    # padding adds some bits: heads of 8 outputs become 16
    assert one.weight_bits == pytest.approx(16, rel=0.2)
    assert one.kv_bytes_per_token == kv_bytes_per_token(llm.config, FLOAT32)
    assert fake.made[0].options["dtype"] == "float16"
    assert figures(summarize(trace.records), LOOKUP).same == 3


class FakePeer:
    """A peer that answers at once and records its requests."""

    made: list[FakePeer]
    error: BaseException | None = None

    def __init__(self, spec: PeerSpec, path: Path, **options: Any) -> None:
        self.spec = spec
        self.name = spec.name
        self.path = path
        self.options = options
        self.asked: list[PeerRequest] = []
        self.open = False
        FakePeer.made.append(self)

    def load(self) -> dict[str, str]:
        self.open = True
        if FakePeer.error is not None:
            raise FakePeer.error
        return {"engine": "9.9", "threads": "1"}

    def generate(self, request: PeerRequest) -> PeerResult:
        self.asked.append(request)
        if len(self.asked) == 3:
            raise PeerError("the worker ended")
        return PeerResult([5] * request.max_tokens, 0.5, 0.1, 4096)

    def close(self) -> None:
        self.open = False


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakePeer]:
    FakePeer.made = []
    FakePeer.error = None
    monkeypatch.setattr(run, "Peer", FakePeer)
    return FakePeer


def test_records_of_a_peer(fake: type[FakePeer]) -> None:
    trace = measured(plan(DRAFTER, peers=("openvino",), tasks={"code": TASKS["code"]}))
    (peer,) = fake.made
    assert not peer.open
    assert peer.path == pronk_tiny().path
    expected = {"dtype": "bfloat16", "threads": 1, "python": None}
    assert {key: peer.options[key] for key in expected} == expected
    [record] = of(trace, PeerRecord)
    assert float(record.notes.pop("load_seconds")) >= 0
    assert record == PeerRecord("openvino", {"engine": "9.9", "threads": "1"})
    assert of(trace, Model)[0].methods == (PLAIN, DRAFTER, "openvino")
    request = peer.asked[1]
    assert (request.max_tokens, request.ignore_eos, request.temperature) == (12, True, 0.0)
    assert request.prompt == pronk_tiny().tokenizer.encode(str(TASKS["code"][0].text))
    greedy, failed, *sampled = [s for s in of(trace, Sample) if s.method == "openvino"]
    assert (greedy.engine, greedy.seconds, greedy.ttft, greedy.peak_memory) == (
        "openvino",
        0.5,
        0.1,
        4096,
    )
    assert (greedy.tokens, greedy.steps, greedy.prompt_tokens) == (
        (5,) * 12,
        None,
        len(request.prompt),
    )
    assert (failed.error, failed.tokens) == ("the worker ended", ())
    assert [s.seed for s in sampled] == [r.seed for r in peer.asked[3:]]
    parted = of(trace, DivergenceRecord)
    assert [(d.method, d.temperature) for d in parted] == [("openvino", 0.0)]


def test_a_peer_that_cannot_start_fails_at_every_prompt(fake: type[FakePeer]) -> None:
    fake.error = PeerError("openvino: no package openvino_genai")
    trace = measured(plan(DRAFTER, peers=("openvino",), tasks={"code": TASKS["code"]}))
    assert not fake.made[0].open
    assert of(trace, PeerRecord) == [
        PeerRecord("openvino", {"error": "openvino: no package openvino_genai"})
    ]
    found = summarize(trace.records)
    assert figures(found, "openvino").prompts == 0
    assert figures(found, "openvino").asked == 1
    assert {f.reason for f in figures(found, "openvino").failures} == {
        "openvino: no package openvino_genai"
    }
    assert figures(found, DRAFTER).prompts == 1


@pytest.mark.parametrize("where", ["load", "generate"])
def test_peers_are_closed_after_an_interrupt(
    fake: type[FakePeer], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    if where == "load":
        fake.error = KeyboardInterrupt()
    else:
        monkeypatch.setattr(fake, "generate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        measured(plan(peers=("openvino",)))
    assert [peer.open for peer in fake.made] == [False]


def interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_a_model_that_cannot_be_loaded() -> None:
    def refuse(_: Any) -> LLM:
        raise CheckpointError("no such folder")

    trace = Trace()
    with pytest.raises(CheckpointError):
        run.run({"none": refuse}, plan(), trace, {})
    assert trace.records == []
    few = plan(tasks={"code": TASKS["code"]}, repeats=1, temperatures=(0.0,))
    with pytest.raises(CheckpointError):
        run.run({"tiny": lambda _: pronk_tiny(), "none": refuse}, few, trace, {})
    assert len(of(trace, Sample)) == 1
    assert summarize(trace.records).interrupted


def test_a_valid_plan_passes_the_check() -> None:
    run.check(plan(LOOKUP, batch=4))
    run.check(plan(peers=("transformers",)))
