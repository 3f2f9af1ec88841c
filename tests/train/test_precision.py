"""Choice of the dtype of matrix products by their duration."""

import timeit
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from pronk.train.losses import autocast, product_dtype


@pytest.fixture
def durations(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Let products in float32 and in bfloat16 take the seconds of the parameter."""
    now = 0.0
    seconds = dict(zip((torch.float32, torch.bfloat16), request.param, strict=True))
    multiply = torch.matmul

    def timed(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        nonlocal now
        now += seconds[one.dtype]
        return multiply(one, other)

    monkeypatch.setattr(torch, "matmul", timed)
    monkeypatch.setattr(timeit, "repeat", partial(timeit.repeat, timer=lambda: now))
    product_dtype.cache_clear()
    yield
    product_dtype.cache_clear()


@pytest.mark.parametrize(
    ("durations", "chosen"),
    [((0.1, 10.0), torch.float32), ((0.2, 0.1), torch.bfloat16)],
    indirect=["durations"],
)
@pytest.mark.usefixtures("durations")
def test_the_faster_dtype_is_used(chosen: torch.dtype) -> None:
    device = torch.device("cpu")
    assert product_dtype(device) == chosen
    with autocast(device):
        assert torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype == chosen


def test_other_devices_have_bfloat16() -> None:
    assert product_dtype(torch.device("meta")) == torch.bfloat16
