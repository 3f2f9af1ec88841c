"""Training of EAGLE-3 heads: the module against the formulas, the data, runs of a second, and bad
input.
"""

import itertools
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

import tiny_models
from drafting.from_target.trained_eagle import HIDDEN, Form, Reference, random_head
from gguf_files import convert
from pronk.base.errors import CheckpointError, OptionError
from pronk.drafting import packaged_heads
from pronk.drafting.acceptance_stats import KindKey
from pronk.drafting.from_target.modules.eagle_config import EagleConfig
from pronk.drafting.head_acceptance import read_head_acceptance
from pronk.llm import LLM
from pronk.models.loader import Fingerprint
from pronk.sampling.params import SamplingParams
from pronk.train.attention import ChainAttention, compute_features
from pronk.train.checkpoint import CHECKPOINT, load_checkpoint, save_checkpoint
from pronk.train.clock import Clock
from pronk.train.corpus.answers import AnswersWriter, Dialogue, read_answers
from pronk.train.dialogues import (
    ANSWERS,
    Dialogues,
    Mark,
    copy_answers,
    hold_out,
    read_head_text,
    split_dialogues,
    steps_of,
)
from pronk.train.distributed import ProcessGroup
from pronk.train.eagle import EagleTraining, position_weights
from pronk.train.head_plan import coverage, draft_vocabulary, head_config
from pronk.train.initial_head import InitialHead, find_initial_head
from pronk.train.loop import Trainer
from pronk.train.modules.eagle import EagleModule
from pronk.train.options import EagleOptions
from pronk.train.own_text import answers_header, write_answers
from pronk.train.quantization.heads import quantize_head
from pronk.train.quantization.straight_through import StraightThrough
from pronk.train.run import Run, train_head
from pronk.train.target_states import StateSource, target_states
from pronk.train.teacher import Teacher
from tiny_models import VOCAB, make_engine, tiny_decoder
from train.tiny import InterruptingConsole, refusal, run_command, shown
from train.tiny_modules import tiny_module

WINDOWS = (None,) * 4
OPTIONS = EagleOptions(
    steps=16,
    batch=256,
    micro=64,
    length=64,
    final_length=64,
    rate=5e-2,
    warmup=2,
    threads=1,
    evaluate_every=8,
    save_every=8,
    log_every=4,
    depth=3,
    draft_vocab=200,
    context=64,
    num_tokens=0,
)


