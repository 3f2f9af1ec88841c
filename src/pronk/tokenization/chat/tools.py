r"""Formats in which models call tools, found by rendering the chat template.

A model writes calls as its chat template writes the calls of earlier messages. Therefore the template is applied to a
conversation with one call, and the text around that call determines the format.

=========  =========================================================================
Hermes     ``<tool_call>\n{"name": "f", "arguments": {…}}\n</tool_call>``, also Qwen
Mistral    ``[TOOL_CALLS] [{"name": "f", "arguments": {…}}]``
Llama 3    ``{"name": "f", "parameters": {…}}``, at the beginning of an answer or
           after ``<|python_tag|>``
=========  =========================================================================

The grammar of a format is written in llguidance's dialect of Lark. It fixes every character of a call except the name
of the tool and the arguments, which fit the tool's schema. If calls are optional, the grammar allows any text up to the
beginning of a call, but then requires the call. :mod:`pronk.tokenization.chat.calls` parses calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

from pronk.errors import OptionError, PromptError
from pronk.sampling.guide import JSON_DUMPS_STYLE, Guide
from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["TOOL_NAME", "Marker", "ToolCallFormat", "arguments_schema", "find_tool_call_format"]

TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # names of tools that OpenAI's API allows

_PROBE = "zanzibar_9"  # name of a tool for a trial rendering; no template contains this name


class Marker(NamedTuple):
    """Text or token that begins or ends calls."""

    text: str
    # Id, if the marker is an added token that llguidance matches by its id (``<[7]>``) and not by text; else ``None``.
    token: int | None = None
    is_special: bool = False  # whether the marker is a special token; a decoded answer does not contain special tokens

    @property
    def decoded(self) -> str:
        """The text of the marker in a decoded answer."""
        return "" if self.is_special else self.text


@dataclass(frozen=True)
class ToolCallFormat:
    r"""Format of a model's calls.

    Names of the texts in a call, for example of Hermes::

        <tool_call>  \n           {"name": "   f  ", "arguments":    {…}}  \n          </tool_call>
        begin        after_begin  before_name     before_arguments       before_end  end
    """

    name: str  # name of the format: ``"hermes"``, ``"mistral"`` or ``"llama"``
    key: str = "arguments"  # key of the arguments in the JSON of a call
    after_begin: str = ""  # text between the begin marker and the first brace
    before_end: str = ""  # text between the last brace and the end marker
    begin: Marker | None = None  # marker before calls, if the format has one
    end: Marker | None = None  # marker after calls, if the format has one
    separator: str = ""  # text between calls within one pair of markers; empty if each call has its own pair
    marker_optional: bool = False  # whether the begin marker may be missing before a call at the beginning of an answer
    repeats_markers: bool = False  # whether each of several calls has its own markers; a line break separates calls
    # Ids of other added tokens that llguidance matches only by id. Free text may contain them; end-of-text tokens are
    # not included.
    id_only_tokens: frozenset[int] = field(default=frozenset(), repr=False)

    @property
    def before_name(self) -> str:
        """The text before the name of the tool."""
        return '{"name": "'

    @property
    def before_arguments(self) -> str:
        """The text between the name of the tool and its arguments."""
        return f'", "{self.key}": '

    def guide(self, schemas: Mapping[str, str], *, allow_text: bool, allow_multiple: bool) -> Guide:
        r"""Return the grammar of an answer.

        Example: Hermes, one tool, ``allow_text=False``. The markers are the special tokens 7 and 8. The grammar is::

            start: <[7]> body
            body: "\n" call "\n" <[8]>
            call: "{\"name\": \"" tool "}"
            tool: tool_0
            tool_0: "f\", \"arguments\": " %json {…}

        Args:
            schemas: schema of the arguments (:func:`arguments_schema`) of each allowed tool, by the tool's name.
            allow_text: allow text besides calls; otherwise the answer consists of calls.
            allow_multiple: allow more than one call.

        Raises:
            OptionError: the schemas are too large.
        """
        rules = [self._start(allow_text=allow_text, allow_multiple=allow_multiple)]
        more = f" ({_quoted(self.separator)} call)*" if self.separator and allow_multiple else ""
        end = f" {_marker_symbol(self.end)}" if self.end else ""
        rules.append(f"body: {_quoted(self.after_begin)} call{more} {_quoted(self.before_end)}{end}")
        rules.append(f'call: {_quoted(self.before_name)} tool "}}"')
        rules.append("tool: " + " | ".join(f"tool_{number}" for number in range(len(schemas))))
        for number, (name, schema) in enumerate(schemas.items()):
            rules.append(f"tool_{number}: {_quoted(name + self.before_arguments)} %json {schema}")
        return Guide(grammar="\n".join(rules))

    def _start(self, *, allow_text: bool, allow_multiple: bool) -> str:
        r"""Return the first rules of the grammar: calls only, or free text with calls in it.

        Example: Qwen, ``allow_text=True``, ``allow_multiple=True``. ``<tool_call>`` is token 7, an added token that is
        not special. Token 9 is another added token that llguidance matches only by its id. The rules are::

            start: (call_start body)* text
            call_start: text <[7]> | text_marker
            TEXT: /(.|\n)*/
            text: (TEXT <[9]>)* TEXT
            text_marker: (TEXT <[9]>)* trigger
            trigger[lazy]: TEXT "<tool_call>"

        ``text_marker`` ends with the text ``<tool_call>``, written with other tokens than token 7. ``lazy`` makes
        ``trigger`` end at the first ``<tool_call>``.
        """
        may_repeat = allow_multiple and self.repeats_markers
        begin = f"{_marker_symbol(self.begin)} " if self.begin else ""
        if not allow_text:
            calls = "body" if self.marker_optional else f"{begin}body"
            return f'start: {calls} ("\\n" {calls})*' if may_repeat else f"start: {calls}"
        rules = ["TEXT: /(.|\\n)*/", f"text: {self._text()}"]
        if self.marker_optional:
            text_then_call = f"text ({begin}body)?" if self.begin else "text"
            plain_rule = f"PLAIN: TEXT & ~/{re.escape(self.before_name)}(?s:.*)/"  # no call at the beginning
            return "\n".join([f"start: body | {text_then_call}", plain_rule, *rules])
        call_starts = [f"text {_marker_symbol(self.begin)}"] if self.begin and self.begin.token is not None else []
        if self.begin and not self.begin.is_special:
            call_starts.append("text_marker")
            rules.append(f"text_marker: {self._id_only_texts()} trigger")
            rules.append(f"trigger[lazy]: TEXT {_quoted(self.begin.text)}")
        start = "start: (call_start body)* text" if may_repeat else "start: call_start body | text"
        return "\n".join([start, f"call_start: {' | '.join(call_starts)}", *rules])

    def _text(self) -> str:
        """Return the right side of the rule ``text``: free text without the beginning of a call."""
        if not self.marker_optional:
            return f"{self._id_only_texts()} TEXT"
        ranges = _ranges(self.id_only_tokens)
        return f"PLAIN? | PLAIN? {ranges} {self._id_only_texts()} TEXT" if ranges else "PLAIN?"

    def _id_only_texts(self) -> str:
        ranges = _ranges(self.id_only_tokens)
        return f"(TEXT {ranges})*" if ranges else ""


def arguments_schema(parameters: Mapping[str, Any] | None) -> str:
    """Return the JSON schema of a tool's arguments, an object; ``None``: the tool has no arguments."""
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    kind = parameters.get("type", "object")
    if kind != "object":
        msg = f"guide: json: expected a schema of the type 'object', found the type {kind!r:.60}"
        raise OptionError(msg)
    # llguidance reads its own options, here the white space of json.dumps, from the key "x-guidance" of a schema.
    return Guide(json={**parameters, "type": "object", "x-guidance": JSON_DUMPS_STYLE}).source


