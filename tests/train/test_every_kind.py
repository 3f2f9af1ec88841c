"""Properties of every trained drafter."""

import json
from copy import deepcopy
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from pronk import LLM
from pronk.base.errors import OptionError
from pronk.lab.drafters.modules.heads import HeadsShape
from pronk.lab.drafters.modules.kangaroo import ADAPTERS, KangarooShape
from pronk.train.clock import Clock
from pronk.train.loop import Trainer
from pronk.train.on_policy import held_out_prompts
from pronk.train.options import DataOptions
from pronk.train.run import Run, train_student
from pronk.train.served import beginnings, is_served, measure
from pronk.train.teacher import Teacher
from train.kinds import STUDENTS, Start, train
from train.tiny import OWN

pytestmark = pytest.mark.usefixtures("short_evaluation")
SERVED = 12  # as in short_evaluation


def export(trainer: Trainer[Any]) -> Path:
    """Train to the end as ``pronk train`` does, without cards; return the exported folder."""
    folder = trainer.folder / "export"
    facts = {"length": 32, "command": ""}
    trainer.train(
        lambda _: None,
        lambda news: trainer.objective.export(folder, "", facts | {"figures": news.valid}),
    )
    return folder


RESUMED = [
    ("lm", 4, {"optimizer": "muon"}),
    pytest.param("lm", 10, {"optimizer": "adamw"}, marks=pytest.mark.slow),
    pytest.param("lm", 10, {"optimizer": "muon"}, marks=pytest.mark.slow),
    pytest.param("lm", 4, {"optimizer": "adamw"}, marks=pytest.mark.slow),
    pytest.param("draft_model", 4, {}, marks=pytest.mark.slow),  # in the short part
    ("draft_model", 10, {}),  # in the long part
    pytest.param("vanilla", 5, {}, marks=pytest.mark.slow),  # glide, with another attention
    *((kind, 5, {}) for kind in ("glide", "kangaroo", "medusa")),
    ("multi_token", 5, {"shape": HeadsShape(2, 2, 24, order="causal")}),
    pytest.param("multi_token", 5, {}, marks=pytest.mark.slow),
    ("future", 7, {}),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("kind", "stop_at", "changes"), RESUMED, ids=str)
def test_resumed_run_is_the_uninterrupted_run(
    kind: str, stop_at: int, changes: dict[str, Any], start: Start, teacher: Teacher
) -> None:
    """Losses, figures and weights are equal bit for bit, and the target does not change."""
    before = deepcopy(teacher.decoder.state_dict())
    whole = train(start(kind, "whole", **changes))
    first = train(start(kind, "parts", **changes), stop_at)
    assert first.step == stop_at
    assert not first.is_finished
    second = start(kind, "parts", **changes)
    assert second.step == stop_at
    train(second)
    for one, other in zip(second.history, whole.history, strict=True):
        assert all(one[name] == other[name] for name in ("step", "loss", "norm", "same", "valid"))
    for name, weight in whole.objective.module.state_dict().items():
        assert torch.equal(weight, second.objective.module.state_dict()[name])
    assert kind != "future" or {"stories", "stories 2", "stories 3"} <= set(
        whole.history[-1]["valid"]
    )
    assert not any(parameter.requires_grad for parameter in teacher.decoder.parameters())
    assert all(
        torch.equal(weight, before[name]) for name, weight in teacher.decoder.state_dict().items()
    )


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "left", "changes"),
    [
        ("draft_model", 1.0, {"steps": 40}),
        ("glide", 0.9, {}),
        ("vanilla", 0.9, {}),
        ("kangaroo", 0.8, {"steps": 40}),
        *(
            pytest.param(
                "kangaroo",
                0.8,
                {"steps": 40, "shape": KangarooShape(1, each, 4, 48)},
                marks=pytest.mark.slow,
            )
            for each in ADAPTERS[1:]
        ),
        ("multi_token", 1.0, {"steps": 40, "rate": 0.05}),
    ],
    ids=str,
)
def test_drafter_comes_closer_to_its_target(
    kind: str, left: float, changes: dict[str, Any], start: Start
) -> None:
    """At most the share ``left`` of the divergence remains on each text; ``test_medusa.py`` has
    its heads.
    """
    trainer = start(kind, **changes)
    before = trainer.objective.evaluate(32)
    after = train(trainer).history[-1]["valid"]
    assert {name.split()[0] for name in after} == {"stories", "code", "extra", "on-policy"}
    for name in after:
        if name.startswith(("on-policy", "stories")) or kind not in ("glide", "vanilla"):
            assert (
                after[name] < left * before[name] if " KL" in name else after[name] > before[name]
            ), name


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", STUDENTS)
def test_exported_drafter_serves_as_it_was_reported(
    kind: str, start: Start, teacher: Teacher
) -> None:
    trainer = start(kind, steps=30, evaluate_every=30, rate=0.02, num_tokens=2)
    folder = export(trainer)
    facts = json.loads(
        (folder / ("draft.json" if kind == "draft_model" else "drafter.json")).read_text()
    )
    reported = facts["figures"]
    assert kind == "draft_model" or facts["target"]["weights"] == teacher.fingerprint.weights
    assert facts.get("kind", kind) == kind
    spec = trainer.objective.spec.format(model=str(folder))
    assert spec.startswith(f"{kind}(")
    llm = LLM(teacher.folder, budget="all", max_batch=2)
    served = measure(llm, spec, trainer.objective.prompts(), SERVED)
    assert len(served) == 8
    assert served == {name: value for name, value in reported.items() if is_served(name)}
    assert served["greedy CTAR(1)"] > 0
    everything = held_out_prompts(trainer.folder / "data")
    assert trainer.objective.prompts() == (everything[3:] if kind == "medusa" else everything)


