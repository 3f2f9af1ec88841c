"""Formats of tool calls: detection in the template, grammars, and the streaming parser."""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import byte_tokenizer
from covering import covering
from pronk.base.errors import OptionError, PromptError, TokenizerError
from pronk.sampling.grammars import Grammars
from pronk.text.chat.answer_grammar import (
    AnswerGrammar,
    arguments_schema,
    relax_arguments,
    relax_tools,
)
from pronk.text.chat.answers import AnswerFormat, AnswerReader
from pronk.text.chat.calls import CallPart
from pronk.text.chat.dialects import TOOL_DIALECTS, find_tool_dialect
from pronk.text.chat.keywords import KeywordArguments, KeywordSyntax, keyword_rules, write_call
from pronk.text.chat.symbols import TokenSymbols
from pronk.text.chat.tagged import TaggedSyntax
from pronk.text.chat.template import ChatTemplate
from pronk.text.guide import Guide
from pronk.text.stream import TextStream
from pronk.text.tokenizer import Tokenizer
from text.chat.tool_templates import (
    HERMES,
    LLAMA,
    MISTRAL,
    NEW_MISTRAL,
    TEMPLATES,
    TOKENS,
    thinking_tokenizer,
    tool_tokenizer,
)
from waiting import processor_limit

FAMILIES = [(family, tokens) for family in TEMPLATES for tokens in (True, False)]
ADD = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"enum": ["x}", '"]', "\\"]},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
SCHEMAS = {"add": arguments_schema(ADD), "add_more": arguments_schema(None)}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds <numbers> & 'é'.", "parameters": ADD},
    },
    {"type": "function", "function": {"name": "add_more", "description": "More."}},
]
USER = {"role": "user", "content": "What is 2 + 2?"}


class Form:
    """Dialect of a tokenizer's chat template, with its grammars and parsers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.row = find_tool_dialect(tokenizer)
        self.symbols = TokenSymbols(tokenizer)
        added = tokenizer.backend.get_added_tokens_decoder()
        self.added = {token.content: token_id for token_id, token in added.items()}
        self.begin = self.added.get(self.row.begin)  # id of the begin marker

    def reader(self) -> AnswerReader:
        return AnswerReader(self.symbols, self.row, None, SCHEMAS)

    def guide(self, schemas: Mapping[str, str], *, allow_text: bool, allow_multiple: bool) -> Guide:
        grammar = AnswerGrammar(self.symbols, self.row, None)
        guide = grammar.guide(schemas, allow_text=allow_text, allow_multiple=allow_multiple)
        assert guide is not None
        return guide

    def call(self, name: str, arguments: str) -> str:
        row = self.row
        if row.name == "lfm2":
            return write_call(name, json.loads(arguments))
        if row.name == "gemma":
            return f"call:{name}{braced(json.loads(arguments))}"
        if row.name == "kimi":
            name = f"{name}:0"
        if isinstance(row.arguments, TaggedSyntax):
            return (
                f"{row.before_name}{name}{row.before_arguments}{tagged(row.arguments, arguments)}"
            )
        return f"{row.before_name}{name}{row.before_arguments}{arguments}{row.after_arguments}"

    def written(self, *calls: tuple[str, str], before: str = "") -> list[tuple[str, int | None]]:
        """Return calls as pieces."""
        row = self.row
        bodies = [self.call(*call) for call in calls]
        groups = bodies if row.separator is None else [row.separator.join(bodies)]
        sections = [
            f"{row.begin}{row.after_begin}{group}{row.before_end}{row.end}" for group in groups
        ]
        return pieces_of(self.tokenizer, before + row.between_calls.join(sections))


def braced(value: Any) -> str:
    """Return a JSON value in the syntax of Gemma 4."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{braced(each)}' for name, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(braced, value))}]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def tagged(tags: TaggedSyntax, arguments: str) -> str:
    """Return arguments between tags, strings without quotation marks."""
    written = ""
    for name, value in json.loads(arguments).items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        written += f"{tags.before_key}{name}{tags.after_key}{text}{tags.before_value_end}"
        written += f"{tags.value_end}{tags.between}"
    return f"{written}{tags.end}"


def pieces_of(tokenizer: Tokenizer, text: str) -> list[tuple[str, int | None]]:
    """Return a text as an engine delivers it: special tokens have ids and no text."""
    added = tokenizer.backend.get_added_tokens_decoder()
    special = {token.content: token_id for token_id, token in added.items() if token.special}
    parts = re.split(f"({'|'.join(map(re.escape, special))})", text)
    return [("", special[part]) if part in special else (part, None) for part in parts if part]


