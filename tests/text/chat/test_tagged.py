"""Arguments between tags: types by the schema, streaming, guides, and calls as earlier messages."""

import json
import random
from typing import Any

import numpy as np
import pytest

from pronk.text.chat.answer_grammar import arguments_schema, relax_arguments
from pronk.text.chat.answers import AnswerFormat, Part
from pronk.text.chat.calls import CallPart
from pronk.text.guide import Guide
from pronk.text.tokenizer import Tokenizer
from text.chat.test_tools import grammars_of, pieces_of, random_text
from text.chat.tool_templates import tool_tokenizer

FAMILIES = ("parameters", "arg_key")
EITHER = {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "integer"}]}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "exact": {"type": "boolean"},
        "place": {"type": "object"},
        "days": {"type": "array", "items": {"type": "string"}},
        "unit": {"$ref": "#/$defs/unit"},
        "either": EITHER,
        "any": {},
    },
    "required": ["text"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["°C", "K"]}},
}
SCHEMA = arguments_schema(PARAMETERS)


def parsed(family: str, tokens: bool, answer: str, size: int = 10**6) -> list[Part]:
    """Return the parts of an answer that arrives in pieces of ``size`` characters."""
    form = AnswerFormat(tool_tokenizer(family, tokens=tokens))
    reader = form.reader({"f": SCHEMA}, opened=False)
    parts = list[Part]()
    for text, token in pieces_of(form.tokenizer, answer):
        for at in range(0, len(text), size):
            parts += reader.push(text[at : at + size])
        if token is not None:
            parts += reader.push("", token)
    return [*parts, *reader.flush()]


def arguments_of(parts: list[Part]) -> str:
    """Return the arguments of the only call of an answer."""
    assert all(isinstance(part, CallPart) for part in parts)
    return "".join(part.arguments for part in parts if isinstance(part, CallPart))


def write(family: str, arguments: dict[str, str]) -> str:
    """Return a call with the given texts of arguments."""
    if family == "parameters":
        written = [
            f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in arguments.items()
        ]
        return f"<tool_call>\n<function=f>\n{''.join(written)}</function>\n</tool_call>"
    written = [
        f"<arg_key>{name}</arg_key><arg_value>{text}</arg_value>"
        for name, text in arguments.items()
    ]
    return f"<tool_call>f{''.join(written)}</tool_call>"


TEXTS = [
    ("text", "5", "5"),
    ("text", "true", "true"),
    ("text", "", ""),
    ("text", '  a\n"b" \\ </par </arg_valu\n', '  a\n"b" \\ </par </arg_valu\n'),
    ("count", "5", 5),
    ("count", "five", "five"),
    ("ratio", "2", 2),
    ("ratio", "-2.5e3", -2500.0),
    ("exact", "true", True),
    ("exact", "False", False),
    ("place", '{"a": [1, "}"]}', {"a": [1, "}"]}),
    ("days", '["é"]', ["é"]),
    ("unit", "°C", "°C"),
    ("either", "7", 7),
    ("either", "null", None),
    ("either", "7.5", "7.5"),
    ("either", '"7"', '"7"'),
    ("either", "seven", "seven"),
    ("any", "[1]", [1]),
    ("any", "one", "one"),
    ("unknown", "1", 1),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("name", "text", "value"), TEXTS)
