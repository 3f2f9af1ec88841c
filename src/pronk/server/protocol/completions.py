"""``/v1/completions``: texts that are continued as they are."""

from __future__ import annotations

from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import time
from typing import Annotated, Any
from uuid import uuid4

from pydantic import Discriminator, Field, Tag

from pronk.outputs import Completion, Piece
from pronk.server.protocol.guides import GuidedRequest
from pronk.server.protocol.request import GenerationWork, Ids, Text, Texts, leaps, refuse, unsupported, usage
from pronk.server.protocol.tokens import Report, TokenTexts
from pronk.server.settings import RequestLimits
from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["CompletionReply", "CompletionRequest"]

_MAX_TOKENS = 16  # OpenAI's default


def _kind(prompt: Any) -> str:
    """Which form a prompt has, by its first element, so that one form alone is tried."""
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else ""
    return "lists" if isinstance(first, list) else "texts" if isinstance(first, str) else "ids"


class CompletionRequest(GuidedRequest):
    """What ``/v1/completions`` takes."""

    prompt: Annotated[
        Annotated[Text, Tag("text")]
        | Annotated[Texts, Tag("texts")]
        | Annotated[Ids, Tag("ids")]
        | Annotated[list[Ids], Field(fail_fast=True), Tag("lists")],
        Discriminator(_kind),
    ]
    max_tokens: int | None = Field(None, ge=0, le=2**31)
    logprobs: int | None = Field(None, ge=0)
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def texts(self) -> list[str | list[int]]:
        """The prompts, one or more, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [text for text in self.prompt if not isinstance(text, int)]

    def check(self, limits: RequestLimits) -> None:
        """Hold the options to the server's limits; see :meth:`Ask.check`."""
        super().check(limits)
        count = len(self.texts())
        if not 1 <= count <= limits.prompts:
            raise refuse("prompt", f"expected 1..{limits.prompts} prompts, found {count}")
        if (self.logprobs or 0) > limits.logprobs:
            raise refuse("logprobs", f"expected at most {limits.logprobs}, found {self.logprobs}")
        if self.best_of not in (None, self.n or 1):
            raise unsupported("best_of", "samples are not ranked here; leave it out, and use n")
        if self.suffix:
            raise unsupported("suffix", "the model continues texts, and fills in none; leave it out")
        if self.max_tokens == 0 and not self.echo:
            raise refuse("max_tokens", "expected at least 1, or echo: true with 0; found 0")
        if self.stream and self.echo and self.logprobs is not None:
            raise unsupported("logprobs", "the prompt's come when all is done; expected stream: false beside echo")

    def work(self, prompts: Sequence[list[int]], tokenizer: Tokenizer, frame: dict[str, Any]) -> GenerationWork:
        """What is to be done.

        Args:
            prompts: token ids of :meth:`texts`.
            tokenizer: of the model.
            frame: what every reply has.
        """
        wanted = _MAX_TOKENS if self.max_tokens is None else self.max_tokens
        of_prompt = self.logprobs if self.echo else None
        echoes = [
            text if isinstance(text, str) else tokenizer.decode(text, skip_special_tokens=False)
            for text in (self.texts() if self.echo else [])
        ]
        # A pass over a prompt gives its log-probabilities and a token at once: of a request for none, that is dropped.
        params = self.params(max(1, wanted), self.logprobs, of_prompt, self.guide())
        answer = CompletionReply(self, frame, TokenTexts(tokenizer), echoes, silent=wanted == 0)
        return GenerationWork(prompts, params, answer)


