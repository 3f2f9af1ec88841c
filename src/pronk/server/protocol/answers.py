"""Answers of a model: blocks of thoughts, text and tool calls, and log-probabilities of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from pronk import Completion, Piece
from pronk.text import MAX_CALLS, AnswerReader, CallPart, Thought, Tokenizer, spell

BlockKind = Literal["thought", "text", "call"]
# Log-probabilities at one position of a text, by token id. The first id is that of the token in the
# text; the others are the alternatives that the request asks for.
Report = Mapping[int, float]


@dataclass
class Block:
    """One part of an answer: a run of thoughts, a run of text, or one tool call.

    The content of a tool call is its arguments as JSON text.
    """

    kind: BlockKind
    number: int  # number of the block within the answer, from 0
    call: CallPart | None = None  # number, id and name of a tool call; otherwise ``None``
    parts: list[str] = field(default_factory=list)  # the content in the order of its arrival
    # Log-probabilities at each token of a block of text, each like Report; empty unless the request
    # asks for them.
    logprobs: list[dict[int, float]] = field(default_factory=list)

    @property
    def content(self) -> str:
        """All parts of the content, joined."""
        return "".join(self.parts)


class Delta(NamedTuple):
    """Content that new tokens add to a block of the answer, for a chunk or event of a stream."""

    block: Block
    content: str
    is_first: bool  # whether the block is new; the first delta of a call has no content


class AnswerParser:
    """Streaming parser of one sample's answer.

    Small models repeat calls. A call that is equal to an earlier one of the answer is dropped, and
    so are calls beyond ``MAX_CALLS``. Therefore a call is held back while it may become equal to an
    earlier one. The engine ends the text after a repeated call
    (:class:`~pronk.text.chat.answers.RepeatedCalls`).

    Args:
        reader: splits the answer's text into thoughts, text and parts of calls.
        allows_text: if False, the answer must be a call. Any text is then part of an incomplete
            call, and is dropped.
        text_only: whether the answer is only text, so that its block exists from the beginning.
    """

    def __init__(
        self, reader: AnswerReader, *, allows_text: bool = True, text_only: bool = False
    ) -> None:
        self._reader = reader
        self._allows_text = allows_text
        self.blocks: list[Block] = [Block("text", 0)] if text_only else []
        self.num_thought_tokens = 0
        # Names and arguments of the calls that were not dropped.
        self._calls = list[tuple[str | None, str]]()
        # The tool call that is held back, with the arguments read so far; ``None``: no call is.
        self._held: CallPart | None = None
        self._in_call = False  # whether the last block is the call being read
        # Whether the answer ended within a call that began like an earlier one, and was dropped.
        self._is_repeating = False

    def parse(self, pieces: Sequence[Piece]) -> list[Delta]:
        """Parse the next tokens of the answer; return what they add to its blocks.

        Consecutive content of the same block is one delta.
        """
        deltas: list[Delta] = []
        for piece in pieces:
            was_in_thought = self._reader.in_thought
            parts = self._reader.push(piece.text, piece.token_id)
            if piece.completion is not None:
                parts += self._reader.flush()
            self.num_thought_tokens += was_in_thought or self._reader.in_thought
            for part in parts:
                self._take(part, deltas)
            if piece.completion is not None:
                self._end_answer(deltas)
            in_text = bool(self.blocks) and self.blocks[-1].kind == "text"
            if piece.logprobs and in_text and not self._reader.in_call:
                self.blocks[-1].logprobs.append(piece.logprobs)
        return deltas

    def content(self, kind: BlockKind) -> str:
        """Return the content of all blocks of a kind, joined to one text."""
        return "".join(block.content for block in self.blocks if block.kind == kind)

    def ends_with_call(self, done: Completion) -> bool:
        """Return whether the answer has tool calls and ended after a complete one.

        The reply then says that the answer ended for its tool calls, so that the client runs the
        tools. ``done`` is the finished sample.
        """
        if not any(block.call for block in self.blocks):
            return False
        return self._is_repeating or (done.finish_reason == "stop" and not self._reader.in_call)

    def _take(self, part: str | Thought | CallPart, deltas: list[Delta]) -> None:
        """Add a part of the answer to its blocks and to ``deltas``.

        A part of a tool call is held back while the call may have to be dropped.
        """
        if not isinstance(part, CallPart):
            self._end_call(deltas)
            self._add(part, deltas)
        elif part.name is not None:
            self._end_call(deltas)
            self._held = part
        elif self._held is not None:
            self._held = replace(self._held, arguments=self._held.arguments + part.arguments)
        else:
            self._add(part, deltas)
        if self._held is not None and not self._may_be_dropped(self._held):
            self._release(self._held, deltas)

    def _may_be_dropped(self, call: CallPart) -> bool:
        """Return whether a call exceeds ``MAX_CALLS``, or an earlier call begins like it."""
        if len(self._calls) >= MAX_CALLS:
            return True
        same_name = [text for name, text in self._calls if name == call.name]
        return any(text.startswith(call.arguments) for text in same_name)

    def _end_call(self, deltas: list[Delta]) -> None:
        """End the last tool call, which is now complete.

        A call that is held back is dropped if it equals an earlier call or exceeds ``MAX_CALLS``;
        otherwise it is added.
        """
        held = self._held
        if held is not None and len(self._calls) < MAX_CALLS:
            is_repeated = (held.name, held.arguments) in self._calls
            if not is_repeated:
                self._release(held, deltas)
        if self._in_call and (call := self.blocks[-1].call) is not None:
            self._calls.append((call.name, self.blocks[-1].content))
        self._held = None
        self._in_call = False

    def _end_answer(self, deltas: list[Delta]) -> None:
        """End the answer's last tool call; drop an incomplete call that repeats an earlier one."""
        if self._held is not None and self._reader.in_call and self._calls:
            self._held = None
            self._is_repeating = True
        self._end_call(deltas)

    def _release(self, call: CallPart, deltas: list[Delta]) -> None:
        """Add a tool call that was held back to the blocks and to ``deltas``."""
        first = replace(call, index=len(self._calls), arguments="")
        self._add(first, deltas)
        if call.arguments:
            self._add(CallPart(first.index, call.arguments), deltas)
        self._held = None
        self._in_call = True

    def _add(self, part: str | Thought | CallPart, deltas: list[Delta]) -> None:
        """Add a part to the last block or to a new one, and to ``deltas``.

        If the answer must be a call, text is dropped.
        """
        kind: BlockKind
        call = None
        if isinstance(part, CallPart):
            kind = "call"
            content = part.arguments
            call = part
            is_first = part.name is not None
        else:
            kind = "text" if isinstance(part, str) else "thought"
            content = part if isinstance(part, str) else part.text
            is_first = not self.blocks or self.blocks[-1].kind != kind
        if kind == "text" and not self._allows_text:
            return
        if is_first:
            self.blocks.append(Block(kind, len(self.blocks), call))
        self.blocks[-1].parts.append(content)
        if is_first or not deltas or (call and deltas[-1].is_first):
            deltas.append(Delta(self.blocks[-1], content, is_first))
        else:
            deltas[-1] = deltas[-1]._replace(content=deltas[-1].content + content)


