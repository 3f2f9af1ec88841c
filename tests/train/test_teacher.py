from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pronk.train.teacher import Teacher


def test_fingerprints_tell_weights_config_and_tokenizer(teacher: Teacher, tmp_path: Path) -> None:
    before = teacher.fingerprints
    assert set(before) == {"tokenizer", "weights"}
    shutil.copytree(teacher.folder, tmp_path / "same")
    assert Teacher(tmp_path / "same").fingerprints == before
    path = tmp_path / "same" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": 20000.0}))
    other = Teacher(tmp_path / "same").fingerprints
    assert other["tokenizer"] == before["tokenizer"]
    assert other["weights"] != before["weights"]


def test_name_is_the_folder_s(teacher: Teacher, tmp_path: Path) -> None:
    assert teacher.name == "little"
    (tmp_path / "link").symlink_to(teacher.folder)
    assert Teacher(tmp_path / "link").name == "little"


def test_name_of_a_model_on_the_hub_is_its_id(teacher: Teacher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pronk.llm.resolve_model", lambda _: teacher.folder)
    assert Teacher("somebody/small").name == "somebody/small"
