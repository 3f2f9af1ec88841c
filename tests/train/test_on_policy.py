from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pronk import SamplingParams
from pronk.choosing.noise import derive_seed
from pronk.errors import OptionError
from pronk.train.data import Collection, Pool
from pronk.train.on_policy import continue_prompts, held_out_prompts, write_prompts
from pronk.train.options import OnPolicyOptions
from pronk.train.teacher import Teacher
from train.tiny import OWN

FILES = ("on-policy.bin", "valid-on-policy.bin")


def read(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in FILES]


@pytest.fixture
def prompts(draft_data: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Folders with prompts and no text yet."""

    def create(name: str) -> Path:
        (tmp_path / name).mkdir()
        shutil.copyfile(draft_data / "prompts.json", tmp_path / name / "prompts.json")
        return tmp_path / name

    return create


def test_text_is_prompts_with_their_continuations(draft_data: Path, teacher: Teacher) -> None:
    prompts = json.loads((draft_data / "prompts.json").read_text())["train"]
    text = np.fromfile(draft_data / "on-policy.bin", dtype=np.uint16).tolist()
    state = json.loads((draft_data / "on-policy.json").read_text())
    assert state["bytes"] == 2 * len(text)
    assert state["tokens"] < OWN.tokens + OWN.length  # no more prompts than were needed
    tokens = 0
    for number in range(state["prompts"]):
        prompt = prompts[number % len(prompts)]
        temperature = (0.7, 1.0, 0.0)[number % 3]  # number 0 is the first held-out prompt's
        params = SamplingParams(max_tokens=OWN.length, temperature=temperature, seed=derive_seed(0, number + 1))
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
    # What an interruption in the middle of a batch leaves behind.
    with (folder / "on-policy.bin").open("ab") as file:
        file.write(b"half a batch")
    assert continue_prompts(teacher, folder, OWN, seen.append)
    assert seen == sorted(seen)
    assert read(folder) == read(draft_data)
    before = (folder / "on-policy.bin").stat().st_mtime_ns
    assert continue_prompts(teacher, folder, OWN, seen.append, lambda: True)
    assert (folder / "on-policy.bin").stat().st_size == json.loads((folder / "on-policy.json").read_text())["bytes"]
    assert (folder / "on-policy.bin").stat().st_mtime_ns >= before


def test_other_options_are_named(draft_data: Path, teacher: Teacher) -> None:
    with pytest.raises(
        OptionError, match=r"expected on-policy = 400 as before, found 500, and seed = 0 as before, found 3;"
    ):
        continue_prompts(teacher, draft_data, replace(OWN, tokens=500, seed=3), lambda _: None)


def test_prompts_are_beginnings_stretches_and_questions(tmp_path: Path, teacher: Teacher) -> None:
    documents = ["\n".join(f"line {i} of document {j} says {i * j}" for i in range(30)) for j in range(20)]
    talk = "User: What is it?\n\nAssistant: A cat.\n\nUser: And that?\n\nAssistant: A dog."
    pools = [Pool("lines", 0.5, documents, documents[:1]), Pool("talk", 0.5, [talk], [talk])]
    options = OnPolicyOptions(tokens=240, prompt=30, length=12, batch=80, held_out=10)
    write_prompts(Collection(pools, []), teacher, options, tmp_path)
    prompts = json.loads((tmp_path / "prompts.json").read_text())["train"]
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
    write_prompts(Collection(pools, []), teacher, replace(OWN, prompt=1000), tmp_path)
    prompts = json.loads((tmp_path / "prompts.json").read_text())
    assert 16 < max(map(len, prompts["train"])) <= 32
    assert prompts["held_out"] == []


def test_held_out_documents_give_the_held_out_prompts(tmp_path: Path, teacher: Teacher) -> None:
    pools = [Pool("words", 1.0, ["apple " * 99] * 3, ["banana " * 99] * 2)]
    write_prompts(Collection(pools, []), teacher, OWN, tmp_path)
    decode = teacher.llm.tokenizer.decode
    prompts = json.loads((tmp_path / "prompts.json").read_text())
    assert all("banana" not in decode(ids) for ids in prompts["train"])
    assert all("apple" not in decode(ids) for ids in held_out_prompts(tmp_path))
    assert len(held_out_prompts(tmp_path)) == OWN.held_out
