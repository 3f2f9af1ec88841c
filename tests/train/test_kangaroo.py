import pytest
import torch

from pronk.lab.drafters.modules.kangaroo import ADAPTERS, KangarooShape
from pronk.train.attention import DenseAttention, dense_hidden, dense_logits, dense_rope
from pronk.train.teacher import Teacher
from train.kinds import Start


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_loss_is_equation_3_less_the_target_s_entropy(
    start: Start, teacher: Teacher, adapter: str
) -> None:
    objective = start("kangaroo", shape=KangarooShape(1, adapter, 4, 48)).objective
    inputs, targets = objective.phases[0].batch(0, 4)
    module = objective.module
    decoder = teacher.decoder
    rope = dense_rope(decoder, 4, 32, torch.float32, inputs.device)
    early = dense_hidden(decoder, inputs, torch.bfloat16, stop=1)
    with torch.no_grad():
        said = module(early.float(), rope, DenseAttention(4, 32, module.config.windows))
        head = (
            teacher.unembedding.float()
            if module.head is None
            else module.get_parameter("head.weight")
        )
        q = (said @ head.T).log_softmax(-1)
        p = dense_logits(decoder, inputs, torch.bfloat16).float().log_softmax(-1)
    cross_entropy = -(p.exp() * q).sum(-1).mean()
    entropy = -(p.exp() * p).sum(-1).mean()
    passed = objective.backward(inputs, targets, 1.0)
    assert passed.loss == pytest.approx(float(cross_entropy - entropy), rel=0.02)
    assert passed.same[0] == pytest.approx(
        float((q.argmax(-1) == p.argmax(-1)).float().mean()), abs=0.05
    )
    assert all(parameter.grad is not None for parameter in module.parameters())
