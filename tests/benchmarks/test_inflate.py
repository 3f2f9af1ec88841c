"""An inflated checkpoint computes what its source does, and its added weights take part."""

import json
import math
import random
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import gguf_files
from checkpoints import MakeCheckpoint, transformers_logits
from pronk import LLM, SamplingParams
from pronk.base.arrays import BFLOAT16, FLOAT32, Array
from pronk.base.errors import OptionError
from pronk.checkpoint.hub.clone_models import tiny_model
from pronk.checkpoint.tensors import Checkpoint
from pronk.cli.main import main
from pronk.models.loader import load_decoder, read_config
from tiny_models import kernels, text_logits

module = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "inflate.py"))
inflate: Callable[..., int] = module["inflate"]
TOKENS = random.Random(7).sample(range(300), 40)
# The source has 48 dimensions, 3 layers, 80 MLP units, 6 heads of 8 dimensions over 2 key/value
# heads.
EXACT = (192, 5, 112)
ROUNDED = (128, 5, 112)


def our_logits(folder: Path) -> Array:
    decoder = load_decoder(folder, read_config(folder), dtype=FLOAT32, kernels=kernels())
    return text_logits(decoder, TOKENS)


@pytest.mark.few(2)
@pytest.mark.parametrize("shape", [EXACT, ROUNDED], ids=["exact", "rounded"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"tie_word_embeddings": True, "save_dtype": torch.bfloat16},
        {"attention_bias": True, "mlp_bias": True},
    ],
    ids=["untied", "tied, bfloat16", "biases"],
)
def test_same_function(
    config: dict[str, Any], shape: tuple[int, int, int], checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = checkpoint("llama", rms_norm_eps=0.1, **config)
    big = tmp_path / "big"
    count = inflate(source, big, *shape)
    expected = transformers_logits(source, TOKENS)
    assert expected.std() > 0.5, "logits too flat to show anything"
    assert np.abs(transformers_logits(big, TOKENS) - expected).max() < 1e-4
    assert np.abs(our_logits(big) - expected).max() < 1e-4
    stored = Checkpoint(big)
    assert count == sum(math.prod(stored.shape(name)) for name in stored)
    rounded = "save_dtype" in config and shape is EXACT
    assert stored.tensor("model.norm.weight").dtype == (BFLOAT16 if rounded else FLOAT32)


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("model.layers.1.self_attn.o_proj.weight", slice(None)),
        ("model.layers.3.mlp.down_proj.weight", slice(None)),
        ("model.layers.2.self_attn.o_proj.weight", slice(24, 64)),
        ("model.layers.2.mlp.down_proj.weight", slice(80, 112)),
    ],
    ids=["layer's attention", "layer's MLP", "heads", "MLP units"],
)
def test_added_parts_compute(
    name: str, columns: slice, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """The logits change if the output projection of an added layer, head or MLP unit is no longer
    zero.
    """
    big = tmp_path / "big"
    inflate(checkpoint("llama"), big, *ROUNDED)
    before = our_logits(big)
    tensors = load_file(big / "model.safetensors")
    assert not tensors[name][:, columns].any()
    tensors[name][:48, columns] = 0.5
    save_file(tensors, big / "model.safetensors")
    assert np.abs(our_logits(big) - before).max() > 1e-3


def test_greedy_text_of_pronk_tiny(tmp_path: Path) -> None:
    source = tiny_model()
    inflate(source, tmp_path / "big", 512, 10, 1024)
    small, big = (
        LLM(folder, dtype="float32", threads=1)
        .generate("def fibonacci(n):\n", SamplingParams(max_tokens=40))
        .token_ids
        for folder in (source, tmp_path / "big")
    )
    assert small == big
    assert len(set(small)) > 10
    mark = json.loads((tmp_path / "big" / "config.json").read_text())["pronk_inflated"]
    assert mark == {"source": "pronk-tiny", "parameters": 9_672_000}


def test_refused(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = checkpoint("llama")
    out = tmp_path / "out"
    for shape, expected in (
        ((40, 5, 112), "hidden: expected at least 48"),
        ((128, 2, 112), "layers: expected at least 3"),
        ((128, 5, 79), "intermediate: expected at least 80"),
        ((100, 5, 112), "hidden: expected a multiple of 64"),
        ((64, 5, 112), "hidden: expected a multiple of 64, with room for 2 key/value heads"),
    ):
        with pytest.raises(OptionError, match=expected):
            inflate(source, out, *shape)
    inflate(source, tmp_path / "big", *ROUNDED)
    with pytest.raises(SystemExit, match="0"):
        main(["quantize", str(tmp_path / "big"), str(tmp_path / "quantized"), "--bits", "8"])
    assert LLM(tmp_path / "quantized").generate("def add(a, b):").text
    file = gguf_files.convert(source, tmp_path / "model.gguf")
    for folder in (
        checkpoint("gpt2"),
        checkpoint("qwen2"),
        tmp_path / "big",
        tmp_path / "quantized",
        file,
        tmp_path / "x",
    ):
        with pytest.raises(
            OptionError,
            match="expected the folder of a Llama checkpoint, neither quantized nor inflated",
        ):
            inflate(folder, out, *ROUNDED)
    with pytest.raises(OptionError, match="new or empty folder"):
        inflate(source, tmp_path / "big", *ROUNDED)
    assert not out.exists()
