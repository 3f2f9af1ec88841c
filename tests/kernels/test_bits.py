"""One set of bits on every instruction set: logits of tiny models of all families are equal.

The tests compare the instruction sets of this processor, down to ``portable``, whose fused
multiply-add is software.
"""

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import combinations, cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import MakeCheckpoint
from gguf_files import convert
from kernels.test_products import same, some_rows
from models.test_loader import load
from models.test_logits import CASES, Case, tokens
from pronk import LLM, OptionError
from pronk.base.arrays import BFLOAT16, FLOAT16, FLOAT32, INT4, INT8, Array, DType
from pronk.kernels.build import build
from pronk.kernels.library import Kernels, candidates
from pronk.kernels.threads import set_threads
from pronk.models.choice import choose_bits
from pronk.models.linear import Linear, WeightLayout
from pronk.models.program import Program
from tiny_models import kernels, text_logits

PORTABLE = candidates(bits="portable")
LENGTH = 45  # tokens of a text: several tiles of rows, and a remainder
# How the weights are loaded: the dtype of those that are not quantized, and the option ``weights``.
WEIGHTS = [
    (BFLOAT16, "plain"),
    (BFLOAT16, "int4"),
    (FLOAT16, "plain"),
    (FLOAT32, "int8"),
    (FLOAT32, "plain"),
]
KV_DTYPES = [None, INT8, INT4]
# One case of each family with one kind of weights, so that each kind meets several families.
PAIRS = [
    pytest.param(case, weights, id=f"{case.family}-{case.name}-{weights[0]}-{weights[1]}")
    for case, weights in zip(CASES, cycle(WEIGHTS), strict=False)
]


@pytest.mark.few(36)
@pytest.mark.parametrize(("case", "weights"), PAIRS)
def test_logits_of_every_family(
    case: Case, weights: tuple[DType, str], checkpoint: MakeCheckpoint
) -> None:
    folder = checkpoint(case.family, **case.overrides)
    (dtype, rounded) = weights
    text = tokens(LENGTH)
    expected: dict[DType | None, Array] = {}
    for each in PORTABLE:
        decoder = load(folder, kernels=each, dtype=dtype, weights=rounded)
        for kv_dtype in KV_DTYPES:
            found = text_logits(decoder, text, dtype, kv_dtype)
            assert np.isfinite(found).all()
            assert same(found, expected.setdefault(kv_dtype, found)), (each.name, kv_dtype)
    for one, other in combinations(KV_DTYPES, 2):
        assert not same(expected[one], expected[other]), "expected the cache to matter"


def outputs_of(by: Kernels, weight: Array, x: Array, activation: str | None = None) -> Array:
    """Return ``activation(x weightᵀ)``, float32 ``[rows, outputs]``."""
    program: Program = Program(by, weight.shape[1], FLOAT32)
    linear = Linear(by, weight, None, WeightLayout(), None)
    program.linear(linear, activation=activation, to="logits")
    y = np.empty((len(x), len(weight)), FLOAT32)
    program.run(None, np.ascontiguousarray(x, FLOAT32), y)
    return y


def nearest_float(exact: Fraction) -> np.float32:
    """Return the float32 nearest to a number of normal size; of two, the one with an even last bit."""
    close = np.float32(float(exact))
    around = [
        np.nextafter(close, np.float32(-np.inf)),
        close,
        np.nextafter(close, np.float32(np.inf)),
    ]
    return min(
        around, key=lambda each: (abs(Fraction(float(each)) - exact), int(each.view(np.int32)) & 1)
    )


def hard_sums() -> tuple[Array, Array, Array]:
    """Return ``a [100]``, ``b [24]`` and ``c [100]`` such that many ``a · b + c`` are near a tie.

    A product of two numbers of 24 bits is far smaller than ``c``, or half a unit in the last place
    of ``c``, or it cancels most of ``c``. Some are ``(1 - 2**-23) * (1 + 2**-23) / 2``, which float64
    adds to ``c`` like 1/2.
    """
    random = np.random.default_rng(0)
    mantissas = random.integers(1 << 23, 1 << 24, 100).astype(np.float32)
    b = np.concatenate(
        [2.0 ** np.arange(-8, 8), random.integers(1 << 23, 1 << 24, 8) * 2.0**-24]
    ).astype(np.float32)
    c = random.integers(1 << 23, 1 << 24, 100).astype(np.float32)
    shift = random.choice([-50, -27, -25, -24, -23, -2, 0], 100)
    a = np.where(random.random(100) < 0.5, -1, 1) * np.ldexp(mantissas, shift)
    a[::3] = np.ldexp(1.0 + 2.0**-23, shift[::3])
    a[1::3] = np.ldexp(1.0, shift[1::3])
    a[2::6] = 0.5 - 2.0**-24
    b[0] = 1.0 + 2.0**-23
    return a.astype(np.float32), b, c


@pytest.mark.parametrize("by", PORTABLE, ids=lambda each: each.name)
def test_multiply_adds_are_rounded_once(by: Kernels) -> None:
    (a, b, c) = hard_sums()
    weight = np.stack([np.ones_like(b), b], axis=1)
    found = outputs_of(by, weight, np.stack([c, a], axis=1))
    expected = np.array(
        [
            [nearest_float(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))) for y in b]
            for x, z in zip(a, c, strict=True)
        ]
    )
    assert same(found, expected)
    twice = a[:, None] * b + c[:, None]
    in_float64 = (a[:, None].astype(np.float64) * b + c[:, None]).astype(np.float32)
    assert (twice != expected).any()
    assert (in_float64 != expected).any(), "expected sums that float64 rounds twice, found none"


