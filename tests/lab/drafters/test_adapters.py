"""Drafters of the lab for requests with LoRA adapters: the engine's tests."""

import pytest

from engine import test_adapters as adapters
from lab.drafters.cases import DRAFTERS, spec
from pronk.base.arrays import BFLOAT16, FLOAT32, DType

FAST = ("lookahead", "kangaroo", "glide", "medusa", "auto")
NAMES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in DRAFTERS]


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_drafters_in_a_mixed_batch(name: str, dtype: DType) -> None:
    adapters.test_drafters_in_a_mixed_batch(spec(name), dtype)


@pytest.mark.parametrize("preempts", [False, True])
def test_prefix_cache_and_preemption(preempts: bool) -> None:
    adapters.test_prefix_cache_and_preemption(spec("kangaroo"), preempts)
