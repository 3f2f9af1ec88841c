from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pronk.errors import CheckpointError, OptionError, PronkError
from pronk.train.lm import LanguageModel
from pronk.train.loop import Report, Trainer
from pronk.train.optim import Optimizers
from train.kinds import train
from train.tiny import SHAPE, TINY, lm_trainer


def test_loss_falls(new_run: Callable[[str], Path]) -> None:
    reports: list[Report] = []
    evaluated: list[int] = []
    trainer = lm_trainer(new_run("run"), TINY)
    trainer.train(reports.append, lambda news: evaluated.append(news.step))
    assert trainer.finished
    assert [report.step for report in reports] == [3, 6, 9, 12]
    assert evaluated == [6, 12]
    assert reports[0].loss == pytest.approx(np.log(SHAPE.vocab), rel=0.1)
    assert reports[-1].loss < reports[0].loss - 1
    assert set(reports[-1].valid) == {"stories", "code", "extra"}
    assert all(reports[-1].valid[name] < reports[1].valid[name] for name in reports[-1].valid)
    assert trainer.tokens == reports[-1].tokens == 12 * 256


def test_accumulated_passes_are_one_batch(new_run: Callable[[str], Path]) -> None:
    one = train(lm_trainer(new_run("one"), replace(TINY, steps=3, micro=256, final_share=0.0, evaluate_every=9)))
    two = train(lm_trainer(new_run("two"), replace(TINY, steps=3, micro=64, final_share=0.0, evaluate_every=9)))
    assert one.history[0]["loss"] == pytest.approx(two.history[0]["loss"], rel=2e-3)
    assert one.history[0]["norm"] == pytest.approx(two.history[0]["norm"], rel=2e-2)


def test_time_limit_ends_the_run_with_its_schedule(new_run: Callable[[str], Path]) -> None:
    trainer = lm_trainer(new_run("run"), replace(TINY, steps=10_000, minutes=0.02, final_share=0.5, log_every=1))
    trainer.train(lambda _: None, lambda _: None)
    assert trainer.finished
    assert trainer.step < 10_000
    assert trainer.history[-1]["rate"] < 0.5 * TINY.rate
    assert all(trainer.done)


def test_checkpoint_of_other_options_is_refused(new_run: Callable[[str], Path]) -> None:
    folder = new_run("run")
    train(lm_trainer(folder, TINY), stop_at=1)
    with pytest.raises(OptionError, match=r"expected lr = 0\.01 as before, found 0\.5"):
        lm_trainer(folder, replace(TINY, rate=0.5))
    with pytest.raises(OptionError, match=r"expected shape layers = 2 as before, found 1; use another --out folder"):
        lm_trainer(folder, replace(TINY, shape=replace(SHAPE, layers=1)))
    lm_trainer(folder, replace(TINY, minutes=5.0, evaluate_every=7))  # these may change


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None])
def test_damaged_checkpoint_is_refused(new_run: Callable[[str], Path], content: bytes | None) -> None:
    folder = new_run("run")
    train(lm_trainer(folder, TINY), stop_at=1)
    path = folder / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-1000] if content is None else content)
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt: expected a training checkpoint, found"):
        lm_trainer(folder, TINY)


def test_checkpoint_of_another_kind_is_refused(new_run: Callable[[str], Path]) -> None:
    folder = new_run("run")
    torch.save({"format": "other"}, folder / "checkpoint.pt")
    with pytest.raises(CheckpointError, match="expected a training checkpoint of format pronk-train-1, found 'other'"):
        lm_trainer(folder, TINY)


def test_divergence_is_named_and_not_saved(new_run: Callable[[str], Path]) -> None:
    folder = new_run("run")
    trainer = train(lm_trainer(folder, TINY), stop_at=2)
    with torch.no_grad():
        trainer.objective.module.embedding.fill_(float("nan"))
    with pytest.raises(PronkError, match=r"step 3: expected a finite loss, found nan; use a lower --lr than 0\.01"):
        trainer.train(lambda _: None, lambda _: None)
    assert lm_trainer(folder, TINY).step == 2


