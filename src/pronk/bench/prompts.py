"""Prompts of a benchmark, from suites and from the user's own files.

A suite is a file of JSON lines, ``NAME.jsonl`` or ``NAME.jsonl.gz``, in the folder given with ``--data``; the suite
``sample`` is part of pronk. A line has one of

- ``"prompt"``: text to continue,
- ``"turns"``: what a user says, turn after turn; the model's answers come between them,
- ``"messages"``: a conversation in OpenAI's format that ends with the user,

and may have an ``"id"`` and a ``"task"``, by which figures are grouped. Turns and messages go through the model's chat
template. Any other file is text: one prompt a line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pronk.bench.document import ALL, SOUND
from pronk.errors import OptionError, PromptError
from pronk.files.json_lines import read_json_lines

if TYPE_CHECKING:  # it needs torch, which clients of a server can do without
    from pronk.llm import LLM

__all__ = [
    "SAMPLE",
    "Prompt",
    "encode",
    "fit",
    "limit_per_task",
    "load_prompts",
    "load_suite",
    "load_tasks",
    "sample_prompts",
    "suites_in",
]

SAMPLE = "sample"

_ROLES = ("system", "user", "assistant")
_SUFFIXES = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class Prompt:
    """Something to continue or to answer.

    Attributes:
        id: names it in figures and messages.
        task: what it is measured with.
        text: raw text to continue, or ``None`` for a conversation.
        history: messages before the first turn.
        turns: what the user says; the model answers each.
    """

    id: str
    task: str
    text: str | None = None
    history: tuple[Mapping[str, str], ...] = ()
    turns: tuple[str, ...] = ()

    @property
    def num_turns(self) -> int:
        """How many outputs it asks for."""
        return max(1, len(self.turns))


def sample_prompts() -> list[Prompt]:
    """The suite ``sample``: a few of HumanEval, GSM8K, HumanEvalPack (all MIT) and our own."""
    with as_file(files("pronk.bench") / "prompts.jsonl") as path:
        return load_prompts(path)


def load_suite(name: str, folder: Path | None) -> list[Prompt]:
    """A suite's prompts.

    Raises:
        OptionError: no such suite, or a damaged file.
    """
    if name == SAMPLE:
        return sample_prompts()
    if folder is None:
        msg = f"suite {name!r}: expected --data with the folder that has {name}.jsonl; without it there is {SAMPLE!r}"
        raise OptionError(msg)
    for suffix in _SUFFIXES:
        if (path := folder / f"{name}{suffix}").is_file():
            return load_prompts(path)
    msg = f"suite {name!r}: expected {name}.jsonl in {folder}, found {', '.join(suites_in(folder)) or 'no suite'}"
    raise OptionError(msg)


def suites_in(folder: Path) -> list[str]:
    """Names of the suites that a folder has."""
    return sorted({path.name.split(".jsonl")[0] for path in folder.glob("*.jsonl*")})


def load_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file: JSON lines, or text with one prompt a line.

    Raises:
        OptionError: the file is missing, or a line is malformed; the message has its number.
        PromptError: there is no prompt in it.
    """
    if not path.is_file():
        msg = f"prompts: expected a file at {path}, found {'a folder' if path.is_dir() else 'none'}; check the path"
        raise OptionError(msg)
    task = path.name.split(".")[0]
    if path.name.endswith(_SUFFIXES):
        prompts = [_parse(row, f"{path}, line {number}", task, number) for number, row in read_json_lines(path)]
    else:
        _check_task(task, str(path))
        prompts = [Prompt(f"{task}_{n}", task, text=line) for n, line in enumerate(_lines(path), 1) if line.strip()]
    if not prompts:
        msg = f"{path}: expected at least one prompt, found none"
        raise PromptError(msg)
    return prompts


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{path}: expected a file of JSON lines, or of text in UTF-8, found {error}"
        raise OptionError(msg) from error