@dataclass(frozen=True)
class TokenTexts:
    """Text and bytes of each token in a tokenizer's vocabulary."""

    tokenizer: Tokenizer

    @cached_property
    def _spelled(self) -> Mapping[int, bytes]:
        return spell(self.tokenizer).texts

    def bytes(self, token: int) -> bytes:
        """Return the bytes of a token's text.

        The text of a special token is its name, and that of an unassigned id is empty.
        """
        spelled = self._spelled.get(token)
        if spelled is not None:
            return spelled
        name = self.tokenizer.backend.id_to_token(token) or ""
        return name.encode()

    def name(self, token: int) -> str:
        r"""Return the text of a token as OpenAI's API names it.

        If the bytes are no UTF-8, such as E2 82, the name is ``bytes:\xe2\x82``.
        """
        data = self.bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(texts: TokenTexts, reports: Sequence[Report], top: int) -> dict[str, Any]:
    """Return the field ``logprobs`` of ``/v1/chat/completions``, with one entry per report.

    ``reports`` has one report per token of the text. An entry lists the ``top`` likeliest tokens of
    its report besides the token in the text.
    """
    return {"content": [_report_entry(texts, report, top) for report in reports], "refusal": None}


def _report_entry(texts: TokenTexts, report: Report, top: int) -> dict[str, Any]:
    token = next(iter(report))
    likeliest = sorted(report, key=lambda other: -report[other])[:top]
    entries = [_token_entry(texts, other, report[other]) for other in likeliest]
    return {**_token_entry(texts, token, report[token]), "top_logprobs": entries}


def _token_entry(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    data = texts.bytes(token)
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}
