"""Every tensor of a checkpoint belongs to one group of tensors."""

from collections import defaultdict

import pytest

from checkpoints import MakeCheckpoint
from pronk.checkpoint.tensors import Checkpoint
from pronk.models.family import GGUF_NAMES
from pronk.models.loader import read_config
from pronk.models.tensor_groups import _group_of_module, tensor_groups

DENSE = {"embedding", "attention", "MLP", "norms"}
# Groups of the random model of a family. Heads that are tied to the embedding have no tensor, and
# layers of Gemma 4 that read the keys of others do not use their own.
FAMILIES = {
    "gpt2": DENSE,
    "gemma3": DENSE | {"other"},
    "gemma4_text": DENSE | {"other"},
    "gpt_oss": DENSE - {"MLP"} | {"experts", "output"},
    "deepseek_v2": DENSE | {"experts", "output"},
    "lfm2_moe": DENSE | {"experts", "convolution"},
    "qwen3_5_moe_text": DENSE - {"MLP"} | {"experts", "recurrence", "output"},
    "nemotron_h": DENSE | {"experts", "recurrence", "output"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_groups_of_a_family(checkpoint: MakeCheckpoint, family: str) -> None:
    folder = checkpoint(family)
    groups = defaultdict[str, set[str]](set)
    for name, group in tensor_groups(Checkpoint(folder), read_config(folder)):
        groups[group].add(name)
    assert {*groups} == FAMILIES[family], dict(groups)


def test_modules_of_gguf_files() -> None:
    """Modules of all names in GGUF files have the group that their names suggest."""
    for role, modules in GGUF_NAMES.layer.items():
        group = _group_of_module(role)
        for name in modules:
            assert ("norm" in name) == (group == "norms"), (role, name)
            assert ("exp" in name or name == "ffn_gate_inp") == (group == "experts"), (role, name)
            assert ("ssm" in name) <= (group in ("recurrence", "norms")), (role, name)
