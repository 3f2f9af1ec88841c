"""Tool calls of a server on prompts of BFCL, the Berkeley Function-Calling Leaderboard.

    pip download bfcl-eval --no-deps && unzip bfcl_eval-*.whl -d bfcl
    pronk serve --model coder=MODEL.gguf
    python benchmarks/tool_calls.py bfcl/bfcl_eval/data --url http://127.0.0.1:8000/v1 calls.jsonl

The prompts are the first of the kinds ``simple`` (one call) and ``parallel`` (several calls of one
function). Each is asked greedily in two ways: with the tool choice ``required``, and with ``auto``,
where the model decides whether to call. The server may be any with OpenAI's chat completions, such
as llama.cpp's. For each way the counts are:

valid
    The answer has calls, each of the given function, whose arguments fit the function's schema.
function
    The answer calls the expected function, at least once, whatever its arguments.
right
    The calls and their arguments are the expected ones, in any order, by BFCL's possible answers.

Answers are appended to the given file, one JSON object a line, and an answer that stands there is
not asked for again. The output is a table in Markdown, and its last line is one JSON object.

The grammar of llama.cpp's server for ``required`` allows any text before the marker of a call
(``autoparser::build_tool_parser_json_native`` in b11434). A small model may write such text up to
the limit of tokens. With ``--begin`` and the marker, here ``<tool_call>`` and a line feed, each
answer begins with the call.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema

KINDS = ("simple_python", "parallel")
CHOICES = ("required", "auto")
# Types of BFCL's schemas, which are Python's, in JSON schemas. "any" has no counterpart.
_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
# Characters that BFCL leaves out of texts before it compares them.
_LEFT_OUT = re.compile(r"[ ,./\-_*^]")
_SECONDS = 900.0

Call = tuple[str, Any]  # name of the function; arguments, or their text if it is no JSON


def json_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of BFCL as a JSON schema."""
    converted = dict[str, Any]()
    for key, value in schema.items():
        if key == "type":
            if value != "any":
                converted[key] = _TYPES.get(value, value)
        elif key == "properties":
            converted[key] = {name: json_schema(each) for name, each in value.items()}
        elif key == "items":
            converted[key] = json_schema(value)
        elif key in ("required", "enum", "description"):
            converted[key] = value
    return converted


def function_name(name: str) -> str:
    """Return a function's name without dots, which OpenAI's API does not allow."""
    return name.replace(".", "_")


