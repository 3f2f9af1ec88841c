"""Formats in which models call tools and think, and the symbols in which parsers read answers.

A model writes calls as its chat template writes the calls of earlier messages. Therefore the
template is applied to a conversation with one call, and the text around that call selects the row
of :data:`TOOL_DIALECTS`:

================  ====================================================================
row               models
================  ====================================================================
``hermes``        Hermes, Qwen until 3, SmolLM3, Granite 4; a call without markers may be
                  the whole answer (:class:`~pronk.text.chat.calls.BareCallReader`)
``parameters``    Qwen3-Coder, Qwen 3.5, Nemotron 3: arguments between tags
                  (:mod:`pronk.text.chat.tagged`)
``arg_key``       GLM since 4.5: names and values of arguments between tags
``phi``           Phi-4-mini
``granite``       Granite 3
``mistral list``  Mistral before 2025: a list of calls
``mistral``       Mistral since 2025
``llama``         Llama 3
``lfm2``          LFM2: arguments in Python's syntax (:mod:`pronk.text.chat.keywords`)
``gemma``         Gemma 4: arguments in a syntax of its own (:mod:`pronk.text.chat.braces`)
``kimi``          Kimi K2
``deepseek``      DeepSeek V3, R1
``deepseek 3.1``  DeepSeek V3.1
``channels``      gpt-oss
``generic``       others whose template has no tools: the row ``hermes``, with tools in the
                  system message (:mod:`pronk.text.chat.generic_tools`)
================  ====================================================================

A new family of models adds a row to :data:`TOOL_DIALECTS` or to :data:`REASONING_FORMATS`.
:mod:`pronk.text.chat.answer_grammar`, which forces calls, and the parsers in
:mod:`pronk.text.chat.answers` read these rows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pronk.base.errors import PromptError
from pronk.text.chat.arguments import ArgumentSyntax, JsonSyntax
from pronk.text.chat.braces import BraceSyntax
from pronk.text.chat.keywords import KeywordSyntax
from pronk.text.chat.symbols import TokenSymbols
from pronk.text.chat.tagged import TaggedSyntax
from pronk.text.tokenizer import Tokenizer

# Names of tools that are accepted. OpenAI's API allows up to 64 letters, digits, _ and -; tools of
# MCP servers have longer names.
TOOL_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,128}")
# Maximum number of characters of an id that a model writes into a call; Mistral's ids have 9.
MAX_IDENT = 40

# Name of the format for models whose chat template has no tools.
GENERIC = "generic"

# Name of the tool in the trial rendering of a chat template: a word that no template contains.
_PROBE = "zanzibar_9"


@dataclass(frozen=True)
class ToolDialect:
    r"""Format in which a model writes calls of tools.

    The texts of a call in their order, with the texts of Hermes as an example::

        begin             <tool_call>
        after_begin       \n
        before_name       {"name": "
                          f
        before_arguments  ", "arguments":
                          {…}
        after_arguments   }
        before_end        \n
        end               </tool_call>

    Attributes:
        name: name of the format.
        template: regular expression for the call in the trial rendering; each named group replaces
            the field of that name, in the dialect or in its syntax of arguments.
        begin: marker before calls; empty if the format has none.
        before_ident: marker between the name of the tool and an id that the model may write; empty
            if the format has no ids.
        end: marker after calls.
        separator: text between calls within one pair of markers; ``None`` if each call has its
            own pair.
        marker_optional: whether ``begin`` may be missing before a call at the beginning of an
            answer.
        allows_bare: whether a call without markers may be the whole answer.
        repeats_markers: whether each of several calls has its own markers.
        between_calls: text between calls that have their own markers.
        before_text: header of text in the format ``channels``; empty in the other formats.
        arguments: syntax of the arguments. If arguments end with a text of their own, this text
            belongs to the syntax.
    """

    name: str
    template: str
    begin: str = ""
    after_begin: str = ""
    before_name: str = '{"name": "'
    before_ident: str = ""
    before_arguments: str = '", "arguments": '
    after_arguments: str = "}"
    before_end: str = ""
    end: str = ""
    separator: str | None = None
    marker_optional: bool = False
    allows_bare: bool = False
    repeats_markers: bool = False
    between_calls: str = ""
    before_text: str = ""
    arguments: ArgumentSyntax = field(default_factory=JsonSyntax)


_CALL_START = rf'\{{"name": "{_PROBE}", '
_ARGUMENTS = r'"arguments": \{"x": 1\}'


def _mark(*words: str) -> str:
    """Return a marker of DeepSeek: the words between wide characters, after the word "tool"."""
    name = "\u2581".join(("tool", *words))
    return f"<\uff5c{name}\uff5c>"


TOOL_DIALECTS = (
    ToolDialect(
        "hermes",
        rf"<tool_call>(?P<after_begin>[ \n]*){_CALL_START}{_ARGUMENTS}\}}"
        r"(?P<before_end>[ \n]*)</tool_call>",
        begin="<tool_call>",
        end="</tool_call>",
        allows_bare=True,
        repeats_markers=True,
        between_calls="\n",
    ),
    ToolDialect(
        "parameters",
        rf"<tool_call>(?P<after_begin>\s*)<function={_PROBE}(?P<before_arguments>>\s*)"
        r"<parameter=x(?P<after_key>>\s*)1(?P<before_value_end>\s*)</parameter>(?P<between>\s*)"
        r"</function>(?P<before_end>\s*)</tool_call>",
        begin="<tool_call>",
        before_name="<function=",
        before_arguments=">",
        after_arguments="",
        end="</tool_call>",
        repeats_markers=True,
        between_calls="\n",
        arguments=TaggedSyntax("<parameter=", ">", "</parameter>", "</function>"),
    ),
    ToolDialect(
        "arg_key",
        # GLM-4.6 has line breaks between all parts of an answer, GLM-4.7 has none.
        rf"<tool_call>{_PROBE}(?=(?P<between_calls>\s*))(?P<before_arguments>\s*)"
        r"<arg_key>x(?P<after_key></arg_key>\s*<arg_value>)1</arg_value>(?P<between>\s*)"
        r"</tool_call>",
        begin="<tool_call>",
        before_name="",
        before_arguments="",
        after_arguments="",
        repeats_markers=True,
        arguments=TaggedSyntax(
            "<arg_key>", "</arg_key><arg_value>", "</arg_value>", "</tool_call>"
        ),
    ),
    ToolDialect(
        "phi",
        rf"<\|tool_call\|>(?P<after_begin>\[?){_CALL_START}{_ARGUMENTS}\}}"
        r"(?P<before_end>\]?)<\|/tool_call\|>",
        begin="<|tool_call|>",
        end="<|/tool_call|>",
        repeats_markers=True,
    ),
    ToolDialect(
        "granite",
        # Templates may write the list of calls in several lines; the model writes it in one.
        rf'<\|tool_call\|>\s*\[\s*\{{\s*"name": "{_PROBE}",\s*"arguments": \{{\s*"x": 1',
        begin="<|tool_call|>",
        after_begin="[",
        before_end="]",
        separator=", ",
    ),
    ToolDialect(
        "mistral list",
        # The expression ends before the last brace of the call, as an id may stand there.
        rf"\[TOOL_CALLS\](?P<after_begin> ?\[){_CALL_START}{_ARGUMENTS}",
        begin="[TOOL_CALLS]",
        before_end="]",
        separator=", ",
    ),
    ToolDialect(
        "mistral",
        rf'\[TOOL_CALLS\]{_PROBE}((?P<before_ident>\[CALL_ID\])\w*)?\[ARGS\]\{{"x": 1\}}',
        begin="[TOOL_CALLS]",
        before_name="",
        before_arguments="[ARGS]",
        after_arguments="",
        repeats_markers=True,
    ),
    ToolDialect(
        "llama",
        rf'{_CALL_START}"parameters": \{{"x": 1\}}\}}',
        begin="<|python_tag|>",
        before_arguments='", "parameters": ',
        marker_optional=True,
    ),
    ToolDialect(
        "lfm2",
        rf"<\|tool_call_start\|>\[{_PROBE}\(x=1\)\]<\|tool_call_end\|>",
        begin="<|tool_call_start|>",
        after_begin="[",
        before_name="",
        before_arguments="(",
        after_arguments="",
        before_end="]",
        end="<|tool_call_end|>",
        separator=", ",
        arguments=KeywordSyntax(),
    ),
    ToolDialect(
        "gemma",
        rf"<\|tool_call>call:{_PROBE}\{{x:1\}}<tool_call\|>",
        begin="<|tool_call>",
        before_name="call:",
        before_arguments="{",
        after_arguments="",
        end="<tool_call|>",
        repeats_markers=True,
        arguments=BraceSyntax(),
    ),
    ToolDialect(
        "kimi",
        rf"<\|tool_calls_section_begin\|><\|tool_call_begin\|>functions\.{_PROBE}:\d+"
        r'<\|tool_call_argument_begin\|>\{"x": 1\}<\|tool_call_end\|>',
        begin="<|tool_calls_section_begin|>",
        before_name="<|tool_call_begin|>functions.",
        before_ident=":",
        before_arguments="<|tool_call_argument_begin|>",
        after_arguments="<|tool_call_end|>",
        end="<|tool_calls_section_end|>",
        separator="",
    ),
    ToolDialect(
        "deepseek",
        rf"{_mark('calls', 'begin')}{_mark('call', 'begin')}function{_mark('sep')}{_PROBE}\n"
        rf'```json\n\{{"x": 1\}}\n```{_mark("call", "end")}',
        begin=_mark("calls", "begin"),
        before_name=f"{_mark('call', 'begin')}function{_mark('sep')}",
        before_arguments="\n```json\n",
        after_arguments=f"\n```{_mark('call', 'end')}",
        end=_mark("calls", "end"),
        separator="\n",
    ),
    ToolDialect(
        "deepseek 3.1",
        rf"{_mark('calls', 'begin')}{_mark('call', 'begin')}{_PROBE}{_mark('sep')}"
        rf'\{{"x": 1\}}{_mark("call", "end")}',
        begin=_mark("calls", "begin"),
        before_name=_mark("call", "begin"),
        before_arguments=_mark("sep"),
        after_arguments=_mark("call", "end"),
        end=_mark("calls", "end"),
        separator="",
    ),
    ToolDialect(
        "channels",
        rf"to=functions\.{_PROBE}<\|channel\|>commentary",
        begin="<|channel|>commentary to=functions.",
        before_name="",
        before_arguments=" <|constrain|>json<|message|>",
        after_arguments="",
        before_text="<|channel|>final<|message|>",
    ),
)


@dataclass(frozen=True)
class ReasoningFormat:
    """Format of a model's thoughts before its answer.

    Attributes:
        name: name of the format.
        template: text that the chat template of a model with this format contains.
        begin: marker before the thoughts.
        end: marker after the thoughts.
        after_end: text between the end marker and the answer; if empty, only line breaks are there.
        before_text: header of text in the format ``channels``; empty in the other formats.
    """

    name: str
    template: str
    begin: str
    end: str
    after_end: str = ""
    before_text: str = ""


REASONING_FORMATS = (
    ReasoningFormat(
        "channels",
        "<|channel|>analysis",
        "<|channel|>analysis<|message|>",
        "<|end|>",
        "<|start|>assistant",
        "<|channel|>final<|message|>",
    ),
    # the format of Qwen3, DeepSeek-R1, SmolLM3
    ReasoningFormat("think", "</think>", "<think>", "</think>"),
    ReasoningFormat("gemma", "<|channel>thought", "<|channel>thought", "<channel|>"),  # of Gemma 4
    ReasoningFormat("mistral", "[/THINK]", "[THINK]", "[/THINK]"),  # the format of Magistral
)


def find_tool_dialect(tokenizer: Tokenizer) -> ToolDialect:
    """Find the format of a model's tool calls by rendering its chat template.

    Raises:
        PromptError: the chat template does not render tools, or writes calls in an unknown format.
        TokenizerError: the model has no chat template.
    """
    names = (
        "Hermes, Qwen, SmolLM3, Granite, Phi, Mistral, Llama 3, LFM2, GLM, Gemma 4, Kimi, DeepSeek "
        "or gpt-oss"
    )
    try:
        without_call = tokenizer.chat(_PROBE_CONVERSATION[:1], tools=_TOOLS)
        with_call = tokenizer.chat(_PROBE_CONVERSATION, tools=_TOOLS)
    except PromptError:
        # the template fails without a call, too; the next condition raises its PromptError
        without_call = ""
        with_call = ""
    if not 0 < without_call.count(_PROBE) < with_call.count(_PROBE):
        msg = (
            f"tools: expected a model whose chat template has tools and calls of {names}, found "
            "another template"
        )
        raise PromptError(msg)
    for row in TOOL_DIALECTS:
        matches = list(re.finditer(row.template, with_call))
        if not matches:
            continue
        # the last match, as templates may show examples of calls before
        groups = matches[-1].groupdict()
        changes: dict[str, Any] = {name: text for name, text in groups.items() if text is not None}
        if isinstance(row.arguments, TaggedSyntax):
            own = {each.name for each in fields(row.arguments)} & {*changes}
            changes["arguments"] = replace(
                row.arguments, **{name: changes.pop(name) for name in own}
            )
        if row.marker_optional and row.begin not in TokenSymbols(tokenizer).id_only:
            changes["begin"] = ""
        if not tokenizer.template_reads_tools:
            changes["name"] = GENERIC
        return replace(row, **changes)
    shown = with_call[: with_call.rindex(_PROBE) + len(_PROBE)][-40:]
    msg = f"tools: expected calls as {names} write them, found {shown!r}"
    raise PromptError(msg)


_PARAMETERS = {
    "type": "object",
    "properties": {"x": {"type": "integer", "description": "A number."}},
}
_TOOLS = [
    {
        "type": "function",
        "function": {"name": _PROBE, "description": "Nothing.", "parameters": _PARAMETERS},
    }
]
_CALL = {"id": "abcdef123", "type": "function", "function": {"name": _PROBE, "arguments": {"x": 1}}}
_PROBE_CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
]
