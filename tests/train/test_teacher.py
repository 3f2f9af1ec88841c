import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoints import MakeCheckpoint
from pronk.models.linear import Linear
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


def test_name_is_that_of_the_folder_or_the_hub(
    teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert teacher.name == "little"
    (tmp_path / "link").symlink_to(teacher.folder)
    assert Teacher(tmp_path / "link").name == "little"
    monkeypatch.setattr("pronk.train.teacher.resolve_model", lambda _: teacher.folder)
    assert Teacher("somebody/small").name == "somebody/small"


@pytest.mark.parametrize("tied", [True, False])
def test_distributions_are_computed_with_plain_weights(
    checkpoint: MakeCheckpoint, *, tied: bool
) -> None:
    """The plain weights are frozen, in the checkpoint's dtype, and equal to those that the kernels
    have packed.
    """
    teacher = Teacher(
        checkpoint("llama", tie_word_embeddings=tied, save_dtype=torch.bfloat16), threads=1
    )
    engine = teacher.llm.engine.target.decoder
    decoder = teacher.decoder
    assert teacher.decoder is decoder
    assert not any(parameter.requires_grad for parameter in decoder.parameters())
    assert teacher.unembedding.dtype == teacher.dtype == torch.bfloat16
    assert torch.equal(teacher.unembedding, decoder.embedding) == tied
    assert isinstance(engine.head, Linear)
    assert np.array_equal(engine.head.packed.unpack(), teacher.unembedding.float().numpy())
