"""Tools that a request offers, its field ``tool_choice``, and tool calls in its messages."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import from_json

from pronk import OptionError
from pronk.server.errors import ApiError
from pronk.server.json_values import has_more_values, parse_json
from pronk.server.protocol.fields import EMPTY
from pronk.server.protocol.guides import NAME_PATTERN
from pronk.server.protocol.request import Record, Skipped, Text, check_max, refuse, unsupported
from pronk.server.protocol.unions import OneOf, type_of
from pronk.serving import MAX_SIZE
from pronk.text import TOOL_NAME, ArgumentSyntax, Relaxed, relax_arguments, relax_tools

# Maximum number of tools in one request. OpenAI's API allows 128, but agents with MCP servers send
# more.
MAX_TOOLS = 1024
NAMESPACE_SEPARATOR = "__"  # between a namespace and a function in the name that the model sees
SchemaPath = tuple[str | int, ...]  # names and indices from the request to the schema of a tool
# Maximum number of texts, lists and objects in the JSON text of an earlier call's arguments.
_MAX_VALUES = 2**16
MAX_ID = 512  # maximum number of characters of the id of a call


# Half of a surrogate pair in a JSON text, as a character or as the escape \udXXX.
_SURROGATE = re.compile(r"[\ud800-\udfff]|\\u[dD][89a-fA-F]")


def complete_arguments(value: Any) -> Any:
    """Return the arguments of an earlier call as the JSON text of an object.

    Chat templates need an object, but models and clients also write other things:

    - A text that ``max_tokens`` has cut: open strings, lists and objects are closed, and a key or
      a number without its end is left out.
    - NaN, which JSON does not have, becomes null.
    - ``"null"`` and ``[]`` become ``{}``.
    - Any other text or list becomes the object ``{"arguments": …}``.
    - A blank text stays; chat templates get ``{}`` for it.

    Raises:
        ValueError: the text has more than ``_MAX_VALUES`` texts, lists and objects.
    """
    if not isinstance(value, (str, list, dict)):
        return value  # refused later: no API has numbers or booleans as arguments
    found = value
    if isinstance(value, str):
        if not value.strip():
            return value
        if has_more_values(value.encode("utf-8", "replace"), _MAX_VALUES):
            msg = f"expected at most {_MAX_VALUES} texts, lists and objects, found more; send less"
            raise ValueError(msg)
        found, is_json = _parse(value)
        if is_json and isinstance(found, dict) and not _SURROGATE.search(value):
            return value  # unchanged, because it is the text that the model wrote
    if not isinstance(found, dict):
        found = {} if found is None or found in EMPTY else {"arguments": found}
    # Clients cut texts between the halves of a surrogate pair; a half becomes U+FFFD.
    text = json.dumps(found, ensure_ascii=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _parse(text: str) -> tuple[Any, bool]:
    """Return the value of a JSON text that may be cut off, and whether the text is valid JSON.

    A text with NaN is not valid. If nothing can be read, the value is the text itself.
    """
    with suppress(ValueError, RecursionError):
        # ``int`` raises ValueError for NaN and Infinity.
        return parse_json(text, parse_constant=int), True
    with suppress(ValueError, RecursionError):
        return parse_json(text, parse_constant=lambda _: None), False
    with suppress(ValueError, RecursionError):
        found = from_json(text, allow_partial="trailing-strings", allow_inf_nan=False)
        if isinstance(found, dict):
            return found, False
    return text, False


# Arguments of a call in the conversation, as JSON text.
Arguments = Annotated[Text, BeforeValidator(complete_arguments)]


class FunctionCall(Record):
    """Field ``function`` of a tool call: its name and arguments."""

    name: Text = Field(max_length=256)
    arguments: Arguments = "{}"


class ToolCall(Record):
    """Tool call in an earlier message of the assistant."""

    # If a call has no id, a later result without an id is its result.
    id: Text = Field("", max_length=MAX_ID)
    type: Literal["function"] = "function"
    function: FunctionCall


class SkippedCall(Skipped):
    """Call of a tool that this server does not use; the result of the call is skipped, too."""

    id: Text = Field("", max_length=MAX_ID)


def _read_schema(value: Any) -> Any:
    """Replace a boolean as the JSON schema of a function's arguments.

    ``true`` allows any arguments and becomes ``{}``. ``false`` allows no arguments and becomes
    ``None``.
    """
    if not isinstance(value, bool):
        return value
    return {} if value else None


# JSON schema of the arguments of a function: an object or a boolean.
Parameters = Annotated[dict[str, Any] | None, BeforeValidator(_read_schema)]


class Function(Record):
    """Function that the model may call.

    The arguments follow the schema as far as a grammar can enforce it, whether ``strict`` is set or
    not.
    """

    places: ClassVar[Sequence[str]] = ("function",)
    meaningful: ClassVar = {"parameters": {}}

    name: Text = Field(pattern=NAME_PATTERN)
    description: Text | None = None
    parameters: Parameters | None = None
    strict: bool | None = None

    def to_template(self) -> dict[str, Any]:
        """Return the tool as a dict for chat templates."""
        values = {"name": self.name, "description": self.description, "parameters": self.parameters}
        given = {name: value for name, value in values.items() if value is not None}
        return {"type": "function", "function": given}


class FunctionTool(Record):
    """Tool of ``/v1/chat/completions``; tools of other types are skipped."""

    type: Literal["function"] = "function"
    function: Function

    @classmethod
    def adapt(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Convert the flat forms of other APIs, such as ``{"name": "f", "input_schema": {…}}``."""
        if "function" in value or "name" not in value:
            return value
        function = {name: each for name, each in value.items() if name != "type"}
        return {"type": "function", "function": function}

    @property
    def schema_path(self) -> tuple[str, ...]:
        """Names that lead from the tool to the schema of its arguments, as the client wrote it."""
        schema = self.function.written("parameters")
        return ("function", schema) if "function" in self._given else (schema,)


