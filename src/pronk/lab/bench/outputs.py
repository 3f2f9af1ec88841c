"""Outputs of a benchmark: tables on the terminal, files, the report."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from pronk import OptionError
from pronk.base import refuse
from pronk.base.checks import check_writable

if TYPE_CHECKING:  # imports the engine, which would delay the message about a wrong path
    from pronk.lab.bench.records import Record

STDOUT = Path("-")


@dataclass(frozen=True)
class Outputs:
    """Paths of the files that a benchmark writes, besides the tables on the terminal.

    ``None``: the file is not written.
    """

    document: Path | None  # JSON file; STDOUT: JSON on standard output, tables on standard error
    markdown: Path | None
    report: Path | None  # folder for index.html
    trace: Path | None  # JSON lines, one per measurement, written during the benchmark

    def check(self) -> None:
        """Check all paths before the benchmark.

        Raises OptionError if a path is repeated or not writable.
        """
        paths = {"json": self.document, "markdown": self.markdown, "trace": self.trace}
        files = {name: path for name, path in paths.items() if path is not None}
        if len({path.resolve() for path in files.values()}) < len(files):
            msg = (
                f"{', '.join(files)}: expected different files, found "
                f"{', '.join(map(str, files.values()))}"
            )
            raise OptionError(msg)
        for name, path in files.items():
            if (name, path) == ("json", STDOUT):
                continue
            if path == STDOUT:
                refuse(
                    name,
                    "expected a file, found -, which only --json can be; name a file",
                    OptionError,
                )
            check_writable(name, path)
        if self.report is not None:
            from pronk.lab.bench.report import check_report  # noqa: PLC0415 - an optional dependency

            check_report(self.report)

    def deliver(self, records: Sequence[Record]) -> None:
        """Write the files, then print the tables.

        In this order the files are complete even if the terminal was closed. Raises OptionError if
        a file could not be written, after the other files and the tables.
        """
        from pronk.base import save_result  # noqa: PLC0415 - imports NumPy
        from pronk.lab.bench.figures import summarize  # noqa: PLC0415
        from pronk.lab.bench.render import show, to_markdown  # noqa: PLC0415 - imports the engine

        result = summarize(records)
        json_text = json.dumps(asdict(result), ensure_ascii=False) + "\n"
        problems: list[str] = []
        with _collect(problems):
            if self.document is not None and self.document != STDOUT:
                save_result("json", self.document, json_text)
        with _collect(problems):
            if self.markdown is not None:
                save_result("markdown", self.markdown, to_markdown(result))
        with _collect(problems):
            if self.report is not None:
                from pronk.lab.bench.report import write_report  # noqa: PLC0415 - an optional dependency

                sys.stderr.write(f"{write_report(result, self.report)}\n")
        show(result, Console(highlight=False, stderr=self.document == STDOUT))
        if self.document == STDOUT:
            sys.stdout.write(json_text)
        if problems:
            raise OptionError("; ".join(problems))


@contextmanager
def _collect(problems: list[str]) -> Iterator[None]:
    """Append the message of an OptionError of the block to ``problems``."""
    try:
        yield
    except OptionError as error:
        problems.append(str(error))
