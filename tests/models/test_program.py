"""Single operations of the kernels against torch in float64."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cache.reading import read_layer
from oracle import DenseAttend, DenseModel
from pronk.base.arrays import BFLOAT16, FLOAT32, Array, DType
from pronk.cache.blocks import BlockTable
from pronk.checkpoint.config import MAX_ROPES, ModelConfig
from pronk.kernels.library import Kernels, candidates
from pronk.kernels.structures import NUM_ROPE_TABLES
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.linear import Linear, Norm, WeightLayout
from pronk.models.program import Program
from pronk.sampling.tree import TokenTree
from tiny_models import (
    decoder_of,
    make_cache,
    make_engine,
    text_logits,
    tiny_config,
    tiny_decoder,
    tiny_module,
)

EVERY = pytest.mark.parametrize("kernels", candidates(), ids=lambda kernels: kernels.name)
DTYPES = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def some_rows(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def activate(name: str, x: Array) -> Array:
    """Apply an activation in float64."""
    return ACTIVATIONS[name](torch.from_numpy(x.astype(np.float64))).numpy()


def empty_program(kernels: Kernels, hidden: int, dtype: DType = FLOAT32) -> Program:
    return Program(kernels, hidden, dtype)


def unit_product(kernels: Kernels, size: int, *, gated: bool = False) -> Linear:
    """Return a layer that maps ``x`` to ``x`` or, if gated, to ``x`` and its mirror image."""
    one = np.eye(size, dtype=np.float32)
    weight = np.concatenate((one, one[::-1])) if gated else one
    return Linear(kernels, weight, None, WeightLayout(gated=gated), None)


@pytest.mark.parametrize("width", [1, 2, 15, 16, 17, 50, 64, 100, 576])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@DTYPES
@EVERY
def test_norms(kernels: Kernels, dtype: DType, kind: str, width: int) -> None:
    """A norm, alone or before a product, is as exact as torch's in float32, also for rows with a
    mean far from 0.
    """
    norm = Norm(
        some_rows(width, seed=0), some_rows(width, seed=1) if kind == "layer" else None, 1e-5
    )
    x = (
        some_rows(9, width, seed=5) * np.logspace(-3, 3, 9, dtype=np.float32)[:, None] + 0.5
    ).astype(dtype)
    want, theirs = (torch_norm(norm, x.astype(precision)) for precision in (np.float64, np.float32))
    program = empty_program(kernels, width, dtype)
    program.norm(norm)
    stream = x.copy()
    program.run(None, stream)
    before = empty_program(kernels, width, dtype)
    before.linear(unit_product(kernels, width), norm=norm, to="logits")
    logits = np.empty((9, width), np.float32)
    same = x.copy()
    before.run(None, same, logits)
    assert np.array_equal(same, x)
    room = 2.0 * np.linalg.norm(theirs - want, axis=1) + 1e-6 * np.linalg.norm(want, axis=1)
    assert (np.linalg.norm(logits - want, axis=1) <= room).all()
    assert np.array_equal(stream, logits.astype(dtype))


def torch_norm(norm: Norm, x: Array) -> Array:
    """Apply a norm by torch in the dtype of ``x``."""
    weight = torch.from_numpy(norm.weight.astype(x.dtype))
    if norm.bias is None:
        return F.rms_norm(torch.from_numpy(x), weight.shape, weight, norm.eps).numpy()
    bias = torch.from_numpy(norm.bias.astype(x.dtype))
    return F.layer_norm(torch.from_numpy(x), weight.shape, weight, bias, norm.eps).numpy()


@pytest.mark.parametrize("name", ACTIVATIONS)
@EVERY
def test_activations(kernels: Kernels, name: str) -> None:
    size = 40
    special = [0.0, -0.0, 1e-30, -1e-30, 88.0, -88.0, 200.0, -200.0, 1e30, -1e30, 3e38, -3e38]
    numbers = [*np.linspace(-30, 30, 39 * size), *special, *[0.0] * (size - len(special))]
    x = np.array(numbers, np.float32).reshape(-1, size)
    program = empty_program(kernels, size)
    program.linear(unit_product(kernels, size), activation=name, to="logits")
    logits = np.empty_like(x)
    program.run(None, x.copy(), logits)
    np.testing.assert_allclose(logits, activate(name, x), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("size", [3, 16, 40])
@EVERY
def test_gates(kernels: Kernels, size: int, name: str) -> None:
    """Gated products write to a buffer of any width between two products."""
    x = some_rows(20, size) * 3
    program = empty_program(kernels, size)
    program.linear(unit_product(kernels, size, gated=True), activation=name, to="B")
    program.linear(unit_product(kernels, size), source="B", to="logits")
    logits = np.empty_like(x)
    program.run(None, x.copy(), logits)
    np.testing.assert_allclose(logits, activate(name, x) * x[:, ::-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 5, 40])
@DTYPES
@EVERY
def test_residuals_and_wanted_rows(kernels: Kernels, dtype: DType, rows: int) -> None:
    """A product is added to the residual stream; a second one reads some rows of it in any
    order.
    """
    weights = [(some_rows(33, 33, seed=seed) / 6).astype(dtype) for seed in (1, 2)]
    first, second = (Linear(kernels, weight, None, WeightLayout(), None) for weight in weights)
    program = empty_program(kernels, 33, dtype)
    program.linear(first, residual=True)
    program.linear(second, to="logits", only_logits_rows=True)
    x = some_rows(rows, 33).astype(dtype)
    wanted = range(rows - 1, -1, -max(1, (rows - 1) // 2))
    stream = x.copy()
    logits = np.empty((len(wanted), 33), np.float32)
    entry = BatchEntry(BlockTable(), TokenTree.chain([0] * rows), wanted)
    program.run(ForwardBatch([entry]), stream, logits)
    wide = x.astype(np.float64)
    found = stream.astype(np.float64)
    after = wide + wide @ weights[0].astype(np.float64).T
    np.testing.assert_allclose(found, after, rtol=2 * float(ml_dtypes.finfo(dtype).eps), atol=2e-6)
    want = found[list(wanted)] @ weights[1].astype(np.float64).T
    np.testing.assert_allclose(logits, want, rtol=1e-5, atol=1e-5)


SHAPES: dict[str, ModelConfig] = {
    "group 3": tiny_config(windows=(None,)),
    "one kv head": tiny_config(heads=7, kv_heads=1, windows=(None,)),
    "head of 80": tiny_config(heads=2, head_dim=80, windows=(None,)),
    "head of 6": tiny_config(heads=2, head_dim=6, windows=(None,)),
    "head of 512": tiny_config(heads=1, kv_heads=1, head_dim=512, windows=(None,)),
    "window": tiny_config(windows=(9,)),
    "classic": tiny_config(heads=4, kv_heads=4, classic=True, windows=(None,)),
    "norms": tiny_config(qk_norm=True, windows=(None,)),
    "gemma": tiny_config(special="gemma", windows=(30,)),
    "norms of outputs": tiny_config(special="outputs", windows=(None,)),
    "norms of outputs, head of 20": tiny_config(
        special="outputs", heads=4, head_dim=20, windows=(None,)
    ),
    "gelu": replace(tiny_config(windows=(None,)), activation="gelu"),
}


@pytest.mark.few(24)
@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["mild", "sharp"])
@pytest.mark.parametrize("shape", SHAPES)
@EVERY
@torch.no_grad()
def test_a_layer(kernels: Kernels, shape: str, scale: float) -> None:
    """Attention and MLP of a layer in float32; ``sharp`` has attention scores of thousands."""
    config = replace(SHAPES[shape], tied=False)
    plain = DenseModel(config)
    for seed, parameter in enumerate(plain.parameters()):
        size = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5
        parameter.copy_(torch.from_numpy(some_rows(*parameter.shape, seed=seed)) * size)
    plain.embedding.mul_(8.0)
    plain.layers[0].qkv.weight.mul_(scale**0.5)
    packed = decoder_of(plain, kernels)
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=100).tolist()
    attend = _RecordingAttend(config)
    exact = deepcopy(plain).double().states(tokens, torch.float64, attend)[1]
    pool = make_cache(config, FLOAT32, num_blocks=8)
    program = Program(kernels, config.hidden_size, FLOAT32, pool)
    program.embed(packed)
    packed.layers[0].compile(program, 0)
    block_table = BlockTable()
    found = np.empty((len(tokens), config.hidden_size), np.float32)
    pool.prepare(block_table, len(tokens))
    program.run(ForwardBatch([BatchEntry(block_table, TokenTree.chain(tokens))]), found)
    assert error(found, exact) < (2e-6 if scale == 1.0 else 2e-5)
    block_table.length = len(tokens)
    for got, seen in zip(read_layer(pool, 0, block_table), attend.seen, strict=True):
        assert error(got, seen) < 2e-6


def error(found: Array, exact: Tensor) -> float:
    """Return the norm of the error relative to that of the exact numbers."""
    want = exact.numpy()
    return float(np.linalg.norm(found - want) / np.linalg.norm(want))


class _RecordingAttend(DenseAttend):
    """Dense attention that records its keys and values ``[kv_heads, tokens, head_dim]`` in
    ``seen``.
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.seen = [each.transpose(0, 1) for each in (k, v)]
        return super().__call__(layer, q, k, v)


