"""Scores of tool calls by BFCL's possible answers."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
EXPECTED: list[dict[str, Any]] = [
    {"math.add": {"a": [1], "unit": ["m", ""]}},
    {"math.add": {"a": [2], "unit": ["k-m"]}},
]
ONE = ("math_add", {"a": 1})
TWO = ("math_add", {"a": 2, "unit": "K M"})


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "tool_calls", raising=False)
    return importlib.import_module("tool_calls")


@pytest.mark.parametrize(
    ("calls", "right"),
    [
        ([ONE, TWO], True),
        ([TWO, ONE], True),
        ([ONE], False),
        ([ONE, ONE], False),
        ([ONE, ("math_add", {"a": 2})], False),
        ([ONE, ("math_add", {"a": 2, "unit": "km", "more": 1})], False),
        ([("math_add", {"a": True}), TWO], False),
        ([("math_add", "{"), TWO], False),
    ],
)
def test_right_calls(script: ModuleType, calls: list[Any], right: bool) -> None:
    assert script.is_right(calls, EXPECTED) is right


def test_schemas_of_python_become_those_of_json(script: ModuleType) -> None:
    schema = {"type": "dict", "properties": {"a": {"type": "float"}, "b": {"type": "any"}}}
    schema["required"] = ["a"]
    converted = script.json_schema(schema)
    assert converted["properties"] == {"a": {"type": "number"}, "b": {}}
    tools = [{"function": {"name": "f", "parameters": converted}}]
    assert script.is_valid([("f", {"a": 1.5})], tools)
    for calls in ([], [("g", {"a": 1.5})], [("f", {})], [("f", "{")]):
        assert not script.is_valid(calls, tools)


def test_counts_become_a_table(script: ModuleType) -> None:
    tool = {"function": {"name": "math_add", "parameters": {"type": "object"}}}
    call = {"function": {"name": "math_add", "arguments": '{"a": 1}'}}
    cases = list[dict[str, Any]]()
    for kind, expected in (("simple_python", EXPECTED[:1]), ("parallel", EXPECTED)):
        cases.append({"id": f"{kind}_0", "tools": [tool], "expected": expected})
    answers = {(case["id"], "required"): {"tool_calls": [call]} for case in cases}
    counts = script.count_results(cases, answers, ["required"])
    *_, row = script.as_table(counts, ["required"]).splitlines()
    assert row == "| `required` | 2 of 2 | 2 of 2 | 1 of 1 | 0 of 1 |"


@pytest.mark.parametrize("begin", ["", "<tool_call>\n"])
def test_an_answer_begins_with_the_given_text(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, begin: str
) -> None:
    bodies = list[dict[str, Any]]()

    def post(url: str, **options: Any) -> httpx.Response:
        bodies.append(options["json"])
        reply = {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]}
        return httpx.Response(200, json=reply, request=httpx.Request("POST", url))

    monkeypatch.setattr(script.httpx, "post", post)
    case = {"id": "simple_python_0", "messages": [{"role": "user", "content": "b"}], "tools": []}
    script.ask("http://x/v1", "m", case, "required", 5, begin)
    own = [{"role": "assistant", "content": begin}] if begin else []
    assert bodies[0]["messages"] == [*case["messages"], *own]
