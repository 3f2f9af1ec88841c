"""Mixtures of experts in every weight format on every instruction set: outputs, bits, and which
experts are read.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from covering import covering_array
from gguf_files import QUANTIZED, SUPER_BLOCKS, random_blocks
from oracle import route
from pronk.base.arrays import BFLOAT16, FLOAT16, FLOAT32, Array, DType
from pronk.checkpoint.config import MixtureConfig, ModelConfig
from pronk.checkpoint.gguf.blocks import BlockMatrix, BlockRows
from pronk.kernels.library import Kernels, candidates
from pronk.kernels.rounding import round_weights
from pronk.kernels.threads import num_threads, set_threads
from pronk.models.decoder import Layer
from pronk.models.linear import AnyWeight, Experts, Linear, Norm
from pronk.models.program import Program
from tiny_models import tiny_config

EVERY = pytest.mark.parametrize("kernels", candidates(), ids=lambda kernels: kernels.name)
FORMATS = ["float32", "bfloat16", "float16", "int8", "int4", *QUANTIZED]
EACH = pytest.mark.parametrize("form", FORMATS)
MIXTURE = MixtureConfig(experts=7, per_row=3, width=72, normalized=True, layers=(True,))
ROWS = 40
FEW_ROWS = 17  # a tile and a row, for sanitized libraries


@dataclass
class Mixture:
    """A layer with a mixture of experts, without attention."""

    layer: Layer
    kernels: Kernels
    dtype: DType

    def run(self, x: Array) -> tuple[Array, int]:
        """Return the output of all rows, and the number of experts that were read."""
        program = Program(self.kernels, x.shape[1], self.dtype)
        program.mlp(self.layer)
        stream = x.astype(self.dtype)
        experts_read = program.run(None, stream)
        return stream.astype(np.float32), experts_read

    def chosen(self, x: Array) -> tuple[Array, Array]:
        """Return the experts of each row in rising order, and their weights, by a slow loop."""
        assert self.layer.router is not None
        mixture = self.layer.up.mixture
        outputs = (
            normalized(x.astype(self.dtype)).astype(np.float64)
            @ self.layer.router.packed.unpack().T
        )
        pairs = [route(row, mixture, self.layer.correction) for row in outputs]
        return np.array([each[0] for each in pairs]), np.array([each[1] for each in pairs])

    def expected(self, x: Array) -> Array:
        """Return the output of all rows, computed by NumPy in float64."""
        experts, shares = self.chosen(x)
        made = x.astype(np.float64)
        normed = normalized(x.astype(self.dtype)).astype(np.float64)
        ups = self.layer.up.parts
        downs = self.layer.down.parts
        weights = {
            number: (ups[number].packed.unpack(), downs[number].packed.unpack())
            for number in np.unique(experts)
        }
        for row, (numbers, parts) in enumerate(zip(experts, shares, strict=True)):
            for number, share in zip(numbers, parts, strict=True):
                up, down = weights[number]
                hidden = activate(self.layer.config, up @ normed[row])
                made[row] += share * (down @ hidden)
        return made


def activate(config: ModelConfig, up: Array) -> Array:
    """Return the activations of an expert's outputs ``[gate, up]``, or ``[up]`` without a gate."""
    if not config.gated:
        return np.maximum(up, 0.0) ** 2
    gate, value = np.split(up, 2)
    return gate / (1 + np.exp(-gate)) * value


def normalized(x: Array) -> Array:
    wide = x.astype(np.float64)
    return (wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5)).astype(np.float32)


