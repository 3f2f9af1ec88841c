"""Prompts and answers of gpt-oss in the harmony format, with the published template."""

from pathlib import Path
from typing import Any

import pytest

from checkpoints import byte_tokenizer
from pronk.text.chat.answers import AnswerFormat
from pronk.text.chat.dialects import find_tool_dialect
from pronk.text.chat.template import ChatTemplate
from pronk.text.guide import Guide
from pronk.text.tokenizer import Tokenizer
from text.chat.tool_templates import tool_tokenizer

SOURCE = (Path(__file__).parent / "templates" / "gpt-oss.jinja").read_text(encoding="utf-8")
USER = {"role": "user", "content": "Is it warm?"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Weather of a city.", "parameters": CITY},
    },
    {"type": "function", "function": {"name": "here"}},
]


def called(*calls: tuple[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    made = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for number, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made, **more}


def answered(number: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": content}


def prompt(*messages: dict[str, Any], **options: Any) -> str:
    """Return the prompt after the system message, whose third line has the date."""
    tools = options.pop("tools", None)
    text = ChatTemplate(SOURCE, {}).render(messages, tools=tools, options=options)
    return text.partition("<|end|>")[2]


def test_the_published_template_has_the_dialect_and_the_thoughts_of_channels() -> None:
    tokenizer = Tokenizer(byte_tokenizer(), chat_template=SOURCE, special_tokens={})
    assert find_tool_dialect(tokenizer).name == "channels"
    form = AnswerFormat(tokenizer)
    assert form.reasoning is not None
    assert form.reasoning.name == "channels"


@pytest.mark.parametrize(
    ("options", "effort"),
    [
        ({}, "medium"),
        ({"reasoning_effort": "high"}, "high"),
        ({"reasoning_effort": "minimal"}, "low"),
        ({"reasoning_effort": "xhigh"}, "high"),
        ({"enable_thinking": False, "thinking": False}, "low"),
        ({"enable_thinking": True, "reasoning_effort": "medium"}, "medium"),
    ],
)
def test_efforts(options: dict[str, Any], effort: str) -> None:
    """The model was trained on three efforts, and always thinks."""
    text = ChatTemplate(SOURCE, {}).render([USER], options=options)
    assert f"\n\nReasoning: {effort}\n\n# Valid channels: analysis, commentary, final." in text
    assert text.endswith("<|end|><|start|>user<|message|>Is it warm?<|end|><|start|>assistant")


def test_tools_are_described_to_the_developer_role() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert prompt(system, USER, tools=TOOLS).startswith(
        "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n# Tools\n\n"
        "## functions\n\nnamespace functions {\n\n"
        "// Weather of a city.\ntype weather = (_: {\ncity: string,\n}) => any;\n\n"
        "// \ntype here = () => any;\n\n} // namespace functions<|end|><|start|>user"
    )


THOUGHTS = "<|start|>assistant<|channel|>analysis<|message|>"
CALL = "<|start|>assistant to=functions."
BEFORE = "<|start|>user<|message|>Is it warm?<|end|>"


def after_tools(*messages: dict[str, Any]) -> str:
    return (
        prompt(USER, *messages, tools=TOOLS)
        .partition("namespace functions<|end|>")[2]
        .removeprefix(BEFORE)
    )


def test_thoughts_before_a_call_stay_until_the_final_answer() -> None:
    call = called(("weather", {"city": "Oslo"}), thinking="Ask.")
    written = f'{CALL}weather<|channel|>commentary json<|message|>{{"city": "Oslo"}}<|call|>'
    result = '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"7 C"<|end|>'
    assert (
        after_tools(call, answered(0, "7 C"))
        == f"{THOUGHTS}Ask.<|end|>{written}{result}<|start|>assistant"
    )
    final = {"role": "assistant", "content": "No.", "thinking": "Cold."}
    assert after_tools(call, answered(0, "7 C"), final, USER) == (
        f"{written}{result}<|start|>assistant<|channel|>final<|message|>No.<|end|>{BEFORE}<|start|>assistant"
    )


def test_text_beside_a_call_is_written_with_the_thoughts() -> None:
    """The template alone fails if a message with a call has both."""
    text = after_tools(called(("here", {}), thinking="Ask.", content="I look it up."))
    call = f"{CALL}here<|channel|>commentary json<|message|>{{}}<|call|>"
    assert text == f"{THOUGHTS}Ask.\n\nI look it up.<|end|>{call}<|start|>assistant"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_every_call_of_a_message_is_written_with_its_result(order: tuple[int, int]) -> None:
    """The template alone writes the first call, and all results under its name."""
    results = [answered(0, "7 C"), answered(1, "Oslo")]
    text = after_tools(
        called(("weather", {"city": "x"}), ("here", {}), thinking="Ask."),
        *(results[i] for i in order),
    )
    assert text == (
        f'{THOUGHTS}Ask.<|end|>{CALL}weather<|channel|>commentary json<|message|>{{"city": '
        f'"x"}}<|call|>'
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"7 C"<|end|>'
        f"{CALL}here<|channel|>commentary json<|message|>{{}}<|call|>"
        "<|start|>functions.here "
        'to=assistant<|channel|>commentary<|message|>"Oslo"<|end|><|start|>assistant'
    )


def test_a_call_without_a_result_takes_no_other_result() -> None:
    text = after_tools(called(("weather", {"city": "x"}), ("here", {})), answered(1, "Oslo"))
    assert (
        "<|call|><|start|>assistant to=functions.here<|channel|>commentary "
        "json<|message|>{}<|call|>" in text
    )
    assert text.count("to=assistant") == 1
    assert (
        '<|start|>functions.here to=assistant<|channel|>commentary<|message|>"Oslo"<|end|>' in text
    )


@pytest.mark.parametrize("thoughts", ["", "Why?"])
def test_a_begun_answer_has_the_header_of_its_channel(thoughts: str) -> None:
    tokenizer = tool_tokenizer("channels")
    form = AnswerFormat(tokenizer)
    begun = form.begin_answer(tokenizer.chat_ids([USER]), "It is <|end|>", thoughts)
    analysis = f"<|channel|>analysis<|message|>{thoughts}<|end|><|start|>assistant"
    expected = "<|channel|>final<|message|>It is <|end|>"
    text = tokenizer.decode(begun, skip_special_tokens=False)
    assert text.endswith(f"<|start|>assistant{analysis if thoughts else ''}{expected}")
    end = tokenizer.backend.token_to_id("<|end|>")
    assert begun.count(end) == tokenizer.chat_ids([USER]).count(end) + bool(thoughts)


@pytest.mark.parametrize("size", [1, 100])
def test_the_rest_of_a_begun_answer_is_text(size: int) -> None:
    form = AnswerFormat(tool_tokenizer("channels"))
    rest = " to=all of them"
    pieces = [rest[at : at + size] for at in range(0, len(rest), size)]
    for begun in (True, False):
        reader = form.reader({}, opened=False, begun=begun)
        parts = [part for piece in pieces for part in reader.push(piece)] + reader.flush()
        assert "".join(map(str, parts)) == (rest if begun else "")


def test_the_grammar_of_a_begun_answer_has_no_header() -> None:
    grammar = AnswerFormat(tool_tokenizer("channels")).grammar(tools=False)
    form = Guide(json={"type": "integer"})
    assert grammar.guide({}, form=form, begun=True) == form
    other = grammar.guide({}, form=form)
    assert other is not None
    assert "final" in other.source