def called(*calls: tuple[str, Any]) -> dict[str, Any]:
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    made = [
        {"id": f"call_0123456789abcdef0000000{number}", "type": "function", "function": function}
        for number, function in enumerate(functions)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def answered(number: int, content: str) -> dict[str, Any]:
    return {
        "role": "tool",
        "tool_call_id": f"call_0123456789abcdef0000000{number}",
        "content": content,
    }


@pytest.fixture(params=FAMILIES, ids=lambda pair: f"{pair[0]}-{'tokens' if pair[1] else 'text'}")
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    family, tokens = request.param
    return tool_tokenizer(family, tokens=tokens)


@pytest.mark.parametrize("family", TEMPLATES)
def test_arguments_are_parsed_and_ids_have_the_length_that_the_template_checks(family: str) -> None:
    tokenizer = tool_tokenizer(family)
    given = called(("add", '{"a": 2, "b": "é"}'))
    own = {
        "gemma": '{a:2,b:<|"|>é<|"|>}',
        "lfm2": '[add(a=2, b="é")]',
        "parameters": "<parameter=a>\n2\n</parameter>\n<parameter=b>\né\n</parameter>\n",
        "arg_key": "</arg_key><arg_value>2</arg_value><arg_key>b</arg_key><arg_value>é</arg_value>",
    }
    written = own.get(family, '{"a": 2, "b": "é"}')
    assert written in tokenizer.chat([USER, given, answered(0, "4")])
    assert given["tool_calls"][0]["function"]["arguments"] == '{"a": 2, "b": "é"}'
    if family == "mistral list":
        assert '"id": "f00000000"' in tokenizer.chat([USER, given])
        for ident in ("short", "-" * 20):
            given["tool_calls"][0]["id"] = ident
            with pytest.raises(PromptError, match="ids of 9 letters"):
                tokenizer.chat([USER, given])
    if family == "llama":
        with pytest.raises(PromptError, match="one call at a time"):
            tokenizer.chat([USER, called(("add", "{}"), ("add", "{}"))])


@pytest.mark.parametrize(
    "arguments",
    [
        "no",
        "[1]",
        "5",
        "{",
        '{"a": NaN}',
        "[" * 10**5,
        '{"a": ' * 10**5,
        '{"a": ' + "9" * 5000 + "}",
    ],
)
def test_arguments_that_are_not_an_object_are_refused(arguments: str) -> None:
    with pytest.raises(
        PromptError,
        match=r"messages\[1\], call 0: expected arguments that are a JSON object, found str",
    ):
        ChatTemplate(HERMES, {}).render([USER, called(("add", arguments))])


def test_a_call_with_empty_arguments() -> None:
    assert '"arguments": {}}' in ChatTemplate(HERMES, {}).render([USER, called(("add", " "))])


def test_many_tools() -> None:
    many = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": ADD}} for n in range(128)
    ]
    for template in TEMPLATES.values():
        assert '"f127"' in ChatTemplate(template, {"bos_token": "", "eos_token": ""}).render(
            [USER], tools=many
        )


@pytest.mark.parametrize("family", TEMPLATES)
def test_names_of_special_tokens_stay_text(family: str) -> None:
    tokenizer = tool_tokenizer(family)
    # JSON escapes the quotation mark in Gemma 4's <|"|>.
    bad = "".join(name for name, silent in TOKENS[family].items() if silent and '"' not in name)
    half = bad[: len(next(iter(TOKENS[family]))) - 1]
    parameters = {
        "type": "object",
        "properties": {bad: {"description": bad, "default": [bad, half]}, half: {}},
    }
    tools = [
        {
            "type": "function",
            "function": {"name": "add", "description": bad, "parameters": parameters},
        }
    ]
    talk = [USER, called(("add", json.dumps({bad: bad, half: [half]}))), answered(0, bad)]
    honest = [USER, called(("add", {"a": 1})), answered(0, "4")]

    # Gemma 4 puts these tokens around each string.
    quotes = {tokenizer.backend.token_to_id('<|"|>')}

    def specials(ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in tokenizer.special_ids - quotes]

    ids = tokenizer.chat_ids(talk, tools=tools, trusted=False)
    assert specials(ids) == specials(tokenizer.chat_ids(honest, tools=TOOLS[:1])) != []
    assert len(specials(tokenizer.chat_ids(talk, tools=tools))) > len(specials(ids))
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.chat(talk, tools=tools)


def test_dialects_are_detected(tokenizer: Tokenizer) -> None:
    row = find_tool_dialect(tokenizer)
    assert TEMPLATES[row.name] == tokenizer.chat_template
    assert row.after_begin == {
        "hermes": "\n",
        "parameters": "\n",
        "granite": "[",
        "mistral list": " [",
        "lfm2": "[",
    }.get(row.name, "")
    assert bool(row.begin) == (
        row.name != "llama" or "<|python_tag|>" in tokenizer.backend.get_vocab()
    )
    assert [each.name for each in TOOL_DIALECTS] == [*TEMPLATES]


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "mistral-nemo"])
def test_dialects_of_published_templates(name: str) -> None:
    source = (Path(__file__).parent / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    row = find_tool_dialect(
        Tokenizer(byte_tokenizer(), chat_template=source, special_tokens=special)
    )
    assert row.name == ("mistral list" if name == "mistral-nemo" else "hermes")
    assert row.after_begin == ("[" if name == "mistral-nemo" else "\n")


TOOL_LIST = "{%- for tool in tools %}{{ tool | string }}{% endfor %}"
TURNS = (
    "{%- for message in messages %}{{ '<' + message.role + '>' + message.content + '\\n' }}{% "
    "endfor %}"
)
CALLED = [USER, called(("add", '{"a": 2}'), ("add_more", "{}")), answered(0, "4")]
HERMES_CALLS = """<tool_call>
{"name": "add", "arguments": {"a": 2}}
</tool_call>
<tool_call>
{"name": "add_more", "arguments": {}}
</tool_call>"""
GRANITE_CALLS = (
    '<|tool_call|>[{"name": "add", "arguments": {"a": 2}}, {"name": "add_more", "arguments": {}}]'
)


@pytest.mark.parametrize(
    ("family", "hint", "name", "calls"),
    [
        (
            "SmolLM3",
            '<tool_call>\\n{"name": <function-name>, "arguments": …}\\n</tool_call>',
            "hermes",
            HERMES_CALLS,
        ),
        ("Granite 3.3", "<|tool_call|> followed by a JSON list", "granite", GRANITE_CALLS),
    ],
)
def test_templates_that_describe_tools_and_write_no_calls(
    family: str, hint: str, name: str, calls: str
) -> None:
    """Calls of earlier messages are written as the template tells the model to write them, after
    their content.
    """
    special = {"bos_token": "", "eos_token": ""}
    for source in (
        TOOL_LIST + "{{- '" + hint + "' }}" + TURNS,
        TOOL_LIST + f"{{# {hint} #}}" + TURNS,
    ):
        tokenizer = Tokenizer(byte_tokenizer(), chat_template=source, special_tokens=special)
        assert find_tool_dialect(tokenizer).name == name
        assert tokenizer.chat(CALLED, tools=TOOLS).endswith(
            f"<user>What is 2 + 2?\n<assistant>{calls}\n<tool>4\n"
        )
        parts = [USER, {**CALLED[1], "content": [{"type": "text", "text": "é"}]}]
        assert tokenizer.chat(parts, tools=TOOLS).endswith(f"<assistant>é\n{calls}\n")
        assert "tool_calls" in CALLED[1]


@pytest.mark.parametrize(
    ("calls", "name", "begin"),
    [
        (
            (
                "{{- '<|tool_call|>' + (calls | map(attribute='function') | list | "
                "tojson(indent=4)) "
                "}}"
            ),
            "granite",
            "[",
        ),
        (
            (
                "{{- '<|tool_call|>' + (calls | map(attribute='function') | list | tojson) + "
                "'<|/tool_call|>' }}"
            ),
            "phi",
            "[",
        ),
        ("{{- '<tool_call>' + (calls[0].function | tojson) + '</tool_call>' }}", "hermes", ""),
    ],
)
def test_calls_as_templates_of_servers_write_them(calls: str, name: str, begin: str) -> None:
    written = "{% set calls = message.tool_calls %}{% if calls %}" + calls + "{% endif %}{% endfor"
    source = TOOL_LIST + TURNS.replace("{% endfor", written)
    row = find_tool_dialect(Tokenizer(byte_tokenizer(), chat_template=source, special_tokens={}))
    assert (row.name, row.after_begin) == (name, begin)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            HERMES.replace("arguments", "args"),
            "tools: expected a model whose chat template has tools",
        ),
        (
            HERMES.replace("<tool_call>", "<call>"),
            (
                "tools: expected calls as Hermes, Qwen, SmolLM3, Granite, Phi, Mistral, Llama 3, "
                "LFM2, GLM, Gemma 4, Kimi, DeepSeek or gpt-oss write"
            ),
        ),
        (MISTRAL.replace("[TOOL_CALLS]", "[CALLS]"), "tools: expected calls as Hermes, Qwen, "),
        (LLAMA.replace('"name"', '"function"'), "tools: expected calls as Hermes, Qwen, "),
        ("{{ raise_exception('no') }}", "tools: expected a model whose chat template has tools"),
    ],
)
def test_unknown_formats_are_refused(template: str, message: str) -> None:
    other = Tokenizer(
        byte_tokenizer(), chat_template=template, special_tokens={"bos_token": "", "eos_token": ""}
    )
    with pytest.raises(PromptError) as caught:
        find_tool_dialect(other)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    with pytest.raises(TokenizerError, match="no chat template"):
        find_tool_dialect(Tokenizer(byte_tokenizer()))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"properties": {"a": {"default": {1, 2}}}},
            "expected a schema of JSON values, found other values",
        ),
        ({"properties": {"a\ud800": {}}}, "expected valid Unicode, found half a character"),
    ],
)
def test_parameters_that_are_no_schema_are_refused(parameters: Any, message: str) -> None:
    with pytest.raises(OptionError, match=f"guide: json: {re.escape(message)}"):
        arguments_schema(parameters)