@pytest.mark.slow  # the same as test_exported_drafter_serves_as_it_was_reported
def test_heads_of_a_language_model_serve_as_they_were_reported(start: Start) -> None:
    trainer = start("future", steps=40, evaluate_every=40)
    folder = export(trainer)
    reported = json.loads((folder / "heads" / "drafter.json").read_text())["figures"]
    llm = LLM(folder, budget="all", max_batch=2)
    config = llm.config
    prompts = beginnings(
        trainer.folder / "data", config.vocab_size, config.eos_ids[0], config.context
    )
    assert all(8 <= len(prompt) <= 32 for prompt in prompts)
    assert len(prompts) > 8
    served = measure(llm, "multi_token", prompts, SERVED)
    assert served == {name: value for name, value in reported.items() if is_served(name)}
    assert served["greedy CTAR(1)"] > 0
    losses = {name: value for name, value in reported.items() if name not in served}
    assert trainer.objective.judge(reported) == pytest.approx(sum(losses.values()) / len(losses))


def test_prompts_are_beginnings_of_held_out_documents(start: Start) -> None:
    trainer = start("future")
    end = trainer.objective.config.eos_ids[0]
    data = trainer.folder / "data"
    found = beginnings(data, 320, end, 40)
    texts: list[list[int]] = []
    for file in data.glob("valid-*.bin"):
        tokens = np.fromfile(file, dtype=np.uint16).tolist()
        texts += [list(ids) for is_end, ids in groupby(tokens, end.__eq__) if not is_end]
    assert len(found) > 8
    for prompt in found:
        assert len(prompt) in range(8, 21)
        assert any(text[: len(prompt)] == prompt for text in texts)


def test_other_options_and_another_kind_are_named_before_the_text_is(
    tmp_path: Path, data_options: DataOptions, teacher: Teacher, quiet: Console
) -> None:
    def attempt(kind: str, **changes: Any) -> str:
        made, options = STUDENTS[kind]
        settings = replace(options, num_tokens=0, steps=2, **changes)
        try:
            run = Run(tmp_path / "run", "small", "command", quiet, Clock(None))
            train_student(run, made, data_options, OWN, settings, teacher)
        except OptionError as error:
            return str(error)
        return ""

    assert not attempt("glide")
    before = f"cannot resume {tmp_path / 'run'}: expected "
    after = "; use another --out folder for a new run"
    assert attempt("glide", share=0.25) == f"{before}share = 0.5 as before, found 0.25{after}"
    found = attempt("glide", rate=0.5, batch=128)
    assert (
        found
        == f"{before}batch = 256 as before, found 128, and lr = 0.01 as before, found 0.5{after}"
    )
    assert attempt("medusa") == f"{before}a run of kind glide as before, found medusa{after}"
    checkpoint = tmp_path / "run" / "checkpoint.pt"
    state = torch.load(checkpoint, weights_only=True)
    del state["options"]["kind"]  # as it was written before there were kinds
    torch.save(state, checkpoint)
    assert "shape blocks = None as before, found 1" in attempt("medusa")
    assert not attempt("glide")
