from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pronk.base.errors import CheckpointError, OptionError, PronkError
from pronk.train.loop import Report, Trainer
from pronk.train.optim import Optimizers
from train.kinds import Start, train
from train.tiny import SHAPE, TINY


def test_loss_falls(start: Start) -> None:
    reports: list[Report] = []
    evaluated: list[int] = []
    trainer = start("lm")
    trainer.train(reports.append, lambda news: evaluated.append(news.step))
    assert trainer.is_finished
    assert [report.step for report in reports] == [3, 6, 9, 12]
    assert evaluated == [6, 12]
    assert reports[0].loss == pytest.approx(np.log(SHAPE.vocab), rel=0.1)
    assert reports[-1].loss < reports[0].loss - 1
    assert set(reports[-1].valid) == {"stories", "code", "extra"}
    assert all(reports[-1].valid[name] < reports[1].valid[name] for name in reports[-1].valid)
    assert trainer.tokens == reports[-1].tokens == 12 * 256


def test_accumulated_passes_are_one_batch(start: Start) -> None:
    one, two = (
        train(
            start("lm", f"{micro}", steps=3, micro=micro, final_share=0.0, evaluate_every=9)
        ).history[0]
        for micro in (256, 64)
    )
    assert one["loss"] == pytest.approx(two["loss"], rel=2e-3)
    assert one["norm"] == pytest.approx(two["norm"], rel=2e-2)


def test_time_limit_ends_the_run_with_its_schedule(start: Start) -> None:
    trainer = train(start("lm", steps=10_000, minutes=0.02, final_share=0.5, log_every=1))
    assert trainer.is_finished
    assert trainer.step < 10_000
    assert trainer.history[-1]["rate"] < 0.5 * TINY.rate
    assert all(trainer.phase_steps)


def test_checkpoint_of_other_options_is_refused(start: Start) -> None:
    train(start("lm"), stop_at=1)
    with pytest.raises(OptionError, match=r"expected lr = 0\.01 as before, found 0\.5"):
        start("lm", rate=0.5)
    with pytest.raises(
        OptionError, match=r"expected shape layers = 2 as before, found 1; use another --out folder"
    ):
        start("lm", shape=replace(SHAPE, layers=1))
    start("lm", minutes=5.0, evaluate_every=7)  # these may change


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None])
def test_damaged_checkpoint_is_refused(start: Start, content: bytes | None) -> None:
    path = train(start("lm"), stop_at=1).checkpoint
    path.write_bytes(path.read_bytes()[:-1000] if content is None else content)
    with pytest.raises(
        CheckpointError, match=r"checkpoint\.pt: expected a training checkpoint, found"
    ):
        start("lm")


def test_checkpoint_of_another_kind_is_refused(start: Start) -> None:
    torch.save({"format": "other"}, start("lm").checkpoint)
    with pytest.raises(
        CheckpointError,
        match="expected a training checkpoint of format pronk-train-1, found 'other'",
    ):
        start("lm")


def test_unknown_device_is_named(start: Start) -> None:
    message = "device: expected one that this machine has, for example cpu, found 'abacus'"
    with pytest.raises(OptionError, match=message):
        start("lm", device="abacus")


def test_divergence_is_named_and_not_saved(start: Start) -> None:
    trainer = train(start("lm"), stop_at=2)
    with torch.no_grad():
        trainer.objective.module.embedding.fill_(float("nan"))
    with pytest.raises(
        PronkError, match=r"step 3: expected a finite loss, found nan; use a lower --lr than 0\.01"
    ):
        train(trainer)
    assert start("lm").step == 2


FIGURES = [3.0, 2.0, 2.5, 1.5, 1.5, 1.75, 1.6, 1.0, 0.5]


def judged(start: Start, patience: int | None, figures: list[float] = FIGURES) -> Trainer[Any]:
    """Begin or resume a run whose evaluations return the given figures."""
    trainer = start("lm", steps=9, evaluate_every=1, log_every=1, patience=patience)
    values = iter(figures)
    trainer.objective.evaluate = lambda length, seconds: {"text": next(values)}
    return trainer


@pytest.mark.parametrize(("patience", "last"), [(1, 3), (2, 6), (3, 7), (4, 9), (None, 9)])
def test_run_ends_when_it_gets_no_better(start: Start, patience: int | None, last: int) -> None:
    trainer = train(judged(start, patience))
    assert trainer.is_finished
    assert trainer.step == last
    assert trainer.stopped_early == (last < 9)


def test_patience_is_the_same_for_a_resumed_run(start: Start) -> None:
    for begin, stop in ((0, 2), (2, 5), (5, 9)):
        trainer = train(judged(start, 3, FIGURES[begin:]), stop_at=stop)
    assert trainer.step == 7
    assert trainer.stopped_early
    assert min(trainer.judgements, key=lambda each: each[1]) == (4, 1.5)
    # With more patience, the run continues.
    trainer = judged(start, 5, FIGURES[7:])
    assert not trainer.is_finished
    assert train(trainer).step == 9


def test_patience_needs_held_out_text(start: Start, tmp_path: Path) -> None:
    trainer = start("lm", patience=1)
    trainer.objective.data = tmp_path / "nothing"
    with pytest.raises(
        OptionError, match="patience: expected held-out text to go by, found none; give more text"
    ):
        train(trainer)


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
    last.grad = None  # unused in this step
    optimizers = Optimizers(model, kind, 0.1)
    optimizers.step(0.1)
    assert torch.equal(last, torch.ones_like(last))
    assert all(not torch.equal(p, torch.ones_like(p)) for p in model.parameters() if p is not last)
    again = Optimizers(model, kind, 0.1)
    again.load_state_dict(optimizers.state_dict())
    last.grad = torch.ones_like(last)
    again.step(0.1)
    assert not torch.equal(last, torch.ones_like(last))


def test_adamw_has_its_share_of_the_learning_rate() -> None:
    """The first update of AdamW is the learning rate, and a share of 1 is the default."""
    for share in (1.0, 0.25):
        module = nn.ModuleDict(
            {"layers": nn.ModuleList([nn.Linear(4, 4)]), "head": nn.Linear(4, 2)}
        )
        before = module["head"].weight.detach().clone()
        optimizers = Optimizers(module, "muon", 0.0, share)
        module["head"](module["layers"][0](torch.ones(1, 4))).sum().backward()  # type: ignore[index]
        optimizers.step(0.1)
        torch.testing.assert_close(
            (before - module["head"].weight).abs(), torch.full((2, 4), 0.1 * share)
        )


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


def test_a_stop_within_a_step_drops_that_step(start: Start) -> None:
    """Two passes make a step: the run stops after the first pass of the third step, as if it had
    not begun.
    """
    passes: list[tuple[int, int, int]] = []
    trainer = start("lm", "stopped")
    trainer.train(
        lambda _: None, lambda _: None, lambda: len(passes) == 5, lambda *news: passes.append(news)
    )
    assert passes == [(1, 1, 2), (1, 2, 2), (2, 1, 2), (2, 2, 2), (3, 1, 2)]
    assert trainer.step == 2
    assert all(parameter.grad is None for parameter in trainer.objective.module.parameters())
    resumed = train(start("lm", "stopped"))
    whole = train(start("lm", "whole"))
    for mine, theirs in zip(
        resumed.objective.module.parameters(), whole.objective.module.parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)
