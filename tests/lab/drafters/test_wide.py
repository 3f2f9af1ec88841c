"""``auto`` asks lookahead, and adds the siblings of cape, only where rows of a pass are free."""

from pathlib import Path
from typing import Any

import pytest

from drafting.from_draft.drafts import draft_folder
from engine.cases import PROMPTS, ask, assert_same, params, plain, total
from pronk import DraftModel
from pronk.base.arrays import FLOAT32
from pronk.base.errors import OptionError
from pronk.drafting import make_drafter
from pronk.drafting.combined import auto
from pronk.drafting.combined._wide import free_rows
from pronk.drafting.combined.auto import Auto
from pronk.drafting.shared.draft_runner import DraftRunner
from pronk.drafting.shared.vocabulary.translation import Translation
from pronk.drafting.step_costs import StepCosts
from pronk.drafting.target import Target
from pronk.engine.request import Request
from pronk.models.cost_model import CostCurve
from pronk.models.model_runner import ModelRunner
from pronk.sampling.tree_size import MAX_TREE
from tiny_models import Clock, make_engine, run, tiny_decoder

# 64 rows cost as one; 15 do; as on two cores of a CPU, 2 do.
GPU = CostCurve(1.0, 0.36, 0.01)
NARROW = CostCurve(1.0, 0.85, 0.01)
CPU = CostCurve(1.0, 0.7, 0.15)


def test_free_rows() -> None:
    found = [free_rows(StepCosts(curve)) for curve in (GPU, NARROW, CPU)]
    assert found == [64, 15, 2]
    assert free_rows(StepCosts(GPU, 4)) == 16
    assert free_rows(StepCosts(GPU, 128)) == 1
    assert free_rows(StepCosts(CostCurve(1.0, 1.0, 0.0))) == MAX_TREE
    assert free_rows(None) == 1


@pytest.fixture
def draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the target come with a draft model, as heads do."""
    folder = draft_folder(0.0)
    found = {DraftModel(model=folder): Path(folder)}
    monkeypatch.setattr(auto, "find_heads", lambda *_: found)
    # A pass of the draft model costs little, although it is as large as the target.
    monkeypatch.setattr("pronk.drafting.from_draft.draft_model.DraftRunner", cheap_runner)


def cheap_runner(
    runner: ModelRunner, translation: Translation, target: Target, _: float
) -> DraftRunner:
    return DraftRunner(runner, translation, target, 0.001)


def decode(curve: CostCurve, options: str = "greedy", **settings: Any) -> list[Request]:
    """Decode all prompts together with ``auto``, by a clock that stands still."""
    engine = make_engine(tiny_decoder(), costs=curve, clock=Clock(), **settings)
    drafter = Auto().bind(engine.target)
    got = [ask(prompt, params(options, i), drafter) for i, prompt in enumerate(PROMPTS)]
    run(engine, got)
    assert_same(got, plain(FLOAT32, options))
    return got


def proposed(requests: list[Request]) -> set[str]:
    """Return the labels of the drafters with verified draft tokens, without paths of models."""
    return {source.split()[0] for request in requests for source in request.stats.sources}


@pytest.mark.usefixtures("draft")
def test_wide_steps_have_lookahead_and_siblings() -> None:
    curve = CostCurve(1.0, 1.0, 0.0)
    got = decode(curve)
    assert {"lookahead", "draft_model", "cape(draft_model"} <= proposed(got)
    assert total(got, "accepted") > 0


@pytest.mark.usefixtures("draft")
@pytest.mark.parametrize("curve", [NARROW, CPU], ids=["15 rows", "2 rows"])
def test_other_steps_are_those_without_these_drafters(
    curve: CostCurve, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = decode(curve, max_batch=1)
    assert "draft_model" in proposed(got)
    assert not {"lookahead", "cape(draft_model"} & proposed(got)
    make = make_drafter

    def without(name: Any) -> Any:
        if name in ("lookahead", "cape"):
            raise OptionError(name)
        return make(name)

    monkeypatch.setattr(auto, "make_drafter", without)
    other = decode(curve, max_batch=1)
    assert [each.stats.sources for each in got] == [each.stats.sources for each in other]
    assert [each.stats.target_steps for each in got] == [each.stats.target_steps for each in other]


def test_a_window_larger_than_the_usual_tree_is_kept() -> None:
    """Rows that are free do not count towards ``num_nodes``."""
    engine = make_engine(tiny_decoder(), costs=CostCurve(1.0, 1.0, 0.0), clock=Clock())
    drafter = make_drafter("auto(num_nodes=1)").bind(engine.target)
    got = [ask(prompt, params("repetitive", i), drafter) for i, prompt in enumerate(PROMPTS)]
    run(engine, got)
    assert_same(got, plain(FLOAT32, "repetitive"))
    assert total(got, "drafted") > total(got, "target_steps")
