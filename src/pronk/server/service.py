"""The service behind HTTP routes and ``pronk batch``: it checks requests and runs the engine."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from functools import cached_property, lru_cache, partial
from http import HTTPStatus
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, TypeVar

from pronk import (
    BITS,
    AsyncLLM,
    Completion,
    DeadlineError,
    Guide,
    GuideError,
    Piece,
    PromptError,
    PronkError,
    __version__,
)
from pronk.checkpoint import ModelConfig
from pronk.drafting import KnownDrafter, list_drafters
from pronk.server.errors import ApiError, to_api_error
from pronk.server.metrics import Metrics
from pronk.server.moderation import ModerationPrompt, add_system_prompt
from pronk.server.names import AdapterNames, drafter_selector
from pronk.server.protocol.completions import CompletionRequest
from pronk.server.protocol.conversation import ConversationRequest
from pronk.server.protocol.field_report import report_header
from pronk.server.protocol.request import (
    NO_LIMIT,
    EngineInputs,
    PreparedRequest,
    RequestBody,
    RunningUsage,
    TextRequest,
    list_prompts,
    naming_fields_of,
    refuse,
)
from pronk.server.protocol.small_routes import (
    DetokenizeRequest,
    EmbeddingRequest,
    ModerationRequest,
    RerankRequest,
    TokenizeRequest,
    moderation,
)
from pronk.server.replicas.dispatcher import Dispatcher
from pronk.server.settings import ServerSettings
from pronk.server.volatile import drop_volatile_lines
from pronk.serving import (
    AdmissionLimit,
    Prompt,
    recommended_params,
    sampling_values,
    split_prompts,
)
from pronk.text import (
    ChatPrompt,
    TimeLimit,
    has_system_role,
    has_system_role_anywhere,
    join_parts,
    place_system_messages,
    shared_time,
)

T = TypeVar("T")
B = TypeVar("B", bound=RequestBody)
# Generator that does work on a request. It yields between parts of the work, called turns, so that
# other requests can run; its return value has the type ``T``.
Turns = Generator[None, None, T]


class _Run(Protocol):
    """Function that runs another function in a thread, and returns its result."""

    async def __call__(self, function: Callable[[], T]) -> T: ...


_log = logging.getLogger(__name__)

# Special tokens that ``/tokenizer_info`` publishes. A model's files may have further entries named
# ``…_token``, even an access token.
_PUBLISHED_TOKENS = tuple(f"{name}_token" for name in "bos eos unk pad sep cls mask".split())
# Time of one turn of tokenizing a request's texts. Afterwards, and before the next text, the texts
# of other requests are tokenized.
_TURN_SECONDS = 0.1
# Work of encoding a reply, in the unit of FairExecutor: the work of parsing one byte of a request.
_TOKEN_SIZE = 4  # work for each token of the reply
_REPORT_SIZE = 16  # work for each log-probability with its token
_NUMBER_SIZE = 1  # work for each number of an embedding


class Service:
    """Checks requests, tokenizes prompts and runs the engine, for mutually distrustful clients."""

    def __init__(
        self,
        engine: AsyncLLM | Dispatcher,
        settings: ServerSettings,
        *,
        moderation_prompt: ModerationPrompt | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """Serve the model of an engine.

        Args:
            engine: runs the requests.
            settings: names, limits and features of the server.
            moderation_prompt: prompt that classifies texts; ``None`` means the built-in prompt.
            metrics: metrics of an earlier load of the model; ``None`` makes new ones.
        """
        self.engine = engine
        self.settings = settings
        self.metrics = metrics or Metrics(settings.name)
        self.metrics.count_load(engine, "loaded")
        self.names = AdapterNames(settings.name, engine.llm.adapters)
        self._select_drafter = drafter_selector(engine.llm, settings.allowed_drafters)
        self.known_drafters = _known_drafters(engine.llm.path, engine.llm.config)
        self.moderation_prompt = moderation_prompt or ModerationPrompt(engine.llm.tokenizer)
        self._reading = AdmissionLimit(settings.limits.requests, shared=settings.is_shared)
        # The cache drops repeated messages, which would fill the log.
        log = partial(_log.info, "a request has parts that its answer does not follow: %s")
        self._log_ignored = lru_cache(256)(log)

    @property
    def is_busy(self) -> bool:
        """Whether a request is being tokenized, waits or runs."""
        return self._reading.num_admitted > 0 or self.engine.num_requests > 0

    def close(self) -> None:
        """Stop the engine after its current step, and the tokenizer at once."""
        self.engine.stop()
        self.engine.llm.tokenizer.stop()

    async def prepare(self, request: TextRequest, tenant: str = "") -> PreparedRequest:
        """Check a request and tokenize its prompts.

        Raises:
            ApiError: an option is beyond the limits or unsupported.
            PronkError: the prompt or an option does not fit the model.
        """
        self.names.adapter(request.model)
        with naming_fields_of(request):
            return await self._read_in_turns(tenant, self._prepare, request)

    async def complete(
        self, request: TextRequest, tenant: str = "", *, arrived: float | None = None
    ) -> dict[str, Any]:
        """Return the whole reply to a request as JSON values.

        Args:
            request: the validated request.
            tenant: digest of the client's API key; only requests of a tenant share cached KV
                blocks.
            arrived: time of the request's arrival (``perf_counter``), by default now.

        Raises:
            ApiError: see :meth:`prepare`.
            PronkError: see :meth:`prepare`, or the request failed.
        """
        with self.metrics.request(arrived) as start:
            prepared = await self.prepare(request, tenant)
            reply = prepared.reply
            done = dict[int, Completion]()
            async with aclosing(self._steps(prepared.inputs, request, tenant, start)) as steps:
                async for pieces in steps:
                    reply.record(pieces)
                    done.update(_finished(pieces))
            completions = _sort_by_index(done)
            size = _size_of(completions)
            return await self.engine.executor.run(tenant, reply.whole, completions, size=size)

    async def stream(
        self, request: TextRequest, tenant: str = "", *, arrived: float | None = None
    ) -> AsyncGenerator[list[dict[str, Any]]]:
        """Yield the chunks of the reply as JSON values, one list per step of the engine.

        The first list comes after the first step, so that errors of the request are raised before
        any chunk. Arguments and errors are those of :meth:`complete`.
        """
        with self.metrics.request(arrived) as start:
            prepared = await self.prepare(request, tenant)
            reply = prepared.reply
            done = dict[int, Completion]()
            first = reply.start()
            running = RunningUsage(prepared.inputs.prompts, request.n or 1)
            async with aclosing(self._steps(prepared.inputs, request, tenant, start)) as steps:
                async for pieces in steps:
                    done.update(_finished(pieces))
                    chunks = reply.step(pieces)
                    if request.continuous_usage:
                        running.add(pieces, chunks)
                    yield [*first, *chunks]
                    first = []
        completions = _sort_by_index(done)
        size = _size_of(completions)
        yield await self.engine.executor.run(tenant, reply.end, completions, size=size)

    async def moderate(
        self, request: ModerationRequest, tenant: str = "", *, arrived: float | None = None
    ) -> dict[str, Any]:
        """Classify texts; return the reply with the probability of each category for each text.

        See :mod:`pronk.server.moderation` for the method, and :meth:`complete` for the arguments.
        """
        reports: dict[int, dict[int, float]] = {}
        with self.metrics.request(arrived) as start:
            self.names.adapter(request.model)
            prompts = await self._read_in_turns(tenant, self._moderation_prompts, request)
            inputs = EngineInputs(prompts, self.moderation_prompt.params)
            text_request = TextRequest.model_validate({"model": request.model})
            async with aclosing(self._steps(inputs, text_request, tenant, start)) as steps:
                async for pieces in steps:
                    reports.update((piece.index, piece.logprobs or {}) for piece in pieces)
        scores = [self.moderation_prompt.scores(each) for each in _sort_by_index(reports)]
        return moderation(self.settings.name, scores)

    async def embed(
        self, request: EmbeddingRequest, tenant: str = "", *, arrived: float | None = None
    ) -> dict[str, Any]:
        """Return the reply with the embedding of each text.

        Arguments and errors are those of :meth:`complete`.
        """
        with self.metrics.request(arrived) as start:
            adapter = self.names.adapter(request.model)
            prompts = await self._read_in_turns(tenant, self._input_ids, request)
            vectors = await self.engine.embed(
                prompts,
                pooling=request.pooling,
                dimensions=request.dimensions,
                normalize=request.normalize,
                adapter=adapter,
                **self._schedule(tenant, start),
            )
            self.metrics.count_embeddings(prompts, start)
        name = self.names.shown_as(request.model)
        num_tokens = sum(map(len, prompts))
        write = partial(request.reply, name, [*vectors], num_tokens)
        return await self.engine.executor.run(tenant, write, size=_NUMBER_SIZE * vectors.size)

    async def rerank(
        self, request: RerankRequest, tenant: str = "", *, arrived: float | None = None
    ) -> dict[str, Any]:
        """Return the reply with the documents of a request, the most relevant ones first.

        Documents run in groups of at most ``limits.prompts``. Arguments and errors are those of
        :meth:`complete`.
        """
        question = self.engine.llm.request_factory.relevance
        size = self.settings.limits.prompts
        reports: dict[int, Mapping[int, float]] = {}
        with self.metrics.request(arrived) as start:
            self.names.adapter(request.model)
            prompts = await self._read_in_turns(tenant, self._relevance_prompts, request)
            text_request = TextRequest.model_validate({"model": request.model})
            for first in range(0, len(prompts), size):
                inputs = EngineInputs(prompts[first : first + size], question.params)
                async with aclosing(self._steps(inputs, text_request, tenant, start)) as steps:
                    async for pieces in steps:
                        for piece in pieces:
                            reports[first + piece.index] = piece.logprobs or {}
        scores = [question.score(each) for each in _sort_by_index(reports)]
        name = self.names.shown_as(request.model)
        return request.reply(name, scores, sum(map(len, prompts)))

    async def tokenize(self, request: TokenizeRequest, tenant: str = "") -> dict[str, Any]:
        """Return the token ids of a text or a conversation."""
        ids = await self._read(tenant, self._tokenize, request)
        return {"tokens": ids, "count": len(ids), "max_model_len": self.engine.llm.config.context}

    async def count_tokens(self, request: ConversationRequest, tenant: str = "") -> int:
        """Return the number of tokens of a conversation."""
        return await self._read(tenant, self._count_tokens, request)

    async def detokenize(self, request: DetokenizeRequest, tenant: str = "") -> dict[str, Any]:
        """Return the text of token ids."""
        return {"prompt": await self._read(tenant, self._decode, request)}

    def tokenizer_info(self) -> dict[str, Any]:
        """Return special tokens, chat template and context as in ``tokenizer_config.json``."""
        llm = self.engine.llm
        special_tokens = llm.tokenizer.special_tokens
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{name: special_tokens.get(name) for name in _PUBLISHED_TOKENS},
            "chat_template": llm.tokenizer.chat_template,
            "model_max_length": llm.config.context,
        }

    async def _steps(
        self, inputs: EngineInputs, request: TextRequest, tenant: str, arrived: float
    ) -> AsyncGenerator[list[Piece]]:
        """Run prompts on the engine; yield the new tokens of each step, and update the metrics.

        Raises:
            ApiError: the engine's error is about a field of the request, which the message names.
            PronkError: any other error of the engine.
        """
        params = inputs.params
        observe = self.metrics.observer(inputs.prompts, params, arrived)
        steps = self.engine.steps(
            inputs.prompts,
            params,
            drafter=None if request.drafter is None else self._select_drafter(request.drafter),
            adapter=self.names.adapter(request.model),
            priority=request.priority or 0,
            calls=request.answer_calls(),
            branch_positions=inputs.branch_positions,
            **self._schedule(tenant, arrived, request.cache_salt or ""),
        )
        try:
            async with aclosing(steps):
                async for pieces in steps:
                    observe(pieces)
                    yield pieces
        except PronkError as error:
            if isinstance(error, GuideError) and params.guide is not None:
                error = await self._error_of_form(error, request, params.guide, tenant)
            if (api_error := request.field_error(error)) is None:
                raise
            raise api_error from error

    async def _error_of_form(
        self, error: GuideError, request: TextRequest, guide: Guide, tenant: str
    ) -> GuideError:
        """Return the error of the client's own guide in place of an error of the engine's guide.

        A client may give a form of the answer: a JSON schema, regular expression, grammar or list
        of choices. The engine's guide wraps this form in the model's thoughts and calls, and an
        error of the engine's guide would quote what the client did not write.
        """
        form = request.guide()
        if form is None or form == guide:
            return error
        try:
            await asyncio.wrap_future(self.engine.llm.request_factory.grammars.submit(form, tenant))
        except GuideError as own:
            return own
        msg = (
            "guide: expected a form that can be followed beside thoughts and calls, found one too "
            "complex; simplify it"
        )
        return GuideError(msg)

    def _schedule(self, tenant: str, arrived: float, salt: str = "") -> dict[str, Any]:
        """Return the engine's options ``deadline`` (seconds from now), ``salt`` and ``tenant``.

        The salt of cached KV blocks depends on the tenant, so that no tenant can find out which
        prompts another one has sent.
        """
        ends_at = arrived + self.settings.limits.seconds
        return {
            "deadline": max(0.0, ends_at - perf_counter()),
            "salt": hashlib.sha256(f"{tenant}\0{salt}".encode()).digest(),
            "tenant": tenant,
        }

    def _prepare(self, request: TextRequest) -> Turns[PreparedRequest]:
        """Check a request and tokenize its prompts; runs in a thread, because requests are long."""
        request.check(self.settings.limits)
        if request.drafter is not None:
            # An unknown drafter raises an error here, before the prompts are tokenized.
            self._select_drafter(request.drafter)
        prepared = yield from self._tokenize_prompts(request)
        if ignored := request.ignored():
            self._log_ignored(report_header(ignored))
        return prepared

    def _moderation_prompts(self, request: ModerationRequest) -> Turns[list[list[int]]]:
        """Return the token ids of the moderation prompt for each text of a request."""
        texts: list[Any] = list_prompts(request.input)
        kind = request.kind or "prompt"
        limit = self.settings.limits.prompts
        if not 1 <= len(texts) <= limit:
            raise refuse("input", f"expected 1..{limit} texts, found {len(texts)}")
        options = self.moderation_prompt.options

        def encode(text: Any) -> list[int]:
            messages = self.moderation_prompt.messages(text, kind)
            return self._encode_chat(messages, options=options).token_ids

        return (yield from _encode_in_turns(texts, encode))

    def _relevance_prompts(self, request: RerankRequest) -> Turns[list[list[int]]]:
        """Return the token ids of the question of relevance for each document of a request."""
        request.check(self.settings.limits)
        for text in request.texts:
            self._check_length(request.query, request.instruction, text)
        factory = self.engine.llm.request_factory

        def encode(document: Any) -> list[int]:
            return factory.encode_relevance(request.query, document, request.instruction)

        return (yield from _encode_in_turns(request.texts, encode))

    def _input_ids(self, request: EmbeddingRequest) -> Turns[list[list[int]]]:
        request.check(self.settings.limits, self.engine.llm.config.hidden_size)
        texts = list_prompts(request.input)
        for text in texts:
            self._check_length(text)
        try:
            encode = self.engine.llm.request_factory.encode_prompt
            return (yield from _encode_in_turns(texts, encode))
        except PromptError as error:
            message = str(error).removeprefix("prompt: ")
            raise refuse("input", message, to_api_error(error).code) from error

    def _tokenize_prompts(self, request: TextRequest) -> Turns[PreparedRequest]:
        """Check the lengths of the prompts, tokenize them, and prepare the engine's input."""
        llm = self.engine.llm
        defaults = sampling_values(recommended_params(llm.config))
        if request.do_sample is False:
            defaults["temperature"] = 0.0
        elif request.do_sample:
            defaults["temperature"] = defaults["temperature"] or 1.0
        missing = dict[str, Any]()
        for option, value in defaults.items():
            if getattr(request, option) is None:
                missing[option] = value
        name = self.names.shown_as(request.model)
        # Texts of equal seeds are equal on servers with one fingerprint.
        arithmetic = f"portable-{BITS}" if llm.bits == "portable" else llm.kernels
        shared_fields = {"model": name, "system_fingerprint": f"pronk-{__version__}-{arithmetic}"}
        if isinstance(request, CompletionRequest):
            encode: Callable[[Prompt], list[int]] = llm.request_factory.encode_prompt
            context = request.context()
            for prompt in request.prompts():
                self._check_length(prompt, request.suffix, *(file.text for file in context))
            if request.suffix is not None:
                stop_ids = llm.request_factory.infill_format.stop_ids
                missing["stop_token_ids"] = [*(request.stop_token_ids or ()), *stop_ids]
                encode = partial(
                    llm.request_factory.encode_infill, suffix=request.suffix, context=context
                )
            prompts = yield from _encode_in_turns(request.prompts(), encode)
            if request.max_tokens is not None:
                longest = max(map(len, prompts))
                missing["max_tokens"] = self._max_tokens(request.max_tokens, longest)
            completed = request.model_copy(update=missing)
            return completed.prepare(prompts, llm.tokenizer, shared_fields)
        assert isinstance(request, ConversationRequest)
        answers = llm.request_factory.answer_format
        request.note_ignored(request.unfollowed(answers))
        chat = self._encode_conversation(request, is_answered=True)
        requested = request.requested_max_tokens
        num_prompt = len(chat.token_ids)
        max_tokens = self._max_tokens(requested, num_prompt, request.limit_field)
        if request.thinking_message is None:
            missing["thinking_message"] = self.settings.thinking_message
        conversation = request.model_copy(update=missing)
        return conversation.prepare(chat, max_tokens, answers, shared_fields)

    def _count_tokens(self, request: ConversationRequest) -> int:
        with naming_fields_of(request):
            request.check(self.settings.limits)
            return len(self._encode_conversation(request).token_ids)

    def _decode(self, request: DetokenizeRequest) -> str:
        size = self.engine.llm.config.vocab_size
        if not all(0 <= token < size for token in request.tokens):
            raise refuse("tokens", f"expected token ids in 0..{size - 1}, found others")
        return self.engine.llm.tokenizer.decode(request.tokens, skip_special_tokens=False)

    def _encode_conversation(
        self, request: ConversationRequest, *, begins_answer: bool = True, is_answered: bool = False
    ) -> ChatPrompt:
        """Return the token ids of a conversation with its tools and the server's system prompt.

        The other arguments are those of :meth:`_encode_chat`.
        """
        # Check the tools before the template is rendered, so that an unsupported format raises its
        # own error.
        request.check_tools(
            self.engine.llm.request_factory.answer_format,
            allow_generic=self.settings.generic_tools,
        )
        tools = request.tool_use.template_tools()
        conversation = request.checked_conversation()
        if not self.settings.keep_volatile:
            conversation, dropped = drop_volatile_lines(conversation)
            request.note_ignored(f"system (volatile line {name})" for name in dropped)
        messages = self._place_system(add_system_prompt(conversation, self.settings.guardrails))
        if not request.continues_answer:
            options = request.template_options()
            return self._encode_chat(
                messages, tools, options, begins_answer=begins_answer, is_answered=is_answered
            )
        begun = join_parts(messages.pop())
        request.check_begun(begun)
        text = begun["content"]
        thoughts = begun.get("reasoning_content", "")
        self._check_length(text, thoughts)
        prompt = self._encode_chat(
            messages, tools, request.template_options(), is_answered=is_answered
        )
        factory = self.engine.llm.request_factory
        if thoughts and not factory.answer_format.takes_thoughts(prompt.token_ids):
            request.note_ignored([f"{request.messages_field} (thoughts of the last message)"])
        ids = factory.answer_format.begin_answer(prompt.token_ids, text, thoughts)
        return prompt._replace(token_ids=factory.encode_prompt(ids))

    def _encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        begins_answer: bool = True,
        is_answered: bool = False,
    ) -> ChatPrompt:
        """Check the length of a conversation; return its token ids in the model's chat template.

        Args:
            messages: messages of the conversation.
            tools: tools that the model may call.
            options: further variables of the template.
            begins_answer: whether the ids end with the header of an answer.
            is_answered: whether an answer follows, so that branch positions are of use.
        """
        self._check_conversation(messages)
        descriptions = [tool["function"].get("description") for tool in tools or ()]
        self._check_length(*descriptions)
        factory = self.engine.llm.request_factory
        if is_answered:
            return factory.encode_chat(messages, trusted=False, tools=tools, options=options)
        ids = self.engine.llm.tokenizer.chat_ids(
            messages,
            add_generation_prompt=begins_answer,
            trusted=False,
            tools=tools,
            options=options,
        )
        return ChatPrompt(factory.encode_prompt(ids))

    def _tokenize(self, request: TokenizeRequest) -> list[int]:
        with naming_fields_of(request):
            request.check(self.settings.limits)
        tokenizer = self.engine.llm.tokenizer
        self._check_length(request.prompt)
        if request.prompt is not None:
            with_special = request.add_special_tokens is not False
            return tokenizer.encode(request.prompt, add_special_tokens=with_special)
        begins_answer = request.add_generation_prompt is not False
        return self._encode_conversation(request, begins_answer=begins_answer).token_ids

    def _check_conversation(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raise ``ApiError`` if a conversation is too long for the model, whatever its template.

        The check is fast, and comes before the chat template is rendered.
        """
        context = self.engine.llm.config.context
        if len(messages) > context:  # each message has at least the token of its role
            problem = (
                f"messages: expected at most {context}, the tokens of the context, found "
                f"{len(messages)}; shorten them"
            )
            raise ApiError(HTTPStatus.BAD_REQUEST, problem, "context_length_exceeded")
        texts = list[str]()
        for message in messages:
            content = message["content"]
            if isinstance(content, str):
                texts.append(content)
            elif isinstance(content, list):
                texts += [part["text"] for part in content]
            texts += [call["function"]["arguments"] for call in message.get("tool_calls", ())]
            if "reasoning_content" in message:
                texts.append(message["reasoning_content"])
        self._check_length(*texts)

    def _check_length(self, *texts: str | list[int] | None) -> None:
        """Raise ``ApiError`` if texts are longer than a context full of the longest tokens.

        A text is a string or a list of token ids; ``None`` has length 0.
        """
        limit = self.engine.llm.config.context * self._longest_token_length
        length = sum(len(text) for text in texts if text is not None)
        if length > limit:
            message = (
                f"prompt: expected at most {limit} characters or token ids, found {length}; "
                "shorten it"
            )
            raise ApiError(HTTPStatus.BAD_REQUEST, message, "context_length_exceeded")

    def _place_system(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Move the system messages of a conversation to where the chat template accepts them."""
        later = any(message["role"] == "system" for message in messages[1:])
        anywhere = later and self._has_system_role_anywhere
        placed = place_system_messages(messages, first=self._has_system_role, anywhere=anywhere)
        return [dict(message) for message in placed]

    @cached_property
    def _has_system_role(self) -> bool:
        return has_system_role(self.engine.llm.tokenizer.chat)

    @cached_property
    def _has_system_role_anywhere(self) -> bool:
        return has_system_role_anywhere(self.engine.llm.tokenizer.chat)

    @cached_property
    def _longest_token_length(self) -> int:
        vocabulary = self.engine.llm.tokenizer.backend.get_vocab(with_added_tokens=True)
        return max(map(len, vocabulary))

    def _max_tokens(self, requested: int | None, num_prompt: int, field: str = "max_tokens") -> int:
        """Return the maximum number of tokens to generate: ``requested``, or as many as fit.

        A text ends where the context is full, so that a number beyond it is lowered: agents send
        one large number to all models.

        Args:
            requested: the client's maximum; ``None`` and ``NO_LIMIT`` mean the largest one.
            num_prompt: number of tokens of the prompt.
            field: the field of the request, for the error.

        Raises:
            ApiError: the number is beyond the limit of the server.
        """
        limit = self.settings.limits.max_tokens
        if limit is not None and requested not in (None, NO_LIMIT) and requested > limit:
            raise refuse(field, f"expected at most {limit}, found {requested}")
        context = self.engine.llm.config.context
        fitting = max(1, min(limit or context, context - num_prompt))
        return fitting if requested is None else min(requested, fitting)

    async def _read(self, tenant: str, function: Callable[[B], T], request: B) -> T:
        """Call ``function(request)`` in a thread, within the limits of :meth:`_admit_reading`."""
        async with self._admit_reading(tenant, request) as run:
            return await run(partial(function, request))

    async def _read_in_turns(self, tenant: str, function: Callable[[B], Turns[T]], request: B) -> T:
        """Run the generator ``function(request)`` in threads, one job per turn; return its result.

        The limits are those of :meth:`_admit_reading`. There is no further turn after the time
        limit, or once the client has disconnected.
        """
        turns = function(request)
        async with self._admit_reading(tenant, request) as run:
            while (result := await run(partial(_take_turn, turns))) is None:
                pass
            return result[0]

    @asynccontextmanager
    async def _admit_reading(self, tenant: str, request: RequestBody) -> AsyncGenerator[_Run]:
        """Yield a function that runs jobs of a request in threads.

        Raises:
            DeadlineError: the jobs have taken ``limits.seconds``.
            OverloadedError: too many requests are being read, of all tenants or of this one.
        """
        seconds = self.settings.limits.seconds
        with self._reading.hold(1, tenant) as admission:

            async def run(function: Callable[[], T]) -> T:
                job = self.engine.executor.submit(tenant, function, size=request.num_bytes)
                return await asyncio.wrap_future(admission.until(job))

            try:
                async with asyncio.timeout(seconds) as limit:
                    yield run
            except TimeoutError as error:
                if not limit.expired():
                    raise
                msg = f"expected the prompt to be read within {seconds:g} s; try again later"
                raise DeadlineError(msg) from error


def _encode_in_turns(
    texts: Sequence[Prompt], encode: Callable[[Prompt], list[int]]
) -> Turns[list[list[int]]]:
    """Return the token ids of each text; a turn ends after a group of texts or ``_TURN_SECONDS``.

    A tokenizer in a child process has one time limit for all texts.
    """
    limit = TimeLimit()
    prompts = list[list[int]]()
    for group in split_prompts(texts):
        if prompts:
            yield
        ends_at = perf_counter() + _TURN_SECONDS
        for text in group:
            if perf_counter() > ends_at:
                yield
                ends_at = perf_counter() + _TURN_SECONDS
            with shared_time(limit):
                prompts.append(encode(text))
    return prompts


def _take_turn(turns: Turns[T]) -> tuple[T] | None:
    """Run the next turn; return ``(result,)`` if it was the last one, else ``None``."""
    try:
        next(turns)
    except StopIteration as end:
        return (end.value,)
    return None


def _size_of(completions: Sequence[Completion]) -> int:
    """Return the work of encoding a reply, in the unit of :class:`FairExecutor`.

    The unit is the work of parsing one byte of a request.
    """
    num_tokens = 0
    num_reported = 0
    for completion in completions:
        num_tokens += len(completion.token_ids)
        for reports in (completion.logprobs, completion.prompt_logprobs):
            if reports:
                num_reported += len(reports) * len(reports[-1] or ())
    return _TOKEN_SIZE * num_tokens + _REPORT_SIZE * num_reported


def _known_drafters(path: Path, config: ModelConfig) -> list[dict[str, Any]]:
    """Return the drafters that are known to fit a model, for ``/v1/models``.

    Heads are named without their folders, which clients need not know. The list is empty if the
    files of a head cannot be read; the drafter that uses them says why.
    """
    known: list[KnownDrafter] = []
    with suppress(PronkError):
        known = list_drafters(path, config)
    return [{"drafter": each.drafter, "source": each.name, "here": each.here} for each in known]


def _finished(pieces: Sequence[Piece]) -> dict[int, Completion]:
    """Return the completions of the samples that a step has finished, by index of the sample."""
    return {piece.index: piece.completion for piece in pieces if piece.completion is not None}


def _sort_by_index(samples: dict[int, T]) -> list[T]:
    return [samples[index] for index in sorted(samples)]
