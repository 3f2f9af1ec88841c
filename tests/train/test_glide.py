"""The block-wise mask against the paper's rule, and ``pronk train glide`` from end to end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from pronk import LLM, SamplingParams
from pronk.cli.train.main import app
from pronk.drafters.from_target.modules.glide import GlideShape
from pronk.train import student as module
from pronk.train.features import Features, compute_features
from pronk.train.glide import DelayedAttention, GlideStudent, VanillaStudent, block_mask
from pronk.train.loop import Trainer
from pronk.train.options import StudentOptions
from pronk.train.teacher import Teacher
from train.tiny import TINY_DRAFT

SHAPE = GlideShape(hidden=16, heads=2, kv_heads=1, mlp=24)
OPTIONS = StudentOptions(
    **{name: value for name, value in vars(TINY_DRAFT).items() if name not in ("shape", "context")},
    shape=SHAPE,
    context=64,
)


def start(
    folder: Path, teacher: Teacher, kind: type[GlideStudent] = GlideStudent, **shape: object
) -> Trainer[GlideStudent]:
    options = replace(OPTIONS, shape=replace(SHAPE, cross=kind is GlideStudent, **shape))  # type: ignore[arg-type]
    return Trainer(folder, options, kind(folder, options, teacher))


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
    """Row ``j`` is about to say token ``j + 1``; it has been told of the blocks before its own, in the window."""
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
    q, k, v = (torch.randn(12, heads, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2))
    attend = DelayedAttention(2, 6, keys=[k], values=[v], seen=[block_mask(6, 3)])
    out = attend.cross(0, q)
    out.square().sum().backward()  # type: ignore[no-untyped-call]
    blind = torch.tensor([0, 1, 2, 6, 7, 8])
    assert not out[blind].any()
    assert q.grad is not None
    assert not q.grad[blind].any()
    others = torch.tensor([3, 4, 5, 9, 10, 11])
    assert out[others].abs().amin(1).max() > 0
    assert q.grad[others].any(-1).all()
    for rows, unseen in ((k, [3, 4, 5, 9, 10, 11]), (v, [3, 4, 5, 9, 10, 11])):
        assert rows.grad is not None
        assert torch.isfinite(rows.grad).all()
        assert not rows.grad[unseen].any()
        assert rows.grad[blind].any()


@torch.no_grad()
def test_nothing_of_a_rows_own_block_reaches_it(new_draft_run: Callable[[str], Path], teacher: Teacher) -> None:
    objective = start(new_draft_run("run"), teacher).objective
    for layer in objective.module.layers:
        layer.cross_out.weight.normal_(0, 0.3)
    inputs, _ = objective.phases[0].batch(0, 1)
    features = compute_features(teacher.decoder, inputs, teacher.dtype, cache=objective.cache)
    (layer,) = objective.cache
    assert layer == len(teacher.decoder.layers)

    def hidden(at: int | None) -> Tensor:
        keys, values = features.keys[layer].clone(), features.values[layer].clone()
        if at is not None:
            keys[at], values[at] = 3 * keys[at].roll(1), 3 * values[at].roll(1)
        (branch,) = objective.branches(inputs, Features(features.last, {}, {layer: keys}, {layer: values}))
        return branch.hidden

    plain = hidden(None)
    for at in (0, 4, 5, 17):
        differs = (hidden(at) != plain).any(1)
        reached = (at // 5 + 1) * 5
        assert not differs[:reached].any()
        assert differs[reached : reached + 5].all()


@pytest.mark.parametrize("kind", [GlideStudent, VanillaStudent])
def test_drafter_comes_closer_to_its_target_and_serves(
    kind: type[GlideStudent], new_draft_run: Callable[[str], Path], teacher: Teacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SERVED_TOKENS", 12)
    folder = new_draft_run("run")
    weights = [parameter.clone() for parameter in teacher.decoder.parameters()]
    trainer = start(folder, teacher, kind)
    trainer.objective.options = replace(trainer.objective.options, num_tokens=2)
    before = trainer.objective.evaluate(32)
    trainer.train(lambda _: None, lambda _: None)
    after = trainer.history[-1]["valid"]
    assert after["on-policy KL"] < 0.9 * before["on-policy KL"]
    assert 0 < after["greedy alpha"] <= 1
    facts = json.loads((folder / "latest" / "drafter.json").read_text())
    assert facts["kind"] == kind.kind == trainer.objective.spec.partition("(")[0]
    assert facts["target"]["weights"] == teacher.fingerprint.weights
    assert trainer.objective.cache == ((2,) if kind is GlideStudent else ())
    for parameter, old in zip(teacher.decoder.parameters(), weights, strict=True):
        assert torch.equal(parameter, old)


def test_the_layer_asked_for_is_read(new_draft_run: Callable[[str], Path], teacher: Teacher) -> None:
    upper = start(new_draft_run("upper"), teacher).objective
    lower = start(new_draft_run("lower"), teacher, cache_layer=1).objective
    assert (upper.cache, lower.cache) == ((2,), (1,))
    assert "cache of layer 1, trained" in lower.description
    lower.module.load_state_dict(upper.module.state_dict())
    inputs, targets = upper.phases[0].batch(0, 2)
    assert upper.backward(inputs, targets, 1.0).loss != lower.backward(inputs, targets, 1.0).loss


@pytest.mark.parametrize("kind", ["glide", "vanilla"])
def test_command_makes_a_drafter_that_serves(kind: str, tmp_path: Path, corpus: Path, teacher: Teacher) -> None:
    command = (
        f"glide --target {teacher.folder} --source {corpus / 'stories.jsonl'}=1 --out {tmp_path / 'run'} "
        "--on-policy 200 --hidden 16 --layers 2 --heads 2 --kv-heads 1 --mlp 16 --steps 6 --batch 128 --micro 64 "
        "--length 32 --final-length 64 --threads 1 --evaluate-every 6 --num-tokens 0 --name small"
    ).split()
    result = CliRunner().invoke(app, [*command, *(["--vanilla"] if kind == "vanilla" else [])])
    assert result.exit_code == 0, result.output
    export = tmp_path / "run" / "export"
    facts = json.loads((export / "drafter.json").read_text())
    assert (facts["kind"], facts["shape"]["cross"]) == (kind, kind == "glide")
    card = (export / "README.md").read_text()
    assert ("into the target's cache" in card) == (kind == "glide")
    assert f'drafter="{kind}(model=' in card
    llm = LLM(teacher.folder, drafter=f"{kind}(model={str(export)!r})", threads=1, budget="all")
    params = SamplingParams(max_tokens=20, temperature=0.7, seed=1)
    made = llm.generate("The cat", params)
    assert made.stats.drafted > 0
    assert made.token_ids == teacher.llm.generate("The cat", params).token_ids


def test_command_refuses_a_layer_that_the_target_lacks(tmp_path: Path, corpus: Path, teacher: Teacher) -> None:
    command = (
        f"glide --target {teacher.folder} --source {corpus / 'stories.jsonl'}=1 --out {tmp_path / 'run'} "
        "--on-policy 0 --cache-layer 3 --steps 1 --batch 64 --micro 64 --length 32 --final-length 64"
    ).split()
    result = CliRunner().invoke(app, command)
    assert "cache-layer: expected 1 to 2 for a target of 2 layers, found 3" in str(result.exception)
