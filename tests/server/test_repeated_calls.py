"""Calls of one answer: no call twice, at most sixteen, whatever the model writes and however it is cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from pronk.engine.stats import Stats
from pronk.outputs import Completion, Piece
from pronk.server.protocol.answers import AnswerParser, Delta
from pronk.server.protocol.tools import Function, FunctionTool, ToolChoice, ToolUse
from pronk.tokenization.chat.answer_grammar import MAX_CALLS
from pronk.tokenization.chat.answers import AnswerReader
from pronk.tokenization.chat.calls import CallPart

Part = str | CallPart
A, AB, B = ("f", '{"a": 1}'), ("f", '{"a": 12}'), ("g", '{"a": 1}')


class Reader(AnswerReader):
    """A reader that has read an answer: each token has one part of it."""

    in_thought = False
    in_call = False

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = [*parts]

    def push(self, text: str, token: int | None = None) -> list[Part]:  # type: ignore[override]
        return [self.parts.pop(0)] if self.parts else []

    def flush(self) -> list[Part]:  # type: ignore[override]
        return []


def parts_of(answer: Sequence[str | tuple[str, str]], dice: random.Random) -> list[Part]:
    """Return an answer's texts and calls in parts of random sizes."""
    parts = list[Part]()
    number = 0
    for each in answer:
        if isinstance(each, str):
            parts.append(each)
            continue
        name, text = each
        parts.append(CallPart(number, "", f"call_{number}", name))
        while text:
            size = dice.randint(1, len(text))
            parts.append(CallPart(number, text[:size]))
            text = text[size:]
        number += 1
    return parts


def parsed(answer: Sequence[str | tuple[str, str]], seed: int) -> tuple[AnswerParser, list[Delta]]:
    parts = parts_of(answer, random.Random(seed))
    parser, deltas = AnswerParser(Reader(parts)), list[Delta]()
    for number in range(len(parts)):
        done = Completion("", [0], "stop", None, 0, [0], None, None, Stats()) if number + 1 == len(parts) else None
        deltas += parser.parse([Piece(0, "x", completion=done)])
    return parser, deltas


@pytest.mark.parametrize(
    ("answer", "want"),
    [
        ([A], [A]),
        ([A, A], [A]),
        ([A] * 19, [A]),
        ([A, B, A, B], [A, B]),
        ([A, AB, A, AB, B], [A, AB, B]),
        ([AB, A], [AB, A]),
        ([A, "text", A, "more"], [A, "textmore"]),
        ([A, ("f", "{}"), ("f", "{}")], [A, ("f", "{}")]),
        ([A, ("f", '{"a": 2')], [A, ("f", '{"a": 2')]),  # cut by max_tokens
        ([("f", f'{{"a": {number}}}') for number in range(30)], [("f", f'{{"a": {n}}}') for n in range(MAX_CALLS)]),
    ],
    ids=str,
)
def test_repeated_calls_are_dropped(answer: list[str | tuple[str, str]], want: list[str | tuple[str, str]]) -> None:
    for seed in range(20):
        parser, deltas = parsed(answer, seed)
        blocks = [block.content if block.call is None else (block.call.name, block.content) for block in parser.blocks]
        assert blocks == want
        numbers = [block.call.index for block in parser.blocks if block.call]
        assert numbers == [*range(len(numbers))]
        streamed = dict[int, str]()
        for delta in deltas:
            streamed[delta.block.number] = streamed.get(delta.block.number, "") + delta.content
        assert [*streamed.values()] == [block.content for block in parser.blocks]


def test_a_call_is_streamed_as_soon_as_it_differs() -> None:
    parts: list[Part] = [CallPart(0, "", "0", "f"), CallPart(0, '{"a": 1}'), CallPart(1, "", "1", "f")]
    parts += [CallPart(1, '{"a": '), CallPart(1, "2"), CallPart(1, "3}")]
    parser = AnswerParser(Reader(parts))
    found = [[delta.content for delta in parser.parse([Piece(0, "x")])] for _ in parts]
    assert found == [[""], ['{"a": 1}'], [], [], ["", '{"a": 2'], ["3}"]]


FUNCTIONS = [(number, Function(name=name)) for number, name in enumerate("fg")]


@pytest.mark.parametrize(
    ("choice", "parallel", "several"),
    [
        (None, None, True),
        ("auto", None, True),
        ("auto", False, False),
        ("required", None, False),
        ("required", True, True),
        ("any", None, False),
        ({"type": "any"}, None, False),
        ({"type": "any", "disable_parallel_tool_use": False}, None, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, None, False),
        ({"type": "function", "name": "f"}, True, False),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"name": "f"}]}, None, False),
    ],
    ids=str,
)
def test_a_required_call_is_one_unless_several_are_asked_for(choice: Any, parallel: bool | None, several: bool) -> None:
    value = ToolChoice.model_validate(choice) if isinstance(choice, dict) else choice
    assert ToolUse.of(FUNCTIONS, value, parallel=parallel).allows_multiple == several


def test_an_answer_that_ends_within_a_repetition_ends_with_calls() -> None:
    """``max_tokens`` may cut the repetition; what came before is complete."""
    parts: list[Part] = [
        CallPart(0, "", "0", "f"),
        CallPart(0, '{"a": 1}'),
        CallPart(1, "", "1", "f"),
        CallPart(1, '{"a'),
    ]
    reader = Reader(parts)
    parser = AnswerParser(reader)
    done = Completion("", [0], "length", None, 0, [0], None, None, Stats())
    for number in range(len(parts)):
        reader.in_call = number == len(parts) - 1
        parser.parse([Piece(0, "x", completion=done if reader.in_call else None)])
    assert [block.content for block in parser.blocks] == ['{"a": 1}']
    assert parser.ends_with_call(done)


@pytest.mark.parametrize(
    ("parameters", "dropped"),
    [
        (True, []),
        (False, []),
        (None, []),
        ({"type": "string"}, ["tools[0].function.parameters.type"]),
        ({"type": "null"}, ["tools[0].function.parameters.type"]),
        ({"type": "array", "items": {}}, ["tools[0].function.parameters.type"]),
    ],
    ids=str,
)
def test_schemas_that_no_arguments_fit_are_left_out(parameters: Any, dropped: list[str]) -> None:
    """Agents cannot change the tools of the servers that they ask."""
    tool = FunctionTool.model_validate({"type": "function", "function": {"name": "f", "parameters": parameters}})
    use = ToolUse.of([(("tools", 0, "function", "parameters"), tool.function)], "auto")
    assert use.not_enforced() == dropped
