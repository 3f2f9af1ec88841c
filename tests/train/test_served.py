from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pronk import LLM, SamplingParams
from pronk.drafters import make_drafter
from pronk.train.export import export_model
from pronk.train.lm import LanguageModel
from pronk.train.loop import Trainer
from pronk.train.on_policy import held_out_prompts
from pronk.train.served import measure_draft
from pronk.train.teacher import Teacher


def test_target_guesses_itself_and_a_stranger_does_not(
    trained: Trainer[LanguageModel], teacher: Teacher, draft_data: Path, tmp_path: Path
) -> None:
    prompts, draft = held_out_prompts(draft_data), tmp_path / "draft"
    shutil.copytree(teacher.folder, draft)
    same = measure_draft(teacher.llm, draft, prompts, num_tokens=3, max_tokens=16)
    assert same["greedy alpha"] == same["T=0.8 alpha"] == 1.0
    assert same["greedy S"] > 2.5
    kept = make_drafter(f"draft_model(model={str(draft)!r})")  # somebody else goes on using the first weights
    teacher.llm.generate(prompts[0], SamplingParams(max_tokens=4), drafter=kept)
    # The same folder with a model that has learned next to nothing: what was loaded before must not be measured again.
    export_model(trained.objective.module, teacher.folder, draft, "")
    other = measure_draft(teacher.llm, draft, prompts, num_tokens=3, max_tokens=16)
    assert other["greedy alpha"] < 0.5
    assert 1.0 <= other["greedy S"] < 1.5
    assert other["T=0.8 alpha"] < 0.5


def test_figures_are_those_of_the_engine(teacher: Teacher, draft_data: Path) -> None:
    prompts = held_out_prompts(draft_data)[:2]
    llm = LLM(teacher.folder, drafter=f"draft_model(model={str(teacher.folder)!r}, num_tokens=2)", budget="all")
    stats = [llm.generate(prompt, SamplingParams(max_tokens=10)).stats for prompt in prompts]
    figures = measure_draft(teacher.llm, teacher.folder, prompts, num_tokens=2, max_tokens=10)
    tokens, steps = sum(s.generated_tokens for s in stats), sum(s.target_steps for s in stats)
    assert figures["greedy S"] == pytest.approx(tokens / steps)
