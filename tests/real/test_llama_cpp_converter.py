"""GGUF files that llama.cpp's own converter writes have the logits of the folder they are made of.

The converter is in the source of llama.cpp. The environment variable ``LLAMA_CPP_SOURCE`` names the
folder; without it, the tests are skipped. Other tests of GGUF files write them by the same rules,
but from our own reading of them.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import MakeCheckpoint
from mamba_models import GRANITE
from models.test_loader import load
from pronk import SamplingParams
from pronk.drafting import make_drafter
from recurrent_models import HEADS, with_mtp
from tiny_models import kernels, make_engine, make_request, run, text_logits

SOURCE = os.environ.get("LLAMA_CPP_SOURCE")
TOKENS = [3, 5, 7, 11, 2, 9, 8, 1, 20, 30]
Change = Callable[[dict[str, Any]], dict[str, Any]]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(SOURCE is None, reason="LLAMA_CPP_SOURCE is not set"),
]


def published_kinds(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the kinds of layers as published configs name them, and not transformers 5."""
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    kinds = [names[kind] for kind in raw.get("layer_types", ())]
    return {"layer_types": kinds} if kinds else {}


def rotated_size(raw: dict[str, Any]) -> dict[str, Any]:
    head_dim = raw["hidden_size"] // raw["num_attention_heads"]
    return {"attn_rotary_emb": head_dim // 2}


# For each case: the family, its overrides, and keys that the converter needs and transformers does
# not write.
CASES: dict[str, tuple[str, dict[str, Any], Change]] = {
    name: (family, overrides, change)
    for name, family, overrides, change in (
        ("Granite", "granite", {}, lambda _: {}),
        ("Granite 4 H", "granitemoehybrid", GRANITE, published_kinds),
        ("Bamba", "bamba", {}, rotated_size),
        ("Falcon-H1", "falcon_h1", {}, lambda _: {}),
        (
            "Nemotron 3",
            "nemotron_h",
            {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
            lambda _: {},
        ),
        ("Qwen2-MoE", "qwen2_moe", {}, lambda _: {}),
        ("Qwen3-MoE", "qwen3_moe", {}, lambda _: {}),
        ("Qwen3.5", "qwen3_5_text", {}, lambda _: {"mtp_num_hidden_layers": 0}),
        ("GLM-4", "glm4", {}, lambda _: {}),
        ("GLM-4.5", "glm4_moe", {}, lambda _: {}),
        ("GLM-4.7-Flash", "glm4_moe_lite", {}, lambda _: {"first_k_dense_replace": 1}),
        ("DeepSeek-V2", "deepseek_v2", {}, lambda _: {}),
        ("DeepSeek-V3", "deepseek_v3", {}, lambda _: {"scoring_func": "sigmoid"}),
        ("DeepSeek-V3 without scores", "deepseek_v3", {}, lambda _: {}),
        ("Gemma 4", "gemma4_text", {}, lambda _: {}),
        ("LFM2", "lfm2", {}, lambda _: {}),
        # llama.cpp knows no factor of these experts; published models have 1.
        ("LFM2-MoE", "lfm2_moe", {"routed_scaling_factor": 1.0}, lambda _: {}),
        ("gpt-oss", "gpt_oss", {}, lambda _: {}),
    )
}


def convert(folder: Path, path: Path, keys: dict[str, Any]) -> Path:
    """Convert a copy of a folder, to whose config.json ``keys`` are added, to a GGUF file."""
    folder = Path(shutil.copytree(folder, path.with_suffix(".folder")))
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | keys))
    script = Path(__file__).with_name("convert_folder.py")
    command = [sys.executable, str(script), str(SOURCE), str(folder), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return path


@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    family, overrides, change = CASES[case]
    folder = checkpoint(family, **overrides)
    expected = text_logits(load(folder, kernels=kernels()), TOKENS)
    keys = change(json.loads((folder / "config.json").read_text()))
    path = convert(folder, tmp_path / "m.gguf", keys)
    found = text_logits(load(path, kernels=kernels()), TOKENS)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * max(1.0, expected.std()))


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_mtp_drafts(family: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """The MTP layer of the file drafts the tokens of the folder's."""
    plain = checkpoint(family, **HEADS["two values"])
    folder = with_mtp(plain, tmp_path / "m", calm=0.05, noise=0.05)
    path = convert(folder, tmp_path / "m.gguf", {"mtp_num_hidden_layers": 1})
    counts = []
    for model in (folder, path):
        engine = make_engine(load(model, kernels=kernels()), folder=model)
        drafter = make_drafter("mtp(num_tokens=3)").bind(engine.target)
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        requests = [make_request(prompt, params, drafter) for prompt in ([1, 2, 3], [5])]
        run(engine, requests)
        counts.append([(each.stats.drafted, each.stats.accepted) for each in requests])
    assert counts[0] == counts[1]
    assert sum(accepted for _, accepted in counts[0]) > 0
