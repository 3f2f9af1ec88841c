"""Training of heads for targets with recurrent layers: the engine computes the features."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import MakeCheckpoint
from pronk import LLM, SamplingParams
from pronk.base.errors import OptionError
from pronk.train.dialogues import copy_answers
from pronk.train.eagle import EagleTraining
from pronk.train.loop import Trainer
from pronk.train.modules.decoder import load_ends, load_module
from pronk.train.own_text import answers_header, write_answers
from pronk.train.target_states import target_states
from pronk.train.teacher import Teacher
from recurrent_models import FAMILIES, HEADS, RecurrentOracle, with_mtp, write_gguf
from train.tiny import EAGLE_OPTIONS

TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
PROMPT = [5, 6, 7, 8, 9, 10, 11]


@pytest.fixture(scope="module")
def folder(checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a recurrent target whose text a small head can learn."""
    made = checkpoint("qwen3_5_text", max_position_embeddings=128)
    target = with_mtp(made, tmp_path_factory.mktemp("recurrent") / "target", calm=0.1)
    config = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target


@pytest.fixture(scope="module")
def teacher(folder: Path) -> Teacher:
    return Teacher(folder, threads=1)


@pytest.fixture(scope="module")
def begin(
    teacher: Teacher, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Trainer[EagleTraining]]:
    """Return a function that begins a run of a kind, on the target's own answers."""
    root = tmp_path_factory.mktemp("runs")
    answers = root / "own.answers"
    header = answers_header(teacher.llm, [], 20, 3)

    def ask(number: int) -> list[str]:
        return [f"What does the {('cat', 'dog', 'bird')[number % 3]} see?"]

    write_answers(teacher.llm, ask, header, answers, tokens=800, batch=16, progress=lambda _: None)

    def begun(kind: str) -> Trainer[EagleTraining]:
        copy_answers(root / kind, [answers], (), teacher.fingerprint)
        return Trainer(EagleTraining(root / kind, replace(EAGLE_OPTIONS, kind=kind), teacher))

    return begun


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_trained_head_drafts_for_a_recurrent_target(
    kind: str, begin: Callable[[str], Trainer[EagleTraining]], teacher: Teacher, tmp_path: Path
) -> None:
    trainer = begin(kind)
    trainer.train(lambda _: None, lambda _: None, lambda: False)
    assert trainer.history[-1]["valid"]["greedy S"] > 1.5
    trainer.objective.export(tmp_path / "head", "", {})
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    (plain,) = teacher.llm.generate([PROMPT], params)
    drafter = f"{kind}(model={str(tmp_path / 'head')!r})"
    (found,) = teacher.llm.generate([PROMPT], params, drafter=drafter)
    assert found.token_ids == plain.token_ids
    assert found.stats.accepted > 5


@pytest.mark.parametrize("chunk", [512, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_those_of_the_deployed_target(
    family: str, chunk: int, checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features and the target's likeliest tokens, against an oracle that reads token by token."""
    monkeypatch.setattr("pronk.train.target_states._CHUNK", chunk)
    made = checkpoint(family, **HEADS["two values"])
    llm = LLM(made, threads=1, dtype="float32", drafter="autoregressive")
    text = [token % 300 for token in range(3, 60, 3)]
    states = target_states(llm.target, text, (2, 4), 6)
    ends = load_ends(made, llm.config, torch.float32, torch.device("cpu"))
    oracle = RecurrentOracle(made)
    state = oracle.start()
    hidden = np.stack([oracle.hidden(state, token) for token in text])
    normed = ends.norm(states.last).numpy()
    assert np.abs(normed - hidden[6:]).max() < 1e-4
    assert states.hidden.shape == (len(text), 2 * 32)
    torch.testing.assert_close(states.hidden[6:, 32:], states.last)
    logits = np.stack([oracle.unembed(x) for x in hidden[6:]])
    assert states.likeliest.tolist() == logits.argmax(-1).tolist()
    assert np.abs(ends.logits(states.last).numpy() - logits).max() < 1e-3


def test_ends_of_a_gguf_file(folder: Path, tmp_path: Path) -> None:
    path = write_gguf(folder, tmp_path / "model.gguf")
    (one, other) = (
        load_ends(each, LLM(each, threads=1).config, torch.float32, torch.device("cpu"))
        for each in (folder, path)
    )
    for name, weight in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], weight, rtol=0, atol=1e-6)
    assert not one.layers


def test_modules_refuse_recurrent_layers(teacher: Teacher) -> None:
    """Drafters that are trained through the target's own layers are refused by name."""
    options: Any = (torch.float32, torch.device("cpu"))
    message = r"found qwen3_5_text with recurrent layers; train eagle3, or use a drafter without"
    with pytest.raises(OptionError, match=message) as caught:
        load_module(teacher.folder, teacher.llm.config, *options)
    assert "\n" not in str(caught.value)
