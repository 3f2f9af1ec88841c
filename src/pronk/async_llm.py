"""The asyncio API: a thread runs the engine, and coroutines await the tokens.

::

    async with AsyncLLM("path-or-hub-id") as llm:
        async for piece in llm.stream("def fibonacci(n):"):
            print(piece.text, end="")

Requests join and leave the batch between steps. Other threads may use the same
:class:`~pronk.llm.LLM` concurrently. Methods of :class:`~pronk.llm.LLM` that are missing here, such
as ``chat_ids``, do not wait for the model; call them on :attr:`AsyncLLM.llm`.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence, Sized
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Self, TypeVar, Unpack

from pronk.base.arrays import Array
from pronk.base.checks import check_integer, check_number
from pronk.base.errors import DeadlineError, OptionError, OverloadedError
from pronk.base.fair_executor import SMALL_JOB, FairExecutor
from pronk.base.keywords import check_keywords, known_keywords
from pronk.base.quantities import count_text
from pronk.drafting import Drafter
from pronk.engine.engine_thread import EngineThread, PendingRequests
from pronk.engine.options import ScheduleOptions
from pronk.engine.outputs import Choice, Completion, Piece
from pronk.engine.pooling import EmbeddingOptions, Pooling
from pronk.engine.request import Request
from pronk.engine.request_factory import params_per_prompt
from pronk.llm import LLM, Prompt
from pronk.sampling.defaults import recommended_params
from pronk.sampling.params import SamplingParams
from pronk.text.chat.answers import AnswerCalls
from pronk.text.chat.messages import Messages, TemplateOptions
from pronk.text.infill import ContextFile

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])

# Number of threads for work that grows with the size of a request: reading its body, tokenizing its
# prompts, and writing its reply. They are few because all threads share Python's lock: the event
# loop waits for each busy thread in turn.
REQUEST_THREADS = 2
# Maximum number of texts of one request for embeddings that run at the same time. The other texts
# of the request wait, so that it does not fill the batch.
MAX_EMBEDDED = 64
# Limits of one job of tokenization: number of prompts, and number of their characters or token ids.
# Between two jobs, other requests get their turns. No further jobs start once a request has ended.
_PROMPTS_AT_ONCE = 64
_SIZE_AT_ONCE = 2**16


class EngineLoad(NamedTuple):
    """Current load of an engine.

    Attributes:
        running: number of running requests.
        waiting: number of queued requests.
        kv_used: fraction of the KV blocks in use, 0..1.
        kv_idle: number of KV blocks that the prefix cache holds and no request uses.
        resumed: number of requests so far that continued on another replica.
        disk_hits: number of texts so far of which the prompt cache on disk had blocks.
        disk_blocks_read: number of blocks read from disk so far.
        disk_bytes_read: number of bytes read from disk so far.
        disk_blocks_written: number of blocks written to disk so far.
        disk_bytes_written: number of bytes written to disk so far.
        disk_blocks_evicted: number of blocks on disk deleted so far because of the size limit.
        disk_blocks_damaged: number of blocks on disk deleted so far because they were damaged.
    """

    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    kv_idle: int = 0
    resumed: int = 0
    disk_hits: int = 0
    disk_blocks_read: int = 0
    disk_bytes_read: int = 0
    disk_blocks_written: int = 0
    disk_bytes_written: int = 0
    disk_blocks_evicted: int = 0
    disk_blocks_damaged: int = 0


def split_prompts(prompts: Sequence[Prompt]) -> Generator[Sequence[Prompt]]:
    """Yield the prompts of a request in groups, each short enough for one job.

    A prompt that is longer than the limit is a group of its own.
    """
    first = 0
    size = 0
    for number, prompt in enumerate(prompts):
        size += _length(prompt)
        is_full = number - first == _PROMPTS_AT_ONCE or size > _SIZE_AT_ONCE
        if is_full and number > first:
            yield prompts[first:number]
            first = number
            size = _length(prompt)
    yield prompts[first:]


def _length(prompt: Prompt) -> int:
    """Return the number of characters or token ids of a prompt.

    The result is 0 for a value that is no prompt, which is refused later.
    """
    return len(prompt) if isinstance(prompt, Sized) else 0


def _conversation_size(messages: Messages) -> int:
    """Return the number of characters of a conversation, by which a job is small or large.

    A conversation with contents that are not texts, such as lists of parts, counts as large.
    """
    if not isinstance(messages, Sequence):
        return 0  # the value is no list of messages, and is refused later
    contents = [each.get("content") if isinstance(each, Mapping) else None for each in messages]
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) < len(contents):
        return SMALL_JOB + 1
    return sum(map(len, texts))


class AdmissionLimit:
    """Thread-safe limit of the number of samples (outputs of requests) in progress.

    If tenants share the limit, a tenant may have at most as many samples as remain free for others:
    half of ``limit`` for one tenant, and a third each for two tenants (Choudhury and Hahne 1998,
    *Dynamic queue length thresholds for shared-memory packet switches*). A tenant without samples
    gets one while one is free.

    Args:
        limit: maximum number of samples in progress.
        shared: whether tenants share the limit.
    """

    def __init__(self, limit: int, *, shared: bool = False) -> None:
        self.limit = limit
        self.num_admitted = 0
        self._shared = shared
        self._by_tenant = Counter[str]()
        self._lock = threading.Lock()

    @property
    def max_per_request(self) -> int:
        """Maximum number of samples of one request; a request with more is never admitted."""
        return max(1, self.limit // 2) if self._shared else self.limit

    @contextmanager
    def hold(self, count: int, tenant: str = "") -> Generator[Admission]:
        """Count ``count`` samples of a tenant as in progress during a ``with`` block.

        The block may attach jobs that go on after its end (:meth:`Admission.until`); then the
        samples are in progress until these jobs have ended.

        Raises:
            OptionError: ``count`` exceeds :attr:`max_per_request`.
            OverloadedError: the samples are not admitted now.
        """
        self._admit(count, tenant)
        admission = Admission(partial(self._release, count, tenant))
        try:
            yield admission
        finally:
            admission.leave()

    def _admit(self, count: int, tenant: str) -> None:
        """Count samples of a tenant as in progress, unless there would be too many.

        Raise an OverloadedError if they are too many now, and an OptionError if one request may
        never have ``count`` samples.
        """
        if count > self.max_per_request:
            most = count_text(self.max_per_request, "sample")
            msg = f"n: expected at most {most} at a time, found {count}; ask for fewer"
            raise OptionError(msg)
        with self._lock:
            own = self._by_tenant[tenant] + count
            free = self.limit - self.num_admitted - count
            if free < 0:
                most = count_text(self.limit, "request")
                msg = f"expected at most {most} at a time, found {count} more; try again later"
                raise OverloadedError(msg)
            if self._shared and own > max(1, free):
                most_now = count_text(max(1, (free + own) // 2), "request")
                expected = f"at most {most_now} of one key now"
                msg = (
                    f"expected {expected}, as others share the server, found {own}; try again later"
                )
                raise OverloadedError(msg)
            self.num_admitted += count
            self._by_tenant[tenant] += count

    def _release(self, count: int, tenant: str) -> None:
        with self._lock:
            self.num_admitted -= count
            self._by_tenant[tenant] -= count
            self._by_tenant += Counter()  # Counter's + drops the tenants whose count is 0


class Admission:
    """Samples of one request that :class:`AdmissionLimit` has admitted.

    They count as in progress until the request has ended and all its jobs have ended, because a job
    in a thread goes on after its request is cancelled or passes its deadline.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._num_users = 1  # number of users: the request, and its jobs that have not ended
        self._lock = threading.Lock()

    def until(self, job: Future[T]) -> Future[T]:
        """Count the samples as in progress until ``job`` has ended, too; return ``job``."""
        with self._lock:
            self._num_users += 1
        job.add_done_callback(lambda _: self.leave())
        return job

    def leave(self) -> None:
        """Record that the request or one of its jobs has ended.

        After the last one, the samples no longer count as in progress.
        """
        with self._lock:
            self._num_users -= 1
            is_last = not self._num_users
        if is_last:
            self._release()


