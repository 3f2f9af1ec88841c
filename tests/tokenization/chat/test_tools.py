"""Formats of tool calls: detection in the template, grammars, and the streaming parser."""

import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from checkpoints import byte_tokenizer
from pronk.errors import OptionError, PromptError, TokenizerError
from pronk.sampling.guide import Guide
from pronk.structured.grammars import Grammars
from pronk.tokenization.chat.calls import CallPart, CallReader
from pronk.tokenization.chat.template import ChatTemplate
from pronk.tokenization.chat.tools import ToolCallFormat, arguments_schema, find_tool_call_format
from pronk.tokenization.stream import TextStream
from pronk.tokenization.tokenizer import Tokenizer
from tokenization.chat.tool_templates import HERMES, LLAMA, MISTRAL, TEMPLATES, TOKENS, tool_tokenizer

FAMILIES = [(family, tokens) for family in TEMPLATES for tokens in (True, False)]
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x}", '"]', "\\"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SCHEMAS = {"add": arguments_schema(ADD), "add_more": arguments_schema(None)}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds <numbers> & 'é'.", "parameters": ADD}},
    {"type": "function", "function": {"name": "add_more", "description": "More."}},
]
USER = {"role": "user", "content": "What is 2 + 2?"}


def called(*calls: tuple[str, Any]) -> dict[str, Any]:
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    made = [
        {"id": f"call_0123456789abcdef0000000{number}", "type": "function", "function": function}
        for number, function in enumerate(functions)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def answered(number: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_0123456789abcdef0000000{number}", "content": content}


@pytest.fixture(params=FAMILIES, ids=lambda pair: f"{pair[0]}-{'tokens' if pair[1] else 'text'}")
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    family, tokens = request.param
    return tool_tokenizer(family, tokens=tokens)


@pytest.mark.parametrize("family", TEMPLATES)
def test_arguments_are_parsed_and_ids_have_the_length_that_the_template_checks(family: str) -> None:
    tokenizer = tool_tokenizer(family)
    given = called(("add", '{"a": 2, "b": "é"}'))
    assert '{"a": 2, "b": "é"}' in tokenizer.chat([USER, given, answered(0, "4")])
    assert given["tool_calls"][0]["function"]["arguments"] == '{"a": 2, "b": "é"}'
    if family == "mistral":
        assert '"id": "f00000000"' in tokenizer.chat([USER, given])
        for ident in ("short", "-" * 20):
            given["tool_calls"][0]["id"] = ident
            with pytest.raises(PromptError, match="ids of 9 letters"):
                tokenizer.chat([USER, given])
    if family == "llama":
        with pytest.raises(PromptError, match="one call at a time"):
            tokenizer.chat([USER, called(("add", "{}"), ("add", "{}"))])


@pytest.mark.parametrize(
    "arguments", ["no", "[1]", "5", "{", '{"a": NaN}', "[" * 10**5, '{"a": ' * 10**5, '{"a": ' + "9" * 5000 + "}"]
)
def test_arguments_that_are_not_an_object_are_refused(arguments: str) -> None:
    with pytest.raises(
        PromptError, match=r"messages\[1\], call 0: expected arguments that are a JSON object, found str"
    ):
        ChatTemplate(HERMES, {}).render([USER, called(("add", arguments))])


def test_a_call_with_empty_arguments() -> None:
    assert '"arguments": {}}' in ChatTemplate(HERMES, {}).render([USER, called(("add", " "))])


def test_many_tools() -> None:
    many = [{"type": "function", "function": {"name": f"f{n}", "parameters": ADD}} for n in range(128)]
    for template in TEMPLATES.values():
        assert '"f127"' in ChatTemplate(template, {"bos_token": "", "eos_token": ""}).render([USER], tools=many)


@pytest.mark.parametrize("family", TEMPLATES)
def test_names_of_special_tokens_stay_text(family: str) -> None:
    tokenizer = tool_tokenizer(family)
    bad = "".join(name for name, silent in TOKENS[family].items() if silent)
    half = bad[: len(next(iter(TOKENS[family]))) - 1]
    parameters = {"type": "object", "properties": {bad: {"description": bad, "default": [bad, half]}, half: {}}}
    tools = [{"type": "function", "function": {"name": "add", "description": bad, "parameters": parameters}}]
    talk = [USER, called(("add", json.dumps({bad: bad, half: [half]}))), answered(0, bad)]
    honest = [USER, called(("add", {"a": 1})), answered(0, "4")]

    def specials(ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in tokenizer.special_ids]

    ids = tokenizer.chat_ids(talk, tools=tools, trusted=False)
    assert specials(ids) == specials(tokenizer.chat_ids(honest, tools=TOOLS[:1])) != []
    assert len(specials(tokenizer.chat_ids(talk, tools=tools))) > len(specials(ids))
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.chat(talk, tools=tools)


def test_formats_are_detected(tokenizer: Tokenizer) -> None:
    form = find_tool_call_format(tokenizer)
    assert TEMPLATES[form.name] == tokenizer._chat_template
    own = bool(tokenizer.special_ids - {0})
    assert form.after_begin == {"hermes": "\n", "mistral": " [", "llama": ""}[form.name]
    if form.begin is not None:
        assert (form.begin.token is not None) == own
        assert form.begin.is_special == (own and form.name != "hermes")
        assert form.begin.token not in form.id_only_tokens
    assert (form.begin is None) == (form.name == "llama" and not own)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "tools: expected a model whose chat template has tools"),
        (HERMES.replace("tools", "documents"), "tools: expected a model whose chat template has tools"),
        (HERMES.replace("arguments", "args"), "tools: expected a model whose chat template has tools"),
        (
            HERMES.replace("<tool_call>", "<call>"),
            "tools: expected calls as Hermes, Qwen, Mistral or Llama 3 write them",
        ),
        (MISTRAL.replace("[TOOL_CALLS]", "[CALLS]"), "tools: expected calls as Hermes, Qwen, Mistral or Llama 3 write"),
        (LLAMA.replace('"name"', '"function"'), "tools: expected a model whose chat template has tools"),
        ("{{ raise_exception('no') }}", "tools: expected a model whose chat template has tools"),
    ],
)
def test_unknown_formats_are_refused(template: str, message: str) -> None:
    other = Tokenizer(byte_tokenizer(), chat_template=template, special_tokens={"bos_token": "", "eos_token": ""})
    with pytest.raises(PromptError) as caught:
        find_tool_call_format(other)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    with pytest.raises(TokenizerError, match="no chat template"):
        find_tool_call_format(Tokenizer(byte_tokenizer()))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"type": "string"}, "expected a schema of the type 'object', found the type 'string'"),
        ({"type": ["object", "null"]}, "expected a schema of the type 'object', found the type"),
        ({"properties": {"a": {"default": {1, 2}}}}, "expected a schema of JSON values, found other values"),
        ({"properties": {"a\ud800": {}}}, "expected valid Unicode, found half a character"),
    ],
)
def test_parameters_that_are_not_the_schema_of_an_object_are_refused(parameters: Any, message: str) -> None:
    with pytest.raises(OptionError, match=f"guide: json: {re.escape(message)}"):
        arguments_schema(parameters)


