"""``benchmarks/passes.py``: calls of the compiled libraries in a step, and the time outside."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from drafting.from_target.trained_eagle import write_random_head
from pronk import LLM, SamplingParams
from pronk.checkpoint.hub.clone_models import tiny_model

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
RECOMMENDED: dict[str, Any] = {
    "temperature": 0.7,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
}


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("passes")


@pytest.fixture
def llm() -> LLM:
    return LLM(str(tiny_model()), drafter="autoregressive", budget="all", threads=1)


def calls_of_a_step(passes: Any, llm: LLM, drafter: str, **options: Any) -> float:
    """Return the calls of the libraries of a later step, from texts of 8 and of 16 tokens."""
    found = list[tuple[int, int]]()
    for tokens in (8, 16):
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1, **options)
        with passes.LibraryCalls(llm) as calls:
            stats = llm.generate("def f(x):", params, drafter=drafter).stats
        assert calls.seconds > 0.0
        found.append((calls.count, stats.target_steps))
    (count, steps), (more_count, more_steps) = found
    assert more_steps > steps
    return (more_count - count) / (more_steps - steps)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, RECOMMENDED], ids=["greedy", "sampled"])
def test_a_step_of_a_head_is_two_calls(
    passes: Any, llm: LLM, options: dict[str, Any], tmp_path: Path
) -> None:
    """They are the pass with the choice of all tokens, and the next chain; a plain step is one."""
    assert calls_of_a_step(passes, llm, "autoregressive", **options) == 1.0
    head = write_random_head(llm, tmp_path)
    drafter = f"eagle3(model={str(head)!r}, num_tokens=3)"
    llm.generate("def f(x):", SamplingParams(max_tokens=2), drafter=drafter)  # loads the head
    assert calls_of_a_step(passes, llm, drafter, **options) == 2.0


@pytest.mark.parametrize("options", [{"temperature": 0.0}, RECOMMENDED], ids=["greedy", "sampled"])
def test_a_step_of_suffix_is_two_calls(passes: Any, llm: LLM, options: dict[str, Any]) -> None:
    """They are the lookup, which also indexes the new tokens, and the pass."""
    drafter = "suffix(store_tokens=0)"
    assert calls_of_a_step(passes, llm, drafter, **options) == 2.0


def test_the_libraries_are_as_before(passes: Any, llm: LLM) -> None:
    library = llm.engine.runner.decoder.kernels.library
    before = library.pronk_run
    with passes.LibraryCalls(llm):
        assert library.pronk_run is not before
    assert library.pronk_run is before


def test_times_of_a_step(passes: Any, llm: LLM) -> None:
    found = passes.step_times(llm, 4, "autoregressive")
    assert found["calls"] == 1.0
    assert found["inside"] > 0.0
    assert found["outside"] > 0.0
