"""Runs of a second: tiny drafters of every kind, and tiny language models with and without
heads.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from pronk.lab.drafters.modules.glide import GlideShape
from pronk.lab.drafters.modules.heads import HeadsShape, MedusaShape
from pronk.lab.drafters.modules.kangaroo import KangarooShape
from pronk.train.clock import Clock
from pronk.train.distributed import ProcessGroup
from pronk.train.future import FutureTokens, future_shape
from pronk.train.heads import HeadsStudent, MedusaOptions, MedusaStudent
from pronk.train.lm import LanguageModel
from pronk.train.loop import Trainer
from pronk.train.options import HeadsOptions, StudentOptions
from pronk.train.students import (
    DraftStudent,
    GlideStudent,
    KangarooStudent,
    Student,
    VanillaStudent,
)
from pronk.train.teacher import Teacher
from train.tiny import SHAPE, TINY, TINY_DRAFT

LOOP = {each.name: getattr(TINY_DRAFT, each.name) for each in fields(StudentOptions)} | {
    "context": 64
}

STUDENTS: dict[str, tuple[type[Student[Any]], StudentOptions]] = {
    "draft_model": (DraftStudent, TINY_DRAFT),
    "glide": (GlideStudent, StudentOptions(**LOOP | {"shape": GlideShape(1, 16, 2, 1, 24)})),
    "vanilla": (
        VanillaStudent,
        StudentOptions(**LOOP | {"shape": GlideShape(1, 16, 2, 1, 24, cross=False)}),
    ),
    "kangaroo": (
        KangarooStudent,
        StudentOptions(**LOOP | {"shape": KangarooShape(1, "attention", 4, 48)}),
    ),
    "medusa": (MedusaStudent, MedusaOptions(**LOOP | {"shape": MedusaShape(2, 1)})),
    "multi_token": (HeadsStudent, HeadsOptions(**LOOP | {"shape": HeadsShape(2, 2, 24)})),
}
FUTURE = replace(TINY, heads=future_shape(SHAPE, 3, "transformer", "parallel", "shared"))

# Type of the fixture ``start``; arguments: kind, folder name, changed options.
Start = Callable[..., Trainer[Any]]
AnyTrainer = TypeVar("AnyTrainer", bound=Trainer[Any])


def begin(
    kind: str,
    folder: Path,
    teacher: Teacher | None = None,
    clock: Clock | None = None,
    processes: ProcessGroup | None = None,
    **changes: Any,
) -> Trainer[Any]:
    """Begin or resume a run of ``lm``, ``future`` (a language model with heads) or a drafter of
    ``STUDENTS``.
    """
    if kind in STUDENTS:
        made, plain = STUDENTS[kind]
        options: Any = replace(plain, **changes)
        return Trainer(made(folder, options, teacher), processes, clock)
    options = replace(TINY if kind == "lm" else FUTURE, **changes)
    return Trainer(
        (LanguageModel if kind == "lm" else FutureTokens)(folder, options), processes, clock
    )


def train(trainer: AnyTrainer, stop_at: int | None = None) -> AnyTrainer:
    """Train to the end, or until ``trainer.step == stop_at``."""
    trainer.train(lambda _: None, lambda _: None, lambda: trainer.step == stop_at)
    return trainer
