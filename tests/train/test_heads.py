from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typer.testing import CliRunner

from pronk import LLM, SamplingParams
from pronk.cli.train.main import app
from pronk.drafters.from_target.modules.heads import HeadsShape
from pronk.errors import OptionError
from pronk.train.attention import DenseAttention, dense_logits
from pronk.train.heads import HeadsStudent, ahead, head_by_head
from pronk.train.loop import Trainer
from pronk.train.options import StudentOptions
from pronk.train.teacher import Teacher
from train.tiny import TINY_DRAFT

SHAPE = HeadsShape(num_heads=2, layer=2, mlp=24)
TINY = StudentOptions(
    **{
        name: getattr(TINY_DRAFT, name)
        for name in "steps batch micro length final_length rate warmup threads evaluate_every save_every".split()
    },
    shape=SHAPE,
    context=64,
    num_tokens=0,
)
VARIANTS = [
    {},
    {"order": "causal"},
    {"order": "anticausal"},
    {"kind": "linear"},
    {"kind": "linear", "order": "causal"},
    {"unembeddings": "replicated"},
]


def start(folder: Path, teacher: Teacher, options: StudentOptions = TINY) -> Trainer[HeadsStudent]:
    return Trainer(folder, options, HeadsStudent(folder, options, teacher))


def train(
    folder: Path, teacher: Teacher, options: StudentOptions = TINY, stop_at: int | None = None
) -> Trainer[HeadsStudent]:
    trainer = start(folder, teacher, options)
    trainer.train(lambda _: None, lambda _: None, lambda: trainer.step == stop_at)
    return trainer


def test_rows_that_have_a_row_ahead() -> None:
    rows, said = ahead(2, 4, 1, torch.device("cpu"))
    assert rows.tolist() == [0, 1, 2, 4, 5, 6]
    assert said.tolist() == [1, 2, 3, 5, 6, 7]
    rows, said = ahead(2, 4, 3, torch.device("cpu"))
    assert (rows.tolist(), said.tolist()) == ([0, 4], [3, 7])
    assert not len(ahead(2, 4, 4, torch.device("cpu"))[0])


@pytest.mark.parametrize("chained", [False, True])
def test_gradients_one_by_one_are_those_of_the_sum(*, chained: bool) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 6) for _ in range(3)]
    z = torch.randn(5, 6, requires_grad=True)
    order = [2, 0, 1]

    def loss(number: int, out: Tensor) -> Tensor:
        return (out.tanh() * (number + 1)).square().sum()

    total, x = torch.zeros(()), z
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
    for number, out in head_by_head([(number, layers[number]) for number in order], z, chained=chained):
        seen.append(number)
        loss(number, out).backward()
    assert seen == [0, 1, 2]
    for found, wanted in zip([z.grad, *(layer.weight.grad for layer in layers)], expected, strict=True):
        assert found is not None
        assert wanted is not None
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_each_head_learns_what_the_target_says_further_on(
    variant: dict[str, str], new_draft_run: Callable[[str], Path], teacher: Teacher
) -> None:
    objective = start(new_draft_run("run"), teacher, replace(TINY, shape=replace(SHAPE, **variant))).objective
    torch.manual_seed(1)
    for parameter in objective.module.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    inputs, targets = objective.phases[0].batch(0, 3)
    # Naive: both heads over whole sequences, and the sum of their divergences from the target.
    heads, decoder, length = objective.module, teacher.decoder, inputs.shape[1]
    with torch.no_grad():
        *_, z = (x for _, x in decoder.run(*states(teacher, inputs)))
        p = dense_logits(decoder, inputs, teacher.dtype).float().softmax(-1).view(3, length, -1)
    positions = torch.arange(length).repeat(3)
    rope, attend = decoder.rope(positions, positions + 1, torch.float32), DenseAttention(3, length)
    made = dict(heads.run(z.float(), lambda index, x: heads.part(index, x, rope, attend), 2))
    losses = []
    for index, out in made.items():
        weight = heads.unembeddings[index].weight if heads.unembeddings else teacher.unembedding.float()
        log_q = (heads.norm(index, out) @ weight.T).log_softmax(-1).view(3, length, -1)
        places = index + 1
        losses.append(F.kl_div(log_q[:, :-places], p[:, places:], reduction="none").sum(-1).mean())
    sum(losses).backward()
    expected = {name: parameter.grad.clone() for name, parameter in heads.named_parameters()}
    heads.zero_grad()
    passed = objective.backward(inputs, targets, 1.0)
    assert passed.loss == pytest.approx(sum(float(each.detach()) for each in losses) / 2, rel=0.02)
    assert len(passed.same) == 2
    for name, parameter in heads.named_parameters():
        assert F.cosine_similarity(parameter.grad.flatten(), expected[name].flatten(), 0) > 0.99, name


