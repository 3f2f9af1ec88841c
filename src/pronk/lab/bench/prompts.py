"""Prompts of a benchmark, from suites and from the user's own files.

A suite is a file of JSON lines, ``NAME.jsonl`` or ``NAME.jsonl.gz``, in the folder given with
``--data``; the suite ``sample`` is part of pronk. Each line is an object with one of these keys (if
it has several, the first of this list counts):

- ``"prompt"``: text to continue,
- ``"messages"``: a conversation in OpenAI's format that ends with a message of the user,
- ``"turns"``: messages of the user; the model answers each before the next.

The keys ``"id"`` and ``"task"`` are optional; metrics are grouped by task. Turns and messages are
rendered with the model's chat template. Any other file is plain text with one prompt per line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pronk import OptionError, PromptError
from pronk.base import read_json_lines, read_text, refuse
from pronk.base.checks import refuse_choice
from pronk.lab.bench.document import ALL, SOUND

if TYPE_CHECKING:  # at run time, pronk.llm would load the engine
    from pronk import LLM

BUILTIN_SUITE = "sample"

_ROLES = ("system", "user", "assistant")
_SUFFIXES = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class Prompt:
    """A text to continue, or a conversation to answer."""

    id: str  # name in results and error messages
    task: str  # group of prompts whose metrics are taken together
    text: str | None = None  # text to continue; ``None`` for a conversation
    history: tuple[Mapping[str, str], ...] = ()  # conversation before the first turn
    turns: tuple[str, ...] = ()  # messages of the user; the model answers each before the next

    @property
    def num_turns(self) -> int:
        """Number of outputs to generate: one per turn of a conversation, one for a text."""
        return max(1, len(self.turns))


def builtin_prompts() -> list[Prompt]:
    """Return the prompts of the suite ``sample``, which is part of pronk.

    They are parts of HumanEval, GSM8K and HumanEvalPack (all under the MIT licence), and pronk's
    own.
    """
    with as_file(files("pronk.lab.bench") / "prompts.jsonl") as path:
        return load_prompts(path)


def load_suite(name: str, folder: Path | None) -> list[Prompt]:
    """Load a suite from ``folder`` with :func:`load_prompts`.

    Raises OptionError if there is no suite of this name.
    """
    if name == BUILTIN_SUITE:
        return builtin_prompts()
    if folder is None:
        remedy = f"add --data with the folder of {name}.jsonl"
        refuse(
            "suite",
            f"expected {BUILTIN_SUITE!r} without --data, found {name!r}; {remedy}",
            OptionError,
        )
    paths = [folder / f"{name}{suffix}" for suffix in _SUFFIXES]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        _refuse_suite(name, folder)
    return load_prompts(path)


def _refuse_suite(name: str, folder: Path) -> NoReturn:
    names = _suite_names(folder)
    if names:
        refuse_choice("suite", name, names)
    refuse("suite", f"expected {name}.jsonl in {folder}, found no suite; check --data", OptionError)


def _suite_names(folder: Path) -> list[str]:
    return sorted({path.name.split(".jsonl")[0] for path in folder.glob("*.jsonl*")})


def load_prompts(path: Path) -> list[Prompt]:
    """Load the prompts of a file: JSON lines, or text with one prompt per line.

    Raises OptionError if the file is missing, or for a malformed line, with its number; PromptError
    if the file has no prompt.
    """
    if path.is_dir() or not path.exists():
        found = "a folder" if path.is_dir() else "none"
        msg = f"prompts: expected a file at {path}, found {found}; check the path"
        raise OptionError(msg)
    task = path.name.split(".")[0]
    prompts: list[Prompt] = []
    if path.name.endswith(_SUFFIXES):
        for number, row in read_json_lines(path):
            prompts.append(_parse(row, f"{path}, line {number}", task, number))
    else:
        _check_task(task, str(path))
        for number, line in enumerate(read_text(path).splitlines(), 1):
            if line.strip():
                prompts.append(Prompt(f"{task}_{number}", task, text=line))
    if not prompts:
        refuse(path, "expected at least one prompt, found none", PromptError)
    return prompts


def _parse(row: Mapping[str, Any], where: str, default_task: str, number: int) -> Prompt:
    keys = [key for key in ("prompt", "messages", "turns") if key in row]
    if not keys:
        found = ", ".join(map(repr, row)) or "nothing"
        msg = f"{where}: expected 'prompt', 'turns' or 'messages', found {found}"
        raise OptionError(msg)
    prompt_id = str(row.get("id", f"{default_task}_{number}"))
    task = str(row.get("task", default_task))
    _check_task(task, where)
    value = row[keys[0]]
    if keys[0] == "prompt":
        return Prompt(prompt_id, task, text=_text(value, f"{where}: prompt"))
    if not isinstance(value, list) or not value:
        refuse(
            where,
            f"expected a list under {keys[0]!r} with at least one entry, found {value!r:.60}",
            OptionError,
        )
    if keys[0] == "turns":
        turns = tuple(_text(turn, f"{where}: turns") for turn in value)
        return Prompt(prompt_id, task, turns=turns)
    messages = [_message(entry, where) for entry in value]
    if messages[-1]["role"] != "user":
        refuse(
            where,
            f"expected messages that end with the user's, found {messages[-1]['role']!r}",
            OptionError,
        )
    return Prompt(prompt_id, task, history=tuple(messages[:-1]), turns=(messages[-1]["content"],))


def _check_task(task: str, where: str) -> None:
    if task in {ALL, SOUND}:
        refuse(
            where,
            f"expected another task than {task!r}, the name of the figures over all tasks",
            OptionError,
        )


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        refuse(where, f"expected text, found {value!r:.60}", OptionError)
    return value


def _message(entry: Any, where: str) -> dict[str, str]:
    if not isinstance(entry, Mapping) or entry.get("role") not in _ROLES:
        refuse(
            where,
            f"expected messages with a role of {', '.join(_ROLES)}, found {entry!r:.60}",
            OptionError,
        )
    content = entry.get("content")
    if isinstance(content, list):  # OpenAI's other form of content: a list of text parts
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(content) else content
    return {"role": entry["role"], "content": _text(content, f"{where}: content")}


def group_by_task(prompts: Iterable[Prompt], limit: int | None) -> dict[str, list[Prompt]]:
    """Return the first ``limit`` prompts of each task (``None``: all), by task.

    A repeated id gets a number: ``id (2)``.
    """
    tasks: dict[str, dict[str, Prompt]] = defaultdict(dict)
    for prompt in prompts:
        by_id = tasks[prompt.task]
        if limit is None or len(by_id) < limit:
            numbered = (f"{prompt.id} ({n})" for n in count(2))
            name = next(name for name in chain([prompt.id], numbered) if name not in by_id)
            by_id[name] = replace(prompt, id=name)
    return {task: [*by_id.values()] for task, by_id in tasks.items()}


def load_tasks(
    suites: Sequence[str] | None, folder: Path | None, files: Sequence[Path], limit: int | None
) -> dict[str, list[Prompt]]:
    """Load the prompts of suites and files, grouped by task.

    ``folder`` has the files of the suites; ``limit`` is the maximum number of prompts of each task.
    Without suites and files, the suite ``sample`` is loaded. Raises OptionError if ``folder`` is
    given without ``suites``, a suite is unknown, or a file is damaged.
    """
    if folder is not None and suites is None:
        available = ", ".join(_suite_names(folder)) or "none"
        refuse(
            "data",
            f"expected --suite with the suites to take from {folder}, which has {available}",
            OptionError,
        )
    if suites is None:
        suites = [] if files else [BUILTIN_SUITE]
    prompts = [prompt for name in suites for prompt in load_suite(name, folder)]
    prompts += [prompt for file in files for prompt in load_prompts(file)]
    return group_by_task(prompts, limit)


def encode(
    llm: LLM, prompt: Prompt, answers: Sequence[str] = (), *, chat: bool = True
) -> list[int]:
    """Return the token ids of a prompt, or of the next turn of a conversation.

    ``answers`` are the model's answers to earlier turns. If ``chat`` is False or the model has no
    chat template, the messages are joined by blank lines. A PromptError means that the tokenizer or
    the chat template refuses the text.
    """
    if prompt.text is not None:
        return llm.tokenizer.encode(prompt.text)
    messages = list(prompt.history)
    # The current turn has no answer yet: ``zip`` ends before it.
    for turn, answer in zip(prompt.turns, answers, strict=False):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": prompt.turns[len(answers)]})
    if chat and llm.tokenizer.chat_template is not None:
        return llm.chat_ids(messages)
    return llm.tokenizer.encode("".join(f"{message['content']}\n\n" for message in messages))


def drop_middle(ids: Sequence[int], limit: int) -> list[int]:
    """Shorten a prompt to ``limit`` token ids by cutting out its middle.

    The end of a prompt is mostly the question.
    """
    if len(ids) <= limit:
        return list(ids)
    head = limit // 2
    return [*ids[:head], *ids[len(ids) - (limit - head) :]]
