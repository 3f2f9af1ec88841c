"""Linear layers: the class for each kind of weights; close logits of packed, plain and 8-bit weights.

Products of the kernels are in ``tests/kernels``.
"""

from pathlib import Path

import pytest
import torch

from checkpoints import MakeCheckpoint
from oracle import dense_logits
from pronk.errors import OptionError
from pronk.kernels.library import CODED_TYPES
from pronk.models.clone_models import tiny_model
from pronk.models.decoder import Decoder
from pronk.models.linear import KernelLinear, Linear, PlainLinear, WeightLayout, choose_linear
from pronk.models.loader import load_decoder, read_config
from pronk.tokenization.tokenizer import Tokenizer
from tiny_models import kernels, text_logits

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
TINY = tiny_model()


def pair(dtype: torch.dtype, *, bias: bool, shape: tuple[int, int] = (97, 52)) -> tuple[Linear, Linear]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(dtype)
    offset = torch.randn(shape[0], generator=generator).to(dtype) if bias else None
    return KernelLinear(kernels(), weight, offset, WeightLayout()), PlainLinear(weight, offset)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_packed_and_plain_products_are_close(dtype: torch.dtype, bias: bool) -> None:
    packed, plain = pair(dtype, bias=bias)
    assert (packed.out_features, packed.in_features) == (plain.out_features, plain.in_features) == (97, 52)
    x = torch.randn(8, 52, generator=torch.Generator().manual_seed(1)).to(dtype)
    for linear in (packed, plain):
        assert linear(x).shape == linear.logits(x).shape == (8, 97)
        assert (linear(x).dtype, linear.logits(x).dtype) == (dtype, torch.float32)
        assert torch.equal(linear.logits(x).to(dtype), linear(x))
    torch.testing.assert_close(packed(x), plain(x))


def test_a_kernel_layer_has_no_parameters() -> None:
    packed, _ = pair(torch.bfloat16, bias=True)
    assert not list(packed.parameters())
    assert not packed.state_dict()


def test_choice_of_the_layer() -> None:
    weight = torch.zeros(32, 8)
    for layout in (WeightLayout(), WeightLayout(unit=16), WeightLayout(gated=True)):
        made = choose_linear(kernels(), CPU)(weight, None, layout)
        assert isinstance(made, KernelLinear)
        assert made.layout == layout
        assert made.packed.data.dtype == torch.float32
        assert isinstance(choose_linear(None, CPU)(weight, None, layout), PlainLinear)
        for weights, types in (("int8", (8, 8)), ("int4", (4, 8))):
            for head, bits in zip((False, True), types, strict=True):
                small = choose_linear(kernels(), CPU, weights)(weight, None, layout._replace(head=head))
                assert isinstance(small, KernelLinear)
                assert small.packed.struct.type == CODED_TYPES[bits]


def test_invalid_choices_are_refused() -> None:
    with pytest.raises(OptionError, match=r"^weights: expected plain, int8, int4; found 'int2'$"):
        choose_linear(kernels(), CPU, "int2")
    expected = "weights: expected a CPU and pronk's kernels for int8, found"
    with pytest.raises(OptionError, match=rf"^{expected} no kernels; use plain$"):
        choose_linear(None, CPU, "int8")
    with pytest.raises(OptionError, match=rf"^{expected} device meta; use plain$"):
        choose_linear(None, torch.device("meta"), "int8")


def in_8_bits(folder: Path, dtype: torch.dtype) -> tuple[Decoder, Decoder]:
    """Return the plain model and the 8-bit model."""
    config = read_config(folder)
    return (
        load_decoder(folder, config, dtype=dtype, device=CPU),
        load_decoder(folder, config, dtype=dtype, device=CPU, kernels=kernels(), weights="int8"),
    )


@pytest.mark.parametrize("tied", [False, True])
@torch.inference_mode()
def test_int8_decoder(tied: bool, checkpoint: MakeCheckpoint) -> None:
    folder, tokens = checkpoint("llama", tie_word_embeddings=tied, attention_bias=True), list(range(40))
    plain, small = in_8_bits(folder, torch.float32)
    every = [small.head, *(getattr(layer, name) for layer in small.layers for name in ("qkv", "out", "up", "down"))]
    assert all(linear.packed.struct.type == CODED_TYPES[8] for linear in every)
    exact, found = dense_logits(plain, tokens), text_logits(small, tokens)
    assert 0 < float((found - exact).norm() / exact.norm()) < 0.1


@torch.inference_mode()
def test_int8_predicts_the_same_tokens_as_a_trained_model() -> None:
    text = "def add(a, b):\n    return a + b\n\nThe cat sat in the sun, and then it went home."
    tokens = Tokenizer.load(TINY).encode(text)
    plain, small = in_8_bits(TINY, torch.bfloat16)
    exact, found = dense_logits(plain, tokens, torch.bfloat16), text_logits(small, tokens, torch.bfloat16)
    assert float((exact.argmax(-1) == found.argmax(-1)).float().mean()) > 0.9
