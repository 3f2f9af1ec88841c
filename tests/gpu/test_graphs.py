"""Recorded functions: when they are recorded again, with a recorder that needs no GPU."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from gpu.tiny_gpu import DEVICE, gpu_runner
from pronk.cache.blocks import BlockTable
from pronk.checkpoint import rope
from pronk.gpu import graphs as module
from pronk.gpu import runner as runner_module
from pronk.gpu.graphs import GraphClock, Graphs, Inputs
from pronk.gpu.runner import GpuRunner
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.layer_executor import ChainJob
from pronk.sampling.params import SamplingParams
from pronk.sampling.tree import TokenTree
from tiny_models import make_request

pytestmark = pytest.mark.usefixtures("small_tiles")


class Replay:
    """A recorded function, which is called at each replay."""

    def __init__(self, function: Callable[[Inputs], Any]) -> None:
        self._function = function

    def replay(self, inputs: Inputs) -> Any:
        return self._function([part.to(DEVICE) for part in inputs])


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Replace the recorder; return a list that gets the inputs of each recording."""
    found = list[list[int]]()

    class Recorder:
        def record(self, function: Callable[[Inputs], Any], inputs: Inputs) -> Replay:
            found.append(inputs[0].tolist())
            return Replay(function)

    monkeypatch.setattr(module, "_Recorder", Recorder)
    return found


def recording_graphs(version: Callable[[], int], clock: GraphClock | None = None) -> Graphs[int]:
    graphs = Graphs[int](DEVICE, version, clock or GraphClock())
    graphs.records = True
    return graphs


def first(inputs: Inputs) -> int:
    return int(inputs[0][0])


def run(graphs: Graphs[int], key: int) -> None:
    assert graphs.run(key, first, [torch.tensor([key])]) == key


def test_a_function_is_recorded_once(recorded: list[list[int]]) -> None:
    graphs = recording_graphs(lambda: 1)
    for key in (3, 4, 3):
        run(graphs, key)
    assert recorded == [[3], [4]]


def test_graphs_of_replaced_tensors_are_dropped(recorded: list[list[int]]) -> None:
    versions = [0]
    graphs = recording_graphs(lambda: versions[-1])
    run(graphs, 3)
    versions.append(1)
    run(graphs, 3)
    run(graphs, 3)
    assert recorded == [[3], [3]]


def test_the_graph_that_was_not_used_for_longest_is_dropped(
    recorded: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_GRAPHS", 2)
    graphs = recording_graphs(lambda: 0)
    for key in (1, 2, 1, 3, 1, 2):
        run(graphs, key)
    assert recorded == [[1], [2], [3], [2]]


def test_a_clock_stands_still_during_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    clock = GraphClock(lambda: now[0])

    class Recorder:
        def record(self, function: Callable[[Inputs], Any], inputs: Inputs) -> Replay:
            del inputs
            now[0] += 5.0
            return Replay(function)

    monkeypatch.setattr(module, "_Recorder", Recorder)
    graphs = recording_graphs(lambda: 0, clock)
    began = clock()
    run(graphs, 1)
    now[0] += 0.5
    run(graphs, 1)
    assert clock() - began == 0.5


def entry_of(runner: GpuRunner, tokens: Sequence[int]) -> BatchEntry:
    """Return an entry of tokens that are not cached, with logits of the last one."""
    table = BlockTable()
    runner.cache.prepare(table, len(tokens))
    return BatchEntry(table, TokenTree.chain(tokens), range(len(tokens) - 1, len(tokens)))


def test_longer_texts_replace_the_tables_of_graphs(
    recorded: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short step and chain, a longer prompt without a graph, then the short step and chain."""
    monkeypatch.setattr(rope, "_INITIAL_POSITIONS", 16)
    runner = gpu_runner(heads=2, kv_heads=1, windows=(None,))
    chains = runner.device_executor.chains
    runner.steps.graphs.records = True
    chains.graphs.records = True
    sampler = make_request([5], SamplingParams()).sampler

    def decode_short() -> None:
        entry = entry_of(runner, [5])
        runner.forward(ForwardBatch([entry]))
        chains.draft([ChainJob(entry, sampler, 1, lambda _: False)])
        runner.cache.release(entry.block_table)

    decode_short()
    decode_short()
    assert len(recorded) == 2
    runner.run_first_layers(ForwardBatch([entry_of(runner, [7] * 40)]), 1)
    decode_short()
    assert len(recorded) == 4


def test_a_new_pool_replaces_the_tensors_of_graphs(recorded: list[list[int]]) -> None:
    runner = gpu_runner(heads=2, kv_heads=1, windows=(None,))
    runner.steps.graphs.records = True
    for _ in range(2):
        runner.forward(ForwardBatch([entry_of(runner, [5])]))
        runner.cache.resize(8)
    assert len(recorded) == 2


def test_durations_include_the_work_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    runner = gpu_runner(heads=2, kv_heads=1, windows=(None,))
    monkeypatch.setattr(runner, "clock", lambda: now[0])

    def wait(device: torch.device) -> None:
        assert device == DEVICE
        now[0] += 3.0

    monkeypatch.setattr(runner_module, "wait_for_device", wait)
    assert runner.forward(ForwardBatch([entry_of(runner, [5])])).seconds == 3.0
