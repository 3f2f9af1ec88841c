"""Same seed, same tokens when several processes compute the rows of the trees; threads take their
places.
"""

from collections.abc import Sequence
from itertools import product

import pytest

from engine.cases import DRAFTERS, OPTIONS, PROMPTS, assert_same, drafter, plain
from engine.test_equality import VARIANTS, decode
from engine.test_experts import EXPERTS
from lab.drafters import cases as lab
from parallel.dealt import partition_randomly, tree_parallel_engine
from pronk.base.arrays import FLOAT32
from pronk.parallel.result_assembly import ScatteredLogits
from pronk.parallel.runner import TreeRunner
from tiny_models import tiny_decoder

# Cases that are not slow tests, for each result of workers: choices, some logits, all logits,
# layers' outputs.
FAST_CASES = {
    *product(("oracle", "lookahead", "glide", "draft_model"), ("temperature",)),
    ("suffix", "greedy"),
    ("suffix", "guided"),
    ("adversarial", "all"),
}
# Drafters that keep projections in the target's KV cache, which must belong to one process.
IN_ONE_PROCESS = (
    "eagle3",
    "mtp",
    "gemma4_assistant",
    "eagle3 tree",
    "mtp block",
    "assistant in two stages",
)
ON_WORKERS = [
    name for name in {**DRAFTERS, **dict.fromkeys(lab.DRAFTERS)} if name not in IN_ONE_PROCESS
]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(*case, marks=() if case in FAST_CASES else pytest.mark.slow)
        for case in product(ON_WORKERS, OPTIONS)
    ],
)
def test_trees_on_several_workers(name: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes compute the rows; workers send all logits only in steps in which a drafter
    reads them.
    """
    partition_randomly(monkeypatch)
    spec = lab.spec(name) if name in lab.DRAFTERS else name
    want = plain(FLOAT32, options, PROMPTS[:5], 30)
    fetched = {True: 0, False: 0}
    fetch = ScatteredLogits._fetch

    def counting(logits: ScatteredLogits, rows: Sequence[int]) -> None:
        (entry,) = logits._recompute.args  # type: ignore[attr-defined]
        fetched[entry.all_logits] += sum(row in logits.remote_rows for row in rows)
        fetch(logits, rows)

    monkeypatch.setattr(ScatteredLogits, "_fetch", counting)
    with tree_parallel_engine(tiny_decoder(), 3) as engine:
        got = decode(engine, [drafter(spec, want)], options, PROMPTS[:5], 30)
    made = engine.runner
    assert_same(got, want)
    assert isinstance(made, TreeRunner)
    assert len(made.workers) == 2
    assert made.num_shared_passes > 5
    assert fetched[True] == 0
    if not got[0].speculation.capabilities.logits:
        assert (fetched[False] > 0) == (made.num_shared_passes > 0)


@pytest.mark.parametrize("variant", ["gemma", "gemma4", "other deviations", "convolutions"])
def test_deviating_models(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    partition_randomly(monkeypatch)
    shape = VARIANTS[variant]
    want = plain(FLOAT32, "temperature", PROMPTS[:5], 30, **shape)
    with tree_parallel_engine(tiny_decoder(**shape), 3) as engine:
        got = decode(
            engine,
            [drafter(name, want) for name in ("oracle", "adversarial")],
            "temperature",
            PROMPTS[:5],
            30,
        )
    assert_same(got, want)
    assert isinstance(engine.runner, TreeRunner)
    assert engine.runner.num_shared_passes > 5


def test_a_mixture_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    partition_randomly(monkeypatch)
    want = plain(FLOAT32, "temperature", PROMPTS[:5], 30, **EXPERTS)
    with tree_parallel_engine(tiny_decoder(**EXPERTS), 3) as engine:
        got = decode(engine, [drafter("oracle", want)], "temperature", PROMPTS[:5], 30)
    assert_same(got, want)
    assert isinstance(engine.runner, TreeRunner)
    assert engine.runner.num_shared_passes > 5
