"""Tables of ``pronk list`` on terminals of several widths, and in a pipe."""

import re

import pytest

from command_line import Command
from pronk.checkpoint.hub.names import known_models


def rows(command: Command, monkeypatch: pytest.MonkeyPatch, columns: int | None) -> list[list[str]]:
    """Return the words of each line of ``pronk list --known``; ``None`` columns: in a pipe."""
    if columns is not None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", str(columns))
    code, out, err = command("list", "--known")
    assert (code, err) == (0, "")
    return [line.split() for line in re.sub(r"\x1b\[\d*m", "", out).splitlines()]


@pytest.mark.parametrize("columns", [80, 120, None])
def test_rows_of_known_models_are_single_lines(
    command: Command, monkeypatch: pytest.MonkeyPatch, columns: int | None
) -> None:
    head, *lines = rows(command, monkeypatch, columns)
    assert [line[0] for line in lines] == [*known_models()]
    assert ("repository" in head) is (columns != 80)
    if columns != 80:
        assert [line[-1] for line in lines] == [
            known.model.repo for known in known_models().values()
        ]
