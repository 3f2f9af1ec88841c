"""Requests and replies of ``/v1/responses``.

The server stores no responses, so ``previous_response_id`` is not supported: a client sends the whole conversation,
with the items of earlier responses copied unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from time import time
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import Discriminator, Field, Tag

from pronk.outputs import Completion, Piece
from pronk.server.protocol.answers import Block, BlockKind, chat_logprobs
from pronk.server.protocol.chat import ChatTurn, TextPart
from pronk.server.protocol.conversation import AnswerReply, ConversationRequest
from pronk.server.protocol.guides import NAME_PATTERN, TextFormat
from pronk.server.protocol.request import RequestBody, Text, TextRequest, check_max, unsupported, usage
from pronk.server.protocol.tools import MAX_TOOLS, Function, ToolUse, tool_call
from pronk.server.settings import RequestLimits
from pronk.tokenization.chat.messages import thinking_options

Status = Literal["in_progress", "completed", "incomplete"]

_ID_PREFIXES: Mapping[BlockKind, str] = {"thought": "rs", "text": "msg", "call": "fc"}
# Names of the events with a part of the content, and with all of it.
_EVENTS: Mapping[BlockKind, str] = {
    "thought": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}


class InputItem(ChatTurn):
    """Message in ``input``, possibly copied unchanged from an earlier response."""

    type: Literal["message"] | None = None
    id: str | None = None
    status: str | None = None
    role: Literal["system", "developer", "user", "assistant"]
    name: None = None


class CallItem(RequestBody):
    """Tool call of an earlier response."""

    type: Literal["function_call"]
    id: Text | None = None
    call_id: Text = Field(max_length=64)
    name: Text = Field(pattern=NAME_PATTERN)
    arguments: Text
    status: Status | None = None


class CallOutputItem(RequestBody):
    """Result of a tool call."""

    type: Literal["function_call_output"]
    id: Text | None = None
    call_id: Text = Field(max_length=64)
    output: Text | Annotated[list[TextPart], Field(fail_fast=True)]
    status: Status | None = None


class ThoughtText(RequestBody):
    """Text of thoughts."""

    type: Literal["reasoning_text", "summary_text"]
    text: Text


class ThoughtItem(RequestBody):
    """Thoughts of an earlier response."""

    noop_values: ClassVar = {"encrypted_content": [""]}

    type: Literal["reasoning"]
    id: Text | None = None
    summary: Annotated[list[ThoughtText], Field(fail_fast=True)] | None = None
    content: Annotated[list[ThoughtText], Field(fail_fast=True)] | None = None
    status: Status | None = None


def _item_type(item: Any) -> str:
    """Return the type of an item; a message may leave it out."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return str(kind or "message")


Item = Annotated[
    Annotated[InputItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ThoughtItem, Tag("reasoning")],
    Discriminator(_item_type),
]


class TextOptions(RequestBody):
    """Options of the answer's text."""

    noop_values: ClassVar = {"verbosity": ["medium"]}

    format: TextFormat | None = None


