"""Prompts equal to those of transformers, contents in parts, and errors of one line."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jinja2
import pytest

from checkpoints import byte_tokenizer
from pronk.base.errors import PromptError, TokenizerError
from pronk.text.chat.generic_tools import have_calls
from pronk.text.chat.messages import number_ids
from pronk.text.chat.template import ChatTemplate
from text.chat.tool_templates import TEMPLATES as TOOL_TEMPLATES

FILES = Path(__file__).with_name("templates").glob("*.jinja")
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in FILES} | TOOL_TEMPLATES
# Written here; it has the constructs of Gemma's template, and the block that marks text for
# training.
TEMPLATES["gemma"] = """{{ bos_token }}
{%- set prefix = messages[0]['content'] + '\n\n' if messages[0]['role'] == 'system' else '' -%}
{%- set turns = messages[1:] if prefix else messages -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception("Roles must alternate") }}{%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<turn>' + role + '\n' + (prefix if loop.first else '') }}
    {%- if message['content'] is string -%}
        {% generation %}{{ message['content'] | trim }}{% endgeneration %}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '<end>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<turn>model\n' }}{%- endif -%}"""
SOURCES = r"""
{{ {'b': [1, {'a': '<é>'}], 'a': none} | tojson }}{{ 'é' | tojson(ensure_ascii=true) }}
{{ {'b': [1], 'a': 2} | tojson(indent=4) }}{{ [{'b': 1, 'a': 2}] | tojson(separators=(',', ':'), sort_keys=true) }}
{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}
{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}
{% for m in messages %}NL  {% generation %}NL{{ m.content }}NL  {% endgeneration %}NL{% endfor %}NL
{% set n = namespace({'a': 1}, b=2) %}{% for m in messages %}{% set n.a = n.a + 1 %}{% endfor %}{{ n.a }}{{ n.b }}
{{ dict([('a', 1)], b=2) }}{{ dict.fromkeys('ab', 1) }}{{ messages[1].items() | list }}
{{ messages }}{{ tools }}{{ bos_token }}{{ documents }}{{ missing }}{{ missing is defined }}
{{ messages[1].content.split('</think>')[-1].lstrip('\n') }}{{ messages[::-1][0].role }}{{ '%05.1f' % 2.5 }}
{% macro m(v) %}{% for k in v %}{{ k }}{{ m(v[k]) if v[k] is mapping }}{% endfor %}{% endmacro %}{{ m({1: {2: 3}}) }}
{{ messages | map(attribute='role') | unique | join(', ') }}{{ messages | selectattr('role', 'in', ['user']) | list }}
{% block b %}{{ '<' ~ 'a' }}{% endblock %}{{ self.b() }}{{ '<' | e }}{% set c = cycler('a', 'b') %}{{ c.next() }}
  {% if true %}NL    keptNL  {% endif %}NL{% for i in range(3) %}{{ i }}{% endfor %}{{ messages | tojson }}
{%- for m in messages -%}NL  {{ m.role | upper }}: {{ m.content | trim }}NL{%- endfor %}{{ strftime_now('%%') }}
"""  # a template in each line
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

USER = {"role": "user", "content": ' What\'s\n2 + 2? "日本" '}
SYSTEM = {"role": "system", "content": "Be <brief> & 'kind', \"é\"."}
THOUGHT = {
    "role": "assistant",
    "content": "<think>\nFour.\n</think>\n\n4 ü",
    "reasoning_content": None,
}
ARGUMENTS = {"a": 2, "b": [2.5, None, True, "<é>'"], "c": {"x": {}}}
CALL = {"id": "abcdef123", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "abcdef123", "name": "add", "content": '{"sum": "4 ü"}'}
PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one message": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, THOUGHT, USER],
    "call": [USER, CALLING],
    "result": [SYSTEM, USER, CALLING, RESULT],
    "no content": [USER, {**CALLING, "content": None}, RESULT, THOUGHT, USER],
    "two calls": [USER, {**CALLING, "tool_calls": [CALL, CALL]}, RESULT, RESULT],
    "two users": [USER, USER],
    "developer": [{"role": "developer", "content": "x"}, USER],
    "many turns": [SYSTEM, *[USER, THOUGHT] * 40, USER],
}
NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", 'y"']}},
    "required": ["a"],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds <numbers> & 'é'.", "parameters": NUMBERS},
    },
    {
        "type": "function",
        "function": {"name": "more", "description": "More.", "parameters": {"type": "object"}},
    },
]


@pytest.fixture(scope="module")
def transformers_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **TOKENS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return AutoTokenizer.from_pretrained(folder)


def expected_prompt(tokenizer: Any, *args: Any, **kwargs: Any) -> str:
    """Return the prompt of transformers, or pronk's error with the message of the template."""
    try:
        return str(tokenizer.apply_chat_template(*args, tokenize=False, **kwargs))
    except (jinja2.TemplateError, TypeError) as refusal:
        return f"the model's chat template refuses these messages: {refusal}"


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_equal_those_of_transformers(
    name: str, conversation: str, transformers_tokenizer: Any
) -> None:
    """Templates get the role ``system`` in place of ``developer``."""
    source = TEMPLATES[name]
    messages = CONVERSATIONS[conversation]
    theirs = [
        {**message, "role": message["role"].replace("developer", "system")} for message in messages
    ]
    if name == "kimi":
        theirs = number_ids(theirs)  # as test_braces.py tests
    if name in ("granite", "lfm2") and any("tool_calls" in message for message in messages):
        pytest.skip("transformers drops calls that a template does not write")
    if "<|channel|>" in source and conversation == "two calls":
        pytest.skip("transformers drops all calls but the first; see test_harmony.py")
    template = ChatTemplate(source, TOKENS)
    if not template.reads_tools and have_calls(messages):
        pytest.skip("transformers drops calls and tools; see test_generic_tools.py")
    for tools in (None, TOOLS) if template.reads_tools else (None,):
        for given in ({"add_generation_prompt": False}, {"add_generation_prompt": True}):
            expected = expected_prompt(
                transformers_tokenizer, theirs, tools, chat_template=source, **given
            )
            try:
                prompt = template.render(messages, tools=tools, **given)
            except PromptError as error:
                prompt = str(error)
            assert prompt == expected != ""


