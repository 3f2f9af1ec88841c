"""The base class of the drafters that learn from a target, with an example of two branches."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from pronk.lab.drafters.modules.files import TrainedDrafter
from pronk.train.attention import Features, compute_features, dense_logits
from pronk.train.loop import Trainer
from pronk.train.options import StudentOptions
from pronk.train.students import Branch, Student
from pronk.train.teacher import Teacher
from train.kinds import LOOP, train
from train.tiny import link


@dataclass(frozen=True)
class AheadShape:
    tokens: int = 2
    widths: tuple[int, ...] = (32, 32)


class Ahead(Student[nn.Module]):
    """From the first layer's output at ``t``, branch ``k`` (from 0) predicts the token at ``t + 1 +
    k``.
    """

    kind = "ahead"
    title = "An example"
    hidden = (1,)

    def build(self, generator: torch.Generator) -> nn.Module:
        module = nn.ModuleDict(
            {"layers": nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(2))}
        )
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.2, generator=generator)
        return module

    def branches(self, tokens: Tensor, features: Features) -> Iterator[Branch]:
        count, length = tokens.shape
        every = torch.arange(count * length).view(count, length)
        for later, linear in enumerate(self.module["layers"]):
            hidden = linear(features.hidden[1].float().view(count, length, -1)[:, : length - later])
            yield Branch(
                hidden.flatten(0, 1),
                self.teacher.unembedding,
                every[:, later:].flatten() if later else None,
            )

    @property
    def description(self) -> str:
        return "Two linears."


OPTIONS = StudentOptions(
    **LOOP
    | {"shape": AheadShape(), "steps": 6, "final_share": 0.5, "evaluate_every": 3, "log_every": 2}
)


@pytest.fixture
def student(draft_data: Path, tmp_path: Path, teacher: Teacher) -> Ahead:
    return Ahead(link(draft_data, tmp_path / "run"), OPTIONS, teacher)


def slow_losses(
    student: Ahead, inputs: Tensor, targets: Tensor, hard: float
) -> tuple[list[Tensor], list[float]]:
    """Return the loss and the accuracy of each branch, computed by a loop over positions in
    float32.
    """
    teacher = student.teacher
    losses = []
    same = []
    for later in (0, 1):
        each = []
        hits = []
        for row, labels in zip(inputs, targets, strict=True):
            p = dense_logits(teacher.decoder, row[None], teacher.dtype).float().softmax(-1)
            states = (
                compute_features(teacher.decoder, row[None], teacher.dtype, (1,)).hidden[1].float()
            )
            for t in range(len(row) - later):
                q = (
                    student.module["layers"][later](states[t]) @ teacher.unembedding.float().T
                ).softmax(-1)
                soft = (p[t + later] * (p[t + later].log() - q.log())).sum()
                each.append((1 - hard) * soft - hard * q[labels[t + later]].log())
                hits.append(float(q.argmax() == p[t + later].argmax()))
        losses.append(torch.stack(each).mean())
        same.append(sum(hits) / len(hits))
    return losses, same


@pytest.mark.parametrize("hard", [0.0, 0.25])
def test_loss_is_the_mean_and_the_gradient_that_of_the_sum(student: Ahead, hard: float) -> None:
    student.options = StudentOptions(**{**vars(OPTIONS), "hard": hard})
    inputs, targets = student.phases[0].batch(0, 4)
    passed = student.backward(inputs, targets, 0.5)
    found = [p.grad for p in student.module.parameters()]
    student.module.zero_grad()
    losses, same = slow_losses(student, inputs, targets, hard)
    (0.5 * sum(losses)).backward()
    assert passed.loss == pytest.approx(float(sum(losses).detach()) / 2, rel=0.02)
    assert passed.same == pytest.approx(same, abs=0.04)
    assert len(set(same)) == 2
    for ours, parameter in zip(found, student.module.parameters(), strict=True):
        assert ours is not None
        assert parameter.grad is not None
        assert torch.cosine_similarity(ours.flatten(), parameter.grad.flatten(), dim=0) > 0.999
        assert float(ours.norm()) == pytest.approx(float(parameter.grad.norm()), rel=0.02)


def test_every_branch_is_evaluated_and_judged(student: Ahead) -> None:
    figures = student.evaluate(32)
    names = ("stories", "code", "extra", "on-policy")
    assert set(figures) == {
        f"{name} {each} {k}" for name in names for each in ("KL", "same") for k in (1, 2)
    }
    assert student.judge(figures) == pytest.approx(
        sum(v for k, v in figures.items() if " KL " in k) / 8
    )
    assert math.isnan(student.judge({}))


def test_accuracy_of_every_position_is_reported_since_the_last_time(
    draft_data: Path, tmp_path: Path, teacher: Teacher
) -> None:
    folder = link(draft_data, tmp_path / "whole")
    seen: list[tuple[float, ...]] = []

    class Watched(Ahead):
        def backward(self, inputs: Tensor, targets: Tensor, scale: float) -> object:
            passed = super().backward(inputs, targets, scale)
            seen.append(passed.same)
            return passed

    whole = train(Trainer(Watched(folder, OPTIONS, teacher)))
    reported = {h["step"]: h["same"] for h in whole.history}
    assert list(reported) == [2, 3, 4, 6]
    for step, first in ((2, 0), (3, 2), (4, 3), (6, 4)):  # two passes in a step
        part = seen[2 * first : 2 * step]
        assert reported[step] == pytest.approx(
            [sum(column) / len(part) for column in zip(*part, strict=True)]
        )
        assert len(reported[step]) == 2
    assert len(set(reported.values())) == 4
    # A run that is interrupted between two reports has the same reports.
    folder = link(draft_data, tmp_path / "parts")
    for stop in (1, 5, 6):
        parts = train(Trainer(Ahead(folder, OPTIONS, teacher)), stop)
    assert {h["step"]: h["same"] for h in parts.history} == reported
    for name, weight in whole.objective.module.state_dict().items():
        assert torch.equal(weight, parts.objective.module.state_dict()[name])


def test_the_folder_names_its_target(student: Ahead, teacher: Teacher, tmp_path: Path) -> None:
    student.export(tmp_path / "ahead", "# card", {"figures": {"S": 1.5}, "length": 64})
    names = {each.name for each in (tmp_path / "ahead").iterdir()}
    assert names == {"README.md", "drafter.json", "model.safetensors"}
    trained = TrainedDrafter.read(tmp_path / "ahead")
    assert trained.kind == "ahead"
    assert trained.target_fingerprint == teacher.fingerprint
    assert trained.make_shape(AheadShape) == AheadShape()
    document = json.loads((tmp_path / "ahead" / "drafter.json").read_text())
    assert document["figures"] == {"S": 1.5}
    assert document["target"]["name"] == "little"
    weights = load_file(tmp_path / "ahead" / "model.safetensors")
    for name, weight in student.module.state_dict().items():
        assert torch.equal(weights[name], weight.bfloat16())


def test_engine_is_not_asked_without_guesses_or_prompts(student: Ahead, tmp_path: Path) -> None:
    assert student.spec == "ahead(model={model!r}, num_tokens=0)"
    student.options = StudentOptions(**{**vars(OPTIONS), "num_tokens": 2})
    student.data = tmp_path  # a run without held-out prompts
    (tmp_path / "prompts.json").write_text(json.dumps({"held_out": []}))
    assert student.evaluate(32) == {}
