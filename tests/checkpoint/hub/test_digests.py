"""Published digests: hashes of models, and the table."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from pronk.checkpoint.hub import digests
from pronk.checkpoint.hub.digests import digests_line, model_hash, published_digests
from pronk.checkpoint.hub.names import weight_files
from pronk.reproducibility import PARAMS

TABLE = Path(digests.__file__).parent / "digests.json"


def sha256sum(folder: Path, *names: str) -> str:
    """Return the standard output of ``sha256sum``."""
    command = ["sha256sum", *names]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("name", "hashed"),
    [
        ("one.gguf", ["one.gguf"]),
        ("x-00001-of-00002.gguf", ["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"]),
        ("", ["config.json", "model-1.safetensors", "model-2.safetensors"]),
    ],
)
def test_hashes_are_those_of_sha256sum(name: str, hashed: list[str], tmp_path: Path) -> None:
    files = [
        "model-2.safetensors",
        "model-1.safetensors",
        "config.json",
        "one.gguf",
        "x-00002-of-00002.gguf",
        "x-00001-of-00002.gguf",
        "README.md",
    ]
    for file in files:
        (tmp_path / file).write_text(file)
    assert [file.name for file in weight_files(tmp_path / name)] == [
        file for file in hashed if file != "config.json"
    ]
    printed = sha256sum(tmp_path, *hashed)
    (tmp_path / "lines.txt").write_text(printed)
    last = printed if len(hashed) == 1 else sha256sum(tmp_path, "lines.txt")
    assert model_hash(tmp_path / name) == last.split()[0]


def test_the_table() -> None:
    """Each row is a line as ``pronk verify --published`` prints it."""
    rows = json.loads(TABLE.read_text(encoding="utf-8"))
    lines = []
    for sha256, row in rows.items():
        assert re.fullmatch("[0-9a-f]{64}", sha256)
        assert published_digests(sha256) == row["digests"]
        for found in row["digests"].values():
            assert found.keys() == {"text", *PARAMS}
            assert len({*found.values()}) == len(found)
        bits = max(row["digests"], key=int)
        if len(row["digests"]) == 1:
            lines.append(digests_line(Path(row["file"]), sha256, int(bits), row["digests"][bits]))
    text = TABLE.read_text(encoding="utf-8")
    assert all(line in text for line in lines)
    assert lines
    assert published_digests("0" * 64) == {}
