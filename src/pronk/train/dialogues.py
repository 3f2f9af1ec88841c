"""Training text from files of answers, which have dialogues of the target, or of a sibling."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pronk import OptionError
from pronk.base import convert_write_errors, refuse, write_json, write_tokens
from pronk.checkpoint import Fingerprint, read_json
from pronk.train.checkpoint import CHECKPOINT, check_unchanged
from pronk.train.corpus.answers import (
    AnswersHeader,
    AnswersWriter,
    Dialogue,
    merge_answers,
    read_answers,
)
from pronk.train.corpus.collection import OriginRecord
from pronk.train.corpus.sources import SourceSpec
from pronk.train.head_plan import check_answers
from pronk.train.on_policy import pack_texts
from pronk.train.teacher import Teacher

# path, in the run's folder, of its own copy of the files of answers
ANSWERS = "data/dialogues.answers"
# pattern of the paths of its copies of files of other models' answers
OTHER_ANSWERS = "data/other-*.answers"
# path, in the run's folder, of the names of the files that were copied
_FILES = "data/answers.json"
# One dialogue in 49 is held out. The number is no multiple of that of the temperatures, which
# dialogues have in turn, so the held-out dialogues have all temperatures.
_HELD_OUT = 49
# A sequence is filled with the first dialogue that fits, of this number of next ones.
_LOOK_AHEAD = 24


class Mark(IntEnum):
    """Kind of a token in a training sequence; it decides whether the token is learned."""

    PADDING = -1
    START = 0  # first token of a dialogue, by which dialogues in a sequence are told apart
    PROMPT = 1
    GREEDY = 2  # token that the model generated greedily
    SAMPLED = 3


class Dialogues:
    """Endless series of training sequences of ``length`` tokens: whole dialogues, then padding.

    Each epoch has every dialogue once, in a new order. A batch has the token ids and, as second
    tensor, the :class:`Mark` of each token. Raises OptionError if no dialogue has an answer.
    """

    def __init__(self, dialogues: Sequence[Dialogue], length: int, seed: int) -> None:
        self._dialogues = dialogues
        self.length = length
        self._seed = seed
        # Sequences of all epochs so far; a sequence is a list of indices of dialogues.
        self._sequences: list[list[int]] = []
        self._epochs = 0
        if not any(dialogue.answers for dialogue in dialogues):
            msg = (
                "data: expected dialogues with answers, found none; "
                "write more with pronk train texts"
            )
            raise OptionError(msg)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of an epoch: of all dialogues, each cut to ``length`` tokens."""
        return sum(min(len(dialogue.ids), self.length) for dialogue in self._dialogues)

    @property
    def per_epoch(self) -> int:
        """Number of sequences of the first epoch; later epochs have a few more or fewer."""
        return len(self._pack(0))

    def batch(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Return token ids and marks, int64 ``[count, length]``, from sequence ``start`` on."""
        while len(self._sequences) < start + count:
            self._sequences += self._pack(self._epochs)
            self._epochs += 1
        return self._tensors(self._sequences[start : start + count])

    def batches(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield every dialogue once, in batches of ``count`` sequences; see :meth:`batch`."""
        sequences = self._pack(0)
        for start in range(0, len(sequences), count):
            yield self._tensors(sequences[start : start + count])

    def _pack(self, epoch: int) -> list[list[int]]:
        """Return the sequences of an epoch, each a list of indices of dialogues."""
        generator = np.random.default_rng((self._seed, epoch))
        waiting = generator.permutation(len(self._dialogues)).tolist()
        sequences: list[list[int]] = []
        while waiting:
            sequence = []
            room = self.length
            while waiting:
                candidates = [self._dialogues[number] for number in waiting[:_LOOK_AHEAD]]
                sizes = [min(len(dialogue.ids), self.length) for dialogue in candidates]
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
                answered = Mark.SAMPLED if dialogue.temperature else Mark.GREEDY
                for first, stop in dialogue.answers:
                    own[first:stop] = answered
                own[0] = Mark.START
        return torch.from_numpy(ids), torch.from_numpy(marks)


def split_dialogues(ids: Tensor, marks: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Split a batch into its dialogues; return token ids and kinds of tokens of each.

    ``ids`` and ``marks`` are ``[sequences, length]``. ``marks`` has the kind of each token
    (:class:`Mark`), and ``Mark.START`` is the first token of a dialogue. Padding is left out.
    """
    ids = ids[marks != Mark.PADDING]
    marks = marks[marks != Mark.PADDING]
    starts = torch.nonzero(marks == Mark.START).flatten()
    lengths = torch.diff(starts, append=torch.tensor([len(marks)])).tolist()
    return list(zip(ids.split(lengths), marks.split(lengths), strict=True))


def hold_out(dialogues: Sequence[Dialogue]) -> tuple[list[Dialogue], list[Dialogue]]:
    """Split dialogues into those for training and those for evaluation.

    Every 49th dialogue, by its number, is for evaluation.
    """
    training: list[Dialogue] = []
    held_out: list[Dialogue] = []
    for dialogue in dialogues:
        is_held_out = dialogue.number % _HELD_OUT == _HELD_OUT - 1
        (held_out if is_held_out else training).append(dialogue)
    return training, held_out


def has_answers(sources: Sequence[SourceSpec]) -> bool:
    """Return whether the sources are files of answers.

    Raises OptionError if some are and others are not.
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
    """Write the text of a run whose sources are files of answers, unless its files exist.

    The dialogues take the place of the text that the target would write in the run
    (:mod:`pronk.train.on_policy` lists the files in ``folder``). The engine measures the drafter
    with the prompts of the first ``held_out`` of the held-out dialogues. Raises OptionError if
    another model wrote the answers, or the run's files have other names; CheckpointError if the
    text cannot be written.
    """
    recipe = {"sources": [[spec.name, spec.weight] for spec in sources]}
    summary_file = folder / "sources.json"
    if summary_file.exists():
        old = read_json(summary_file)["recipe"]
        check_unchanged(folder.parent, old, recipe)
        return
    copy = folder / "dialogues.answers"
    with convert_write_errors(folder, "the training text"):
        folder.mkdir(parents=True, exist_ok=True)
        merge_answers([spec.path for spec in sources if spec.path is not None], copy)
    header, dialogues = read_answers(copy)
    check_answers(copy, header.weights, teacher.fingerprint)
    training, kept = hold_out(dialogues)
    for name, texts in (("on-policy.bin", training), ("valid-on-policy.bin", kept[:held_out])):
        packed = pack_texts([(each.ids, []) for each in texts], teacher.encoder)
        write_tokens(folder / name, packed)
    prompts = [each.ids[: each.answers[0][0]] for each in kept[:held_out] if each.answers]
    write_json(folder / "prompts.json", {"train": [], "held_out": prompts})
    answered = sum(each.num_answered for each in training)
    write_json(folder / "on-policy.json", {"tokens": answered, "dialogues": len(training)})
    questions = f"{header.target} to {header.prompts} from {', '.join(header.sources)}"
    size = copy.stat().st_size
    origin = OriginRecord("answers", questions, "of these documents", len(training), size)
    summary = {
        "recipe": recipe,
        "weights": {"answers": 1.0},
        "duplicates": 0,
        "excluded": 0,
        "origins": [asdict(origin)],
    }
    write_json(summary_file, summary, indent=1)


@dataclass(frozen=True)
class HeadText:
    """Dialogues that a head is trained and evaluated on."""

    header: AnswersHeader  # of the target's own answers
    held_out: list[Dialogue]  # dialogues of the target to evaluate the head on
    own: list[Dialogue]  # dialogues of the target to train on
    others: list[Dialogue]  # dialogues of other models to train on
    # by name of each other model, the number of tokens of its answers in ``others``
    other_tokens: dict[str, int]

    @property
    def training(self) -> list[Dialogue]:
        """All dialogues to train on, those of the target first."""
        return [*self.own, *self.others]

    @property
    def num_own_tokens(self) -> int:
        """Number of tokens of the target's answers to train on."""
        return _num_answered(self.own)


def read_head_text(folder: Path, tokens: int | None = None) -> HeadText:
    """Return the text of a head's run in ``folder``, from its copies of the files of answers.

    ``tokens`` is the number of answer tokens after which no more dialogues are taken to train on,
    by default all. All held-out dialogues of the target are in the result. Dialogues of other
    models with the numbers of those are left out: their questions may be the same. Raises
    OptionError if ``tokens`` leaves no dialogue of other models.
    """
    limit = math.inf if tokens is None else tokens
    header, dialogues = read_answers(folder / ANSWERS)
    training, held_out = hold_out(dialogues)
    own = list(_take(training, limit))
    left = limit - _num_answered(own)
    others = list[Dialogue]()
    other_tokens = Counter[str]()
    paths = sorted(folder.glob(OTHER_ANSWERS))
    if paths and left <= 0:
        expected = f"expected more than {_num_answered(training)}, the tokens of --data"
        refuse("tokens", f"{expected}, found {tokens}; leave --other-data out", OptionError)
    for path in paths:
        other, dialogues = read_answers(path)
        taken = list(_take(hold_out(dialogues)[0], left))
        others += taken
        other_tokens[other.target] += _num_answered(taken)
        left -= _num_answered(taken)
    return HeadText(header, held_out, own, others, +other_tokens)


def _take(dialogues: Sequence[Dialogue], tokens: float) -> Iterator[Dialogue]:
    """Yield dialogues until their answers have ``tokens`` tokens; the last one is whole."""
    for dialogue in dialogues:
        if tokens <= 0:
            return
        yield dialogue
        tokens -= dialogue.num_answered


def _num_answered(dialogues: Sequence[Dialogue]) -> int:
    return sum(dialogue.num_answered for dialogue in dialogues)


def copy_answers(
    folder: Path, answers: Sequence[Path], others: Sequence[Path], target: Fingerprint
) -> None:
    """Copy files of answers into the folder of a head's run, unless the run has a checkpoint.

    So new answers in the files do not change a run that is resumed. The files of a resumed run must
    have their old names; their contents are not read again.

    Args:
        folder: the run's folder.
        answers: files of the target's answers.
        others: files of answers of other models with the target's tokenizer.
        target: fingerprint of the target.

    Raises:
        OptionError: a file cannot be read, is of another model than it should be, or of another
            tokenizer; two dialogues of the target have the same number; or a resumed run has other
            files.
        CheckpointError: writing fails.
    """
    copy = folder / ANSWERS
    names_file = folder / _FILES
    names = {
        "data": [path.name for path in answers],
        "other_data": [path.name for path in others],
    }
    if (folder / CHECKPOINT).exists() and copy.exists():
        # runs of older versions have no file of names, and no answers of other models
        before = names | {"other_data": []}
        if names_file.exists():
            before = read_json(names_file)
        check_unchanged(folder, before, names)
        return
    headers = [read_answers(path)[0] for path in answers]
    for path, header in zip(answers, headers, strict=True):
        check_answers(path, header.weights, target)
    contents = [_read_others(path, headers[0]) for path in others]
    with convert_write_errors(copy, "the dialogues"):
        copy.parent.mkdir(parents=True, exist_ok=True)
        for left_over in folder.glob(OTHER_ANSWERS):
            left_over.unlink()
        for number, (other, dialogues) in enumerate(contents):
            path = folder / OTHER_ANSWERS.replace("*", f"{number:03}")
            AnswersWriter(path, other).append(dialogues)
        write_json(names_file, names)
        # the last one: without it, the copies are not complete
        merge_answers(answers, copy)


def _read_others(path: Path, own: AnswersHeader) -> tuple[AnswersHeader, list[Dialogue]]:
    """Read answers of another model than that of ``own``.

    Raises OptionError if that model wrote them, or if its tokens are others.
    """
    header, dialogues = read_answers(path)
    if header.weights == own.weights:
        msg = f"{path}: expected answers of another model, found the target's; give them as --data"
        raise OptionError(msg)
    highest = max((max(dialogue.ids) for dialogue in dialogues), default=0)
    found: str | None = None
    if header.tokenizer != own.tokenizer:
        found = f"those of {header.target} ({header.tokenizer})"
    elif highest >= own.vocab_size:
        found = f"token {highest} of {header.target}, which the target does not have"
    if found is not None:
        msg = (
            f"{path}: expected answers of a model with the target's tokenizer ({own.tokenizer}), "
            f"found {found}; let a model of the target's family write them"
        )
        raise OptionError(msg)
    return header, dialogues


def steps_of(
    folder: Path, epochs: float, batch: int, length: int, seed: int, tokens: int | None = None
) -> int:
    """Return the number of steps for ``epochs`` of a head's text.

    ``batch`` is the number of tokens of a step, ``length`` that of a sequence, and ``tokens`` as in
    :func:`read_head_text`.
    """
    training = read_head_text(folder, tokens).training
    num_sequences = Dialogues(training, length, seed).per_epoch
    return max(1, math.ceil(epochs * num_sequences * length / batch))
