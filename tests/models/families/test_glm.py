"""GLM-4 and GLM-4.5: rotations of consecutive values, and MTP heads that are not used."""

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from checkpoints import MakeCheckpoint
from gguf_files import convert
from models.test_nemotron import logits
from pronk.base.errors import ConfigError
from pronk.checkpoint.rope import RopeConfig, RopeTable
from pronk.models.families import parse_config
from pronk.models.loader import read_config
from quantized_formats import read_tensors, write_tensors

HEAD = {
    "enorm": (48,),
    "hnorm": (48,),
    "eh_proj": (48, 96),
    "embed_tokens": (300, 48),
    "shared_head.norm": (48,),
}


def test_a_rotation_over_whole_heads_has_the_same_frequencies() -> None:
    part = RopeConfig(8, 10000.0)
    own = RopeTable(part).up_to(300)
    whole = RopeTable(part.over_whole_heads(16)).up_to(300)
    assert np.abs(whole[:, :, :4] - own).max() < 1e-5
    assert (whole[:, 0, 4:] == 1.0).all()  # cosines
    assert np.abs(whole[:, 1, 4:]).max() < 1e-20  # sines


def test_an_mtp_head_of_a_folder_is_not_used(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    original = checkpoint("glm4_moe")
    folder = tmp_path / "model"
    shutil.copytree(original, folder)
    head = {
        f"model.layers.3.{name}.weight": np.ones(shape, np.float32) for name, shape in HEAD.items()
    }
    write_tensors(folder, read_tensors(original) | head)
    assert np.array_equal(logits(folder), logits(original))


def test_an_mtp_head_of_a_file_is_not_used(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    def add_head(writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(4)
        writer.add_nextn_predict_layers(1)
        for name in ("nextn.eh_proj", "attn_norm"):
            writer.add_tensor(f"blk.3.{name}.weight", np.ones((48, 96), np.float32))

    folder = checkpoint("glm4_moe")
    plain = convert(folder, tmp_path / "plain.gguf")
    path = convert(folder, tmp_path / "head.gguf", change=add_head)
    assert read_config(path).num_layers == 3
    assert np.array_equal(logits(path), logits(plain))


@pytest.mark.parametrize(
    ("family", "values", "found"),
    [
        (
            "glm4",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}},
            "rope: expected no scaling in a glm4 model, found yarn",
        ),
        ("glm4_moe", {"n_group": 3}, "expected groups of one size, from which a row has 3 experts"),
        ("glm4_moe", {"topk_group": 1}, "found 8 experts in 4 groups"),
    ],
)
def test_configs_that_are_refused(family: str, values: dict[str, Any], found: str) -> None:
    raw = {
        "model_type": family,
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
    }
    with pytest.raises(ConfigError, match=found):
        parse_config(raw | values)
