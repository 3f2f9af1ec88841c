"""Requests of ``/v1/responses``, OpenAI's Responses API.

The server stores no responses, so that ``previous_response_id`` is not supported. A client sends
the whole conversation, with the items of earlier responses copied unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, field_validator

from pronk.server.protocol.chat import ChatTurn
from pronk.server.protocol.conversation import ConversationRequest
from pronk.server.protocol.guides import TextFormat
from pronk.server.protocol.parts import Content, ResultContent, as_parts, result_texts, texts_of
from pronk.server.protocol.request import (
    MaxTokens,
    Record,
    Skipped,
    Text,
    check_encodable,
    check_max,
    refuse,
    unsupported,
)
from pronk.server.protocol.responses_reply import ResponsesReply
from pronk.server.protocol.tools import (
    MAX_ID,
    MAX_TOOLS,
    NAMESPACE_SEPARATOR,
    Arguments,
    Choice,
    Function,
    FunctionTool,
    SchemaPath,
    ToolChoice,
    ToolUse,
    tool_call,
    tool_class,
)
from pronk.server.protocol.unions import OneOf, as_typed, type_of
from pronk.server.settings import RequestLimits
from pronk.text import TOOL_NAME, AnswerFormat

_LOGPROBS = "message.output_text.logprobs"  # in the field ``include``: asks for log-probabilities


class InputItem(ChatTurn):
    """Message in ``input``, which may be an unchanged copy from an earlier response."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]


class AgentMessage(Record):
    """Message of another agent, which the model reads as a message of the user."""

    type: Literal["agent_message"]
    content: Content


class CallItem(Record):
    """Item of a tool call of an earlier response."""

    type: Literal["function_call"]
    # If a call has no id, a later result without an id is its result.
    call_id: Text = Field("", max_length=MAX_ID)
    name: Text = Field(max_length=256)
    namespace: Text | None = Field(None, max_length=256)
    arguments: Arguments = "{}"


class CallOutputItem(Record):
    """Item of the result of a tool call; a note replaces each image, because models read text."""

    type: Literal["function_call_output"]
    # A result without an id belongs to the first call that has no result yet.
    call_id: Text = Field("", max_length=MAX_ID)
    output: ResultContent = ""

    @property
    def text(self) -> str:
        """The result as one text."""
        return "\n".join(result_texts(self.output))


class ThoughtText(Record):
    """Part of a ``reasoning`` item: a text of thoughts."""

    type: Text = "text"
    text: Text = ""


def _as_thoughts(value: Any) -> Any:
    return as_parts([value] if isinstance(value, str) else value)


Thoughts = Annotated[list[ThoughtText], Field(fail_fast=True), BeforeValidator(_as_thoughts)]


class ThoughtItem(Record):
    """Item of thoughts of an earlier response; encrypted ones of another server are ignored."""

    type: Literal["reasoning"]
    summary: Thoughts | None = None
    content: Thoughts | None = None


class Namespace(Record):
    """Group of functions, such as those of an MCP server.

    The name of a function for the model is ``NAMESPACE__FUNCTION``.
    """

    type: Literal["namespace"]
    name: Text = Field(max_length=128)
    description: Text | None = None
    tools: Annotated[list[NamespaceTool], Field(fail_fast=True)] | None = None

    @cached_property
    def functions(self) -> Sequence[NamespaceFunction]:
        """Functions of the group, under the names that the model sees.

        A function whose name cannot stand in a tool call is left out, and reported as ignored.
        """
        found = list[NamespaceFunction]()
        for number, tool in enumerate(self.tools or ()):
            if not isinstance(tool, FunctionTool):
                continue
            own_name = tool.function.name
            name = f"{self.name}{NAMESPACE_SEPARATOR}{own_name}"
            if TOOL_NAME.fullmatch(name) is None:
                self.note_ignored([f"tools ({own_name})"])
                continue
            function = tool.function.model_copy(update={"name": name})
            schema_path: SchemaPath = ("tools", number, *tool.schema_path)
            found.append(NamespaceFunction(function, own_name, schema_path))
        return found


class NamespaceFunction(NamedTuple):
    """Function of a namespace, under the name that the model sees."""

    function: Function
    own_name: str  # name without the namespace
    schema_path: SchemaPath  # names and indices that lead from the namespace to the schema


class ToolsItem(Record):
    """Item with tools that the conversation adds, or with the result of a search for tools."""

    type: Literal["additional_tools", "tool_search_output"]
    role: Text | None = None
    tools: Annotated[list[ResponsesTool], Field(fail_fast=True)] | None = None


class SkippedItem(Skipped):
    """Item of a tool that this server does not use; the result of its call is skipped, too."""

    call_id: Text | None = None


class UnreadableItem(Record):
    """Item that the answer needs, but the server cannot read: a stored response, image or file."""

    type: Literal["item_reference", "input_image", "input_file", "input_audio"]


