from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pronk.errors import CheckpointError, OptionError, PronkError
from pronk.train.attention import dense_logits
from pronk.train.batches import Sequences
from pronk.train.lm import Report, Trainer
from pronk.train.options import DataOptions, Shape, TrainOptions
from train.tiny import SHAPE, TINY


def train(folder: Path, options: TrainOptions, stop_at: int | None = None) -> Trainer:
    trainer = Trainer(folder, options)
    trainer.train(lambda _: None, lambda _: None, lambda: trainer.step == stop_at)
    return trainer


def losses(trainer: Trainer) -> list[tuple[object, ...]]:
    return [(h["step"], h["loss"], h["norm"], h["valid"]) for h in trainer.history]


def test_loss_falls(new_run: Callable[[str], Path]) -> None:
    reports: list[Report] = []
    evaluated: list[int] = []
    trainer = Trainer(new_run("run"), TINY)
    trainer.train(reports.append, lambda news: evaluated.append(news.step))
    assert trainer.finished
    assert [report.step for report in reports] == [3, 6, 9, 12]
    assert evaluated == [6, 12]
    assert reports[0].loss == pytest.approx(np.log(SHAPE.vocab), rel=0.1)
    assert reports[-1].loss < reports[0].loss - 1
    assert set(reports[-1].valid) == {"stories", "extra"}
    assert all(reports[-1].valid[name] < reports[1].valid[name] for name in reports[-1].valid)
    assert trainer.tokens == reports[-1].tokens == 12 * 256


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("stop_at", [4, 10])  # in the short part, in the long part
def test_resumed_run_is_the_uninterrupted_run(new_run: Callable[[str], Path], optimizer: str, stop_at: int) -> None:
    options = replace(TINY, optimizer=optimizer)
    whole = train(new_run("whole"), options)
    folder = new_run("parts")
    first = train(folder, options, stop_at)
    assert first.step == stop_at
    assert not first.finished
    second = train(folder, options)
    assert losses(second) == losses(whole)
    for name, weight in whole.decoder.state_dict().items():
        assert torch.equal(weight, second.decoder.state_dict()[name])


def test_accumulated_passes_are_one_batch(new_run: Callable[[str], Path]) -> None:
    one = train(new_run("one"), replace(TINY, steps=3, micro=256, final_share=0.0, evaluate_every=9))
    two = train(new_run("two"), replace(TINY, steps=3, micro=64, final_share=0.0, evaluate_every=9))
    assert one.history[0]["loss"] == pytest.approx(two.history[0]["loss"], rel=2e-3)
    assert one.history[0]["norm"] == pytest.approx(two.history[0]["norm"], rel=2e-2)


def test_time_limit_ends_the_run_with_its_schedule(new_run: Callable[[str], Path]) -> None:
    trainer = Trainer(new_run("run"), replace(TINY, steps=10_000, minutes=0.02, final_share=0.5, log_every=1))
    trainer.train(lambda _: None, lambda _: None)
    assert trainer.finished
    assert trainer.step < 10_000
    assert trainer.history[-1]["rate"] < 0.5 * TINY.rate
    assert all(trainer.done)


def test_checkpoint_of_other_options_is_refused(new_run: Callable[[str], Path]) -> None:
    folder = new_run("run")
    train(folder, TINY, stop_at=1)
    with pytest.raises(OptionError, match=r"expected lr = 0\.01 as before, found 0\.5"):
        Trainer(folder, replace(TINY, rate=0.5))
    with pytest.raises(OptionError, match=r"expected shape = .* as before"):
        Trainer(folder, replace(TINY, shape=replace(SHAPE, layers=1)))
    Trainer(folder, replace(TINY, minutes=5.0, evaluate_every=7))  # these may change


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None])
def test_damaged_checkpoint_is_refused(new_run: Callable[[str], Path], content: bytes | None) -> None:
    folder = new_run("run")
    train(folder, TINY, stop_at=1)
    path = folder / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-1000] if content is None else content)
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt: expected a training checkpoint, found"):
        Trainer(folder, TINY)


