"""Training of Medusa heads: the targets of each position, and the choice of the tree."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pronk.base.errors import OptionError
from pronk.lab.drafters.modules.heads import MedusaShape
from pronk.lab.drafters.rank_tree import best_paths
from pronk.train.attention import dense_hidden
from pronk.train.heads import MedusaOptions, MedusaStudent
from pronk.train.loop import Trainer
from pronk.train.on_policy import held_out_prompts
from pronk.train.served import measure
from pronk.train.teacher import Teacher
from train.kinds import LOOP, Start, begin, train
from train.tiny import link

pytestmark = pytest.mark.usefixtures("short_evaluation")
SHAPE = MedusaShape(3, 1)
FINE: dict[str, Any] = {"shape": SHAPE, "rate": 0.1, "steps": 100, "evaluate_every": 1000}


@pytest.fixture(scope="module")
def fine(
    draft_data: Path, teacher: Teacher, tmp_path_factory: pytest.TempPathFactory
) -> Trainer[MedusaStudent]:
    """Return the trainer of trained Medusa heads."""
    return train(
        begin("medusa", link(draft_data, tmp_path_factory.mktemp("fine")), teacher, **FINE)
    )


def disturb(module: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


@torch.no_grad()
def log_probs(objective: MedusaStudent, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs of heads ``[heads, count, length, vocab]``, of the target ``[count, length,
    vocab]``.
    """
    count, length = inputs.shape
    decoder = objective.teacher.decoder
    unembedding = objective.teacher.unembedding
    # In bfloat16, as in the engine.
    hidden = decoder.norm(dense_hidden(decoder, inputs, torch.bfloat16))
    states = [head(hidden.float()).bfloat16() for head in objective.module.layers]
    own = [each.weight.bfloat16() for each in objective.module.unembeddings] or [unembedding] * len(
        states
    )
    heads = torch.stack([state @ weight.T for state, weight in zip(states, own, strict=True)])
    p = (hidden @ unembedding.T).float().log_softmax(-1).view(count, length, -1)
    return heads.float().log_softmax(-1).view(len(states), count, length, -1), p


@pytest.mark.parametrize("unembeddings", ["shared", "replicated"])
def test_a_head_learns_the_distribution_of_a_later_token(
    start: Start, teacher: Teacher, unembeddings: str
) -> None:
    """Head ``i`` at position ``t`` learns the target's distribution at ``t + i`` of the same
    sequence.
    """
    objective = start("medusa", shape=MedusaShape(3, 1, unembeddings), hard=0.25).objective
    disturb(objective.module)
    inputs, targets = objective.phases[0].batch(0, 4)
    q, p = log_probs(objective, inputs)
    losses = []
    same = []
    for ahead in (1, 2, 3):
        soft = []
        hard = []
        hits = []
        for row in range(4):
            for t in range(32 - ahead):
                one = q[ahead - 1, row, t]
                other = p[row, t + ahead]
                soft.append(float((other.exp() * (other - one)).sum()))
                hard.append(-float(one[targets[row, t + ahead]]))
                hits.append(int(one.argmax()) == int(other.argmax()))
        losses.append(0.75 * np.mean(soft) + 0.25 * np.mean(hard))
        same.append(np.mean(hits))
    passed = objective.backward(inputs, targets, 1.0)
    assert passed.loss == pytest.approx(np.mean(losses), rel=0.02)
    assert passed.same == pytest.approx(same, abs=0.05)
    assert all(
        parameter.grad is not None and bool(parameter.grad.any())
        for parameter in objective.module.parameters()
    )
    assert not any(parameter.requires_grad for parameter in teacher.decoder.parameters())


def test_heads_come_closer_to_their_target(start: Start, fine: Trainer[MedusaStudent]) -> None:
    before = start("medusa", shape=SHAPE).objective.evaluate(32)
    after = fine.history[-1]["valid"]
    assert {f"on-policy {what} {number}" for what in ("KL", "same") for number in (1, 2, 3)} <= set(
        after
    )
    assert all(after[name] < 0.5 * before[name] for name in after if " KL" in name)


@pytest.mark.parametrize("unembeddings", ["shared", "replicated"])
def test_heads_begin_as_the_target_s_own(start: Start, unembeddings: str) -> None:
    heads, p = log_probs(
        start("medusa", shape=MedusaShape(3, 1, unembeddings)).objective,
        torch.arange(64).view(2, 32),
    )
    assert all(torch.equal(head, p) for head in heads)


