"""Calls of one answer: no call twice, at most sixteen, whatever the model writes and however it
is cut.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from pronk.engine.outputs import Completion, Piece
from pronk.engine.stats import Stats
from pronk.server.protocol.answers import AnswerParser, Delta
from pronk.server.protocol.tools import Function, FunctionTool, ToolChoice, ToolUse
from pronk.text.chat.answer_grammar import MAX_CALLS
from pronk.text.chat.answers import AnswerReader, RepeatedCalls
from pronk.text.chat.calls import CallPart
from server.serving import Running, running
from server.tool_models import FEW_LAYERS, tool_model

Part = str | CallPart
A = ("f", '{"a": 1}')
AB = ("f", '{"a": 12}')
B = ("g", '{"a": 1}')


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
    parser = AnswerParser(Reader(parts))
    deltas = list[Delta]()
    for number in range(len(parts)):
        done = (
            Completion("", [0], "stop", None, 0, [0], None, None, Stats())
            if number + 1 == len(parts)
            else None
        )
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
        (
            [("f", f'{{"a": {number}}}') for number in range(30)],
            [("f", f'{{"a": {n}}}') for n in range(MAX_CALLS)],
        ),
    ],
    ids=str,
)
def test_repeated_calls_are_dropped(
    answer: list[str | tuple[str, str]], want: list[str | tuple[str, str]]
) -> None:
    for seed in range(20):
        parser, deltas = parsed(answer, seed)
        blocks = [
            block.content if block.call is None else (block.call.name, block.content)
            for block in parser.blocks
        ]
        assert blocks == want
        numbers = [block.call.index for block in parser.blocks if block.call]
        assert numbers == [*range(len(numbers))]
        streamed = dict[int, str]()
        for delta in deltas:
            streamed[delta.block.number] = streamed.get(delta.block.number, "") + delta.content
        assert [*streamed.values()] == [block.content for block in parser.blocks]


def test_a_call_is_streamed_as_soon_as_it_differs() -> None:
    parts: list[Part] = [
        CallPart(0, "", "0", "f"),
        CallPart(0, '{"a": 1}'),
        CallPart(1, "", "1", "f"),
    ]
    parts += [CallPart(1, '{"a": '), CallPart(1, "2"), CallPart(1, "3}")]
    parser = AnswerParser(Reader(parts))
    found = [[delta.content for delta in parser.parse([Piece(0, "x")])] for _ in parts]
    assert found == [[""], ['{"a": 1}'], [], [], ["", '{"a": 2'], ["3}"]]


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        ([A], None),
        ([A, A], 1),
        ([A, A, A], 1),
        ([A, B, A, B], 2),
        ([A, AB, A], 2),
        ([AB, A], None),
        ([A, "text", A, "more"], 2),
        ([A, ("f", "{}"), ("f", "{}")], 2),
        ([A, ("f", '{"a": 2')], None),
        ([("f", f'{{"a": {number}}}') for number in range(MAX_CALLS)], None),
        ([("f", f'{{"a": {number}}}') for number in range(MAX_CALLS + 1)], MAX_CALLS),
    ],
    ids=str,
)
def test_an_answer_ends_with_its_first_repetition(
    answer: list[str | tuple[str, str]], end: int | None
) -> None:
    """``end`` is the number of the text or call that completes it; a call too many ends with its
    name.
    """
    for seed in range(20):
        parts = parts_of(answer, random.Random(seed))
        reader = Reader(parts)
        reader.in_call = True  # a call ends with what follows it
        calls = RepeatedCalls(reader)
        found = next((number for number in range(len(parts)) if calls.push("x", 0)), None)
        ends = [
            len(parts_of(answer[: number + 1], random.Random(seed))) - 1
            for number in range(len(answer))
        ]
        if end == MAX_CALLS:
            assert found == ends[end - 1] + 1
        else:
            assert found == (None if end is None else ends[end])


ONE_CALL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"a": {"const": 1}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module", params=["hermes", "mistral list", "mistral"])
def tooled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "_"))
    with running(tool_model(folder, request.param, FEW_LAYERS)) as made:
        yield made


def body(made: Running, **fields: Any) -> dict[str, Any]:
    """Return a request that has to call ``f``, whose arguments are always the same, and likes to
    begin calls.
    """
    marker = made.llm.tokenizer.backend.token_to_id("[TOOL_CALLS]")
    return {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [ONE_CALL],
        "tool_choice": "required",
        "parallel_tool_calls": True,
        "logit_bias": {} if marker is None else {str(marker): 100},
        "max_tokens": 400,
        "temperature": 1.0,
        "seed": 3,
        **fields,
    }


def ask(made: Running, **fields: Any) -> dict[str, Any]:
    with made.client() as client:
        answer = client.post("/v1/chat/completions", json=body(made, **fields))
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def calls_of(reply: dict[str, Any]) -> list[list[tuple[str, str]]]:
    return [
        [
            (call["function"]["name"], call["function"]["arguments"])
            for call in choice["message"]["tool_calls"]
        ]
        for choice in reply["choices"]
    ]


@pytest.mark.few(2)
@pytest.mark.parametrize("guide_mode", ["forced", "plain"])
def test_generation_ends_with_the_first_repetition(
    tooled: Running, monkeypatch: pytest.MonkeyPatch, guide_mode: str
) -> None:
    """With every drafter after the same token, as samples end one by one; the calls are those
    without the end.
    """
    replies = [
        ask(tooled, n=4, drafter=drafter, guide_mode=guide_mode)
        for drafter in ("autoregressive", "suffix", "recycling", "prompt_lookup")
    ]
    for reply in replies:
        assert calls_of(reply) == [[("f", '{"a": 1}')]] * 4
        assert [choice["finish_reason"] for choice in reply["choices"]] == ["tool_calls"] * 4
        assert reply["usage"]["completion_tokens"] == replies[0]["usage"]["completion_tokens"]
    monkeypatch.setattr(RepeatedCalls, "push", lambda *_: False)
    without = ask(tooled, n=4, drafter="suffix", guide_mode=guide_mode)
    assert calls_of(without) == calls_of(replies[0])
    assert without["usage"]["completion_tokens"] > replies[0]["usage"]["completion_tokens"]


def test_a_stream_ends_with_the_first_repetition(tooled: Running) -> None:
    whole = ask(tooled)
    streamed = body(tooled, stream=True, stream_options={"include_usage": True})
    with tooled.client() as client:
        text = client.post("/v1/chat/completions", json=streamed).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["name"] for call in calls if "name" in call] == ["f"]
    assert "".join(call["arguments"] for call in calls) == '{"a": 1}'
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


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
def test_a_required_call_is_one_unless_several_are_asked_for(
    choice: Any, parallel: bool | None, several: bool
) -> None:
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
    tool = FunctionTool.model_validate(
        {"type": "function", "function": {"name": "f", "parameters": parameters}}
    )
    use = ToolUse.of([(("tools", 0, "function", "parameters"), tool.function)], "auto")
    assert use.not_enforced() == dropped
