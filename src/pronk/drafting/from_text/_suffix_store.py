"""Outputs of finished requests for the drafter ``suffix``, and the file that keeps them.

The store consists of two suffix indexes, the generations. Outputs are added to the young
generation. If an output would make the young generation longer than ``max_tokens / 2``, the old
generation is dropped, the young one becomes the old one, and the output begins a new young one. Of
one output, at most the last ``max_tokens / 2`` tokens are kept.

The file is JSON lines: a header, then one list of token ids per output ::

    {"format": "pronk-suffix-store/1", "vocabulary": "9c0f…"}
    [464, 3797, 3332]

Each output is appended by a single write, so several processes may share a file. A process reads
the file when it opens the store, and does not see outputs that other processes append later. An
incomplete last line, which a killed process leaves, is removed. Reading also shortens the file to
the latest ``max_tokens`` tokens; to keep it short, a process reads it again after it has appended
that many. An output that another process appends meanwhile is lost.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pronk.base.errors import OptionError, describe_error
from pronk.base.files.atomic import replace_file
from pronk.base.files.regular import check_regular
from pronk.drafting.from_text._growth import SuffixIndex, make_suffix_index

_FORMAT = "pronk-suffix-store/1"


@dataclass
class SuffixStore:
    """The latest outputs of finished requests."""

    max_match: int  # maximum match length in tokens
    max_tokens: int  # maximum number of tokens; 0 disables the store
    # The young generation, then the old one. The list is empty before the first output.
    generations: list[SuffixIndex] = field(default_factory=list, repr=False)
    _vocabulary: str | None = field(default=None, repr=False)
    _vocab_size: int = field(default=0, repr=False)
    # File that keeps the outputs across processes; ``None`` before ``open`` and after a failed
    # write.
    _file: Path | None = field(default=None, repr=False)
    # number of tokens appended since the file was last shortened
    _num_appended: int = field(default=0, repr=False)

    def open(self, path: Path, vocabulary: str | None, vocab_size: int) -> None:
        """Read the file of the store, or create it.

        ``vocabulary`` is the fingerprint of the tokenizer.

        Raises:
            OptionError: the file is unreadable, not writable, damaged, or of another tokenizer; the
                store stays empty.
        """
        try:
            for output in _read_file(path, vocabulary, vocab_size, self.max_tokens):
                self._insert(output)
        except OSError as error:
            found = describe_error(error)
            msg = (
                f"suffix: store: expected a readable and writable file, found: {found}; choose "
                "another path"
            )
            raise OptionError(msg) from error
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._file = path

    def add(self, output: Sequence[int]) -> None:
        """Add the token ids of an output, and append them to the file.

        If the file cannot be written, a warning is issued and the file is no longer used.
        """
        if not output or not self.max_tokens:
            return
        self._insert(output)
        if self._file is None:
            return
        try:
            _append_line(self._file, output)
            self._num_appended += len(output)
            if self._num_appended > self.max_tokens:
                self._num_appended = 0
                # shortens the file
                _read_file(self._file, self._vocabulary, self._vocab_size, self.max_tokens)
        except (OSError, OptionError) as error:
            warnings.warn(
                f"{self._file}: past outputs are no longer saved: {describe_error(error)}",
                RuntimeWarning,
                stacklevel=2,
            )
            self._file = None

    def _insert(self, output: Sequence[int]) -> None:
        max_generation = self.max_tokens // 2
        output = output[max(0, len(output) - max_generation) :]
        if not output:
            return
        if not self.generations or self.generations[0].num_tokens + len(output) > max_generation:
            self.generations = [make_suffix_index(self.max_match), *self.generations[:1]]
        self.generations[0].extend(output)
        self.generations[0].end_text()


def _header(vocabulary: str | None) -> bytes:
    return json.dumps({"format": _FORMAT, "vocabulary": vocabulary}).encode() + b"\n"


def _append_line(path: Path, output: Sequence[int]) -> None:
    """Append an output as one line by a single write: lines of several processes do not mix."""
    line = json.dumps(list(output)).encode() + b"\n"
    # the flag O_BINARY exists on Windows only
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0))
    try:
        num_written = os.write(descriptor, line)
    finally:
        os.close(descriptor)
    if num_written < len(line):
        msg = f"{num_written} of {len(line)} bytes were written"
        raise OSError(msg)


def _read_file(
    path: Path, vocabulary: str | None, vocab_size: int, max_tokens: int
) -> Sequence[list[int]]:
    """Return the outputs in the file, oldest first.

    Create, repair or shorten the file if necessary.
    """
    check_regular(path)
    with path.open("a+b") as file:
        file.seek(0)
        header = file.readline()
        if _header(vocabulary).startswith(header) and not header.endswith(b"\n"):
            file.truncate(0)  # a new file, or an incomplete header
            file.write(_header(vocabulary))
            return ()
        _check_header(path, header, vocabulary)
        outputs, has_dropped, end = _read_outputs(path, file, vocab_size, max_tokens)
        if file.tell() > end:
            file.truncate(end)
    if has_dropped:
        lines = (json.dumps(output).encode() + b"\n" for output in outputs)
        with replace_file(path, shared=True) as new_file:
            new_file.writelines((header, *lines))
    return outputs


def _parse_json(line: bytes) -> Any:
    """Return the value of a line; ``None`` if it is no JSON."""
    with suppress(ValueError, RecursionError):
        return json.loads(line)
    return None


def _check_header(path: Path, header: bytes, vocabulary: str | None) -> None:
    fields = _parse_json(header)
    if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
        msg = (
            f"{path}, line 1: expected the header of a {_FORMAT} file, found {header[:60]!r}; "
            "choose another file"
        )
        raise OptionError(msg)
    if fields.get("vocabulary") != vocabulary:
        problem = (
            f"expected outputs of the vocabulary {vocabulary}, found {fields.get('vocabulary')}"
        )
        msg = f"{path}: {problem}; give every tokenizer a file of its own"
        raise OptionError(msg)


def _read_outputs(
    path: Path, file: BinaryIO, vocab_size: int, max_tokens: int
) -> tuple[Sequence[list[int]], bool, int]:
    """Return the latest outputs, at most ``max_tokens`` tokens.

    Also returned: whether older outputs are left out, and the offset of the end of the last
    complete line.
    """
    outputs = deque[list[int]]()
    num_tokens = 0
    has_dropped = False
    end = file.tell()
    for line_number, line in enumerate(file, 2):  # line 1 is the header
        if not line.endswith(b"\n"):
            break
        outputs.append(_parse_line(path, line_number, line, vocab_size))
        end += len(line)
        num_tokens += len(outputs[-1])
        while num_tokens > max_tokens and len(outputs) > 1:
            num_tokens -= len(outputs.popleft())
            has_dropped = True
        if num_tokens > max_tokens:
            outputs[0] = outputs[0][-max_tokens:]
            num_tokens = max_tokens
            has_dropped = True
    return outputs, has_dropped, end


def _parse_line(path: Path, line_number: int, line: bytes, vocab_size: int) -> list[int]:
    output = _parse_json(line)
    if not isinstance(output, list) or not all(
        type(token) is int and 0 <= token < vocab_size for token in output
    ):
        problem = (
            f"expected a list of ids below {vocab_size}, found {line[:60]!r}; "
            "repair or delete the file"
        )
        msg = f"{path}, line {line_number}: {problem}"
        raise OptionError(msg)
    return output
