"""Scores of tool calls by BFCL's possible answers."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

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
