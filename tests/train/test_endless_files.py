"""Answers of a teacher are not read from a file that does not end."""

from pathlib import Path

import base.files.test_regular as regular
from base.files.test_regular import endless
from pronk.train.corpus.answers import read_answers

__all__ = ["endless"]


def test_a_file_without_an_end_is_not_read(endless: tuple[Path, str]) -> None:
    regular.test_a_file_without_an_end_is_not_read(read_answers, endless)