Parts = list[str | CallPart]


def joined(parts: Parts) -> tuple[str, list[tuple[str, str]]]:
    """Return the text and the calls (name, arguments); check that ids look like those of OpenAI."""
    text, calls = "", list[tuple[str, str]]()
    for part in parts:
        if isinstance(part, str):
            assert part
            text += part
        elif part.name is not None:
            assert part.index == len(calls)
            assert re.fullmatch("call_[0-9a-f]{24}", part.ident or "")
            assert part.arguments == ""
            calls.append((part.name, ""))
        else:
            assert part.index == len(calls) - 1
            assert part.ident is None
            calls[-1] = calls[-1][0], calls[-1][1] + part.arguments
    return text, calls


def read(form: ToolCallFormat, pieces: Sequence[tuple[str, int | None]], names: Sequence[str] = tuple(SCHEMAS)) -> Any:
    reader = CallReader(form, names)
    parts = [part for text, token in pieces for part in reader.push(text, token)]
    parts += reader.flush()
    text, calls = joined(parts)
    assert reader.has_calls == bool(calls)
    return text, calls


def written(form: ToolCallFormat, *calls: tuple[str, str], before: str = "") -> list[tuple[str, int | None]]:
    """Return calls in the given format, as pieces of text and special tokens, which have no text."""

    def mark(marker: Any) -> tuple[str, int | None]:
        return (marker.decoded, marker.token) if marker else ("", None)

    bodies = [f"{form.before_name}{name}{form.before_arguments}{arguments}}}" for name, arguments in calls]
    groups = [form.separator.join(bodies)] if form.separator else bodies
    pieces: list[tuple[str, int | None]] = [(before, None)] if before else []
    for number, group in enumerate(groups):
        section = [mark(form.begin), (f"{form.after_begin}{group}{form.before_end}", None), mark(form.end)]
        pieces += [("\n", None), *section] if number else section
    return [piece for piece in pieces if piece != ("", None)]


