"""Training Medusa heads: which position learns from which, the choice of the tree, and the command from end to end."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from pronk import LLM, SamplingParams
from pronk.cli.train.main import app
from pronk.drafters.from_target.modules.medusa import MedusaShape
from pronk.drafters.shared.rank_tree import best_paths
from pronk.errors import OptionError
from pronk.train.attention import dense_hidden
from pronk.train.loop import Trainer
from pronk.train.medusa import MedusaOptions, MedusaStudent
from pronk.train.on_policy import held_out_prompts
from pronk.train.served import measure
from pronk.train.teacher import Teacher
from train.tiny import TINY_DRAFT

_LOOP = {name: value for name, value in vars(TINY_DRAFT).items() if name not in {"shape", "context"}}


@pytest.fixture(autouse=True)
def _short_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pronk.train.student.SERVED_TOKENS", 12)


def options(unembeddings: str = "shared", **more: Any) -> MedusaOptions:
    return MedusaOptions(**_LOOP | {"context": 64, "rate": 0.1, "shape": MedusaShape(3, 1, unembeddings)} | more)


def start(folder: Path, teacher: Teacher, settings: MedusaOptions) -> Trainer[MedusaStudent]:
    return Trainer(folder, settings, MedusaStudent(folder, settings, teacher))


def train(
    folder: Path, teacher: Teacher, settings: MedusaOptions, stop_at: int | None = None
) -> Trainer[MedusaStudent]:
    trainer = start(folder, teacher, settings)
    trainer.train(lambda _: None, lambda _: None, lambda: trainer.step == stop_at)
    return trainer


@pytest.fixture(scope="module")
def fine(draft_data: Path, teacher: Teacher, tmp_path_factory: pytest.TempPathFactory) -> Trainer[MedusaStudent]:
    """Heads that have learned something."""
    folder = tmp_path_factory.mktemp("fine")
    (folder / "data").symlink_to(draft_data)
    return train(folder, teacher, options(steps=100, evaluate_every=1000))


def disturb(module: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


@torch.no_grad()
def said(objective: MedusaStudent, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of heads ``[heads, count, length, vocab]`` and target ``[count, length, vocab]``."""
    count, length = inputs.shape
    decoder, unembedding = objective.teacher.decoder, objective.teacher.unembedding
    # In bfloat16, as the target is served.
    hidden = decoder.norm(dense_hidden(decoder, inputs, torch.bfloat16))
    states = [head(hidden.float()).bfloat16() for head in objective.module.layers]
    own = [each.weight.bfloat16() for each in objective.module.unembeddings] or [unembedding] * len(states)
    heads = torch.stack([state @ weight.T for state, weight in zip(states, own, strict=True)])
    p = (hidden @ unembedding.T).float().log_softmax(-1).view(count, length, -1)
    return heads.float().log_softmax(-1).view(len(states), count, length, -1), p


@pytest.mark.parametrize("unembeddings", ["shared", "replicated"])
def test_a_head_learns_what_the_target_says_further_on(
    new_draft_run: Callable[[str], Path], teacher: Teacher, unembeddings: str
) -> None:
    """Position by position: head ``i`` at ``t`` against the target at ``t + i`` of the same sequence."""
    objective = start(new_draft_run("run"), teacher, options(unembeddings, hard=0.25)).objective
    disturb(objective.module)
    inputs, targets = objective.phases[0].batch(0, 4)
    q, p = said(objective, inputs)
    losses, same = [], []
    for ahead in (1, 2, 3):
        soft, hard, hits = [], [], []
        for row in range(4):
            for t in range(32 - ahead):
                one, other = q[ahead - 1, row, t], p[row, t + ahead]
                soft.append(float((other.exp() * (other - one)).sum()))
                hard.append(-float(one[targets[row, t + ahead]]))
                hits.append(int(one.argmax()) == int(other.argmax()))
        losses.append(0.75 * np.mean(soft) + 0.25 * np.mean(hard))
        same.append(np.mean(hits))
    passed = objective.backward(inputs, targets, 1.0)
    assert passed.loss == pytest.approx(np.mean(losses), rel=0.02)
    assert passed.same == pytest.approx(same, abs=0.05)
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in objective.module.parameters())
    assert not any(parameter.requires_grad for parameter in teacher.decoder.parameters())