@pytest.mark.parametrize("shape", [{}, {"special": "gemma"}, {"special": "others"}], ids=str)
def test_bits_in_float32_on_every_instruction_set(shape: dict[str, Any]) -> None:
    """All instruction sets give the same bits, except ``portable``, which has no fused
    multiply-add.
    """
    module = tiny_module(windows=(None, 30), **shape)
    tokens = np.random.default_rng(0).integers(99, size=99).tolist()
    by_set = {each.name: text_logits(decoder_of(module, each), tokens) for each in candidates()}
    portable = by_set.pop("portable")
    for found in by_set.values():
        assert np.array_equal(found, next(iter(by_set.values())))
        assert np.abs(found - portable).max() < 1e-3 < portable.std()


@EVERY
def test_an_unknown_instruction_set_is_refused(kernels: Kernels) -> None:
    beyond = Kernels(kernels.library, kernels.path, 99)
    program = empty_program(beyond, 16)
    program.linear(unit_product(kernels, 16), to="logits")
    with pytest.raises(AssertionError, match="kernels: pass of 2 rows failed"):
        program.run(
            None,
            np.zeros((2, 16), np.float32),
            np.empty((2, 16), np.float32),
        )


def test_rows_without_a_slot_are_refused() -> None:
    engine = make_engine(tiny_decoder())
    block_table = BlockTable()
    engine.cache.prepare(block_table, 16)
    for rows, fits in ((16, True), (17, False)):
        entry = BatchEntry(block_table, TokenTree.chain([1] * rows), range(rows - 1, rows), rows)
        if fits:
            assert len(engine.runner.forward(ForwardBatch([entry])).logits[0]) == 1
        else:
            with pytest.raises(AssertionError, match="pass of 17 rows failed"):
                engine.runner.forward(ForwardBatch([entry]))
    engine.cache.release(block_table)


def test_a_pass_has_the_rotations_of_two_models() -> None:
    """Those of the model, and those of a model whose KV cache its layers read."""
    assert NUM_ROPE_TABLES == 2 * MAX_ROPES
