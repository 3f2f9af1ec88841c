r"""Table of the formats in which models call tools and think.

A model writes calls as its chat template writes the calls of earlier messages. Therefore the template is applied to a
conversation with one call, and the text around that call selects the row.

============  ================================================================================
Hermes        ``<tool_call>\n{"name": "f", "arguments": {…}}\n</tool_call>``, also Qwen, SmolLM3 and Granite 4;
              the object may also be the whole answer, without markers
              (:mod:`pronk.tokenization.chat.bare_call`)
Granite       ``<|tool_call|>[{"name": "f", "arguments": {…}}]`` of Granite 3
Phi           ``<|tool_call|>{"name": "f", "arguments": {…}}<|/tool_call|>`` of Phi-4-mini, or a list of calls
Mistral list  ``[TOOL_CALLS] [{"name": "f", "arguments": {…}}]``
Mistral       ``[TOOL_CALLS]f[ARGS]{…}``, since 2025; or ``[TOOL_CALLS]f[CALL_ID]x[ARGS]{…}``
Llama 3       ``{"name": "f", "parameters": {…}}``, at the beginning of an answer or after
              ``<|python_tag|>``
LFM2          ``<|tool_call_start|>[f(city="Oslo", exact=True)]<|tool_call_end|>``, arguments in Python's syntax
              (:mod:`pronk.tokenization.chat.keywords`)
channels      ``<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>``
              of gpt-oss
============  ================================================================================

A new family adds a row to :data:`TOOL_DIALECTS` or :data:`REASONING_FORMATS`. The rows are read by
:mod:`pronk.tokenization.chat.answer_grammar`, which forces calls, and by the parsers in
:mod:`pronk.tokenization.chat.answers`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from pronk.errors import PromptError
from pronk.tokenization.chat.symbols import TokenSymbols
from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["MAX_IDENT", "TOOL_NAME", "ReasoningFormat", "ToolDialect", "find_reasoning_format", "find_tool_dialect"]

TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # names of tools that OpenAI's API allows
MAX_IDENT = 40  # characters of a call's id that a model may write; Mistral's have 9

_PROBE = "zanzibar_9"  # name of a tool for a trial rendering; no template contains this name


@dataclass(frozen=True)
class ToolDialect:
    r"""Format of a model's calls.

    Names of the texts in a call, for example of Hermes::

        <tool_call>  \n           {"name": "   f  ", "arguments":    {…}  }                \n          </tool_call>
        begin        after_begin  before_name     before_arguments      after_arguments   before_end  end
    """

    name: str
    template: str  # regular expression for the call of the trial rendering; its groups replace fields of the row
    begin: str = ""  # marker before calls, if the format has one
    after_begin: str = ""
    before_name: str = ""
    before_ident: str = ""  # marker between the name and an id that the model may write, if the template has one
    before_arguments: str = ""
    after_arguments: str = ""
    before_end: str = ""
    end: str = ""
    separator: str = ""  # text between calls within one pair of markers; empty if each call has its own pair
    marker_optional: bool = False  # whether the begin marker may be missing before a call at the beginning of an answer
    allows_bare: bool = False  # whether a call without markers may be the whole answer
    repeats_markers: bool = False  # whether each of several calls has its own markers
    between: str = ""  # text between calls that have their own markers
    before_text: str = ""  # header of text; not empty in channels only
    has_keywords: bool = False  # whether arguments have Python's syntax, not JSON's; the closing parenthesis ends them


_JSON_NAME, _CALL_START = '{"name": "', rf'\{{"name": "{_PROBE}", '
_ARGUMENTS = r'"arguments": \{"x": 1\}'

TOOL_DIALECTS = (
    ToolDialect(
        "hermes",
        rf"<tool_call>(?P<after_begin>[ \n]*){_CALL_START}{_ARGUMENTS}\}}(?P<before_end>[ \n]*)</tool_call>",
        begin="<tool_call>",
        before_name=_JSON_NAME,
        before_arguments='", "arguments": ',
        after_arguments="}",
        end="</tool_call>",
        allows_bare=True,
        repeats_markers=True,
        between="\n",
    ),
    ToolDialect(
        "phi",
        rf"<\|tool_call\|>(?P<after_begin>\[?){_CALL_START}{_ARGUMENTS}\}}(?P<before_end>\]?)<\|/tool_call\|>",
        begin="<|tool_call|>",
        before_name=_JSON_NAME,
        before_arguments='", "arguments": ',
        after_arguments="}",
        end="<|/tool_call|>",
        repeats_markers=True,
    ),
    ToolDialect(
        "granite",
        # Templates may write the list in several lines; the model writes it in one.
        rf'<\|tool_call\|>\s*\[\s*\{{\s*"name": "{_PROBE}",\s*"arguments": \{{\s*"x": 1',
        begin="<|tool_call|>",
        after_begin="[",
        before_name=_JSON_NAME,
        before_arguments='", "arguments": ',
        after_arguments="}",
        before_end="]",
        separator=", ",
    ),
    ToolDialect(
        "mistral list",
        rf"\[TOOL_CALLS\](?P<after_begin> ?\[){_CALL_START}{_ARGUMENTS}",  # then an id may precede the last brace
        begin="[TOOL_CALLS]",
        before_name=_JSON_NAME,
        before_arguments='", "arguments": ',
        after_arguments="}",
        before_end="]",
        separator=", ",
    ),
    ToolDialect(
        "mistral",
        rf'\[TOOL_CALLS\]{_PROBE}((?P<before_ident>\[CALL_ID\])\w*)?\[ARGS\]\{{"x": 1\}}',
        begin="[TOOL_CALLS]",
        before_arguments="[ARGS]",
        repeats_markers=True,
    ),
    ToolDialect(
        "llama",
        rf'{_CALL_START}"parameters": \{{"x": 1\}}\}}',
        begin="<|python_tag|>",
        before_name=_JSON_NAME,
        before_arguments='", "parameters": ',
        after_arguments="}",
        marker_optional=True,
    ),
    ToolDialect(
        "lfm2",
        rf"<\|tool_call_start\|>\[{_PROBE}\(x=1\)\]<\|tool_call_end\|>",
        begin="<|tool_call_start|>",
        after_begin="[",
        before_arguments="(",
        before_end="]",
        end="<|tool_call_end|>",
        separator=", ",
        has_keywords=True,
    ),
    ToolDialect(
        "channels",
        rf"to=functions\.{_PROBE}<\|channel\|>commentary",
        begin="<|channel|>commentary to=functions.",
        before_arguments=" <|constrain|>json<|message|>",
        before_text="<|channel|>final<|message|>",
    ),
)


@dataclass(frozen=True)
class ReasoningFormat:
    """Format of a model's thoughts before its answer."""

    name: str
    template: str  # text that the chat templates of such models contain
    begin: str  # marker before the thoughts
    end: str  # marker after the thoughts
    after_end: str = ""  # text between the end marker and the answer, besides line breaks
    before_text: str = ""  # header of text; not empty in channels only


