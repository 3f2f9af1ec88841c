"""A bounded store of outputs, shared by the requests of one proposer, and its file.

The store is two automata (generations). Outputs are added to the young one. When an output would fill the young one
beyond half of ``max_tokens``, the old one is dropped and the young one takes its place ::

    old    … t4 t5 t6              lookups search both: at most max_tokens tokens,
    young  t7 t8                    at least the latest max_tokens / 2

The store takes at most about 85 bytes per token, 150 without the compiled kernels: 5 or 10 MB for the default of 65,536
tokens.

The file is JSON lines: a header, then one list of token ids per output ::

    {"format": "pronk-suffix-store/1", "vocabulary": "9c0f…"}
    [464, 3797, 3332]

Each output is appended by a single write, so several processes may share a file. A process reads the others' outputs
when it starts. A torn last line, which a killed process leaves, is cut off. The file is cut to the latest
``max_tokens`` tokens when a process reads it, and after a process has appended as many tokens. An output that another
process appends during the cut is lost.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from pronk.drafters.from_text._growth import SuffixIndex, make_suffix_index
from pronk.errors import OptionError
from pronk.files.atomic import replace_file

__all__ = ["SuffixStore"]

_FORMAT = "pronk-suffix-store/1"


@dataclass
class SuffixStore:
    """The latest outputs of finished requests.

    Attributes:
        max_match: maximum match length in tokens.
        max_tokens: maximum number of tokens; 0 disables the store.
        path: file that keeps the outputs across processes, or ``None``; read by :meth:`open`.
    """

    max_match: int
    max_tokens: int
    path: Path | None = None
    _generations: list[SuffixIndex] = field(default_factory=list, repr=False)
    _vocabulary: str | None = field(default=None, repr=False)
    # The file for appending, once it is open, and the number of tokens appended since it was last cut.
    _file: Path | None = field(default=None, repr=False)
    _appended: int = field(default=0, repr=False)
    _vocab_size: int = field(default=0, repr=False)

    @property
    def generations(self) -> Sequence[SuffixIndex]:
        """Return the automata, the young one first; empty before the first output."""
        return self._generations

    @property
    def num_tokens(self) -> int:
        """Return the number of stored tokens."""
        return sum(each.num_tokens for each in self._generations)

    @property
    def nbytes(self) -> int:
        """Return the memory of the automata in bytes."""
        return sum(each.nbytes for each in self._generations)

    def open(self, vocabulary: str | None, vocab_size: int) -> None:
        """Read the file, or create it, for outputs of this vocabulary.

        Raises:
            OptionError: the file is unreadable, not writable, damaged, or of another vocabulary; the store stays empty.
        """
        outputs: Sequence[list[int]] = ()
        if self.path is not None:
            try:
                outputs = _read(self.path, vocabulary, vocab_size, self.max_tokens)
            except OSError as error:
                msg = f"suffix: store: expected a readable and writable file, found: {error}; choose another path"
                raise OptionError(msg) from error
        self._vocabulary, self._vocab_size, self._file = vocabulary, vocab_size, self.path
        for output in outputs:
            self._insert(output)

    def add(self, output: Sequence[int]) -> None:
        """Add an output, and append it to the file if that is open.

        If the file cannot be written, a warning is issued and the file is no longer used.
        """
        if not output or not self.max_tokens:
            return
        self._insert(output)
        if self._file is None:
            return
        try:
            _append(self._file, output)
            self._appended += len(output)
            if self._appended > self.max_tokens:
                self._appended = 0
                _read(self._file, self._vocabulary, self._vocab_size, self.max_tokens)
        except (OSError, OptionError) as error:
            warnings.warn(f"{self._file}: past outputs are no longer saved: {error}", RuntimeWarning, stacklevel=2)
            self._file = None

    def _insert(self, output: Sequence[int]) -> None:
        """Add an output to the young automaton; of one longer than ``max_tokens / 2``, its end."""
        half = self.max_tokens // 2
        output = output[max(0, len(output) - half) :]
        if not output:
            return
        if not self._generations or self._generations[0].num_tokens + len(output) > half:
            self._generations = [make_suffix_index(self.max_match), *self._generations[:1]]
        self._generations[0].extend(output)
        self._generations[0].end_text()


def _header(vocabulary: str | None) -> bytes:
    return json.dumps({"format": _FORMAT, "vocabulary": vocabulary}).encode() + b"\n"


def _append(path: Path, output: Sequence[int]) -> None:
    line = json.dumps(list(output)).encode() + b"\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0))
    try:
        written = os.write(file, line)
    finally:
        os.close(file)
    if written < len(line):
        msg = f"{written} of {len(line)} bytes were written"
        raise OSError(msg)


def _read(path: Path, vocabulary: str | None, vocab_size: int, max_tokens: int) -> Sequence[list[int]]:
    """Return a file's latest outputs, oldest first; create, repair or cut the file if necessary."""
    with path.open("a+b") as file:
        file.seek(0)
        header = file.readline()
        if _header(vocabulary).startswith(header) and not header.endswith(b"\n"):
            file.truncate(0)  # a new file, or a torn header
            file.write(_header(vocabulary))
            return ()
        _check_header(path, header, vocabulary)
        outputs, dropped, valid_size = _read_outputs(path, file, vocab_size, max_tokens)
        if file.tell() > valid_size:
            file.truncate(valid_size)
    if dropped:
        lines = (json.dumps(output).encode() + b"\n" for output in outputs)
        with replace_file(path, shared=True) as cut:
            cut.writelines((header, *lines))
    return outputs


def _check_header(path: Path, header: bytes, vocabulary: str | None) -> None:
    try:
        found = json.loads(header)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        msg = f"{path}, line 1: expected the header of a {_FORMAT} file, found {header[:60]!r}; choose another file"
        raise OptionError(msg)
    if found.get("vocabulary") != vocabulary:
        msg = (
            f"{path}: expected outputs of the vocabulary {vocabulary}, found {found.get('vocabulary')}; "
            "give every tokenizer a file of its own"
        )
        raise OptionError(msg)


def _read_outputs(
    path: Path, file: BinaryIO, vocab_size: int, max_tokens: int
) -> tuple[Sequence[list[int]], bool, int]:
    """Return the latest outputs, whether others were dropped, and the end offset of the last whole line."""
    outputs, num_tokens, dropped, valid_size = deque[list[int]](), 0, False, file.tell()
    for number, line in enumerate(file, 2):
        if not line.endswith(b"\n"):
            break
        outputs.append(_parse(path, number, line, vocab_size))
        valid_size += len(line)
        num_tokens += len(outputs[-1])
        while num_tokens > max_tokens and len(outputs) > 1:
            num_tokens -= len(outputs.popleft())
            dropped = True
        if num_tokens > max_tokens:
            outputs[0], num_tokens, dropped = outputs[0][-max_tokens:], max_tokens, True
    return outputs, dropped, valid_size


def _parse(path: Path, number: int, line: bytes, vocab_size: int) -> list[int]:
    try:
        output = json.loads(line)
    except (ValueError, RecursionError):
        output = None
    if not isinstance(output, list) or not all(type(token) is int and 0 <= token < vocab_size for token in output):
        what = f"expected a list of ids below {vocab_size}, found {line[:60]!r}; repair or delete the file"
        msg = f"{path}, line {number}: {what}"
        raise OptionError(msg)
    return output
