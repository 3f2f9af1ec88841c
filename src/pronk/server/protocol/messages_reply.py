"""Replies of ``/v1/messages``: blocks of thoughts, text and tool calls, whole or as events."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from pronk.outputs import Completion, Piece
from pronk.server.protocol.answers import Block
from pronk.server.protocol.conversation import AnswerBuilder
from pronk.server.protocol.request import usage


@dataclass
class MessagesReply:
    """Builder of the replies of ``/v1/messages``."""

    builder: AnswerBuilder

    def __post_init__(self) -> None:
        self._id = f"msg_{uuid4().hex}"
        self._parser = self.builder.new_parser()
        self._open: Block | None = None  # block that is not closed yet

    def start(self) -> list[dict[str, Any]]:
        """Return the event that opens the message."""
        usage = {"input_tokens": self.builder.num_prompt, "output_tokens": 0}  # the last event has the final counts
        return [{"type": "message_start", "message": self._message([], None, None, usage)}]

    def step(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for block, content, _ in self._parser.parse(pieces):
            if block is not self._open:
                events += self._closed()
                self._open = block
                empty = _content(Block(block.kind, block.number, block.call))
                events.append({"type": "content_block_start", "index": block.number, "content_block": empty})
            if content:
                events.append(_delta(block, _DELTAS[block.kind], content))
        return events

    def record(self, pieces: Sequence[Piece]) -> None:
        self._parser.parse(pieces)

    def end(self, done: Sequence[Completion]) -> list[dict[str, Any]]:
        """Return the events that close the last block and the message."""
        reason, sequence = self._stop(done[0])
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return [
            *self._closed(),
            {"type": "message_delta", "delta": delta, "usage": self._usage(done)},
            {"type": "message_stop"},
        ]

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        blocks = [block for block in self._parser.blocks if block.content or block.kind == "call"]
        return self._message([_content(block) for block in blocks], *self._stop(done[0]), self._usage(done))

    def _message(
        self, content: list[Any], stop_reason: str | None, stop_sequence: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.builder.shared_fields["model"],
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": usage,
        }

    def _stop(self, done: Completion) -> tuple[str, str | None]:
        """Return the reason for the end of the answer and the stop sequence, if one ended it."""
        if done.finish_reason == "length":
            return "max_tokens", None
        if isinstance(done.stop_reason, str):
            return "stop_sequence", done.stop_reason
        return "tool_use" if self._parser.ends_with_call(done) else "end_turn", None

    def _usage(self, done: Sequence[Completion]) -> dict[str, Any]:
        """Return the token counts; ``input_tokens`` has no tokens that were read from the cache."""
        counts = usage(done, 1, self._parser.num_thought_tokens)
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self._parser.num_thought_tokens},
        }

    def _closed(self) -> Iterator[dict[str, Any]]:
        """Yield the events that close the open block, if there is one."""
        block, self._open = self._open, None
        if block is None:
            return
        if block.kind == "thought":
            yield _delta(block, ("signature_delta", "signature"), _signature(block))
        yield {"type": "content_block_stop", "index": block.number}


_DELTAS = {
    "thought": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


def _delta(block: Block, kind: tuple[str, str], content: str) -> dict[str, Any]:
    delta = {"type": kind[0], kind[1]: content}
    return {"type": "content_block_delta", "index": block.number, "delta": delta}


def _content(block: Block) -> dict[str, Any]:
    """Return a block as the reply has it; the input of an incomplete call is empty."""
    if block.call is not None:
        arguments: Any = {}
        with suppress(ValueError):
            arguments = json.loads(block.content)
        return {"type": "tool_use", "id": block.call.ident, "name": block.call.name, "input": arguments}
    if block.kind == "thought":
        signature = _signature(block) if block.parts else ""
        return {"type": "thinking", "thinking": block.content, "signature": signature}
    return {"type": "text", "text": block.content}


def _signature(block: Block) -> str:
    """Return a digest of thoughts, which clients send back; the server does not check it."""
    return hashlib.sha256(block.content.encode()).hexdigest()
