r"""The forms in which models call tools.

A model calls tools as its chat template writes the calls of before, so the template is asked: it renders a conversation
with a call in it, and what stands around the call is the form.

=========  =========================================================================
Hermes     ``<tool_call>\n{"name": "f", "arguments": {…}}\n</tool_call>``, also Qwen
Mistral    ``[TOOL_CALLS] [{"name": "f", "arguments": {…}}]``
Llama 3    ``{"name": "f", "parameters": {…}}``, at the very beginning of an answer or
           behind ``<|python_tag|>``
=========  =========================================================================

The grammar of a form is exact, to the last space: what the model leaves open is which tool, and its arguments, which
fit the tool's schema. An answer that need not call any is free up to the place where a call begins; from there on it
is one. :mod:`pronk.tokenization.chat.calls` reads calls back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

from pronk.errors import OptionError, PromptError
from pronk.sampling.guide import WRITTEN, Guide
from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["TOOL_NAME", "Marker", "ToolForm", "arguments_schema", "find_form"]

TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

_PROBE = "zanzibar_9"


class Marker(NamedTuple):
    """What begins or ends calls.

    Attributes:
        text: how it is written.
        token: its id, if it is one token that grammars know by its id alone; otherwise it is text as any other.
        silent: whether it reads as nothing.
    """

    text: str
    token: int | None = None
    silent: bool = False

    @property
    def spelled(self) -> str:
        """What is to be read of it."""
        return "" if self.silent else self.text


@dataclass(frozen=True)
class ToolForm:
    """How one model calls tools.

    Attributes:
        name: ``"hermes"``, ``"mistral"`` or ``"llama"``.
        key: of the arguments.
        opening: text between what begins a call and its first brace.
        closing: text behind the last brace, up to what ends the call.
        begin: what begins calls; Llama may do without.
        end: what ends them, if anything.
        joint: text between calls within one pair of markers, where there may be several.
        others: ids, beside that of ``begin``, of tokens that grammars know by their ids alone; free text may have them.
    """

    name: str
    key: str = "arguments"
    opening: str = ""
    closing: str = ""
    begin: Marker | None = None
    end: Marker | None = None
    joint: str = ""
    others: frozenset[int] = field(default=frozenset(), repr=False)

    @property
    def head(self) -> str:
        """What stands before a tool's name."""
        return '{"name": "'

    @property
    def middle(self) -> str:
        """What stands between its name and its arguments."""
        return f'", "{self.key}": '

    @property
    def bare(self) -> bool:
        """Whether an answer may begin with a call as it is."""
        return self.name == "llama"

    def guide(self, schemas: Mapping[str, str], *, free: bool, several: bool) -> Guide:
        """The form of an answer.

        Args:
            schemas: of the arguments of each tool that may be called, by its name (:func:`arguments_schema`).
            free: it may be text, too; otherwise it is one call or more.
            several: it may call more than once.

        Raises:
            OptionError: the schemas are too large.
        """
        rules = [self._start(free=free, several=several)]
        inner = f"{_quoted(self.joint)} call" if self.joint else ""
        more = f" ({inner})*" if inner and several else ""
        end = f" {_atom(self.end)}" if self.end else ""
        rules.append(f"body: {_quoted(self.opening)} call{more} {_quoted(self.closing)}{end}")
        rules.append(f'call: {_quoted(self.head)} tool "}}"')
        rules.append("tool: " + " | ".join(f"tool_{number}" for number in range(len(schemas))))
        for number, (name, schema) in enumerate(schemas.items()):
            rules.append(f"tool_{number}: {_quoted(name + self.middle)} %json {schema}")
        return Guide(grammar="\n".join(rules))

    def _start(self, *, free: bool, several: bool) -> str:
        """The rules of an answer: calls alone, or free text with calls in it.

        A marker that is text begins a call however its tokens spell it. A ``lazy`` rule ends at the first one.
        """
        again = several and self.name == "hermes"
        begin = f"{_atom(self.begin)} " if self.begin else ""
        if not free:
            section = "body" if self.bare else f"{begin}body"
            return f'start: {section} ("\\n" {section})*' if again else f"start: {section}"
        rules = ["TEXT: /(.|\\n)*/", f"text: {self._text()}"]
        if self.bare:
            called = f"text ({begin}body)?" if self.begin else "text"
            return "\n".join([f"start: body | {called}", f"PLAIN: TEXT & ~/{re.escape(self.head)}(?s:.*)/", *rules])
        heads = [f"text {_atom(self.begin)}"] if self.begin and self.begin.token is not None else []
        if self.begin and not self.begin.silent:
            heads.append("spelled")
            rules.append(f"spelled: {self._others()} trigger")
            rules.append(f"trigger[lazy]: TEXT {_quoted(self.begin.text)}")
        start = "start: (head body)* text" if again else "start: head body | text"
        return "\n".join([start, f"head: {' | '.join(heads)}", *rules])

    def _text(self) -> str:
        """Free text, in which nothing begins a call."""
        if not self.bare:
            return f"{self._others()} TEXT"
        ranges = _ranges(self.others)
        return f"PLAIN? | PLAIN? {ranges} {self._others()} TEXT" if ranges else "PLAIN?"

    def _others(self) -> str:
        ranges = _ranges(self.others)
        return f"(TEXT {ranges})*" if ranges else ""


