"""Space on the disk of an output folder."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import pronk.models.shards
from pronk.base.errors import OptionError
from pronk.models.shards import check_output_folder


@pytest.mark.parametrize("missing", [1, 1000, 10**6])
def test_a_disk_with_too_little_space_is_told_from_one_with_enough(
    missing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 10_000_000
    usage = SimpleNamespace(free=needed - missing)
    monkeypatch.setattr(pronk.models.shards.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(
        OptionError, match=r"^out: expected (.+) of free disk space in .+, found (.+); "
    ) as error:
        check_output_folder(tmp_path / "out", needed)
    message = str(error.value)
    expected = message.partition("expected ")[2].partition(" of free")[0]
    found = message.rpartition("found ")[2].partition(";")[0]
    assert expected != found
    check_output_folder(tmp_path / "out", needed - missing)