class ReasoningOptions(RequestBody):
    """Options of thoughts. Thoughts are returned as they are, so a ``summary`` is not made."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesTool(Function):
    """Tool; functions are the only type."""

    type: Literal["function"]


class ResponsesToolChoice(RequestBody):
    """Function that the answer must call."""

    type: Literal["function"]
    name: Text


class ResponsesRequest(ConversationRequest):
    """Body of ``/v1/responses``."""

    noop_values: ClassVar = {
        **TextRequest.noop_values,
        "background": [False],
        "previous_response_id": [],
        "truncation": ["disabled"],
    }
    messages_field: ClassVar = "input"

    input: Text | Annotated[list[Item], Field(fail_fast=True)] = Field(min_length=1)
    instructions: Text | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**31)
    top_logprobs: int | None = Field(None, ge=0)
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[ResponsesTool], Field(fail_fast=True)] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        check_max("n", self.n, 1)
        check_max("top_logprobs", self.top_logprobs, limits.logprobs)
        if self.leaps:
            raise unsupported("leaps", "expected no such field in /v1/responses, found true; use /v1/chat/completions")

    def guide_arguments(self) -> dict[str, Mapping[str, Any]]:
        return {} if self.text is None or self.text.format is None else self.text.format.guide_arguments()

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_output_tokens

    def num_logprobs(self) -> int | None:
        if self.top_logprobs is None and "message.output_text.logprobs" not in (self.include or ()):
            return None
        return self.top_logprobs or 0

    def conversation(self) -> list[dict[str, Any]]:
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            if isinstance(item, CallOutputItem):
                content = item.output if isinstance(item.output, str) else "\n".join(part.text for part in item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            elif isinstance(item, InputItem) and item.role != "assistant":
                messages.append(item.to_template())
            else:
                _add_to_answer(messages, item)
        return messages

    def tool_use(self) -> ToolUse:
        choice, parallel = self.tool_choice, self.parallel_tool_calls is not False
        if isinstance(choice, ResponsesToolChoice):
            return ToolUse(self.tools or (), "required", choice.name, parallel, "parameters")
        return ToolUse(self.tools or (), choice or "auto", None, parallel, "parameters")

    def template_options(self) -> dict[str, Any]:
        return thinking_options(None if self.reasoning is None else self.reasoning.effort)

    def reply(self, *fields: Any) -> ResponsesReply:
        return ResponsesReply(self, *fields)

    def described(self) -> dict[str, Any]:
        """Return the options of the request as the response repeats them."""
        form = None if self.text is None else self.text.format
        described: dict[str, Any] = {"type": "text" if form is None else form.type}
        if form is not None and form.type == "json_schema":
            schema = {"name": form.name, "description": form.description, "schema": form.schema_}
            described |= {**schema, "strict": form.strict}
        choice = self.tool_choice
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if self.reasoning is None else self.reasoning.effort, "summary": None},
            "store": False,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {"format": described},
            "tool_choice": choice.model_dump() if isinstance(choice, ResponsesToolChoice) else choice or "auto",
            "tools": [tool.model_dump() for tool in self.tools or ()],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": "disabled",
        }


def _add_to_answer(messages: list[dict[str, Any]], item: InputItem | CallItem | ThoughtItem) -> None:
    """Add an item of an earlier response to its message, the last one; thoughts begin a message."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if isinstance(item, ThoughtItem):
        thoughts = "".join(part.text for part in item.content or item.summary or ())
        messages.append({"role": "assistant", "content": "", "reasoning_content": thoughts, "thinking": thoughts})
    elif isinstance(item, CallItem):
        if last is None:
            last = {"role": "assistant", "content": ""}
            messages.append(last)
        last.setdefault("tool_calls", []).append(tool_call(item.call_id, item.name, item.arguments))
    elif last is not None and not last["content"] and "tool_calls" not in last:
        last["content"] = item.to_template()["content"]
    else:
        messages.append(item.to_template())