def arguments_schema(parameters: Mapping[str, Any] | None) -> str:
    """The schema of a tool's arguments, which are an object, as text; without parameters there are none.

    Raises:
        OptionError: the parameters are no schema of an object.
    """
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    kind = parameters.get("type", "object")
    if kind != "object":
        msg = f"guide: json: expected a schema of the type 'object', found the type {kind!r:.60}"
        raise OptionError(msg)
    validate_draft = Guide(json={**parameters, "type": "object", "x-guidance": WRITTEN})
    return validate_draft.source


def find_form(tokenizer: Tokenizer) -> ToolForm:
    """The form of a model's calls.

    Raises:
        PromptError: its template has no tools, or calls them in a form that is not known here.
        TokenizerError: it has no template.
    """
    try:
        listed, written = (tokenizer.chat(messages, tools=_TOOLS) for messages in (_TALK[:1], _TALK))
    except PromptError:
        listed = written = ""
    before, found, after = written.rpartition(f'{{"name": "{_PROBE}", ')
    if _PROBE not in listed or not found:
        msg = (
            "tools: expected a model whose chat template has tools, and calls them as Hermes, Qwen, Mistral or Llama 3 "
            "do; found another template"
        )
        raise PromptError(msg)
    form = _form(tokenizer, before, after)
    if form is None:
        msg = f"tools: expected calls as Hermes, Qwen, Mistral or Llama 3 write them, found {before[-20:] + found!r}"
        raise PromptError(msg)
    return form


def _form(tokenizer: Tokenizer, before: str, after: str) -> ToolForm | None:
    """By what stands before the first brace, and behind the name."""
    key, _, rest = after.partition(': {"x": 1}}')
    opened, closed = re.search(r"<tool_call>([ \n]*)\Z", before), re.match(r"([ \n]*)</tool_call>", rest)
    listed = re.search(r"\[TOOL_CALLS\]( ?\[)\Z", before)
    if key == '"arguments"' and opened and closed:
        markers = _marker(tokenizer, "<tool_call>"), _marker(tokenizer, "</tool_call>")
        form = ToolForm("hermes", "arguments", opened[1], closed[1], *markers)
    elif listed and after.startswith('"arguments": {"x": 1}'):  # an id may follow
        form = ToolForm("mistral", "arguments", listed[1], "]", _marker(tokenizer, "[TOOL_CALLS]"), joint=", ")
    elif key == '"parameters"':
        tag = _marker(tokenizer, "<|python_tag|>")
        form = ToolForm("llama", "parameters", begin=None if tag.token is None else tag)
    else:
        return None
    known = {i for i, token in tokenizer.backend.get_added_tokens_decoder().items() if _by_id(token)}
    taken = {form.begin.token} if form.begin else set()
    return replace(form, others=frozenset(known - taken - {*tokenizer.eos_ids}))


def _marker(tokenizer: Tokenizer, text: str) -> Marker:
    for token_id, token in tokenizer.backend.get_added_tokens_decoder().items():
        if token.content == text:
            return Marker(text, token_id if _by_id(token) else None, bool(token.special))
    return Marker(text)


def _by_id(token: Any) -> bool:
    """Whether llguidance takes an added token for one that no text spells."""
    return bool(token.special) or (token.content.startswith("<") and token.content.endswith(">"))


def _atom(marker: Marker | None) -> str:
    if marker is None:
        return ""
    return _quoted(marker.text) if marker.token is None else f"<[{marker.token}]>"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _ranges(ids: frozenset[int]) -> str:
    """Token ids as grammars have them: ``<[3,7-9]>``."""
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
_TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "abcdef123", "type": "function", "function": {"name": _PROBE, "arguments": {"x": 1}}},
        ],
    },
]
