"""Tools of a request, and the earlier calls in its messages."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import from_json

from pronk.errors import OptionError
from pronk.sampling.guide import MAX_SIZE
from pronk.sampling.json_schema.relax import Relaxed
from pronk.server.protocol.guides import NAME_PATTERN
from pronk.server.protocol.request import Record, Skipped, Text, check_max, refuse, unsupported
from pronk.tokenization.chat.answer_grammar import relax_arguments, relax_tools
from pronk.tokenization.chat.dialects import TOOL_NAME
from pronk.tokenization.chat.keywords import not_followed

MAX_TOOLS = 1024  # maximum number of tools in one request; OpenAI's API has 128, but agents with MCP servers send more
NAMESPACE_SEPARATOR = "__"  # between a namespace and a function in the name that the model sees
MAX_ID = 512  # maximum number of characters of the id of a call


def complete_arguments(value: Any) -> Any:
    """Return the arguments of a call as JSON text that is complete.

    The text may end anywhere within an object: the strings, lists and objects that are open are closed, and a key or a
    number without its end is left out. An object becomes its JSON text; other values are returned unchanged.
    """
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        json.loads(value)
    except (ValueError, RecursionError):
        with suppress(ValueError):
            return json.dumps(from_json(value, allow_partial="trailing-strings"), ensure_ascii=False)
    return value


# Arguments of a call in the conversation, as JSON text. ``max_tokens`` may have cut them.
Arguments = Annotated[Text, BeforeValidator(complete_arguments)]


class FunctionCall(Record):
    """Name and arguments of a call."""

    name: Text = Field(max_length=256)
    arguments: Arguments = "{}"


class ToolCall(Record):
    """Tool call in an earlier message of the assistant."""

    id: Text = Field("", max_length=MAX_ID)  # "": the next result of a tool is that of this call
    type: Literal["function"] = "function"
    function: FunctionCall


class SkippedCall(Skipped):
    """Call of a tool that this server does not use; its result is skipped, too."""

    id: Text = Field("", max_length=MAX_ID)


class Function(Record):
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


class FunctionTool(Record):
    """Tool of ``/v1/chat/completions``; tools of other types are skipped."""

    type: Literal["function"] = "function"
    function: Function

    @classmethod
    def adapt(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Read the flat forms of other APIs, such as ``{"name": "f", "input_schema": {…}}``."""
        if "function" in value or "name" not in value:
            return value
        function = {name: each for name, each in value.items() if name != "type"}
        if "input_schema" in function:
            function.setdefault("parameters", function.pop("input_schema"))
        return {"type": "function", "function": function}


class FunctionName(Record):
    """Name of a function."""

    name: Text


def tool_kind(value: Any) -> str:
    """Return the tag of a tool: ``other`` for another type, and for a name that calls cannot have."""
    if not isinstance(value, dict):
        return "function" if isinstance(value, FunctionTool) else "other"
    function = value.get("function", value)
    name = function.get("name") if isinstance(function, dict) else None
    if value.get("type", "function") != "function":
        return "other"
    return "other" if isinstance(name, str) and TOOL_NAME.fullmatch(name) is None else "function"


