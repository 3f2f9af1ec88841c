"""From what a client asks to what it gets; the app and ``pronk batch`` go this way alike."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import fields, is_dataclass
from functools import cached_property, lru_cache
from http import HTTPStatus
from time import perf_counter
from typing import Any, TypeVar
from uuid import uuid4

from pronk import __version__
from pronk.drafters.registry import make_drafter
from pronk.errors import DeadlineError, OptionError, OverloadedError, PromptError, PronkError
from pronk.outputs import Completion, Piece
from pronk.sampling.params import SamplingParams
from pronk.server.errors import ApiError
from pronk.server.guardrails import Reflection, guarded, knows_system
from pronk.server.metrics import Metrics
from pronk.server.protocol.chat import ChatRequest, plain_messages
from pronk.server.protocol.completions import CompletionRequest
from pronk.server.protocol.guides import FormattedRequest
from pronk.server.protocol.request import GenerationWork, RunningUsage, TextRequest, refuse, unsupported
from pronk.server.protocol.responses import ResponsesRequest
from pronk.server.protocol.small_routes import DetokenizeRequest, ModerationRequest, TokenizeRequest, moderation
from pronk.server.served_engine import ServedEngine
from pronk.server.settings import ServerSettings
from pronk.speculation.proposer import Drafter
from pronk.tokenization.chat.tools import ToolForm, find_form

__all__ = ["Service"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

# Options of drafters that name files: a request may not choose which files are read. An option of the first kind has a
# file even if it is left out: in a clone, one of pronk-tiny's.
_MODELS, _FILES = ("model", "datastore"), ("store", "table")
_MOST_PARTS = 8  # of a drafter that a request asks for, which may be made of others


class Service:
    """One model, for clients who need not trust each other.

    Attributes:
        engine: the model.
        settings: what is allowed.
        metrics: what happens.
        reflection: how texts are moderated.
        draining: whether it is on its way out, and takes nothing more in.
    """

    def __init__(self, engine: ServedEngine, settings: ServerSettings, *, reflection: Reflection | None = None) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = Metrics(engine, settings.name)
        # Those whom whoever started the server has named: a mistake in one shows now, and what they load stays.
        self._named = {make_drafter(spec): engine.llm.get_proposer(spec) for spec in settings.drafters}
        self.reflection = reflection or Reflection(engine.llm.tokenizer)
        self.draining = False
        # Templates and long prompts take a while; a few threads, so that they cannot take all of the machine.
        self._pool = ThreadPoolExecutor(2, "pronk-reading")
        self._reading = 0
        self._drafter = lru_cache(256)(self._allowed)

    @property
    def busy(self) -> bool:
        """Whether there is work that a client waits for."""
        return self._reading > 0 or self.engine.num_requests > 0

    def close(self) -> None:
        """Let its threads go, the model's with the step that it is at."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.engine.stop()

    async def work(self, ask: TextRequest) -> GenerationWork:
        """Read what is asked.

        Raises:
            ApiError: it asks for more than is allowed, or for what there is not.
            PronkError: its prompt or its options do not fit the model.
        """
        self._check_model(ask.model)
        ask.check(self.settings.limits)
        if ask.drafter is not None:
            self._drafter(ask.drafter)
        return await self._read(self._work, ask)

    async def whole(self, ask: TextRequest, tenant: str = "") -> dict[str, Any]:
        """The reply, all at once.

        Args:
            ask: what is asked for.
            tenant: who asks; texts of others are neither found in the cache nor ever seen.

        Raises:
            ApiError, PronkError: see :meth:`work`; or it came to no end.
        """
        with self.metrics.request() as arrived:
            work = await self.work(ask)
            done = dict[int, Completion]()
            async with aclosing(self._steps(work.prompts, work.params, ask, tenant, arrived)) as steps:
                async for pieces in steps:
                    work.answer.read(pieces)
                    done.update((piece.index, piece.completion) for piece in pieces if piece.completion is not None)
            return await asyncio.to_thread(work.answer.body, [done[index] for index in sorted(done)])

    async def chunks(self, ask: TextRequest, tenant: str = "") -> AsyncGenerator[list[dict[str, Any]]]:
        """The same as it comes, step by step.

        Nothing is given out before the model has begun, so that whatever is wrong with the request is raised first.
        """
        with self.metrics.request() as arrived:
            work = await self.work(ask)
            done, begun = dict[int, Completion](), False
            running = RunningUsage(work.prompts, ask.n or 1)
            async with aclosing(self._steps(work.prompts, work.params, ask, tenant, arrived)) as steps:
                async for pieces in steps:
                    first = [] if begun else work.answer.start()
                    begun = True
                    done.update((piece.index, piece.completion) for piece in pieces if piece.completion is not None)
                    chunks = work.answer.step(pieces)
                    if ask.continuous_usage:
                        running.add(pieces, chunks)
                    yield [*first, *chunks]
        yield work.answer.end([done[index] for index in sorted(done)])

    async def moderate(self, ask: ModerationRequest, tenant: str = "") -> dict[str, Any]:
        """What the model thinks of texts; see :mod:`pronk.server.guardrails`."""
        found: dict[int, dict[int, float]] = {}
        with self.metrics.request() as arrived:
            self._check_model(ask.model)
            texts, kind = ask.texts, ask.kind or "prompt"
            if not 1 <= len(texts) <= self.settings.limits.prompts:
                raise refuse("input", f"expected 1..{self.settings.limits.prompts} texts, found {len(texts)}")
            prompts = await self._read(lambda: [self._chat_ids(self.reflection.messages(text, kind)) for text in texts])
            letters = tuple(self.reflection.letters().values())
            params = SamplingParams(max_tokens=1, logprobs=0, logprob_token_ids=letters, ignore_eos=True)
            async with aclosing(self._steps(prompts, params, TextRequest.model_validate({}), tenant, arrived)) as steps:
                async for pieces in steps:
                    found.update((piece.index, piece.logprobs or {}) for piece in pieces)
        scores, flagged = zip(*(self.reflection.scores(found[index]) for index in sorted(found)), strict=True)
        return moderation(f"modr-{uuid4().hex}", self.settings.name, list(scores), list(flagged))

    async def tokenize(self, ask: TokenizeRequest) -> dict[str, Any]:
        """Token ids of a text or of a conversation."""
        self._check_model(ask.model)
        if (ask.prompt is None) == (ask.messages is None):
            raise refuse("prompt", "expected either it or messages")
        ids = await self._read(self._tokenize, ask)
        return {"tokens": ids, "count": len(ids), "max_model_len": self.engine.llm.config.context}

    async def detokenize(self, ask: DetokenizeRequest) -> dict[str, Any]:
        """The text of token ids."""
        self._check_model(ask.model)
        most = self.engine.llm.config.vocab_size
        if not all(0 <= token < most for token in ask.tokens):
            raise refuse("tokens", f"expected token ids in 0..{most - 1}")
        decode = self.engine.llm.tokenizer.decode
        return {"prompt": await self._read(lambda: decode(ask.tokens, skip_special_tokens=False))}

    async def _steps(
        self, prompts: Sequence[list[int]], params: SamplingParams, ask: TextRequest, tenant: str, arrived: float
    ) -> AsyncGenerator[list[Piece]]:
        observe = self.metrics.observer(prompts, params, arrived)
        steps = self.engine.steps(
            prompts,
            params,
            drafter=None if ask.drafter is None else self._drafter(ask.drafter),
            priority=ask.priority or 0,
            deadline=max(0.0, arrived + self.settings.limits.seconds - perf_counter()),
            salt=hashlib.sha256(f"{tenant}\0{ask.cache_salt or ''}".encode()).digest(),
            tenant=tenant,
        )
        try:
            async with aclosing(steps):
                async for pieces in steps:
                    observe(pieces)
                    yield pieces
        except PronkError as error:
            named = ask.named(error) if isinstance(ask, FormattedRequest) else None
            if named is None:
                raise
            raise named from error

    def _work(self, ask: TextRequest) -> GenerationWork:
        llm = self.engine.llm
        frame = {"model": self.settings.name, "system_fingerprint": f"pronk-{__version__}-{llm.kernels}"}
        if isinstance(ask, CompletionRequest):
            self._check_length(*ask.texts())
            prompts = [llm.request_factory.ids(text) for text in ask.texts()]
            self._max_tokens(ask.max_tokens, 0)
            return ask.work(prompts, llm.tokenizer, frame)
        assert isinstance(ask, (ChatRequest, ResponsesRequest))
        messages = plain_messages(ask.messages) if isinstance(ask, ChatRequest) else ask.messages()
        tools = ask.plain_tools() if isinstance(ask, ChatRequest) else None
        given = guarded(messages, self.settings.guardrails, system=self._knows_system)
        if isinstance(ask, ChatRequest) and tools is not None:
            form = self._tool_form  # without one nothing is rendered
            prompt = self._chat_ids(given, tools)
            return ask.work(prompt, self._max_tokens(ask.wanted, len(prompt)), llm.tokenizer, frame, form)
        prompt = self._chat_ids(given)
        return ask.work(prompt, self._max_tokens(ask.wanted, len(prompt)), llm.tokenizer, frame)

    def _chat_ids(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
        parts = [message["content"] for message in messages]
        calls = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls", ())]
        self._check_length(*(each["text"] for part in parts if isinstance(part, list) for each in part), *parts, *calls)
        self._check_length(*(tool["function"].get("description") for tool in tools or ()))
        ids = self.engine.llm.tokenizer.chat_ids(messages, trusted=False, tools=tools)
        return self.engine.llm.request_factory.ids(ids)

    def _tokenize(self, ask: TokenizeRequest) -> list[int]:
        tokenizer = self.engine.llm.tokenizer
        self._check_length(ask.prompt)
        if ask.prompt is not None:
            return tokenizer.encode(ask.prompt, add_special_tokens=ask.add_special_tokens is not False)
        prompted = ask.add_generation_prompt is not False
        return tokenizer.chat_ids(plain_messages(ask.messages or []), add_generation_prompt=prompted, trusted=False)

    def _check_length(self, *texts: object) -> None:
        """Refuse what cannot fit, however it is split, before a tokenizer is busy with it."""
        most = self.engine.llm.config.context * self._longest
        for text in texts:
            if isinstance(text, (str, list)) and len(text) > most:
                message = (
                    f"the prompt has {len(text)} characters or ids; more than {most} are beyond the model's context"
                )
                raise ApiError(HTTPStatus.BAD_REQUEST, message, "context_length_exceeded")

    @cached_property
    def _knows_system(self) -> bool:
        return knows_system(self.engine.llm.tokenizer)

    @cached_property
    def _tool_form(self) -> ToolForm:
        try:
            return find_form(self.engine.llm.tokenizer)
        except PromptError as error:
            raise unsupported("tools", str(error).removeprefix("tools: ")) from error

    @cached_property
    def _longest(self) -> int:
        """Characters of the longest token; one that is a byte alone may be a character's part."""
        return max(map(len, self.engine.llm.tokenizer.backend.get_vocab(with_added_tokens=True)))

    def _max_tokens(self, wanted: int | None, prompt: int) -> int:
        """What the client asks for, or else all that there is room for."""
        limit = self.settings.limits.max_tokens or self.engine.llm.config.context
        if wanted is None:
            return max(1, min(limit, self.engine.llm.config.context - prompt))
        if wanted > limit:
            raise refuse("max_tokens", f"expected at most {limit}, found {wanted}")
        return wanted

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.settings.name):
            message = f"model: expected {self.settings.name!r}, found {name!r}"
            raise ApiError(HTTPStatus.NOT_FOUND, message, "model_not_found", "model")

    def _allowed(self, spec: str) -> Drafter:
        """A drafter that a request may have: one that the server was given, or one that reads no files of its own.

        Raises:
            ApiError: it may not.
        """
        try:
            drafter = make_drafter(spec)
        except OptionError as error:
            raise refuse("drafter", str(error)) from error
        if drafter == self.engine.llm.drafter:
            return drafter
        if drafter in self._named:
            return self._named[drafter]
        parts = _parts(drafter)
        if len(parts) > _MOST_PARTS:
            raise refuse("drafter", f"expected at most {_MOST_PARTS} drafters in one, found {len(parts)}")
        if not any(map(_reads_files, parts)):
            return drafter
        message = "expected one without files of its own, or one that the server was started with (--also)"
        raise refuse("drafter", f"{message}, found {spec!r}", "drafter_not_allowed")

    async def _read(self, work: Callable[..., T], *given: Any) -> T:
        """In a thread beside the loop; those who wait for one are counted, and wait only so long."""
        limits = self.settings.limits
        if self._reading >= limits.requests:
            msg = f"expected at most {limits.requests} requests at a time, found one more; try again later"
            raise OverloadedError(msg)
        self._reading += 1
        try:
            async with asyncio.timeout(limits.seconds):
                return await asyncio.get_running_loop().run_in_executor(self._pool, work, *given)
        except TimeoutError as error:
            msg = f"expected the prompt to be read within {limits.seconds:g} s; try again later"
            raise DeadlineError(msg) from error
        finally:
            self._reading -= 1


def _parts(drafter: Drafter) -> list[Drafter]:
    """A drafter and all that it is made of."""
    inner = getattr(drafter, "parts", ())
    return [drafter, *(part for each in inner for part in _parts(each))]


def _reads_files(drafter: Drafter) -> bool:
    """Whether a drafter has files of its own."""
    names: list[str] = [each.name for each in fields(drafter)] if is_dataclass(drafter) else []
    return any(name in _MODELS or (name in _FILES and getattr(drafter, name) is not None) for name in names)