def states(teacher: Teacher, inputs: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None, DenseAttention]:
    batch, length = inputs.shape
    positions, decoder = torch.arange(length).repeat(batch), teacher.decoder
    x = decoder.embed(inputs.reshape(-1), positions, teacher.dtype)
    return x, decoder.rope(positions, positions + 1, teacher.dtype), DenseAttention(batch, length)


def test_heads_come_closer_to_their_target(new_draft_run: Callable[[str], Path], teacher: Teacher) -> None:
    folder = new_draft_run("run")
    before = start(folder, teacher).objective.evaluate(32)
    trainer = train(folder, teacher, replace(TINY, steps=40, rate=0.05))
    after = trainer.history[-1]["valid"]
    for name in (f"{text} KL {place}" for text in ("stories", "extra", "on-policy") for place in (1, 2)):
        assert after[name] < before[name]
    assert after["stories same 1"] > before["stories same 1"] + 0.1


@pytest.mark.parametrize("order", [pytest.param("parallel", marks=pytest.mark.slow), "causal"])
def test_resumed_run_is_the_uninterrupted_run(
    order: str, new_draft_run: Callable[[str], Path], teacher: Teacher
) -> None:
    options = replace(TINY, shape=replace(SHAPE, order=order))
    whole, folder = train(new_draft_run("whole"), teacher, options), new_draft_run("parts")
    assert train(folder, teacher, options, stop_at=5).step == 5
    second = train(folder, teacher, options)
    for name, weight in whole.objective.module.state_dict().items():
        assert torch.equal(weight, second.objective.module.state_dict()[name])


def test_sequences_shorter_than_the_heads_reach_are_refused(
    new_draft_run: Callable[[str], Path], teacher: Teacher
) -> None:
    with pytest.raises(OptionError, match="length: expected at least 33 for 32 heads, found 32"):
        start(new_draft_run("run"), teacher, replace(TINY, shape=replace(SHAPE, num_heads=32)))


def test_command_makes_heads_that_serve(
    tmp_path: Path, corpus: Path, teacher: Teacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pronk.train.student.SERVED_TOKENS", 16)
    command = (
        f"heads --target {teacher.folder} --source {corpus / 'stories.jsonl'}=1 --out {tmp_path / 'run'} "
        "--on-policy 200 --heads 2 --steps 60 --batch 256 --micro 256 --length 32 --final-length 64 --threads 1 "
        "--lr 0.1 --warmup 2 --evaluate-every 100"
    ).split()
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    facts = json.loads((tmp_path / "run" / "export" / "drafter.json").read_text())
    assert facts["shape"] == {
        "num_heads": 2, "layer": 2, "mlp": 38, "kind": "transformer", "order": "parallel", "unembeddings": "shared",
    }  # fmt: skip
    assert facts["figures"]["greedy alpha"] > 0.2
    card = (tmp_path / "run" / "export" / "README.md").read_text()
    assert "2 heads for the tokens 2 to 3 places ahead, parallel, over the output of the target's layer 2" in card
    served = LLM(teacher.folder, drafter=f"multi_token(model={str(tmp_path / 'run' / 'export')!r})", budget="all")
    params = SamplingParams(max_tokens=30)
    out = served.generate("The cat", params)
    assert out.token_ids == teacher.llm.generate("The cat", params).token_ids
    assert out.stats.accepted > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--layer 3", "layer: expected 1 to 2, the target's layers, found 3"),
        ("--order backwards", "order: expected one of parallel, causal, anticausal, found 'backwards'"),
    ],
)
def test_mistakes_are_named(words: str, message: str, tmp_path: Path, corpus: Path, teacher: Teacher) -> None:
    command = f"heads --target {teacher.folder} --source {corpus / 'stories.jsonl'}=1 --out {tmp_path / 'run'} {words}"
    result = CliRunner().invoke(app, command.split())
    assert isinstance(result.exception, OptionError)
    assert message in str(result.exception)


def test_help_shows_examples() -> None:
    assert "pronk train heads --source python=0.6" in CliRunner().invoke(app, ["heads", "--help"]).output
