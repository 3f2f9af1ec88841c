"""llama.cpp loads the files that these tests write, and computes the same logits, where it is
installed.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint.gguf.test_models import CASES, SHAPE, TOKENS, logits
from checkpoints import MakeCheckpoint
from gguf_files import CONVERTED, convert
from pronk.base.arrays import Array

llama_cpp = pytest.importorskip("llama_cpp")

# llama.cpp rounds gpt-oss's scaled rotations
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_F32 = 0  # ``ggml_type`` of keys and values


def llama_logits(path: Path) -> Array:
    """Return llama.cpp's logits, float32 ``[tokens, vocab]``, with keys and values in float32."""
    options = {
        "n_ctx": 64,
        "logits_all": True,
        "verbose": False,
        "n_threads": 1,
        "type_k": _F32,
        "type_v": _F32,
    }
    llama = llama_cpp.Llama(str(path), swa_full=True, **options)
    llama.eval(TOKENS)
    return np.array(llama.scores[: len(TOKENS)], np.float32)


@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_logits(
    family: str, overrides: dict[str, Any], checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    if family == "gpt_oss":
        overrides = overrides | {"rope_parameters": PLAIN_ROPE}
    path = convert(checkpoint(family, **(SHAPE | overrides)), tmp_path / "a.gguf", "F32")
    expected = llama_logits(path)
    found = logits(path)
    assert found.std() > 0.3, "logits too flat to show anything"
    # llama.cpp's GELU is a table of 16-bit floats
    assert np.abs(found - expected[:, : found.shape[1]]).max() < 5e-3


@pytest.mark.parametrize("kind", CONVERTED)
def test_converted_blocks(kind: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """llama.cpp computes with inputs rounded to 8 bits, so its logits differ by that rounding."""
    path = convert(checkpoint("llama", **SHAPE), tmp_path / "a.gguf", kind)
    expected = llama_logits(path)
    found = logits(path)
    assert found.std() > 0.3, "logits too flat to show anything"
    assert np.linalg.norm(found - expected[:, : found.shape[1]]) < 0.05 * np.linalg.norm(found)