def test_the_type_of_a_value_follows_from_the_schema(
    family: str, name: str, text: str, value: object
) -> None:
    written = write(family, {name: text, "count": "1"})
    expected = json.dumps({name: value, "count": 1}, ensure_ascii=False)
    if name == "count":
        written = write(family, {name: text})
        expected = json.dumps({name: value}, ensure_ascii=False)
    for size in (1, 4, 10**6):
        assert arguments_of(parsed(family, True, written, size)) == expected


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("family", FAMILIES)
def test_own_calls_are_read_as_they_were_written_however_they_are_cut(
    family: str, tokens: bool
) -> None:
    """The template writes random arguments, and the reader finds the same arguments again."""
    dice = random.Random(5)
    words = [
        "a",
        "\n",
        " ",
        '"',
        "\\",
        "<",
        "</",
        "parameter>",
        "é",
        "{",
        "5",
        "true",
        "null",
        "😀",
    ]
    tokenizer = tool_tokenizer(family, tokens=tokens)
    question = {"role": "user", "content": "?"}
    before = tokenizer.chat([question], tools=[])
    seen = set[str]()
    for _ in range(25):
        text = "".join(dice.choices(words, k=dice.randint(0, 12)))
        given: dict[str, Any] = {
            "text": text.replace("</parameter>", ""),  # a text cannot contain the tag after it
            "count": dice.randint(-9, 9),
            "exact": dice.random() < 0.5,
            "place": {text: [text, None, 1.5]},
            "either": dice.choice([None, 3, "x"]),
        }
        arguments = {name: given[name] for name in dice.sample([*given], dice.randint(0, 5))}
        call = {"id": "0", "type": "function", "function": {"name": "f", "arguments": arguments}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        if family == "parameters" and None in arguments.values():
            continue  # the template writes null as Python does
        prompt = tokenizer.chat([question, answer], tools=[], add_generation_prompt=False)
        written = prompt.removeprefix(before).removesuffix("<|im_end|>\n")
        whole = arguments_of(parsed(family, tokens, written))
        assert whole == json.dumps(arguments, ensure_ascii=False)
        for size in (1, dice.randint(2, 9)):
            assert arguments_of(parsed(family, tokens, written, size)) == whole
        seen |= {*arguments}
    assert seen == {"text", "count", "exact", "place", "either"}


def test_strings_are_streamed_while_they_are_written() -> None:
    form = AnswerFormat(tool_tokenizer("parameters", tokens=False))
    reader = form.reader({"f": SCHEMA}, opened=False)
    reader.push("<tool_call>\n<function=f>\n<parameter=text>\n")
    given = [
        ("a", "a"),
        ('"\n', '\\"'),
        ("</para", ""),
        ("x", "\\n</parax"),
        ("\n</parameter>", '"'),
    ]
    for text, written in given:
        parts = reader.push(text)
        assert arguments_of(parts) == written
    assert arguments_of(reader.push("\n<parameter=count>\n1")) == ', "count": '
    assert arguments_of(reader.push("2\n</parameter>")) == "12"
    assert arguments_of(reader.push("\n</function>\n</tool_call>")) == "}"


def random_call(tokenizer: Tokenizer, guide: Guide, seed: int, tag: str) -> list[int]:
    """Draw random tokens that a guide allows; write ``tag`` often, as random text rarely does."""
    dice = random.Random(seed)
    follower = grammars_of(tokenizer).compile(guide).new_processor()
    tokens = list[int]()
    while len(tokens) < 400:
        allowed = np.flatnonzero(np.isfinite(follower.mask(np.zeros(tokenizer.vocab_size))))
        drawn = [int(dice.choice(allowed))]
        if dice.random() < 0.2:
            drawn = tokenizer.encode(tag, add_special_tokens=False)
        for token in drawn:
            if not follower.allows(token):
                break
            if token == 0:
                return tokens
            tokens.append(token)
            follower.advance(token)
    return tokens


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("family", "tag"), [("parameters", "\n</parameter>"), ("arg_key", "</arg_value>")]
)
def test_forced_calls_fit_the_schema(family: str, tag: str, tokens: bool) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    tokenizer = tool_tokenizer(family, tokens=tokens)
    grammar = AnswerFormat(tokenizer).grammar(tools=True)
    guide = grammar.guide({"f": SCHEMA}, allow_text=False, allow_multiple=False)
    assert guide is not None
    num_whole = 0
    names = set[str]()
    for seed in range(16):
        ids = random_call(tokenizer, guide, seed, tag)
        if len(ids) >= 400:
            continue
        num_whole += 1
        text = tokenizer.decode(ids, skip_special_tokens=False)
        arguments = json.loads(arguments_of(parsed(family, tokens, text)))
        jsonschema.validate(arguments, PARAMETERS)
        names |= {*arguments}
    assert num_whole >= 4
    assert len(names) >= 5


def test_values_that_the_schema_lists_are_forced() -> None:
    tokenizer = tool_tokenizer("arg_key")
    schema = {
        "properties": {"unit": {"enum": ["°C", "K", 3, None]}, "kind": {"const": "a b"}},
        "required": ["unit", "kind"],
    }
    answers = AnswerFormat(tokenizer)
    schemas = {"f": arguments_schema(schema)}
    guide = answers.grammar(tools=True).guide(schemas, allow_text=False)
    assert guide is not None
    seen = set[str]()
    for seed in range(40):
        tokens = random_text(tokenizer, guide, seed, {})
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        reader = answers.reader(schemas, opened=False)
        parts = list[Part]()
        for piece, token in pieces_of(tokenizer, text):
            parts += reader.push(piece, token)
        seen.add(arguments_of([*parts, *reader.flush()]).split("}")[0])
    units = ('"°C"', '"K"', "3", "null")
    assert seen == {f'{{"unit": {unit}, "kind": "a b"' for unit in units}


@pytest.mark.parametrize(
    ("schema", "left_out"),
    [
        ({"properties": {"a": {"type": "string"}, "b": {"type": "integer", "minimum": 1}}}, []),
        ({"properties": {"a": {"type": "string", "pattern": "^x"}}}, ["properties.a"]),
        ({"properties": {"a": {"type": "string", "minLength": 1}}}, ["properties.a"]),
        ({"properties": {"a": {"enum": ["x", "y"]}, "b": {}, "c": EITHER}}, []),
        ({"properties": {"a": {"anyOf": [{"type": "string"}, {"minimum": 1}]}}}, ["properties.a"]),
        ({"properties": {"a": {"enum": ["</arg_value>"]}}}, ["properties.a"]),
        ({"properties": {"a<": {"type": "integer"}}}, ["properties.a<"]),
    ],
)
def test_keywords_that_tags_cannot_enforce(schema: dict[str, Any], left_out: list[str]) -> None:
    answers = AnswerFormat(tool_tokenizer("arg_key"))
    relaxed = relax_arguments(schema).schema
    syntax = answers.grammar(tools=True).dialect
    assert syntax is not None
    assert syntax.arguments.not_followed(relaxed) == left_out
    guide = answers.grammar(tools=True).guide({"f": json.dumps(relaxed)})
    assert guide is not None
    grammars_of(answers.tokenizer).compile(guide)


def test_long_values_are_read_in_linear_time() -> None:
    for name, text in (("text", "</parameter" * 1_000), ("place", '{"a": "' + "x" * 10_000)):
        written = write("parameters", {name: text})
        whole = arguments_of(parsed("parameters", False, written))
        assert arguments_of(parsed("parameters", False, written, 1)) == whole