@pytest.fixture(scope="session")
def answers(teacher: Teacher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of the target's own answers."""
    path = tmp_path_factory.mktemp("answers") / "little.answers"

    def ask(number: int) -> list[str]:
        return [f"What does the {('cat', 'dog', 'bird', 'tree')[number % 4]} see?", "And then?"][
            : 1 + number % 2
        ]

    header = answers_header(teacher.llm, [], 20, 3)
    write_answers(teacher.llm, ask, header, path, tokens=2500, batch=16, progress=lambda _: None)
    return path


@pytest.fixture
def begin(teacher: Teacher, answers: Path, tmp_path: Path) -> Callable[..., Trainer[EagleTraining]]:
    """Return a function that begins or resumes a run, given its folder's name and changed
    options.
    """

    def begun(name: str = "run", **changes: Any) -> Trainer[EagleTraining]:
        folder = tmp_path / name
        options = replace(OPTIONS, **changes)
        copy_answers(folder, [answers], (), teacher.fingerprint)
        return Trainer(EagleTraining(folder, options, teacher))

    return begun


def train(
    trainer: Trainer[EagleTraining], stop: Callable[[], bool] = lambda: False
) -> Trainer[EagleTraining]:
    trainer.train(lambda _: None, lambda _: None, stop)
    return trainer


@pytest.mark.parametrize(
    "form",
    [
        Form(),
        Form(fc_norm=True),
        Form(norm_before_residual=True, norm_output=True),
        Form(sources=(4, 1), heads=4, kv_heads=1),
        Form("mtp", sources=(4,), norm_output=True, draft=VOCAB, own_head=False),
    ],
    ids=str,
)
def test_the_module_equals_the_formulas_in_every_step(form: Form) -> None:
    """Row ``i`` of step ``s`` is the head after ``i + 2`` tokens of the text and ``s`` draft
    tokens.
    """
    target = tiny_module(windows=WINDOWS)
    head = random_head(form)
    config = replace(
        target.config, family="llama", num_layers=1, intermediate_size=48, num_heads=form.heads,
        num_kv_heads=form.kv_heads, head_dim=form.head_dim, norm_eps=form.eps, windows=(None,),
        rope=replace(target.config.rope, dim=form.head_dim, theta=form.theta),
    )  # fmt: skip
    flags = {
        name: getattr(form, name) for name in ("fc_norm", "norm_before_residual", "norm_output")
    }
    eagle = EagleConfig(form.kind, config, form.draft, HIDDEN, form.sources, **flags)
    ids = (
        torch.from_numpy(np.flatnonzero(head.tensors["t2d"]))
        if "t2d" in head.tensors
        else torch.arange(VOCAB)
    )
    module = EagleModule(eagle, len(form.sources), ids)
    module.initialize(target, torch.Generator())
    module.load_state_dict(
        module.state_dict() | {name: torch.from_numpy(each) for name, each in head.tensors.items()}
    )
    texts = [[(7 * i * i + 3 * i + n) % VOCAB for i in range(9 + 3 * n)] for n in range(2)]
    active = [torch.tensor([2, 4, 5]), torch.tensor([0, 3, 6])]
    attend = ChainAttention([len(text) - 2 for text in texts], active)
    hidden = []
    starts = [0, len(texts[0]) - 2]
    for text in texts:
        features = compute_features(target, torch.tensor([text]), torch.float32, form.sources)
        hidden.append(
            torch.cat([features.hidden[layer] for layer in form.sources], dim=-1)[: len(text) - 2]
        )
    rows = torch.cat([rows + start for rows, start in zip(active, starts, strict=True)])
    positions = torch.cat([torch.arange(len(text) - 2) for text in texts])
    reference = Reference(head, tiny_models.tiny_module(windows=WINDOWS))
    with torch.no_grad():
        feature = module.fuse(module.inputs(torch.cat(hidden)))
        lm_head = target.head if module.lm_head is None else module.lm_head
        for step in range(3):
            tokens = torch.tensor(
                [token for text in texts for token in text[1 + step : len(text) - 1 + step]]
                + [0] * 9
            )
            shifted = [text[1 + step :] + [0] * 9 for text in texts]
            tokens = torch.tensor(
                [
                    each[i]
                    for each, text in zip(shifted, texts, strict=True)
                    for i in range(len(text) - 2)
                ]
            )
            place = positions + step
            if step:
                tokens = tokens[rows]
                place = place[rows]
            out = module(target.embedding[tokens], feature, place, attend, None if step else rows)
            normed, feature = module.read_out(out)
            logits = lm_head(normed).numpy()
            number = 0
            for text, each in zip(texts, active, strict=True):
                for i in each.tolist():
                    wanted = reference.logits(text[: i + 2], text[i + 2 : i + 2 + step])
                    np.testing.assert_allclose(
                        logits[number], wanted[ids.numpy()], rtol=1e-4, atol=1e-4
                    )
                    number += 1


@pytest.mark.parametrize("kept", [(0, 1, 2, 3, 4), (0, 3), (2, 3, 4), (1,)])
def test_chain_attention_equals_a_slow_loop(kept: tuple[int, ...]) -> None:
    """A row sees the rows of step 0 up to its own, and its own later steps.

    Later steps have the rows ``kept``, numbered among those that draft.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 3]
    active = [torch.tensor([1, 4]), torch.tensor([0, 1, 2])]
    chained = [
        each[[i - start for i in kept if start <= i < start + len(each)]]
        for start, each in zip((0, 2), active, strict=True)
    ]
    attend = ChainAttention(lengths, active, chained)
    heads = 4
    kv_heads = 2
    size = 8
    rows = sum(lengths)
    count = sum(map(len, active))
    keys = list[torch.Tensor]()
    values = list[torch.Tensor]()
    for step in range(4):
        amount = len(kept) if step else rows
        keys.append(torch.randn(amount, kv_heads, size, generator=generator))
        values.append(torch.randn(amount, kv_heads, size, generator=generator))
        queries = len(kept) if step else count
        q = torch.randn(queries, heads, size, generator=generator)
        out = attend(q, keys[-1], values[-1])
        number = 0
        for text, each in enumerate(chained if step else active):
            start = sum(lengths[:text])
            for i in each.tolist():
                seen = [(keys[0][start + j], values[0][start + j]) for j in range(i + 1)]
                seen += [(keys[s][number], values[s][number]) for s in range(1, step + 1)]
                for head in range(heads):
                    scores = (
                        torch.stack([q[number, head] @ k[head // 2] for k, _ in seen]) / size**0.5
                    )
                    wanted = (
                        scores.softmax(0)[:, None] * torch.stack([v[head // 2] for _, v in seen])
                    ).sum(0)
                    torch.testing.assert_close(out[number, head * size : (head + 1) * size], wanted)
                number += 1


@pytest.mark.parametrize("chunk", [512, 5])
def test_states_of_the_engine_are_those_of_the_module(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pronk.train.target_states._CHUNK", chunk)
    engine = make_engine(tiny_decoder(windows=WINDOWS))
    module = tiny_module(windows=WINDOWS)
    free = engine.cache.allocator.num_free
    ids = [(5 * i * i + i) % VOCAB for i in range(17)]
    states = target_states(engine.target, ids, (1, 3, 4), 6)
    features = compute_features(module, torch.tensor([ids]), torch.float32, (1, 3, 4))
    wanted = torch.cat([features.hidden[layer] for layer in (1, 3, 4)], dim=-1)
    torch.testing.assert_close(states.hidden, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states.last, features.last[6:], rtol=1e-4, atol=1e-4)
    assert states.likeliest.tolist() == module.logits(features.last)[6:].argmax(-1).tolist()
    assert engine.cache.allocator.num_free == free
    source = StateSource(engine.target, (1, 3), module.norm, "abc", None)(ids, 6)
    wanted = torch.cat([features.hidden[layer] for layer in (1, 3)], dim=-1)
    torch.testing.assert_close(source.hidden.float(), wanted, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(
        source.last.float(), module.norm(features.last)[6:], rtol=2e-3, atol=2e-3
    )


def test_weights_of_positions() -> None:
    """D-PACE: the weight is the gradient of the expected accepted length by the log-acceptance."""
    assert position_weights("decay", 0.8, [0.5] * 3) == [1.0, 0.8, pytest.approx(0.64)]
    accepted = [0.9, 0.4, 0.7]
    logs = torch.tensor(accepted).log().requires_grad_()
    logs.cumsum(0).exp().sum().backward()  # type: ignore[no-untyped-call]
    assert logs.grad is not None
    # acceptance of the positions before, which is known of each row
    reached = [1.0, 0.9, 0.9 * 0.4]
    found = [
        weight * before
        for weight, before in zip(position_weights("dpace", 0.8, accepted), reached, strict=True)
    ]
    assert found == pytest.approx(logs.grad.tolist())


DIALOGUES = [
    Dialogue(n, 0.7 * (n % 2), list(range(10 * n, 10 * n + 5 + n % 7)), [(3, 5 + n % 7)])
    for n in range(120)
]


def test_an_epoch_has_every_dialogue_once() -> None:
    text = Dialogues(DIALOGUES, 16, seed=1)
    count = text.per_epoch
    for epoch in range(2):
        sequences = Dialogues(DIALOGUES, 16, seed=1)
        ids, marks = sequences.batch(epoch * count, count)
        if epoch:
            continue  # the number of sequences may differ by a few
        parts = split_dialogues(ids, marks)
        assert sorted(part[0].tolist() for part in parts) == sorted(each.ids for each in DIALOGUES)
    assert (marks == Mark.PADDING).float().mean() < 0.3
    assert not torch.equal(text.batch(0, 3)[0], text.batch(count, 3)[0])
    assert torch.equal(text.batch(5, 2)[0], Dialogues(DIALOGUES, 16, seed=1).batch(5, 2)[0])
    kinds = {part[0][0].item() // 10: part[1].tolist() for part in split_dialogues(ids, marks)}
    assert kinds[0] == [Mark.START, Mark.PROMPT, Mark.PROMPT, Mark.GREEDY, Mark.GREEDY]
    assert kinds[1] == [Mark.START, Mark.PROMPT, Mark.PROMPT, *[Mark.SAMPLED] * 3]


def test_long_dialogues_are_cut() -> None:
    ids, marks = Dialogues([Dialogue(0, 0.0, list(range(40)), [(9, 40)])], 16, seed=0).batch(0, 2)
    assert ids.tolist() == [list(range(16))] * 2
    assert (marks == Mark.GREEDY).sum().item() == 14


def test_held_out_dialogues_are_of_both_kinds() -> None:
    many = [Dialogue(n, float(n % 6 in {1, 3, 5}), [1, 2], [(1, 2)]) for n in range(1000)]
    training, held_out = hold_out(many)
    assert len(training) + len(held_out) == 1000
    assert {each.temperature for each in held_out} == {0.0, 1.0}
    assert 15 <= len(held_out) <= 25


def test_the_draft_vocabulary_is_the_most_frequent_tokens() -> None:
    dialogues = [Dialogue(0, 0.0, [9, 9, 9, 5, 5, 7, 2, 5, 7, 1], [(3, 10)])]
    ids = draft_vocabulary(dialogues, 3, 12)
    assert ids.tolist() == [1, 5, 7]  # 5 three times, 7 twice; 1 is before 2
    assert coverage(dialogues, ids) == pytest.approx(6 / 7)


@pytest.mark.slow  # test_every_kind.py: drafters come closer to their target
@pytest.mark.parametrize("kind", ["eagle3", pytest.param("mtp", marks=pytest.mark.slow)])
def test_a_little_training_lowers_the_loss(
    kind: str, begin: Callable[..., Trainer[EagleTraining]]
) -> None:
    """After it, the engine accepts what the head drafts.

    The linear start leaves little to learn about this target, so the head begins beside it.
    """
    trainer = begin(steps=40, num_tokens=3, evaluate_every=40, kind=kind)
    head = trainer.objective
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in head.module.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    before = head.evaluate(64)
    after = train(trainer).history[-1]["valid"]
    assert head.judge(after) < 0.8 * head.judge(before)
    assert after["held-out S"] > before["held-out S"]
    for number in (1, 2, 3):
        assert after[f"held-out KL {number}"] < before[f"held-out KL {number}"]
    assert after["greedy S"] > 1.2
    assert after["T=0.8 S"] > 1.0
    # the counts of the evaluation travel with the head: greedy (0) and at 0.8 (2)
    latest = head.folder / "latest"
    head.export(latest, "", {})
    counts = read_head_acceptance(latest)
    assert {key.temperature_class for key in counts} == {0, 2}
    reached, accepted = counts[KindKey(-1, 1, 0)]
    assert 0 < accepted < reached


@pytest.mark.few(1)
@pytest.mark.parametrize(("weighting", "chains", "bits"), [("dpace", 0.5, 4), ("decay", 1.0, None)])
def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(
    weighting: str, chains: float, bits: int | None, begin: Callable[..., Trainer[EagleTraining]]
) -> None:
    """Ctrl-C within a step drops that step's gradients."""
    options = {"weighting": weighting, "chains": chains, "steps": 6, "bits": bits}
    whole = train(begin("whole", **options))
    calls = 0

    def interrupt() -> bool:
        nonlocal calls
        calls += 1
        return calls == 15  # of 4 passes per step: within the fourth step

    part = train(begin("part", **options), interrupt)
    assert part.step == 3
    resumed = train(begin("part", **options))
    assert resumed.step == 6
    mine = whole.objective.module.state_dict()
    theirs = resumed.objective.module.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert (mine["acceptance"] == 0.5).all().item() == (weighting == "decay")


def test_weightings_differ(begin: Callable[..., Trainer[EagleTraining]]) -> None:
    one, other = (
        train(begin(name, weighting=name, steps=2)).objective.module for name in ("decay", "dpace")
    )
    assert not torch.equal(one.fc.weight, other.fc.weight)


def test_only_rows_of_answers_are_trained(begin: Callable[..., Trainer[EagleTraining]]) -> None:
    head = begin().objective
    ids, marks = head.text.batch(0, 4)
    batch = head._prepare(ids, marks)
    assert batch is not None
    texts = split_dialogues(ids, marks)
    answered = sum(int((kinds[2:] >= Mark.GREEDY).sum()) for _, kinds in texts)
    assert len(batch.active) == answered
    for step in head._steps(batch):
        # of the drafted tokens
        places = batch.tokens[batch.active[step.selected]] + 1 + step.number
        flat = torch.cat([kinds for _, kinds in texts])
        assert (flat[places] >= Mark.GREEDY).all()
        assert (flat[places - step.number] >= Mark.GREEDY).all()
        assert len(step.selected) > 0


def test_a_fraction_of_the_rows_drafts_further_tokens(
    begin: Callable[..., Trainer[EagleTraining]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their outputs are those which they have when all rows draft further tokens."""
    for module in ("losses", "eagle"):
        monkeypatch.setattr(f"pronk.train.{module}.product_dtype", lambda _: torch.float32)
    head = begin().objective
    ids, marks = head.text.batch(0, 8)
    whole = head._prepare(ids, marks)
    part = head._prepare(ids, marks, 0.5)
    assert whole is not None
    assert part is not None
    assert torch.equal(whole.active, part.active)
    assert len(whole.chained) == len(whole.active)
    assert 0.3 < len(part.chained) / len(part.active) < 0.7
    with torch.no_grad():
        steps = list(zip(head._steps(whole), head._steps(part), strict=True))
    for all_rows, some in steps:
        rows = torch.arange(len(part.active)) if some.number == 0 else part.chained
        assert some.num_rows == (0.5 if some.number else 1) * len(part.active)
        kept = torch.isin(all_rows.selected, rows)
        assert torch.equal(all_rows.selected[kept], some.selected)
        assert torch.equal(all_rows.teacher[kept], some.teacher)
        torch.testing.assert_close(all_rows.normed[kept], some.normed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [0, 8])
def test_training_goes_on_from_a_head(
    bits: int, begin: Callable[..., Trainer[EagleTraining]], tmp_path: Path
) -> None:
    """It begins with the loss of the trained head, quantized or not, and another draft vocabulary
    keeps the rows that both have.
    """
    trained = train(begin("first", steps=20)).objective
    folder = tmp_path / "head"
    trained.export(folder, "", {})
    if bits:
        quantize_head(folder, tmp_path / "quantized", bits, None)
        folder = tmp_path / "quantized"
    first = begin("same", init=str(folder)).objective
    linear = begin("linear").objective
    wanted = trained.judge(trained.evaluate(64))
    assert first.judge(first.evaluate(64)) == pytest.approx(wanted, rel=0.02)
    assert linear.judge(linear.evaluate(64)) > 1.2 * wanted
    smaller = begin("smaller", init=str(folder), draft_vocab=150).objective.module
    old = trained.module
    assert old.lm_head is not None
    assert smaller.lm_head is not None
    places = torch.searchsorted(old.draft_ids, smaller.draft_ids)
    difference = smaller.lm_head.weight - old.lm_head.weight[places]
    assert difference.abs().max() < (0.02 if bits else 0.005) * old.lm_head.weight.abs().max()


def test_a_head_for_4_bits_is_evaluated_and_exported_with_4_bits(
    begin: Callable[..., Trainer[EagleTraining]], tmp_path: Path
) -> None:
    head = train(begin("run", bits=4, steps=20)).objective
    head.export(tmp_path / "small", "the card\n", {})
    document = json.loads((tmp_path / "small" / "config.json").read_text(encoding="utf-8"))
    (group,) = document["quantization_config"]["config_groups"].values()
    assert group["weights"]["num_bits"] == 4
    names = {file.name for file in (tmp_path / "small").iterdir()}
    assert names == {"README.md", "config.json", "model.safetensors"}
    card = (tmp_path / "small" / "README.md").read_text(encoding="utf-8")
    assert card.startswith("the card\n")
    assert "4 bits in groups of" in card
    plain = begin("plain").objective
    plain.module.load_state_dict(head.module.state_dict())
    divergences = {
        name: each.judge(each.evaluate(64))
        for name, each in (
            ("own", head),
            ("rounded", begin("rounded", init=str(tmp_path / "small")).objective),
            ("unrounded", plain),
        )
    }
    change = abs(divergences["unrounded"] - divergences["rounded"])
    assert abs(divergences["own"] - divergences["rounded"]) < 0.3 * change


def test_a_pass_of_training_for_4_bits_has_rounded_weights(
    begin: Callable[..., Trainer[EagleTraining]],
) -> None:
    head = begin("run", bits=4).objective
    own = {name: each.clone() for name, each in head.module.state_dict().items()}
    used = list[torch.Tensor]()
    head.module.fc.register_forward_pre_hook(lambda module, _: used.append(module.weight.clone()))
    head.backward(*head.text.batch(0, 1), 1.0)
    (weight,) = used
    assert not torch.equal(weight, own["fc.weight"])
    with StraightThrough(head.module, 4).rounded():
        assert torch.equal(weight, head.module.fc.weight)
    assert all(torch.equal(own[name], each) for name, each in head.module.state_dict().items())
    assert head.module.fc.weight.grad is not None


def test_each_pass_draws_its_own_rows(
    begin: Callable[..., Trainer[EagleTraining]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that makes some of the passes draws what a single process does for them."""

    class Odd(ProcessGroup):
        def own_passes(self, passes: int) -> range:
            return range(1, passes, 2)

    prepare = EagleTraining._prepare
    drawn = list[list[int]]()

    def record(self: EagleTraining, *inputs: Any) -> Any:
        batch = prepare(self, *inputs)
        assert batch is not None
        drawn.append(batch.chained.tolist())
        return batch

    monkeypatch.setattr(EagleTraining, "_prepare", record)
    options = {"chains": 0.5, "steps": 2, "evaluate_every": 8}
    train(begin("one", **options))
    every = drawn[:8]
    drawn.clear()
    half = begin("half", **options)
    half.processes = Odd(0, 1)
    train(half)
    assert len(every) == 8
    assert drawn[:4] == every[1::2]
    assert len({str(each) for each in every}) == 8


def test_a_run_from_before_these_options_is_resumed(
    begin: Callable[..., Trainer[EagleTraining]],
) -> None:
    trainer = begin(steps=2)
    train(trainer, lambda: trainer.step == 1)
    state = load_checkpoint(trainer.checkpoint)
    del state["options"]["chains"], state["options"]["bits"]
    save_checkpoint(trainer.checkpoint, state)
    with pytest.raises(OptionError, match=r"expected chains = 1\.0 as before, found 0\.5"):
        begin(steps=2, chains=0.5)
    assert train(begin(steps=2)).step == 2


def test_fewer_chains_leave_the_mean_gradient(
    begin: Callable[..., Trainer[EagleTraining]],
) -> None:
    """Each chained row stands for others that are not."""
    torch.set_num_threads(1)
    gradients = dict[float, list[torch.Tensor]]()
    for chains, count in ((1.0, 1), (0.5, 60)):
        head = begin(f"run{chains}", chains=chains).objective
        for _ in range(count):
            head.module.zero_grad()
            head.backward(*head.text.batch(0, 2), 1.0)
            assert head.module.fc.weight.grad is not None
            gradients.setdefault(chains, []).append(head.module.fc.weight.grad.flatten().clone())
    (whole,) = gradients[1.0]
    drawn = torch.stack(gradients[0.5])
    assert (drawn - whole).norm(dim=1).min() > 0.02 * whole.norm()
    assert (drawn.mean(0) - whole).norm() < 0.4 * (drawn - whole).norm(dim=1).mean()


def test_at_least_one_row_drafts_further_tokens(
    begin: Callable[..., Trainer[EagleTraining]],
) -> None:
    head = begin(chains=1e-9).objective
    batch = head._prepare(*head.text.batch(0, 4), 1e-9)
    assert batch is not None
    assert batch.chained.tolist() == [0]
    with torch.no_grad():
        assert [step.number for step in head._steps(batch)] == [0, 1, 2]
    head.backward(*head.text.batch(0, 4), 1.0)
    first = begin("first", depth=1).objective
    first.backward(*first.text.batch(0, 4), 1.0)
    for one, other in zip(head.module.parameters(), first.module.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-6)


def test_new_tokens_move_as_the_mean_of_the_trained_ones(
    begin: Callable[..., Trainer[EagleTraining]], tmp_path: Path
) -> None:
    head = begin("first", draft_vocab=150).objective
    assert head.module.lm_head is not None
    changes = torch.randn(head.module.lm_head.weight.shape, generator=torch.Generator())
    with torch.no_grad():
        head.module.lm_head.weight += changes
    head.export(tmp_path / "head", "", {})
    larger = begin("larger", init=str(tmp_path / "head"), draft_vocab=200).objective
    assert larger.module.lm_head is not None
    moved = larger.module.lm_head.weight.detach() - larger._head.float()
    is_old = torch.isin(larger.module.draft_ids, head.module.draft_ids)
    assert is_old.sum() == 150
    torch.testing.assert_close(moved[is_old], changes, rtol=0.03, atol=0.03)
    mean = changes.mean(0).expand(50, -1)
    torch.testing.assert_close(moved[~is_old], mean, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("bits", [0, 4])
def test_training_goes_on_from_an_mtp_head(
    bits: int, begin: Callable[..., Trainer[EagleTraining]], tmp_path: Path
) -> None:
    head = train(begin("first", kind="mtp", steps=2)).objective.module
    begin("first", kind="mtp", steps=2).objective.export(tmp_path / "head", "", {})
    folder = tmp_path / "head"
    if bits:
        quantize_head(folder, tmp_path / "small", bits, None)
        folder = tmp_path / "small"
    init = str(folder)
    module = begin("other", kind="mtp", init=init, draft_vocab=150).objective.module
    for (name, one), other in zip(head.named_parameters(), module.parameters(), strict=True):
        error = (one - other).norm() / one.norm()
        assert error < (0.2 if bits else 0.005), name
    trainer = begin("again", kind="mtp", init=init, steps=2)
    assert train(trainer, lambda: trainer.step == 1).step == 1
    shutil.rmtree(folder)  # a resumed run does not read it
    assert train(begin("again", kind="mtp", init=init, steps=2)).step == 2


def test_heads_that_come_with_pronk_are_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for head in packaged_heads():
        assert find_initial_head(head.folder.name) == head.folder
        InitialHead(head.folder, "eagle3")
    assert find_initial_head("other") == tmp_path / "other"
    (tmp_path / head.folder.name).mkdir()  # a folder is meant if there is one
    assert find_initial_head(head.folder.name) == tmp_path / head.folder.name


def test_a_head_of_other_sizes_is_refused(
    begin: Callable[..., Trainer[EagleTraining]], tmp_path: Path
) -> None:
    head = begin("first").objective
    folder = tmp_path / "head"
    head.export(folder, "", {})
    other = tmp_path / "published"
    shutil.copytree(folder, other)
    document = json.loads((other / "config.json").read_text(encoding="utf-8"))
    del document["pronk"]
    (other / "config.json").write_text(json.dumps(document), encoding="utf-8")
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    tensors = load_file(damaged / "model.safetensors")
    save_file(tensors | {"d2t": tensors["d2t"] + VOCAB}, damaged / "model.safetensors")
    foreign = tmp_path / "foreign"
    shutil.copytree(folder, foreign)
    document["pronk"] = {"target": {"architecture": "llama", "weights": "ab"}}
    (foreign / "config.json").write_text(json.dumps(document), encoding="utf-8")
    for changes, message in (
        ({"init": str(foreign)}, r"expected a head for this target, found one for .*; train"),
        ({"mlp": 32}, r"expected a head with mlp = 32, found 48: .*; give the --layers and the"),
        ({"sources": (1, 2)}, r"expected a head with layers = \(1, 2\), found"),
        ({"kind": "mtp"}, r"expected the folder of an mtp head, found eagle3: "),
        ({"init": str(tmp_path / "none")}, r"expected the folder of an eagle3 head, found none: "),
        ({"init": str(other)}, r"expected a head that pronk train has written, found one of an"),
        ({"init": str(damaged)}, r"tensor d2t: expected offsets to different tokens below"),
    ):
        with pytest.raises((OptionError, CheckpointError), match=message):
            begin("other", **({"init": str(folder)} | changes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--bits 5", "bits: expected 4 or 8, found 5"),
        ("--bits 4 --mlp 100", "mlp: expected a multiple of 8 with --bits, found 100"),
        ("--chains 0", "chains: expected a number above 0 and at most 1, found 0.0"),
        ("--chains 0.5 --depth 1", "chains: expected 1 without later draft tokens, found 0.5 with"),
        ("--init none", "init: expected the folder of an eagle3 head, found none: /"),
    ],
)
def test_mistakes_are_reported_before_the_target_is_loaded(
    options: str, message: str, answers: Path, tmp_path: Path
) -> None:
    command = f"eagle3 --model {tmp_path / 'none'} --data {answers} --out {tmp_path / 'run'}"
    assert refusal(f"{command} {options}").startswith(message)
    assert not (tmp_path / "run").exists()


def test_the_command_trains_exports_and_goes_on(
    teacher: Teacher, answers: Path, tmp_path: Path
) -> None:
    command = (
        f"eagle3 --model {teacher.folder} --data {answers} --out {tmp_path / 'run'} --batch 256 "
        "--micro 64 --length 64 "
        "--depth 2 --draft-vocab 150 --mlp 24 --layers 1,2 --threads 1 --num-tokens 2 --warmup 2"
    )
    own = f"{command} --epochs 0.5"
    output = run_command(own)
    assert "first weights: the target reads some of the answers\n" in output
    assert "reads layers 1, 2 of the target, draft vocabulary of 150" in output
    assert "plan: " in output
    assert (tmp_path / "run" / "export" / "config.json").exists()
    card = (tmp_path / "run" / "export" / "README.md").read_text(encoding="utf-8")
    assert "greedy S" in card
    assert "--data little.answers" in card
    assert str(tmp_path) not in card
    params = SamplingParams(max_tokens=40)
    completion = teacher.llm.generate(
        "The cat", params, drafter=f"eagle3(model={str(tmp_path / 'run' / 'export')!r})"
    )
    assert completion.token_ids == teacher.llm.generate("The cat", params).token_ids
    assert "steps" in refusal(f"{command} --epochs 1")
    further = own.replace(str(tmp_path / "run"), str(tmp_path / "further"))
    options = f"--init {tmp_path / 'run' / 'export'} --chains 0.5 --bits 8"
    output = run_command(f"{further} {options}")
    assert f"first weights: those of {tmp_path / 'run' / 'export'}\n" in output
    assert not list((tmp_path / "further").glob("*.plain"))
    card = (tmp_path / "further" / "export" / "README.md").read_text(encoding="utf-8")
    assert (
        "weights decay 0.8; 0.5 of the positions have the later steps; for weights of 8 bits; the "
        "first weights are those of an earlier head\n" in card
    )


def write_sibling(answers: Path, path: Path, **changes: Any) -> list[Dialogue]:
    """Write the dialogues of ``answers`` as those of another model, and return them."""
    header, dialogues = read_answers(answers)
    other = replace(header, target="s.gguf", weights="0" * 16, **changes)
    AnswersWriter(path, other).append(dialogues)
    return dialogues


def test_the_text_of_siblings_follows_the_own(
    teacher: Teacher, answers: Path, tmp_path: Path
) -> None:
    """Held-out dialogues are all of the target's, and the same with less text."""
    one = tmp_path / "one.answers"
    two = tmp_path / "two.answers"
    dialogues = write_sibling(answers, one)
    write_sibling(answers, two, vocab_size=70_000)
    training, held_out = hold_out(dialogues)
    assert held_out
    run = tmp_path / "run"
    copy_answers(run, [answers, answers], [one, two], teacher.fingerprint)
    text = read_head_text(run)
    assert text.own == training
    assert text.training == [*training, *training, *training]
    assert text.other_tokens == {"s.gguf": 2 * sum(each.num_answered for each in training)}
    own = text.num_own_tokens
    for tokens, num_own, num_others in (
        (own + 1, len(training), 1),
        (2 * own, len(training), len(training)),
    ):
        less = read_head_text(run, tokens)
        assert less.held_out == text.held_out == held_out
        assert less.training == [*training[:num_own], *training[:num_others]]
        assert less.other_tokens
    for tokens in (1, own):
        with pytest.raises(OptionError, match=rf"tokens: expected more than .*, found {tokens}; "):
            read_head_text(run, tokens)
    alone = tmp_path / "alone"
    copy_answers(alone, [answers], [], teacher.fingerprint)
    assert read_head_text(alone, 1).training == training[:1]
    assert read_head_text(alone, own - 1).training == training


def test_files_of_the_wrong_model_are_refused(
    teacher: Teacher, answers: Path, tmp_path: Path
) -> None:
    """The next command, with the right files, is not disturbed by files of the refused one."""
    sibling = tmp_path / "sibling.answers"
    stranger = tmp_path / "stranger.answers"
    large = tmp_path / "large.answers"
    dialogues = write_sibling(answers, sibling)
    write_sibling(answers, stranger, tokenizer="other")
    header, _ = read_answers(sibling)
    wide = replace(dialogues[0], ids=[60_000, *dialogues[0].ids[1:]])
    AnswersWriter(large, replace(header, vocab_size=65_000)).append([wide])
    run = tmp_path / "run"
    for own, others, message in (
        (sibling, answers, "expected answers of the model with weights"),
        (answers, answers, "expected answers of another model, found the target's; give them as"),
        (answers, stranger, "expected answers of a model with the target's tokenizer"),
        (answers, large, "expected answers of a model with the target's tokenizer"),
        (answers, Path(__file__), "expected a file of answers"),
    ):
        with pytest.raises(OptionError, match=message):
            copy_answers(run, [own], [others], teacher.fingerprint)
        assert not (run / ANSWERS).exists()
    other = tmp_path / "other.answers"
    AnswersWriter(other, read_answers(answers)[0]).append(
        [replace(dialogues[0], number=dialogues[1].number)]
    )
    with pytest.raises(OptionError, match="expected numbers of dialogues that no other file has"):
        copy_answers(run, [answers, other], [sibling, sibling], teacher.fingerprint)
    copy_answers(run, [answers], [sibling], teacher.fingerprint)
    assert read_head_text(run).others == hold_out(dialogues)[0]


def test_the_command_trains_on_answers_of_a_sibling(
    teacher: Teacher, answers: Path, tmp_path: Path
) -> None:
    sibling = tmp_path / "sibling.answers"
    dialogues = write_sibling(answers, sibling)
    training, _ = hold_out(dialogues)
    own = sum(each.num_answered for each in training)
    command = (
        f"eagle3 --model {teacher.folder} --out {tmp_path / 'run'} --batch 64 --micro 64 "
        "--length 64 --depth 1 --draft-vocab 150 --mlp 24 --threads 1 --num-tokens 0 --epochs 0.1 "
        f"--data {answers} --other-data {sibling}"
    )
    output = run_command(f"{command} --tokens {own + 1}")
    count = dialogues[0].num_answered
    assert f"{own} of them the target's answers, {count} those of s.gguf; " in output
    card = (tmp_path / "run" / "export" / "README.md").read_text(encoding="utf-8")
    assert f"\n- and {count} tokens of the answers of s.gguf, which has the same" in card
    assert "tokens" in refusal(f"{command} --tokens {own + 500}")


@pytest.mark.slow  # test_commands.py trains each kind
def test_the_command_trains_mtp_heads(teacher: Teacher, answers: Path, tmp_path: Path) -> None:
    command = (
        f"eagle3 --kind mtp --model {teacher.folder} --data {answers} --out {tmp_path / 'run'} "
        "--batch 64 --micro 64 "
        "--length 64 --depth 2 --draft-vocab 150 --threads 1 --num-tokens 2 --warmup 2 --epochs 0.5"
    )
    output = run_command(command)
    assert "draft vocabulary of 150" in output
    assert "finished: " in output
    card = (tmp_path / "run" / "export" / "README.md").read_text(encoding="utf-8")
    assert "An MTP head for" in card
    assert "proposes all tokens; its loss compared 150 tokens" in card
    params = SamplingParams(max_tokens=40)
    completion = teacher.llm.generate(
        "The cat", params, drafter=f"mtp(model={str(tmp_path / 'run' / 'export')!r})"
    )
    assert completion.token_ids == teacher.llm.generate("The cat", params).token_ids
    assert completion.stats.accepted
    message = refusal(f"{command} --layers 1,2")
    assert message == "layers: expected none for mtp, found '1,2'; leave it out"


def test_a_file_of_another_model_is_refused(
    teacher: Teacher, answers: Path, tmp_path: Path
) -> None:
    header, dialogues = read_answers(answers)
    other = tmp_path / "other.answers"
    AnswersWriter(other, replace(header, weights="0" * 16)).append(dialogues)
    command = f"eagle3 --model {teacher.folder} --threads 1"
    message = refusal(f"{command} --data {other} --out {tmp_path / 'run'}")
    assert "expected answers of the model with weights" in message
    assert "\n" not in message
    message = refusal(f"{command} --data {answers} --out {tmp_path / 'two'} --layers 1,9")
    assert message == "layers: expected numbers from 1 to 2 with commas, as in 2,2; found '1,9'"
    shutil.copy(Path(__file__), tmp_path / "text")
    assert "expected a file of answers" in refusal(
        f"{command} --data {tmp_path / 'text'} --out {tmp_path / 'three'}"
    )
    AnswersWriter(tmp_path / "empty", header)
    message = refusal(f"{command} --data {tmp_path / 'empty'} --out {tmp_path / 'four'}")
    assert (
        message
        == "data: expected dialogues with answers, found none; write more with pronk train texts"
    )


def test_a_target_of_another_kind_is_refused() -> None:
    gpt2 = replace(
        tiny_module(windows=WINDOWS).config, norm="layer", gated=False, activation="gelu", rope=None
    )
    with pytest.raises(
        OptionError, match=r"expected a target with RMSNorm, found .* with LayerNorm"
    ):
        head_config(gpt2, OPTIONS, None, None)


@pytest.mark.parametrize("kind", ["default", "yarn", "dynamic"])
def test_a_head_has_a_rope_that_its_file_can_describe(kind: str) -> None:
    target = tiny_module(windows=WINDOWS).config
    assert target.rope is not None
    scaled = replace(
        target,
        rope=replace(target.rope, kind=kind, theta=5e5, factor=1.0 if kind == "default" else 4.0),
    )
    config = head_config(scaled, OPTIONS, "tiny", None)
    document = config.document(3)
    assert document["transformer_layer_config"]["rope_theta"] == 5e5
    names = ("fc", "norm", "lm_head", "layers.0.hidden_norm", "layers.0.self_attn.q_proj")
    again = EagleConfig.parse("eagle3", document, [f"{name}.weight" for name in names])
    assert again.layers.rope == config.layers.rope
    assert (again.sources, again.fc_norm, again.draft_vocab_size) == ((2, 2, 1), True, VOCAB)


def test_the_copy_of_the_answers_stays(teacher: Teacher, answers: Path, tmp_path: Path) -> None:
    sibling = tmp_path / "sibling.answers"
    write_sibling(answers, sibling)
    copy_answers(tmp_path, [answers], [], teacher.fingerprint)
    # without a checkpoint, the run may still begin with other files
    copy_answers(tmp_path, [answers], [sibling], teacher.fingerprint)
    (tmp_path / CHECKPOINT).touch()
    sibling.unlink()
    moved = tmp_path / "gone" / answers.name
    copy_answers(tmp_path, [moved], [sibling], teacher.fingerprint)
    assert read_answers(tmp_path / ANSWERS) == read_answers(answers)
    for own, others, message in (
        ([answers, sibling], [sibling], "data = .* as before, found "),
        ([sibling], [sibling], "data = .* as before, found "),
        ([answers], [], "other-data = .'sibling.answers'. as before, found .."),
    ):
        with pytest.raises(OptionError, match=f"^cannot resume .*expected {message}"):
            copy_answers(tmp_path, own, others, teacher.fingerprint)
    assert read_answers(tmp_path / ANSWERS) == read_answers(answers)
    # a run of an older version
    (tmp_path / "data" / "answers.json").unlink()
    copy_answers(tmp_path, [sibling], [], teacher.fingerprint)
    with pytest.raises(OptionError, match=r"other-data = .. as before, found .'sibling.answers'."):
        copy_answers(tmp_path, [answers], [sibling], teacher.fingerprint)


def test_steps_of_epochs(teacher: Teacher, answers: Path, tmp_path: Path) -> None:
    copy_answers(tmp_path, [answers], (), teacher.fingerprint)
    steps = steps_of(tmp_path, 2, 256, 64, 0)
    assert steps_of(tmp_path, 4, 256, 64, 0) >= 2 * steps - 1
    assert steps_of(tmp_path, 2, 256, 64, 0, tokens=500) < steps


def test_a_gguf_file_is_trained_on_as_it_is(
    teacher: Teacher, answers: Path, corpus: Path, tmp_path: Path
) -> None:
    """Heads and adapters of a quantized file draft for it; the text is the file's own."""
    path = convert(teacher.folder, tmp_path / "a.gguf", {"": "Q8_0", "ffn_down": "F16"})
    header, dialogues = read_answers(answers)
    AnswersWriter(tmp_path / "own", replace(header, weights=Fingerprint.of(path).weights)).append(
        dialogues
    )
    common = (
        f"--threads 1 --num-tokens 2 --batch 256 --micro 64 --length 64 --out {tmp_path / 'run'}"
    )
    run_command(
        f"eagle3 --model {path} --data {tmp_path / 'own'} --draft-vocab 150 --epochs 0.3 {common}1"
    )
    run_command(
        f"kangaroo --target {path} --source {corpus / 'stories.jsonl'}=1 --exit-layer 1 "
        "--on-policy 400 --steps 8 "
        f"--final-length 64 {common}2"
    )
    llm = LLM(path, threads=1, drafter="autoregressive", budget="all")
    params = SamplingParams(max_tokens=24)
    plain = llm.generate("The cat sees", params)
    for number, kind in ((1, "eagle3"), (2, "kangaroo")):
        spec = f"{kind}(model={str(tmp_path / f'run{number}' / 'export')!r})"
        drafted = llm.generate("The cat sees", params, drafter=spec)
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats.steps[1].drafted > 0


def test_ctrl_c_keeps_what_is_trained(
    teacher: Teacher, answers: Path, quiet: Console, tmp_path: Path
) -> None:
    copy_answers(tmp_path, [answers], (), teacher.fingerprint)
    interrupting = InterruptingConsole(quiet, "step 4 ")
    assert not train_head(
        Run(tmp_path, "little", "pronk train eagle3", interrupting, Clock(OPTIONS.minutes)),
        OPTIONS,
        teacher,
    )
    assert shown(quiet).splitlines()[-2:] == [
        f"{tmp_path / 'latest'} has what is trained so far",
        "saved at step 4; the same command continues",
    ]
    assert "Not measured" in (tmp_path / "latest" / "README.md").read_text(encoding="utf-8")
    assert not (tmp_path / "export").exists()
    params = SamplingParams(max_tokens=24)
    drafted = teacher.llm.generate(
        "The cat", params, drafter=f"eagle3(model={str(tmp_path / 'latest')!r})"
    )
    assert drafted.token_ids == teacher.llm.generate("The cat", params).token_ids
    assert train_head(
        Run(tmp_path, "little", "pronk train eagle3", quiet, Clock(OPTIONS.minutes)),
        OPTIONS,
        teacher,
    )
    assert "saved at step 4" in shown(quiet)
    assert "plan: 12 steps" in shown(quiet)
    assert (tmp_path / "export" / "model.safetensors").exists()


def test_minutes_end_the_run(
    teacher: Teacher, answers: Path, quiet: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at the clock takes a second."""
    looks = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(looks)))
    options = replace(OPTIONS, steps=100_000, minutes=1.0, evaluate_every=100_000)
    copy_answers(tmp_path, [answers], (), teacher.fingerprint)
    assert train_head(
        Run(tmp_path, "little", "pronk train eagle3", quiet, Clock(options.minutes)),
        options,
        teacher,
    )
    step = load_checkpoint(tmp_path / "checkpoint.pt")["step"]
    assert 10 < step < 60
    assert shown(quiet).startswith("minutes left of 1: 0.9 for training, 0.1 for evaluating\n")
    assert ", ended after 1 minutes" in shown(quiet)


def test_kept_states_replace_the_target(
    begin: Callable[..., Trainer[EagleTraining]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run does not call the target, and has the same weights; a damaged file is computed
    again.
    """
    kept = tmp_path / "kept"
    plain = train(begin("plain", steps=2))
    first = train(begin("first", steps=2, states=kept))
    files = sorted(kept.rglob("*.safetensors"))
    assert files
    files[0].write_bytes(files[0].read_bytes()[:-40])
    calls: list[int] = []
    monkeypatch.setattr(
        "pronk.train.target_states.target_states",
        lambda *given: calls.append(1) or target_states(*given),
    )
    second = train(begin("second", steps=2, states=kept))
    assert len(calls) == 1
    weights = [run.objective.module.state_dict() for run in (plain, first, second)]
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name])
        assert torch.equal(value, weights[2][name])
    assert sum(file.stat().st_size for file in files) < first.objective.states.check_space(10**6)


def test_states_that_do_not_fit_on_the_disk_are_refused(
    begin: Callable[..., Trainer[EagleTraining]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = begin(states=tmp_path / "kept").objective
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(
        OptionError,
        match=r"^states: expected 2\.\d+ GB free in .*kept, found 0 bytes; give another",
    ):
        head.states.check_space(10**7)
