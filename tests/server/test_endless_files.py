"""Files of a batch that do not end are neither read nor written."""

from pathlib import Path

import base.files.test_regular as regular
from base.files.test_regular import endless
from pronk.server.batch import BatchOutput, read_batch

__all__ = ["endless"]


def test_a_file_without_an_end_is_not_read(endless: tuple[Path, str]) -> None:
    regular.test_a_file_without_an_end_is_not_read(lambda path: list(read_batch(path)), endless)


def test_a_file_of_another_kind_is_not_written(endless: tuple[Path, str]) -> None:
    regular.test_a_file_of_another_kind_is_not_written(BatchOutput, endless)
