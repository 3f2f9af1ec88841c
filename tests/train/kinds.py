"""A tiny drafter of every kind that learns from a target, and a tiny language model with heads."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

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

_LOOP = {each.name: getattr(TINY_DRAFT, each.name) for each in fields(StudentOptions)} | {
    "context": 64,
    "num_tokens": 2,
}

STUDENTS: dict[str, tuple[type[Student[Any]], StudentOptions]] = {
    "draft_model": (DraftStudent, replace(TINY_DRAFT, num_tokens=2)),
    "glide": (GlideStudent, StudentOptions(**_LOOP | {"shape": GlideShape(1, 16, 2, 1, 24)})),
    "vanilla": (VanillaStudent, StudentOptions(**_LOOP | {"shape": GlideShape(1, 16, 2, 1, 24, cross=False)})),
    "kangaroo": (KangarooStudent, StudentOptions(**_LOOP | {"shape": KangarooShape(1, "attention", 4, 48)})),
    "medusa": (MedusaStudent, MedusaOptions(**_LOOP | {"shape": MedusaShape(2, 1)})),
    "multi_token": (HeadsStudent, StudentOptions(**_LOOP | {"shape": HeadsShape(2, 2, 24)})),
}
FUTURE = replace(TINY, heads=future_shape(SHAPE, 3, "transformer", "parallel", "shared"))


def start_student(kind: str, folder: Path, teacher: Teacher, **changes: Any) -> Trainer[Student[Any]]:
    made, options = STUDENTS[kind]
    options = replace(options, **changes)
    return Trainer(folder, options, made(folder, options, teacher))


def start_future(folder: Path, **changes: Any) -> Trainer[FutureTokens]:
    options: TrainOptions = replace(FUTURE, **changes)
    return Trainer(folder, options, FutureTokens(folder, options))