def test_ranks_are_counted_on_the_target_s_own_text(fine: Trainer[MedusaStudent]) -> None:
    """Ranks are counted on the first three of six prompts; the engine measures with the others."""
    prompts = held_out_prompts(fine.folder / "data")
    assert fine.objective.prompts() == prompts[3:]
    tokens = np.fromfile(fine.folder / "data" / "valid-on-policy.bin", dtype=np.uint16).astype(
        np.int64
    )
    cut = 0
    for before, prompt in pairwise(prompts[:4]):
        cut += len(before)
        while tokens[cut : cut + len(prompt)].tolist() != prompt:
            cut += 1
    assert 64 < cut < len(tokens) - 32
    whole = (cut - 1) // 32 * 32
    q, p = log_probs(fine.objective, torch.from_numpy(tokens[:whole]).view(-1, 32))
    measured = fine.objective.measure_ranks()
    assert [len(ranks) for ranks in measured] == [16] * 3
    for ahead in (1, 2, 3):
        least, most = ranks(q[ahead - 1, :, : 32 - ahead], p[:, ahead:])
        assert float((most - least <= 1).double().mean()) > 0.75
        reached = np.cumsum(measured[ahead - 1])
        for rank in range(16):
            low, high = (float((each <= rank).double().mean()) for each in (most, least))
            assert low - 1e-3 * (rank + 1) <= reached[rank] <= high + 1e-3 * (rank + 1)
    assert measured[0][0] > 0.5


def ranks(q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and greatest rank of the target's most likely token: logits in bfloat16 are
    often equal.
    """
    best = p.topk(2, -1)
    own = q.gather(-1, best.indices[..., :1])
    rounding = q.abs().amax() / 2**9
    least = (q > own + rounding).sum(-1)
    most = (q >= own - rounding).sum(-1) - 1
    tied = best.values[..., 0] - best.values[..., 1] < p.abs().amax() / 2**9
    return least.masked_fill(tied, 0), most.masked_fill(tied, q.shape[-1])


def test_the_tree_is_chosen_for_the_heads_as_they_are(
    fine: Trainer[MedusaStudent], teacher: Teacher, tmp_path: Path
) -> None:
    trees = []
    for size in (7, 12):
        # A resumed run may have another size.
        objective = begin("medusa", fine.folder, teacher, **FINE, tree_size=size).objective
        objective.export(tmp_path / "heads", "", {})
        shape = json.loads((tmp_path / "heads" / "drafter.json").read_text())["shape"]
        trees.append(tuple(tuple(path) for path in shape["tree"]))
        assert (
            trees[-1]
            == best_paths(shape["accuracies"], size)
            == best_paths(fine.objective.measure_ranks(), size)
        )
    assert [len(tree) for tree in trees] == [7, 12]
    assert {len(path) for path in trees[0]} == {1, 2, 3}
    tensors = load_file(tmp_path / "heads" / "model.safetensors")
    for name, weight in fine.objective.module.state_dict().items():
        assert torch.equal(tensors[name], weight.bfloat16())


def test_ranks_are_measured_once_a_step(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start("medusa", shape=SHAPE)
    counted = list[int]()
    measure_ranks = MedusaStudent.measure_ranks
    monkeypatch.setattr(
        MedusaStudent,
        "measure_ranks",
        lambda self: counted.append(trainer.step) or measure_ranks(self),
    )
    for step in (1, 2):
        trainer.train(lambda _: None, lambda _: None, lambda step=step: trainer.step == step)
        for _ in range(2):
            trainer.objective.export(tmp_path / "heads", "", {})
        shape = json.loads((tmp_path / "heads" / "drafter.json").read_text())["shape"]
        assert shape["accuracies"] == [list(ranks) for ranks in measure_ranks(trainer.objective)]
    assert counted == [1, 2]


def test_engine_measures_the_tree(fine: Trainer[MedusaStudent], teacher: Teacher) -> None:
    """With the same heads, a tree has more accepted tokens than a chain."""
    objective = begin("medusa", fine.folder, teacher, **FINE, num_tokens=3).objective
    figures = objective.evaluate(32)
    assert {"T=0.8 alpha", "greedy CTAR(3)", "greedy S"} <= set(figures)
    assert 2 < figures["T=0.8 S"] <= 4
    assert objective.evaluate(32) == figures
    chain = ((0,), (0, 0), (0, 0, 0))
    spec = f"medusa(model={str(fine.folder / 'latest')!r}, tree={chain})"
    of_chain = measure(teacher.llm, spec, held_out_prompts(objective.data), 12)
    assert 1.5 < of_chain["T=0.8 S"] < figures["T=0.8 S"]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"tree_size": 0}, "tree-size: expected an integer in 1..1023, found 0"),
        ({"length": 2, "micro": 64}, "length: expected at least 4 for 3 heads, found 2"),
        ({"final_length": 2}, "final-length: expected at least 4 for 3 heads, found 2"),
    ],
)
def test_options_that_are_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        MedusaOptions(**LOOP | {"shape": MedusaShape(3, 1)} | bad)


def test_no_held_out_text_to_choose_by_is_named(
    draft_data: Path, teacher: Teacher, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    for name in ("train.bin", "on-policy.bin"):
        (tmp_path / "data" / name).symlink_to(draft_data / name)
    with pytest.raises(
        OptionError, match="expected held-out text of more than 3 tokens to choose the tree by"
    ):
        begin("medusa", tmp_path, teacher, shape=SHAPE).objective.measure_ranks()
