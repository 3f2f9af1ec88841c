"""Single operations of the kernels against torch in float64."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oracle import DenseAttend
from pronk.architecture.config import ModelConfig
from pronk.architecture.rope import RopeTable
from pronk.execution.attention import Segment
from pronk.execution.model_runner import ForwardJob
from pronk.kernels.library import Kernels, candidates
from pronk.kv_cache.blocks import BlockTable
from pronk.models.decoder import Decoder, pack_linears
from pronk.models.linear import KernelLinear, WeightLayout, choose_linear
from pronk.models.program import Program, ProgramRows
from pronk.speculation.tree import TokenTree
from tiny_models import CPU, make_cache, make_engine, tiny_config, tiny_decoder

EVERY = pytest.mark.parametrize("kernels", candidates(), ids=lambda kernels: kernels.name)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def some_rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def unit_product(kernels: Kernels, size: int, *, gated: bool = False) -> KernelLinear:
    """Return a layer that maps ``x`` to ``x`` or, if gated, to ``x`` and its mirror image."""
    one = torch.eye(size)
    return KernelLinear(kernels, torch.cat((one, one.flip(0))) if gated else one, None, WeightLayout(gated=gated))


@pytest.mark.parametrize("width", [1, 2, 15, 16, 17, 50, 64, 100, 576])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@DTYPES
@EVERY
def test_norms(kernels: Kernels, dtype: torch.dtype, kind: str, width: int) -> None:
    """A norm, alone or before a product, is as exact as torch's in float32, also for rows with a mean far from 0."""
    norm: nn.Module = nn.LayerNorm(width, 1e-5) if kind == "layer" else nn.RMSNorm(width, 1e-5)
    with torch.no_grad():
        for seed, parameter in enumerate(norm.parameters()):
            parameter.copy_(some_rows(width, seed=seed))
        x = (some_rows(9, width, seed=5) * torch.logspace(-3, 3, 9)[:, None] + 0.5).to(dtype)
        want, theirs = deepcopy(norm).double()(x.double()), norm(x.float())
    program = Program(kernels, width, dtype)
    program.norm(norm)
    stream = x.clone()
    program.run(ProgramRows.without_segments(9), stream)
    before = Program(kernels, width, dtype)
    before.linear(unit_product(kernels, width), norm=norm, to="logits")
    logits, same = torch.empty(9, width), x.clone()
    before.run(ProgramRows.without_segments(9), same, logits)
    assert torch.equal(same, x)
    room = 2.0 * (theirs.double() - want).norm(dim=1) + 1e-6 * want.norm(dim=1)
    assert bool(((logits.double() - want).norm(dim=1) <= room).all())
    assert torch.equal(stream, logits.to(dtype))


@pytest.mark.parametrize("name", ACTIVATIONS)
@EVERY
def test_activations(kernels: Kernels, name: str) -> None:
    size = 40
    special = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 88.0, -88.0, 200.0, -200.0, 1e30, -1e30, 3e38, -3e38])
    x = torch.cat((torch.linspace(-30, 30, 39 * size), special, torch.zeros(size - len(special)))).view(-1, size)
    program = Program(kernels, size, torch.float32)
    program.linear(unit_product(kernels, size), activation=name, to="logits")
    logits = torch.empty_like(x)
    program.run(ProgramRows.without_segments(len(x)), x.clone(), logits)
    torch.testing.assert_close(logits.double(), ACTIVATIONS[name](x.double()), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("size", [3, 16, 40])
@EVERY
def test_gates(kernels: Kernels, size: int, name: str) -> None:
    """Gated products write to a buffer of any width between two products."""
    x = some_rows(20, size) * 3
    program = Program(kernels, size, torch.float32)
    program.linear(unit_product(kernels, size, gated=True), activation=name, to="B")
    program.linear(unit_product(kernels, size), source="B", to="logits")
    logits = torch.empty_like(x)
    program.run(ProgramRows.without_segments(len(x)), x.clone(), logits)
    want = ACTIVATIONS[name](x.double()) * x.double().flip(1)
    torch.testing.assert_close(logits.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 5, 40])