Parts = list[str | CallPart]


def joined(parts: Parts) -> tuple[str, list[tuple[str, str]]]:
    """Return the text and the calls (name, arguments); check that ids look like those of OpenAI."""
    text = ""
    calls = list[tuple[str, str]]()
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


def read(
    form: Form, pieces: Sequence[tuple[str, int | None]], names: Sequence[str] = tuple(SCHEMAS)
) -> Any:
    schemas = {name: SCHEMAS[name] for name in names}
    reader = AnswerReader(form.symbols, form.row, None, schemas)
    parts = [part for text, token in pieces for part in reader.push(text, token)]
    parts += reader.flush()
    return joined(parts)  # type: ignore[arg-type]


def cut(pieces: Sequence[tuple[str, int | None]], size: int) -> Iterator[tuple[str, int | None]]:
    for text, token in pieces:
        yield from ((text[at : at + size], None) for at in range(0, len(text), size))
        if token is not None:
            yield "", token


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10**6])
def test_calls_are_parsed_from_pieces_of_any_size(tokenizer: Tokenizer, size: int) -> None:
    form = Form(tokenizer)
    one = ("add", '{"a": 1, "b": "x}", "c": {"\\"": ["}", {"é": "\\\\"}]}}')
    several = form.row.name not in ("llama", "channels")
    cases = [[one], [("add_more", "{}")]] + ([[one, ("add_more", "{}"), one]] if several else [])
    for calls in cases:
        assert read(form, [*cut(form.written(*calls), size)]) == ("", calls)
    if form.row.begin and form.row.name != "channels":
        assert read(form, [*cut(form.written(one, before=" Well,\nthen. "), size)]) == (
            " Well,\nthen. ",
            [one],
        )
        assert read(form, [*cut(form.written(one, before="\n"), size)]) == ("", [one])


def test_an_answer_that_ends_within_a_call(tokenizer: Tokenizer) -> None:
    """The part of the call that is there is emitted; before the name of its tool it is text."""
    form = Form(tokenizer)
    pieces = [*cut(form.written(("add", '{"a": [1]}')), 1)]
    named = next(i for i in range(len(pieces) + 1) if read(form, pieces[:i])[1])
    for stop in range(len(pieces) + 1):
        text, calls = read(form, pieces[:stop])
        if stop < named:
            shown = "".join(text for text, _ in pieces[:stop])
            assert calls == []
            # headers are no text
            assert text == shown or (form.row.name == "channels" and not text)
        else:
            ((name, arguments),) = calls
            assert (text, name) == ("", "add")
            assert '{"a": [1]}'.startswith(arguments)
    assert arguments == '{"a": [1]}'


def test_an_incomplete_second_call_is_dropped() -> None:
    form = Form(tool_tokenizer("hermes"))
    one = form.written(("add_more", "{}"))
    for rest in ("\n", "\n<tool", "\n<tool_call>", '\n<tool_call>\n{"name": "ad'):
        assert read(form, [*one, (rest, None)]) == ("", [("add_more", "{}")])
    assert read(form, [*one, ("\nDone <", None)]) == ("\nDone <", [("add_more", "{}")])