@dataclass
class ResponsesReply(AnswerReply):
    """Builder of the replies of ``/v1/responses``, whole or as numbered events.

    Each block of the answer (thoughts, text or a call) is an item of the output.
    """

    request: ResponsesRequest

    def __post_init__(self) -> None:
        self._id = uuid4().hex
        self._created = int(time())
        self._numbers = count()
        (self._parser,) = self.parsers
        self._empty = Block("text", 0)  # the only block of an empty answer that may have had others
        self._open: Block | None = None  # block whose item is not closed yet
        self._num_sent: dict[int, int] = {}  # number of a block to the number of its log-probabilities that were sent

    def start(self) -> list[dict[str, Any]]:
        """Return the events that open the response and, if the answer is a text, its message."""
        response = self._response("in_progress", [])
        events = [self._event(f"response.{state}", response=response) for state in ("created", "in_progress")]
        if not self.has_blocks:
            (self._open,) = self._parser.blocks
            events += self._opened(self._open)
        return events

    def step(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for block, content, _ in self._parser.parse(pieces):
            if self._open is None or block.number != self._open.number:
                events += self._closed("completed")
                events += self._opened(block)
            self._open = block
            if content:
                events.append(self._delta(block, content))
        if not self.has_blocks and len(events) == 0:
            events.append(self._delta(self._parser.blocks[0], ""))  # for the log-probabilities of tokens without text
        return events

    def end(self, done: Sequence[Completion]) -> list[dict[str, Any]]:
        """Return the events that close the last item and the response."""
        whole = self.whole(done)
        events = []
        if self._open is None:  # an empty answer that may have had thoughts or calls
            self._open = self._empty
            events = [*self._opened(self._empty)]
        return [*events, *self._closed(whole["status"]), self._event(f"response.{whole['status']}", response=whole)]

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        (completion,) = done
        status = "incomplete" if completion.finish_reason == "length" else "completed"
        blocks = self._parser.blocks or [self._empty]
        # Only the last item of an answer can be incomplete.
        items = [self._item(block, status if block is blocks[-1] else "completed") for block in blocks]
        counts = usage(done, 1, self._parser.num_thought_tokens)
        whole = self._response(status, items)
        whole["usage"] = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": counts["completion_tokens_details"],
            "total_tokens": counts["total_tokens"],
            **{name: counts[name] for name in ("steps", "drafted", "accepted")},
        }
        return whole

    def _response(self, status: str, output: list[Any]) -> dict[str, Any]:
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            **self.shared_fields,
            **self.request.described(),
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "usage": None,
        }

    def _opened(self, block: Block) -> Iterator[dict[str, Any]]:
        item = self._item(Block(block.kind, block.number, block.call), "in_progress")
        content, item["content"] = item.get("content"), []
        if block.kind == "call":
            del item["content"]
        yield self._event("response.output_item.added", output_index=block.number, item=item)
        if content:
            yield self._block_event("response.content_part.added", block, part=content[0])

    def _delta(self, block: Block, content: str) -> dict[str, Any]:
        more: dict[str, Any] = {}
        if block.kind == "text":
            sent = self._num_sent.get(block.number, 0)
            self._num_sent[block.number] = len(block.logprobs)
            more["logprobs"] = self._logprobs(block.logprobs[sent:])
        return self._block_event(f"{_EVENTS[block.kind]}.delta", block, delta=content, **more)

    def _closed(self, status: str) -> Iterator[dict[str, Any]]:
        block = self._open
        if block is None:
            return
        item, kind = self._item(block, status), f"{_EVENTS[block.kind]}.done"
        if block.kind == "call":
            yield self._block_event(kind, block, arguments=block.content, name=item["name"])
        else:
            part = item["content"][0]
            more = {"logprobs": part["logprobs"]} if block.kind == "text" else {}
            yield self._block_event(kind, block, text=block.content, **more)
            yield self._block_event("response.content_part.done", block, part=part)
        yield self._event("response.output_item.done", output_index=block.number, item=item)

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        if block.call is not None:
            call = {"call_id": block.call.ident, "name": block.call.name, "arguments": block.content}
            return {**item, "type": "function_call", **call}
        if block.kind == "thought":
            thoughts = {"type": "reasoning_text", "text": block.content}
            return {**item, "type": "reasoning", "summary": [], "content": [thoughts]}
        logprobs = self._logprobs(block.logprobs)
        text = {"type": "output_text", "text": block.content, "annotations": [], "logprobs": logprobs}
        return {**item, "type": "message", "role": "assistant", "content": [text]}

    def _item_id(self, block: Block) -> str:
        return f"{_ID_PREFIXES[block.kind]}_{self._id}{block.number:04x}"

    def _logprobs(self, reports: Sequence[dict[int, float]]) -> list[Any]:
        top = self.request.num_logprobs()
        return [] if top is None else list(chat_logprobs(self.texts, reports, top)["content"])

    def _block_event(self, kind: str, block: Block, **values: Any) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.number}
        if block.kind != "call":
            place["content_index"] = 0
        return self._event(kind, **place, **values)

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        return {"type": kind, "sequence_number": next(self._numbers), **values}