def read_cases(folder: Path, kind: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield the first prompts of a kind: ``id``, ``messages``, ``tools`` and ``expected``."""
    name = f"BFCL_v4_{kind}.json"
    questions = (folder / name).read_text().splitlines()[:count]
    answers = (folder / "possible_answer" / name).read_text().splitlines()[:count]
    for question_line, answer_line in zip(questions, answers, strict=True):
        question = json.loads(question_line)
        answer = json.loads(answer_line)
        assert question["id"] == answer["id"]
        tools = list[dict[str, Any]]()
        for each in question["function"]:
            function = {
                "name": function_name(each["name"]),
                "description": each["description"],
                "parameters": json_schema(each["parameters"]),
            }
            tools.append({"type": "function", "function": function})
        yield {
            "id": question["id"],
            "messages": question["question"][0],
            "tools": tools,
            "expected": answer["ground_truth"],
        }


def ask(
    url: str, model: str, case: Mapping[str, Any], choice: str, limit: int, begin: str = ""
) -> dict[str, Any]:
    """Return a server's message in answer to a prompt, with ``finish_reason``.

    Args:
        url: address of the server, with ``/v1``.
        model: name of the model.
        case: prompt of :func:`read_cases`.
        choice: OpenAI's field ``tool_choice``.
        limit: largest number of tokens.
        begin: text with which the answer begins, sent as the last message; "" sends none.
    """
    messages = list(case["messages"])
    if begin:
        messages.append({"role": "assistant", "content": begin})
    body = {
        "model": model,
        "messages": messages,
        "tools": case["tools"],
        "tool_choice": choice,
        "parallel_tool_calls": not case["id"].startswith("simple"),
        "temperature": 0,
        "max_tokens": limit,
    }
    reply = httpx.post(f"{url}/chat/completions", json=body, timeout=_SECONDS)
    reply.raise_for_status()
    first = reply.json()["choices"][0]
    return {**first["message"], "finish_reason": first["finish_reason"]}


def read_calls(message: Mapping[str, Any]) -> list[Call]:
    """Return the calls of a message."""
    calls = list[Call]()
    for call in message.get("tool_calls") or ():
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"])
        except ValueError:
            arguments = function["arguments"]
        calls.append((function["name"], arguments))
    return calls


def is_valid(calls: Sequence[Call], tools: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether there are calls, and each has a given function and fits its schema."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    for name, arguments in calls:
        if name not in schemas:
            return False
        if not jsonschema.Draft202012Validator(schemas[name]).is_valid(arguments):
            return False
    return bool(calls)


def is_right(calls: Sequence[Call], expected: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the calls are the expected ones, in any order."""
    if len(calls) != len(expected):
        return False
    left = list(expected)
    for call in calls:
        match = next((each for each in left if _matches(call, each)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _matches(call: Call, expected: Mapping[str, Any]) -> bool:
    """Return whether a call is one of BFCL's possible answers ``{name: {argument: values}}``."""
    ((name, possible),) = expected.items()
    found, arguments = call
    return found == function_name(name) and _fit_object(arguments, possible)


def _fit_object(arguments: Any, possible: Mapping[str, Sequence[Any]]) -> bool:
    """Return whether each argument has a possible value; ``""`` among these: it may be missing."""
    if not isinstance(arguments, dict) or not arguments.keys() <= possible.keys():
        return False
    for name, values in possible.items():
        if name not in arguments:
            if "" not in values:
                return False
        elif not any(_fits(arguments[name], each) for each in values):
            return False
    return True


def _fits(value: Any, possible: Any) -> bool:
    """Return whether a value of an argument is a possible one."""
    if isinstance(possible, str):
        return isinstance(value, str) and _standard(value) == _standard(possible)
    if isinstance(possible, list):
        if not isinstance(value, list) or len(value) != len(possible):
            return False
        return all(_fits(own, each) for own, each in zip(value, possible, strict=True))
    if isinstance(possible, dict):
        return _fit_object(value, possible)
    return isinstance(value, bool) == isinstance(possible, bool) and value == possible


def _standard(text: str) -> str:
    return _LEFT_OUT.sub("", text).lower().replace("'", '"')


def count_results(
    cases: Sequence[Mapping[str, Any]],
    answers: Mapping[tuple[str, str], Mapping[str, Any]],
    choices: Sequence[str],
) -> dict[str, Any]:
    """Return the counts for each choice and kind. ``answers`` has messages by id and choice."""
    counts = dict[str, Any]()
    for choice in choices:
        for case in cases:
            kind = case["id"].rpartition("_")[0]
            row = counts.setdefault(
                f"{choice}, {kind}", {"prompts": 0, "valid": 0, "function": 0, "right": 0}
            )
            calls = read_calls(answers[case["id"], choice])
            names = {function_name(name) for each in case["expected"] for name in each}
            row["prompts"] += 1
            row["valid"] += is_valid(calls, case["tools"])
            row["function"] += bool(calls) and names == {name for name, _ in calls}
            row["right"] += is_right(calls, case["expected"])
    return counts


def as_table(counts: Mapping[str, Mapping[str, int]], choices: Sequence[str]) -> str:
    """Return the counts as a table in Markdown, one row for each choice."""
    heads = ["tool choice", "valid", "right function"]
    heads += [f"right, {kind.partition('_')[0]}" for kind in KINDS]
    lines = [heads, ["---"] * len(heads)]
    for choice in choices:
        rows = [counts[f"{choice}, {kind}"] for kind in KINDS]
        prompts = sum(row["prompts"] for row in rows)
        valid = sum(row["valid"] for row in rows)
        function = sum(row["function"] for row in rows)
        cells = [f"`{choice}`", f"{valid} of {prompts}", f"{function} of {prompts}"]
        cells += [f"{row['right']} of {row['prompts']}" for row in rows]
        lines.append(cells)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="folder data of the package bfcl-eval")
    parser.add_argument("answers", type=Path, help="file of answers, which is continued")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="", help="name of the model in requests")
    parser.add_argument("--count", type=int, default=30, help="prompts of each kind")
    parser.add_argument("--choices", nargs="+", choices=CHOICES, default=CHOICES)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--begin", default="", help="text with which each answer begins")
    parser.add_argument("--parallel", type=int, default=4, help="requests at the same time")
    options = parser.parse_args()
    cases = [case for kind in KINDS for case in read_cases(options.data, kind, options.count)]
    answers = dict[tuple[str, str], dict[str, Any]]()
    options.answers.touch()
    for line in options.answers.read_text().splitlines():
        stored = json.loads(line)
        answers[stored["id"], stored["choice"]] = stored["message"]

    def ask_and_store(case: dict[str, Any], choice: str) -> None:
        limit = options.max_tokens
        message = ask(options.url, options.model, case, choice, limit, options.begin)
        answers[case["id"], choice] = message
        stored = {"id": case["id"], "choice": choice, "message": message}
        with options.answers.open("a") as file:
            file.write(json.dumps(stored) + "\n")

    with ThreadPoolExecutor(options.parallel) as pool:
        waiting = list[Future[None]]()
        for choice in options.choices:
            for case in cases:
                if (case["id"], choice) not in answers:
                    waiting.append(pool.submit(ask_and_store, case, choice))
        for each in waiting:
            each.result()
    counts = count_results(cases, answers, options.choices)
    print(as_table(counts, options.choices))
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
