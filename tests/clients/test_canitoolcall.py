"""The conformance set canitoolcall: calls that official chat templates render are parsed.

A fixture of the set has the text of an answer, as the template of a model writes it, and the
thoughts, text and calls in it. Each one is read whole and in single characters, with a template of
the tests that writes the same form. Fixtures of other sources are left out: they are answers to
which no grammar was applied, such as calls with the arguments before the name, and answers that
were cut.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clients.conftest import Install
from pronk.text.chat.answers import AnswerFormat
from pronk.text.tokenizer import Tokenizer
from text.chat.test_answers import Parsed, read
from text.chat.test_tools import cut, pieces_of
from text.chat.tool_templates import SPECIAL, TEMPLATES, thinking_tokenizer, tool_tokenizer

pytestmark = pytest.mark.slow

# Family of the tests' templates by the first model of a fixture. Models that are missing have a
# form that pronk does not read: Kimi K3, Llama 4, DeepSeek V3.2 and V4.
FAMILIES = {
    "Qwen/Qwen3-0.6B": "hermes",
    "Qwen/Qwen3-4B-Instruct-2507": "hermes",
    "Qwen/Qwen3-4B-Thinking-2507": "hermes",
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": "parameters",
    "Qwen/Qwen3-Coder-Next": "parameters",
    "Qwen/Qwen3.5-9B": "parameters",
    "Qwen/Qwen3.8-27B": "parameters",
    "deepseek-ai/DeepSeek-V3-0324": "deepseek",
    "deepseek-ai/DeepSeek-V3.1": "deepseek 3.1",
    "google/gemma-4-31B-it": "gemma",
    "meta-llama/Llama-3.3-70B-Instruct": "llama",
    "mistralai/Devstral-Small-2507": "mistral",
    "mistralai/Magistral-Small-2506": "mistral",
    "mistralai/Magistral-Small-2509": "mistral",
    "mistralai/Ministral-3-14B-Instruct-2512": "mistral",
    "mistralai/Ministral-3-14B-Reasoning-2512": "mistral",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistral list",
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "moonshotai/Kimi-K2-Instruct-0905": "kimi",
    "moonshotai/Kimi-K2.6": "kimi",
    "openai/gpt-oss-20b": "channels",
    "zai-org/GLM-4.5": "glm lines",
    "zai-org/GLM-4.7": "arg_key",
    "zai-org/GLM-5.3": "arg_key",
}
NUM_FIXTURES = 200  # at least so many are read; version 0.1.1 has 217
# The text of an argument has the name of a special token, which the tokenizer of the tests reads as
# that token; or it has the marker that ends an argument.
UNREADABLE = {
    "gemma4/marker-in-arguments",
    "gpt-oss/harmony-marker-in-arguments",
    "gpt-oss/harmony-marker-in-reasoning",
    "llama/l3-marker-in-arguments",
    "mistral/v13think-marker-in-arguments",
    "qwen3-xml/q38-marker-in-arguments",
}


def make_tokenizer(family: str) -> Tokenizer:
    """Return a tokenizer with a template of the tests that writes calls and thoughts."""
    if family == "gemma":
        made = tool_tokenizer(family, more=(("<|channel>", True), ("<channel|>", True)))
        template = TEMPLATES[family] + "{# <|channel>thought #}"
    elif family == "glm lines":  # as in "arg_key", with line breaks between all parts
        made = thinking_tokenizer("arg_key")
        template = made.chat_template or ""
        for old, new in (
            ("'<tool_call>' + call.function.name", "'\\n<tool_call>' + call.function.name + '\\n'"),
            ("</arg_key><arg_value>", "</arg_key>\\n<arg_value>"),
            ("'</arg_value>'", "'</arg_value>\\n'"),
        ):
            assert template.count(old) == 1
            template = template.replace(old, new)
    else:
        return thinking_tokenizer(family)
    return Tokenizer(made.backend, special_tokens=SPECIAL, chat_template=template)


def read_fixtures(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the fixtures that a template has rendered as a whole, of known families."""
    for path in sorted(folder.glob("*/*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            fixture = json.loads(line)
            is_whole = "expected" in fixture and "truncated" not in fixture["tags"]
            is_rendered = fixture["provenance"]["kind"] == "template_render"
            if is_whole and is_rendered and fixture["models"][0] in FAMILIES:
                yield fixture


def begins_in_thoughts(fixture: dict[str, Any]) -> bool:
    """Return whether the prompt of a fixture ends with the begin marker of thoughts."""
    prompt = fixture.get("generation_prompt", "").rstrip()
    before, marker, _ = fixture["raw_output"].partition("</think>")
    closes = bool(marker) and "<think>" not in before
    return prompt.endswith("<think>") or (closes and not prompt.endswith("</think>"))


def as_values(parsed: Parsed) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return thoughts and text without spaces around them, and calls with parsed arguments.

    Arguments that are no JSON stay text.
    """
    thoughts, text, calls = parsed
    values = list[tuple[str, Any]]()
    for name, arguments in calls:
        try:
            values.append((name, json.loads(arguments or "{}")))
        except ValueError:
            values.append((name, arguments))
    return thoughts.strip(), text.strip(), values


def test_rendered_answers(installed: Install) -> None:
    folder = installed("canitoolcall").packages / "canitoolcall" / "_data" / "fixtures"
    forms = {name: AnswerFormat(make_tokenizer(name)) for name in {*FAMILIES.values()}}
    num_read = 0
    wrong = dict[str, Any]()
    for fixture in read_fixtures(folder):
        form = forms[FAMILIES[fixture["models"][0]]]
        functions = [tool["function"] for tool in fixture["tools"]]
        schemas = {each["name"]: json.dumps(each.get("parameters", {})) for each in functions}
        opened = begins_in_thoughts(fixture)
        pieces = pieces_of(form.tokenizer, fixture["raw_output"])
        whole, single = (
            read(form.reader(schemas, opened=opened), each) for each in (pieces, [*cut(pieces, 1)])
        )
        num_read += 1
        assert single == whole, fixture["id"]
        expected = fixture["expected"]
        thoughts = (expected["reasoning_content"] or "").strip()
        text = (expected["content"] or "").strip()
        calls = [(call["name"], call["arguments"]) for call in expected["tool_calls"]]
        if as_values(whole) != (thoughts, text, calls):
            wrong[fixture["id"]] = whole
    assert num_read >= NUM_FIXTURES
    assert wrong.keys() == UNREADABLE, {name: wrong[name] for name in wrong.keys() - UNREADABLE}
