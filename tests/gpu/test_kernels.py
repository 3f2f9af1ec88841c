"""The kernels against NumPy, with equal bits for all numbers of rows."""

import numpy as np
import pytest
import torch

from gpu.tiny_gpu import DEVICE, gpu_runner, put
from pronk.base.arrays import BFLOAT16, FLOAT32, Array
from pronk.base.convert import to_array
from pronk.cache.blocks import BlockTable
from pronk.checkpoint.formats.matrix import QuantizedMatrix
from pronk.checkpoint.gguf.blocks import TENSOR_TYPES, BlockMatrix, BlockRows, unpack
from pronk.gpu import gemm
from pronk.gpu.attention import AttentionOptions, attend
from pronk.gpu.choose import choose, noise_of
from pronk.gpu.gemm import ProductPlan, multiply, plan_product
from pronk.gpu.layout import RowLayout
from pronk.gpu.rows import RowNorm, gate, normalize
from pronk.gpu.weights import GpuMatrix, load_matrix
from pronk.kernels.rounding import round_weights
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.sampling.stateless import StatelessSampler
from pronk.sampling.tree import TokenTree
from tiny_models import kernels


def draw(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def matrices() -> dict[str, tuple[Array, GpuMatrix]]:
    """Return the weights and the matrix of each format, of 20 outputs and 1,100 inputs."""
    weight = draw(1, 20, 1100)
    bias = draw(2, 20)
    plain = load_matrix(weight, bias, dtype=FLOAT32, device=DEVICE)
    found = {"plain": (weight, plain)}
    order = np.random.default_rng(3).permutation(1100)
    low = round_weights(kernels(), weight, 4, 32)
    minimum = low.scale * np.float32(-7.5)
    forms = {
        "int8": round_weights(kernels(), weight, 8, 64),
        "int4": low,
        "int4 with minima": QuantizedMatrix(low.codes, low.scale, minimum, 4, 32),
        "int4 in an order": QuantizedMatrix(low.codes, low.scale, None, 4, 32, order),
        "int4, one group": round_weights(kernels(), weight, 4, 1152 - 24),
    }
    for name, matrix in forms.items():
        loaded = load_matrix(matrix, bias, dtype=FLOAT32, device=DEVICE)
        found[name] = (matrix.dequantize(), loaded)
    return found


@pytest.mark.parametrize("name", ["plain", "int8", "int4", "int4 with minima", "int4 in an order"])
def test_products_are_those_of_numpy(name: str) -> None:
    weight, matrix = matrices()[name]
    assert plan_product(20, 1100).num_splits == 2
    assert np.array_equal(to_array(matrix.rows(torch.arange(20, device=DEVICE))), weight)
    x = draw(4, 5, 1100)
    got = to_array(multiply(put(x), matrix))
    assert np.abs(got - (x @ weight.T + draw(2, 20))).max() < 2e-4


@pytest.mark.parametrize(("kind", "size", "values"), [("Q4_K", 144, 256), ("Q8_0", 34, 32)])
def test_blocks_of_gguf_files_keep_their_numbers(kind: str, size: int, values: int) -> None:
    """Two parts, the first in the order of interleaved RoPE; scales stay in 16 bits or less."""
    inputs = 512
    stored = np.random.default_rng(13).integers(0, 256, (12, inputs // values, size), np.uint8)
    factors = np.random.default_rng(14).uniform(-1, 1, (12, inputs // values, 2))
    count = 2 if kind == "Q4_K" else 1
    halves = factors.astype(np.float16).view(np.uint8)
    stored[..., : 2 * count] = halves.reshape(12, -1, 4)[..., : 2 * count]
    rows = stored.reshape(12, -1)
    matrix = BlockMatrix(kind, inputs, (BlockRows(rows[:8], heads=2), BlockRows(rows[8:])))
    loaded = load_matrix(matrix, None, dtype=FLOAT32, device=DEVICE)
    type_ = next(each for each in TENSOR_TYPES.values() if each.name == kind)
    want = unpack(rows, type_, np.empty((12, inputs), np.uint8)).dequantize()
    # of each head of 4 rows, the rows 0 2 1 3
    want = want[[0, 2, 1, 3, 4, 6, 5, 7, 8, 9, 10, 11]]
    assert np.array_equal(to_array(loaded.rows(torch.arange(12, device=DEVICE))), want)
    assert loaded.nbytes <= 1.03 * stored.nbytes
    x = draw(15, 3, inputs)
    got = to_array(multiply(put(x), loaded))
    assert np.abs(got - x @ want.T).max() < 1e-5 * np.abs(want).max() * inputs


def test_bits_of_a_product_do_not_depend_on_the_rows() -> None:
    assert find_dependent_formats() == []


def test_a_split_by_rows_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: products of many rows have one split."""
    rows = 0

    def faulty(outputs: int, inputs: int) -> ProductPlan:
        plan = plan_product(outputs, inputs)
        return plan if rows < 3 else ProductPlan(plan.tile_outputs, 2 * plan.split_blocks, 1)

    def multiply_rows(x: torch.Tensor, matrix: GpuMatrix, y: torch.Tensor) -> None:
        nonlocal rows
        rows = len(x)
        original(x, matrix, y)

    original = gemm._multiply_rows
    monkeypatch.setattr(gemm, "_multiply_rows", multiply_rows)
    monkeypatch.setattr(gemm, "plan_product", faulty)
    assert find_dependent_formats() != []


def find_dependent_formats() -> list[str]:
    """Return the formats in which a row has other bits beside other rows."""
    found = []
    for name, (_, matrix) in matrices().items():
        if name not in ("plain", "int4"):
            continue
        x = put(draw(5, 70, 1100)).bfloat16()
        whole = multiply(x, matrix, torch.float32)
        alone = torch.cat([multiply(x[row : row + 1], matrix, torch.float32) for row in (0, 66)])
        if not torch.equal(whole[[0, 66]], alone):
            found.append(name)
    return found


def test_norms_and_gates_are_those_of_numpy() -> None:
    x = draw(6, 9, 50)
    weight = draw(7, 50)
    got = to_array(normalize(put(x), RowNorm(put(weight), 1e-5)))
    want = x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * weight
    assert np.abs(got - want).max() < 1e-5
    g, u = np.split(x, 2, axis=1)
    for activation, function in (
        ("silu", torch.nn.functional.silu),
        ("gelu", torch.nn.functional.gelu),
        ("gelu_tanh", lambda z: torch.nn.functional.gelu(z, approximate="tanh")),
    ):
        expected = to_array(function(put(g))) * u
        assert np.abs(to_array(gate(put(x), activation)) - expected).max() < 1e-5


@pytest.mark.parametrize("window", [None, 70])
def test_attention_is_that_of_numpy(window: int | None) -> None:
    """Two rows of 101 and 37 keys, in pages out of order, the last keys by a path; cap and sinks."""
    heads, size, slots = 3, 24, 256
    queries = draw(8, 2, heads, size)
    keys = draw(9, 1, slots, size)
    values = draw(10, 1, slots, size)
    positions = np.array([100, 36], np.int32)
    committed = np.array([97, 36], np.int32)
    tables = np.array([[3, 9, 4, 1, 0, 11, 7], [5, 2, 8, 0, 0, 0, 0]], np.int32)
    paths = np.array([[200, 250, 201, 202], [210, 0, 0, 0]], np.int32)
    own = torch.arange(2, dtype=torch.int32, device=DEVICE)
    layout = RowLayout(
        own,
        put(positions),
        own,
        own,
        put(committed),
        own,
        own,
        put(tables),
        put(paths),
        16,
        100,
    )
    sinks = draw(11, heads)
    options = AttentionOptions(0.3, 5.0, window, put(sinks))
    arrays = [put(each) for each in (queries, keys, values)]
    got = to_array(attend(*arrays, layout, options))
    for row, position in enumerate(positions):
        length = committed[row]
        index = np.arange(position + 1)
        slot = tables[row, index // 16] * 16 + index % 16
        slot[length:] = paths[row, : position + 1 - length]
        first = 0 if window is None else max(0, position - window + 1)
        seen = slot[first:]
        for head in range(heads):
            scores = 5.0 * np.tanh(0.3 * keys[0, seen] @ queries[row, head] / 5.0)
            weights = np.exp(np.append(scores, sinks[head]))
            want = weights[:-1] @ values[0, seen] / weights.sum()
            assert np.abs(got[row, head * size : (head + 1) * size] - want).max() < 1e-5


def test_choices_are_those_of_the_library() -> None:
    """The vocabulary has two blocks; a tie goes to the first token; not finite is -1."""
    logits = draw(12, 8, 1100) * 3.0
    logits[1, [40, 1090]] = 99.0
    logits[2, 1099] = np.nan
    temperatures = [0.0, 0.0, 0.7, 0.7, 0.05, 1.0, 4.0, 1.3]
    samplers = [StatelessSampler(each, 7 + row) for row, each in enumerate(temperatures)]
    positions = [5, 6, 7, 1000, 2**31, 9, 3, 8]
    noise = noise_of(samplers, positions, 8)
    got = choose(put(logits), *(put(part) for part in noise)).tolist()
    want = [
        sampler.choose(kernels(), row, position)
        for sampler, row, position in zip(samplers, logits, positions, strict=True)
    ]
    assert got == want
    assert got[1:3] == [40, -1]
    assert got[6] != int(logits[6].argmax())


def test_noise_has_the_bits_of_the_library() -> None:
    """With equal logits, the noise alone decides; keys near each other differ in the last bits."""
    logits = torch.zeros(20, 1000, device=DEVICE)
    samplers = [StatelessSampler(1.0, 3)] * 20
    noise = noise_of(samplers, range(20), 20)
    got = choose(logits, *(put(part) for part in noise)).tolist()
    assert got == [samplers[0].choose(kernels(), np.zeros(1000, np.float32), i) for i in range(20)]
    assert len(set(got)) > 15


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_steps_equal_plain_calls() -> None:
    """On a device: a graph gives the bits of the calls that it has captured."""
    runner = gpu_runner(BFLOAT16)
    table = BlockTable()
    runner.cache.prepare(table, 9)
    entry = BatchEntry(table, TokenTree.chain(range(3, 12)), range(9))
    first = runner.forward(ForwardBatch([entry])).logits[0][:].copy()
    again = runner.forward(ForwardBatch([entry])).logits[0][:].copy()
    runner.steps.pads = False
    plain = runner._executor.run(ForwardBatch([entry]), 2).logits
    assert np.array_equal(first, again)
    assert np.array_equal(first, plain)
