"""File of a model's own dialogues: token ids, and which of them are answers of the model.

A line of JSON (:class:`AnswersHeader`), then one record per dialogue, all numbers little-endian::

    uint32  number of the dialogue
    uint32  tokens n
    uint16  answers k
    uint16  temperature in hundredths
    k × (uint32 start, uint32 end)
    n × uint16 or uint32  token ids
    uint32  CRC-32 of everything above

Records are only appended. A record that a crash has torn is dropped when the file is opened for
appending, and ignored when it is read.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from pronk import OptionError
from pronk.base import convert_write_errors, describe_reason, read_input, refuse, write_text
from pronk.train.corpus.encoder import token_dtype

_FORMAT = "pronk-answers-1"
_RECORD = struct.Struct("<IIHH")
_SPAN = struct.Struct("<II")
_CHECK = struct.Struct("<I")


@dataclass(frozen=True)
class AnswersHeader:
    """Origin of the answers: the model, its tokenizer, the files of the questions, and the seed."""

    target: str  # name of the model's file or folder
    architecture: str
    weights: str  # ``Fingerprint.weights`` of the model (pronk.models.loader)
    tokenizer: str  # fingerprint of the tokenizer
    vocab_size: int
    sources: tuple[str, ...]
    max_tokens: int  # maximum length of an answer
    seed: int
    format: str = _FORMAT


@dataclass(frozen=True)
class Dialogue:
    """One dialogue: all token ids, chat template included, and the half-open ranges of the answers."""

    number: int
    temperature: float
    ids: list[int]
    answers: list[tuple[int, int]]

    @property
    def num_answered(self) -> int:
        """Number of tokens that the model wrote."""
        return sum(end - start for start, end in self.answers)


class AnswersWriter:
    """Appends dialogues to a file; ``existing`` are those that it had.

    Another file, or other settings in it, raise an OptionError; a failed write raises a
    CheckpointError.
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
        """Write the dialogues at the end of the file."""
        data = b"".join(map(self._pack, dialogues))
        with convert_write_errors(self.path, "answers"), self.path.open("ab") as file:
            file.write(data)

    def _pack(self, d: Dialogue) -> bytes:
        body = _RECORD.pack(d.number, len(d.ids), len(d.answers), round(100 * d.temperature))
        body += (
            b"".join(_SPAN.pack(*span) for span in d.answers)
            + np.array(d.ids, self._dtype).tobytes()
        )
        return body + _CHECK.pack(zlib.crc32(body))


def read_answers(path: Path) -> tuple[AnswersHeader, list[Dialogue]]:
    """Read a file of answers; raise an OptionError if it cannot be read or is no such file."""
    return _read(path)[:2]


def merge_answers(files: Sequence[Path], out: Path) -> None:
    """Write the dialogues of several files of one model to the file ``out``, by number and without copies.

    A file that cannot be read, or has other settings than the first one, raises an OptionError; a
    failed write raises a CheckpointError.
    """
    (header, dialogues), *others = [read_answers(path) for path in files]
    for path, (found, more) in zip(files[1:], others, strict=True):
        _check_same(path, header, found)
        dialogues += more
    partial = out.with_name(f"{out.name}.partial")
    partial.unlink(missing_ok=True)
    by_number = {dialogue.number: dialogue for dialogue in dialogues}
    AnswersWriter(partial, header).append([by_number[number] for number in sorted(by_number)])
    partial.replace(out)


def _read(path: Path) -> tuple[AnswersHeader, list[Dialogue], int]:
    """Return the header, the dialogues of the whole records, and the file offset after these."""
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
        if end + _CHECK.size > len(data) or _CHECK.unpack_from(data, end)[0] != zlib.crc32(
            data[offset:end]
        ):
            break
        answers = [_SPAN.unpack_from(data, spans + i * _SPAN.size) for i in range(num_answers)]
        tokens = np.frombuffer(data, dtype, count, ids).tolist()
        offset = end + _CHECK.size
        dialogues.append(
            Dialogue(number, temperature / 100, tokens, [(start, stop) for start, stop in answers])
        )
    return header, dialogues, offset


def _check_same(path: Path, found: AnswersHeader, header: AnswersHeader) -> None:
    for field in fields(header):
        old = getattr(found, field.name)
        new = getattr(header, field.name)
        if old != new:
            refuse(
                path,
                f"expected {field.name} {old!r} as before, found {new!r}; choose another file",
                OptionError,
            )
