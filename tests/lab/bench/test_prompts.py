"""Prompt files: accepted formats, errors that name the line, and encoding of prompts."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import MakeCheckpoint
from lab.bench.bench_cases import pronk_tiny
from pronk.base.errors import OptionError, PromptError
from pronk.lab.bench.prompts import (
    Prompt,
    builtin_prompts,
    drop_middle,
    encode,
    group_by_task,
    load_prompts,
    load_suite,
)
from pronk.llm import LLM

Write = Callable[..., Path]
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes rows as JSON lines; a ``str`` row is written unchanged."""

    def call(*rows: Any, name: str = "mine.jsonl") -> Path:
        text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return call


def test_prompts_of_text(write: Write) -> None:
    path = write({"prompt": " def f():\n", "id": 3, "task": "code", "licence": "MIT"})
    assert load_prompts(path) == [Prompt("3", "code", text=" def f():\n")]


def test_prompts_of_turns(write: Write) -> None:
    (prompt,) = load_prompts(write({"turns": ["a", "b"], "id": "x"}))
    assert prompt == Prompt("x", "mine", turns=("a", "b"))
    assert prompt.num_turns == 2
    assert Prompt("x", "mine", text="a").num_turns == 1


def test_prompts_of_messages(write: Write) -> None:
    (prompt,) = load_prompts(
        write({"messages": [SYSTEM, USER, ANSWER, {"role": "user", "content": "And?"}]})
    )
    assert prompt == Prompt("mine_1", "mine", history=(SYSTEM, USER, ANSWER), turns=("And?",))


def test_messages_may_have_parts_and_other_keys(write: Write) -> None:
    parts = [{"type": "text", "text": "Sum "}, {"type": "text", "text": "up."}]
    message = {"role": "user", "content": parts, "name": "me"}
    assert load_prompts(write({"messages": [message]}))[0] == Prompt(
        "mine_1", "mine", turns=("Sum up.",)
    )


def test_default_ids_and_tasks(write: Write) -> None:
    path = write(
        {"prompt": "a"},
        "",
        {"prompt": "b"},
        {"prompt": "c", "task": "other"},
        name="my.suite.jsonl",
    )
    named = [(prompt.id, prompt.task) for prompt in load_prompts(path)]
    assert named == [("my_1", "my"), ("my_3", "my"), ("my_4", "other")]


def test_compressed_files(write: Write) -> None:
    path = write({"prompt": "ü"}, name="mine.jsonl.gz")
    assert load_prompts(path) == [Prompt("mine_1", "mine", text="ü")]


def test_other_files_have_one_prompt_per_line(write: Write) -> None:
    path = write("Once upon", "", '{"prompt": 1}', " Grüße", name="story.txt")
    expected = [("story_1", "Once upon"), ("story_3", '{"prompt": 1}'), ("story_4", " Grüße")]
    assert load_prompts(path) == [Prompt(name, "story", text=text) for name, text in expected]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("{", "JSON object"),
        ("[1]", "JSON object"),
        ({}, "'prompt', 'turns' or 'messages', found nothing"),
        ({"text": "x", "id": 1}, "found 'text', 'id'"),
        ({"prompt": ""}, "prompt: expected text"),
        ({"prompt": None}, "prompt: expected text, found None"),
        ({"prompt": ["x"]}, "prompt: expected text"),
        ({"turns": "x"}, "a list under 'turns'"),
        ({"turns": []}, "a list under 'turns'"),
        ({"turns": ["x", ""]}, "turns: expected text"),
        ({"turns": ["x", 5]}, "turns: expected text, found 5"),
        ({"messages": {}}, "a list under 'messages'"),
        ({"messages": []}, "a list under 'messages'"),
        ({"messages": ["x"]}, "a role of system, user, assistant"),
        ({"messages": [{"content": "x"}]}, "a role of"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "a role of"),
        ({"messages": [{"role": "user"}]}, "content: expected text, found None"),
        ({"messages": [{"role": "user", "content": []}]}, "content: expected text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "content: expected",
        ),
        (
            {"messages": [{"role": "user", "content": [{"text": "x"}, "y"]}]},
            "content: expected text",
        ),
        ({"messages": [USER, ANSWER]}, "end with the user's, found 'assistant'"),
        ({"prompt": "x", "task": "all"}, "another task than 'all'"),
        ({"prompt": "x", "task": "sound"}, "another task than 'sound'"),
    ],
)
def test_a_malformed_line_is_named(write: Write, row: Any, expected: str) -> None:
    path = write({"prompt": "good"}, "", row)
    with pytest.raises(OptionError, match=re.escape(f"{path}, line 3: ")) as caught:
        load_prompts(path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["all.txt", "sound.txt", "sound.jsonl"])
def test_names_of_sums_are_refused(write: Write, name: str) -> None:
    with pytest.raises(OptionError, match=rf"{name}.*another task than '(all|sound)'"):
        load_prompts(write('{"prompt": "x"}', name=name))