@pytest.mark.parametrize("source", SOURCES.strip().splitlines())
def test_functions_and_blocks_equal_those_of_transformers(
    source: str, transformers_tokenizer: Any
) -> None:
    source = source.replace("NL", "\n")
    messages = [USER, THOUGHT, USER]
    tools = TOOLS if "tools" in source else None
    expected = transformers_tokenizer.apply_chat_template(
        messages, tools, chat_template=source, tokenize=False
    )
    assert (
        ChatTemplate(source, TOKENS).render(messages, tools=tools, add_generation_prompt=False)
        == expected
        != ""
    )


def test_strftime_now() -> None:
    made = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}).render([USER])
    assert abs(datetime.fromisoformat(made + "T12:00Z") - datetime.now(UTC)) < timedelta(days=2)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "one\ntwo"),
        ("{{ messages[0]['content'].split('\n') }}", "['one', 'two']"),
        ("{% for line in messages[0].content.splitlines() %}{{ line }}.{% endfor %}", "one.two."),
        (
            (
                "{% for m in messages %}{% for part in m['content'] %}{{ part.text }}+{% endfor "
                "%}{% "
                "endfor %}"
            ),
            "one+two+",
        ),
        ("{% for part in messages[0].content[1:] | list %}{{ part['text'] }}{% endfor %}", "two"),
        (
            (
                "{% set content = messages[0].content %}{% for part in content %}{{ part.type }}{% "
                "endfor %}"
            ),
            "texttext",
        ),
    ],
)
def test_parts_are_joined_for_templates_that_do_not_loop_over_them(source: str, text: str) -> None:
    assert ChatTemplate(source, {}).render([PARTS]) == text


def test_malformed_messages_are_refused() -> None:
    with pytest.raises(
        PromptError,
        match="messages: expected a list of objects with 'role' and 'content', found None",
    ):
        ChatTemplate("x", {}).render(None)  # type: ignore[arg-type]
    with pytest.raises(
        PromptError, match=r"messages\[1\], part 0: expected the type 'text', found 'image_url'"
    ):
        ChatTemplate("x", {}).render([USER, {"role": "user", "content": [{"type": "image_url"}]}])


@pytest.mark.parametrize("value", [b"x", {1, 2}, UTC, {(1, 2): 3}, object()])
def test_values_that_are_no_json_are_refused(value: object) -> None:
    with pytest.raises(
        PromptError, match=r"messages, tools: expected JSON values, found another \(.+\); "
    ) as caught:
        ChatTemplate("x", {}).render([{**USER, "extra": value}])
    assert "\n" not in str(caught.value)


def test_circular_deep_and_large_values_are_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    deep: list[Any] = []
    for _ in range(10**5):
        deep = [deep]
    for value in (circle, deep, 10**5000):
        with pytest.raises(PromptError, match="expected JSON values"):
            ChatTemplate("x", {}).render([{**USER, "extra": value}])


def test_any_text_reaches_the_template_and_comes_back() -> None:
    text = 'a\x00\r\n\u2028\ud800\U0010ffff"\\{{ 1 }}'
    assert (
        ChatTemplate("{{ messages[0].content }}", {}).render([{"role": "user", "content": text}])
        == text
    )


def test_long_conversations_are_rendered() -> None:
    """The template loops over all messages for each of them, and reads each text several times."""
    source = (
        "{% for m in messages %}{% set ns = namespace(n=0) %}{% for o in messages %}{% if o.role "
        "== m.role %}"
        "{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}{{ ns.n }}{{ m.content | trim | upper | "
        "lower }}{% endfor %}"
    )
    many: list[dict[str, Any]] = [{"role": "user", "content": "yes"}] * 300
    assert ChatTemplate(source, {}).render(many) == "300yes" * 300
    long = [{"role": "user", "content": "wörd " * 10**6}]
    assert len(ChatTemplate(source, {}).render(long)) == 5 * 10**6


def test_long_templates_are_refused() -> None:
    ChatTemplate("x" * 100_000, {})
    with pytest.raises(
        TokenizerError,
        match="chat template: expected at most 100000 characters, found 100001; use an",
    ):
        ChatTemplate("x" * 100_001, {})


def test_messages_of_a_template_are_shortened() -> None:
    with pytest.raises(PromptError) as caught:
        ChatTemplate("{{ raise_exception('no ' * 10**5) }}", {}).render([USER])
    assert 300 < len(str(caught.value)) < 400
