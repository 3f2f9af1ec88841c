"""Training Kangaroo's adapter: the loss of equation 3, resumption, and the command from end to end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from pronk import LLM, SamplingParams
from pronk.cli.train.main import app
from pronk.drafters.from_target.modules.kangaroo import ADAPTERS, KangarooShape
from pronk.errors import OptionError
from pronk.train.attention import DenseAttention, dense_logits
from pronk.train.kangaroo import KangarooStudent
from pronk.train.loop import Trainer
from pronk.train.options import StudentOptions
from pronk.train.teacher import Teacher
from train.tiny import TINY_DRAFT

_LOOP = {name: value for name, value in vars(TINY_DRAFT).items() if name not in {"shape", "context"}}


@pytest.fixture(autouse=True)
def _short_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pronk.train.student.SERVED_TOKENS", 12)


def options(adapter: str = "attention", **more: Any) -> StudentOptions:
    return StudentOptions(**_LOOP | {"context": 64, "shape": KangarooShape(1, adapter, 4, 48)} | more)


def start(folder: Path, teacher: Teacher, settings: StudentOptions) -> Trainer[KangarooStudent]:
    return Trainer(folder, settings, KangarooStudent(folder, settings, teacher))


def train(
    folder: Path, teacher: Teacher, settings: StudentOptions, stop_at: int | None = None
) -> Trainer[KangarooStudent]:
    trainer = start(folder, teacher, settings)
    trainer.train(lambda _: None, lambda _: None, lambda: trainer.step == stop_at)
    return trainer


@pytest.mark.parametrize(
    "adapter", [each if each == "attention" else pytest.param(each, marks=pytest.mark.slow) for each in ADAPTERS]
)
def test_adapter_comes_closer_to_its_target(
    new_draft_run: Callable[[str], Path], teacher: Teacher, adapter: str
) -> None:
    folder, settings = new_draft_run("run"), options(adapter, steps=40)
    before = start(folder, teacher, settings).objective.evaluate(32)
    trainer = train(folder, teacher, settings)
    after = trainer.history[-1]["valid"]
    assert {f"{n} {f}" for n in ("stories", "extra", "on-policy") for f in ("KL", "same")} <= set(after)
    assert all(after[name] < 0.8 * before[name] for name in after if name.endswith("KL"))


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_loss_is_equation_3_less_the_target_s_entropy(
    new_draft_run: Callable[[str], Path], teacher: Teacher, adapter: str
) -> None:
    objective = start(new_draft_run("run"), teacher, options(adapter)).objective
    inputs, targets = objective.phases[0].batch(0, 4)
    module, decoder = objective.module, teacher.decoder
    places = torch.arange(32).repeat(4)
    rope = decoder.rope(places, places + 1, torch.float32)
    attend = DenseAttention(4, 32, decoder.config.windows)
    early = decoder.embed(inputs.reshape(-1), places, torch.bfloat16)
    (early,) = (x for _, x in decoder.run(early, decoder.rope(places, places + 1, torch.bfloat16), attend, 0, 1))
    with torch.no_grad():
        said = module(early.float(), rope, DenseAttention(4, 32, module.config.windows))
        head = teacher.unembedding.float() if module.head is None else module.get_parameter("head.weight")
        q = (said @ head.T).log_softmax(-1)
        p = dense_logits(decoder, inputs, torch.bfloat16).float().log_softmax(-1)
    cross_entropy = -(p.exp() * q).sum(-1).mean()
    entropy = -(p.exp() * p).sum(-1).mean()
    passed = objective.backward(inputs, targets, 1.0)
    assert passed.loss == pytest.approx(float(cross_entropy - entropy), rel=0.02)
    assert passed.same[0] == pytest.approx(float((q.argmax(-1) == p.argmax(-1)).float().mean()), abs=0.05)
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_target_is_left_alone(new_draft_run: Callable[[str], Path], teacher: Teacher) -> None:
    before = {name: tensor.clone() for name, tensor in teacher.decoder.state_dict().items()}
    train(new_draft_run("run"), teacher, options("head"), stop_at=3)
    assert not any(parameter.requires_grad for parameter in teacher.decoder.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.decoder.state_dict().items())


def test_resumed_run_is_the_uninterrupted_run(new_draft_run: Callable[[str], Path], teacher: Teacher) -> None:
    whole = train(new_draft_run("whole"), teacher, options())
    folder = new_draft_run("parts")
    assert train(folder, teacher, options(), stop_at=5).step == 5
    second = train(folder, teacher, options())
    assert [(h["loss"], h["valid"]) for h in second.history] == [(h["loss"], h["valid"]) for h in whole.history]
    for name, weight in whole.objective.module.state_dict().items():
        assert torch.equal(weight, second.objective.module.state_dict()[name])
    with pytest.raises(OptionError, match=r"shape"):
        start(folder, teacher, options("head"))


def test_engine_measures_chains_of_a_fixed_length(new_draft_run: Callable[[str], Path], teacher: Teacher) -> None:
    trainer = train(new_draft_run("run"), teacher, options(num_tokens=2, steps=40))
    figures = trainer.history[-1]["valid"]
    assert 0 < figures["greedy alpha"] <= 1
    assert 1 < figures["greedy S"] <= 3
    assert {"T=0.8 alpha", "greedy CTAR(2)"} <= set(figures)
    assert trainer.objective.evaluate(32) == figures


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_command_makes_a_drafter_that_serves(tmp_path: Path, corpus: Path, teacher: Teacher, adapter: str) -> None:
    """After two steps it is lossless all the same."""
    command = (
        f"kangaroo --exit-layer 1 --adapter {adapter} --target {teacher.folder} --source {corpus / 'stories.jsonl'}=1 "
        f"--out {tmp_path / 'run'} --on-policy 200 --steps 2 --batch 256 --micro 64 --length 32 --final-length 32 "
        "--threads 1 --evaluate-every 2 --num-tokens 2 --name small"
    ).split()
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    export = tmp_path / "run" / "export"
    facts = json.loads((export / "drafter.json").read_text())
    assert facts["kind"] == "kangaroo"
    assert facts["shape"] == {"exit_layer": 1, "adapter": adapter, "heads": 4, "mlp": 48}
    assert "Exit after layer 1 of 2" in (export / "README.md").read_text()
    llm = LLM(teacher.folder, drafter=f"kangaroo(model={str(export)!r}, eta=0)", threads=1, budget="all")
    params = [SamplingParams(max_tokens=20, temperature=temperature, seed=1) for temperature in (0.0, 0.8)]
    done = llm.generate(["The cat", "The dog"], params)
    plain = llm.generate(["The cat", "The dog"], params, drafter="autoregressive")
    assert [each.token_ids for each in done] == [each.token_ids for each in plain]
    assert sum(each.stats.drafted for each in done) > 0


@pytest.mark.parametrize("exit_layer", ["0", "2", "9"])
def test_exit_layer_out_of_range_is_refused_before_anything_is_written(
    tmp_path: Path, corpus: Path, teacher: Teacher, exit_layer: str
) -> None:
    command = ["kangaroo", "--exit-layer", exit_layer, "--target", str(teacher.folder)]
    command += ["--source", f"{corpus / 'stories.jsonl'}=1", "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, OptionError)
    expected = "exit-layer: expected 1 to 1 for a target of 2 layers" if exit_layer != "0" else "at least 1, found 0"
    assert expected in str(result.exception)
    assert not (tmp_path / "run").exists()


def test_exit_layer_and_adapter_have_their_say(tmp_path: Path, corpus: Path, teacher: Teacher) -> None:
    text = [
        "--source",
        f"{corpus / 'stories.jsonl'}=1",
        "--out",
        str(tmp_path / "run"),
        "--target",
        str(teacher.folder),
    ]
    sizes = "--on-policy 0 --steps 4 --batch 128 --micro 64 --length 32 --final-length 32 --num-tokens 0 --threads 1"
    result = CliRunner().invoke(app, ["kangaroo", *text, *sizes.split()])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "run" / "export" / "drafter.json").read_text())["shape"]["exit_layer"] == 1
    result = CliRunner().invoke(app, ["kangaroo", "--exit-layer", "1", "--adapter", "linear", *text])
    assert "expected one of attention, head, transformer, mlp" in str(result.exception)