@pytest.mark.parametrize("name", ["none.jsonl", "none.jsonl.gz", "none.txt"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError) as caught:
        load_prompts(tmp_path / name)
    assert (
        str(caught.value)
        == f"prompts: expected a file at {tmp_path / name}, found none; check the path"
    )
    with pytest.raises(OptionError, match="found a folder; check the path"):
        load_prompts(tmp_path)


def test_invalid_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(OptionError, match=r"x\.txt: expected .* UTF-8"):
        load_prompts(path)


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.jsonl.gz", "empty.txt"])
def test_files_without_prompts_are_refused(write: Write, name: str) -> None:
    with pytest.raises(PromptError, match=rf"{name}: expected at least one prompt"):
        load_prompts(write("", " ", name=name))


def test_the_bundled_suite() -> None:
    prompts = load_suite("sample", None)
    assert prompts == builtin_prompts()
    assert len(prompts) == len({(prompt.task, prompt.id) for prompt in prompts}) == 14
    assert len({prompt.task for prompt in prompts}) > 2


def test_suites_of_a_folder(write: Write, tmp_path: Path) -> None:
    write({"prompt": "1"}, name="one.jsonl")
    write({"prompt": "2"}, name="two.jsonl.gz")
    write({"prompt": "3"}, name="other.json")
    assert [load_suite(name, tmp_path)[0].text for name in ("one", "two")] == ["1", "2"]
    with pytest.raises(OptionError, match=r"suite: expected one of one, two, found 'three'"):
        load_suite("three", tmp_path)


def test_missing_suites_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match=r"suite: expected 'sample' without --data, found 'humaneval'"
    ):
        load_suite("humaneval", None)
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(OptionError, match=r"found no suite; check --data$"):
            load_suite("humaneval", folder)


def test_the_limit_is_per_task() -> None:
    prompts = [Prompt(name, name[0], text="x") for name in ("b1", "a1", "b2", "a2", "a3", "c1")]
    chosen = group_by_task(prompts, 2)
    assert {task: [p.id for p in some] for task, some in chosen.items()} == {
        "b": ["b1", "b2"],
        "a": ["a1", "a2"],
        "c": ["c1"],
    }
    assert list(chosen) == ["b", "a", "c"]
    assert sum(map(len, group_by_task(prompts, None).values())) == 6


def test_ids_become_unique_within_their_task() -> None:
    prompts = [Prompt(name, task, text=name) for name, task in ["at", "at", "bt", "au", "at"]]
    assert [p.id for p in group_by_task(prompts, None)["t"]] == ["a", "a (2)", "b", "a (3)"]
    assert [p.id for p in group_by_task(prompts, None)["u"]] == ["a"]
    awkward = [Prompt(name, "t", text=name) for name in ("a", "a (2)", "a")]
    assert len({p.id for p in group_by_task(awkward, None)["t"]}) == 3


def test_text_is_encoded_unchanged() -> None:
    llm = pronk_tiny()
    text = "\n def f():\n"
    assert llm.tokenizer.decode(encode(llm, Prompt("x", "t", text=text))) == text
    assert encode(llm, Prompt("x", "t", text=text)) == llm.tokenizer.encode(text)


def test_conversations_use_the_chat_template() -> None:
    llm = pronk_tiny()
    prompt = Prompt("x", "t", history=(SYSTEM,), turns=("one", "two", "three"))
    first = [SYSTEM, {"role": "user", "content": "one"}]
    assert encode(llm, prompt) == llm.chat_ids(first)
    third = [*first, {"role": "assistant", "content": "A"}, {"role": "user", "content": "two"}]
    third += [{"role": "assistant", "content": "B"}, {"role": "user", "content": "three"}]
    assert encode(llm, prompt, ["A", "B"]) == llm.chat_ids(third)


def test_conversations_without_a_template_are_text(checkpoint: MakeCheckpoint) -> None:
    prompt = Prompt("x", "t", history=(SYSTEM,), turns=("one", "two"))
    expected = "Be brief.\n\none\n\nA\n\ntwo\n\n"
    llm = pronk_tiny()
    assert llm.tokenizer.chat_template
    assert encode(llm, prompt, ["A"], chat=False) == llm.tokenizer.encode(expected)
    plain = LLM(checkpoint("llama"), kv_memory="1MiB")
    assert plain.tokenizer.chat_template is None
    assert plain.tokenizer.decode(encode(plain, prompt, ["A"])) == expected


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (7, [0, 1, 2, 3, 4, 5, 6]),
        (9, [0, 1, 2, 3, 4, 5, 6]),
        (5, [0, 1, 4, 5, 6]),
        (4, [0, 1, 5, 6]),
        (1, [6]),
    ],
)
def test_fit_removes_the_middle(room: int, expected: list[int]) -> None:
    assert drop_middle(range(7), room) == expected
