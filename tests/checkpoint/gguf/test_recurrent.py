"""Models with recurrent layers from GGUF files, against transformers with the files' weights."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import MakeCheckpoint, transformers_logits
from models.test_loader import load
from recurrent_models import BLOCKS, FAMILIES, HEADS, SIZES, with_mtp, write_gguf
from tiny_models import kernels, text_logits

TOLERANCE = 1e-4  # of logits with a standard deviation of 1, or less
TOKENS = random.Random(0).choices(range(300), k=70)
# As published files: the tensors that 4 bits hurt most have more.
MIXED = {"": "Q4_K", "attn_qkv": "Q5_K", "attn_gate": "Q8_0", "ssm_out": "Q8_0", "ffn_down": "Q6_K"}
NUMBERS = {"": "F16", "attn_qkv": "BF16", "ssm_out": "F32", "ssm_alpha": "F32", "ssm_beta": "F32"}
CASES = [
    *((family, overrides) for family in FAMILIES for overrides in HEADS.values()),
    *((family, overrides) for family in FAMILIES for overrides in SIZES.values()),
]


@pytest.mark.few(8)
@pytest.mark.parametrize(("family", "overrides"), CASES, ids=str)
def test_full_precision(
    family: str, overrides: dict[str, Any], checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder = checkpoint(family, **overrides)
    path = write_gguf(folder, tmp_path / "a.gguf")
    expected = transformers_logits(folder, TOKENS)
    assert expected.std() > 0.4, "logits too flat to show anything"
    assert np.abs(text_logits(load(path), TOKENS) - expected).max() < TOLERANCE * max(
        1.0, expected.std()
    )


FORMS: dict[str, dict[str, bool]] = {
    "fused experts": {"fused_experts": True},
    "older": {"older": True},
    "mtp": {},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_files(family: str, form: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Other forms of a file have the same bits."""
    folder = checkpoint(family)
    plain = write_gguf(folder, tmp_path / "plain.gguf")
    if form == "mtp":
        folder = with_mtp(folder, tmp_path / "mtp")
    path = write_gguf(folder, tmp_path / "other.gguf", **FORMS[form])
    assert np.array_equal(text_logits(load(path), TOKENS), text_logits(load(plain), TOKENS))


@pytest.mark.few(6)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kinds", ["Q8_0", "Q4_0", "Q4_K", "Q6_K", MIXED, NUMBERS], ids=str)
def test_blocks(family: str, kinds: Any, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    twin = tmp_path / "twin"
    path = write_gguf(checkpoint(family, **BLOCKS), tmp_path / "a.gguf", kinds, twin=twin)
    found = text_logits(load(path), TOKENS)
    expected = transformers_logits(twin, TOKENS)
    assert np.abs(found - expected).max() < 10 * TOLERANCE
    packed = text_logits(load(path, kernels=kernels()), TOKENS)  # with inputs of 8 bits
    assert np.linalg.norm(packed - found) < 0.08 * np.linalg.norm(found)
    assert kinds == NUMBERS or not np.array_equal(packed, found)
