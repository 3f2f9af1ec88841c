r"""Tools for models whose chat template has none: described in the system message, as JSON.

The system message lists the tools and asks for calls in the form of Hermes, which most models have
seen in their training::

    <tool_call>
    {"name": "f", "arguments": {"x": 1}}
    </tool_call>

Calls of earlier answers become text in this form. The results of tools become messages of the user,
since such templates refuse the role ``tool``, and often require that user and assistant take
turns::

    <tool_response>
    4
    </tool_response>

The rendered calls are those of the row ``hermes`` in
:data:`~pronk.text.chat.dialects.TOOL_DIALECTS`, so that grammars and parsers are the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pronk.text.chat.messages import join_parts, write_calls

# Texts before, between and after the calls of a message.
_BEGIN = "<tool_call>\n"
_SEPARATOR = "\n</tool_call>\n<tool_call>\n"
_END = "\n</tool_call>"
_FORM = """\
You can call the tools in the following list. Each line describes one tool in JSON.
<tools>
{tools}
</tools>
To call a tool, answer with its name and its arguments in JSON, between these tags:
<tool_call>
{{"name": "NAME", "arguments": {{…}}}}
</tool_call>
Use one pair of tags for each call. If no tool is needed, answer with text."""


def have_calls(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a conversation has calls of tools, or results."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def write_tools(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    has_system_role: bool,
) -> list[dict[str, Any]]:
    """Return a conversation in which tools, calls and results are texts.

    Args:
        messages: checked messages (:func:`~pronk.text.chat.messages.check_messages`).
        tools: tools in OpenAI's format; empty: only calls and results are written.
        has_system_role: whether the template renders a system message at the beginning; otherwise,
            the list of tools begins the first message of the user.
    """
    written = list[dict[str, Any]]()
    after_result = False  # whether the last message of ``written`` has a result of a tool
    for message in messages:
        is_result = message["role"] == "tool"
        begin = f"\n{_BEGIN}" if message.get("content") else _BEGIN
        turn = join_parts(write_calls(message, begin, _SEPARATOR, _END))
        if is_result:
            turn = {"role": "user", "content": _result(turn["content"])}
        if after_result and turn["role"] == "user":
            written[-1]["content"] += f"\n{turn['content']}"
        else:
            written.append(turn)
        after_result = is_result or (after_result and turn["role"] == "user")
    if tools:
        _describe(written, tools, "system" if has_system_role else "user")
    return written


def _result(content: str) -> str:
    return f"<tool_response>\n{content}\n</tool_response>"


def _describe(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], role: str
) -> None:
    """Add the list of tools to the first message, which is a new one unless it has the role."""
    functions = [tool.get("function", tool) for tool in tools]
    lines = [json.dumps(function, ensure_ascii=False) for function in functions]
    text = _FORM.format(tools="\n".join(lines))
    if messages[0]["role"] != role:
        messages.insert(0, {"role": role, "content": text})
        return
    content = messages[0]["content"]
    both = [content, text] if role == "system" else [text, content]
    messages[0]["content"] = "\n\n".join(both)