class FunctionName(Record):
    """Field ``function`` of ``tool_choice``: the name of a function."""

    name: Text


def tool_class(tool: Mapping[str, Any]) -> type[Record]:
    """Return the class that parses a tool.

    The class is ``Skipped``, for tools that the server ignores, unless the tool is a function whose
    name a grammar can have (``TOOL_NAME``).
    """
    if (type_of(tool) or "function") != "function":
        return Skipped
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, dict) else None
    is_usable = not isinstance(name, str) or TOOL_NAME.fullmatch(name) is not None
    return FunctionTool if is_usable else Skipped


def _call_class(call: Mapping[str, Any]) -> type[Record]:
    """Return the class of a call: ``SkippedCall`` for a call of a tool that is no function."""
    return ToolCall if (type_of(call) or "function") == "function" else SkippedCall


AnyTool = Annotated[FunctionTool | Skipped, OneOf(tool_class)]
AnyToolCall = Annotated[ToolCall | SkippedCall, OneOf(_call_class)]


class AllowedTools(Record):
    """Field ``allowed_tools`` of ``tool_choice``: the functions that the answer may call."""

    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class ToolChoice(Record):
    """Field ``tool_choice`` as an object: a mode, a function to call, or some of the functions.

    ``{"type": "function", "function": {"name": "f"}}`` is OpenAI's form in chats, ``{"type":
    "function", "name": "f"}`` that of ``/v1/responses``, and ``{"type": "tool", "name": "f"}``
    Anthropic's.
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
    # Whether the answer has no calls, may have calls, or must have one, as in OpenAI's API.
    choice: Literal["none", "auto", "required"] = "auto"
    name: str | None = None  # name of the tool that the answer must call, exactly once
    # Whether the answer may have several calls; None if the request does not say.
    parallel: bool | None = None
    # Names of the tools that the answer may call; None means all of them.
    only: Collection[str] | None = None
    # Names and indices that lead to each function's schema in the request, for error messages.
    schemas_at: Sequence[SchemaPath] = ()
    skipped: Sequence[Skipped] = ()  # tools of types that the server ignores, such as a web search

    @classmethod
    def of(
        cls,
        offered: Iterable[tuple[SchemaPath, Function]],
        choice: str | ToolChoice | None,
        *,
        parallel: bool | None = None,
        skipped: Sequence[Skipped] = (),
    ) -> ToolUse:
        """Return the tools and allowed calls that the fields of a request describe.

        Args:
            offered: each function with the place of its schema in the request.
            choice: field ``tool_choice``.
            parallel: field ``parallel_tool_calls``.
            skipped: tools of types that the server ignores, such as a web search.

        Raises:
            ApiError: the choice names a tool that the server does not use, is of an unknown type,
                or contradicts ``parallel``.
        """
        pairs = [*offered]
        functions = [function for _, function in pairs]
        tools: Any = {
            "functions": functions,
            "schemas_at": [path for path, _ in pairs],
            "skipped": skipped,
        }
        if choice is None or isinstance(choice, str):
            return cls(**tools, choice=_MODES[choice or "auto"], parallel=parallel)
        disabled = choice.disable_parallel_tool_use
        if None not in (parallel, disabled) and parallel == disabled:
            source = "tool_choice.disable_parallel_tool_use"
            expected = f"expected {json.dumps(not disabled)}, as {source} says"
            found = f"found {json.dumps(parallel)}; leave one out"
            raise refuse("parallel_tool_calls", f"{expected}, {found}")
        tools["parallel"] = parallel if disabled is None else not disabled
        if choice.type in _MODES:
            return cls(**tools, choice=_MODES[choice.type])
        if choice.type == "allowed_tools":
            allowed = choice.allowed_tools or choice
            names = _function_names(allowed.tools or ())
            return cls(**tools, choice=_MODES[allowed.mode or "auto"], only=names)
        inner_name = None if choice.function is None else choice.function.name
        name = inner_name or choice.name
        if None not in (choice.name, inner_name) and choice.name != inner_name:
            found = f"{choice.name!r:.40} and {name!r:.40}"
            problem = f"expected name and function.name to be the same, found {found}"
            raise refuse("tool_choice", f"{problem}; leave one out")
        if name is not None and choice.namespace is not None:
            name = f"{choice.namespace}{NAMESPACE_SEPARATOR}{name}"
        if choice.type in ("function", "tool") and name is not None:
            return cls(**tools, choice="required", name=name)
        if any(choice.type == each.type for each in skipped):
            raise _skipped_choice(choice.type)
        expected = "expected 'auto', 'none', 'required', or the type 'function' with a name"
        raise unsupported("tool_choice", f"{expected}, found the type {choice.type!r:.40}")

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
        if self.name is not None:
            return False
        return self.allows_text if self.parallel is None else self.parallel

    def check(self) -> None:
        """Check the tools and the choice among them.

        Raises:
            ApiError: there are too many tools, two have the same name, they are too large, or the
                chosen tool does not exist.
        """
        check_max("tools", len(self.functions), MAX_TOOLS)
        counts = Counter(function.name for function in self.functions)
        names = [*counts]
        duplicate = next((name for name, count in counts.items() if count > 1), None)
        if duplicate is not None:
            raise refuse("tools", f"expected distinct names, found {duplicate!r} twice; rename one")
        templates = [function.to_template() for function in self.functions]
        size = len(json.dumps(templates, ensure_ascii=False))
        if size > MAX_SIZE:
            problem = f"expected at most {MAX_SIZE} characters, found {size}; make them smaller"
            raise refuse("tools", problem)
        chosen = (self.name, *(self.only or ()))
        unknown = next((name for name in chosen if name not in (None, *names)), None)
        if unknown is not None:
            if any(unknown == tool.name_of_tool for tool in self.skipped):
                raise _skipped_choice(unknown)
            raise refuse("tool_choice", f"expected the name of one of the tools, found {unknown!r}")
        if not self.allows_text and not self.allowed_names:
            found = "none; add tools"
            if self.skipped:
                found = "only tools that this server skips; add functions"
            raise refuse("tool_choice", f"expected tools with 'required', found {found}")

    def template_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools as dicts for chat templates; ``None`` if the answer may not call tools.

        Raises:
            ApiError: a schema is invalid.
        """
        if not self.allowed_names:
            return None
        self.schemas()
        return [function.to_template() for function in self.functions]

    def schemas(self) -> Mapping[str, str]:
        """Return the JSON text of the argument schema of each tool that the answer may call.

        The keys are the tools' names. Keywords that a grammar cannot enforce are left out.

        Raises:
            ApiError: the schema of any tool allows no object.
        """
        relaxed = dict[str, Any]()
        for function, each in zip(self.functions, self._relaxed, strict=True):
            relaxed[function.name] = each.schema
        return {name: json.dumps(relaxed[name], ensure_ascii=False) for name in self.allowed_names}

    def not_enforced(self, syntax: ArgumentSyntax | None = None) -> list[str]:
        """Return the paths of keywords in the tools' schemas that the answer's calls may violate.

        For example ``tools[0].function.parameters.not``.

        Args:
            syntax: syntax of the model's arguments, of which some enforce fewer keywords than
                JSON; ``None``: JSON.

        Raises:
            ApiError: the schema of any tool allows no object.
        """
        fields = list[str]()
        allowed = {*self.allowed_names}
        tools = zip(self._places(), self.functions, self._relaxed, strict=True)
        for path, function, relaxed in tools:
            if function.name not in allowed:
                continue
            keywords = [*relaxed.dropped]
            if syntax is not None:
                keywords += syntax.not_followed(relaxed.schema)
            for keyword in dict.fromkeys(keywords):
                fields.append(join_path((*path, keyword) if keyword else path))
        return fields

    def _places(self) -> Sequence[SchemaPath]:
        """Return the place of each function's schema in the request."""
        if self.schemas_at:
            return self.schemas_at
        numbers = range(len(self.functions))
        return [("tools", number, "function", "parameters") for number in numbers]

    @cached_property
    def _relaxed(self) -> Sequence[Relaxed]:
        """Schema of each function's arguments, and its keywords that a grammar cannot enforce.

        The schema lacks these keywords.
        """
        try:
            return relax_tools([function.parameters for function in self.functions])
        except OptionError as error:
            raise self._schema_error() or error from error

    def _schema_error(self) -> ApiError | None:
        """Return the error of the first function with an invalid schema, or ``None``."""
        for path, function in zip(self._places(), self.functions, strict=True):
            try:
                relax_arguments(function.parameters)
            except OptionError as error:
                field = ".".join(map(str, path))
                message = str(error).removeprefix("guide: json: ")
                return refuse(field, f"{message} (tool {function.name!r})")
        return None


def _skipped_choice(name: str) -> ApiError:
    message = (
        f"expected a function of the client, found {name!r:.60}, a tool that this server skips; "
        "choose another"
    )
    return unsupported("tool_choice", message)


def join_path(path: SchemaPath) -> str:
    """Return ``tools[0].function.parameters`` for ``("tools", 0, "function", "parameters")``."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return "".join(parts).removeprefix(".")


_MODES: Mapping[str, Literal["none", "auto", "required"]] = {
    "none": "none",
    "auto": "auto",
    "required": "required",
    "any": "required",
}


def _function_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the functions that ``allowed_tools`` lists.

    A function is ``{"function": {"name": …}}`` in chats, and ``{"name": …}`` in ``/v1/responses``.
    """
    names = list[str]()
    for tool in tools:
        if tool.get("type", "function") == "function":
            function = tool.get("function")
            named = function if isinstance(function, Mapping) else tool
            names.append(str(named.get("name")))
    return names


def tool_call(ident: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    """Return a tool call in the form of ``/v1/chat/completions`` and of chat templates.

    Args:
        ident: id of the call.
        name: name of the function.
        arguments: the arguments as JSON text.
    """
    return {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}
