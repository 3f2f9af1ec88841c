"""Linear layers: the form of each kind of weights; close logits of kernels, torch and 8-bit weights.

Products of the kernels are in ``tests/kernels``.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import MakeCheckpoint
from oracle import dense_logits
from pronk.base.arrays import BFLOAT16, FLOAT32, DType
from pronk.base.errors import OptionError
from pronk.checkpoint.hub.clone_models import tiny_model
from pronk.kernels.library import CODED_TYPES
from pronk.kernels.weights import PackedMatrix
from pronk.models.backend import KernelBackend
from pronk.models.decoder import Decoder
from pronk.models.linear import Linear, WeightLayout, choose_linear
from pronk.models.loader import load_decoder, read_config
from pronk.text.tokenizer import Tokenizer
from pronk.torch.backend import TorchBackend, TorchMatrix
from pronk.torch.convert import torch_dtype
from pronk.train.modules.decoder import DecoderModule, load_module
from tiny_models import kernels, text_logits

DTYPES = [FLOAT32, BFLOAT16]
TINY = tiny_model()


def pair(dtype: DType, *, bias: bool, shape: tuple[int, int] = (97, 52)) -> tuple[Linear, Linear]:
    """Return a layer for the kernels, and the same layer for torch."""
    random = np.random.default_rng(0)
    weight = random.standard_normal(shape, np.float32).astype(dtype)
    offset = random.standard_normal(shape[0], np.float32).astype(dtype) if bias else None
    backends = KernelBackend(kernels()), TorchBackend("cpu", dtype)
    one, other = (Linear(backend, weight, offset, WeightLayout(), None) for backend in backends)
    return one, other


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_kernels_and_torch_are_close(dtype: DType, bias: bool) -> None:
    by_kernels, by_torch = pair(dtype, bias=bias)
    x = np.random.default_rng(1).standard_normal((8, 52), np.float32).astype(dtype)
    found = []
    for linear in (by_kernels, by_torch):
        assert (linear.out_features, linear.in_features) == (97, 52)
        assert linear.packed.shape == (97, 52)
        assert linear.packed.format == str(dtype)
        logits = linear.logits(x)
        assert (logits.shape, logits.dtype) == ((8, 97), np.float32)
        assert linear.logits(x[:0]).shape == (0, 97)
        found.append(logits.astype(dtype).astype(np.float32))
    np.testing.assert_allclose(*found, rtol=1.3e-6 if dtype == FLOAT32 else 1.6e-2, atol=1e-5)
    assert np.array_equal(by_kernels.packed.unpack(), by_torch.packed.unpack())


def test_choice_of_the_layer() -> None:
    weight = np.zeros((32, 8), np.float32)
    for layout in (WeightLayout(), WeightLayout(unit=16), WeightLayout(gated=True)):
        made = choose_linear(KernelBackend(kernels()))(weight, None, layout)
        assert made.layout == layout
        assert isinstance(made.packed, PackedMatrix)
        assert made.packed.data.dtype == FLOAT32
        by_torch = choose_linear(TorchBackend("cpu", FLOAT32))(weight, None, layout)
        assert isinstance(by_torch.packed, TorchMatrix)
        assert by_torch.packed.gated == layout.gated
        for weights, types in (("int8", (8, 8)), ("int4", (4, 8))):
            for head, bits in zip((False, True), types, strict=True):
                small = choose_linear(KernelBackend(kernels()), weights)(weight, None, layout._replace(head=head))
                assert isinstance(small.packed, PackedMatrix)
                assert small.packed.struct.type == CODED_TYPES[bits]


def test_invalid_choices_are_refused() -> None:
    with pytest.raises(
        OptionError, match=r"^weights: expected one of plain, int8, int4, found 'int2'; did you mean int8 or int4\?$"
    ):
        choose_linear(KernelBackend(kernels()), "int2")
    with pytest.raises(
        OptionError, match=r"^weights: expected pronk's kernels for int8, found torch on cpu; use plain$"
    ):
        choose_linear(TorchBackend("cpu", FLOAT32), "int8")


def in_8_bits(folder: Path, dtype: DType) -> tuple[DecoderModule, Decoder]:
    """Return the plain model as a module of torch, and the 8-bit model."""
    config, options = read_config(folder), dict[str, Any](dtype=dtype, backend=KernelBackend(kernels()))
    plain = load_module(folder, config, torch_dtype(dtype), torch.device("cpu"))
    return plain, load_decoder(folder, config, **options, weights="int8")


@pytest.mark.parametrize("tied", [False, True])
def test_int8_decoder(tied: bool, checkpoint: MakeCheckpoint) -> None:
    folder, tokens = checkpoint("llama", tie_word_embeddings=tied, attention_bias=True), list(range(40))
    plain, small = in_8_bits(folder, FLOAT32)
    every: list[Any] = [small.head]
    every += [getattr(layer, name) for layer in small.layers for name in ("qkv", "out", "up", "down")]
    assert set(every) == set(small.linears())
    assert all(linear.packed.struct.type == CODED_TYPES[8] for linear in every)
    exact, found = dense_logits(plain, tokens), text_logits(small, tokens)
    assert 0 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.1


def test_int8_predicts_the_same_tokens_as_a_trained_model() -> None:
    text = "def add(a, b):\n    return a + b\n\nThe cat sat in the sun, and then it went home."
    tokens = Tokenizer.load(TINY).encode(text)
    plain, small = in_8_bits(TINY, BFLOAT16)
    exact, found = dense_logits(plain, tokens, BFLOAT16), text_logits(small, tokens, BFLOAT16)
    assert (exact.argmax(-1) == found.argmax(-1)).mean() > 0.9
