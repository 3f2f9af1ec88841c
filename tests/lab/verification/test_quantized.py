"""Quantized targets, rounded while loading a folder or a GGUF file: drafters change no bit of
the output.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from checkpoints import MakeCheckpoint
from gguf_files import convert
from lab.verification.cases import QUICK, some_prompts, verify_model
from pronk.base.errors import OptionError
from pronk.llm import LLM
from quantized_formats import write_rounded
from tiny_models import kernels

# Drafters from text and outputs, a plain and a quantized draft model, and drafters trained on the
# plain target.
DRAFTERS = [
    "suffix", "lookahead(window=5, ngram=3)", "draft_model", 'draft_model(weights="int4")', "medusa", "multi_token",
    "glide", "kangaroo",
]  # fmt: skip

TARGETS: dict[str, Callable[[Path, Path], tuple[Path, str]]] = {
    "int8": lambda plain, _: (plain, "int8"),
    "int4": lambda plain, _: (plain, "int4"),
    "compressed-tensors": lambda plain, new: (write_rounded(plain, new / "packed"), "plain"),
    "gguf": lambda plain, new: (
        convert(plain, new / "a.gguf", {"": "Q4_0", "token_embd": "Q8_0"}),
        "plain",
    ),
}

# Each drafter has every second target; the others are slow tests.
SHARES = [
    pytest.param(
        kind,
        DRAFTERS[first::2],
        id=f"{kind}-{first}",
        marks=() if first == number % 2 else pytest.mark.slow,
    )
    for number, kind in enumerate(TARGETS)
    for first in range(2)
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "drafters"), SHARES)
def test_drafters_change_nothing(
    kind: str, drafters: list[str], pronk_tiny: LLM, tmp_path: Path
) -> None:
    path, weights = TARGETS[kind](pronk_tiny.path, tmp_path)
    llm = LLM(path, weights=weights, kernels=kernels().name, kv_memory="64MiB", budget="all")
    assert llm.exact
    report = verify_model(llm, drafters, some_prompts(llm)[:1], QUICK)
    assert report.passed
    assert ("int8" if kind == "int8" else "int4") in report.to_dict()["weights"].split(",")[0]
    for each in report.drafters:
        assert each.plain or each.accepted > 0, each.drafter


def test_trained_drafters_check_the_target(
    pronk_tiny: LLM, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """A quantized target must have the shape of the training target, a plain target also its
    weights.
    """
    other = checkpoint("llama", hidden_size=64, intermediate_size=96, num_attention_heads=4)
    small = LLM(convert(other, tmp_path / "a.gguf", "Q8_0"), kv_memory="4MiB")
    with pytest.raises(
        OptionError, match="medusa: expected the target that pronk-tiny-medusa was trained on"
    ):
        small.get_proposer("medusa")
    shutil.copytree(pronk_tiny.path, tmp_path / "plain")
    tensors = load_file(pronk_tiny.path / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, tmp_path / "plain" / "model.safetensors")
    with pytest.raises(
        OptionError, match="medusa: expected the target that pronk-tiny-medusa was trained on"
    ):
        LLM(tmp_path / "plain", kv_memory="4MiB").get_proposer("medusa")
