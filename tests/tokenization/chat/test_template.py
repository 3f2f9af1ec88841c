"""Chat templates as models come with them, and contents in parts."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from checkpoints import byte_tokenizer
from pronk.errors import PromptError, TokenizerError
from pronk.tokenization.chat.template import ChatTemplate

USER = {"role": "user", "content": " What is\n2 + 2? "}
CALL = {"id": "abcdef123", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": [2]}}}
TALK = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdef123", "name": "add", "content": "4"},
    {"role": "assistant", "content": "<think>\nFour.\n</think>\n\n4", "reasoning_content": None},
    USER,
]
PARTS = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
TOO_LONG = (
    "chat template: expected one that ends, found one that loops or repeats for too long with these messages; use"
)

# What the templates of these families do, in their own ways.
FAMILIES = {
    "llama": """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\n" + "Today: " + date_string + "\\n\\n" + system_message + "<|eot|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n'+ message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one call at a time") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' + tool_call.arguments | tojson + "}<|eot|>" }}
    {%- elif message.role == "tool" %}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}""",
    "qwen": """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
            and not(message.content.startswith('<r>') and message.content.endswith('</r>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n<think>' + reasoning.strip('\\n') + '</think>' + content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>' ~ tool_call.name ~ (tool_call.arguments | tojson) ~ '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<r>\\n' + content + '\\n</r>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    "mistral": """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages if not (message.role == "tool" or message.tool_calls is defined) %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}{{- raise_exception("alternate!") }}{%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}{{- "[INST]" + system_message + "\\n\\n" }}{%- endif %}
        {{- message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if tool_call.id|length != 9 %}{{- raise_exception("9 characters!") }}{%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}{{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- else %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ', "call_id": "' + message.tool_call_id + '"}' }}
    {%- endif %}
{%- endfor %}""",
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("repeated", [1, 40])
def test_families_equal_transformers(family: str, prompt: bool, repeated: int, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": FAMILIES[family]}))
    messages = [TALK[0], *TALK[1:5] * repeated, TALK[5]]
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=prompt
    )
    ours = ChatTemplate(FAMILIES[family], {"bos_token": "<s>", "eos_token": "</s>"})
    assert ours.render(messages, add_generation_prompt=prompt) == expected
    assert expected.count("2 + 2?") == repeated + 1


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "one\ntwo"),
        ("{{ messages[0]['content'].split('\n') }}", "['one', 'two']"),
        ("{% for line in messages[0].content.splitlines() %}{{ line }}.{% endfor %}", "one.two."),
        ("{% for m in messages %}{% for part in m['content'] %}{{ part.text }}+{% endfor %}{% endfor %}", "one+two+"),
        ("{% for part in messages[0].content[1:] | list %}{{ part['text'] }}{% endfor %}", "two"),
        (
            "{% set content = messages[0].content %}{% for part in content %}{{ part.type }}{% endfor %}",
            "texttext",
        ),
    ],
)
def test_parts_are_for_templates_that_know_them(source: str, text: str) -> None:
    """Others get one text with the parts as its lines."""
    assert ChatTemplate(source, {}).render([PARTS]) == text


def test_malformed_messages_are_refused() -> None:
    with pytest.raises(PromptError, match="messages: expected a list of objects with 'role' and 'content', found None"):
        ChatTemplate("x", {}).render(None)  # type: ignore[arg-type]
    with pytest.raises(PromptError, match=r"messages\[1\], part 0: expected the type 'text', found 'image_url'"):
        ChatTemplate("x", {}).render([USER, {"role": "user", "content": [{"type": "image_url"}]}])


LOOPS = "{% for a in range(1500) %}{% for b in range(1500) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        LOOPS,
        "{{ 'x'.center(2 * 10**7) | length }}",
        "{{ ('%20000000d' % 1) | length }}",
        "{{ ('ab' * 10**7) | length }}",
        "{{ '{:20000000}'.format(1) | length }}",
        "{{ ([1] * 10**7) | length }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(20) }}",
    ],
)
def test_templates_that_repeat_themselves_are_stopped(source: str) -> None:
    with pytest.raises(PromptError) as caught:
        ChatTemplate(source, {}).render([USER])
    assert TOO_LONG in str(caught.value)
    assert "\n" not in str(caught.value)


def test_they_are_stopped_in_any_thread_and_the_template_goes_on() -> None:
    template = ChatTemplate("{% if messages[0].content == 'loop' %}" + LOOPS + "{% endif %}fine", {})

    def render(content: str) -> str:
        try:
            return template.render([{"role": "user", "content": content}])
        except PromptError as error:
            return str(error)

    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(render, ["loop", "talk"] * 2))
    assert [TOO_LONG in each for each in said] == [True, False] * 2
    assert said[1] == said[3] == "fine"


def test_long_conversations_have_larger_budgets() -> None:
    """A loop over all messages for each of them, and some readings of every text."""
    source = (
        "{% for m in messages %}{% set ns = namespace(n=0) %}{% for o in messages %}{% if o.role == m.role %}"
        "{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}{{ ns.n }}{{ m.content | trim | upper | lower }}{% endfor %}"
    )
    many: list[dict[str, Any]] = [{"role": "user", "content": "yes"}] * 300
    assert ChatTemplate(source, {}).render(many) == "300yes" * 300
    long = [{"role": "user", "content": "word " * 10**6}]
    assert len(ChatTemplate(source, {}).render(long)) == 5 * 10**6


def test_long_templates_are_refused() -> None:
    ChatTemplate("x" * 100_000, {})
    with pytest.raises(TokenizerError, match="chat template: expected at most 100000 characters, found 100001; use an"):
        ChatTemplate("x" * 100_001, {})


def test_what_a_template_says_is_shortened() -> None:
    with pytest.raises(PromptError) as caught:
        ChatTemplate("{{ raise_exception('no ' * 10**5) }}", {}).render([USER])
    assert 300 < len(str(caught.value)) < 400
