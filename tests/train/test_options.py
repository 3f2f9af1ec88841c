from __future__ import annotations

from dataclasses import replace

import pytest

from pronk.errors import OptionError
from pronk.train.options import DataOptions, LoopOptions, OnPolicyOptions, Shape
from train.tiny import TINY, TINY_DRAFT


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps: expected at least 1, found 0"),
        ({"minutes": -1.0}, "minutes: expected more than 0, found -1.0"),
        ({"length": 65}, "length: expected 1 to 64, found 65"),
        ({"length": 0}, "length: expected 1 to 64, found 0"),
        ({"micro": 0}, "micro: expected at least 1, found 0"),
        ({"final_length": 128}, "final-length: expected 1 to 64, found 128"),
        ({"final_share": 1.5}, "final-share: expected 0 to 1, found 1.5"),
        ({"micro": 100}, "micro: expected a divisor of batch 256, found 100"),
        ({"micro": 32}, "micro: expected a multiple of final-length 64, found 32"),
        ({"optimizer": "sgd"}, "optimizer: expected one of muon, adamw, found 'sgd'"),
        ({"rate": 0.0}, "lr: expected more than 0, found 0.0"),
        ({"rate": float("nan")}, "lr: expected more than 0, found nan"),
        ({"threads": 0}, "threads: expected at least 1, found 0"),
        ({"seed": -1}, "seed: expected at least 0, found -1"),
    ],
)
def test_options_out_of_range_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError) as error:
        replace(TINY, **change)  # type: ignore[arg-type]
    assert str(error.value) == message


def test_shapes_and_mixtures_out_of_range_are_named() -> None:
    with pytest.raises(OptionError, match="found hidden 30, heads 4, kv-heads 2"):
        Shape(hidden=30, heads=4, kv_heads=2)
    with pytest.raises(OptionError, match="layers: expected at least 1, found 0"):
        Shape(layers=0)
    with pytest.raises(OptionError, match="expected at least one source"):
        DataOptions(())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"share": 1.5}, "share: expected 0 to 1, found 1.5"),
        ({"hard": -0.1}, "hard: expected 0 to 1, found -0.1"),
        ({"num_tokens": 65}, "num-tokens: expected 0 to 64, found 65"),
        ({"length": 65}, "length: expected 1 to 64, found 65"),
    ],
)
def test_draft_options_out_of_range_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError) as error:
        replace(TINY_DRAFT, **change)  # type: ignore[arg-type]
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": -1}, "on-policy: expected at least 0, found -1"),
        ({"prompt": 7}, "prompt: expected at least 8, found 7"),
        ({"batch": 0}, "batch: expected at least 1, found 0"),
    ],
)
def test_on_policy_options_out_of_range_are_named(change: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError) as error:
        OnPolicyOptions(**change)
    assert str(error.value) == message


def test_loop_without_a_shape_has_no_longest_sequence() -> None:
    assert LoopOptions(length=512, final_length=4096).final_length == 4096
    with pytest.raises(OptionError, match="final-length: expected at least 1, found 0"):
        LoopOptions(final_length=0)


def test_options_that_may_change_define_nothing() -> None:
    assert TINY.defining().items() >= {"seed": 0, "rate": 1e-2, "clip": 1.0}.items()
    assert not TINY.defining().keys() & {"minutes", "threads", "evaluate_every"}
    assert "num_tokens" not in TINY_DRAFT.defining()
    assert "share" in TINY_DRAFT.defining()