_LLM_OPTIONS = tuple(inspect.signature(LLM).parameters)

# Options of a call that apply to all its requests: priority, deadline (a time of
# ``perf_counter``), salt of the prefix cache, and tenant.
_Schedule = tuple[int, float | None, bytes, str]


def _schedule(
    *, priority: int = 0, deadline: float | None = None, salt: bytes = b"", tenant: str = ""
) -> _Schedule:
    """Return the scheduling options of a call; raise an OptionError for invalid values.

    ``deadline`` is in seconds from now; in the result, it is a time of ``perf_counter``.
    """
    check_integer("priority", priority, -(2**31), 2**31)
    if deadline is not None:
        check_number("deadline", deadline, 0.0, 1e9)
    if not isinstance(salt, bytes):
        msg = f"salt: expected bytes, found {salt!r}; encode the text"
        raise OptionError(msg)
    ends_at = None if deadline is None else perf_counter() + deadline
    return priority, ends_at, salt, tenant


def _scheduled(method: Method) -> Method:
    """Replace ``**schedule`` in the signature of a method by the keywords of :func:`_schedule`.

    ``help()`` and the documentation then list them.
    """
    *parameters, _ = inspect.signature(method).parameters.values()
    keywords = inspect.signature(_schedule).parameters.values()
    method.__signature__ = inspect.Signature([*parameters, *keywords])  # type: ignore[attr-defined]
    return method


