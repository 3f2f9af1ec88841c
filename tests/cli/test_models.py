"""Tables of ``pronk list`` on terminals of several widths, and in a pipe; ``pronk rm``."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from command_line import Command
from pronk.checkpoint.hub.names import HubModel, known_models
from pronk.kernels.weight_cache import WeightCache, default_folder


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


def test_known_sizes(command: Command) -> None:
    """The sizes of downloads are those of the table; unknown ones are empty or a dash."""
    code, out, err = command("list", "--known", "--json")
    assert (code, err) == (0, "")
    listed = {row["name"]: row for row in json.loads(out)}
    assert listed["smollm2"]["size"] == "98.4 MB"
    assert (listed["lfm2-350m"]["weights"], listed["lfm2-350m"]["size"]) == ("Q4_K_M", "229 MB")
    unknown = {name for name, known in known_models().items() if not known.num_bytes}
    assert {name for name, row in listed.items() if not row["size"]} == unknown
    assert len(unknown) < len(listed) / 2
    _, out, _ = command("list", "--known")
    assert {line.split()[0] for line in out.splitlines() if " – " in line} == unknown


def test_removing_a_model_removes_its_packed_weights(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setattr(Path, "home", lambda: home)
    model = tmp_path / "m-Q4_0.gguf"
    model.touch()
    packed = WeightCache(default_folder(), [(str(model), 1, 2, 3)])
    packed.add("a", np.zeros(2_000_000, np.uint8))
    packed.save()

    def remove(_: HubModel) -> int:
        model.unlink()
        return 3_000_000

    monkeypatch.setattr("pronk.checkpoint.hub.cache.remove_cached", remove)
    code, _, err = command("rm", "o/m:Q4_0")
    assert (code, err) == (0, "removed o/m:Q4_0, 5 MB\n")
    assert not packed.path.exists()
