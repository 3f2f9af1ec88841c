"""File of a model's own dialogues: token ids, and which of them are answers of the model.

A model without a chat format continues beginnings of documents instead: the beginning is the
question of such a dialogue, and the continuation is its answer.

The file begins with a line of JSON (:class:`AnswersHeader`). Then follows one record per dialogue,
all numbers little-endian::

    uint32  number of the dialogue
    uint32  number n of tokens
    uint16  number k of answers
    uint16  temperature in hundredths
    k × (uint32 start, uint32 end)     range of each answer in the tokens
    n × uint16 or uint32               token ids
    uint32  CRC-32 of the record so far

Records are only appended. An incomplete record at the end, left by a crash, is dropped when the
file is opened for appending, and ignored when the file is read.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from pronk import OptionError
from pronk.base import convert_write_errors, describe_reason, read_input, refuse, write_text
from pronk.train.corpus.encoder import token_dtype

_FORMAT = "pronk-answers-1"
# values of ``AnswersHeader.prompts``
QUESTIONS = "questions"
BEGINNINGS = "beginnings of documents"
_RECORD = struct.Struct("<IIHH")
_SPAN = struct.Struct("<II")
_CHECK = struct.Struct("<I")


@dataclass(frozen=True)
class AnswersHeader:
    """Header of a file of answers: the model and settings with which the dialogues were made."""

    target: str  # name of the file or folder of the model that answered
    architecture: str  # its family and sizes in words
    weights: str  # fingerprint of the model's weights (``pronk.models.loader.Fingerprint.weights``)
    tokenizer: str  # fingerprint of that model's tokenizer
    vocab_size: int  # of the model: a limit of the token ids
    sources: tuple[str, ...]  # names of the sources of the questions or beginnings
    max_tokens: int  # maximum number of tokens of an answer
    seed: int  # from which the seed of each dialogue is derived
    format: str = _FORMAT
    # what the model answered: questions in its chat format, or beginnings of documents
    prompts: str = QUESTIONS


@dataclass(frozen=True)
class Dialogue:
    """One dialogue of a user and a model, as token ids."""

    number: int
    temperature: float  # sampling temperature of the answers; 0 means greedy decoding
    ids: list[int]  # token ids of the whole dialogue, those of the chat template included
    # ranges of ``ids``, without their ends, that the model has generated
    answers: list[tuple[int, int]]

    @property
    def num_answered(self) -> int:
        """Number of tokens of the dialogue that the model wrote."""
        return sum(end - start for start, end in self.answers)


class AnswersWriter:
    """Writer that appends dialogues to a file of answers.

    ``existing`` are the dialogues that the file had before. Raises OptionError if the file is no
    file of answers, or has another header; CheckpointError if writing fails.
    """

    def __init__(self, path: Path, header: AnswersHeader) -> None:
        self.path = path
        self._dtype = np.dtype(token_dtype(header.vocab_size)).newbyteorder("<")
        self.existing: list[Dialogue] = []
        if path.exists() and path.stat().st_size:
            found, self.existing, end = _read(path)
            _check_same(path, found, header)
            with convert_write_errors(path, "answers"), path.open("r+b") as file:
                file.truncate(end)
        else:
            write_text(path, json.dumps(asdict(header)) + "\n", "answers")

    def append(self, dialogues: list[Dialogue]) -> None:
        """Write dialogues to the end of the file of answers."""
        data = b"".join(map(self._pack, dialogues))
        with convert_write_errors(self.path, "answers"), self.path.open("ab") as file:
            file.write(data)

    def _pack(self, d: Dialogue) -> bytes:
        """Return a dialogue as the bytes of a record in the file."""
        body = _RECORD.pack(d.number, len(d.ids), len(d.answers), round(100 * d.temperature))
        for span in d.answers:
            body += _SPAN.pack(*span)
        body += np.array(d.ids, self._dtype).tobytes()
        return body + _CHECK.pack(zlib.crc32(body))


def read_answers(path: Path) -> tuple[AnswersHeader, list[Dialogue]]:
    """Read a file of answers; raise OptionError if it cannot be read, or is no file of answers."""
    return _read(path)[:2]


def merge_answers(files: Sequence[Path], out: Path) -> None:
    """Write the dialogues of several files of answers to ``out``, sorted by number, each once.

    The files may have other sources, seeds and maximum lengths; the header of ``out`` has all
    sources, and otherwise that of the first file.

    Raises:
        OptionError: a file cannot be read, is of another model or of other prompts than the first
            one, or has another dialogue of the same number than an earlier file.
        CheckpointError: writing fails.
    """
    contents = [read_answers(path) for path in files]
    header, _ = contents[0]
    sources: dict[str, None] = {}
    by_number: dict[int, Dialogue] = {}
    for path, (found, dialogues) in zip(files, contents, strict=True):
        sources.update(dict.fromkeys(found.sources))
        free = {name: getattr(header, name) for name in ("sources", "seed", "max_tokens")}
        _check_same(path, header, replace(found, **free))
        for dialogue in dialogues:
            if by_number.setdefault(dialogue.number, dialogue) != dialogue:
                msg = (
                    f"{path}: expected numbers of dialogues that no other file has, found "
                    f"{dialogue.number} twice; write the file with another --first"
                )
                raise OptionError(msg)
    partial = out.with_name(f"{out.name}.partial")
    partial.unlink(missing_ok=True)
    in_order = [by_number[number] for number in sorted(by_number)]
    AnswersWriter(partial, replace(header, sources=tuple(sources))).append(in_order)
    partial.replace(out)


def _read(path: Path) -> tuple[AnswersHeader, list[Dialogue], int]:
    """Return the header, the dialogues of all complete records, and the offset after these."""
    header: AnswersHeader | None
    try:
        data = read_input(path)
        line, _, _ = data.partition(b"\n")
        values: dict[str, Any] = json.loads(line.decode())
        header = AnswersHeader(**values | {"sources": tuple(values["sources"])})
    except OSError as error:
        msg = (
            f"{path}: expected a file of answers, found {describe_reason(error)}; write one with "
            "pronk train texts"
        )
        raise OptionError(msg) from error
    except (ValueError, KeyError, TypeError):
        header = None
    if header is None or header.format != _FORMAT:
        msg = (
            f"{path}: expected a file of answers ({_FORMAT}), found another file; write one with "
            "pronk train texts"
        )
        raise OptionError(msg)
    dialogues: list[Dialogue] = []
    offset = len(line) + 1
    dtype = np.dtype(token_dtype(header.vocab_size)).newbyteorder("<")
    while offset + _RECORD.size <= len(data):
        number, count, num_answers, temperature = _RECORD.unpack_from(data, offset)
        spans = offset + _RECORD.size
        ids = spans + num_answers * _SPAN.size
        end = ids + count * dtype.itemsize
        if end + _CHECK.size > len(data):
            break
        (checksum,) = _CHECK.unpack_from(data, end)
        if checksum != zlib.crc32(data[offset:end]):
            break
        answers: list[tuple[int, int]] = []
        for place in range(spans, ids, _SPAN.size):
            start, stop = _SPAN.unpack_from(data, place)
            answers.append((start, stop))
        tokens = np.frombuffer(data, dtype, count, ids).tolist()
        dialogues.append(Dialogue(number, temperature / 100, tokens, answers))
        offset = end + _CHECK.size
    return header, dialogues, offset


def _check_same(path: Path, found: AnswersHeader, header: AnswersHeader) -> None:
    """Raise OptionError if the file ``path``, with the header ``found``, has another header.

    ``header`` is the expected one: the same model, tokenizer, questions and settings. The name of
    the model's file may differ, as the weights tell models apart.
    """
    for field in fields(header):
        if field.name == "target":
            continue
        old = getattr(found, field.name)
        new = getattr(header, field.name)
        if old != new:
            refuse(
                path,
                f"expected {field.name} {old!r} as before, found {new!r}; choose another file",
                OptionError,
            )