def test_heads_come_closer_to_their_target(
    new_draft_run: Callable[[str], Path], teacher: Teacher, fine: Trainer[MedusaStudent]
) -> None:
    before = start(new_draft_run("run"), teacher, options()).objective.evaluate(32)
    after = fine.history[-1]["valid"]
    assert {f"on-policy {what} {number}" for what in ("KL", "same") for number in (1, 2, 3)} <= set(after)
    assert all(after[name] < 0.5 * before[name] for name in after if " KL" in name)


def test_target_is_left_alone(new_draft_run: Callable[[str], Path], teacher: Teacher) -> None:
    before = deepcopy(teacher.decoder.state_dict())
    train(new_draft_run("run"), teacher, options("replicated"), stop_at=3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.decoder.state_dict().items())


def test_heads_begin_as_the_target_s_own(new_draft_run: Callable[[str], Path], teacher: Teacher) -> None:
    inputs = torch.arange(64).view(2, 32)
    for unembeddings in ("shared", "replicated"):
        heads, p = said(start(new_draft_run(unembeddings), teacher, options(unembeddings)).objective, inputs)
        assert all(torch.equal(head, p) for head in heads)


def test_ranks_are_counted_on_the_target_s_own_text(fine: Trainer[MedusaStudent]) -> None:
    """After the first three of six prompts; the engine gets the others."""
    prompts = held_out_prompts(fine.folder / "data")
    assert fine.objective.prompts() == prompts[3:]
    tokens = np.fromfile(fine.folder / "data" / "valid-on-policy.bin", dtype=np.uint16).astype(np.int64)
    cut = 0
    for before, prompt in pairwise(prompts[:4]):
        cut += len(before)
        while tokens[cut : cut + len(prompt)].tolist() != prompt:
            cut += 1
    assert 64 < cut < len(tokens) - 32
    whole = (cut - 1) // 32 * 32
    q, p = said(fine.objective, torch.from_numpy(tokens[:whole]).view(-1, 32))
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
    """Least and greatest rank among ``q`` of the target's likeliest token: logits of bfloat16 are often equal."""
    best = p.topk(2, -1)
    own, rounding = q.gather(-1, best.indices[..., :1]), q.abs().amax() / 2**9
    least, most = (q > own + rounding).sum(-1), (q >= own - rounding).sum(-1) - 1
    tied = best.values[..., 0] - best.values[..., 1] < p.abs().amax() / 2**9
    return least.masked_fill(tied, 0), most.masked_fill(tied, q.shape[-1])


def test_the_tree_is_chosen_for_the_heads_as_they_are(
    fine: Trainer[MedusaStudent], teacher: Teacher, tmp_path: Path
) -> None:
    trees = []
    for size in (7, 12):
        # Another size is no other run.
        objective = start(fine.folder, teacher, options(steps=100, evaluate_every=1000, tree_size=size)).objective
        objective.export(tmp_path / "heads", "", {})
        shape = json.loads((tmp_path / "heads" / "drafter.json").read_text())["shape"]
        trees.append(tuple(tuple(path) for path in shape["tree"]))
        assert trees[-1] == best_paths(shape["accuracies"], size) == best_paths(fine.objective.measure_ranks(), size)
    assert [len(tree) for tree in trees] == [7, 12]
    assert {len(path) for path in trees[0]} == {1, 2, 3}
    tensors = load_file(tmp_path / "heads" / "model.safetensors")
    for name, weight in fine.objective.module.state_dict().items():
        assert torch.equal(tensors[name], weight.bfloat16())


