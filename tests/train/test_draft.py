from copy import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pronk.base.errors import OptionError
from pronk.train.attention import dense_logits
from pronk.train.export import hugging_face_tensors
from pronk.train.students import DraftStudent
from pronk.train.teacher import Teacher
from train.kinds import Start, begin, train
from train.tiny import TINY_DRAFT


def test_loss_is_the_divergence_from_the_target(start: Start, teacher: Teacher) -> None:
    objective = start("draft_model").objective
    inputs, targets = objective.phases[0].batch(0, 4)
    with torch.no_grad():
        q = dense_logits(objective.module, inputs).log_softmax(-1)
        p = dense_logits(teacher.decoder, inputs, teacher.dtype).float().log_softmax(-1)
        soft = (p.exp() * (p - q)).sum(-1).mean()
        hard = -q.gather(1, targets.reshape(-1, 1)).mean()
    passed = objective.backward(inputs, targets, 1.0)
    assert passed.loss == pytest.approx(float(soft), rel=0.02)
    assert passed.same == pytest.approx(
        [float((p.argmax(-1) == q.argmax(-1)).double().mean())], abs=0.05
    )
    objective.options = replace(objective.options, hard=0.25)
    assert objective.backward(inputs, targets, 1.0).loss == pytest.approx(
        float(0.75 * soft + 0.25 * hard), rel=0.02
    )


def test_share_of_the_own_text(start: Start) -> None:
    runs = [start("draft_model", share=share) for share in (0.0, 0.5, 1.0)]
    assert len({int(run.objective.phases[0].batch(0, 8)[0].sum()) for run in runs}) == 3


def test_other_options_and_another_target_are_named(start: Start, teacher: Teacher) -> None:
    folder = train(start("draft_model"), stop_at=1).folder
    with pytest.raises(
        OptionError, match=r"expected lr = 0\.01 as before, found 0\.5, and hard = 0\.0 as before"
    ):
        start("draft_model", rate=0.5, hard=0.5)
    start("draft_model", num_tokens=2, minutes=3.0)  # these may change
    other = copy(teacher)
    other.fingerprints = {**teacher.fingerprints, "weights": "0"}
    message = "expected target weights = '[0-9a-f]{64}' as before, found '0'; use another"
    with pytest.raises(OptionError, match=message):
        begin("draft_model", folder, other)


def test_too_little_own_text_is_named(draft_data: Path, teacher: Teacher, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.bin").symlink_to(draft_data / "train.bin")
    (tmp_path / "data" / "on-policy.bin").write_bytes(
        (draft_data / "on-policy.bin").read_bytes()[:80]
    )
    with pytest.raises(
        OptionError, match="expected at least 65 tokens for sequences of 64, found 39; give more"
    ):
        DraftStudent(tmp_path, TINY_DRAFT, teacher)


@pytest.mark.usefixtures("short_evaluation")
def test_engine_measures_the_current_weights(start: Start) -> None:
    trainer = train(start("draft_model", num_tokens=2))
    figures = [h["valid"] for h in trainer.history if h["valid"]]
    assert all(
        {"greedy alpha", "greedy S", "T=0.8 alpha", "T=0.8 S"} <= set(each) for each in figures
    )
    assert 0 < figures[-1]["greedy alpha"] <= 1
    assert 1 < figures[-1]["greedy S"] <= 3
    assert trainer.objective.evaluate(32) == figures[-1]
    latest = load_file(trainer.folder / "latest" / "model.safetensors")
    for name, weight in hugging_face_tensors(trainer.objective.module).items():
        assert torch.equal(latest[name], weight.bfloat16())