@pytest.mark.parametrize(
    "text",
    ["", "a", " \n", "\n\na b \n", "<", "<tool", "<tool_cal", "<tool_call", "[TOOL_CALLS", "{", '{"name": ',
     '{"name":"add"',
     ('{"names": '
     '1}'), "a <tool_call> b", "<tool_call><tool_call>", ('<tool_call>\n{"name": "rm", "arguments": '
         '{}}'),
     ('<tool_call>\n{"name": '
     '"add!"'), '<tool_call>\n{"name": "' + "a" * 300, ('<tool_call>\n{"arguments": '
         '{}}'),
     ('[TOOL_CALLS] [{"name": '
     '"rm"'), "[TOOL_CALLS][[", "[TOOL_CALLS]rm[ARGS]{}", "[TOOL_CALLS]add {}",
     '{"name": "rm", "parameters": {}}', '\n{"name": "add"'],
)  # fmt: skip
def test_text_that_resembles_a_call_is_text(tokenizer: Tokenizer, text: str) -> None:
    form = Form(tokenizer)
    for size in (1, 5, 10**6):
        assert read(form, [*cut([(text, None)], size)]) == (text, [])


def test_text_is_held_back_only_while_it_may_begin_a_call() -> None:
    hermes = Form(tool_tokenizer("hermes")).reader()
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
    llama = Form(tool_tokenizer("llama")).reader()
    assert llama.push('{"name": "a') == []
    assert llama.push("x") == []
    assert llama.push('"') == ['{"name": "ax"']
    assert llama.push('{"name": "add"') == ['{"name": "add"']


def test_a_special_token_within_the_beginning_of_a_call_makes_it_text() -> None:
    """For the grammar, the text before and after the token is free text, so the parser returns it
    as text.
    """
    for family, begun, rest in (
        ("hermes", "<tool", '_call>\n{"name": "add"'),
        ("llama", '{"name', '": "add"'),
    ):
        form = Form(tool_tokenizer(family))
        other = form.added["<|im_start|>" if family == "hermes" else "<|spare|>"]
        assert read(form, [(begun, None), ("", other), (rest, None)]) == (begun + rest, [])
    llama = Form(tool_tokenizer("llama"))
    assert (
        read(llama, [("", llama.added["<|spare|>"]), ('{"name": "add", "parameters": {', None)])[1]
        == []
    )


@pytest.mark.few(3)
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
    form = Form(tool_tokenizer("hermes"))
    with processor_limit(20):
        results = [read(form, [*cut([(text, None)], size)]) for size in (1, 10**7)]
    assert results[0] == results[1]


@cache
def grammars_of(tokenizer: Tokenizer) -> Grammars:
    """Return the grammars of a tokenizer, which keep the guides that they have compiled."""
    return Grammars(tokenizer, tokenizer.vocab_size, [0])


def random_text(
    tokenizer: Tokenizer, guide: Guide, seed: int, wanted: Mapping[int, float], length: int = 400
) -> list[int]:
    """Draw random tokens that the guide allows, up to an end token; ``wanted``: token ids with a
    probability each.
    """
    rng = random.Random(seed)
    follower = grammars_of(tokenizer).compile(guide).new_processor()
    tokens = list[int]()
    while len(tokens) < length:
        mask = follower.mask(np.zeros(tokenizer.vocab_size, np.float32))
        allowed = np.flatnonzero(np.isfinite(mask)).tolist()
        likely = [
            each for each, chance in wanted.items() if each in allowed and rng.random() < chance
        ]
        token = likely[0] if likely else rng.choice(allowed)
        if token == 0:
            break
        tokens.append(token)
        follower.advance(token)
    return tokens


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_texts_of_the_grammar_are_parsed_as_calls_of_the_tools(
    tokenizer: Tokenizer, free: bool, several: bool
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    form = Form(tokenizer)
    guide = form.guide(SCHEMAS, allow_text=free, allow_multiple=several)
    counts = list[int]()
    for seed in range(6):
        tokens = random_text(
            tokenizer, guide, seed, {} if form.begin is None else {form.begin: 0.05}
        )
        stream = TextStream(tokenizer, [5], ())
        pieces = [(stream.push(token)[0], token) for token in tokens]
        text, calls = read(form, [*pieces, (stream.flush()[0], None)])
        counts.append(len(calls))
        whole = calls if len(tokens) < 400 else calls[:-1]
        for name, arguments in whole:
            jsonschema.validate(json.loads(arguments), json.loads(SCHEMAS[name]))
            assert (
                json.dumps(json.loads(arguments), ensure_ascii=False) == arguments
                or "\\u" in arguments
            )
        assert free or (text.strip() == "" and len(calls) >= 1), tokenizer.decode(
            tokens, skip_special_tokens=False
        )
    most = 1 if form.row.name in ("llama", "channels") or not several else 100
    assert max(counts) <= most
    if form.begin is not None:
        assert max(counts) >= 1


@pytest.mark.parametrize("free", [False, True])
def test_the_grammar_guides_calls_whose_markers_are_ordinary_text(free: bool) -> None:
    """Within a call, only the name of the tool and values of the schema are open."""
    for family, begin in (("hermes", '<tool_call>\n{"name": "'), ("llama", '{"name": "')):
        tokenizer = tool_tokenizer(family, tokens=False)
        form = Form(tokenizer)
        grammars = grammars_of(tokenizer)
        follower = grammars.compile(
            form.guide(SCHEMAS, allow_text=free, allow_multiple=True)
        ).new_processor()
        good = f'{begin}add{form.row.before_arguments}{{"a": 7, "b": "x}}"}}}}'
        for at, letter in enumerate(good):
            (token,) = tokenizer.encode(letter)[:1]
            # The mask may allow only a longer token that begins with the letter; the test still
            # advances by letters.
            assert follower.allows(token) or tokenizer.decode(follower.forced()).startswith(
                letter
            ), good[: at + 1]
            others = [
                bad
                for bad in '"x} ,_:\n'
                if bad != letter and follower.allows(tokenizer.encode(bad)[0])
            ]
            inside = good[:at].endswith(begin + "add")
            assert at < len(begin) or not others or inside or good[at - 1] in '7"', (
                good[:at],
                others,
            )
            follower.advance(token)


def test_schemas_cannot_change_how_json_is_written() -> None:
    loose = {
        **ADD,
        "x-guidance": {"whitespace_flexible": True, "lenient": True, "item_separator": "nonsense"},
    }
    assert arguments_schema(loose) == SCHEMAS["add"]
    tokenizer = tool_tokenizer("llama")
    form = Form(tokenizer)
    compile_guide = grammars_of(tokenizer).compile
    follower = compile_guide(
        form.guide({"add": arguments_schema(loose)}, allow_text=False, allow_multiple=False)
    ).new_processor()
    assert tokenizer.decode(follower.forced()).startswith('{"name": "add", "parameters": {"a":')
    assert arguments_schema({"not": {}, "x-guidance": {"lenient": True}}) == arguments_schema({})


@pytest.mark.parametrize(
    ("parameters", "dropped"),
    [
        ({"type": ["object", "null"]}, ()),
        (
            {
                "anyOf": [
                    {"type": "object", "required": ["a"]},
                    {"type": "object", "required": ["b"]},
                ]
            },
            (),
        ),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/a"}}}},
            },
            (),
        ),
        ({"type": "obj"}, ("type",)),
        ({"type": "string"}, ("type",)),
        ({"type": ["string", "null"], "maxLength": 3}, ("type",)),
        ({"type": None}, ("type",)),
        ({"anyOf": [{"type": "string"}]}, ("anyOf",)),
        ({"const": 3}, ("const",)),
        (
            {
                "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 2}},
                "required": ["a"],
            },
            ("properties.a.minimum",),
        ),
    ],
)
def test_parameters_that_allow_an_object(
    parameters: dict[str, Any], dropped: Sequence[str]
) -> None:
    tokenizer = tool_tokenizer("hermes")
    assert tuple(relax_arguments(parameters).dropped) == dropped
    schema = arguments_schema(parameters)
    text = random_text(tokenizer, Guide(grammar=f"start: %json {schema}"), 1, {})
    assert tokenizer.decode(text).startswith("{")


