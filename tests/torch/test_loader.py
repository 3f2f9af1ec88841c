"""Loading of checkpoints for torch: dtypes, devices, memory, and dequantized weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import MakeCheckpoint
from models import test_loader
from models.peak_memory import NEEDS_LINUX, peak
from models.test_loader import MEASURE
from models.test_quantized_loading import TEXT, warned
from pronk import LLM, SamplingParams
from pronk.base.arrays import BFLOAT16, FLOAT16, FLOAT32, DType
from pronk.base.errors import OptionError
from pronk.models.decoder import ForwardWeights, forward_weights
from pronk.models.linear import WeightLayout, choose_linear
from pronk.torch.backend import TorchBackend, TorchMatrix
from quantized_formats import FORMATS, gptq, read_tensors, write_quantized
from tiny_models import text_logits


def load(folder: Path, dtype: DType = FLOAT32) -> Any:
    return test_loader.load(folder, dtype=dtype, backend=TorchBackend("cpu", dtype))


def test_without_kernels_weights_are_plain(checkpoint: MakeCheckpoint) -> None:
    decoder = load(checkpoint("llama"), dtype=BFLOAT16)
    assert {(type(linear.packed), linear.packed.weight.dtype) for linear in decoder.linears()} == {
        (TorchMatrix, torch.bfloat16)
    }
    assert decoder.backend.kernels is None


def on_meta(dtype: DType) -> TorchBackend:
    """Return a backend whose device is torch's meta device, which replaces a GPU."""
    backend = TorchBackend("cpu", dtype)
    backend.device = "meta"
    return backend


def test_all_matrices_on_a_gpu_have_the_loaded_dtype(checkpoint: MakeCheckpoint) -> None:
    for family in ("gpt2", "qwen3"):
        folder = checkpoint(family, save_dtype=torch.float16, tie_word_embeddings=True)
        decoder = test_loader.load(folder, dtype=BFLOAT16, backend=on_meta(BFLOAT16))
        matrices = [linear.packed for linear in decoder.linears()]
        assert len(matrices) == 1 + 4 * len(decoder.layers)
        for tensor in [
            part for each in matrices for part in (each.weight, each.bias) if part is not None
        ]:
            assert (tensor.device.type, tensor.dtype) == ("meta", torch.bfloat16)
        assert decoder.embedding.dtype == FLOAT16, "embeddings stay in the file"


BY_TORCH = MEASURE.replace("KernelBackend(load_kernels())", 'TorchBackend("cpu", dtype)')


@NEEDS_LINUX
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_memory_of_loading(dtype: str, tmp_path: Path) -> None:
    """The peak is at most 1.2 times the weights in the loaded dtype."""
    script = f"from pronk.torch.backend import TorchBackend\n{BY_TORCH}"
    assert 0.5 < peak(script, tmp_path, dtype) < 1.2


@pytest.mark.parametrize("name", ["llama", "gpt2", "gptq-4"])
def test_progress_counts_every_byte(name: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    test_loader.check_progress(name, checkpoint, tmp_path, TorchBackend("cpu", FLOAT32))


@pytest.mark.parametrize("name", FORMATS)
def test_logits_equal_those_of_dequantized_weights(
    name: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    quantized, twin = write_quantized(checkpoint("llama"), tmp_path, FORMATS[name])
    with warned(FORMATS[name]):
        found = load(quantized)
    assert np.array_equal(text_logits(found, TEXT), text_logits(load(twin), TEXT))


@pytest.mark.parametrize("name", ["gptq-4-zeros", "packed-4-group", "float-block"])
def test_generating(name: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    quantized, twin = write_quantized(checkpoint("llama"), tmp_path, FORMATS[name])
    params = SamplingParams(max_tokens=24, logprobs=3)
    with warned(FORMATS[name]):
        found = LLM(quantized, kernels="torch", drafter="autoregressive").generate(TEXT, params)
    expected = LLM(twin, kernels="torch", drafter="autoregressive").generate(TEXT, params)
    assert found.token_ids == expected.token_ids
    assert found.logprobs == expected.logprobs


def test_weights_on_a_gpu_are_dequantized(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    quantized, _ = write_quantized(checkpoint("llama"), tmp_path, gptq(4))
    decoder = test_loader.load(quantized, backend=on_meta(BFLOAT16), dtype=BFLOAT16)
    weights = [linear.packed.weight for linear in decoder.linears()]
    assert {(weight.device.type, weight.dtype) for weight in weights} == {("meta", torch.bfloat16)}


def test_a_pass_reads_plain_weights(checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("llama", tie_word_embeddings=True)
    count = sum(tensor.size for tensor in read_tensors(folder).values() if tensor.ndim > 1)
    for dtype, size in ((FLOAT32, 4), (BFLOAT16, 2)):
        found = forward_weights(load(folder, dtype))
        assert found == ForwardWeights(dtype.name, size * count, size * count, count)


def test_choice_of_the_layer() -> None:
    for layout in (WeightLayout(), WeightLayout(unit=16), WeightLayout(gated=True)):
        made = choose_linear(TorchBackend("cpu", FLOAT32))(
            np.zeros((32, 8), np.float32), None, layout
        )
        assert made.layout == layout
        assert isinstance(made.packed, TorchMatrix)
        assert made.packed.gated == layout.gated
    message = r"^weights: expected pronk's kernels for int8, found torch on cpu; use plain$"
    with pytest.raises(OptionError, match=message):
        choose_linear(TorchBackend("cpu", FLOAT32), "int8")
