"""Tools of a request, and the earlier calls in its messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from pronk.errors import OptionError
from pronk.sampling.guide import MAX_SIZE
from pronk.sampling.json_schema.relax import Relaxed
from pronk.server.protocol.guides import NAME_PATTERN
from pronk.server.protocol.request import RequestBody, Text, refuse
from pronk.tokenization.chat.answer_grammar import relax_arguments, relax_tools
from pronk.tokenization.chat.keywords import not_followed

MAX_TOOLS = 128  # maximum number of tools in one request, as in the OpenAI API


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
    """Function that the model may call.

    The arguments follow the schema as far as a grammar can enforce it, whether ``strict`` is set or not.
    """

    name: Text = Field(pattern=NAME_PATTERN)
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_template(self) -> dict[str, Any]:
        """Return the tool as a dict for chat templates."""
        values = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {name: value for name, value in values.items() if value is not None}}


class FunctionTool(RequestBody):
    """Tool of ``/v1/chat/completions``; functions are the only type."""

    type: Literal["function"]
    function: Function


class FunctionName(RequestBody):
    """Name of a function."""

    name: Text


class FunctionChoice(RequestBody):
    """Function that the answer must call."""

    type: Literal["function"]
    function: FunctionName


@dataclass(frozen=True)
class ToolUse:
    """Tools of a request and the calls that its answer may or must have."""

    functions: Sequence[Function] = ()
    choice: Literal["none", "auto", "required"] = "auto"
    name: str | None = None  # name of the tool that the answer must call, exactly once
    parallel: bool = True  # whether the answer may have several calls
    schema_field: str = "function.parameters"  # field of a tool with its schema, for error messages

    @property
    def allowed_names(self) -> list[str]:
        """Names of the tools that the answer may call; empty if calls are not allowed."""
        if self.name is not None:
            return [self.name]
        return [] if self.choice == "none" else [function.name for function in self.functions]

    @property
    def allows_text(self) -> bool:
        """Whether the answer may be text without a call."""
        return self.name is None and self.choice != "required"

    @property
    def allows_multiple(self) -> bool:
        """Whether the answer may have several calls; a named tool is called once."""
        return self.parallel and self.name is None

    def check(self) -> None:
        """Raise ``ApiError`` if a name occurs twice, or the chosen tool does not exist."""
        names = [function.name for function in self.functions]
        duplicate = next((name for number, name in enumerate(names) if name in names[:number]), None)
        if duplicate is not None:
            raise refuse("tools", f"expected distinct names, found {duplicate!r} twice; rename one")
        if self.name is not None and self.name not in names:
            raise refuse("tool_choice", f"expected the name of one of the tools, found {self.name!r}")
        if not self.allows_text and not names:
            raise refuse("tool_choice", "expected tools with 'required', found none; add tools")

    def template_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools as dicts for chat templates; ``None`` if the answer may not call tools.

        Raises ``ApiError`` if the tools are too large, or a schema is invalid.
        """
        if not self.allowed_names:
            return None
        self.schemas()
        plain = [function.to_template() for function in self.functions]
        size = len(json.dumps(plain, ensure_ascii=False))
        if size > MAX_SIZE:
            raise refuse("tools", f"expected at most {MAX_SIZE} characters, found {size}; make them smaller")
        return plain

    def schemas(self) -> Mapping[str, str]:
        """Return the schema of each allowed tool, as far as a grammar can enforce it.

        Raises ``ApiError`` if the schema of any tool allows no object.
        """
        relaxed = {function.name: each.schema for function, each in zip(self.functions, self._relaxed(), strict=True)}
        return {name: json.dumps(relaxed[name], ensure_ascii=False) for name in self.allowed_names}

    def not_enforced(self, *, python_syntax: bool = False) -> list[str]:
        """Return the keywords that calls need not follow, such as ``tools.0.function.parameters.not``.

        Args:
            python_syntax: whether the model writes calls in Python's syntax (``ToolDialect.has_keywords``), in which
                fewer keywords are enforced.

        Raises ``ApiError`` if the schema of any tool allows no object.
        """
        fields = list[str]()
        allowed = {*self.allowed_names}
        for number, (function, relaxed) in enumerate(zip(self.functions, self._relaxed(), strict=True)):
            if function.name not in allowed:
                continue
            paths = [*relaxed.dropped, *(not_followed(relaxed.schema) if python_syntax else [])]
            field = f"tools.{number}.{self.schema_field}"
            fields += [f"{field}.{path}" if path else field for path in dict.fromkeys(paths)]
        return fields

    def _relaxed(self) -> Sequence[Relaxed]:
        """Return the relaxed schema of each function."""
        for number, function in enumerate(self.functions):
            try:
                relax_arguments(function.parameters)
            except OptionError as error:
                field, message = f"tools.{number}.{self.schema_field}", str(error).removeprefix("guide: json: ")
                raise refuse(field, f"{message} (tool {function.name!r})") from error
        return relax_tools([function.parameters for function in self.functions])


def tool_call(ident: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    """Return a call of ``/v1/chat/completions``, which is also the format of chat templates."""
    return {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}
