import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pronk import SamplingParams
from pronk.base.errors import OptionError
from pronk.sampling.noise import derive_seed
from pronk.train.clock import Clock
from pronk.train.corpus.collection import Collection, Pool
from pronk.train.on_policy import continue_prompts, held_out_halves, held_out_prompts, write_prompts
from pronk.train.teacher import Teacher
from train.tiny import OWN


def read(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in ("on-policy.bin", "valid-on-policy.bin")]


def chosen(folder: Path) -> dict[str, list[list[int]]]:
    prompts: dict[str, list[list[int]]] = json.loads((folder / "prompts.json").read_text())
    return prompts


def write(
    folder: Path, teacher: Teacher, pools: list[Pool], late: bool = False, **changes: Any
) -> list[list[int]]:
    """Write prompts and return those for training."""
    write_prompts(Collection(pools, []), teacher, replace(OWN, **changes), folder, lambda: late)
    return chosen(folder)["train"]


@pytest.fixture
def prompts(draft_data: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that makes a folder with prompts, but without generated text."""

    def create(name: str) -> Path:
        (tmp_path / name).mkdir()
        shutil.copyfile(draft_data / "prompts.json", tmp_path / name / "prompts.json")
        return tmp_path / name

    return create


def test_text_is_prompts_with_their_continuations(draft_data: Path, teacher: Teacher) -> None:
    prompts = chosen(draft_data)["train"]
    text = np.fromfile(draft_data / "on-policy.bin", dtype=np.uint16).tolist()
    state = json.loads((draft_data / "on-policy.json").read_text())
    assert state["bytes"] == 2 * len(text)
    # generation stops with the prompt that reaches the limit
    assert state["tokens"] < OWN.tokens + OWN.length
    tokens = 0
    for number in range(state["prompts"]):
        prompt = prompts[number % len(prompts)]
        temperature = (0.7, 1.0, 0.0)[number % 3]  # number 0 is the first held-out prompt
        params = SamplingParams(
            max_tokens=OWN.length, temperature=temperature, seed=derive_seed(0, number + 1)
        )
        ids = teacher.llm.generate(prompt, params).token_ids
        tokens += len(ids)
        document = [*prompt, *ids] + [0] * (ids[-1] != 0)
        assert text[: len(document)] == document
        del text[: len(document)]
    assert not text
    assert tokens == state["tokens"] >= OWN.tokens


def test_interrupted_text_is_the_uninterrupted_text(
    draft_data: Path, teacher: Teacher, prompts: Callable[[str], Path]
) -> None:
    folder = prompts("parts")
    seen: list[int] = []
    assert not continue_prompts(teacher, folder, OWN, seen.append, lambda: len(seen) == 1)
    assert len(seen) == 1
    # Bytes of an incomplete batch, as after a kill.
    with (folder / "on-policy.bin").open("ab") as file:
        file.write(b"half a batch")
    assert continue_prompts(teacher, folder, OWN, seen.append)
    assert seen == sorted(seen)
    assert read(folder) == read(draft_data)
    assert continue_prompts(teacher, folder, OWN, seen.append, lambda: True)
    assert (folder / "on-policy.bin").stat().st_size == json.loads(
        (folder / "on-policy.json").read_text()
    )["bytes"]


class Scripted(Clock):
    """A clock with a limit of one minute, which is over after ``asked`` readings."""

    def __init__(self, asked: int, minutes: float | None = 1.0) -> None:
        super().__init__(minutes)
        self.asked = asked

    @property
    def seconds(self) -> float:
        self.asked -= 1
        return 0.0 if self.asked >= 0 else 1e6


@pytest.mark.parametrize("asked", [0, 2, 8])
def test_text_is_as_much_as_there_is_time_for(
    draft_data: Path, teacher: Teacher, prompts: Callable[[str], Path], asked: int
) -> None:
    folder = prompts("short")
    options = replace(OWN, at_most=True)
    assert continue_prompts(
        teacher, folder, options, lambda _: None, clock=Scripted(asked), min_tokens=30
    )
    state = json.loads((folder / "on-policy.json").read_text())
    assert 30 <= state["tokens"] < OWN.tokens
    text, whole = ((each / "on-policy.bin").read_bytes() for each in (folder, draft_data))
    assert whole.startswith(text)
    assert json.loads((folder / "clock.json").read_text()).keys() == {"seconds"}
    # The held-out text has only the remaining prompts.
    held_out, all_of_it = (
        (each / "valid-on-policy.bin").read_bytes() for each in (folder, draft_data)
    )
    assert all_of_it.startswith(held_out)
    given = chosen(draft_data)["held_out"]
    assert held_out_prompts(folder) == given[: len(held_out_prompts(folder))]
    # A later call with more time does not extend the text, because a drafter may have been trained
    # on it.
    for clock in (Clock(1000.0), Clock(None)):
        assert continue_prompts(
            teacher, folder, options, lambda _: None, clock=clock, min_tokens=30
        )
        assert (folder / "on-policy.bin").read_bytes() == text


def test_held_out_text_is_shortened_by_whole_prompts(
    teacher: Teacher, prompts: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pronk.train.on_policy._MIN_BATCH", 2)
    folder = prompts("short")
    options = replace(OWN, at_most=True)
    assert continue_prompts(
        teacher, folder, options, lambda _: None, clock=Scripted(0), min_tokens=1
    )
    left = held_out_prompts(folder)
    assert len(left) == 2 < OWN.held_out
    tokens = np.fromfile(folder / "valid-on-policy.bin", dtype=np.uint16).tolist()
    assert tokens[: len(left[0])] == left[0]
    assert str(left[1]).strip("[]") in str(tokens)
    halves = held_out_halves(folder, teacher.llm.config.vocab_size)
    assert halves is not None
    assert halves[1] == [left[1]]
    assert tokens[halves[0] : halves[0] + len(left[1])] == left[1]


def test_text_that_was_asked_for_is_written_or_refused(
    draft_data: Path, teacher: Teacher, prompts: Callable[[str], Path]
) -> None:
    folder = prompts("asked")
    assert continue_prompts(teacher, folder, OWN, lambda _: None, clock=Clock(1e6))
    assert read(folder) == read(draft_data)
    folder = prompts("refused")
    message = r"on-policy: expected at most about \d+ tokens, .* in 0\.9 minutes, found 400; "
    with pytest.raises(OptionError, match=message):
        continue_prompts(teacher, folder, OWN, lambda _: None, clock=Scripted(0))
    # The text is kept, and more time completes it.
    assert continue_prompts(teacher, folder, OWN, lambda _: None, clock=Clock(1e6))
    assert read(folder) == read(draft_data)


def test_prompts_are_fewer_when_it_is_late(tmp_path: Path, teacher: Teacher) -> None:
    pools = [Pool("words", 1.0, [f"word {i} " * 99 for i in range(400)])]
    assert len(write(tmp_path, teacher, pools, batch=5)) == 4 * OWN.tokens // OWN.length
    assert len(write(tmp_path, teacher, pools, late=True, batch=5)) == 5


def test_other_options_are_named(draft_data: Path, teacher: Teacher) -> None:
    message = "expected on-policy = 400 as before, found 500, and seed = 0 as before, found 3;"
    with pytest.raises(OptionError, match=message):
        continue_prompts(teacher, draft_data, replace(OWN, tokens=500, seed=3), lambda _: None)


def test_prompts_are_beginnings_stretches_and_questions(tmp_path: Path, teacher: Teacher) -> None:
    documents = [
        "\n".join(f"line {i} of document {j} says {i * j}" for i in range(30)) for j in range(20)
    ]
    talk = "User: What is it?\n\nAssistant: A cat.\n\nUser: And that?\n\nAssistant: A dog."
    pools = [Pool("lines", 0.5, documents, documents[:1]), Pool("talk", 0.5, [talk], [talk])]
    prompts = write(tmp_path, teacher, pools, tokens=240, prompt=30, batch=80, held_out=10)
    assert len(prompts) == 80
    assert all(8 <= len(prompt) <= 30 for prompt in prompts)
    assert len({len(prompt) for prompt in prompts}) > 5
    backend = teacher.llm.tokenizer.backend
    texts = [backend.decode(prompt, skip_special_tokens=False) for prompt in prompts]
    starts = [text.startswith("line 0 of") for text in texts if text.startswith("line")]
    assert any(starts)
    assert not all(starts)
    questions = {text for text in texts if text.startswith("<|user|>")}
    one = "<|user|>What is it?<|end|><|assistant|>"
    assert questions == {one, f"{one}A cat.<|end|><|user|>And that?<|end|><|assistant|>"}
    assert len(held_out_prompts(tmp_path)) == 10


def test_prompts_leave_half_the_context(tmp_path: Path, teacher: Teacher) -> None:
    pools = [Pool("words", 1.0, ["word " * 500])]
    assert 16 < max(map(len, write(tmp_path, teacher, pools, prompt=1000))) <= 32
    assert held_out_prompts(tmp_path) == []


def test_held_out_documents_give_the_held_out_prompts(tmp_path: Path, teacher: Teacher) -> None:
    pools = [Pool("words", 1.0, ["apple " * 99] * 3, ["banana " * 99] * 2)]
    decode = teacher.llm.tokenizer.decode
    assert all("banana" not in decode(ids) for ids in write(tmp_path, teacher, pools))
    assert all("apple" not in decode(ids) for ids in held_out_prompts(tmp_path))
    assert len(held_out_prompts(tmp_path)) == OWN.held_out