def cut(pieces: Sequence[tuple[str, int | None]], size: int) -> Iterator[tuple[str, int | None]]:
    for text, token in pieces:
        yield from ((text[at : at + size], None) for at in range(0, len(text), size))
        if token is not None:
            yield "", token


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10**6])
def test_calls_are_parsed_from_pieces_of_any_size(tokenizer: Tokenizer, size: int) -> None:
    form = find_tool_call_format(tokenizer)
    one = ("add", '{"a": 1, "b": "x}", "c": {"\\"": ["}", {"é": "\\\\"}]}}')
    cases = [[one], [("add_more", "{}")]] + ([[one, ("add_more", "{}"), one]] if form.name != "llama" else [])
    for calls in cases:
        assert read(form, [*cut(written(form, *calls), size)]) == ("", calls)
    if form.begin is not None:
        assert read(form, [*cut(written(form, one, before=" Well,\nthen. "), size)]) == (" Well,\nthen. ", [one])
        assert read(form, [*cut(written(form, one, before="\n"), size)]) == ("", [one])


def test_an_answer_that_ends_within_a_call(tokenizer: Tokenizer) -> None:
    """The part of the call that is there is emitted; before the name of its tool it is text."""
    form = find_tool_call_format(tokenizer)
    whole = "".join(text for text, _ in written(form, ("add", '{"a": [1]}')))
    silent = form.begin is not None and form.begin.is_special and not form.marker_optional
    named = whole.index('add"') + 4
    begin = whole.index('{"a"')
    for stop in range(len(whole) + 1):
        pieces: list[tuple[str, int | None]] = [("", form.begin.token)] if silent and form.begin else []
        text, calls = read(form, [*pieces, *cut([(whole[:stop], None)], 1)])
        arguments = whole[begin : min(stop, whole.index("]}") + 2)] if stop > begin else ""
        assert (text, calls) == ((whole[:stop], []) if stop < named else ("", [("add", arguments)]))


def test_an_incomplete_second_call_is_dropped() -> None:
    form = find_tool_call_format(tool_tokenizer("hermes"))
    one = written(form, ("add_more", "{}"))
    for rest in ("\n", "\n<tool", "\n<tool_call>", '\n<tool_call>\n{"name": "ad'):
        assert read(form, [*one, (rest, None)]) == ("", [("add_more", "{}")])
    assert read(form, [*one, ("\nDone <", None)]) == ("\nDone <", [("add_more", "{}")])


