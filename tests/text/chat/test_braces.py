"""Arguments in Gemma 4's syntax, and the ids of calls that Kimi K2 writes."""

import json
import random
from typing import Any

import pytest

from pronk.text.chat.answer_grammar import arguments_schema, relax_arguments
from pronk.text.chat.answers import AnswerFormat
from pronk.text.chat.braces import BraceArguments, BraceSyntax, write
from pronk.text.chat.symbols import TokenSymbols
from text.chat.test_tools import grammars_of
from text.chat.tool_templates import tool_tokenizer

QUESTION = {"role": "user", "content": "?"}


def called(name: str, arguments: dict[str, Any], ident: str) -> dict[str, Any]:
    """Return a call in OpenAI's format."""
    return {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}


def random_value(dice: random.Random, depth: int = 0) -> Any:
    words = ["a", ",", ":", "{", "]", '"', "\\", "\n", "é", "<|", '<|"', " "]
    text = "".join(dice.choices(words, k=dice.randint(0, 6))).replace('<|"|>', "")
    if depth > 2 or dice.random() < 0.5:
        return dice.choice([text, text, dice.randint(-9, 99), -2.5, True, False, None])
    if dice.random() < 0.5:
        return [random_value(dice, depth + 1) for _ in range(dice.randint(0, 3))]
    return {name: random_value(dice, depth + 1) for name in sorted(dice.sample("abcdef", 3))}


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
def test_arguments_are_read_as_the_template_writes_them_however_they_are_cut(tokens: bool) -> None:
    dice = random.Random(7)
    tokenizer = tool_tokenizer("gemma", tokens=tokens)
    symbols = TokenSymbols(tokenizer)
    seen = set[type]()
    for _ in range(60):
        arguments = {name: random_value(dice) for name in sorted(dice.sample("uvwxyz", 3))}
        seen |= {type(value) for value in arguments.values()}
        answer = {"role": "assistant", "content": "", "tool_calls": [called("f", arguments, "0")]}
        prompt = tokenizer.chat([QUESTION, answer], add_generation_prompt=False)
        written = prompt.partition("call:f{")[2].removesuffix("<tool_call|>")
        assert written == write(arguments).removeprefix("{")
        text = symbols.of_text(written)
        for size in (1, dice.randint(2, 9), 10**6):
            reader = BraceArguments(symbols)
            read = "".join(
                reader.read(text[at : at + size], 0)[1] for at in range(0, len(text), size)
            )
            assert reader.found
            assert read == json.dumps(arguments, ensure_ascii=False)
    assert seen == {str, int, float, bool, type(None), list, dict}


def test_what_follows_the_closing_brace_is_not_read() -> None:
    reader = BraceArguments(TokenSymbols(tool_tokenizer("gemma", tokens=False)))
    assert reader.read("a:[1,{b:2}]}<tool_call|>", 0) == (12, '{"a": [1, {"b": 2}]}')


SCHEMA = {
    "properties": {
        "unit": {"enum": ["K", "°C"]},
        "days": {"type": "array", "items": {"type": "integer", "maximum": 9}},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["unit"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "inside": {"$ref": "#/$defs/place"}},
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ('unit:<|"|>K<|"|>}', True),
        ('unit:<|"|>M<|"|>}', False),
        ("}", False),
        ('unit:<|"|>°C<|"|>,days:[]}', True),
        ('unit:<|"|>°C<|"|>,days:[1,9]}', True),
        ('unit:<|"|>°C<|"|>,days:[10]}', False),
        ('unit:<|"|>K<|"|>,place:{name:<|"|>a,}"<|"|>}}', True),
        ('unit:<|"|>K<|"|>,place:{name:<|"|><|"|>,inside:{name:<|"|>b<|"|>}}}', True),
        ('unit:<|"|>K<|"|>,place:{inside:{name:<|"|>b<|"|>}}}', False),
        ('unit:<|"|>K<|"|>,more:1}', False),
    ],
)
@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
def test_the_grammar_allows_what_fits_the_schema(text: str, is_allowed: bool, tokens: bool) -> None:
    tokenizer = tool_tokenizer("gemma", tokens=tokens)
    grammar = AnswerFormat(tokenizer).grammar(tools=True)
    schemas = {"f": arguments_schema(SCHEMA)}
    guide = grammar.guide(schemas, allow_text=False, allow_multiple=False)
    assert guide is not None
    follower = grammars_of(tokenizer).compile(guide).new_processor()
    written = f"<|tool_call>call:f{{{text}<tool_call|>"
    allowed = True
    for token in tokenizer.encode(written, add_special_tokens=False):
        allowed = follower.allows(token)
        if not allowed:
            break
        follower.advance(token)
    assert allowed == is_allowed
    assert follower.allows(0) == is_allowed


def test_keywords_that_the_syntax_cannot_enforce() -> None:
    schema = {
        "properties": {
            "a": {"type": "string", "minLength": 1},
            "b": {"type": "array", "items": {"type": "string"}, "minItems": 1},
            "c": {"type": "integer", "minimum": 1},
            "d e": {},
        }
    }
    relaxed = relax_arguments(schema).schema
    left_out = ["properties.d e", "properties.a", "properties.b"]
    assert BraceSyntax().not_followed(relaxed) == left_out


def test_ids_of_calls_become_those_of_kimi() -> None:
    tokenizer = tool_tokenizer("kimi")
    calls = [called("f", {}, "call_a"), called("g", {"x": 1}, "call_b")]
    later = [called("f", {"x": 2}, "call_c")]
    prompt = tokenizer.chat(
        [
            QUESTION,
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "call_b", "content": "B"},
            {"role": "assistant", "content": "", "tool_calls": later},
            {"role": "tool", "tool_call_id": "call_c", "content": "C"},
        ]
    )
    for ident in ("functions.f:0", "functions.g:1", "functions.f:2"):
        assert f"<|tool_call_begin|>{ident}<|tool_call_argument_begin|>" in prompt
    assert "## Return of functions.g:1\nB" in prompt
    assert "## Return of functions.f:2\nC" in prompt
    assert "call_" not in prompt.replace("<|tool_call_", "")
    assert calls[0]["id"] == "call_a"
