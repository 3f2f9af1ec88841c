"""Blocks of the KV cache that torch reads: consecutive and scattered ones."""

import pytest

from engine.cases import PROMPTS, ask, params, plain
from engine.test_memory import finish_with_taken, scatter, watch_runs
from pronk.base.arrays import FLOAT32
from tiny_models import make_engine, tiny_decoder


@pytest.mark.parametrize("scattered", [False, True])
def test_torch_reads_runs_and_scattered_blocks(*, scattered: bool) -> None:
    want = plain(FLOAT32, "greedy")
    engine = make_engine(tiny_decoder(packed=False), num_blocks=800, max_tree=40)
    taken = scatter(engine) if scattered else []
    runs = watch_runs(engine)
    got = [ask(prompt, params("greedy", i)) for i, prompt in enumerate(PROMPTS)]
    finish_with_taken(engine, got, taken)
    assert [request.output for request in got] == [request.output for request in want]
    assert len(runs) > 40
    assert set(runs) == {not scattered}
