"""The loss of Kangaroo's adapter is equation 3."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pronk.drafters.from_target.modules.kangaroo import ADAPTERS, KangarooShape
from pronk.train.attention import DenseAttention, dense_logits
from pronk.train.teacher import Teacher
from train.kinds import start_student


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_loss_is_equation_3_less_the_target_s_entropy(
    new_draft_run: Callable[[str], Path], teacher: Teacher, adapter: str
) -> None:
    shape = KangarooShape(1, adapter, 4, 48)
    objective = start_student("kangaroo", new_draft_run("run"), teacher, shape=shape).objective
    inputs, targets = objective.phases[0].batch(0, 4)
    module, decoder = objective.module, teacher.decoder
    places = torch.arange(32).repeat(4)
    rope = decoder.rope(places, places + 1, torch.float32)
    attend = DenseAttention(4, 32, decoder.config.windows)
    early = decoder.embed(inputs.reshape(-1), places, torch.bfloat16)
    (early,) = (x for _, x in decoder.run(early, decoder.rope(places, places + 1, torch.bfloat16), attend, 0, 1))
    with torch.no_grad():
        said = module(early.float(), rope, DenseAttention(4, 32, module.config.windows))
        head = teacher.unembedding.float() if module.head is None else module.get_parameter("head.weight")
        q = (said @ head.T).log_softmax(-1)
        p = dense_logits(decoder, inputs, torch.bfloat16).float().log_softmax(-1)
    cross_entropy = -(p.exp() * q).sum(-1).mean()
    entropy = -(p.exp() * p).sum(-1).mean()
    passed = objective.backward(inputs, targets, 1.0)
    assert passed.loss == pytest.approx(float(cross_entropy - entropy), rel=0.02)
    assert passed.same[0] == pytest.approx(float((q.argmax(-1) == p.argmax(-1)).float().mean()), abs=0.05)
    assert all(parameter.grad is not None for parameter in module.parameters())