@pytest.mark.parametrize("activation", [None, "silu", "gelu", "gelu_tanh", "relu2"])
def test_activations(activation: str | None) -> None:
    """Numbers of all sizes, subnormal ones and infinite ones included."""
    exponents = np.arange(-149, 128)
    magnitudes = np.concatenate([np.ldexp(1.37, exponents), np.linspace(0, 12, 1000), [np.inf]])
    x = np.concatenate([magnitudes, -magnitudes]).astype(np.float32)[:, None]
    weight = np.ones((1, 1), np.float32)
    expected = outputs_of(PORTABLE[0], weight, x, activation)
    for each in PORTABLE[1:]:
        assert same(outputs_of(each, weight, x, activation), expected), each.name


def test_gelu_is_accurate() -> None:
    x = np.linspace(-9, 9, 4001, dtype=np.float32)[:, None]
    found = outputs_of(PORTABLE[0], np.ones((1, 1), np.float32), x, "gelu")
    exact = np.array([[0.5 * float(v) * math.erfc(-float(v) / math.sqrt(2))] for (v,) in x])
    assert (np.abs(found - exact) <= 1e-5 * np.abs(exact)).all()
    assert np.abs(found - exact)[x > 0].max() < 2e-6


@contextmanager
def flushing_subnormals() -> Iterator[None]:
    """Let this thread replace subnormal numbers by zero, as libraries with -ffast-math do."""
    if not torch.set_flush_denormal(True):
        pytest.skip("expected a processor that can replace subnormal numbers by zero")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_mode_of_the_thread_does_not_matter(threads: int) -> None:
    set_threads(threads, 1)
    weight = np.full((40, 3), 1e-20, np.float32)
    x = np.full((30, 3), 3e-20, np.float32)
    expected = outputs_of(PORTABLE[0], weight, x)
    with flushing_subnormals():
        assert (x * weight[:1] == 0).all(), "expected the mode to matter, it does not"
        for each in PORTABLE:
            assert same(outputs_of(each, weight, x), expected), each.name
        assert (x * weight[:1] == 0).all(), "expected the mode of the caller, found another"
    assert (expected > 0).all()


def test_fast_bits_differ_only_for_bfloat16() -> None:
    """Non-vacuity: the products of bfloat16 have other bits than the portable ones."""
    fast = candidates(bits="fast")[0]
    if fast.bits == "portable":
        pytest.skip("expected a processor with products of bfloat16")
    portable = next(each for each in PORTABLE if each.name == fast.name)
    x = some_rows(7, 300)
    for dtype in (FLOAT32, FLOAT16, BFLOAT16):
        weight = some_rows(40, 300, dtype, 1)
        found = outputs_of(fast, weight, x)
        assert same(found, outputs_of(portable, weight, x)) == (dtype != BFLOAT16)


def bits_of(model: Path, **options: Any) -> str:
    llm = LLM(model, threads=1, **options)
    try:
        return llm.bits
    finally:
        llm.close()


def test_bits_of_a_model(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """``fast`` for bfloat16 weights without quantized ones; only where it is other arithmetic."""
    assert choose_bits("auto", BFLOAT16, quantized=False) == "fast"
    assert choose_bits("auto", BFLOAT16, quantized=True) == "portable"
    assert choose_bits("auto", FLOAT16, quantized=False) == "portable"
    fast = kernels().bits
    plain = checkpoint("llama", save_dtype=torch.bfloat16)
    assert bits_of(plain) == bits_of(plain, bits="fast") == fast
    assert bits_of(plain, bits="portable") == "portable"
    assert bits_of(plain, dtype="float32") == bits_of(plain, weights="int4") == "portable"
    assert bits_of(plain, kernels="avx2", bits="fast") == "portable"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    blocks = convert(checkpoint("llama", **sizes), tmp_path / "blocks.gguf", "Q8_0")
    assert bits_of(blocks) == "portable"
    assert bits_of(blocks, bits="fast") == fast
    with pytest.raises(OptionError, match=r"^bits: expected one of auto, portable, fast, found"):
        LLM(plain, bits="slow")


def find_compilers() -> list[list[str]]:
    """Return the commands of the C++ compilers of this machine."""
    commands = (["g++"], ["clang++"], ["zig", "c++"])
    return [command for command in commands if shutil.which(command[0])]


@pytest.mark.slow
@pytest.mark.parametrize("level", ["-O1", "-O3"])
def test_builds_of_every_compiler(level: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Each compiler's library has the bits of the installed one."""
    compilers = find_compilers()
    if len(compilers) < 2:
        pytest.skip(
            f"builds are NOT compared here: expected g++ and clang++ or zig, found {compilers}"
        )
    cases = CASES[::20]
    text = tokens(LENGTH)
    for command in compilers:
        library = tmp_path / f"{command[0]}.so"
        build(library, command, extra=[level, "-DPRONK_FEW_TILES"], native=True)
        for case in cases:
            folder = checkpoint(case.family, **case.overrides)
            expected = text_logits(load(folder, kernels=PORTABLE[0], weights="int8"), text)
            for each in candidates(path=library, bits="portable"):
                found = text_logits(load(folder, kernels=each, weights="int8"), text)
                assert same(found, expected), (command, each.name, case.family)
