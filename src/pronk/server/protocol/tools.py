"""Tools: what clients say of them, and how calls of them are answered."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from pronk.errors import OptionError
from pronk.outputs import Completion, Piece
from pronk.sampling.guide import MAX_SIZE, Guide
from pronk.server.protocol.guides import NAME, GuidedRequest
from pronk.server.protocol.request import RequestBody, Text, refuse
from pronk.server.settings import RequestLimits
from pronk.tokenization.chat.calls import CallPart, CallReader
from pronk.tokenization.chat.tools import ToolForm, arguments_schema

__all__ = ["ToolCall", "ToolCallMessage", "ToolRequest"]

_MOST_TOOLS = 128  # OpenAI's


class FunctionCall(RequestBody):
    """Which function a model has called, and with what."""

    name: Text = Field(pattern=NAME)
    arguments: Text


class ToolCall(RequestBody):
    """A call of before, as it was answered."""

    id: Text = Field(max_length=64)
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = Field(None, description="of a stream: not used")


class Function(RequestBody):
    """What a model may call; the arguments fit their schema, strict or not."""

    name: Text = Field(pattern=NAME)
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestBody):
    """A tool of the only type that there is."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """As templates know it."""
        function = self.function
        told = {"description": function.description, "parameters": function.parameters}
        known = {name: value for name, value in told.items() if value is not None}
        return {"type": "function", "function": {"name": function.name, **known}}


class ChosenFunction(RequestBody):
    """By its name."""

    name: Text


class ToolChoice(RequestBody):
    """The one that is to be called."""

    type: Literal["function"]
    function: ChosenFunction


class ToolRequest(GuidedRequest):
    """A request whose answer may call tools."""

    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = Field(None, max_length=_MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def allowed(self) -> list[str]:
        """Names of the tools that may be called."""
        if isinstance(self.tool_choice, ToolChoice):
            return [self.tool_choice.function.name]
        return [] if self.tool_choice == "none" else [tool.function.name for tool in self.tools or ()]

    @property
    def free(self) -> bool:
        """Whether the answer may do without a call."""
        return self.tool_choice in (None, "auto")

    def forms(self) -> dict[str, Mapping[str, Any]]:
        """See :meth:`~pronk.server.protocol.guides.FormattedRequest.forms`; that of calls depends on the model."""
        return {**super().forms(), **({"tools": {}} if self.allowed else {})}

    def check(self, limits: RequestLimits) -> None:
        """Hold the options to the server's limits; see :meth:`Ask.check`."""
        super().check(limits)
        names = [tool.function.name for tool in self.tools or ()]
        twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
        if twice is not None:
            raise refuse("tools", f"expected names of which no two are alike, found {twice!r} twice")
        if self.tool_choice == "required" and not names:
            raise refuse("tool_choice", "expected tools beside it, found none")
        if isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function.name not in names:
            raise refuse("tool_choice", f"expected the name of one of the tools, found {self.allowed[0]!r}")

    def plain_tools(self) -> list[dict[str, Any]] | None:
        """The tools as templates know them; ``None`` if none may be called.

        Raises:
            ApiError: they are too large.
        """
        if not self.allowed:
            return None
        self._schemas()
        plain = [tool.plain() for tool in self.tools or ()]
        size = len(json.dumps(plain, ensure_ascii=False))
        if size > MAX_SIZE:
            raise refuse("tools", f"expected at most {MAX_SIZE} characters, found {size}; make them smaller")
        return plain

    def call_guide(self, form: ToolForm) -> Guide:
        """The form of an answer that may, or must, call tools.

        Raises:
            ApiError: schemas that are none, or too large.
        """
        try:
            return form.guide(self._schemas(), free=self.free, several=self.parallel_tool_calls is not False)
        except OptionError as error:
            raise self.named(error) or error from error

    def _schemas(self) -> dict[str, str]:
        """Of the arguments of each tool that may be called."""
        found = {}
        for number, tool in enumerate(self.tools or ()):
            try:
                found[tool.function.name] = arguments_schema(tool.function.parameters)
            except OptionError as error:
                field, message = f"tools.{number}.function.parameters", str(error).removeprefix("guide: json: ")
                raise refuse(field, message) from error
        return {name: found[name] for name in self.allowed}


class ToolCallMessage:
    """An answer that may call tools, as it comes.

    Args:
        form: how the model calls.
        names: of the tools that it may call.
        free: whether it may be text, too; otherwise what is no call yet is the beginning of one that was cut off.
    """

    def __init__(self, form: ToolForm, names: Sequence[str], *, free: bool) -> None:
        self._reader, self._free = CallReader(form, names), free
        self._content: list[str] = []
        self._calls: list[tuple[str | None, str | None, list[str]]] = []

    def read(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """The next pieces; returns what is new, as streams have it."""
        parts = [part for piece in pieces for part in self._reader.push(piece.text, piece.token_id)]
        if pieces and pieces[-1].completion is not None:
            parts += self._reader.flush()
        return [delta for part in parts for delta in self._deltas(part)]

    def finish_reason(self, done: Completion) -> str:
        """Why it ended; a text to stop at may stand within a call."""
        whole = self._calls and done.finish_reason == "stop" and not self._reader.calling
        return "tool_calls" if whole else done.finish_reason

    def message(self) -> dict[str, Any]:
        """The whole of it."""
        content = "".join(self._content)
        calls = [_call(ident, name, "".join(arguments)) for ident, name, arguments in self._calls]
        told = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        return {**told, "tool_calls": calls} if calls else told

    def _deltas(self, part: str | CallPart) -> list[dict[str, Any]]:
        if isinstance(part, str) and not self._free:
            return []
        if isinstance(part, str):
            self._content.append(part)
            return [{"content": part}]
        if part.name is not None:
            self._calls.append((part.ident, part.name, []))
            return [{"tool_calls": [{"index": part.index, **_call(part.ident, part.name, "")}]}]
        self._calls[part.index][2].append(part.arguments)
        return [{"tool_calls": [{"index": part.index, "function": {"arguments": part.arguments}}]}]


def _call(ident: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    return {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}