def _call_kind(value: Any) -> str:
    """Return the tag of a call: ``other`` for that of a tool that is no function."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "function" if kind in (None, "function") else "other"


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[Skipped, Tag("other")], Discriminator(tool_kind)
]
AnyToolCall = Annotated[
    Annotated[ToolCall, Tag("function")] | Annotated[SkippedCall, Tag("other")], Discriminator(_call_kind)
]


class AllowedTools(Record):
    """Functions that the answer may call: those of the request whose names are in ``tools``."""

    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class ToolChoice(Record):
    """``tool_choice`` as an object: a mode, a function to call, or some of the functions.

    ``{"type": "function", "function": {"name": "f"}}`` is OpenAI's form in chats, ``{"type": "function", "name": "f"}``
    that of ``/v1/responses``, and ``{"type": "tool", "name": "f"}`` Anthropic's.
    """

    type: Text
    name: Text | None = None
    namespace: Text | None = None
    function: FunctionName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None
    allowed_tools: AllowedTools | None = None
    disable_parallel_tool_use: bool | None = None


Choice = Literal["none", "auto", "required", "any"] | ToolChoice


@dataclass(frozen=True)
class ToolUse:
    """Tools of a request and the calls that its answer may or must have."""

    functions: Sequence[Function] = ()
    choice: Literal["none", "auto", "required"] = "auto"
    name: str | None = None  # name of the tool that the answer must call, exactly once
    parallel: bool = True  # whether the answer may have several calls
    schema_field: str = "function.parameters"  # field of a tool with its schema, for error messages
    only: Collection[str] | None = None  # names of the tools that the answer may call; None: all of them
    positions: Sequence[int] = ()  # index of each function in the request's list, if other tools were skipped

    @classmethod
    def of(
        cls,
        functions: Sequence[Function],
        positions: Sequence[int],
        choice: str | ToolChoice | None,
        *,
        parallel: bool = True,
        schema_field: str = "function.parameters",
    ) -> ToolUse:
        """Read ``tool_choice``; ``positions`` are the indices of the functions in the request's list of tools.

        Raises ``ApiError`` if the choice names a tool that the server does not have.
        """
        tools: Any = {"functions": functions, "positions": positions, "schema_field": schema_field}
        tools["parallel"] = parallel
        if choice is None or isinstance(choice, str):
            return cls(**tools, choice=_MODES[choice or "auto"])
        tools["parallel"] = parallel and not choice.disable_parallel_tool_use
        if choice.type in _MODES:
            return cls(**tools, choice=_MODES[choice.type])
        if choice.type == "allowed_tools":
            allowed = choice.allowed_tools or choice
            names = [_tool_name(each) for each in allowed.tools or () if each.get("type", "function") == "function"]
            return cls(**tools, choice=_MODES[allowed.mode or "auto"], only=names)
        name = choice.name if choice.function is None else choice.function.name
        if name is not None and choice.namespace is not None:
            name = f"{choice.namespace}{NAMESPACE_SEPARATOR}{name}"
        if choice.type not in ("function", "tool") or name is None:
            expected = "expected 'auto', 'none', 'required', or the type 'function' with a name"
            raise unsupported("tool_choice", f"{expected}, found the type {choice.type!r:.40}")
        return cls(**tools, choice="required", name=name)

    @property
    def allowed_names(self) -> list[str]:
        """Names of the tools that the answer may call; empty if calls are not allowed."""
        if self.name is not None:
            return [self.name]
        if self.choice == "none":
            return []
        return [each.name for each in self.functions if self.only is None or each.name in self.only]

    @property
    def allows_text(self) -> bool:
        """Whether the answer may be text without a call."""
        return self.name is None and self.choice != "required"

    @property
    def allows_multiple(self) -> bool:
        """Whether the answer may have several calls; a named tool is called once."""
        return self.parallel and self.name is None

    def check(self) -> None:
        """Raise ``ApiError`` if tools are too large or have one name, or the chosen one does not exist."""
        check_max("tools", len(self.functions), MAX_TOOLS)
        counts = Counter(function.name for function in self.functions)
        names = [*counts]
        duplicate = next((name for name, count in counts.items() if count > 1), None)
        if duplicate is not None:
            raise refuse("tools", f"expected distinct names, found {duplicate!r} twice; rename one")
        size = len(json.dumps([function.to_template() for function in self.functions], ensure_ascii=False))
        if size > MAX_SIZE:
            raise refuse("tools", f"expected at most {MAX_SIZE} characters, found {size}; make them smaller")
        unknown = next((name for name in (self.name, *(self.only or ())) if name not in (None, *names)), None)
        if unknown is not None:
            raise refuse("tool_choice", f"expected the name of one of the tools, found {unknown!r}")
        if not self.allows_text and not self.allowed_names:
            raise refuse("tool_choice", "expected tools with 'required', found none; add tools")

    def template_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools as dicts for chat templates; ``None`` if the answer may not call tools.

        Raises ``ApiError`` if a schema is invalid.
        """
        if not self.allowed_names:
            return None
        self.schemas()
        return [function.to_template() for function in self.functions]

    def schemas(self) -> Mapping[str, str]:
        """Return the schema of each allowed tool, as far as a grammar can enforce it.

        Raises ``ApiError`` if the schema of any tool allows no object.
        """
        relaxed = {function.name: each.schema for function, each in zip(self.functions, self._relaxed(), strict=True)}
        return {name: json.dumps(relaxed[name], ensure_ascii=False) for name in self.allowed_names}

    def not_enforced(self, *, python_syntax: bool = False) -> list[str]:
        """Return the keywords that calls need not follow, such as ``tools[0].function.parameters.not``.

        Args:
            python_syntax: whether the model writes calls in Python's syntax (``ToolDialect.has_keywords``), in which
                fewer keywords are enforced.

        Raises ``ApiError`` if the schema of any tool allows no object.
        """
        fields = list[str]()
        allowed = {*self.allowed_names}
        numbered = zip(self._positions(), self.functions, self._relaxed(), strict=True)
        for number, function, relaxed in numbered:
            if function.name not in allowed:
                continue
            paths = [*relaxed.dropped, *(not_followed(relaxed.schema) if python_syntax else [])]
            field = f"tools[{number}].{self.schema_field}"
            fields += [f"{field}.{path}" if path else field for path in dict.fromkeys(paths)]
        return fields

    def _positions(self) -> Sequence[int]:
        """Return the index of each function in the request's list of tools."""
        return self.positions or range(len(self.functions))

    def _relaxed(self) -> Sequence[Relaxed]:
        """Return the relaxed schema of each function."""
        for number, function in zip(self._positions(), self.functions, strict=True):
            try:
                relax_arguments(function.parameters)
            except OptionError as error:
                field, message = f"tools.{number}.{self.schema_field}", str(error).removeprefix("guide: json: ")
                raise refuse(field, f"{message} (tool {function.name!r})") from error
        return relax_tools([function.parameters for function in self.functions])


_MODES: Mapping[str, Literal["none", "auto", "required"]] = {
    "none": "none",
    "auto": "auto",
    "required": "required",
    "any": "required",
}


def _tool_name(tool: Mapping[str, Any]) -> str:
    """Return the name of a function in ``allowed_tools``, which has the form of chats or of responses."""
    function = tool.get("function")
    return str(function.get("name") if isinstance(function, Mapping) else tool.get("name"))


def tool_call(ident: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    """Return a call of ``/v1/chat/completions``, which is also the format of chat templates."""
    return {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}
