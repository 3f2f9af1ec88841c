"""Answers with thoughts: formats, parsers, and grammars of thoughts before calls, text and JSON."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from checkpoints import byte_tokenizer
from pronk.text.chat.answer_grammar import Thinking, arguments_schema
from pronk.text.chat.answers import AnswerFormat, AnswerReader, Part
from pronk.text.chat.calls import CallPart
from pronk.text.chat.thoughts import Thought
from pronk.text.guide import Guide
from pronk.text.stream import TextStream
from pronk.text.tokenizer import Tokenizer
from text.chat.test_tools import cut, pieces_of, random_text
from text.chat.tool_templates import QWEN35, SMALL_QWEN35, TEMPLATES, TOKENS, thinking_tokenizer

TEMPLATE_FOLDER = Path(__file__).parent / "templates"
NAMES = dict.fromkeys(("get_weather", "search"), "{}")
Parsed = tuple[str, str, list[tuple[str, str]]]  # thoughts, text, calls

# Outputs as the models write them, special tokens included; and whether the prompt ends with the
# begin marker.
RECORDED: dict[str, tuple[str, bool, str, Parsed]] = {
    "qwen3": (
        "hermes", False,
        ("<think>\nOkay, the user greets me.\n\nI greet back.\n</think>\n\nHello! How can I help "
        "you today?"),
        ("Okay, the user greets me.\n\nI greet back.", "Hello! How can I help you today?", []),
    ),
    "qwen3 with calls": (
        "hermes", False,
        (
            '<think>\nLook.\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": '
            '{"city": "Oslo"}}\n'
            '</tool_call>\n<tool_call>\n{"name": "get_weather", "arguments": {"city": '
            '"Paris"}}\n</tool_call>'
        ),
        ("Look.", "", [("get_weather", '{"city": "Oslo"}'), ("get_weather", '{"city": "Paris"}')]),
    ),
    "qwen3 with a call in its thoughts": (
        "hermes", False,
        ('<think>\nI could write <tool_call>\n{"name": "search", "arguments": '
        '{}}\n</tool_call>.\n</think>\n\nNo.'),
        (('I could write <tool_call>\n{"name": "search", "arguments": '
            '{}}\n</tool_call>.'), "No.", []),
    ),
    "qwen3 without "
    "thinking": ("hermes", False, "Hello! <think> is a tag.", ("", "Hello! <think> is a tag.", [])),
    "qwen3, empty thoughts": ("hermes", False, "<think>\n\n</think>\n\nHi", ("", "Hi", [])),
    "deepseek-r1": (
        "hermes", True, ("First, 2 < 3.\nSo "
            "yes.\n</think>\n\n**Yes**"), ("First, 2 < 3.\nSo yes.", "**Yes**", [])
    ),
    "deepseek-r1, cut": ("hermes", True, "First, 2 </thin", ("First, 2 </thin", "", [])),
    "magistral": (
        "mistral", False,
        ('[THINK]Look it up.[/THINK][TOOL_CALLS]search[ARGS]{"q": '
        '"x"}[TOOL_CALLS]get_weather[ARGS]{}'),
        ("Look it up.", "", [("search", '{"q": "x"}'), ("get_weather", "{}")]),
    ),
    "gpt-oss": (
        "channels", False,
        ("<|channel|>analysis<|message|>User says "
        "hi.<|end|><|start|>assistant<|channel|>final<|message|>Hello!"),
        ("User says hi.", "Hello!", []),
    ),
    "gpt-oss with a call": (
        "channels", False,
        (
            "<|channel|>analysis<|message|>Need "
            "weather.<|end|><|start|>assistant<|channel|>commentary to=functions."
            'get_weather <|constrain|>json<|message|>{"city": "Oslo"}'
        ),
        ("Need weather.", "", [("get_weather", '{"city": "Oslo"}')]),
    ),
    "gpt-oss, recipient before the channel": (
        "channels", False,
        ' to=functions.search<|channel|>commentary json<|message|>{"q": "a}b"}',
        ("", "", [("search", '{"q": "a}b"}')]),
    ),
    "gpt-oss with a preamble": (
        "channels", False,
        (
            "<|channel|>analysis<|message|>Plan.<|end|><|start|>assistant<|channel|>commentary<|message|>I look it up."
            '<|end|><|start|>assistant<|channel|>commentary to=functions.search<|message|>{"q": 1}'
        ),
        ("Plan.", "I look it up.", [("search", '{"q": 1}')]),
    ),
    "gpt-oss, no space before the data type": (
        "channels", False,
        (
            "<|channel|>analysis<|message|>Plan.<|end|><|start|>assistant<|channel|>commentary<|message|>**Plan**:"
            "\n1. Look.<|end|><|start|>assistant<|channel|>commentary "
            "to=functions.search<|constrain|>json<|message|>"
            '{"q": "x"}'
        ),
        ("Plan.", "**Plan**:\n1. Look.", [("search", '{"q": "x"}')]),
    ),
    "gpt-oss with a built-in tool": (
        "channels", False,
        (
            "<|channel|>analysis<|message|>Compute.<|end|><|start|>assistant<|channel|>analysis "
            "to=python code"
            "<|message|>print(2 + 2)"
        ),
        ("Compute.print(2 + 2)", "", []),
    ),
    "gpt-oss, text with a data type": (
        "channels", False,
        '<|channel|>final <|constrain|>json<|message|>{"a": 1}',
        ("", '{"a": 1}', []),
    ),
    "gpt-oss, cut in a header": (
        "channels", False,
        "<|channel|>analysis<|message|>Plan.<|end|><|start|>assistant<|channel|>fin",
        ("Plan.", "", []),
    ),
}  # fmt: skip


def parsed(parts: list[Part]) -> Parsed:
    thoughts = ""
    text = ""
    calls = list[tuple[str, str]]()
    for part in parts:
        if isinstance(part, Thought):
            assert part.text
            assert not text
            thoughts += part.text
        elif isinstance(part, str):
            assert part
            text += part
        elif part.name is not None:
            calls.append((part.name, part.arguments))
        else:
            calls[-1] = calls[-1][0], calls[-1][1] + part.arguments
    return thoughts, text, calls


def read(reader: AnswerReader, pieces: Any) -> Parsed:
    parts = [part for text, token in pieces for part in reader.push(text, token)]
    return parsed([*parts, *reader.flush()])


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
def test_recorded_answers_are_parsed_the_same_when_split_anywhere(name: str, tokens: bool) -> None:
    family, opened, output, want = RECORDED[name]
    form = AnswerFormat(thinking_tokenizer(family, tokens=tokens))
    pieces = pieces_of(form.tokenizer, output)

    def reader() -> AnswerReader:
        return form.reader(NAMES, opened=opened)

    assert read(reader(), pieces) == want
    assert read(reader(), [*cut(pieces, 1)]) == want
    single = [*cut(pieces, 1)]
    for at in range(1, len(single)):
        # Join the characters before and after the position; special tokens stay apart.
        halves = []
        for half in (single[:at], single[at:]):
            for text, token in half:
                if (
                    token is None
                    and halves
                    and halves[-1][1] is None
                    and halves[-1] is not None
                    and half is not None
                ):
                    halves[-1] = (halves[-1][0] + text, None)
                else:
                    halves.append((text, token))
            halves.append(("", None))
        assert read(reader(), halves) == want, at


@pytest.mark.parametrize("stop", ["\n\n", "e\nOne"])
@pytest.mark.parametrize(
    ("family", "output", "want"),
    [
        (
            "mistral",
            'See\n[TOOL_CALLS]search[ARGS]{"q": 1}',
            ("", "See\n", [("search", '{"q": 1}')]),
        ),
        ("mistral", "[THINK]See\n[/THINK]One", ("See", "One", [])),
        (
            "channels",
            "<|channel|>analysis<|message|>See\n<|end|><|start|>assistant<|channel|>final<|message|>One",
            ("See\n", "One", []),
        ),
    ],
)
def test_the_beginning_of_a_stop_string_stays_before_a_special_token(
    family: str, output: str, want: Parsed, stop: str
) -> None:
    r"""The text ``\n`` may begin a stop string, so it is withheld, but not beyond the marker after
    it.
    """
    form = AnswerFormat(thinking_tokenizer(family))
    stream = TextStream(form.tokenizer, [], [stop])
    pieces = [
        (stream.push(token)[0], token)
        for token in form.tokenizer.encode(output, add_special_tokens=False)
    ]
    assert read(form.reader(NAMES, opened=False), [*pieces, (stream.flush()[0], None)]) == want


def test_text_is_held_back_only_while_it_may_be_a_marker() -> None:
    form = AnswerFormat(thinking_tokenizer("hermes"))
    reader = form.reader({}, opened=False)
    given: list[tuple[str, list[Part]]] = [
        ("<th", []), ("ink>", []), ("\n", []), ("a\n", [Thought("a")]), ("b", [Thought("\nb")]),
        (" </", [Thought(" ")]), ("x", [Thought("</x")]), ("\n</think>", []), ("\n", []), ("\nc\n", ["c\n"]),
        ("<think>", ["<think>"]),
    ]  # fmt: skip
    for text, want in given:
        assert reader.push(text) == want
    assert reader.flush() == []
    assert form.reader({}, opened=False).push("Hello") == ["Hello"]


def test_thought_tokens_are_known_while_they_are_read() -> None:
    form = AnswerFormat(thinking_tokenizer("channels"))
    reader = form.reader({}, opened=False)
    seen = list[bool]()
    for text, token in pieces_of(form.tokenizer, RECORDED["gpt-oss"][2]):
        reader.push(text, token)
        seen.append(reader.in_thought)
    # <|channel|> analysis <|message|> thoughts <|end|> <|start|> assistant <|channel|> final
    # <|message|> text
    assert seen == [False, True, True, True, *[False] * 7]


@pytest.mark.parametrize(
    ("name", "options", "opened"),
    [
        ("qwen3", {}, False),
        ("qwen3", {"enable_thinking": False}, False),
        ("smollm3", {}, False),
        ("smollm3", {"enable_thinking": False}, False),
        ("open", {}, True),
        ("qwen3.5", {}, True),
        ("qwen3.5", {"enable_thinking": True}, True),
        ("qwen3.5", {"enable_thinking": False}, False),
        ("small qwen3.5", {"enable_thinking": True}, True),
        ("small qwen3.5", {}, False),
        ("small qwen3.5", {"enable_thinking": False}, False),
    ],
)
def test_prompts_that_open_thoughts(name: str, options: dict[str, Any], opened: bool) -> None:
    """Or that close them: small models of Qwen 3.5 do not think unless they are told to."""
    own = {"qwen3.5": QWEN35, "small qwen3.5": SMALL_QWEN35}
    if name in own:
        source = own[name]
    elif name == "open":
        source = (
            "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor "
            "%}<|Assistant|><think>\n"
        )
    else:
        source = (TEMPLATE_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer = Tokenizer(byte_tokenizer(), chat_template=source)
    form = AnswerFormat(tokenizer)
    assert form.reasoning is not None
    assert form.reasoning.name == "think"
    prompt = tokenizer.chat([{"role": "user", "content": "Say <think>"}], options=options)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert form.opened_by(ids) == opened
    closed = options == {"enable_thinking": False} or (name in own and not opened)
    assert prompt.endswith(("</think>\n\n", "</think>\n")) == closed
    assert form.closed_by(ids) == closed


@pytest.mark.parametrize("template", [QWEN35, SMALL_QWEN35])
def test_earlier_thoughts_of_qwen35_are_left_out(template: str) -> None:
    """An answer is read as thoughts and text, and becomes a message of the next prompts."""
    tokenizer = Tokenizer(byte_tokenizer(), chat_template=template)
    form = AnswerFormat(tokenizer)
    reader = form.reader({}, opened=True)
    parts = [*reader.push("I add.\n</think>\n\nFour."), *reader.flush()]
    assert parts == [Thought("I add."), "Four."]
    question = {"role": "user", "content": "2 + 2?"}
    answer = {"role": "assistant", "content": "Four.", "reasoning_content": "I add."}
    options = {"enable_thinking": True}
    last = tokenizer.chat([question, answer], options=options, add_generation_prompt=False)
    assert last.endswith("<think>\nI add.\n</think>\n\nFour.<|im_end|>\n")
    following = tokenizer.chat([question, answer, question], options=options)
    assert "I add." not in following
    assert following.endswith("<|im_start|>assistant\n<think>\n")


@pytest.mark.parametrize("name", ["qwen2.5", "mistral-nemo", "phi-4", "phi-3.5"])
def test_models_that_do_not_think(name: str) -> None:
    source = (TEMPLATE_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    assert AnswerFormat(Tokenizer(byte_tokenizer(), chat_template=source)).reasoning is None


def test_tokens_that_end_thoughts() -> None:
    for family, text in (("hermes", "</think>"), ("mistral", "[/THINK]"), ("channels", "<|end|>")):
        for tokens in (True, False):
            form = AnswerFormat(thinking_tokenizer(family, tokens=tokens))
            markers = form.thinking_markers
            assert markers is not None
            assert form.tokenizer.decode(markers.forced, skip_special_tokens=False) == text
            assert markers.end in "".join(map(markers.symbols, markers.forced))


SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FORMS = {
    "json": Guide(json=SCHEMA),
    "json with white space": Guide(json=SCHEMA, whitespace=True),
    "regex": Guide(regex="[0-9]/[0-9]"),
    "choice": Guide(choice=["yes", 'n"o']),
    "grammar": Guide(grammar='start: X "!"\nX: /[a-c]+/'),
}


def fits(name: str, text: str) -> bool:
    if name.startswith("json"):
        return json.loads(text)["city"] in ("Oslo", "Paris")
    if name == "regex":
        return len(text) == 3 and text[1] == "/"
    if name == "choice":
        return text in ("yes", 'n"o')
    return text[-1] == "!" and set(text[:-1]) <= {*"abc"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tools", [True, False])
@pytest.mark.parametrize(
    ("family", "thinking"),
    [
        (family, thinking)
        for family in ("hermes", "mistral", "mistral list", "llama", "channels")
        for thinking in ("never", "optional", "open")
        if (family, thinking) != ("channels", "open")  # prompts of gpt-oss do not open thoughts
    ],
)
def test_thoughts_then_a_call_or_the_form(
    family: str, tools: bool, thinking: Thinking, form: str
) -> None:
    """Random texts of the grammar have thoughts if they may, then exactly a call or the required
    form.
    """
    answers = AnswerFormat(thinking_tokenizer(family))
    schemas = {"get_weather": arguments_schema(SCHEMA)} if tools else {}
    guide = answers.grammar(tools=tools).guide(schemas, form=FORMS[form], thinking=thinking)
    assert guide is not None
    ended = called = formed = thought = 0
    reasoning = answers.reasoning
    token_id = answers.tokenizer.backend.token_to_id
    assert reasoning is not None
    wanted = {
        token_id(reasoning.begin.partition("analysis")[0]): 0.5,
        token_id(reasoning.end): 0.05,
    }
    for seed in range(12):
        tokens = random_text(answers.tokenizer, guide, seed, wanted, 300)
        reader = answers.reader(schemas, opened=thinking == "open")
        stream = [(answers.tokenizer.token_text(token) or "", token) for token in tokens]
        thoughts, text, calls = read(reader, stream)
        thought += bool(thoughts)
        if len(tokens) == 300:
            continue
        ended += 1
        assert bool(text) != bool(calls)
        called += bool(calls)
        formed += bool(text)
        assert not text or fits(form, text)
        assert all(json.loads(arguments)["city"] in ("Oslo", "Paris") for _, arguments in calls)
    assert ended > 6
    assert (called > 0) <= tools
    assert formed > 0 or tools
    assert (thought > 0) == (thinking != "never")


def test_free_text_needs_no_guide() -> None:
    answers = AnswerFormat(thinking_tokenizer("hermes"))
    assert answers.grammar(tools=False).guide({}, thinking="optional") is None
    form = FORMS["json"]
    assert answers.grammar(tools=False).guide({}, form=form, thinking="never") is form


@pytest.mark.parametrize("opened", [False, True])
def test_hostile_answers_are_parsed_in_linear_time(opened: bool) -> None:
    answers = AnswerFormat(thinking_tokenizer("hermes"))
    for text in (
        "<think>" * 2_000,
        "\n" * 15_000,
        "</thin" * 2_000,
        " " * 15_000,
        "<think>" + "\n" * 15_000,
    ):
        whole = read(answers.reader(NAMES, opened=opened), [(text, None)])
        assert (
            read(answers.reader(NAMES, opened=opened), [(character, None) for character in text])
            == whole
        )


def test_random_answers_are_parsed_the_same_when_split() -> None:
    dice = random.Random(3)
    words = ["<think>", "</think>", "\n", " ", "a", "<", "<tool_call>", ('\n{"name": "search", "arguments": '
        '{'), "}}",
             "\n</tool_call>", "<|channel|>", "analysis", "<|message|>", "<|end|>", "<|start|>", "assistant", "final",
             (" "
             "to=functions.search"), "[TOOL_CALLS]", "search", "[ARGS]", "{", "}", "[THINK]", "[/THINK]"]  # fmt: skip
    for family in ("hermes", "mistral", "channels"):
        answers = AnswerFormat(thinking_tokenizer(family, tokens=False))
        for _ in range(300):
            text = "".join(dice.choices(words, k=dice.randint(1, 20)))
            whole = read_loosely(answers.reader(NAMES, opened=False), [text])
            letters = read_loosely(answers.reader(NAMES, opened=False), [*text])
            assert letters == whole, text


def read_loosely(reader: AnswerReader, texts: list[str]) -> list[Any]:
    """Return the parts of an answer in order, neighbours of one kind joined, without the random ids
    of calls.
    """
    parts = [part for text in texts for part in reader.push(text)] + reader.flush()
    joined = list[list[Any]]()
    for part in parts:
        kind: Any = type(part).__name__
        content = (
            part
            if isinstance(part, str)
            else part.arguments
            if isinstance(part, CallPart)
            else part.text
        )
        key = [kind, part.index] if isinstance(part, CallPart) else [kind, None]
        if joined and joined[-1][0] == key:
            joined[-1][1] += content
        else:
            joined.append([key, content])
    return joined


def test_every_dialect_has_a_test() -> None:
    assert {row[0] for row in RECORDED.values()} <= {*TEMPLATES} == {*TOKENS}