@asynccontextmanager
async def time_limit(deadline: float | None) -> AsyncGenerator[None]:
    """Cancel the ``async with`` block after ``deadline`` seconds and raise a DeadlineError.

    ``None`` sets no limit.
    """
    try:
        async with asyncio.timeout(deadline) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        msg = f"the request was not done by its deadline, after {deadline:.1f} s"
        raise DeadlineError(msg) from error


@known_keywords
class AsyncLLM:
    """Asynchronous interface of an :class:`~pronk.llm.LLM`, whose engine runs in a separate thread.

    Attributes:
        llm: the model.
        executor: threads for work that grows with the size of a request, such as tokenization.
    """

    def __init__(
        self,
        llm: LLM | str | Path | None = None,
        *,
        max_requests: int = 1024,
        shared: bool = False,
        executor: FairExecutor | None = None,
        **options: Any,
    ) -> None:
        """Load the model if it is not loaded, and start the engine thread.

        Loading blocks the event loop: call the constructor before the loop starts, or in a thread
        (``asyncio.to_thread``).

        Args:
            llm: a loaded model; or the model to load, as for :class:`~pronk.llm.LLM`: folder, GGUF
                file, name or ``None``. :meth:`close` closes only a model that the constructor has
                loaded.
            max_requests: maximum number of samples in progress, queued ones included.
            shared: whether tenants share this number: a tenant may then have at most as many
                samples as are free.
            executor: threads for work that grows with the size of a request; by default, two
                threads that end with :meth:`stop`.
            options: keyword arguments of :class:`~pronk.llm.LLM`, ``model`` included, for a model
                that the constructor loads.

        Raises:
            OptionError: a loaded model is given with options.
            PronkError: see :class:`~pronk.llm.LLM`.
        """
        check_integer("max_requests", max_requests, 1)
        if isinstance(llm, LLM) and options:
            msg = (
                f"{next(iter(options))}: expected no options of LLM with a loaded model, found "
                "one; give it to LLM"
            )
            raise OptionError(msg)
        check_keywords(options, "AsyncLLM", ["max_requests", *_LLM_OPTIONS])
        if llm is not None and "model" in options:
            msg = (
                f"model: expected one model, found {llm!r} and {options['model']!r}; leave one out"
            )
            raise OptionError(msg)
        self._owns_model = not isinstance(llm, LLM)
        if not isinstance(llm, LLM):
            llm = LLM(**options) if llm is None else LLM(llm, **options)
        self.llm = llm
        self._admission = AdmissionLimit(max_requests, shared=shared)
        self._owns_executor = executor is None
        self.executor = executor or FairExecutor(REQUEST_THREADS, "pronk-requests", shared=shared)
        self._thread = EngineThread(llm.engine)
        # The engine thread keeps the model in memory. Stop it when an AsyncLLM is dropped without
        # close().
        weakref.finalize(self, self._thread.stop)

    @property
    def alive(self) -> bool:
        """Whether the engine thread accepts requests."""
        return self._thread.thread.is_alive() and self.llm.engine.runner.is_usable

    async def is_ready(self) -> bool:
        """Return whether the engine thread accepts requests, as :attr:`alive` does.

        A group of replicas has a coroutine of the same name, because it has to ask each replica.
        """
        return self.alive

    @property
    def num_requests(self) -> int:
        """Number of samples in progress, samples whose prompt is being tokenized included."""
        return self._admission.num_admitted

    @property
    def load(self) -> EngineLoad:
        """Current load of the engine."""
        engine = self.llm.engine
        scheduler = engine.scheduler
        blocks = engine.cache.allocator
        load = EngineLoad(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_used=1.0 - blocks.num_free / max(1, blocks.num_blocks),
            kv_idle=len(blocks.evictable),
        )
        prompts = engine.cache.prompt_cache
        if prompts is None:
            return load
        counts = {f"disk_{name}": count for name, count in asdict(prompts.store.counts).items()}
        return load._replace(disk_hits=prompts.num_hits, **counts)

    @_scheduled
    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        drafter: str | Drafter | None = None,
        adapter: str | None = None,
        **schedule: Unpack[ScheduleOptions],
    ) -> AsyncGenerator[Piece]:
        """Continue one prompt and yield each token.

        Closing the iterator or cancellation aborts the request.

        Args:
            prompt: text or token ids.
            params: sampling parameters.
            drafter: drafter of this request; by default, that of the model.
            adapter: name of the adapter that computes this request; by default, the model without
                an adapter.
            priority: scheduling priority; higher values are scheduled first.
            deadline: time limit in seconds, queueing included; by default, none.
            salt: part of the prefix cache's key; only requests with equal salts share cached
                blocks.
            tenant: client name for fair scheduling: a tenant waits at most ``max_wait`` of the LLM,
                however many requests other tenants have, until one of its requests is in a forward
                pass.

        Raises:
            OptionError: an option is out of range.
            OverloadedError: more than ``max_requests`` samples would be in progress.
            ClosedError: the model is closing or closed.
            DeadlineError: the deadline has passed.
            PronkError: see :meth:`~pronk.llm.LLM.generate`.
        """
        steps = self.steps([prompt], params, drafter=drafter, adapter=adapter, **schedule)
        async with aclosing(steps):
            async for pieces in steps:
                for piece in pieces:
                    yield piece

    @_scheduled
    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        drafter: str | Drafter | None = None,
        adapter: str | None = None,
        **schedule: Unpack[ScheduleOptions],
    ) -> Completion:
        """Continue one prompt; arguments and errors are those of :meth:`stream`."""
        return await _collect(
            self.stream(prompt, params, drafter=drafter, adapter=adapter, **schedule)
        )

    @_scheduled
    async def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        drafter: str | Drafter | None = None,
        adapter: str | None = None,
        template_options: TemplateOptions | None = None,
        **schedule: Unpack[ScheduleOptions],
    ) -> AsyncGenerator[Piece]:
        """Answer a conversation and yield each token.

        Arguments and errors are those of :meth:`~pronk.llm.LLM.chat` and :meth:`stream`.
        """
        _schedule(**schedule)  # raises errors of these options before the conversation is rendered
        render = partial(self.llm.request_factory.encode_chat, messages, options=template_options)
        prompt = await self._encode(render, _conversation_size(messages), schedule)
        params = recommended_params(self.llm.config) if params is None else params
        steps = self.steps(
            [prompt.token_ids],
            params,
            drafter=drafter,
            adapter=adapter,
            branch_positions=[prompt.branch_positions],
            **schedule,
        )
        async with aclosing(steps):
            async for pieces in steps:
                for piece in pieces:
                    yield piece

    @_scheduled
    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        drafter: str | Drafter | None = None,
        adapter: str | None = None,
        template_options: TemplateOptions | None = None,
        **schedule: Unpack[ScheduleOptions],
    ) -> Completion:
        """Answer a conversation; arguments and errors are those of :meth:`stream_chat`."""
        pieces = self.stream_chat(
            messages,
            params,
            drafter=drafter,
            adapter=adapter,
            template_options=template_options,
            **schedule,
        )
        return await _collect(pieces)

    @_scheduled
    async def stream_infill(
        self,
        prefix: str,
        suffix: str,
        params: SamplingParams | None = None,
        *,
        context: Sequence[ContextFile] = (),
        drafter: str | Drafter | None = None,
        adapter: str | None = None,
        **schedule: Unpack[ScheduleOptions],
    ) -> AsyncGenerator[Piece]:
        """Write the text between a prefix and a suffix and yield each token.

        Arguments and errors are those of :meth:`~pronk.llm.LLM.infill` and :meth:`stream`.
        """
        _schedule(**schedule)  # raises errors of these options before the texts are tokenized
        factory = self.llm.request_factory
        encode = partial(factory.encode_infill, prefix, suffix, context)
        size = len(prefix) + len(suffix) + sum(len(file.text) for file in context)
        prompt = await self._encode(encode, size, schedule)
        ended = factory.end_infill(SamplingParams() if params is None else params)
        pieces = self.stream(prompt, ended, drafter=drafter, adapter=adapter, **schedule)
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece

    @_scheduled
    async def infill(
        self,
        prefix: str,
        suffix: str,
        params: SamplingParams | None = None,
        *,
        context: Sequence[ContextFile] = (),
        drafter: str | Drafter | None = None,
        adapter: str | None = None,
        **schedule: Unpack[ScheduleOptions],
    ) -> Completion:
        """Write the text between two others; arguments and errors: :meth:`stream_infill`."""
        pieces = self.stream_infill(
            prefix, suffix, params, context=context, drafter=drafter, adapter=adapter, **schedule
        )
        return await _collect(pieces)

    async def _encode(self, encode: Callable[[], T], size: int, schedule: ScheduleOptions) -> T:
        """Return the tokens that ``encode`` makes of a text of ``size`` characters, off the loop.

        The deadline in ``schedule`` becomes what is left of it.
        """
        deadline = schedule.get("deadline")
        start = perf_counter()
        async with time_limit(deadline):
            job = self.executor.submit(schedule.get("tenant", ""), encode, size=size)
            encoded = await asyncio.wrap_future(job)
        if deadline is not None:
            schedule["deadline"] = max(0.0, deadline - (perf_counter() - start))
        return encoded

    async def choose(
        self, prompt: Prompt, options: Sequence[str], *, adapter: str | None = None
    ) -> Choice:
        """Return the log-probabilities of given continuations of a prompt.

        Arguments and errors are those of :meth:`~pronk.llm.LLM.choose`.
        """
        return await asyncio.to_thread(self.llm.choose, prompt, options, adapter=adapter)

    @_scheduled
    async def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        adapter: str | None = None,
        **schedule: Unpack[ScheduleOptions],
    ) -> list[float]:
        """Return the relevance of documents to a query, from 0 to 1, one number per document.

        Arguments and errors are those of :meth:`~pronk.llm.LLM.score` and :meth:`stream`. The
        documents run in the passes of the other requests.
        """
        _schedule(**schedule)  # raises errors of these options before the texts are tokenized
        factory = self.llm.request_factory
        question = factory.relevance
        prompts = list[list[int]]()
        for document in documents:
            encode = partial(factory.encode_relevance, query, document, instruction)
            prompts.append(await self._encode(encode, len(query) + len(document), schedule))
        reports = dict[int, Mapping[int, float]]()
        steps = self.steps(prompts, question.params, adapter=adapter, **schedule)
        async with aclosing(steps):
            async for pieces in steps:
                reports.update((piece.index, piece.logprobs or {}) for piece in pieces)
        return [question.score(reports[index]) for index in range(len(prompts))]

    @_scheduled
    async def steps(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        drafter: str | Drafter | None = None,
        adapter: str | None = None,
        given: Mapping[int, Sequence[Piece]] | None = None,
        calls: AnswerCalls | None = None,
        branch_positions: Sequence[Sequence[int]] = (),
        **schedule: Unpack[ScheduleOptions],
    ) -> AsyncGenerator[list[Piece]]:
        """Continue several prompts; yield a list per step with the new tokens of all samples.

        Sample ``s`` of prompt ``p`` has the index ``p * n + s``. An error of one prompt ends all
        prompts. The other arguments and the errors are those of :meth:`stream`; an OptionError is
        also raised if ``prompt_logprobs`` are requested together with ``given``.

        ``given`` are the pieces that another replica had delivered before it stopped, by the
        index of the sample. Decoding resumes after these pieces, with the same result for the same
        seed. Complete samples are skipped.

        ``calls`` describes the tool calls that the texts may contain; ``None`` means none. A text
        ends with the first call that repeats an earlier one.

        ``branch_positions`` has those of each prompt (:mod:`pronk.text.chat.branches`); empty if no
        prompt is a conversation.
        """
        (params,) = params_per_prompt(params, 1)
        scheduling = _schedule(**schedule)
        deadline = schedule.get("deadline")
        tenant = schedule.get("tenant", "")
        if given and params.prompt_logprobs is not None:
            msg = (
                "prompt_logprobs: expected None in a resumed request, found a number; "
                "omit the option"
            )
            raise OptionError(msg)
        with self._admission.hold(len(prompts) * params.n, tenant) as admission:
            create = partial(
                self._create_requests,
                prompts,
                params,
                drafter,
                adapter,
                given or {},
                calls=calls,
                branch_positions=branch_positions,
            )
            size = sum(map(_length, prompts))
            async with time_limit(deadline):
                if params.guide is not None:
                    compiling = self.llm.request_factory.grammars.submit(params.guide, tenant)
                    await asyncio.wrap_future(admission.until(compiling))
                job = self.executor.submit(tenant, create, size=size)
                requests = await asyncio.wrap_future(admission.until(job))
            async with aclosing(self._run(requests, scheduling)) as steps:
                async for pieces in steps:
                    yield pieces

    @_scheduled
    async def embed(
        self,
        texts: Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        adapter: str | None = None,
        **schedule: Unpack[ScheduleOptions],
    ) -> Array:
        """Return the embeddings of texts, ``[texts, dimensions]`` float32.

        The arguments are those of :meth:`~pronk.llm.LLM.embed` and :meth:`stream`. Each text counts
        as one sample towards ``max_requests``. At most ``MAX_EMBEDDED`` texts of a call run at a
        time, and the other texts wait.
        """
        defaults = self.llm.config.embedding
        options = EmbeddingOptions.for_model(defaults, pooling, dimensions, normalize)
        scheduling = _schedule(**schedule)
        deadline = schedule.get("deadline")
        tenant = schedule.get("tenant", "")
        size = min(len(texts), MAX_EMBEDDED, self._admission.max_per_request)
        with self._admission.hold(size, tenant) as admission:
            requests = list[Request]()
            async with time_limit(deadline):
                for group in split_prompts(texts):
                    create = partial(self._create_embeddings, group, options, adapter)
                    job = self.executor.submit(tenant, create, size=sum(map(_length, texts)))
                    created = await asyncio.wrap_future(admission.until(job))
                    requests += created
            for first in range(0, len(requests), max(1, size)):
                running = requests[first : first + size]
                async for _ in self._run(dict(enumerate(running)), scheduling):
                    pass  # embeddings have no tokens
            poolers = [request.pooler for request in requests]
            width = self.llm.config.hidden_size
            pool = partial(options.embeddings, poolers, width)
            return await self.executor.run(tenant, pool, size=len(poolers) * width)

    def stop(self) -> None:
        """Refuse new requests, and fail the running and queued requests after the current step."""
        if self._owns_executor:
            self.executor.shutdown()
        self._thread.stop()

    async def close(self) -> None:
        """Stop the engine as :meth:`stop` does, and wait for the end of its thread.

        A model that the constructor has loaded is closed as well.
        """
        self.stop()
        await asyncio.to_thread(self._thread.thread.join)
        if self._owns_model:
            await asyncio.to_thread(self.llm.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(
        self, requests: Mapping[int, Request], schedule: _Schedule
    ) -> AsyncGenerator[list[Piece]]:
        """Run requests on the engine thread; after each step, yield the new tokens of all requests.

        The keys of ``requests`` are the indices of the samples.
        """
        for request in requests.values():
            request.priority, request.deadline, request.salt, request.tenant = schedule
        call = PendingRequests(requests, asyncio.get_running_loop())
        try:
            self._thread.add(call)
            while requests:
                item = await call.queue.get()
                if item is None:
                    break
                if isinstance(item, BaseException):
                    raise item
                yield item
                call.num_read += len(item)
                if call.is_paused and call.num_unread <= call.max_unread // 2:
                    self._thread.resume(call)
        finally:
            self._thread.leave(call)

    def _create_embeddings(
        self, texts: Sequence[Prompt], options: EmbeddingOptions, adapter: str | None
    ) -> list[Request]:
        """Return the requests that compute the embeddings of texts, one per text."""
        llm = self.llm
        create = llm.request_factory.create_embeddings
        return create(texts, options, llm.engine.runner, llm.adapters.find(adapter))

    def _create_requests(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        drafter: str | Drafter | None,
        adapter: str | None,
        given: Mapping[int, Sequence[Piece]],
        *,
        calls: AnswerCalls | None,
        branch_positions: Sequence[Sequence[int]],
    ) -> dict[int, Request]:
        """Return a request for each sample of the prompts, by the sample's index.

        Samples that ``given`` already completes get no request.
        """
        options = params_per_prompt(params, len(prompts))
        found = self.llm.adapters.find(adapter)
        proposer = self.llm.get_proposer(drafter, adapter)
        create = self.llm.request_factory.create_batch
        groups = create(prompts, options, proposer, found, branch_positions)
        requests = dict(enumerate(chain.from_iterable(groups)))
        if calls is not None:
            self.llm.request_factory.watch_calls(requests.values(), calls)
        for index, pieces in given.items():
            if pieces and pieces[-1].completion is not None:
                del requests[index]
            else:
                requests[index].resume(
                    (piece.token_id, piece.source, piece.logprobs) for piece in pieces
                )
        return requests


async def _collect(pieces: AsyncGenerator[Piece]) -> Completion:
    """Return the completion of the first sample; ``others`` of it has those of further samples."""
    completions = dict[int, Completion]()
    async with aclosing(pieces):
        async for piece in pieces:
            if piece.completion is not None:
                completions[piece.index] = piece.completion
    first, *others = [completions[index] for index in sorted(completions)]
    return replace(first, others=tuple(others))
