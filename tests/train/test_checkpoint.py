import errno
import os
from pathlib import Path

import pytest
import torch

from pronk.errors import CheckpointError
from pronk.train.checkpoint import load_checkpoint, save_checkpoint


def test_full_disk_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint.pt"

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"a training checkpoint, found No space left on device; make room and"):
        save_checkpoint(path, {"step": 1})
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    save_checkpoint(path, {"step": 1, "weights": torch.ones(3)})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        CheckpointError, match=r"\(the one before is intact\), found No space left on device; make room"
    ):
        save_checkpoint(path, {"step": 2})
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint.pt"]
    assert load_checkpoint(path)["step"] == 1
