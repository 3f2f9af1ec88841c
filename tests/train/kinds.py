"""A tiny drafter of every kind that learns from a target, and a tiny language model with heads."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from pronk.drafters.from_target.modules.glide import GlideShape
from pronk.drafters.from_target.modules.heads import HeadsShape
from pronk.drafters.from_target.modules.kangaroo import KangarooShape
from pronk.drafters.from_target.modules.medusa import MedusaShape
from pronk.train.draft import DraftStudent
from pronk.train.future import FutureTokens, future_shape
from pronk.train.glide import GlideStudent, VanillaStudent
from pronk.train.heads import HeadsStudent
from pronk.train.kangaroo import KangarooStudent
from pronk.train.loop import Trainer
from pronk.train.medusa import MedusaOptions, MedusaStudent
from pronk.train.options import StudentOptions, TrainOptions
from pronk.train.student import Student
from pronk.train.teacher import Teacher
from train.tiny import SHAPE, TINY, TINY_DRAFT

LOOP = {each.name: getattr(TINY_DRAFT, each.name) for each in fields(StudentOptions)} | {"context": 64}

STUDENTS: dict[str, tuple[type[Student[Any]], StudentOptions]] = {
    "draft_model": (DraftStudent, TINY_DRAFT),
    "glide": (GlideStudent, StudentOptions(**LOOP | {"shape": GlideShape(1, 16, 2, 1, 24)})),
    "vanilla": (VanillaStudent, StudentOptions(**LOOP | {"shape": GlideShape(1, 16, 2, 1, 24, cross=False)})),
    "kangaroo": (KangarooStudent, StudentOptions(**LOOP | {"shape": KangarooShape(1, "attention", 4, 48)})),
    "medusa": (MedusaStudent, MedusaOptions(**LOOP | {"shape": MedusaShape(2, 1)})),
    "multi_token": (HeadsStudent, StudentOptions(**LOOP | {"shape": HeadsShape(2, 2, 24)})),
}
FUTURE = replace(TINY, heads=future_shape(SHAPE, 3, "transformer", "parallel", "shared"))
AnyTrainer = TypeVar("AnyTrainer", bound=Trainer[Any])


def start_student(kind: str, folder: Path, teacher: Teacher, **changes: Any) -> Trainer[Any]:
    """Begin or resume the run of a drafter."""
    made, options = STUDENTS[kind]
    options = replace(options, **changes)
    return Trainer(folder, options, made(folder, options, teacher))


def start_future(folder: Path, **changes: Any) -> Trainer[FutureTokens]:
    """Begin or resume the run of a language model with heads."""
    options: TrainOptions = replace(FUTURE, **changes)
    return Trainer(folder, options, FutureTokens(folder, options))


def train(trainer: AnyTrainer, stop_at: int | None = None) -> AnyTrainer:
    """Train to the end, or to a step."""
    trainer.train(lambda _: None, lambda _: None, lambda: trainer.step == stop_at)
    return trainer