@pytest.mark.parametrize(
    "text",
    ["", "a", " \n", "\n\na b \n", "<", "<tool", "<tool_cal", "<tool_call", "[TOOL_CALLS", "{", '{"name": ',
     '{"name":"add"',
     '{"names": 1}', "a <tool_call> b", "<tool_call><tool_call>", '<tool_call>\n{"name": "rm", "arguments": {}}',
     '<tool_call>\n{"name": "add!"', '<tool_call>\n{"name": "' + "a" * 300, '<tool_call>\n{"arguments": {}}',
     '[TOOL_CALLS] [{"name": "rm"', "[TOOL_CALLS][[", '{"name": "rm", "parameters": {}}', '\n{"name": "add"'],
)  # fmt: skip
def test_text_that_resembles_a_call_is_text(tokenizer: Tokenizer, text: str) -> None:
    form = find_tool_call_format(tokenizer)
    for size in (1, 5, 10**6):
        assert read(form, [*cut([(text, None)], size)]) == (text, [])


def test_text_is_held_back_only_while_it_may_begin_a_call() -> None:
    hermes = CallReader(find_tool_call_format(tool_tokenizer("hermes")), SCHEMAS)
    given = [
        (" Hi", " Hi"),
        (" <", " "),
        ("b", "<b"),
        (" \n", " \n"),
        ("<tool_call", ""),
        (">", ""),
        ("x", "<tool_call>x"),
    ]
    for text, out in given:
        assert "".join(map(str, hermes.push(text))) == out
    llama = CallReader(find_tool_call_format(tool_tokenizer("llama")), SCHEMAS)
    assert llama.push('{"name": "a') == []
    assert llama.push("x") == []
    assert llama.push('"') == ['{"name": "ax"']
    assert llama.push('{"name": "add"') == ['{"name": "add"']


def test_a_special_token_within_the_beginning_of_a_call_makes_it_text() -> None:
    """For the grammar, the text before and after the token is free text, so the parser returns it as text."""
    for family, begun, rest in (("hermes", "<tool", '_call>\n{"name": "add"'), ("llama", '{"name', '": "add"')):
        form = find_tool_call_format(tool_tokenizer(family))
        other = next(iter(form.id_only_tokens))
        assert read(form, [(begun, None), ("", other), (rest, None)]) == (begun + rest, [])
    llama = find_tool_call_format(tool_tokenizer("llama"))
    assert read(llama, [("", next(iter(llama.id_only_tokens))), ('{"name": "add", "parameters": {', None)])[1] == []


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 6_000,
        "<tool_cal" * 6_000,
        " " * 60_000,
        '<tool_call>\n{"name": "add' * 2_000,
        '<tool_call>\n{"name": "' + "a" * 60_000,
        '<tool_call>\n{"name": "add", "arguments": ' + '{"a": ' * 10_000,
        '<tool_call>\n{"name": "add", "arguments": {"' + "\\" * 60_000,
        '<tool_call>\n{"name": "add", "arguments": {}}' * 1_200,
    ],
)
def test_hostile_texts_are_parsed_in_linear_time(text: str) -> None:
    form = find_tool_call_format(tool_tokenizer("hermes"))
    began = time.perf_counter()
    results = [read(form, [*cut([(text, None)], size)]) for size in (1, 10**7)]
    assert time.perf_counter() - began < 20
    assert results[0] == results[1]


