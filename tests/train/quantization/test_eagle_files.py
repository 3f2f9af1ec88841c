"""``pronk quantize`` of EAGLE-3 heads, in every layout."""

from pathlib import Path

import numpy as np
import pytest

from drafting.from_target.modules.test_eagle import EAGLE, TEXT, WINDOWS, Stage, proposed_logits
from drafting.from_target.trained_eagle import Head, Reference, random_head, write_head
from pronk.base.arrays import FLOAT32
from pronk.checkpoint.formats.matrix import Bits
from pronk.train.quantization.heads import quantize_head
from pronk.train.quantization.rounding import RoundingRule
from tiny_models import kernels, tiny_module


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("layout", ["speculators", "eagle"])
def test_quantized_files(bits: Bits, layout: str, tmp_path: Path) -> None:
    """``pronk quantize``: a head has the logits of its dequantized weights, up to rounded
    inputs.
    """
    head = random_head(EAGLE)
    rule = RoundingRule(kernels(), bits, 16, FLOAT32)
    plain = write_head(head, tmp_path / "plain", layout)
    folder = tmp_path / "rounded"
    result = quantize_head(plain, folder, bits, 16)
    assert result.num_bytes < result.source_bytes * (0.4 if bits == 8 else 0.3)
    assert 0.001 < result.error < (0.01 if bits == 8 else 0.15)
    rounded = {
        name: rule.nearest(weight).dequantize() if weight.ndim == 2 else weight
        for name, weight in head.tensors.items()
    }
    stage = Stage(folder, "eagle3")
    for linear in (stage.runner.head.layers[0].qkv, stage.runner.head.head, stage.runner.head.fc):
        assert linear.packed.format.startswith(f"int{bits}")
    (draft,) = stage.begin([stage.context(TEXT, stage.compute(TEXT))], 4)
    wanted = Reference(Head(EAGLE, rounded), tiny_module(windows=WINDOWS)).logits(TEXT)
    wanted = proposed_logits(stage, wanted)
    error = np.abs(draft.logits[0].values - wanted).max() / np.abs(wanted).max()
    assert 1e-6 < error < 0.05
