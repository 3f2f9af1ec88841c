"""Tools of a request, and the earlier calls in its messages."""

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
from pronk.text import TOOL_NAME, Relaxed, not_followed, relax_arguments, relax_tools

# maximum number of tools in one request; OpenAI's API has 128, but agents with MCP servers send
# more
MAX_TOOLS = 1024
NAMESPACE_SEPARATOR = "__"  # between a namespace and a function in the name that the model sees
SchemaPath = tuple[str | int, ...]  # names and indices from the request to the schema of a tool
# number of texts, lists and objects in the arguments of an earlier call, which are a text
_MAX_VALUES = 2**16
MAX_ID = 512  # maximum number of characters of the id of a call


# half of a pair, as a character or as an escape
_SURROGATE = re.compile(r"[\ud800-\udfff]|\\u[dD][89a-fA-F]")


def complete_arguments(value: Any) -> Any:
    """Return the arguments of an earlier call as the JSON text of an object, which chat templates need.

    Models and clients also write other things: ``max_tokens`` may end the text anywhere within the
    object, so the strings, lists and objects that are open are closed, and a key or a number
    without its end is left out. NaN, which JSON does not have, becomes null. ``"null"`` and ``[]``
    become ``{}``; any other text or list becomes the object ``{"arguments": …}``. A blank text
    stays; chat templates get ``{}`` for it.
    """
    if not isinstance(value, (str, list, dict)):
        return value  # refused: no API has numbers and booleans as arguments
    if isinstance(value, str) and not value.strip():
        return value
    if isinstance(value, str) and has_more_values(value.encode("utf-8", "replace"), _MAX_VALUES):
        msg = f"expected at most {_MAX_VALUES} texts, lists and objects, found more; send less"
        raise ValueError(msg)
    found, is_json = _parse(value) if isinstance(value, str) else (value, False)
    if (
        isinstance(value, str)
        and isinstance(found, dict)
        and is_json
        and not _SURROGATE.search(value)
    ):
        return value  # the text that the model wrote
    if not isinstance(found, dict):
        found = {} if found is None or found in EMPTY else {"arguments": found}
    # Clients cut texts between the halves of a surrogate pair; a half becomes U+FFFD.
    text = json.dumps(found, ensure_ascii=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _parse(text: str) -> tuple[Any, bool]:
    """Return the value of a JSON text that may end early, and whether it is complete JSON without NaN.

    The value of another text is the text itself.
    """
    with suppress(ValueError, RecursionError):
        return parse_json(text, parse_constant=int), True  # int("NaN") raises ValueError
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
    """Name and arguments of a call."""

    name: Text = Field(max_length=256)
    arguments: Arguments = "{}"


class ToolCall(Record):
    """Tool call in an earlier message of the assistant."""

    # "": the next result without an id is that of this call
    id: Text = Field("", max_length=MAX_ID)
    type: Literal["function"] = "function"
    function: FunctionCall


class SkippedCall(Skipped):
    """Call of a tool that this server does not use; its result is skipped, too."""

    id: Text = Field("", max_length=MAX_ID)


def _read_schema(value: Any) -> Any:
    """Return a schema as an object: ``true`` allows any arguments, ``false`` none."""
    return ({} if value else None) if isinstance(value, bool) else value


# Schema of arguments, an object or a boolean.
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
        return {
            "type": "function",
            "function": {name: value for name, value in values.items() if value is not None},
        }


class FunctionTool(Record):
    """Tool of ``/v1/chat/completions``; tools of other types are skipped."""

    type: Literal["function"] = "function"
    function: Function

    @classmethod
    def adapt(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Read the flat forms of other APIs, such as ``{"name": "f", "input_schema": {…}}``."""
        if "function" in value or "name" not in value:
            return value
        return {
            "type": "function",
            "function": {name: each for name, each in value.items() if name != "type"},
        }

    @property
    def schema_path(self) -> tuple[str, ...]:
        """Names from the tool, as the client wrote it, to the schema of its arguments."""
        schema = self.function.written("parameters")
        return ("function", schema) if "function" in self._given else (schema,)


class FunctionName(Record):
    """Name of a function."""

    name: Text


def tool_class(tool: Mapping[str, Any]) -> type[Record]:
    """Return the class of a tool.

    One of another type is skipped, and so is a name that calls cannot have.
    """
    if (type_of(tool) or "function") != "function":
        return Skipped
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, dict) else None
    is_usable = not isinstance(name, str) or TOOL_NAME.fullmatch(name) is not None
    return FunctionTool if is_usable else Skipped


def _call_class(call: Mapping[str, Any]) -> type[Record]:
    """Return the class of a call; that of a tool that is no function is skipped."""
    return ToolCall if (type_of(call) or "function") == "function" else SkippedCall


AnyTool = Annotated[FunctionTool | Skipped, OneOf(tool_class)]
AnyToolCall = Annotated[ToolCall | SkippedCall, OneOf(_call_class)]


class AllowedTools(Record):
    """Functions that the answer may call: those of the request whose names are in ``tools``."""

    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class ToolChoice(Record):
    """``tool_choice`` as an object: a mode, a function to call, or some of the functions.

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
    choice: Literal["none", "auto", "required"] = "auto"
    name: str | None = None  # name of the tool that the answer must call, exactly once
    # whether the answer may have several calls, if the request says so
    parallel: bool | None = None
    # names of the tools that the answer may call; None: all of them
    only: Collection[str] | None = None
    # place of each function's schema in the request, for error messages
    schemas_at: Sequence[SchemaPath] = ()
    skipped: Sequence[Skipped] = ()  # tools that this server does not use

    @classmethod
    def of(
        cls,
        offered: Iterable[tuple[SchemaPath, Function]],
        choice: str | ToolChoice | None,
        *,
        parallel: bool | None = None,
        skipped: Sequence[Skipped] = (),
    ) -> ToolUse:
        """Read ``tool_choice``.

        Args:
            offered: each function with the place of its schema in the request.
            choice: field ``tool_choice``.
            parallel: field ``parallel_tool_calls``.
            skipped: tools that the server does not use.

        Raises ``ApiError`` if the choice names a tool that the server does not have, or contradicts
        ``parallel``.
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
            expected = (
                f"expected {json.dumps(not disabled)}, as tool_choice.disable_parallel_tool_use "
                "says"
            )
            raise refuse(
                "parallel_tool_calls", f"{expected}, found {json.dumps(parallel)}; leave one out"
            )
        tools["parallel"] = parallel if disabled is None else not disabled
        if choice.type in _MODES:
            return cls(**tools, choice=_MODES[choice.type])
        if choice.type == "allowed_tools":
            allowed = choice.allowed_tools or choice
            names = [
                _tool_name(each)
                for each in allowed.tools or ()
                if each.get("type", "function") == "function"
            ]
            return cls(**tools, choice=_MODES[allowed.mode or "auto"], only=names)
        inner_name = None if choice.function is None else choice.function.name
        name = inner_name or choice.name
        if None not in (choice.name, inner_name) and choice.name != inner_name:
            expected = (
                f"expected name and function.name to be the same, found {choice.name!r:.40} and "
                f"{name!r:.40}"
            )
            raise refuse("tool_choice", f"{expected}; leave one out")
        if name is not None and choice.namespace is not None:
            name = f"{choice.namespace}{NAMESPACE_SEPARATOR}{name}"
        if choice.type in ("function", "tool") and name is not None:
            return cls(**tools, choice="required", name=name)
        if any(choice.type == tool.type for tool in skipped):
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
        """Raise ``ApiError`` if tools are too large or have one name, or the chosen one does not exist."""
        check_max("tools", len(self.functions), MAX_TOOLS)
        counts = Counter(function.name for function in self.functions)
        names = [*counts]
        duplicate = next((name for name, count in counts.items() if count > 1), None)
        if duplicate is not None:
            raise refuse("tools", f"expected distinct names, found {duplicate!r} twice; rename one")
        size = len(
            json.dumps([function.to_template() for function in self.functions], ensure_ascii=False)
        )
        if size > MAX_SIZE:
            raise refuse(
                "tools", f"expected at most {MAX_SIZE} characters, found {size}; make them smaller"
            )
        unknown = next(
            (name for name in (self.name, *(self.only or ())) if name not in (None, *names)), None
        )
        if unknown is not None:
            if any(unknown == tool.name_of_tool for tool in self.skipped):
                raise _skipped_choice(unknown)
            raise refuse("tool_choice", f"expected the name of one of the tools, found {unknown!r}")
        if not self.allows_text and not self.allowed_names:
            found = (
                "only tools that this server skips; add functions"
                if self.skipped
                else "none; add tools"
            )
            raise refuse("tool_choice", f"expected tools with 'required', found {found}")

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
        relaxed = {
            function.name: each.schema
            for function, each in zip(self.functions, self._relaxed, strict=True)
        }
        return {name: json.dumps(relaxed[name], ensure_ascii=False) for name in self.allowed_names}

    def not_enforced(self, *, python_syntax: bool = False) -> list[str]:
        """Return the keywords that calls need not follow, such as ``tools[0].function.parameters.not``.

        Args:
            python_syntax: whether the model writes calls in Python's syntax
                (``ToolDialect.has_keywords``), in which fewer keywords are enforced.

        Raises ``ApiError`` if the schema of any tool allows no object.
        """
        fields = list[str]()
        allowed = {*self.allowed_names}
        for path, function, relaxed in zip(
            self._places(), self.functions, self._relaxed, strict=True
        ):
            if function.name not in allowed:
                continue
            keywords = [*relaxed.dropped, *(not_followed(relaxed.schema) if python_syntax else [])]
            fields += [
                join_path((*path, keyword) if keyword else path)
                for keyword in dict.fromkeys(keywords)
            ]
        return fields

    def _places(self) -> Sequence[SchemaPath]:
        """Return the place of each function's schema in the request."""
        return self.schemas_at or [
            ("tools", n, "function", "parameters") for n in range(len(self.functions))
        ]

    @cached_property
    def _relaxed(self) -> Sequence[Relaxed]:
        """Relaxed schema of each function."""
        try:
            return relax_tools([function.parameters for function in self.functions])
        except OptionError as error:
            raise self._schema_error() or error from error

    def _schema_error(self) -> ApiError | None:
        """Return the error of the first function whose schema is invalid."""
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
    return "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in path
    ).removeprefix(".")


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
