"""A tiny corpus, and runs that take a second."""

import io
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pronk.train.data import prepare
from pronk.train.export import export_model
from pronk.train.lm import LanguageModel
from pronk.train.loop import Trainer
from pronk.train.on_policy import continue_prompts, write_prompts
from pronk.train.options import DataOptions
from pronk.train.sources import parse_source
from pronk.train.teacher import Teacher
from train.tiny import OWN, SHAPE, TINY, TINY_DRAFT, lm_trainer, write_jsonl

_NOUNS = ("cat", "dog", "bird", "tree", "house", "river", "stone", "child")
_VERBS = ("sees", "likes", "finds", "draws", "follows")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``stories.jsonl`` (300 stories, 60 dialogues), ``extra.jsonl`` to measure on, ``code/`` with Python files."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(5)

    def sentence() -> str:
        return f"The {draw.choice(_NOUNS)} {draw.choice(_VERBS)} the {draw.choice(_NOUNS)}."

    stories = [" ".join(sentence() for _ in range(8)) for _ in range(300)]
    talks = [f"User: What does it see?\n\nAssistant: {sentence()} And {i}." for i in range(60)]
    write_jsonl(folder / "stories.jsonl", stories + talks)
    write_jsonl(folder / "extra.jsonl", [" ".join(sentence() for _ in range(8)) for _ in range(9)])
    (folder / "code").mkdir()
    for i in range(20):
        lines = (f"def {draw.choice(_NOUNS)}_{j}(x):\n    return x + {draw.randrange(9)}\n" for j in range(12))
        (folder / "code" / f"m{i}.py").write_text("\n\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def data_options(corpus: Path) -> DataOptions:
    sources = (parse_source(f"{corpus / 'stories.jsonl'}=0.7"), parse_source(f"{corpus / 'code'}=0.3"))
    return DataOptions(
        sources,
        (corpus / "extra.jsonl",),
        dialogues=0.2,
        vocab_size=SHAPE.vocab,
        tokenizer_bytes=50_000,
        valid_tokens=400,
    )


@pytest.fixture(scope="session")
def prepared(data_options: DataOptions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    prepare(data_options, folder, TINY.steps * TINY.batch + 1, SHAPE.context, lambda _: None)
    return folder


@pytest.fixture
def new_run(prepared: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Folders of runs that share the prepared text."""

    def create(name: str) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").symlink_to(prepared)
        return tmp_path / name

    return create


@pytest.fixture(scope="session")
def trained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer[LanguageModel]:
    """A finished run."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "data").symlink_to(prepared)
    trainer = lm_trainer(folder, TINY)
    trainer.train(lambda _: None, lambda _: None)
    return trainer


@pytest.fixture(scope="session")
def teacher(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Teacher:
    """A target that has learned enough to say different things."""
    folder = tmp_path_factory.mktemp("target")
    (folder / "data").symlink_to(prepared)
    trainer = lm_trainer(folder, replace(TINY, steps=150, evaluate_every=1000, save_every=1000))
    trainer.train(lambda _: None, lambda _: None)
    export_model(trainer.objective.module, prepared, folder / "little", "")
    return Teacher(folder / "little", threads=1)


@pytest.fixture(scope="session")
def draft_data(data_options: DataOptions, teacher: Teacher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text of a draft's run, with the target's own."""
    folder = tmp_path_factory.mktemp("draft") / "data"
    tokens = TINY_DRAFT.steps * TINY_DRAFT.batch + 1
    prepare(
        data_options,
        folder,
        tokens,
        SHAPE.context,
        lambda _: None,
        teacher.encoder,
        lambda read: write_prompts(read, teacher, OWN, folder),
    )
    assert continue_prompts(teacher, folder, OWN, lambda _: None)
    return folder


@pytest.fixture
def new_draft_run(draft_data: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Folders of runs that share the text."""

    def create(name: str) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").symlink_to(draft_data)
        return tmp_path / name

    return create


@pytest.fixture
def short_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine measures a drafter on 12 tokens of each prompt."""
    for module in ("student", "future"):
        monkeypatch.setattr(f"pronk.train.{module}.SERVED_TOKENS", 12)


@pytest.fixture
def quiet() -> Console:
    """A console that writes to a string."""
    return Console(file=io.StringIO(), width=200)
