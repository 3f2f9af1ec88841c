"""What holds for every drafter that is trained here."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from pronk import LLM, SamplingParams
from pronk.errors import OptionError
from pronk.train.loop import Trainer
from pronk.train.on_policy import held_out_prompts
from pronk.train.options import DataOptions
from pronk.train.run import run_student
from pronk.train.served import beginnings, is_served, measure
from pronk.train.teacher import Teacher
from train.kinds import STUDENTS, start_future, start_student
from train.tiny import OWN

_SERVED = 8


@pytest.fixture(autouse=True)
def _short_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("student", "future"):
        monkeypatch.setattr(f"pronk.train.{module}.SERVED_TOKENS", _SERVED)


def run(trainer: Trainer[Any], stop_at: int | None = None) -> None:
    """As ``pronk train`` does, without cards."""

    def export(news: Any) -> None:
        trainer.objective.export(trainer.folder / "export", "", {"figures": news.valid, "length": 32, "command": ""})

    trainer.train(lambda _: None, export, lambda: trainer.step == stop_at)


@pytest.mark.parametrize("kind", STUDENTS)
def test_exported_drafter_serves_as_it_was_reported(
    kind: str, new_draft_run: Callable[[str], Path], teacher: Teacher
) -> None:
    folder = new_draft_run("run")
    trainer = start_student(kind, folder, teacher, steps=30, evaluate_every=30, rate=0.02)
    run(trainer)
    document = "draft.json" if kind == "draft_model" else "drafter.json"
    reported = json.loads((folder / "export" / document).read_text())["figures"]
    spec = trainer.objective.spec.format(model=str(folder / "export"))
    assert spec.startswith(f"{kind}(")
    llm = LLM(teacher.folder, budget="all", max_batch=2)
    served = measure(llm, spec, trainer.objective.prompts(), _SERVED)
    assert len(served) == 8
    assert served == {name: value for name, value in reported.items() if is_served(name)}
    assert served["greedy CTAR(1)"] > 0
    everything = held_out_prompts(folder / "data")
    assert trainer.objective.prompts() == (everything[3:] if kind == "medusa" else everything)


def test_heads_of_a_language_model_serve_as_they_were_reported(new_run: Callable[[str], Path]) -> None:
    folder = new_run("run")
    trainer = start_future(folder, steps=40, evaluate_every=40)
    run(trainer)
    reported = json.loads((folder / "export" / "heads" / "drafter.json").read_text())["figures"]
    llm = LLM(folder / "export", budget="all", max_batch=2)
    config = llm.config
    prompts = beginnings(folder / "data", config.vocab_size, config.eos_ids[0], config.context)
    assert all(8 <= len(prompt) <= 32 for prompt in prompts)
    assert len(prompts) > 8
    served = measure(llm, "multi_token", prompts, _SERVED)
    assert served == {name: value for name, value in reported.items() if is_served(name)}
    assert served["greedy CTAR(1)"] > 0
    losses = {name: value for name, value in reported.items() if name not in served}
    assert trainer.objective.judge(reported) == pytest.approx(sum(losses.values()) / len(losses))


def test_prompts_are_beginnings_of_held_out_documents(new_run: Callable[[str], Path]) -> None:
    trainer = start_future(new_run("run"))
    end, data = trainer.objective.config.eos_ids[0], trainer.folder / "data"
    found = beginnings(data, 320, end, 40)
    texts: list[list[int]] = []
    for file in sorted(data.glob("valid-*.bin")):
        document: list[int] = []
        for token in torch.from_file(str(file), size=file.stat().st_size // 2, dtype=torch.uint16).tolist():
            document.append(token)
            if token == end:
                texts.append(document)
                document = []
        texts.append(document)
    assert len(found) > 8
    for prompt in found:
        assert len(prompt) in range(8, 21)
        assert any(text[: len(prompt)] == prompt for text in texts)


def lossless(target: Path, spec: str) -> None:
    plain, guessed = LLM(target, drafter="autoregressive", threads=1), LLM(target, drafter=spec, budget="all")
    for temperature in (0.0, 0.9):
        params = [SamplingParams(max_tokens=24, temperature=temperature, seed=seed) for seed in (3, 4)]
        prompts = ["The cat", "def "]
        expected = [each.token_ids for each in plain.generate(prompts, params)]
        found = guessed.generate(prompts, params)
        assert [each.token_ids for each in found] == expected
        assert all(each.stats.drafted > 0 for each in found)


@pytest.mark.parametrize("kind", ["glide", "vanilla", "multi_token"])
def test_drafter_of_two_steps_is_lossless(kind: str, new_draft_run: Callable[[str], Path], teacher: Teacher) -> None:
    folder = new_draft_run("run")
    run(start_student(kind, folder, teacher, steps=2, evaluate_every=2, num_tokens=0))
    lossless(teacher.folder, f"{kind}(model={str(folder / 'export')!r})")


def test_heads_of_a_language_model_of_two_steps_are_lossless(new_run: Callable[[str], Path]) -> None:
    folder = new_run("run")
    run(start_future(folder, steps=2, evaluate_every=2))
    lossless(folder / "export", "multi_token")


@pytest.mark.parametrize("kind", ["glide", "vanilla"])
def test_resumed_run_is_the_uninterrupted_run(
    kind: str, new_draft_run: Callable[[str], Path], teacher: Teacher
) -> None:
    whole, folder = start_student(kind, new_draft_run("whole"), teacher), new_draft_run("parts")
    run(whole)
    run(start_student(kind, folder, teacher), stop_at=5)
    second = start_student(kind, folder, teacher)
    assert second.step == 5
    run(second)
    assert [(h["loss"], h["valid"]) for h in second.history] == [(h["loss"], h["valid"]) for h in whole.history]
    for name, weight in whole.objective.module.state_dict().items():
        assert torch.equal(weight, second.objective.module.state_dict()[name])


def test_other_options_and_another_kind_are_named_before_the_text_is(
    tmp_path: Path, data_options: DataOptions, teacher: Teacher, quiet: Console
) -> None:
    def attempt(kind: str, **changes: Any) -> str:
        made, options = STUDENTS[kind]
        settings = replace(options, num_tokens=0, steps=2, **changes)
        try:
            run_student(made, data_options, OWN, settings, teacher, tmp_path / "run", "small", "command", quiet)
        except OptionError as error:
            return str(error)
        return ""

    assert not attempt("glide")
    before = f"cannot resume {tmp_path / 'run'}: expected "
    after = "; use another --out folder for a new run"
    assert attempt("glide", share=0.25) == f"{before}share = 0.5 as before, found 0.25{after}"
    found = attempt("glide", rate=0.5, batch=128)
    assert found == f"{before}batch = 256 as before, found 128, and lr = 0.01 as before, found 0.5{after}"
    assert attempt("medusa") == f"{before}a run of kind glide as before, found medusa{after}"
    checkpoint = tmp_path / "run" / "checkpoint.pt"
    state = torch.load(checkpoint, weights_only=True)
    del state["options"]["kind"]  # as it was written before there were kinds
    torch.save(state, checkpoint)
    assert "shape blocks = None as before, found 1" in attempt("medusa")
    assert not attempt("glide")