class TextItem(Record):
    """Text of the user that stands in ``input`` by itself, without a message around it."""

    type: Literal["input_text"]
    text: Text


def _tool_class(tool: Mapping[str, Any]) -> type[Record]:
    return Namespace if type_of(tool) == "namespace" else tool_class(tool)


NamespaceTool = Annotated[FunctionTool | Skipped, OneOf(tool_class)]
ResponsesTool = Annotated[FunctionTool | Namespace | Skipped, OneOf(_tool_class)]

_ITEMS: Mapping[str, type[Record]] = {
    "message": InputItem,
    "agent_message": AgentMessage,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ThoughtItem,
    "additional_tools": ToolsItem,
    "tool_search_output": ToolsItem,
    "input_text": TextItem,
    **dict.fromkeys(("item_reference", "input_image", "input_file", "input_audio"), UnreadableItem),
}


def _item_class(item: Mapping[str, Any]) -> type[Record]:
    """Return the class of an item; a message may leave out its type."""
    return _ITEMS.get(type_of(item) or "message", SkippedItem)


def _as_items(value: Any) -> Any:
    """Return the field ``input`` as a text or a list of items.

    A single item may stand without a list, and a text in a list stands for a message of the user.
    """
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, list):
        return value
    return [{"role": "user", "content": item} if isinstance(item, str) else item for item in value]


Item = Annotated[
    InputItem
    | AgentMessage
    | CallItem
    | CallOutputItem
    | ThoughtItem
    | ToolsItem
    | TextItem
    | UnreadableItem
    | SkippedItem,
    OneOf(_item_class),
]
Input = Annotated[Text | Annotated[list[Item], Field(fail_fast=True)], BeforeValidator(_as_items)]


class TextOptions(Record):
    """Field ``text``: options of the answer's text; ``verbosity`` is ignored."""

    format: Annotated[TextFormat, BeforeValidator(as_typed)] | None = None