def test_schemas_that_are_too_large_together_are_left_out() -> None:
    """The largest schemas become those of any object; the grammar of all tools is small enough to
    be compiled.
    """
    form = Form(tool_tokenizer("hermes"))
    large = [
        {"properties": {f"name_{number}": {"enum": [*range(size)]} for number in range(200)}}
        for size in (90, 91)
    ]
    long = {"properties": {"a": {"type": "array", "maxItems": 9000}}}
    found = relax_tools([ADD, large[1], long, large[0], None, large[1], large[0]])
    # equal schemas count once
    assert [each.dropped for each in found] == [(), ("",), (), (), (), ("",), ()]
    schemas = {f"tool_{number}": json.dumps(each.schema) for number, each in enumerate(found)}
    guide = form.guide(schemas, allow_text=True, allow_multiple=True)
    assert follow(form.tokenizer, guide, '<tool_call>\n{"name": "tool_').allows(
        form.tokenizer.encode("1")[0]
    )
    described = relax_tools([{"description": "x" * 200_000}] * 3)  # descriptions do not count
    assert [each.dropped for each in described] == [(), (), ()]


@pytest.mark.few(5)
@pytest.mark.parametrize("count", [pytest.param(500, marks=pytest.mark.slow), 1024])
@pytest.mark.parametrize(
    ("family", "equal", "free"), covering([*TEMPLATES], [False, True], [False, True], strength=1)
)
def test_each_of_a_thousand_tools_can_be_called(
    family: str, equal: bool, count: int, free: bool
) -> None:
    form = Form(tool_tokenizer(family))
    properties = [
        {"a": {"type": "string", "maxLength": 5 if equal else 5 + number}}
        for number in range(count)
    ]
    found = relax_tools([{"properties": each, "required": ["a"]} for each in properties])
    names = [f"a/b.{number:_>60}" for number in range(count)]
    schemas = {name: json.dumps(each.schema) for name, each in zip(names, found, strict=True)}
    guide = form.guide(schemas, allow_text=free, allow_multiple=True)
    compiled = grammars_of(form.tokenizer).compile(guide)
    for name in (names[0], names[count // 2], names[-1]):
        processor = compiled.new_processor()
        for text, marker in form.written((name, '{"a": "x"}')):
            for token in form.tokenizer.encode(text) if marker is None else [marker]:
                if marker is not None and not free and not processor.allows(marker):
                    continue  # a marker that a call may have, but that the grammar does not write
                # The mask may allow only a longer token that begins with the letter.
                assert processor.allows(token) or processor.forced(), (name, text)
                assert processor.allowed_tokens().any()
                processor.advance(token)


def test_tools_whose_rules_are_too_large_are_refused_by_name() -> None:
    """Each property takes a rule of its own in Python's syntax; equal values share theirs."""
    form = Form(tool_tokenizer("lfm2"))
    shared = {
        f"tool_{number}": arguments_schema({"properties": {f"a{n}": {} for n in range(9)}})
        for number in range(900)
    }
    assert form.guide(shared, allow_text=True, allow_multiple=True).source.count("%json") == 1
    large = {"properties": {f"a{n}": {"maxLength": n} for n in range(250)}}
    schemas = {f"t{n}": arguments_schema({**large, "required": [f"a{n}"]}) for n in range(100)}
    with pytest.raises(
        OptionError, match=r"^tools: expected tools and a form whose grammar has at most 262144 "
    ):
        form.guide(schemas, allow_text=True, allow_multiple=True)


@pytest.mark.parametrize("required", [[], ["p0"], ["p599"]])
def test_objects_with_very_many_optional_properties_do_not_fail_within_a_call(
    required: list[str],
) -> None:
    properties = {f"p{number}": {"type": "string"} for number in range(600)}
    found = relax_arguments({"properties": properties, "required": required})
    assert found.dropped == ("properties",)
    all_required = relax_arguments({"properties": properties, "required": [*properties]})
    assert not all_required.dropped
    tokenizer = tool_tokenizer("hermes")
    guide = Guide(grammar=f"start: %json {json.dumps(found.schema)}")
    for seed in range(3):
        random_text(tokenizer, guide, seed, {}, 50)


def test_arguments_in_python_may_have_any_names_if_any_object_fits() -> None:
    tokenizer = tool_tokenizer("lfm2")
    guide = Guide(grammar="\n".join(keyword_rules("start", arguments_schema({}))))
    for text in (")", "a=1)", 'city="Oslo", exact_1=null)'):
        processor = grammars_of(tokenizer).compile(guide).new_processor()
        for token in tokenizer.encode(text):
            assert processor.allows(token), text
            processor.advance(token)
        assert processor.allows(0)


def test_multiples_of_all_tools_have_a_small_common_multiple() -> None:
    parameters = [
        {"properties": {"a": {"type": "integer", "multipleOf": each}}}
        for each in (7, 11, 13, 14, 17)
    ]
    found = [each.dropped for each in relax_tools(parameters)]
    assert found == [(), (), (), (), ("properties.a.multipleOf",)]
    tokenizer = tool_tokenizer("hermes")
    schemas = {
        f"tool_{number}": arguments_schema(each) for number, each in enumerate(parameters[:4])
    }
    grammars_of(tokenizer).compile(
        Form(tokenizer).guide(schemas, allow_text=True, allow_multiple=True)
    )


def test_ids_that_mistral_models_write_are_dropped() -> None:
    old = tool_tokenizer("mistral")
    template = NEW_MISTRAL.replace("+ '[ARGS]'", "+ '[CALL_ID]' + call.id + '[ARGS]'")
    assert template != NEW_MISTRAL
    for tokens in (True, False):
        more = (("[CALL_ID]", True),) if tokens else ()
        backend = tool_tokenizer("mistral", tokens=tokens, more=more).backend
        form = Form(Tokenizer(backend, special_tokens=old._special_tokens, chat_template=template))
        assert (form.row.name, form.row.before_ident) == ("mistral", "[CALL_ID]")
        text = '[TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{"a": 1}[TOOL_CALLS]add_more[ARGS]{}'
        want = ("", [("add", '{"a": 1}'), ("add_more", "{}")])
        for size in (1, 3, 10**6):
            assert read(form, [*cut(pieces_of(form.tokenizer, text), size)]) == want
        for bad in (
            "[TOOL_CALLS]add[CALL_ID]a b[ARGS]{}",
            f"[TOOL_CALLS]add[CALL_ID]{'a' * 60_000}",
        ):
            calls = read(form, pieces_of(form.tokenizer, bad))[1]
            assert calls == [("add", "")]  # the name was emitted before; what follows is text
        # The grammar allows an id, and does not require one.
        compile_guide = grammars_of(form.tokenizer).compile
        guide = form.guide(SCHEMAS, allow_text=False, allow_multiple=True)
        for text in (
            "[TOOL_CALLS]add_more[CALL_ID]a1B2c3D4e[ARGS]{}",
            "[TOOL_CALLS]add_more[ARGS]{}",
        ):
            follower = compile_guide(guide).new_processor()
            for token in form.tokenizer.encode(text, add_special_tokens=False):
                assert follower.allows(token), text
                follower.advance(token)
    assert find_tool_dialect(old).before_ident == ""


BARE = [
    '{"name": "add", "arguments": {"a": 1, "b": "x}"}}',
    '\n{"name":"add","arguments":{"a":{"b":[1]}}}\n',
    '{\n  "name": "add_more",\n  "arguments": {}\n}\n\n',
    # as Qwen2.5-Coder-0.5B writes it
    '```json\n{\n  "name": "add",\n  "arguments": {"a": "```"}\n}\n```',
    '```\n{"name": "add_more", "arguments": {}}\n```\n',
]
NOT_BARE = [
    '{"name": "rm", "arguments": {}}',
    '{"name": "add", "arguments": {"a": 1}} is a call.',
    '{"name": "add", "arguments": {}}{"name": "add", "arguments": {}}',
    '{"name": "add", "arguments": {}, "more": 1}',
    '{"name": "add", "arguments": {}}}',
    '{"name": "add", "arguments": "a"}',
    '{"name": "add", "arguments": {a}}',
    '{"name": "add", "arguments": {"a": 1}',
    '{"name": " add", "arguments": {}}',
    '{"arguments": {}, "name": "add"}',
    'So: {"name": "add", "arguments": {}}',
    '[{"name": "add", "arguments": {}}]',
    '```json\n{"name": "add", "arguments": {}}\n',
    '```json\n{"name": "add", "arguments": {}}\n```\nThis calls it.',
    '```python\n{"name": "add", "arguments": {}}\n```',
    '{"name": "add", "arguments": {}}\n```',
    '{"name": "add", "arguments": ' + '{"a": ' * 5_000,
    '{"name": "add", "arguments": ' + '{"a": ' * 5_000 + "1" + "}" * 5_001,
]


@pytest.mark.parametrize("text", BARE + NOT_BARE)
def test_a_json_object_as_the_whole_answer_is_a_call(text: str) -> None:
    form = Form(tool_tokenizer("hermes"))
    for size in (1, 2, 7, 10**6):
        found, calls = read(form, [*cut([(text, None)], size)])
        if text in BARE:
            call = json.loads(text.strip("`json \n") if text.startswith("`") else text)
            ((name, arguments),) = calls
            assert (found, name, json.loads(arguments)) == ("", call["name"], call["arguments"])
        else:
            assert (found, calls) == (text, [])
    ended = [(text, None), ("", form.added["<|im_end|>"])]  # as an engine delivers it
    assert bool(read(form, ended)[1]) == (text in BARE)
    mistral = Form(tool_tokenizer("mistral list"))
    assert read(mistral, [(text, None)]) == (text, [])


# Texts up to the colon before the arguments of a call without markers, and the text after the
# arguments.
BEGUN = [
    ('{"name": "add", "arguments":', "}"),
    ('\n{"name":"add_more","arguments":', "}"),
    ('{\n  "name" : "add",\n  "arguments" :', "}"),
    ('```json\n{"name": "add", "arguments":', "}\n```"),
    ('```\n{\t"name": "add_more",\r\n "arguments":', "}```"),
]
FREE = [
    '{"name": "rm", "arguments": {}}', '{"name": "add"', ('{"name": "add", "parameters": {}} '
        'x'), "```json\n{}\n```",
    'So: {"name": "add", "arguments": {}}', ('{"arguments": {}, "name": '
        '"add"}'), ('[{"name": "add", "arguments": '
        '{}}]'),
    '```python\n{"name": "add", "arguments": {}}\n```', "", " \n", ('{"name": " add", "arguments": '
        '{}}'),
]  # fmt: skip


def follow(tokenizer: Tokenizer, guide: Guide, text: str) -> Any:
    """Return the guide's processor after a text, written letter by letter; check that the text is
    allowed.
    """
    follower = grammars_of(tokenizer).compile(guide).new_processor()
    for at, letter in enumerate(text):
        (token,) = tokenizer.encode(letter)[:1]
        assert follower.allows(token) or tokenizer.decode(follower.forced()).startswith(letter), (
            text[: at + 1]
        )
        follower.advance(token)
    return follower


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("several", [False, True])
def test_arguments_of_calls_without_markers_follow_the_schema(tokens: bool, several: bool) -> None:
    """Whatever is drawn after the beginning of a call, the whole answer is one call that fits."""
    jsonschema = pytest.importorskip("jsonschema")
    tokenizer = tool_tokenizer("hermes", tokens=tokens)
    form = Form(tokenizer)
    guide = form.guide(SCHEMAS, allow_text=True, allow_multiple=several)
    rng = np.random.default_rng(5)
    for begun, ending in BEGUN:
        for _ in range(4):
            follower = follow(tokenizer, guide, begun)
            written = list[int]()
            while not (
                mask := np.isfinite(follower.mask(np.zeros(tokenizer.vocab_size, np.float32)))
            )[0]:
                written.append(int(rng.choice(np.flatnonzero(mask))))
                follower.advance(written[-1])
                assert len(written) < 200
            text = begun + tokenizer.decode(written)
            found, ((name, arguments),) = read(form, [(text, None)])
            assert (found, name) == ("", "add_more" if "add_more" in begun else "add")
            jsonschema.validate(json.loads(arguments), json.loads(SCHEMAS[name]))
            assert text.rstrip().endswith(ending[-1])
        # The model cannot give other arguments, nor say anything after the call.
        assert not follow(tokenizer, guide, begun + " ").allows(tokenizer.encode('"')[0])
        whole = (
            f'{begun} {{"a": 7, "b": "x}}"}}{ending}'
            if "add_more" not in begun
            else f"{begun} {{}}{ending}"
        )
        follower = follow(tokenizer, guide, whole)
        (allowed,) = np.nonzero(
            np.isfinite(follower.mask(np.zeros(tokenizer.vocab_size, np.float32)))
        )
        assert allowed[0] == 0
        assert tokenizer.decode(allowed[1:].tolist()).strip() == ""


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("text", FREE)
def test_text_that_is_no_call_without_markers_is_free(text: str, tokens: bool) -> None:
    tokenizer = tool_tokenizer("hermes", tokens=tokens)
    form = Form(tokenizer)
    guide = form.guide(SCHEMAS, allow_text=True, allow_multiple=True)
    assert follow(tokenizer, guide, text).allows(0)
    assert read(form, [(text, None)]) == (text, [])
    call = (
        "".join(piece or "<tool_call>" for piece, _ in form.written(("add_more", "{}")))
        if not tokens
        else ""
    )
    if call:  # a call with markers may follow, and after it another text
        assert follow(tokenizer, guide, text + call).allows(0)
        assert follow(tokenizer, guide, text + call + BARE[0]).allows(0)


def test_calls_without_markers_after_thoughts_and_beside_a_form() -> None:
    """Thoughts may come before such a call. If the text has a required form, an object without
    markers is text.
    """
    tokenizer = thinking_tokenizer("hermes", tokens=False)
    answers = AnswerFormat(tokenizer)
    guide = answers.grammar(tools=True).guide(SCHEMAS, thinking="open")
    assert guide is not None
    before = 'I call {"name": "add", "arguments": 5}.\n</think>\n\n'
    assert follow(tokenizer, guide, before + BARE[0].replace("1", "7")).allows(0)
    assert not follow(tokenizer, guide, before + BEGUN[0][0] + " ").allows(tokenizer.encode("5")[0])
    assert follow(tokenizer, guide, before + FREE[0]).allows(0)
    for has_form in (False, True):
        reader = answers.reader(SCHEMAS, opened=True, has_form=has_form)
        parts = [*reader.push(before + BARE[0]), *reader.flush()]
        assert any(isinstance(part, CallPart) for part in parts) != has_form
        assert (parts[-1] == BARE[0]) == has_form


def test_many_tools_may_be_called_without_markers() -> None:
    tokenizer = tool_tokenizer("hermes")
    schemas = {f"tool_{number:02}_{'x' * 50}": SCHEMAS["add"] for number in range(128)}
    with processor_limit(20):
        guide = Form(tokenizer).guide(schemas, allow_text=True, allow_multiple=True)
        follower = follow(tokenizer, guide, f'{{"name": "{[*schemas][-1]}", "arguments":')
    assert tokenizer.decode(follower.forced()).strip().startswith("{") or follower.allows(
        tokenizer.encode("{")[0]
    )


def test_text_is_held_back_only_while_the_answer_may_be_a_json_object() -> None:
    given = [
        ('{"na', ""), ('me": "ad', ""), ('d", "argu', ""), ('ments": {"a"', ""), (": 1}", ""), ("} ", ""),
        ("and", '{"name": "add", "arguments": {"a": 1}} and'), (" more", " more"),
    ]  # fmt: skip
    reader = Form(tool_tokenizer("hermes")).reader()
    for text, out in given:
        assert "".join(map(str, reader.push(text))) == out
    reader = Form(tool_tokenizer("hermes")).reader()
    assert [reader.push(text) for text in ('{"name": "a', "x")] == [[], ['{"name": "ax']]
    reader = Form(tool_tokenizer("hermes")).reader()
    reader.push('{"name": "add", "arguments": {}}')
    first, rest = reader.flush()
    assert isinstance(first, CallPart)
    # as every call is streamed
    assert (first.name, first.arguments, rest) == ("add", "", CallPart(0, "{}"))


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        (")", {}),
        (" )", {}),
        ('city="Oslo", days=[1, 2])', {"city": "Oslo", "days": [1, 2]}),
        ("exact=True, more=None , last = False)", {"exact": True, "more": None, "last": False}),
        ("""text='it\\'s "x", (a)=[1]', n=-2.5e3)""", {"text": 'it\'s "x", (a)=[1]', "n": -2500.0}),
        ('config={"on": True, "note": null, "deep": [{"a": (1, 2)}]},)',
         {"config": {"on": True, "note": None, "deep": [{"a": [1, 2]}]}}),
        (r"""code="a\n\tb", pattern="\d+\.", other='\d')""", {"code": "a\n\tb", "pattern": r"\d+\.", "other": r"\d"}),
        ('url="x/\\u00e9\\/", same="\\ud83d\\ude00")', {"url": "x/é/", "same": "😀"}),
        ('"Oslo", day=tomorrow, bad=NaN)', {"0": "Oslo", "day": "tomorrow", "bad": "NaN"}),
        ("x=a==b, y={1}, z=1 if True else 2)", {"x": "a==b", "y": "{1}", "z": "1 if True else 2"}),
    ],
)  # fmt: skip
def test_arguments_in_the_syntax_of_python(written: str, arguments: dict[str, Any]) -> None:
    for size in (1, 3, 10**6):
        reader = KeywordArguments()
        text = ""
        for start in range(0, len(written), size):
            assert not reader.found
            piece = written[start : start + size]
            stop, more = reader.read(piece, 0)
            assert stop == len(piece)
            text += more
        assert reader.found
        assert json.loads(text) == arguments
        assert text == json.dumps(arguments, ensure_ascii=False)
    values = {key: value for key, value in arguments.items() if key.isidentifier()}
    reader = KeywordArguments()
    call = write_call("f", values)
    assert json.loads(reader.read(call, 2)[1]) == values