@DTYPES
@EVERY
def test_residuals_and_wanted_rows(kernels: Kernels, dtype: torch.dtype, rows: int) -> None:
    """A product is added to the residual stream; a second one reads some rows of it in any order."""
    weights = [some_rows(33, 33, seed=seed).to(dtype) / 6 for seed in (1, 2)]
    first, second = (KernelLinear(kernels, weight, None, WeightLayout()) for weight in weights)
    program = Program(kernels, 33, dtype)
    program.linear(first, residual=True)
    program.linear(second, to="logits", only_logits_rows=True)
    x, wanted = some_rows(rows, 33).to(dtype), [rows - 1, 0, rows // 2]
    stream, logits, packed = x.clone(), torch.empty(3, 33), ProgramRows.without_segments(rows)
    assert packed.select_logits_rows(wanted) == 3
    program.run(packed, stream, logits)
    after = x.double() + x.double() @ weights[0].double().t()
    torch.testing.assert_close(stream.double(), after, rtol=2 * torch.finfo(dtype).eps, atol=2e-6)
    want = stream[wanted].double() @ weights[1].double().t()
    torch.testing.assert_close(logits.double(), want, rtol=1e-5, atol=1e-5)


SHAPES: dict[str, ModelConfig] = {
    "group 3": tiny_config(windows=(None,)),
    "one kv head": tiny_config(heads=7, kv_heads=1, windows=(None,)),
    "head of 80": tiny_config(heads=2, head_dim=80, windows=(None,)),
    "head of 6": tiny_config(heads=2, head_dim=6, windows=(None,)),
    "head of 512": tiny_config(heads=1, kv_heads=1, head_dim=512, windows=(None,)),
    "window": tiny_config(windows=(9,)),
    "classic": tiny_config(heads=4, kv_heads=4, classic=True, windows=(None,)),
    "norms": tiny_config(qk_norm=True, windows=(None,)),
    "gelu": replace(tiny_config(windows=(None,)), activation="gelu"),
}


@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["mild", "sharp"])
@pytest.mark.parametrize("shape", SHAPES)
@EVERY
@torch.inference_mode()
def test_a_layer(kernels: Kernels, shape: str, scale: float) -> None:
    """Attention and MLP of a layer in float32; ``sharp`` has attention scores of thousands."""
    config = replace(SHAPES[shape], tied=False)
    plain, packed = Decoder(config), Decoder(config)
    for seed, parameter in enumerate(plain.parameters()):
        size = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5
        parameter.copy_(some_rows(*parameter.shape, seed=seed) * size)
    plain.embedding.mul_(8.0)
    plain.layers[0].qkv.weight.mul_(scale**0.5)
    packed.load_state_dict(plain.state_dict())
    pack_linears(packed, choose_linear(kernels, CPU))
    tokens = torch.randint(config.vocab_size, (100,), generator=torch.Generator().manual_seed(0))
    places = torch.arange(len(tokens))
    plain.double()
    attend = _RecordingAttend(config)
    x = plain.embed(tokens, places, torch.float64)
    want = plain.layers[0](x, plain.rope(places, places + 1, torch.float64), 0, attend)
    pool = make_cache(config, torch.float32, num_blocks=8)
    program = Program(kernels, config.hidden_size, torch.float32, pool)
    program.embed(packed)
    packed.layers[0].compile(program, 0)
    block_table, found, rope = BlockTable(), torch.empty(len(tokens), config.hidden_size), RopeTable(config.rope)
    pool.prepare(block_table, len(tokens))
    rows = ProgramRows().set_segments([(block_table, TokenTree.chain(tokens.tolist()), 0)], tokens.tolist())
    if config.rope is not None:
        rows.set_rope(0, rope.up_to(len(tokens)))
    program.run(rows, found)
    error = (found.double() - want).norm() / want.norm()
    assert float(error) < (2e-6 if scale == 1.0 else 2e-5)
    block_table.length = len(tokens)
    for got, exact in zip(pool.read(0, block_table), attend.seen, strict=True):
        assert float((got.double() - exact).norm() / exact.norm()) < 2e-6


class _RecordingAttend(DenseAttend):
    """Dense attention that records its keys and values ``[kv_heads, tokens, head_dim]`` in ``seen``."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.seen = [each.transpose(0, 1) for each in (k, v)]
        return super().__call__(layer, q, k, v)


@EVERY
def test_an_unknown_instruction_set_is_refused(kernels: Kernels) -> None:
    beyond = Kernels(kernels.library, kernels.path, 99)
    program = Program(beyond, 16, torch.float32)
    program.linear(unit_product(kernels, 16), to="logits")
    with pytest.raises(AssertionError, match="kernels: pass of 2 rows failed"):
        program.run(ProgramRows.without_segments(2), torch.zeros(2, 16), torch.empty(2, 16))


def test_rows_without_a_slot_are_refused() -> None:
    engine = make_engine(tiny_decoder())
    block_table = BlockTable()
    engine.cache.prepare(block_table, 16)
    for rows, fits in ((16, True), (17, False)):
        job = ForwardJob(Segment(block_table, TokenTree.chain([1] * rows)), range(rows - 1, rows), rows)
        if fits:
            assert len(engine.runner.forward([job]).logits[0]) == 1
        else:
            with pytest.raises(AssertionError, match="pass of 17 rows failed"):
                engine.runner.forward([job])
    engine.cache.release(block_table)
