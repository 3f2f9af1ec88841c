"""The block-wise mask against the paper's rule, and the target's rows that a row sees."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pronk.lab.drafters.modules.glide import GlideShape
from pronk.train.attention import Features, compute_features
from pronk.train.students import DelayedAttention, block_mask
from pronk.train.teacher import Teacher
from train.kinds import Start

SHAPE = GlideShape(1, 16, 2, 1, 24)


def test_mask_of_two_blocks_cell_by_cell() -> None:
    assert block_mask(5, 2).int().tolist() == [
        [0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0],
    ]


@pytest.mark.parametrize("window", [None, 1, 4, 6, 30])
@pytest.mark.parametrize("block", [1, 2, 5, 7, 40])
def test_mask_is_the_papers_rule(block: int, window: int | None) -> None:
    """Row ``j`` predicts token ``j + 1`` from the blocks before its own, in the window."""
    length = 23
    mask = block_mask(length, block, window)
    assert mask.shape == (length, length)
    for j in range(length):
        for k in range(length):
            blocks = [list(range(start, start + block)) for start in range(0, length, block)]
            (own,) = [i for i, each in enumerate(blocks) if j in each]
            (other,) = [i for i, each in enumerate(blocks) if k in each]
            inside = window is None or j - k < window
            assert bool(mask[j, k]) == (own > other and inside)


def test_rows_that_see_nothing_get_zeros_and_no_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(12, heads, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2)
    )
    attend = DelayedAttention(2, 6, keys=[k], values=[v], masks=[block_mask(6, 3)])
    out = attend.cross(0, q)
    out.square().sum().backward()  # type: ignore[no-untyped-call]
    blind = torch.tensor([0, 1, 2, 6, 7, 8])
    assert not out[blind].any()
    assert q.grad is not None
    assert not q.grad[blind].any()
    others = torch.tensor([3, 4, 5, 9, 10, 11])
    assert out[others].abs().amin(1).max() > 0
    assert q.grad[others].any(-1).all()
    for rows in (k, v):
        assert rows.grad is not None
        assert torch.isfinite(rows.grad).all()
        assert not rows.grad[others].any()
        assert rows.grad[blind].any()


@torch.no_grad()
def test_nothing_of_a_rows_own_block_reaches_it(start: Start, teacher: Teacher) -> None:
    objective = start("glide").objective
    for layer in objective.module.layers:
        layer.cross_out.weight.normal_(0, 0.3)
    inputs, _ = objective.phases[0].batch(0, 1)
    features = compute_features(teacher.decoder, inputs, teacher.dtype, cache=objective.cache)
    (layer,) = objective.cache
    assert layer == len(teacher.decoder.layers)

    def hidden(at: int | None) -> Tensor:
        keys = features.keys[layer].clone()
        values = features.values[layer].clone()
        if at is not None:
            keys[at] = 3 * keys[at].roll(1)
            values[at] = 3 * values[at].roll(1)
        (branch,) = objective.branches(
            inputs, Features(features.last, {}, {layer: keys}, {layer: values})
        )
        return branch.hidden

    plain = hidden(None)
    for at in (0, 4, 5, 17):
        differs = (hidden(at) != plain).any(1)
        reached = (at // 5 + 1) * 5
        assert not differs[:reached].any()
        assert differs[reached : reached + 5].all()


def test_the_layer_asked_for_is_read(start: Start) -> None:
    upper = start("glide", "upper").objective
    lower = start("glide", "lower", shape=replace(SHAPE, cache_layer=1)).objective
    assert (upper.cache, lower.cache) == ((2,), (1,))
    assert "cache of layer 1, trained" in lower.description
    lower.module.load_state_dict(upper.module.state_dict())
    inputs, targets = upper.phases[0].batch(0, 2)
    assert upper.backward(inputs, targets, 1.0).loss != lower.backward(inputs, targets, 1.0).loss