def find_tool_call_format(tokenizer: Tokenizer) -> ToolCallFormat:
    """Find the format of a model's tool calls by rendering its chat template.

    Raises:
        PromptError: the chat template does not render tools, or writes calls in an unknown format.
        TokenizerError: the model has no chat template.
    """
    try:
        without_call = tokenizer.chat(_PROBE_CONVERSATION[:1], tools=_TOOLS)
        with_call = tokenizer.chat(_PROBE_CONVERSATION, tools=_TOOLS)
    except PromptError:
        without_call = with_call = ""  # makes the next condition true, so that a PromptError is raised
    before, call_start, after = with_call.rpartition(f'{{"name": "{_PROBE}", ')
    if _PROBE not in without_call or not call_start:
        msg = (
            "tools: expected a model whose chat template has tools, and calls them as Hermes, Qwen, Mistral or Llama 3 "
            "do; found another template"
        )
        raise PromptError(msg)
    call_format = _recognize(tokenizer, before, after)
    if call_format is None:
        shown = before[-20:] + call_start
        msg = f"tools: expected calls as Hermes, Qwen, Mistral or Llama 3 write them, found {shown!r}"
        raise PromptError(msg)
    return call_format


def _recognize(tokenizer: Tokenizer, before: str, after: str) -> ToolCallFormat | None:
    """Return the format by the text before a call and after the tool's name; ``None`` if unknown."""
    key, _, rest = after.partition(': {"x": 1}}')
    begin, end = re.search(r"<tool_call>([ \n]*)\Z", before), re.match(r"([ \n]*)</tool_call>", rest)
    list_start = re.search(r"\[TOOL_CALLS\]( ?\[)\Z", before)
    if key == '"arguments"' and begin and end:
        markers = _marker(tokenizer, "<tool_call>"), _marker(tokenizer, "</tool_call>")
        call_format = ToolCallFormat("hermes", "arguments", begin[1], end[1], *markers, repeats_markers=True)
    elif list_start and after.startswith('"arguments": {"x": 1}'):  # then an id may precede the last "}"
        call_format = ToolCallFormat(
            "mistral", "arguments", list_start[1], "]", _marker(tokenizer, "[TOOL_CALLS]"), separator=", "
        )
    elif key == '"parameters"':
        tag = _marker(tokenizer, "<|python_tag|>")
        marker = None if tag.token is None else tag
        call_format = ToolCallFormat("llama", "parameters", begin=marker, marker_optional=True)
    else:
        return None
    id_only = {i for i, token in tokenizer.backend.get_added_tokens_decoder().items() if _is_id_only(token)}
    begin_ids = {call_format.begin.token} if call_format.begin else set()
    return replace(call_format, id_only_tokens=frozenset(id_only - begin_ids - {*tokenizer.eos_ids}))


def _marker(tokenizer: Tokenizer, text: str) -> Marker:
    for token_id, token in tokenizer.backend.get_added_tokens_decoder().items():
        if token.content == text:
            return Marker(text, token_id if _is_id_only(token) else None, bool(token.special))
    return Marker(text)


def _is_id_only(token: Any) -> bool:
    """Return whether llguidance matches an added token by its id only, not by its text."""
    return bool(token.special) or (token.content.startswith("<") and token.content.endswith(">"))


def _marker_symbol(marker: Marker | None) -> str:
    if marker is None:
        return ""
    return _quoted(marker.text) if marker.token is None else f"<[{marker.token}]>"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _ranges(ids: frozenset[int]) -> str:
    """Return token ids in the syntax of grammars: ``<[3,7-9]>`` for 3, 7, 8 and 9."""
    spans = []
    for _, group in groupby(enumerate(sorted(ids)), lambda pair: pair[1] - pair[0]):
        run = [token for _, token in group]
        spans.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}")
    return f"<[{','.join(spans)}]>" if spans else ""


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
