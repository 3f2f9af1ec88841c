"""Tools of a request and the calls in its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from pronk.errors import OptionError
from pronk.outputs import Completion, Piece
from pronk.sampling.guide import MAX_SIZE, Guide
from pronk.server.protocol.guides import NAME_PATTERN, GuidedRequest
from pronk.server.protocol.request import RequestBody, Text, refuse
from pronk.server.settings import RequestLimits
from pronk.tokenization.chat.calls import CallPart, CallReader
from pronk.tokenization.chat.tools import ToolCallFormat, arguments_schema

__all__ = ["ToolCall", "ToolCallParser", "ToolRequest"]

_MAX_TOOLS = 128  # maximum number of tools in one request, as in the OpenAI API


class FunctionCall(RequestBody):
    """Name and arguments (JSON text) of a call."""

    name: Text = Field(pattern=NAME_PATTERN)
    arguments: Text


class ToolCall(RequestBody):
    """Tool call in an earlier message of the assistant."""

    id: Text = Field(max_length=64)
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = Field(None, description="Position in a streamed answer; not used.")


class Function(RequestBody):
    """Function that the model may call. The arguments follow the schema whether ``strict`` is set or not."""

    name: Text = Field(pattern=NAME_PATTERN)
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestBody):
    """Tool; functions are the only type."""

    type: Literal["function"]
    function: Function

    def to_template(self) -> dict[str, Any]:
        """Return the tool as a dict for chat templates."""
        function = self.function
        values = {"name": function.name, "description": function.description, "parameters": function.parameters}
        return {"type": "function", "function": {name: value for name, value in values.items() if value is not None}}


class ChosenFunction(RequestBody):
    """Name of a function."""

    name: Text


class ToolChoice(RequestBody):
    """Function that the answer must call."""

    type: Literal["function"]
    function: ChosenFunction


class ToolRequest(GuidedRequest):
    """Request whose answer may call tools."""

    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = Field(None, max_length=_MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def allowed_names(self) -> list[str]:
        """Names of the tools that the answer may call; empty if calls are not allowed."""
        if isinstance(self.tool_choice, ToolChoice):
            return [self.tool_choice.function.name]
        return [] if self.tool_choice == "none" else [tool.function.name for tool in self.tools or ()]

    @property
    def allows_text(self) -> bool:
        """Whether the answer may be text without a call."""
        return self.tool_choice in (None, "auto")

    def guide_arguments(self) -> dict[str, Mapping[str, Any]]:
        """Add ``"tools": {}`` if calls are allowed; :meth:`call_guide` builds the grammar of the calls."""
        return {**super().guide_arguments(), **({"tools": {}} if self.allowed_names else {})}

    def check(self, limits: RequestLimits) -> None:
        """Check the options; see :meth:`TextRequest.check`."""
        super().check(limits)
        names = [tool.function.name for tool in self.tools or ()]
        duplicate = next((name for number, name in enumerate(names) if name in names[:number]), None)
        if duplicate is not None:
            raise refuse("tools", f"expected distinct names, found {duplicate!r} twice; rename one")
        if self.tool_choice == "required" and not names:
            raise refuse("tool_choice", "expected tools with 'required', found none; add tools")
        if isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function.name not in names:
            raise refuse("tool_choice", f"expected the name of one of the tools, found {self.allowed_names[0]!r}")

    def template_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools as dicts for chat templates; ``None`` if the answer may not call tools.

        Raises:
            ApiError: the tools are too large, or a schema is invalid.
        """
        if not self.allowed_names:
            return None
        self._schemas()
        plain = [tool.to_template() for tool in self.tools or ()]
        size = len(json.dumps(plain, ensure_ascii=False))
        if size > MAX_SIZE:
            raise refuse("tools", f"expected at most {MAX_SIZE} characters, found {size}; make them smaller")
        return plain

    def call_guide(self, call_format: ToolCallFormat) -> Guide:
        """Return the grammar of an answer that may, or must, call tools.

        Raises:
            ApiError: a schema is invalid, or the schemas are too large.
        """
        try:
            return call_format.guide(
                self._schemas(), allow_text=self.allows_text, allow_multiple=self.parallel_tool_calls is not False
            )
        except OptionError as error:
            raise self.field_error(error) or error from error

    def _schemas(self) -> dict[str, str]:
        """Return the schema of the arguments of each allowed tool; check the schemas of all tools."""
        schemas = {}
        for number, tool in enumerate(self.tools or ()):
            try:
                schemas[tool.function.name] = arguments_schema(tool.function.parameters)
            except OptionError as error:
                field, message = f"tools.{number}.function.parameters", str(error).removeprefix("guide: json: ")
                raise refuse(field, message) from error
        return {name: schemas[name] for name in self.allowed_names}


class ToolCallParser:
    """Streaming parser of one sample's answer, which may call the tools ``names``.

    If ``allows_text`` is False, the answer must be a call. Any text is then part of an incomplete call, and is dropped.
    """

    def __init__(self, call_format: ToolCallFormat, names: Sequence[str], *, allows_text: bool) -> None:
        self._reader, self._allows_text = CallReader(call_format, names), allows_text
        self._content: list[str] = []
        self._calls: list[tuple[str | None, str | None, list[str]]] = []  # id, name, parts of the arguments' JSON text

    def parse(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Parse the next pieces of the answer; return the ``delta`` objects of the chunks to send."""
        parts = [part for piece in pieces for part in self._reader.push(piece.text, piece.token_id)]
        if pieces and pieces[-1].completion is not None:
            parts += self._reader.flush()
        return [delta for part in parts for delta in self._deltas(part)]

    def finish_reason(self, done: Completion) -> str:
        """Return ``"tool_calls"`` if the answer ended with a complete call, otherwise ``done.finish_reason``."""
        complete = self._calls and done.finish_reason == "stop" and not self._reader.in_call
        return "tool_calls" if complete else done.finish_reason

    def message(self) -> dict[str, Any]:
        """Return the message of the whole answer."""
        content = "".join(self._content)
        calls = [_call(ident, name, "".join(arguments)) for ident, name, arguments in self._calls]
        message = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        return {**message, "tool_calls": calls} if calls else message

    def _deltas(self, part: str | CallPart) -> list[dict[str, Any]]:
        if isinstance(part, str):
            if not self._allows_text:
                return []
            self._content.append(part)
            return [{"content": part}]
        if part.name is not None:
            self._calls.append((part.ident, part.name, []))
            return [{"tool_calls": [{"index": part.index, **_call(part.ident, part.name, "")}]}]
        self._calls[part.index][2].append(part.arguments)
        return [{"tool_calls": [{"index": part.index, "function": {"arguments": part.arguments}}]}]


def _call(ident: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    return {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}
