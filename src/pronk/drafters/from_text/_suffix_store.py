"""What was said before: a bounded store of outputs that the requests of one guesser share, and its file.

The store is two automata. Outputs go into the young one; when that holds half of what the store may, it becomes the
old one, and the old one is forgotten with all that is in it ::

    old    … t4 t5 t6              both answer; at most max_tokens tokens together, the latest half of them for certain
    young  t7 t8

Memory is at most about 85 bytes a token, 150 without the compiled kernels: 5 or 10 MB for the 65,536 tokens of the
default.

The file is JSON lines: a header, then one list of token ids per output ::

    {"format": "pronk-suffix-store/1", "vocabulary": "9c0f…"}
    [464, 3797, 3332]

An output is appended by a single write, so that several processes may share a file; each sees the others' outputs when
it next starts. A process that was killed in the middle of a write leaves a torn last line, which is cut off. The file
is cut down to the latest ``max_tokens`` tokens when it is read, and whenever a process has appended as many: what
another process appends in the moment of the cut is lost.
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

from pronk.drafters.from_text._growth import SuffixIndex, strings
from pronk.errors import OptionError
from pronk.files.atomic import replace_file

__all__ = ["SuffixStore"]

_FORMAT = "pronk-suffix-store/1"


@dataclass
class SuffixStore:
    """Past outputs, the latest ones.

    Attributes:
        max_match: longest match that is looked for in them.
        max_tokens: no more tokens than this are kept; 0 keeps none.
        path: the file, if outputs are to outlive the process; read by :meth:`open`.
    """

    max_match: int
    max_tokens: int
    path: Path | None = None
    _generations: list[SuffixIndex] = field(default_factory=list, repr=False)
    _vocabulary: str | None = field(default=None, repr=False)
    # Where outputs are appended, once the file was opened, and how many tokens were since it was last read.
    _file: Path | None = field(default=None, repr=False)
    _appended: int = field(default=0, repr=False)
    _vocab_size: int = field(default=0, repr=False)

    @property
    def generations(self) -> Sequence[SuffixIndex]:
        """The automata, the young one first; none before the first output."""
        return self._generations

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept."""
        return sum(each.num_tokens for each in self._generations)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are held."""
        return sum(each.nbytes for each in self._generations)

    def open(self, vocabulary: str | None, vocab_size: int) -> None:
        """Outputs are ids of this vocabulary: read the file, or make it.

        Raises:
            OptionError: the file cannot be read or written, is damaged, or of another vocabulary. Nothing of it is
                kept then.
        """
        outputs: Sequence[list[int]] = ()
        if self.path is not None:
            try:
                outputs = _read(self.path, vocabulary, vocab_size, self.max_tokens)
            except OSError as error:
                msg = f"suffix: expected a file of past outputs, or a place for one, found: {error}; change store"
                raise OptionError(msg) from error
        self._vocabulary, self._vocab_size, self._file = vocabulary, vocab_size, self.path
        for output in outputs:
            self._keep(output)

    def add(self, output: Sequence[int]) -> None:
        """Keep an output, and append it to the file if that is open.

        A file that cannot be written any more is left alone from then on, with a warning: no request depends on it.
        """
        if not output or not self.max_tokens:
            return
        self._keep(output)
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

    def _keep(self, output: Sequence[int]) -> None:
        """Of an output that is larger than half of the store, its end."""
        half = self.max_tokens // 2
        output = output[max(0, len(output) - half) :]
        if not output:
            return
        if not self._generations or self._generations[0].num_tokens + len(output) > half:
            self._generations = [strings(self.max_match), *self._generations[:1]]
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
    """The latest outputs of a file, oldest first; the file is made, mended or cut down where that is called for."""
    with path.open("a+b") as file:
        file.seek(0)
        header = file.readline()
        if _header(vocabulary).startswith(header) and not header.endswith(b"\n"):
            file.truncate(0)  # new, or torn while it was made
            file.write(_header(vocabulary))
            return ()
        _check_header(path, header, vocabulary)
        outputs, dropped, whole = _read_outputs(path, file, vocab_size, max_tokens)
        if file.tell() > whole:
            file.truncate(whole)
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
    """The latest outputs, whether others were left out, and where the last whole line ends."""
    outputs, kept, dropped, whole = deque[list[int]](), 0, False, file.tell()
    for number, line in enumerate(file, 2):
        if not line.endswith(b"\n"):
            break
        outputs.append(_parse(path, number, line, vocab_size))
        whole += len(line)
        kept += len(outputs[-1])
        while kept > max_tokens and len(outputs) > 1:
            kept -= len(outputs.popleft())
            dropped = True
        if kept > max_tokens:
            outputs[0], kept, dropped = outputs[0][-max_tokens:], max_tokens, True
    return outputs, dropped, whole


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
