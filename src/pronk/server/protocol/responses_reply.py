"""Replies of ``/v1/responses``: items of thoughts, messages and calls, whole or as events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from time import time
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pronk import Completion, Piece
from pronk.server.protocol.answers import Block, BlockKind, chat_logprobs
from pronk.server.protocol.conversation import AnswerReply
from pronk.server.protocol.request import usage

if TYPE_CHECKING:
    from pronk.server.protocol.responses import ResponsesRequest

_ID_PREFIXES: Mapping[BlockKind, str] = {"thought": "rs", "text": "msg", "call": "fc"}
# First part of the names of a block's events. An event ``….delta`` has new content of the block, an
# event ``….done`` all of it.
_EVENTS: Mapping[BlockKind, str] = {
    "thought": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}


@dataclass
class ResponsesReply(AnswerReply):
    """Builder of the reply to a request of ``/v1/responses``, whole or as numbered events.

    Each block of the answer is an item of the output.
    """

    request: ResponsesRequest

    def __post_init__(self) -> None:
        self._id = uuid4().hex
        self._created = int(time())
        self._numbers = count()
        self._namespaces = self.request.namespaces()
        (self._parser,) = self.parsers
        self._empty = Block("text", 0)  # the output has this block if the answer has none
        self._open: Block | None = None  # block whose item is not closed yet
        # By number of a block, the number of its tokens whose log-probabilities were sent.
        self._num_sent: dict[int, int] = {}

    def start(self) -> list[dict[str, Any]]:
        """Return the events that open the response and, if the answer is a text, its message."""
        response = self._response("in_progress", [])
        events = [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]
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
        if not self.has_blocks and not events:
            # Tokens without text need an event for their log-probabilities.
            events.append(self._delta(self._parser.blocks[0], ""))
        return events

    def end(self, done: Sequence[Completion]) -> list[dict[str, Any]]:
        """Return the events that close the last item and the response."""
        whole = self.whole(done)
        events = list[dict[str, Any]]()
        if self._open is None:  # the answer has no block
            self._open = self._empty
            events += self._opened(self._empty)
        events += self._closed(whole["status"])
        events.append(self._event(f"response.{whole['status']}", response=whole))
        return events

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        (completion,) = done
        status = "incomplete" if completion.finish_reason == "length" else "completed"
        *earlier, last = self._parser.blocks or [self._empty]
        # Only the last item of an answer can be incomplete.
        items = [*(self._item(block, "completed") for block in earlier), self._item(last, status)]
        counts = usage(done, 1, self._parser.num_thought_tokens)
        whole = self._response(status, items)
        whole["usage"] = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": counts["completion_tokens_details"]["reasoning_tokens"]
            },
            "total_tokens": counts["total_tokens"],
            **{name: counts[name] for name in ("steps", "drafted", "accepted")},
        }
        return whole

    def _response(self, status: str, output: list[Any]) -> dict[str, Any]:
        is_incomplete = status == "incomplete"
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            **self.shared_fields,
            **self.request.described(),
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "output": output,
            "usage": None,
        }

    def _opened(self, block: Block) -> Iterator[dict[str, Any]]:
        item = self._item(Block(block.kind, block.number, block.call), "in_progress")
        content = item.get("content")
        item["content"] = []
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
        item = self._item(block, status)
        kind = f"{_EVENTS[block.kind]}.done"
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
            namespace, name = self._namespaces.get(str(block.call.name), (None, block.call.name))
            call = {"call_id": block.call.ident, "name": name, "arguments": block.content}
            own = {} if namespace is None else {"namespace": namespace}
            return {**item, "type": "function_call", **call, **own}
        if block.kind == "thought":
            thoughts = {"type": "reasoning_text", "text": block.content}
            return {**item, "type": "reasoning", "summary": [], "content": [thoughts]}
        logprobs = self._logprobs(block.logprobs)
        text = {
            "type": "output_text",
            "text": block.content,
            "annotations": [],
            "logprobs": logprobs,
        }
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