REASONING_FORMATS = (
    ReasoningFormat(
        "channels",
        "<|channel|>analysis",
        "<|channel|>analysis<|message|>",
        "<|end|>",
        "<|start|>assistant",
        "<|channel|>final<|message|>",
    ),
    ReasoningFormat("think", "</think>", "<think>", "</think>"),  # Qwen3, DeepSeek-R1, SmolLM3
    ReasoningFormat("mistral", "[/THINK]", "[THINK]", "[/THINK]"),  # Magistral
)


def find_reasoning_format(tokenizer: Tokenizer) -> ReasoningFormat | None:
    """Return the format of a model's thoughts; ``None`` if its chat template has no thoughts."""
    source = tokenizer.chat_template or ""
    return next((row for row in REASONING_FORMATS if row.template in source), None)


def find_tool_dialect(tokenizer: Tokenizer) -> ToolDialect:
    """Find the format of a model's tool calls by rendering its chat template.

    Raises:
        PromptError: the chat template does not render tools, or writes calls in an unknown format.
        TokenizerError: the model has no chat template.
    """
    names = "Hermes, Qwen, SmolLM3, Granite, Phi, Mistral, Llama 3, LFM2 or gpt-oss"
    try:
        without_call = tokenizer.chat(_PROBE_CONVERSATION[:1], tools=_TOOLS)
        with_call = tokenizer.chat(_PROBE_CONVERSATION, tools=_TOOLS)
    except PromptError:
        without_call = with_call = ""  # makes the next condition true, so that a PromptError is raised
    if not 0 < without_call.count(_PROBE) < with_call.count(_PROBE):
        msg = f"tools: expected a model whose chat template has tools and calls of {names}, found another template"
        raise PromptError(msg)
    for row in TOOL_DIALECTS:
        *_, match = None, *re.finditer(row.template, with_call)  # the last match: templates may show examples
        if match is not None:
            changes: dict[str, Any] = {name: text for name, text in match.groupdict().items() if text is not None}
            if row.marker_optional and not TokenSymbols(tokenizer).is_id_only(row.begin):
                changes["begin"] = ""
            return replace(row, **changes)
    shown = with_call[: with_call.rindex(_PROBE) + len(_PROBE)][-40:]
    msg = f"tools: expected calls as {names} write them, found {shown!r}"
    raise PromptError(msg)


_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": _PROBE,
            "description": "Nothing.",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer", "description": "A number."}}},
        },
    }
]
_PROBE_CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "abcdef123", "type": "function", "function": {"name": _PROBE, "arguments": {"x": 1}}}],
    },
]