def _parse(row: Mapping[str, Any], where: str, task: str, number: int) -> Prompt:
    given = [key for key in ("prompt", "messages", "turns") if key in row]
    if not given:
        msg = f"{where}: expected 'prompt', 'turns' or 'messages', found {', '.join(map(repr, row)) or 'nothing'}"
        raise OptionError(msg)
    name, task = str(row.get("id", f"{task}_{number}")), str(row.get("task", task))
    _check_task(task, where)
    value = row[given[0]]
    if given[0] == "prompt":
        return Prompt(name, task, text=_text(value, f"{where}: prompt"))
    if not isinstance(value, list) or not value:
        msg = f"{where}: expected a list under {given[0]!r} with at least one entry, found {value!r:.60}"
        raise OptionError(msg)
    if given[0] == "turns":
        return Prompt(name, task, turns=tuple(_text(turn, f"{where}: turns") for turn in value))
    messages = [_message(entry, where) for entry in value]
    if messages[-1]["role"] != "user":
        msg = f"{where}: expected messages that end with the user's, found {messages[-1]['role']!r}"
        raise OptionError(msg)
    return Prompt(name, task, history=tuple(messages[:-1]), turns=(messages[-1]["content"],))


def _check_task(task: str, where: str) -> None:
    if task in {ALL, SOUND}:
        msg = f"{where}: expected another task than {task!r}, which is what figures over all tasks are called"
        raise OptionError(msg)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        msg = f"{where}: expected text, found {value!r:.60}"
        raise OptionError(msg)
    return value


def _message(entry: Any, where: str) -> dict[str, str]:
    if not isinstance(entry, Mapping) or entry.get("role") not in _ROLES:
        msg = f"{where}: expected messages with a role of {', '.join(_ROLES)}, found {entry!r:.60}"
        raise OptionError(msg)
    content = entry.get("content")
    if isinstance(content, list):  # the format's other form: a list of parts
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(content) else content
    return {"role": entry["role"], "content": _text(content, f"{where}: content")}


def limit_per_task(prompts: Iterable[Prompt], limit: int | None) -> dict[str, list[Prompt]]:
    """The first ``limit`` prompts of each task, by task in order of appearance; their ids are made unique."""
    tasks: dict[str, list[Prompt]] = defaultdict(list)
    seen: set[tuple[str, str]] = set()
    for prompt in prompts:
        if limit is None or len(tasks[prompt.task]) < limit:
            numbered = (f"{prompt.id} ({n})" for n in count(2))
            name = next(name for name in chain([prompt.id], numbered) if (prompt.task, name) not in seen)
            seen.add((prompt.task, name))
            tasks[prompt.task].append(replace(prompt, id=name))
    return dict(tasks)


def load_tasks(
    suites: Sequence[str] | None, folder: Path | None, files: Sequence[Path], limit: int | None
) -> dict[str, list[Prompt]]:
    """Load the prompts of suites and files, by task; of the suite ``sample`` if neither is named.

    Args:
        suites: names; ``None`` names none.
        folder: where suites are.
        files: the user's own.
        limit: prompts of each task; ``None`` is all.

    Raises:
        OptionError: a folder without suites to take from it, no such suite, or a damaged file.
    """
    if folder is not None and suites is None:
        have = ", ".join(suites_in(folder)) or "none"
        msg = f"data: expected --suite with the suites to take from {folder}, which has {have}"
        raise OptionError(msg)
    names = suites if suites is not None else [] if files else [SAMPLE]
    found = [prompt for name in names for prompt in load_suite(name, folder)]
    found += [prompt for file in files for prompt in load_prompts(file)]
    return limit_per_task(found, limit)


def encode(llm: LLM, prompt: Prompt, answers: Sequence[str] = (), *, chat: bool = True) -> list[int]:
    """Token ids of a prompt, or of its turn number ``len(answers)`` after the turns that were answered.

    ``chat`` renders a conversation with the model's chat template; without one its texts stand below each other.
    """
    if prompt.text is not None:
        return llm.tokenizer.encode(prompt.text)
    messages = list(prompt.history)
    for turn, answer in zip(prompt.turns, answers, strict=False):  # the last turn has no answer yet
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": prompt.turns[len(answers)]})
    if chat and llm.tokenizer.has_chat_template:
        return llm.chat_ids(messages)
    return llm.tokenizer.encode("".join(f"{message['content']}\n\n" for message in messages))


def fit(ids: Sequence[int], room: int) -> list[int]:
    """The ids without their middle, so that ``room`` are left: what is asked stands at one of the ends."""
    if len(ids) <= room:
        return list(ids)
    head = room // 2
    return [*ids[:head], *ids[len(ids) - (room - head) :]]
