"""The linear seam: packed and plain weights give the same products, 8 bits nearly; rows do not depend on each other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from checkpoints import MakeCheckpoint
from oracle import dense_logits
from pronk.errors import OptionError
from pronk.model.hugepages import use_huge_pages
from pronk.model.linear import Int8Linear, Linear, PackedLinear, PlainLinear, choose_linear
from pronk.model.loader import load_decoder, read_config
from pronk.tokenizer import Tokenizer

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.skipif(
    not all(PackedLinear.supports(dtype, CPU) for dtype in DTYPES), reason="no packed products on this processor"
)
needs_int8 = pytest.mark.skipif(not Int8Linear.supports(CPU), reason="no products of 8-bit numbers on this processor")
BUNDLED = Path(__file__).parents[2] / "src/pronk/bundled/pronk-tiny"


def pair(dtype: torch.dtype, *, bias: bool, shape: tuple[int, int] = (97, 52)) -> tuple[Linear, Linear]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(dtype)
    offset = torch.randn(shape[0], generator=generator).to(dtype) if bias else None
    return PackedLinear(weight, offset), PlainLinear(weight, offset)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_packed_is_plain(dtype: torch.dtype, bias: bool) -> None:
    packed, plain = pair(dtype, bias=bias)
    assert (packed.out_features, packed.in_features) == (plain.out_features, plain.in_features) == (97, 52)
    x = torch.randn(8, 52, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert packed(x).shape == (8, 97)
    torch.testing.assert_close(packed(x), plain(x))


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    x = torch.randn(512, 320, generator=torch.Generator().manual_seed(1)).to(dtype)
    for linear in pair(dtype, bias=False, shape=(448, 320)):
        few = torch.cat([linear(rows) for rows in x.split(4)])
        assert torch.equal(linear(x), few)
        assert torch.equal(linear(x.flip(0)), few.flip(0))
        assert not torch.equal(few[0], few[1])


def test_the_choice_is_packed_where_it_is_fast() -> None:
    assert choose_linear(torch.bfloat16, CPU) is PackedLinear
    assert choose_linear(torch.float32, CPU) is PackedLinear
    assert choose_linear(torch.float16, CPU) is PlainLinear
    assert choose_linear(torch.bfloat16, torch.device("meta")) is PlainLinear


@needs_int8
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@torch.inference_mode()
def test_int8_is_close_to_the_float_product(dtype: torch.dtype, bias: bool) -> None:
    """Rounding a weight costs half of its row's scale at most, rounding an input half of its own."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 70, generator=generator) * torch.logspace(-2, 1, 300)[:, None]
    weight[5], weight[7, 3] = 0.0, 50.0
    x = torch.randn(9, 70, generator=generator) * torch.logspace(-2, 1, 9)[:, None]
    x[4] = 0.0
    x, weight = x.to(dtype).float(), weight.to(dtype).float()
    offset = torch.randn(300, generator=generator).to(dtype) if bias else None
    y = Int8Linear(weight.to(dtype), offset)(x.to(dtype))
    assert (y.shape, y.dtype) == ((9, 300), dtype)
    step_w, step_x = weight.abs().amax(1) / 127, x.abs().amax(1, keepdim=True) / 127
    exact = x @ weight.t()
    bound = 0.5 * (x.abs().sum(1, keepdim=True) * step_w + step_x * weight.abs().sum(1)) + 0.25 * 70 * step_x * step_w
    if offset is not None:
        exact += offset.float()
    error = (y.float() - exact).abs()
    assert bool((error <= 1.01 * bound + 2 * torch.finfo(dtype).eps * exact.abs() + 1e-5).all())
    assert float(error.norm() / exact.norm()) < 0.02
    assert bool((y[4] == (0 if offset is None else offset)).all())


@needs_int8
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_a_row_of_int8_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    linear = Int8Linear(torch.randn(448, 320, generator=generator).to(dtype))
    x = torch.randn(130, 320, generator=generator).to(dtype)
    assert torch.equal(linear(x), torch.cat([linear(row) for row in x.split(1)]))
    x[1:] *= 100
    assert torch.equal(linear(x)[:1], linear(x[:1]))


@needs_int8
def test_int8_takes_half_the_memory() -> None:
    linear = Int8Linear(torch.randn(512, 256))
    packed = PackedLinear(torch.randn(512, 256).bfloat16())
    size = torch.ops.mkldnn._nbytes(linear.weight) + linear.scale.nbytes + linear._zeros.nbytes
    assert size < 0.55 * torch.ops.mkldnn._nbytes(packed.weight)
    assert not any(tensor.shape == (512, 256) for tensor in linear.state_dict().values())


@needs_int8
@pytest.mark.parametrize("tied", [False, True])
@torch.inference_mode()
def test_a_decoder_in_int8(tied: bool, checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("llama", tie_word_embeddings=tied, attention_bias=True)
    config, tokens = read_config(folder), list(range(40))
    plain, small = (
        load_decoder(folder, config, dtype=torch.float32, device=CPU, weights=weights) for weights in ("plain", "int8")
    )
    assert isinstance(small.head, Int8Linear)
    assert all(isinstance(getattr(layer, name), Int8Linear) for layer in small.layers for name in ("qkv", "down"))
    exact, found = dense_logits(plain, tokens), dense_logits(small, tokens)
    assert float((found - exact).norm() / exact.norm()) < 0.1
    assert not torch.equal(found, exact)


@needs_int8
@torch.inference_mode()
def test_int8_says_what_a_trained_model_says() -> None:
    config, text = (
        read_config(BUNDLED),
        "def add(a, b):\n    return a + b\n\nThe cat sat in the sun, and then it went home.",
    )
    tokens = Tokenizer.load(BUNDLED).encode(text)
    plain, small = (
        load_decoder(BUNDLED, config, dtype=torch.bfloat16, device=CPU, weights=weights)
        for weights in ("plain", "int8")
    )
    exact, found = (dense_logits(decoder, tokens, torch.bfloat16) for decoder in (plain, small))
    assert float((exact.argmax(-1) == found.argmax(-1)).float().mean()) > 0.9


def test_int8_is_refused_where_it_would_be_slow_or_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"^weights: expected a CPU with VNNI .* int8, found device meta; use plain$"):
        Int8Linear(torch.empty(4, 4, device="meta"))
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    with pytest.raises(OptionError, match=r"^weights: expected a CPU with VNNI .* int8, found one without; use plain$"):
        choose_linear(torch.bfloat16, CPU, "int8")(torch.empty(4, 4), None)
    with pytest.raises(OptionError, match=r"^weights: expected plain or int8, found 'int4'$"):
        choose_linear(torch.bfloat16, CPU, "int4")


def test_huge_pages_change_nothing() -> None:
    values = torch.arange(3 * 2**20, dtype=torch.int64)
    moved = use_huge_pages(values.data_ptr(), values.nbytes)
    assert isinstance(moved, bool)
    assert torch.equal(values, torch.arange(3 * 2**20, dtype=torch.int64))
    assert not use_huge_pages(values.data_ptr(), 4096)
    assert not use_huge_pages(values.data_ptr(), values.nbytes) or sys.platform == "linux"