def weight_of(form: str, kernels: Kernels, outputs: int, inputs: int, seed: int) -> AnyWeight:
    values = (np.random.default_rng(seed).standard_normal((outputs, inputs)) * inputs**-0.5).astype(
        np.float32
    )
    if form in QUANTIZED:
        return BlockMatrix(form, inputs, (BlockRows(random_blocks(form, outputs, inputs, seed)),))
    if form.startswith("int"):
        return round_weights(kernels, values, 4 if form == "int4" else 8)
    return values.astype({"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}[form])


def make(
    kernels: Kernels,
    form: str,
    *,
    clamped: str | None = None,
    gated: bool = True,
    **changes: Any,
) -> Mixture:
    """Return a mixture of experts; super-blocks need sizes that are multiples of 256.

    Without a gate, the activation is relu².

    ``clamped``: the gate is clamped, and the router, the gate or the up projection has a row of
    NaN.
    """
    mixture = replace(MIXTURE, **changes)
    hidden = 256 if form in SUPER_BLOCKS else 96
    width = 256 if form in SUPER_BLOCKS else 160 if form in QUANTIZED else mixture.width
    config = replace(tiny_config(hidden=hidden), norm_eps=1e-5, clamped_gate=clamped is not None)
    if not gated:
        config = replace(config, gated=False, activation="relu2")
    mixture = replace(mixture, width=width)
    layer = Layer(config, mixture)
    layer.mlp_norm = Norm.of(config, np.ones(hidden, np.float32))
    router = np.random.default_rng(99).standard_normal((mixture.experts, hidden)).astype(np.float32)
    if clamped == "router":
        router[4] = np.nan
    layer.router = Linear(kernels, router * np.float32(0.2), None, layer.layout("router"), None)
    if mixture.correction:
        layer.correction = some_rows(1, mixture.experts, 7)[0]
    ups = 2 * width if gated else width
    for experts, outputs, inputs in ((layer.up, ups, hidden), (layer.down, hidden, width)):
        assert isinstance(experts, Experts)
        for number in range(mixture.experts):
            seed = 2 * number + (experts is layer.down)
            weight = weight_of(form, kernels, outputs, inputs, seed)
            if experts is layer.up and clamped in ("gate", "up"):
                weight[0 if clamped == "gate" else width] = np.nan
            experts.set(number, Linear(kernels, weight, None, experts.layout, None))
    return Mixture(layer, kernels, BFLOAT16 if form == "bfloat16" else FLOAT32)


def some_rows(count: int, size: int, seed: int = 5) -> Array:
    return np.random.default_rng(seed).standard_normal((count, size)).astype(np.float32)


def same(one: Array, other: Array) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()


@pytest.mark.few(16)
@EVERY
@EACH
def test_outputs_are_those_of_numpy(form: str, kernels: Kernels, *, is_sanitized: bool) -> None:
    """Quantized weights take input rows of 8 bits; GGUF blocks are random, so their outputs have
    any size.
    """
    made = make(kernels, form)
    x = some_rows(FEW_ROWS if is_sanitized else ROWS, made.layer.config.hidden_size)
    expected = made.expected(x)
    (found, _) = made.run(x)
    change = np.abs(expected - x).max()
    # A stream of bfloat16 has 8 bits, too.
    limits = {"float32": 2e-5, "float16": 2e-5, "bfloat16": 0.04 * max(1.0, change)}
    assert change > 0.02
    assert np.abs(found - expected).max() < limits.get(form, 0.05 * change)


@pytest.mark.few(16)
@EVERY
@EACH
def test_a_row_depends_on_itself_alone(form: str, kernels: Kernels, *, is_sanitized: bool) -> None:
    made = make(kernels, form)
    before = num_threads()
    count = FEW_ROWS if is_sanitized else ROWS
    x = some_rows(count, made.layer.config.hidden_size)
    alone = np.concatenate([made.run(x[row : row + 1])[0] for row in range(count)])
    try:
        for threads in (3,) if is_sanitized else (1, 3):
            set_threads(threads, threads)
            for size in (5, count) if is_sanitized else (2, 5, 16, count):
                parts = [made.run(x[start : start + size])[0] for start in range(0, count, size)]
                assert same(np.concatenate(parts), alone), (threads, size)
            order = np.random.default_rng(size).permutation(count)
            assert same(made.run(x[order])[0], alone[order])
    finally:
        set_threads(before, before)


@EVERY
@pytest.mark.parametrize("normal", [True, False])
def test_equal_scores_choose_the_first_experts_and_the_order_of_the_sum(
    kernels: Kernels, *, normal: bool
) -> None:
    made = make(kernels, "float32", normalized=normal)
    by = made.kernels
    layer = made.layer
    hidden = made.layer.config.hidden_size
    layer.router = Linear(by, np.zeros((7, hidden), np.float32), None, layer.layout("router"), None)
    x = some_rows(5, hidden)
    total = None
    for number in range(3):
        program = Program(by, hidden, FLOAT32)
        y = np.empty((5, hidden), np.float32)
        program.linear(layer.up.parts[number], norm=layer.mlp_norm, activation="silu", to="B")
        program.linear(layer.down.parts[number], source="B", to="logits")
        program.run(None, x.copy(), y)
        part = y * (np.float32(1) / np.float32(3 if normal else 7))
        total = part if total is None else total + part
    assert total is not None
    assert same(made.run(x)[0], x + total)


@pytest.mark.few(4)
@EVERY
@pytest.mark.parametrize("experts", [1, 16, 17, 300])
def test_numbers_of_experts(kernels: Kernels, experts: int) -> None:
    for per_row in {1, min(17, experts), min(3, experts)}:
        for normal in (True, False):
            made = make(
                kernels, "float32", experts=experts, per_row=per_row, normalized=normal, width=24
            )
            x = some_rows(4, made.layer.config.hidden_size)
            assert np.abs(made.run(x)[0] - made.expected(x)).max() < 2e-5


ROUTERS: dict[str, tuple[Any, ...]] = {
    "scores": ("softmax", "sigmoid"),
    "correction": (False, True),
    "groups": (1, 2, 4),
    "group_best": (1, 2),
    "normalized": (False, True),
    "scale": (1.0, 2.5),
    "epsilon": (0.0, 0.5),
    "gated": (False, True),
}


def routers() -> list[dict[str, Any]]:
    """Return routers in which all pairs of values of :data:`ROUTERS` occur."""
    sizes = [len(values) for values in ROUTERS.values()]
    cases = []
    for numbers in covering_array(sizes, 2):
        pairs = zip(ROUTERS.items(), numbers, strict=True)
        case = {name: values[number] for (name, values), number in pairs}
        case["row_groups"] = min(2, case["groups"])
        if case["scores"] == "softmax":
            case["epsilon"] = 0.0
        cases.append(case)
    return cases


@pytest.mark.few(14)
@EVERY
@pytest.mark.parametrize("router", routers(), ids=str)
def test_routers_are_those_of_a_slow_loop(kernels: Kernels, router: dict[str, Any]) -> None:
    made = make(kernels, "float32", experts=20, per_row=3, **router)
    x = some_rows(12, made.layer.config.hidden_size)
    found, experts_read = made.run(x)
    assert np.abs(found - made.expected(x)).max() < 5e-5
    chosen = made.chosen(x)[0]
    assert experts_read == len(set(chosen.flatten().tolist()))
    alone = np.concatenate([made.run(x[row : row + 1])[0] for row in range(len(x))])
    assert same(found, alone)
    if router["correction"]:  # else the test would not see a correction that is left out
        made.layer.correction = None
        assert (made.chosen(x)[0] != chosen).any()
    if router["groups"] > router["row_groups"]:
        mixture = replace(made.layer.up.mixture, groups=1, row_groups=1)
        outputs = normalized(x).astype(np.float64) @ made.layer.router.packed.unpack().T
        correction = made.layer.correction
        free = np.array([route(row, mixture, correction)[0] for row in outputs])
        assert (free != chosen).any()


@EVERY
def test_equal_ranks_choose_the_first_groups_and_experts(kernels: Kernels) -> None:
    groups = {"groups": 4, "row_groups": 2, "experts": 12, "per_row": 4}
    made = make(kernels, "float32", scores="sigmoid", **groups)
    layer = made.layer
    hidden = layer.config.hidden_size
    zeros = np.zeros((12, hidden), np.float32)
    layer.router = Linear(made.kernels, zeros, None, layer.layout("router"), None)
    x = some_rows(3, hidden)
    assert made.chosen(x)[0].tolist() == [[0, 1, 2, 3]] * 3
    assert np.abs(made.run(x)[0] - made.expected(x)).max() < 2e-5


@EVERY
def test_a_correction_that_is_not_a_number_is_not_hidden(kernels: Kernels) -> None:
    made = make(kernels, "float32", correction=True)
    assert made.layer.correction is not None
    made.layer.correction[5] = np.nan
    found = made.run(some_rows(6, made.layer.config.hidden_size))[0]
    assert np.isnan(found).any(axis=1).all()


@pytest.mark.few(16)
@EVERY
@EACH
def test_experts_without_rows_are_not_read(form: str, kernels: Kernels) -> None:
    """The weights of the other experts have the address 0, so that a read would end the process."""
    made = make(kernels, form, experts=24)
    for rows in (1, 2, 6):
        x = some_rows(rows, made.layer.config.hidden_size)
        expected = made.run(x)[0]
        union = set(made.chosen(x)[0].flatten().tolist())
        assert len(union) < 24
        others = [number for number in range(24) if number not in union]
        structures = [
            part.parts[number].packed.struct
            for part in (made.layer.up, made.layer.down)
            for number in others
        ]
        addresses = [each.data for each in structures]
        for each in structures:
            each.data = ctypes.c_void_p(0)
        found, experts_read = made.run(x)
        for each, address in zip(structures, addresses, strict=True):
            each.data = address
        assert same(found, expected)
        assert experts_read == len(union)


@EVERY
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_that_are_not_finite_leave_the_others_alone(kernels: Kernels, value: float) -> None:
    for form in ("float32", "int4", "Q4_K"):
        made = make(kernels, form)
        x = some_rows(6, made.layer.config.hidden_size)
        expected = made.run(x)[0]
        x[2, 7] = value
        found = made.run(x)[0]
        assert np.isnan(found[2]).any()
        assert same(np.delete(found, 2, axis=0), np.delete(expected, 2, axis=0))


@EVERY
@pytest.mark.parametrize("broken", ["router", "gate", "up"])
def test_clamps_and_choices_do_not_hide_nan(broken: str, kernels: Kernels) -> None:
    made = make(kernels, "float32", clamped=broken)
    found = made.run(some_rows(6, made.layer.config.hidden_size))[0]
    assert np.isnan(found).any(axis=1).all()


def refused(**changes: Any) -> Callable[[], object]:
    return lambda: make(candidates()[0], "float32", **changes).run(some_rows(1, 96))


@pytest.mark.parametrize(
    "call",
    [
        refused(experts=2),
        refused(experts=1025),
        refused(groups=2),  # 7 experts
        refused(experts=8, groups=4, row_groups=1),  # 2 experts for 3 places
        refused(experts=8, groups=4, row_groups=5),
        refused(experts=8, groups=4, row_groups=2, group_best=3),
    ],
)
def test_numbers_that_the_kernels_lack_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(AssertionError, match="unsupported shape"):
        call()


def test_experts_in_several_formats_are_refused() -> None:
    kernels = candidates()[0]
    experts = make(kernels, "int8").layer.up
    other = make(kernels, "float32").layer.up
    assert isinstance(experts, Experts)
    with pytest.raises(ValueError, match="in one format, found int8 in groups of 96 and float32"):
        experts.set(3, other.parts[0])