def test_optional_arguments_and_booleans_are_guided() -> None:
    """Every subset of the optional arguments can be written, in the order of the schema."""
    shapes = {"a": {"type": "boolean"}, "b": {"$ref": "#/$defs/n"}, "c": {"enum": [None]}}
    for required in ([], ["b"], ["a", "c"], ["a", "b", "c"]):
        schema = {"properties": shapes, "required": required, "$defs": {"n": {"const": 7}}}
        rules = keyword_rules("start", arguments_schema(schema))
        tokenizer = tool_tokenizer("lfm2")
        texts = {"a": ("a=True", "a=False"), "b": ("b=7",), "c": ("c=null",)}
        subsets = product(*[(*texts[name], *([] if name in required else [""])) for name in texts])
        expected = {", ".join(filter(None, each)) + ")" for each in subsets}
        seen = set[str]()
        guide = Guide(grammar="\n".join(rules))
        seeds = iter(range(200))
        while len(seen) < len(expected):
            seen.add(tokenizer.decode(random_text(tokenizer, guide, next(seeds), {})))
        assert seen == expected


@pytest.mark.parametrize(
    ("schema", "written", "left_out"),
    [
        ({"properties": {"a-b": {}, "c": {"const": 1}}}, {")", "c=1)"}, ["properties.a-b"]),
        ({"properties": {"a-b": {}}, "required": ["a-b"]}, {")"}, ["required", "properties.a-b"]),
        (
            {"properties": {"a": {"const": 1}}, "anyOf": [{"required": ["a"]}]},
            {")", "a=1)"},
            ["anyOf"],
        ),
        ({"patternProperties": {"x": {}}}, {")"}, []),
        ({"properties": {"a": False, "b": {"const": 1}}}, {")", "b=1)"}, []),
        ({"properties": {"a": {"minimum": 2, "maximum": 1, "type": "integer"}}}, {")"}, []),
        (
            {
                "properties": {"a": {"const": 1}, "b": {"const": 2}},
                "maxProperties": 1,
                "additionalProperties": False,
            },
            {")", "a=1)", "b=2)", "a=1, b=2)"},
            ["maxProperties"],
        ),
        ({"required": ["a"], "additionalProperties": {"const": 1}}, {"a=1)"}, []),
        (
            {"$ref": "#/$defs/d", "$defs": {"d": {"properties": {"a": {"const": 1}}}}},
            {")", "a=1)"},
            [],
        ),
        (
            {"properties": {"a": {"const": 1}}, "uniqueItems": True, "title": "t", "if": {}},
            {")", "a=1)"},
            [],
        ),
    ],
)
def test_keywords_that_calls_in_python_leave_out(
    schema: dict[str, Any], written: set[str], left_out: Sequence[str]
) -> None:
    relaxed = relax_arguments(schema)
    guide = Guide(grammar="\n".join(keyword_rules("start", json.dumps(relaxed.schema))))
    tokenizer = tool_tokenizer("lfm2")
    assert {
        tokenizer.decode(random_text(tokenizer, guide, seed, {})) for seed in range(20)
    } == written
    assert KeywordSyntax().not_followed(relaxed.schema) == left_out
    form = Form(tokenizer)
    guide = form.guide({"f": json.dumps(relaxed.schema)}, allow_text=True, allow_multiple=True)
    grammars_of(tokenizer).compile(guide)


def test_calls_of_lfm2_5_are_written_without_a_list_of_tools_in_markers() -> None:
    source = "{{- 'List of tools: [' }}" + TOOL_LIST + TURNS
    tokenizer = Tokenizer(byte_tokenizer(), chat_template=source, special_tokens={})
    assert find_tool_dialect(tokenizer).name == "lfm2"
    calls = "<|tool_call_start|>[add(a=2), add_more()]<|tool_call_end|>"
    assert tokenizer.chat(CALLED, tools=TOOLS).endswith(f"<assistant>{calls}\n<tool>4\n")
