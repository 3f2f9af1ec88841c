"""Fixtures of training: a tiny corpus, a trained model, a teacher, and runs that take a second."""

import io
import random
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pronk.train.corpus.collection import Collection
from pronk.train.corpus.sources import parse_source
from pronk.train.data import prepare
from pronk.train.export import export_model
from pronk.train.lm import LanguageModel
from pronk.train.loop import Trainer
from pronk.train.on_policy import continue_prompts, write_prompts
from pronk.train.options import DataOptions
from pronk.train.teacher import Teacher
from train.kinds import STUDENTS, Start, begin, train
from train.tiny import OWN, SHAPE, TOKENS, link, write_jsonl

_NOUNS = ("cat", "dog", "bird", "tree", "house", "river", "stone", "child")
_VERBS = ("sees", "likes", "finds", "draws", "follows")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``stories.jsonl`` (300 stories, 60 dialogues), ``extra.jsonl`` to measure on, ``code/`` with
    Python files.
    """
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
        lines = (
            f"def {draw.choice(_NOUNS)}_{j}(x):\n    return x + {draw.randrange(9)}\n"
            for j in range(12)
        )
        (folder / "code" / f"m{i}.py").write_text("\n\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def data_options(corpus: Path) -> DataOptions:
    sources = (
        parse_source(f"{corpus / 'stories.jsonl'}=0.7"),
        parse_source(f"{corpus / 'code'}=0.3"),
    )
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
    prepare(data_options, folder, TOKENS, SHAPE.context, lambda _: None)
    return folder


@pytest.fixture(scope="session")
def trained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer[LanguageModel]:
    """Return the trainer of a finished run of ``lm``."""
    return train(begin("lm", link(prepared, tmp_path_factory.mktemp("trained"))))


@pytest.fixture(scope="session")
def teacher(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Teacher:
    """Return a target that is trained long enough to generate varied text."""
    folder = link(prepared, tmp_path_factory.mktemp("target"))
    trainer = train(begin("lm", folder, steps=150, evaluate_every=1000, save_every=1000))
    export_model(trainer.objective.module, prepared, folder / "little", "")
    return Teacher(folder / "little", threads=1)


@pytest.fixture(scope="session")
def draft_data(
    data_options: DataOptions, teacher: Teacher, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return the data folder of drafter runs, with text that the target has generated."""
    folder = tmp_path_factory.mktemp("draft") / "data"

    def prompts(read: Collection) -> None:
        write_prompts(read, teacher, OWN, folder)

    prepare(data_options, folder, TOKENS, SHAPE.context, lambda _: None, teacher.encoder, prompts)
    assert continue_prompts(teacher, folder, OWN, lambda _: None)
    return folder


@pytest.fixture
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Start:
    """Return a function that begins or resumes a run, given its kind, folder name and changed
    options.
    """

    def begun(kind: str, name: str = "run", **changes: Any) -> Trainer[Any]:
        student = kind in STUDENTS
        if not (tmp_path / name).exists():
            link(request.getfixturevalue("draft_data" if student else "prepared"), tmp_path / name)
        return begin(
            kind,
            tmp_path / name,
            request.getfixturevalue("teacher") if student else None,
            **changes,
        )

    return begun


@pytest.fixture
def short_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluate drafters with 12 generated tokens per prompt."""
    for module in ("loop", "future"):
        monkeypatch.setattr(f"pronk.train.{module}.SERVED_TOKENS", 12)


@pytest.fixture
def quiet() -> Console:
    """Return a console that writes to a string."""
    return Console(file=io.StringIO(), width=200)
