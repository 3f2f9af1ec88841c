import shutil
from pathlib import Path

import pytest

from pronk import LLM, SamplingParams
from pronk.base.errors import PronkError
from pronk.drafting import make_drafter
from pronk.drafting.from_draft.draft_model import ModelProposer
from pronk.sampling.noise import derive_seed
from pronk.train.export import export_model
from pronk.train.lm import LanguageModel
from pronk.train.loop import Trainer
from pronk.train.on_policy import held_out_prompts
from pronk.train.served import measure
from pronk.train.teacher import Teacher


def spec(folder: Path, num_tokens: int) -> str:
    return f"draft_model(model={str(folder)!r}, num_tokens={num_tokens})"


@pytest.fixture
def draft(trained: Trainer[LanguageModel], teacher: Teacher, tmp_path: Path) -> Path:
    """A model that has learned a little: some of its draft tokens are accepted."""
    export_model(trained.objective.module, teacher.folder, tmp_path / "little", "")
    return tmp_path / "little"


def test_target_predicts_itself_and_another_model_does_not(
    draft: Path, teacher: Teacher, draft_data: Path, tmp_path: Path
) -> None:
    prompts = held_out_prompts(draft_data)
    folder = tmp_path / "draft"
    shutil.copytree(teacher.folder, folder)
    same = measure(teacher.llm, spec(folder, 3), prompts, 16)
    assert same["greedy alpha"] == same["T=0.8 alpha"] == 1.0
    assert same["greedy S"] > 2.5
    kept = make_drafter(f"draft_model(model={str(folder)!r})")  # keeps the first weights in use
    teacher.llm.generate(prompts[0], SamplingParams(max_tokens=4), drafter=kept)
    # Another model in the same folder must be loaded, instead of the weights in use.
    shutil.rmtree(folder)
    draft.rename(folder)
    other = measure(teacher.llm, spec(folder, 3), prompts, 16)
    assert other["greedy alpha"] < 0.5
    assert 1.0 <= other["greedy S"] < 1.5
    assert other["T=0.8 alpha"] < 0.5


@pytest.mark.parametrize(("name", "temperature"), [("greedy", 0.0), ("T=0.8", 0.8)])
def test_figures_are_those_of_the_engine(
    draft: Path, teacher: Teacher, draft_data: Path, name: str, temperature: float
) -> None:
    prompts = held_out_prompts(draft_data)
    figures = measure(teacher.llm, spec(draft, 2), prompts, 20)
    llm = LLM(teacher.folder, drafter=spec(draft, 2), budget="all")
    steps = []
    tokens = 0
    for number, prompt in enumerate(prompts):  # one by one, in another engine
        params = SamplingParams(max_tokens=20, temperature=temperature, seed=derive_seed(0, number))
        done = llm.generate(prompt, params)
        steps += done.stats.steps
        tokens += len(done.token_ids)
    tried = [step for step in steps if step.depth]
    assert tried
    expected = {
        "alpha": sum(step.accepted >= 1 for step in tried) / len(tried),
        "CTAR(1)": sum(step.accepted >= 1 for step in steps) / len(steps),
        "CTAR(2)": sum(step.accepted >= 2 for step in steps) / len(steps),
        "S": tokens / len(steps),
    }
    assert {each: figures[f"{name} {each}"] for each in expected} == pytest.approx(expected)
    assert len(figures) == 2 * len(expected)
    assert 0 < expected["alpha"] < 1


def test_a_drafter_that_raises_has_no_figures(
    teacher: Teacher, draft_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ModelProposer, contexts: object, stops: object = None) -> None:
        raise RuntimeError

    monkeypatch.setattr(ModelProposer, "chains", fail)
    with pytest.raises(PronkError, match="expected no exception, found RuntimeError"):
        measure(teacher.llm, spec(teacher.folder, 3), held_out_prompts(draft_data)[:2], 8)


def test_where_time_is_short_a_few_prompts_are_continued(
    draft: Path, teacher: Teacher, draft_data: Path
) -> None:
    prompts = held_out_prompts(draft_data)
    assert len(prompts) > 4
    few = measure(teacher.llm, spec(draft, 2), prompts[:4], 20)
    assert measure(teacher.llm, spec(draft, 2), prompts, 20, seconds=0.0) == few
    whole = measure(teacher.llm, spec(draft, 2), prompts, 20)
    # The figures do not depend on the number of batches.
    assert measure(teacher.llm, spec(draft, 2), prompts, 20, seconds=1e6) == whole != few