@dataclass
class CompletionReply:
    """Puts the replies of ``/v1/completions`` together.

    Attributes:
        ask: what was asked for.
        frame: what every reply has.
        texts: of the model's tokens.
        echoes: the prompts' texts, if they are wanted in front.
        silent: whether nothing is wanted but the prompts.
    """

    ask: CompletionRequest
    frame: dict[str, Any]
    texts: TokenTexts
    echoes: Sequence[str]
    silent: bool
    # Of each sample, how far its text has come: bytes of a character that is not whole yet, and characters.
    _places: dict[int, tuple[IncrementalDecoder, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.frame = {"id": f"cmpl-{uuid4().hex}", "object": "text_completion", "created": int(time()), **self.frame}
        self.n = self.ask.n or 1

    def start(self) -> list[dict[str, Any]]:
        """The prompts, where they are wanted."""
        return [
            self._chunk(prompt * self.n + sample, text, None)
            for prompt, text in enumerate(self.echoes)
            for sample in range(self.n)
        ]

    def step(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """One chunk for each sample that has new tokens."""
        chunks = []
        for index in sorted({piece.index for piece in pieces} if not self.silent else ()):
            own = [piece for piece in pieces if piece.index == index]
            logprobs = None
            if self.ask.logprobs is not None:
                logprobs = self._logprobs([piece.logprobs for piece in own], index)
            chunk = self._chunk(index, "".join(piece.text for piece in own), logprobs)
            if self.ask.leaps:
                chunk["choices"][0]["leaps"] = leaps(own)
            if (done := own[-1].completion) is not None:
                chunk["choices"][0] |= {"finish_reason": done.finish_reason, "stop_reason": done.stop_reason}
            chunks.append(chunk)
        return chunks

    def read(self, pieces: Sequence[Piece]) -> None:
        """Nothing that the texts do not tell."""

    def end(self, done: Sequence[Completion]) -> list[dict[str, Any]]:
        """The usage, if it was asked for."""
        chunks = []
        if self.silent:
            chunks += [self._chunk(index, "", None, "length") for index in range(len(done))]
        if self.ask.include_usage:
            chunks.append({**self.frame, "choices": [], "usage": self._usage(done)})
        return chunks

    def body(self, done: Sequence[Completion]) -> dict[str, Any]:
        """Everything."""
        choices = [self._choice(index, completion) for index, completion in enumerate(done)]
        return {**self.frame, "choices": choices, "usage": self._usage(done)}

    def _usage(self, done: Sequence[Completion]) -> dict[str, Any]:
        counts = usage(done, self.n)
        if self.silent:
            counts |= {"completion_tokens": 0, "total_tokens": counts["prompt_tokens"]}
        return counts

    def _choice(self, index: int, done: Completion) -> dict[str, Any]:
        echo = self.echoes[index // self.n] if self.echoes else ""
        logprobs = None
        if self.ask.logprobs is not None:
            logprobs = self._all_logprobs(index, done)
        return {
            "index": index,
            "text": echo if self.silent else echo + done.text,
            "logprobs": logprobs,
            "finish_reason": "length" if self.silent else done.finish_reason,
            "stop_reason": None if self.silent else done.stop_reason,
            "seed": done.seed,
        }

    def _all_logprobs(self, index: int, done: Completion) -> dict[str, Any]:
        """Of the prompt, if it is wanted, and of what was generated."""
        reports: list[Any] = []
        if self.echoes:
            first, *known = done.prompt_logprobs or [None]
            reports += [{done.prompt_token_ids[0]: first}, *known]
        if not self.silent:
            reports += done.logprobs or []
        return self._logprobs(reports, index)

    def _logprobs(self, reports: Sequence[Any], index: int) -> dict[str, Any]:
        """Log-probabilities as completions have them; ``text_offset`` is where a token's first character begins."""
        tokens = [next(iter(report)) for report in reports]
        decoder, at = self._places.get(index) or (getincrementaldecoder("utf-8")("replace"), 0)
        offsets = []
        for token in tokens:
            offsets.append(at)
            at += len(decoder.decode(self.texts.bytes(token)))
        self._places[index] = decoder, at
        return {
            "tokens": [self.texts.name(token) for token in tokens],
            "token_logprobs": [report[token] for token, report in zip(tokens, reports, strict=True)],
            "top_logprobs": [self._likeliest(report) for report in reports],
            "text_offset": offsets,
        }

    def _likeliest(self, report: Report) -> dict[str, float] | None:
        """The likeliest tokens and the one that was chosen; of tokens that read alike the likelier one."""
        if None in report.values():
            return None  # the first token of a prompt
        chosen = next(iter(report))
        likeliest = dict(sorted(report.items(), key=lambda item: -item[1])[: self.ask.logprobs]) | {
            chosen: report[chosen]
        }
        return {self.texts.name(token): value for token, value in sorted(likeliest.items(), key=lambda item: item[1])}

    def _chunk(self, index: int, text: str, logprobs: Any, finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self.frame, "choices": [choice]} | ({"usage": None} if self.ask.include_usage else {})