class Judged:
    """An objective whose evaluations find what they are told to."""

    def __init__(self, inner: LanguageModel, figures: list[float]) -> None:
        self.inner, self.figures = inner, iter(figures)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def evaluate(self, length: int, seconds: float) -> dict[str, float]:
        return {"text": next(self.figures)}


FIGURES = [3.0, 2.0, 2.5, 1.5, 1.5, 1.75, 1.6, 1.0, 0.5]


@pytest.mark.parametrize(("patience", "last"), [(1, 3), (2, 6), (3, 7), (4, 9), (None, 9)])
def test_run_ends_when_it_gets_no_better(new_run: Callable[[str], Path], patience: int | None, last: int) -> None:
    options = replace(TINY, steps=9, evaluate_every=1, log_every=1, patience=patience)
    folder = new_run("run")
    trainer = Trainer(folder, options, Judged(LanguageModel(folder, options), FIGURES))
    trainer.train(lambda _: None, lambda _: None)
    assert trainer.finished
    assert trainer.step == last
    assert trainer.stopped_early == (last < 9)


def test_patience_is_the_same_for_a_resumed_run(new_run: Callable[[str], Path]) -> None:
    options = replace(TINY, steps=9, evaluate_every=1, log_every=1, patience=3)
    folder = new_run("run")
    for begin, stop in ((0, 2), (2, 5), (5, 9)):
        trainer = Trainer(folder, options, Judged(LanguageModel(folder, options), FIGURES[begin:]))
        trainer.train(lambda _: None, lambda _: None, lambda stop=stop, trainer=trainer: trainer.step == stop)
    assert trainer.step == 7
    assert trainer.stopped_early
    assert min(trainer.judged, key=lambda each: each[1]) == (4, 1.5)
    # More patience, and it goes on.
    options = replace(options, patience=5)
    trainer = Trainer(folder, options, Judged(LanguageModel(folder, options), FIGURES[7:]))
    assert not trainer.finished
    trainer.train(lambda _: None, lambda _: None)
    assert trainer.step == 9


def test_patience_needs_held_out_text(new_run: Callable[[str], Path], tmp_path: Path) -> None:
    options = replace(TINY, patience=1)
    trainer = lm_trainer(new_run("run"), options)
    trainer.objective.data = tmp_path / "nothing"
    with pytest.raises(OptionError, match="patience: expected held-out text to go by, found none; give more text"):
        trainer.train(lambda _: None, lambda _: None)


class Some(nn.Module):
    def __init__(self, names: str) -> None:
        super().__init__()
        self.layers = nn.ParameterDict({n: torch.ones(3, 2) for n in names if n.islower()})
        self.rest = nn.ParameterDict({n: torch.ones(2) for n in names if n.isupper()})


@pytest.mark.parametrize("names", ["ab", "A", "abAB"])
@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_optimizers_take_what_there_is(names: str, kind: str) -> None:
    model = Some(names)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    last = list(model.parameters())[-1]
    last.grad = None  # a part that was not used in this step
    optimizers = Optimizers(model, kind, 0.1)
    optimizers.step(0.1)
    assert torch.equal(last, torch.ones_like(last))
    assert all(not torch.equal(p, torch.ones_like(p)) for p in model.parameters() if p is not last)
    again = Optimizers(model, kind, 0.1)
    again.load_state_dict(optimizers.state_dict())
    last.grad = torch.ones_like(last)
    again.step(0.1)
    assert not torch.equal(last, torch.ones_like(last))


def test_muon_is_for_the_matrices_of_layers_alone() -> None:
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(4, 2),
            "layers": nn.ModuleList([nn.Linear(2, 3), nn.Linear(2, 3)]),
            "inner": nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(3, 2, bias=False)])}),
        }
    )
    model["layers"][1].requires_grad_(False)
    muon, adamw = Optimizers(model, "muon", 0.1).state_dict()
    assert [len(group["params"]) for group in muon["param_groups"]] == [2]
    assert [len(group["params"]) for group in adamw["param_groups"]] == [2]