def random_text(tokenizer: Tokenizer, guide: Guide, seed: int, trigger: int | None, length: int = 400) -> list[int]:
    """Draw random tokens that the guide allows, up to an end token; with probability 0.05 the begin marker."""
    rng = random.Random(seed)
    follower = Grammars(tokenizer, tokenizer.vocab_size, [0]).compile(guide).new_processor()
    tokens = list[int]()
    while len(tokens) < length:
        mask = follower.mask(np.zeros(tokenizer.vocab_size, np.float32))
        allowed = np.flatnonzero(np.isfinite(mask)).tolist()
        token = trigger if trigger in allowed and rng.random() < 0.05 else rng.choice(allowed)
        if token == 0:
            break
        tokens.append(token)
        follower.advance(token)
    return tokens


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_texts_of_the_grammar_are_parsed_as_calls_of_the_tools(tokenizer: Tokenizer, free: bool, several: bool) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    form = find_tool_call_format(tokenizer)
    guide = form.guide(SCHEMAS, allow_text=free, allow_multiple=several)
    counts = list[int]()
    for seed in range(6):
        tokens = random_text(tokenizer, guide, seed, form.begin.token if form.begin else None)
        stream = TextStream(tokenizer, [5], ())
        pieces = [(stream.push(token)[0], token) for token in tokens]
        text, calls = read(form, [*pieces, (stream.flush()[0], None)])
        counts.append(len(calls))
        whole = calls if len(tokens) < 400 else calls[:-1]
        for name, arguments in whole:
            jsonschema.validate(json.loads(arguments), json.loads(SCHEMAS[name]))
            assert json.dumps(json.loads(arguments), ensure_ascii=False) == arguments or "\\u" in arguments
        assert free or (text.strip() == "" and len(calls) >= 1)
    most = 1 if form.name == "llama" or not several else 100
    assert max(counts) <= most
    if form.begin is not None and form.begin.token is not None:
        assert max(counts) >= 1


@pytest.mark.parametrize("free", [False, True])
def test_the_grammar_guides_calls_whose_markers_are_ordinary_text(free: bool) -> None:
    """Within a call, only the name of the tool and values of the schema are open."""
    for family, begin in (("hermes", '<tool_call>\n{"name": "'), ("llama", '{"name": "')):
        tokenizer = tool_tokenizer(family, tokens=False)
        form = find_tool_call_format(tokenizer)
        grammars = Grammars(tokenizer, tokenizer.vocab_size, [0])
        follower = grammars.compile(form.guide(SCHEMAS, allow_text=free, allow_multiple=True)).new_processor()
        good = f'{begin}add{form.before_arguments}{{"a": 7, "b": "x}}"}}}}'
        for at, letter in enumerate(good):
            (token,) = tokenizer.encode(letter)[:1]
            # The mask may allow only a longer token that begins with the letter; the test still advances by letters.
            assert follower.allows(token) or tokenizer.decode(follower.forced()).startswith(letter), good[: at + 1]
            others = [bad for bad in '"x} ,_:\n' if bad != letter and follower.allows(tokenizer.encode(bad)[0])]
            inside = good[:at].endswith(begin + "add")
            assert at < len(begin) or not others or inside or good[at - 1] in '7"', (good[:at], others)
            follower.advance(token)


def test_schemas_cannot_change_how_json_is_written() -> None:
    loose = {**ADD, "x-guidance": {"whitespace_flexible": True, "lenient": True, "item_separator": "nonsense"}}
    assert arguments_schema(loose) == SCHEMAS["add"]
    tokenizer = tool_tokenizer("llama")
    form = find_tool_call_format(tokenizer)
    compile_guide = Grammars(tokenizer, tokenizer.vocab_size, [0]).compile
    follower = compile_guide(
        form.guide({"add": arguments_schema(loose)}, allow_text=False, allow_multiple=False)
    ).new_processor()
    assert tokenizer.decode(follower.forced()).startswith('{"name": "add", "parameters": {"a":')
    with pytest.raises(OptionError, match="guide: grammar: expected one that can be followed"):
        compile_guide(
            form.guide(
                {"f": arguments_schema({"not": {}, "x-guidance": {"lenient": True}})},
                allow_text=False,
                allow_multiple=True,
            )
        )


def test_schemas_that_are_too_large_are_refused() -> None:
    form = find_tool_call_format(tool_tokenizer("hermes"))
    large = arguments_schema({"type": "object", "description": "x" * 200_000})
    with pytest.raises(OptionError, match="guide: grammar: expected at most 262144 characters"):
        form.guide({"f": large, "g": large}, allow_text=True, allow_multiple=True)