def test_ranks_are_measured_once_a_step(
    new_draft_run: Callable[[str], Path], teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, counted = start(new_draft_run("run"), teacher, options()), list[int]()
    measure_ranks = MedusaStudent.measure_ranks
    monkeypatch.setattr(
        MedusaStudent, "measure_ranks", lambda self: counted.append(trainer.step) or measure_ranks(self)
    )
    for step in (1, 2):
        trainer.train(lambda _: None, lambda _: None, lambda step=step: trainer.step == step)
        for _ in range(2):
            trainer.objective.export(tmp_path / "heads", "", {})
        shape = json.loads((tmp_path / "heads" / "drafter.json").read_text())["shape"]
        assert shape["accuracies"] == [list(ranks) for ranks in measure_ranks(trainer.objective)]
    assert counted == [1, 2]


def test_resumed_run_is_the_uninterrupted_run(new_draft_run: Callable[[str], Path], teacher: Teacher) -> None:
    whole = train(new_draft_run("whole"), teacher, options())
    folder = new_draft_run("parts")
    assert train(folder, teacher, options(), stop_at=5).step == 5
    second = train(folder, teacher, options())
    assert [(h["loss"], h["valid"]) for h in second.history] == [(h["loss"], h["valid"]) for h in whole.history]
    for name, weight in whole.objective.module.state_dict().items():
        assert torch.equal(weight, second.objective.module.state_dict()[name])
    with pytest.raises(OptionError, match="shape"):
        start(folder, teacher, options("replicated"))


def test_engine_measures_the_tree(fine: Trainer[MedusaStudent], teacher: Teacher) -> None:
    """A tree of the same heads accepts more than their chain."""
    objective = start(fine.folder, teacher, options(steps=100, evaluate_every=1000, num_tokens=3)).objective
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
        ({"tree_size": 0}, "tree-size: expected an integer in 1..127, found 0"),
        ({"length": 2, "micro": 64}, "length: expected at least 4 for 3 heads, found 2"),
        ({"final_length": 2}, "final-length: expected at least 4 for 3 heads, found 2"),
    ],
)
def test_options_that_are_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        options(**bad)


def test_no_held_out_text_to_choose_by_is_named(
    new_draft_run: Callable[[str], Path], draft_data: Path, teacher: Teacher, tmp_path: Path
) -> None:
    folder = tmp_path / "bare"
    (folder / "data").mkdir(parents=True)
    for name in ("train.bin", "on-policy.bin"):
        (folder / "data" / name).symlink_to(draft_data / name)
    with pytest.raises(OptionError, match="expected held-out text of more than 3 tokens to choose the tree by"):
        start(folder, teacher, options()).objective.measure_ranks()


@pytest.mark.parametrize("more", ["--heads 2 --tree-size 5", "--unembeddings replicated --num-tokens 0"])
def test_command_makes_heads_that_serve(tmp_path: Path, corpus: Path, teacher: Teacher, more: str) -> None:
    """After two steps they are lossless all the same."""
    command = (
        f"medusa {more} --blocks 1 --target {teacher.folder} --source {corpus / 'stories.jsonl'}=1 "
        f"--out {tmp_path / 'run'} --on-policy 200 --steps 2 --batch 128 --micro 64 --length 32 --final-share 0 "
        "--final-length 64 --threads 1 --evaluate-every 2 --name small"
    ).split()
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    export = tmp_path / "run" / "export"
    document = json.loads((export / "drafter.json").read_text())
    assert document["target"] == {"name": "little", **vars(teacher.fingerprint)}
    assert document["shape"]["num_heads"] == len(document["shape"]["accuracies"])
    assert len(document["shape"]["tree"]) == (5 if "tree-size" in more else 15)
    assert ("greedy S" in document["figures"]) == ("--num-tokens 0" not in more)
    card = (export / "README.md").read_text()
    assert "residual blocks of size 32" in card
    llm = LLM(teacher.folder, drafter="autoregressive", threads=1, budget="all")
    for temperature in (0.0, 0.9):
        params = SamplingParams(max_tokens=24, temperature=temperature, seed=3)
        plain = llm.generate("The cat", params)
        guessed = llm.generate("The cat", params, drafter=f"medusa(model={str(export)!r})")
        assert guessed.token_ids == plain.token_ids
        assert guessed.stats.drafted > 0
