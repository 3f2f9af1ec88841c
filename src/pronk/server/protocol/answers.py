"""Answers of the model: blocks of thoughts, texts and tool calls, and log-probabilities of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from pronk import Completion, Piece
from pronk.text import MAX_CALLS, AnswerReader, CallPart, Thought, Tokenizer, spell

BlockKind = Literal["thought", "text", "call"]
# token id to log-probability at one position; the first id is the text's token
Report = Mapping[int, float]


@dataclass
class Block:
    """Consecutive thoughts, consecutive text, or one call.

    The content of a call is its arguments.
    """

    kind: BlockKind
    number: int  # number of the block within the answer
    call: CallPart | None = None  # first part of the call: its number, id and name
    parts: list[str] = field(default_factory=list)
    # of the tokens of a text, if requested
    logprobs: list[dict[int, float]] = field(default_factory=list)

    @property
    def content(self) -> str:
        """Whole content."""
        return "".join(self.parts)


class Delta(NamedTuple):
    """New content of a block."""

    block: Block
    content: str
    is_first: bool  # whether the block is new; the first delta of a call has no content


class AnswerParser:
    """Streaming parser of one sample's answer.

    Small models repeat calls. A call that is equal to an earlier one of the answer is dropped, and
    so are calls beyond ``MAX_CALLS``. A call is therefore held back while it may become equal to an
    earlier one. The engine ends the text with such a call
    (:class:`~pronk.text.chat.answers.RepeatedCalls`).

    Args:
        reader: parser of the answer's text.
        allows_text: if False, the answer must be a call. Any text is then part of an incomplete
            call, and is dropped.
        text_only: whether the answer is one text, so that its block exists from the beginning.
    """

    def __init__(
        self, reader: AnswerReader, *, allows_text: bool = True, text_only: bool = False
    ) -> None:
        self._reader = reader
        self._allows_text = allows_text
        self.blocks: list[Block] = [Block("text", 0)] if text_only else []
        self.num_thought_tokens = 0
        # names and arguments of the calls that were not dropped
        self._calls = list[tuple[str | None, str]]()
        # the call being read, as far as it was, while it is held back
        self._held: CallPart | None = None
        self._in_call = False  # whether the last block is the call being read
        # whether the answer ended within a call that began like an earlier one
        self._is_repeating = False

    def parse(self, pieces: Sequence[Piece]) -> list[Delta]:
        """Parse the next tokens of the answer; return the new content of its blocks, joined."""
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
            if (
                piece.logprobs
                and self.blocks
                and self.blocks[-1].kind == "text"
                and not self._reader.in_call
            ):
                self.blocks[-1].logprobs.append(piece.logprobs)
        return deltas

    def content(self, kind: BlockKind) -> str:
        """Return the content of all blocks of a kind."""
        return "".join(block.content for block in self.blocks if block.kind == kind)

    def ends_with_call(self, done: Completion) -> bool:
        """Return whether the answer ended with complete calls."""
        has_calls = any(block.call for block in self.blocks)
        return has_calls and (
            self._is_repeating or (done.finish_reason == "stop" and not self._reader.in_call)
        )

    def _take(self, part: str | Thought | CallPart, deltas: list[Delta]) -> None:
        """Add a part of the answer, or hold it back."""
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
        """Return whether a call is one too many, or begins like an earlier one."""
        is_begin = any(
            call.name == name and text.startswith(call.arguments) for name, text in self._calls
        )
        return is_begin or len(self._calls) >= MAX_CALLS

    def _end_call(self, deltas: list[Delta]) -> None:
        """End the call that was read last.

        Drop it if it is one too many, or equal to an earlier one.
        """
        held = self._held
        if (
            held is not None
            and len(self._calls) < MAX_CALLS
            and (held.name, held.arguments) not in self._calls
        ):
            self._release(held, deltas)
        if self._in_call and (call := self.blocks[-1].call) is not None:
            self._calls.append((call.name, self.blocks[-1].content))
        self._held = None
        self._in_call = False

    def _end_answer(self, deltas: list[Delta]) -> None:
        """End the last call; drop it if the answer ended in it and it began like an earlier one."""
        if self._held is not None and self._reader.in_call and self._calls:
            self._held = None
            self._is_repeating = True
        self._end_call(deltas)

    def _release(self, call: CallPart, deltas: list[Delta]) -> None:
        """Add a call that was held back."""
        first = replace(call, index=len(self._calls), arguments="")
        self._add(first, deltas)
        if call.arguments:
            self._add(CallPart(first.index, call.arguments), deltas)
        self._held = None
        self._in_call = True

    def _add(self, part: str | Thought | CallPart, deltas: list[Delta]) -> None:
        """Add a part to the last block or to a new one, and to ``deltas``.

        Drop text that is not allowed.
        """
        kind: BlockKind = (
            "text" if isinstance(part, str) else "thought" if isinstance(part, Thought) else "call"
        )
        if kind == "text" and not self._allows_text:
            return
        call = part if isinstance(part, CallPart) else None
        is_first = (
            call.name is not None if call else not self.blocks or self.blocks[-1].kind != kind
        )
        if is_first:
            self.blocks.append(Block(kind, len(self.blocks), call))
        content = (
            part
            if isinstance(part, str)
            else part.text
            if isinstance(part, Thought)
            else part.arguments
        )
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
        """Return the bytes of a token: of a special token, its name.

        Of an unassigned id, ``b""``.
        """
        spelled = self._spelled.get(token)
        return (
            (self.tokenizer.backend.id_to_token(token) or "").encode()
            if spelled is None
            else spelled
        )

    def name(self, token: int) -> str:
        r"""Return the text of a token.

        Like OpenAI, ``bytes:\xe2\x82`` if the bytes (E2 82) are not UTF-8.
        """
        data = self.bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(texts: TokenTexts, reports: Sequence[Report], top: int) -> dict[str, Any]:
    """Return ``logprobs`` of ``/v1/chat/completions``: an entry per token, with the ``top`` likeliest."""
    return {"content": [_report_entry(texts, report, top) for report in reports], "refusal": None}


def _report_entry(texts: TokenTexts, report: Report, top: int) -> dict[str, Any]:
    token = next(iter(report))
    likeliest = sorted(report.items(), key=lambda item: -item[1])[:top]
    return {
        **_token_entry(texts, token, report[token]),
        "top_logprobs": [_token_entry(texts, *item) for item in likeliest],
    }


def _token_entry(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    data = texts.bytes(token)
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}
