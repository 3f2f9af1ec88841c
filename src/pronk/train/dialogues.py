"""Training text in files of answers, which are the target's own dialogues."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from enum import IntEnum
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pronk import OptionError
from pronk.base import convert_write_errors, refuse, write_json, write_tokens
from pronk.train.corpus.answers import Dialogue, merge_answers, read_answers
from pronk.train.corpus.collection import OriginRecord
from pronk.train.corpus.sources import SourceSpec
from pronk.train.head_plan import check_answers
from pronk.train.on_policy import pack_texts
from pronk.train.teacher import Teacher

ANSWERS = "data/dialogues.answers"  # the run's copy of the files of answers, in its folder
_HELD_OUT = 49  # one dialogue in this many is held out; no multiple of the number of temperatures
_LOOK_AHEAD = 24  # the next dialogue of a sequence is the first of this many that fits


class Mark(IntEnum):
    """Kind of a token in a training sequence."""

    PADDING = -1
    START = 0  # first token of a dialogue
    PROMPT = 1
    GREEDY = 2  # the model's likeliest token
    SAMPLED = 3


class Dialogues:
    """Endless series of sequences of ``length`` tokens: whole dialogues side by side, then padding.

    Each epoch has every dialogue once, in a new order. The second tensor of a batch has the
    :class:`Mark` of each token.
    """

    def __init__(self, dialogues: Sequence[Dialogue], length: int, seed: int) -> None:
        self._dialogues = dialogues
        self.length = length
        self._seed = seed
        self._sequences: list[list[int]] = []  # of the epochs so far: numbers of dialogues
        self._epochs = 0
        if not any(dialogue.answers for dialogue in dialogues):
            msg = (
                "data: expected dialogues with answers, found none; "
                "write more with pronk train texts"
            )
            raise OptionError(msg)

    @property
    def num_tokens(self) -> int:
        """Tokens of an epoch, without padding."""
        return sum(min(len(dialogue.ids), self.length) for dialogue in self._dialogues)

    @property
    def per_epoch(self) -> int:
        """Number of sequences of the first epoch; those of later epochs differ by a few."""
        return len(self._pack(0))

    def batch(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Return ``count`` sequences from number ``start`` on: token ids and marks, int64 ``[count, length]``."""
        while len(self._sequences) < start + count:
            self._sequences += self._pack(self._epochs)
            self._epochs += 1
        return self._tensors(self._sequences[start : start + count])

    def batches(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield every dialogue once, ``count`` sequences at a time."""
        sequences = self._pack(0)
        for start in range(0, len(sequences), count):
            yield self._tensors(sequences[start : start + count])

    def _pack(self, epoch: int) -> list[list[int]]:
        waiting = (
            np.random.default_rng((self._seed, epoch)).permutation(len(self._dialogues)).tolist()
        )
        sequences: list[list[int]] = []
        while waiting:
            sequence = []
            room = self.length
            while waiting:
                sizes = [
                    min(len(self._dialogues[number].ids), self.length)
                    for number in waiting[:_LOOK_AHEAD]
                ]
                fitting = next((i for i, size in enumerate(sizes) if size <= room), None)
                if fitting is None:
                    break
                sequence.append(waiting.pop(fitting))
                room -= sizes[fitting]
            sequences.append(sequence)
        return sequences

    def _tensors(self, sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        ids = np.zeros((len(sequences), self.length), np.int64)
        marks = np.full_like(ids, Mark.PADDING)
        for row, sequence in enumerate(sequences):
            end = 0
            for dialogue in (self._dialogues[number] for number in sequence):
                start = end
                end = min(end + len(dialogue.ids), self.length)
                ids[row, start:end] = dialogue.ids[: end - start]
                own = marks[row, start:end]
                own[:] = Mark.PROMPT
                for first, stop in dialogue.answers:
                    own[first:stop] = Mark.SAMPLED if dialogue.temperature else Mark.GREEDY
                own[0] = Mark.START
        return torch.from_numpy(ids), torch.from_numpy(marks)


def split_dialogues(ids: Tensor, marks: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return token ids and marks of each dialogue in a batch."""
    ids = ids[marks != Mark.PADDING]
    marks = marks[marks != Mark.PADDING]
    lengths = torch.diff(
        torch.nonzero(marks == Mark.START).flatten(), append=torch.tensor([len(marks)])
    ).tolist()
    return list(zip(ids.split(lengths), marks.split(lengths), strict=True))


def hold_out(dialogues: Sequence[Dialogue]) -> tuple[list[Dialogue], list[Dialogue]]:
    """Split dialogues for training and for evaluation, by their numbers."""
    held_out = [each for each in dialogues if each.number % _HELD_OUT == _HELD_OUT - 1]
    return [each for each in dialogues if each.number % _HELD_OUT != _HELD_OUT - 1], held_out


def has_answers(sources: Sequence[SourceSpec]) -> bool:
    """Return whether the sources are files of answers.

    Raise an OptionError if only some of them are.
    """
    kinds = [spec.kind == "answers" for spec in sources]
    if any(kinds) and not all(kinds):
        refuse(
            "source",
            "expected files of answers alone, or none, found both; train on one or the other",
            OptionError,
        )
    return any(kinds)


def write_answers_text(
    sources: Sequence[SourceSpec], teacher: Teacher, folder: Path, held_out: int
) -> None:
    """Write files of :mod:`pronk.train.on_policy` from files of answers to ``folder``, unless they exist.

    The dialogues are the target's own text. The first prompts of ``held_out`` of the held-out
    dialogues are those with which the engine measures the drafter. Answers of another model raise
    an OptionError; a text that cannot be written raises a CheckpointError.
    """
    if (folder / "sources.json").exists():
        return
    copy = folder / "dialogues.answers"
    with convert_write_errors(folder, "the training text"):
        folder.mkdir(parents=True, exist_ok=True)
        merge_answers([spec.path for spec in sources if spec.path is not None], copy)
    header, dialogues = read_answers(copy)
    check_answers(copy, header.weights, teacher.fingerprint)
    training, kept = hold_out(dialogues)
    for name, texts in (("on-policy.bin", training), ("valid-on-policy.bin", kept[:held_out])):
        write_tokens(folder / name, pack_texts([(each.ids, []) for each in texts], teacher.encoder))
    prompts = [each.ids[: each.answers[0][0]] for each in kept[:held_out] if each.answers]
    write_json(folder / "prompts.json", {"train": [], "held_out": prompts})
    answered = sum(each.num_answered for each in training)
    write_json(folder / "on-policy.json", {"tokens": answered, "dialogues": len(training)})
    questions = f"{header.target} to questions from {', '.join(header.sources)}"
    origin = OriginRecord(
        "answers", questions, "of these documents", len(training), copy.stat().st_size
    )
    summary = {
        "recipe": asdict(header),
        "weights": {"answers": 1.0},
        "duplicates": 0,
        "excluded": 0,
    }
    write_json(folder / "sources.json", {**summary, "origins": [asdict(origin)]}, indent=1)


def steps_of(
    folder: Path, answers: Sequence[Path], epochs: float, batch: int, length: int, seed: int
) -> int:
    """Return the number of steps for ``epochs``.

    First copy the files of answers into the run's folder.

    A run that is resumed keeps its copy, so that more answers in the files do not change it.
    """
    copy = folder / ANSWERS
    if not copy.exists():
        with convert_write_errors(copy, "the dialogues"):
            copy.parent.mkdir(parents=True, exist_ok=True)
            merge_answers(answers, copy)
    sequences = Dialogues(hold_out(read_answers(copy)[1])[0], length, seed).per_epoch
    return max(1, math.ceil(epochs * sequences * length / batch))