def test_checkpoint_of_another_kind_is_refused(new_run: Callable[[str], Path]) -> None:
    folder = new_run("run")
    torch.save({"format": "other"}, folder / "checkpoint.pt")
    with pytest.raises(CheckpointError, match="expected a training checkpoint of format pronk-train-1, found 'other'"):
        Trainer(folder, TINY)


def test_text_shorter_than_a_sequence_is_refused(new_run: Callable[[str], Path]) -> None:
    folder = new_run("run")
    with pytest.raises(OptionError, match="expected at least 65 tokens for sequences of 64"):
        Trainer(folder, replace(TINY, final_share=0.001))


def test_sequences_cover_their_part_once(tmp_path: Path) -> None:
    tokens = np.arange(1001, dtype=np.uint16)
    tokens.tofile(tmp_path / "t.bin")
    first = Sequences(tmp_path / "t.bin", 10, seed=3, stop=0.6)
    last = Sequences(tmp_path / "t.bin", 20, seed=3, start=0.6)
    inputs, targets = first.batch(0, len(first))
    assert sorted(inputs.flatten().tolist()) == list(range(600))
    assert torch.equal(targets, inputs + 1)
    assert inputs[:, 0].tolist() != sorted(inputs[:, 0].tolist())
    assert sorted(last.batch(0, len(last))[0].flatten().tolist()) == list(range(600, 1000))
    assert torch.equal(first.batch(len(first) - 1, 2)[0][1], inputs[0])


def test_tokens_see_their_own_past_only(trained: Trainer) -> None:
    tokens = torch.randint(4, 320, (3, 20), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[1, 12:] = 5
    before, after = (dense_logits(trained.decoder, t).view(3, 20, -1).detach() for t in (tokens, changed))
    torch.testing.assert_close(after[1, :12], before[1, :12])
    torch.testing.assert_close(after[[0, 2]], before[[0, 2]])
    assert not torch.allclose(after[1, 12:], before[1, 12:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps: expected at least 1, found 0"),
        ({"minutes": -1.0}, "minutes: expected more than 0, found -1.0"),
        ({"length": 65}, "length: expected 1 to 64, found 65"),
        ({"final_length": 128}, "final-length: expected 1 to 64, found 128"),
        ({"final_share": 1.5}, "final-share: expected 0 to 1, found 1.5"),
        ({"micro": 100}, "micro: expected a divisor of batch 256, found 100"),
        ({"micro": 32}, "micro: expected a multiple of final-length 64, found 32"),
        ({"optimizer": "sgd"}, "optimizer: expected one of muon, adamw, found 'sgd'"),
        ({"rate": 0.0}, "lr: expected more than 0, found 0.0"),
        ({"rate": float("nan")}, "lr: expected more than 0, found nan"),
        ({"threads": 0}, "threads: expected at least 1, found 0"),
        ({"seed": -1}, "seed: expected at least 0, found -1"),
    ],
)
def test_options_out_of_range_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError) as error:
        replace(TINY, **change)  # type: ignore[arg-type]
    assert str(error.value) == message


def test_shapes_and_mixtures_out_of_range_are_named() -> None:
    with pytest.raises(OptionError, match="found hidden 30, heads 4, kv-heads 2"):
        Shape(hidden=30, heads=4, kv_heads=2)
    with pytest.raises(OptionError, match="layers: expected at least 1, found 0"):
        Shape(layers=0)
    with pytest.raises(OptionError, match="expected at least one source"):
        DataOptions(())


def test_divergence_is_named_and_not_saved(new_run: Callable[[str], Path]) -> None:
    folder = new_run("run")
    trainer = train(folder, TINY, stop_at=2)
    with torch.no_grad():
        trainer.decoder.embedding.fill_(float("nan"))
    with pytest.raises(PronkError, match=r"step 3: expected a finite loss, found nan; use a lower --lr than 0\.01"):
        trainer.train(lambda _: None, lambda _: None)
    assert Trainer(folder, TINY).step == 2


def test_unknown_device_is_named(new_run: Callable[[str], Path]) -> None:
    with pytest.raises(
        OptionError, match="device: expected one that this machine has, for example cpu, found 'abacus'"
    ):
        Trainer(new_run("run"), replace(TINY, device="abacus"))