class ResponsesRequest(ConversationRequest):
    """Body of ``/v1/responses``."""

    places: ClassVar[Sequence[str]] = ("text", "responses")
    messages_field: ClassVar = "input"
    reply_type: ClassVar = ResponsesReply

    input: Input = Field(min_length=1)
    instructions: Text | None = None
    max_output_tokens: MaxTokens | None = None
    top_logprobs: int | None = Field(None, ge=0)
    include: Text | list[Text] | None = None
    text: TextOptions | None = None
    metadata: Any = Field(
        None, description="An object is repeated in the response; nothing is stored."
    )

    @field_validator("metadata")
    @classmethod
    def _check_metadata(cls, value: Any) -> Any:
        check_encodable(json.dumps(value, ensure_ascii=False))
        return value

    tools: Annotated[list[ResponsesTool], Field(fail_fast=True)] | None = Field(
        None, max_length=MAX_TOOLS
    )
    tool_choice: Choice | None = None
    continue_final_message: bool | None = Field(
        None, description="The last item is the beginning of the answer."
    )

    @property
    def continues_answer(self) -> bool:
        return bool(self.continue_final_message)

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        last = self.input[-1]
        is_answer = isinstance(last, InputItem) and last.role == "assistant"
        if self.continues_answer and not is_answer:
            problem = "expected a last message of the role 'assistant' to continue, found another"
            raise refuse("input", f"{problem} item")
        check_max("n", self.n, 1)
        check_max("top_logprobs", self.top_logprobs, limits.logprobs)
        for item in self.input:
            if isinstance(item, UnreadableItem):
                expected = f"expected items of text with their content, found {item.type!r}"
                reason = "responses are not stored, and the model reads text alone"
                raise unsupported("input", f"{expected}; {reason}")
        if self.leaps:
            expected = "expected no such field in /v1/responses"
            raise unsupported("leaps", f"{expected}, found true; use /v1/chat/completions")

    def guide_arguments(self) -> dict[str, Mapping[str, Any]]:
        if self.text is None or self.text.format is None:
            return {}
        return self.text.format.guide_arguments()

    @property
    def limit_field(self) -> str:
        return "max_output_tokens"

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_output_tokens

    def num_logprobs(self) -> int | None:
        if self.top_logprobs is None and _LOGPROBS not in self._included:
            return None
        return self.top_logprobs or 0

    @property
    def _included(self) -> list[str]:
        """Names of further parts of the reply that the request asks for (field ``include``)."""
        return [self.include] if isinstance(self.include, str) else self.include or []

    def unfollowed(self, answers: AnswerFormat) -> Iterator[str]:
        yield from super().unfollowed(answers)
        if any(name != _LOGPROBS for name in self._included):
            yield "include"

    def conversation(self) -> list[dict[str, Any]]:
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        skipped_items = [item for item in self.input if isinstance(item, SkippedItem)]
        skipped = {item.call_id for item in skipped_items if item.call_id}
        for item in self.input:
            if isinstance(item, CallOutputItem):
                if item.call_id not in skipped:
                    ident = item.call_id
                    messages.append({"role": "tool", "tool_call_id": ident, "content": item.text})
            elif isinstance(item, TextItem):
                messages.append({"role": "user", "content": item.text})
            elif isinstance(item, AgentMessage):
                messages.append({"role": "user", "content": "\n".join(texts_of(item.content))})
            elif isinstance(item, InputItem) and item.role != "assistant":
                messages.append(item.to_template())
            elif isinstance(item, (InputItem, CallItem, ThoughtItem)):
                _add_to_answer(messages, item)
        return messages

    def all_tools(self) -> list[PlacedTool]:
        """Return the tools in the field ``tools`` and in items of ``input``, each with its place.

        If a function is defined several times, the last item that defines it counts, and
        definitions in ``tools`` count least.
        """
        added: dict[object, PlacedTool] = {}
        for number, item in enumerate(self.input):
            if not isinstance(item, ToolsItem):
                continue
            for position, tool in enumerate(item.tools or ()):
                path: SchemaPath = ("input", number, "tools", position)
                added[_tool_key(path, tool)] = (path, tool)
        own = list[PlacedTool]()
        for position, tool in enumerate(self.tools or ()):
            path = ("tools", position)
            if _tool_key(path, tool) not in added:
                own.append((path, tool))
        return [*own, *added.values()]

    def namespaces(self) -> Mapping[str, tuple[str, str]]:
        """Return the namespace and the own name of each function that is in a namespace.

        The keys are the names that the model sees: ``{"NS__F": ("NS", "F")}``.
        """
        names = dict[str, tuple[str, str]]()
        for _, tool in self.all_tools():
            if isinstance(tool, Namespace):
                for each in tool.functions:
                    names[each.function.name] = (tool.name, each.own_name)
        return names

    def read_tools(self) -> ToolUse:
        offered = list[tuple[SchemaPath, Function]]()
        skipped = list[Skipped]()
        for path, tool in self.all_tools():
            if isinstance(tool, FunctionTool):
                offered.append(((*path, *tool.schema_path), tool.function))
            elif isinstance(tool, Namespace):
                offered += [((*path, *each.schema_path), each.function) for each in tool.functions]
            else:
                skipped.append(tool)
        return ToolUse.of(
            offered, self.tool_choice, parallel=self.parallel_tool_calls, skipped=skipped
        )

    def described(self) -> dict[str, Any]:
        """Return the fields of the response that repeat the request's options."""
        form = None if self.text is None else self.text.format
        text_format: dict[str, Any] = {"type": "text" if form is None else form.type}
        if form is not None and form.type == "json_schema":
            schema = {"name": form.name, "description": form.description, "schema": form.schema_}
            text_format |= {**schema, "strict": form.strict}
        choice: Any = self.tool_choice or "auto"
        if isinstance(choice, ToolChoice):
            choice = choice.model_dump(exclude_none=True)
        functions = [tool.function for tool in self.tools or () if isinstance(tool, FunctionTool)]
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata if isinstance(self.metadata, dict) else {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": self.thinking_wish().effort, "summary": None},
            "store": False,
            "temperature": self.temperature,
            "text": {"format": text_format},
            "tool_choice": choice,
            "tools": [{"type": "function", **each.model_dump()} for each in functions],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": self.top_p,
            "truncation": "disabled",
        }


# A tool with the names and indices that lead to it from the request.
PlacedTool = tuple[SchemaPath, FunctionTool | Namespace | Skipped]


def _tool_key(path: SchemaPath, tool: FunctionTool | Namespace | Skipped) -> object:
    """Return the key by which definitions of the same tool are found.

    The key of a function is its name. Any other tool has its path as a unique key.
    """
    return tool.function.name if isinstance(tool, FunctionTool) else path


def _add_to_answer(
    messages: list[dict[str, Any]], item: InputItem | CallItem | ThoughtItem
) -> None:
    """Add an item of an earlier response to the assistant's message at the end of ``messages``.

    Thoughts, and a text after a text or a call, begin a new message.
    """
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if isinstance(item, ThoughtItem):
        thoughts = "".join(part.text for part in item.content or item.summary or ())
        # Templates read thoughts under one of two names.
        names = {"reasoning_content": thoughts, "thinking": thoughts}
        messages.append({"role": "assistant", "content": "", **names})
    elif isinstance(item, CallItem):
        if last is None:
            last = {"role": "assistant", "content": ""}
            messages.append(last)
        name = item.name
        if item.namespace is not None:
            name = f"{item.namespace}{NAMESPACE_SEPARATOR}{name}"
        last.setdefault("tool_calls", []).append(tool_call(item.call_id, name, item.arguments))
    elif last is not None and not last["content"] and "tool_calls" not in last:
        last["content"] = item.to_template()["content"]
    else:
        messages.append(item.to_template())
