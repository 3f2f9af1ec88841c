"""Nemotron-H against transformers, and its GGUF files: each layer has one sublayer."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import MakeCheckpoint, transformers_cached_greedy, transformers_logits
from models.test_loader import load
from nemotron_models import BLOCKS, write_gguf
from pronk import LLM, SamplingParams
from pronk.base.arrays import Array
from pronk.base.errors import ConfigError
from pronk.models.families import parse_config
from pronk.models.loader import read_config
from quantized_formats import read_tensors, write_tensors
from tiny_models import kernels, text_logits

TOKENS = random.Random(0).choices(range(300), k=65)
# The layers of a dense model, of one that begins with an MLP, and without some kinds.
DENSE = ["linear_attention", "mlp", "full_attention", "mlp"]
CASES: dict[str, dict[str, Any]] = {
    "all kinds": {},
    "dense": {"layers_block_type": DENSE},
    "an MLP first": {"layers_block_type": ["moe", "full_attention", "linear_attention"]},
    "no recurrence": {"layers_block_type": ["full_attention", "moe", "mlp"]},
    "one group": {
        "n_groups": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
    },
    "no bias, odd sizes": {
        "use_conv_bias": False,
        "mamba_num_heads": 6,
        "mamba_head_dim": 12,
        "ssm_state_size": 20,
        "conv_kernel": 3,
    },
}


# Files have one width of MLPs or experts, so a model has either.
EXPERTS = {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]}
GGUF_CASES = {
    "experts": EXPERTS,
    "one group": CASES["one group"] | EXPERTS,
    "no bias, odd sizes": CASES["no bias, odd sizes"] | EXPERTS,
    "dense": CASES["dense"],
    "an MLP first": CASES["an MLP first"],
}


def logits(path: Path) -> Array:
    return text_logits(load(path, kernels=kernels()), TOKENS)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("nemotron_h", **CASES[case])
    expected = transformers_logits(folder, TOKENS)
    assert expected.std() > 0.3, "logits too flat to show anything"
    assert np.abs(logits(folder) - expected).max() < 1e-4


@pytest.mark.few(1)
@pytest.mark.parametrize("case", ["all kinds", "dense"])
def test_200_greedy_tokens_equal_transformers(case: str, checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("nemotron_h", **CASES[case])
    prompt = TOKENS[:12] * 2
    expected = transformers_cached_greedy(folder, prompt, 200)
    assert len(set(expected)) > 5
    llm = LLM(folder, threads=1, dtype="float32")
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    for drafter in ("autoregressive", "prompt_lookup(min_ngram=1)", "recycling"):
        output = llm.generate([prompt], params, drafter=drafter)[0]
        assert list(output.token_ids) == expected


@pytest.mark.parametrize("case", GGUF_CASES)
def test_gguf_files_equal_the_checkpoint(
    case: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """The rows of queries and keys are permuted, so sums of scores have another order."""
    folder = checkpoint("nemotron_h", **GGUF_CASES[case])
    path = write_gguf(folder, tmp_path / "a.gguf")
    assert np.abs(logits(path) - logits(folder)).max() < 2e-5
    theirs = read_config(folder)
    ours = read_config(path)
    for name in ("sublayers", "mixture", "recurrent", "layer_ropes", "activation", "gated"):
        assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_blocks(kind: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    twin = tmp_path / "twin"
    folder = checkpoint("nemotron_h", **BLOCKS, **EXPERTS)
    path = write_gguf(folder, tmp_path / "a.gguf", kind, twin=twin)
    expected = transformers_logits(twin, TOKENS)
    assert np.abs(text_logits(load(path), TOKENS) - expected).max() < 2e-3
    found = logits(path)  # with inputs of 8 bits
    assert 0 < np.linalg.norm(found - expected) < 0.1 * np.linalg.norm(expected)


def test_older_names(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Published configs have letters for kinds; an MTP head is not used."""
    original = checkpoint("nemotron_h")
    folder = tmp_path / "model"
    shutil.copytree(original, folder)
    document = json.loads((folder / "config.json").read_text())
    del document["layers_block_type"]
    document["hybrid_override_pattern"] = "ME*-ME"
    (folder / "config.json").write_text(json.dumps(document))
    tensors = read_tensors(original)
    write_tensors(folder, {**tensors, "mtp.layers.0.norm.weight": np.ones(32, np.float32)})
    assert np.array_equal(logits(folder), logits(original))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"moe_latent_size": 16}, "moe_latent_size: expected null, found 16; use a Nemotron 3"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias: expected false, found true"),
        ({"layers_block_type": ["mlp", "conv"]}, "layers_block_type: expected a list of"),
        ({"n_groups": 3}, "n_groups: expected a divisor of 8 Mamba heads, found 3"),
    ],
)
def test_configs_that_are_refused(
    change: dict[str, Any], found: str, checkpoint: MakeCheckpoint
) -> None:
    raw = json.loads((checkpoint("nemotron_h") / "config.json").read_text())
    with pytest.raises(ConfigError, match=found):
        parse_config(raw | change)
