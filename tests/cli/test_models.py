"""Tables of ``pronk list`` on terminals of several widths, and in a pipe; ``pull`` and ``rm``."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from checkpoints import MakeCheckpoint
from command_line import Command, assert_mistake
from fake_hub import FakeHub
from pronk.checkpoint.hub.cache import find_cached
from pronk.checkpoint.hub.names import HubModel, known_models
from pronk.drafting.from_target.eagle3 import packaged_heads
from pronk.kernels.weight_cache import WeightCache, default_folder
from pronk.models.pairs import all_pairs
from published_heads import HEADS, TARGET, published_heads


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


@pytest.fixture
def hub(
    checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeHub]:
    """Serve a Hub with a model and two heads for it."""
    with published_heads(checkpoint("llama"), tmp_path, monkeypatch) as server:
        yield server


@pytest.mark.usefixtures("hub")
def test_pull_points_at_a_head_and_downloads_it(command: Command) -> None:
    """``pull`` says once how to get a head; ``--drafter`` downloads the first one only."""
    name = f"{TARGET}-FP8"
    first, second = HEADS
    code, out, err = command("pull", name)
    assert (code, out.count("\n")) == (0, 1)
    hint = f"eagle3: {first} is published for this model; pronk pull {name} --drafter downloads it"
    assert err.splitlines()[-1] == hint
    code, out, err = command("pull", name, "--drafter")
    assert (code, out.count("\n")) == (0, 2)
    assert find_cached(HubModel(first)) == Path(out.splitlines()[-1])
    assert find_cached(HubModel(second)) is None
    code, out, err = command("pull", name)
    assert (code, "published" in err) == (0, False)
    code, out, err = command("pull", name, "--drafter")
    assert (code, out.count("\n")) == (0, 1)
    assert err.splitlines()[-1] == f"eagle3: {first} is here already; auto uses it"
    code, out, err = command("pull", second)  # a head is no target
    assert (code, "published" in err) == (0, False)


def test_pull_of_a_model_without_a_head(command: Command, hub: FakeHub) -> None:
    hub.repos["owner/other"] = hub.repos[f"{TARGET}-FP8"]
    code, _, err = command("pull", "owner/other")
    assert (code, "drafter" in err) == (0, False)
    code, _, err = command("pull", "owner/other", "--drafter")
    assert code == 0
    assert err.endswith(
        "no trained drafter or draft model is listed for owner/other; auto drafts without one\n"
    )


@pytest.mark.usefixtures("hub")
def test_list_shows_heads(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model has its drafter, here or not; a downloaded head has its target."""
    name = f"{TARGET}-FP8"
    first, second = HEADS
    command("pull", name)
    code, out, err = command("list")
    assert code == 0
    head, line = out.splitlines()
    assert head.split() == ["name", "size", "drafters"]
    assert line.endswith("eagle3, not here")
    assert err == "pronk pull NAME --drafter downloads a drafter that is not here\n"
    command("pull", name, "--drafter")
    code, out, err = command("list")
    assert (code, err) == (0, "")
    rows = {words[0]: words[3:] for words in map(str.split, out.splitlines()[1:])}
    assert rows == {name: ["eagle3"], first: [TARGET]}
    _, out, _ = command("list", "--json")
    drafters = {row["name"]: row["drafters"] for row in json.loads(out)}
    assert drafters[name] == [
        {"drafter": "eagle3", "source": first, "here": True},
        {"drafter": "eagle3", "source": second, "here": False},
    ]
    assert drafters[first] == []

    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("pronk.models.loader.read_config", refuse)  # files are not read
    assert command("list")[0] == 0


@pytest.mark.usefixtures("hub")
def test_list_of_drafters(command: Command) -> None:
    """``list --drafters`` has the heads that come with pronk, and the table of published ones."""
    first, second = HEADS
    command("pull", second)
    code, out, err = command("list", "--drafters")
    assert (code, err) == (0, "")
    head, *lines = map(str.split, out.splitlines())
    assert head == ["target", "drafter", "source", "here", "license"]
    assert lines[-2:] == [
        [TARGET, "eagle3", first, "MIT"],
        [TARGET, "eagle3", second, "yes", "MIT"],
    ]
    _, out, _ = command("list", "--drafters", "--json")
    rows = json.loads(out)
    assert [row["source"] for row in rows[-2:]] == [*HEADS]
    assert all(row["confirmed"].startswith("https://") for row in rows[-2:])
    packaged = rows[:-2]
    assert "smollm2-135m-instruct" in [row["target"] for row in packaged]
    assert all(row["here"] == "yes" for row in packaged)


def test_one_list_at_a_time(command: Command) -> None:
    result = command("list", "--known", "--drafters")
    assert_mistake(result, "list: expected --known or --drafters, found both")


@pytest.mark.parametrize("columns", [80, 130])
def test_drafters_on_terminals(
    command: Command, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """No line is wider than the terminal, and a wide one has a line for each row."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, err = command("list", "--drafters")
    assert (code, err) == (0, "")
    lines = re.sub(r"\x1b\[\d*m", "", out).splitlines()
    assert max(map(len, lines)) <= columns
    if columns == 130:
        assert len(lines) == 1 + len(all_pairs()) + len(packaged_heads())
