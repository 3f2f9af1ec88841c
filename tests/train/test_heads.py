from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.lab.drafters.modules.heads import HeadsShape
from pronk.train.attention import DenseAttention, dense_hidden, dense_logits, dense_rope
from pronk.train.heads import head_by_head, shifted_rows
from pronk.train.teacher import Teacher
from train.kinds import Start

SHAPE = HeadsShape(num_heads=2, layer=2, mlp=24)
VARIANTS = [
    {},
    {"order": "causal"},
    {"order": "anticausal"},
    {"kind": "linear"},
    {"kind": "linear", "order": "causal"},
    {"unembeddings": "replicated"},
]


def test_rows_that_have_a_row_ahead() -> None:
    rows, said = shifted_rows(2, 4, 1, torch.device("cpu"))
    assert rows.tolist() == [0, 1, 2, 4, 5, 6]
    assert said.tolist() == [1, 2, 3, 5, 6, 7]
    rows, said = shifted_rows(2, 4, 3, torch.device("cpu"))
    assert (rows.tolist(), said.tolist()) == ([0, 4], [3, 7])
    assert not len(shifted_rows(2, 4, 4, torch.device("cpu"))[0])


@pytest.mark.parametrize("chained", [False, True])
def test_gradients_one_by_one_are_those_of_the_sum(*, chained: bool) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 6) for _ in range(3)]
    z = torch.randn(5, 6, requires_grad=True)
    order = [2, 0, 1]

    def loss(number: int, out: Tensor) -> Tensor:
        return (out.tanh() * (number + 1)).square().sum()

    total = torch.zeros(())
    x = z
    for number in order:
        out = layers[number](x)
        x = out if chained else z
        total = total + loss(number, out)
    total.backward()
    expected = [z.grad, *(layer.weight.grad for layer in layers)]
    z.grad = None
    for layer in layers:
        layer.zero_grad()
    seen = []
    for number, out in head_by_head(
        [(number, layers[number]) for number in order], z, chained=chained
    ):
        seen.append(number)
        loss(number, out).backward()
    assert seen == [0, 1, 2]
    for found, wanted in zip(
        [z.grad, *(layer.weight.grad for layer in layers)], expected, strict=True
    ):
        assert found is not None
        assert wanted is not None
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_each_head_learns_the_distribution_of_a_later_token(
    variant: dict[str, str], start: Start, teacher: Teacher
) -> None:
    objective = start("multi_token", shape=replace(SHAPE, **variant)).objective
    torch.manual_seed(1)
    for parameter in objective.module.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    inputs, targets = objective.phases[0].batch(0, 3)
    # Reference: both heads over whole sequences, and the sum of their divergences from the target.
    heads = objective.module
    decoder = teacher.decoder
    length = inputs.shape[1]
    with torch.no_grad():
        z = dense_hidden(decoder, inputs, teacher.dtype)
        p = dense_logits(decoder, inputs, teacher.dtype).float().softmax(-1).view(3, length, -1)
    rope = dense_rope(decoder, 3, length, torch.float32, inputs.device)
    attend = DenseAttention(3, length)
    made = {}
    x = z.float()
    for index in heads.shape.execution_order:
        made[index] = heads.run_part(index, x, rope, attend)
        x = made[index] if heads.shape.is_chained else x
    losses = []
    for index, out in made.items():
        weight = (
            heads.unembeddings[index].weight if heads.unembeddings else teacher.unembedding.float()
        )
        log_q = (heads.norms[index](out) @ weight.T).log_softmax(-1).view(3, length, -1)
        places = index + 1
        losses.append(F.kl_div(log_q[:, :-places], p[:, places:], reduction="none").sum(-1).mean())
    sum(losses).backward()
    expected = {name: parameter.grad.clone() for name, parameter in heads.named_parameters()}
    heads.zero_grad()
    passed = objective.backward(inputs, targets, 1.0)
    assert passed.loss == pytest.approx(sum(float(each.detach()) for each in losses) / 2, rel=0.02)
    assert len(passed.same) == 2
    for name, parameter in heads.named_parameters():
        assert F.cosine_similarity(parameter.grad.flatten(), expected[name].flatten(), 0) > 0.99, (
            name
        )
