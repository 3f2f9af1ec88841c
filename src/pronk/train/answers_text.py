"""Training text from files of the target's own dialogues, in place of other sources.

The files are those of :mod:`pronk.train.on_policy`: the dialogues, each followed by the end-of-text token, are the
target's own text, and the prompts of the held-out dialogues are those with which the engine measures the drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pronk.corpus.answers import merge_answers, read_answers
from pronk.corpus.collection import OriginRecord
from pronk.corpus.sources import SourceSpec
from pronk.errors import OptionError
from pronk.files.atomic import convert_write_errors, write_json, write_tokens
from pronk.train.dialogues import hold_out
from pronk.train.head_plan import check_answers
from pronk.train.on_policy import pack_texts
from pronk.train.teacher import Teacher

__all__ = ["has_answers", "write_answers_text"]


def has_answers(sources: Sequence[SourceSpec]) -> bool:
    """Return whether the sources are files of answers.

    Raises:
        OptionError: only some of them are.
    """
    kinds = [spec.kind == "answers" for spec in sources]
    if any(kinds) and not all(kinds):
        msg = "source: expected files of answers alone, or none, found both; train on one or the other"
        raise OptionError(msg)
    return any(kinds)


def write_answers_text(sources: Sequence[SourceSpec], teacher: Teacher, folder: Path, held_out: int) -> None:
    """Write the token files of a run into ``folder``, unless they exist; ``held_out``: number of prompts.

    Raises:
        OptionError: another model wrote the answers.
        CheckpointError: a file of answers is damaged, or the text cannot be written.
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
    kept = kept[:held_out]
    write_tokens(folder / "on-policy.bin", pack_texts([(each.ids, []) for each in training], teacher.encoder))
    write_tokens(folder / "valid-on-policy.bin", pack_texts([(each.ids, []) for each in kept], teacher.encoder))
    prompts = [each.ids[: each.answers[0][0]] for each in kept if each.answers]
    write_json(folder / "prompts.json", {"train": [], "held_out": prompts})
    answered = sum(each.num_answered for each in training)
    write_json(folder / "on-policy.json", {"tokens": answered, "dialogues": len(training)})
    questions = f"{header.target} to questions from {', '.join(header.sources)}"
    origin = OriginRecord("answers", questions, "of these documents", len(training), copy.stat().st_size)
    summary = {"recipe": asdict(header), "weights": {"answers": 1.0}, "duplicates": 0, "excluded": 0}
    write_json(folder / "sources.json", {**summary, "origins": [asdict(origin)]}, indent=1)
