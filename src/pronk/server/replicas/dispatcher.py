"""The dispatcher sends requests to replicas; if a replica dies, another resumes its requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from pronk import ClosedError, DeadlineError, Drafter, OptionError, Piece, SamplingParams
from pronk.base import FairExecutor, ResumeError
from pronk.base.arrays import Array
from pronk.checkpoint import add_known_sampling, read_config
from pronk.drafting import make_drafter, random_seed
from pronk.server.replicas.messages import (
    GenerateRequest,
    ReplicaInfo,
    ReplicaMessage,
    RequestAccepted,
    StepReply,
    check_model,
)
from pronk.server.replicas.prefix_routes import prefix_digests
from pronk.server.replicas.stream_resume import ReplicaMismatchError, ResumableStream
from pronk.serving import (
    REQUEST_THREADS,
    AdmissionLimit,
    EngineLoad,
    Prompt,
    RequestFactory,
    params_per_prompt,
    time_limit,
)
from pronk.text import AnswerCalls, Tokenizer

if TYPE_CHECKING:  # the dispatcher itself works without Ray
    from pronk.server.replicas.cluster import RayReplicas

# Limits of the fields of :class:`_FailureCounts`; a request fails when a field reaches its limit.
_MAX_BLAME = 3.0
_MAX_DEATHS = 50
_MAX_REPLAY_DEATHS = 8
_MAX_MISMATCHES = 3
# Seconds before retry number n = 1, 2, …: min(_MAX_PAUSE, n * _PAUSE).
_PAUSE = 0.1
_MAX_PAUSE = 2.0
# Seconds in which a replica must answer, so that the dispatcher is ready.
_READY_TIMEOUT = 2.0
# Seconds after an answer of a replica in which is_ready() does not ask a replica again.
_READY_SECONDS = 1.0
# Seconds after the deadline in which the replica itself may still report the DeadlineError.
_GRACE = 1.0


class ReplicaLostError(Exception):
    """Error that a replica has died or is unreachable."""


@dataclass(frozen=True)
class NamedProposer:
    """The replicas' default proposer, of which the server only knows the name."""

    name: str


class ModelReader:
    """Config, tokenizer and default drafter of a model; only the replicas load its weights."""

    def __init__(
        self,
        path: Path,
        drafter: str | Drafter,
        about: ReplicaInfo,
        *,
        context: int | None = None,
        adapters: Collection[str] = (),
        share_prefixes: bool = False,
    ) -> None:
        """Read the files of a model, without the weights.

        Args:
            path: path of the model.
            drafter: the replicas' default drafter.
            about: description of a replica, with which the files are compared.
            context: option of :class:`~pronk.llm.LLM`.
            adapters: names of the replicas' adapters.
            share_prefixes: whether the replicas have a prefix cache.

        Raises:
            CheckpointError: the folder cannot be read.
            OptionError: the replica has another model.
        """
        self.path = path
        self.about = about
        config = add_known_sampling(read_config(path, context=context))
        self.tokenizer = Tokenizer.load(path, config.vocab_size)
        self.config = self.tokenizer.add_end_tokens(config)
        check_model(path, self.config, self.tokenizer, about.model)
        self.request_factory = RequestFactory(
            self.config, self.tokenizer, None, share_prefixes=share_prefixes
        )
        self.drafter = make_drafter(drafter)
        self.kernels = about.kernels
        self.adapters = adapters

    def get_proposer(self, spec: str | Drafter | None = None) -> NamedProposer | Drafter:
        """Return the drafter with a name or spec; ``None`` is the replicas' default.

        Raises:
            OptionError: there is no such drafter.
        """
        return NamedProposer(self.about.drafter) if spec is None else make_drafter(spec)


class Dispatcher:
    """Distributes requests over replicas, with the interface of :class:`~pronk.async_llm.AsyncLLM`.

    Replicas with equal model and bits generate the same text for the same seed. If a replica
    dies, another one therefore continues its requests after the delivered tokens. If all other
    replicas have another model or other bits, the request fails.
    """

    def __init__(
        self,
        llm: ModelReader,
        replicas: RayReplicas,
        *,
        max_requests: int = 1024,
        shared: bool = False,
    ) -> None:
        """Create a dispatcher; the options are those of :class:`~pronk.async_llm.AsyncLLM`."""
        self.llm = llm
        self.resumed = 0  # number of times that a request was sent to another replica
        self._replicas = replicas
        self._admission = AdmissionLimit(max_requests, shared=shared)
        self.executor = FairExecutor(REQUEST_THREADS, "pronk-requests", shared=shared)
        self._closed = False
        # Last reported load of each replica, by the replica's name.
        self._loads: dict[str, EngineLoad] = {}
        # Number of requests on each replica, by name.
        self._active = Counter[str]()
        # Number of requests on each dead replica at its death, by name.
        self._active_at_death: dict[str, int] = {}
        # Time (``perf_counter``) until which is_ready() returns True without asking a replica.
        self._ready_until = 0.0

    @property
    def alive(self) -> bool:
        """Whether the dispatcher accepts requests."""
        return not self._closed

    async def is_ready(self) -> bool:
        """Return whether a replica answers within ``_READY_TIMEOUT`` seconds.

        An answer counts for ``_READY_SECONDS``, in which further calls do not ask again.
        """
        try:
            async with asyncio.timeout(_READY_TIMEOUT):
                while not self._closed and perf_counter() > self._ready_until:
                    try:
                        await self._replicas.about_async()
                    except ReplicaLostError:
                        # After a failure; meanwhile, another replica may become ready.
                        await asyncio.sleep(_PAUSE)
                    else:
                        self._ready_until = perf_counter() + _READY_SECONDS
        except TimeoutError:
            return False
        return not self._closed

    @property
    def num_requests(self) -> int:
        """Number of samples in progress, including those being tokenized."""
        return self._admission.num_admitted

    @property
    def load(self) -> EngineLoad:
        """Sum of the last reported loads of the replicas with requests; the mean of ``kv_used``."""
        loads = [*self._loads.values()]
        if not self.num_requests or not loads:
            return EngineLoad(resumed=self.resumed)
        fields = zip(*loads, strict=True)
        total = EngineLoad(*map(sum, fields))
        return total._replace(kv_used=total.kv_used / len(loads), resumed=self.resumed)

    async def steps(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        drafter: str | Drafter | None = None,
        adapter: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        salt: bytes = b"",
        tenant: str = "",
        calls: AnswerCalls | None = None,
        branch_positions: Sequence[Sequence[int]] = (),
    ) -> AsyncGenerator[list[Piece]]:
        """Continue several prompts and yield the pieces of each step, like ``AsyncLLM.steps``.

        Raises:
            ClosedError: the dispatcher is closing, or several replicas died in a row.
            DeadlineError: the deadline has passed.
            ResumeError: no other replica can continue the text of a replica that died.
            PronkError: see :meth:`pronk.async_llm.AsyncLLM.steps`.
        """
        (params,) = params_per_prompt(params, 1)
        if params.seed is None:
            params = replace(params, seed=random_seed())
        ends_at = None if deadline is None else perf_counter() + deadline
        self._check_open()
        with self._admission.hold(len(prompts) * params.n, tenant) as admission:
            bound = None if drafter is None else make_drafter(drafter)
            encode = partial(self._encode, prompts, salt + (adapter or "").encode())
            job = self.executor.submit(tenant, encode, size=sum(map(len, prompts)))
            async with time_limit(deadline):
                ids, prefix = await asyncio.wrap_future(admission.until(job))
            request = GenerateRequest(
                prompts=ids,
                params=params,
                prefix=prefix,
                model=self.llm.about.model,
                drafter=bound,
                priority=priority,
                salt=salt,
                tenant=tenant,
                adapter=adapter,
                calls=calls,
                branch_positions=branch_positions,
            )
            async with aclosing(self._run_with_retries(request, ends_at)) as steps:
                async for pieces in steps:
                    yield pieces

    def _encode(
        self, prompts: Sequence[Prompt], salt: bytes
    ) -> tuple[list[list[int]], tuple[bytes, ...]]:
        """Return the token ids of each prompt, and the digests of the first prompt's prefixes."""
        ids = self.llm.request_factory.encode_prompts(prompts)
        return ids, prefix_digests(ids[0], salt)

    async def _run_with_retries(
        self, request: GenerateRequest, ends_at: float | None
    ) -> AsyncGenerator[list[Piece]]:
        """Run a request on one replica after another, until all its samples are complete."""
        stream = ResumableStream(request)
        failures = _FailureCounts()
        while True:
            try:
                resumed = stream.next_request(_seconds_left(ends_at), failures.count)
                attempt = self._run_on_replica(resumed, stream, ends_at)
                async with aclosing(attempt) as steps:
                    async for pieces in steps:
                        if pieces:
                            failures = _FailureCounts()
                            yield pieces
                if stream.finished:
                    return
                # The replica has ended the stream before all samples were complete.
                stream.avoid_replica()
                failures.add_death(0.0, replaying=stream.replaying)
            except ReplicaMismatchError as error:
                stream.avoid_replica()
                failures.add_mismatch(error)
            except ReplicaLostError:
                blame = self._release_dead(stream.replica)
                self._check_open()
                if stream.finished:
                    return
                failures.add_death(0.0 if stream.replaying else blame, replaying=stream.replaying)
            self.resumed += 1
            await asyncio.sleep(min(_MAX_PAUSE, _PAUSE * failures.count))

    async def _run_on_replica(
        self, request: GenerateRequest, stream: ResumableStream, ends_at: float | None
    ) -> AsyncGenerator[list[Piece]]:
        """Run a request on one replica; yield a list of the new pieces of each step, maybe empty.

        Raises:
            ReplicaLostError: the replica has died; the caller must call :meth:`_release_dead`.
        """
        async with aclosing(self._replicas.generate(request)) as messages:
            try:
                while (message := await _next_message(messages, ends_at)) is not None:
                    self._check_open()
                    if isinstance(message, RequestAccepted):
                        self._active[message.replica] += 1
                    pieces = stream.receive(message)
                    if isinstance(message, StepReply):
                        self._loads[stream.replica] = message.load
                        yield pieces
            except ReplicaLostError:
                raise
            except BaseException:
                self._release(stream.replica)
                raise
            self._release(stream.replica)

    def _release(self, replica: str) -> None:
        """Subtract one from a replica's number of requests; forget a replica that has none left."""
        self._active[replica] -= 1
        if self._active[replica] <= 0:
            for state in (self._active, self._active_at_death, self._loads):
                state.pop(replica, None)

    def _release_dead(self, replica: str) -> float:
        """Subtract a request from the count of a dead replica; return the request's blame.

        Any request on the replica may be the cause of its death, so that the blame of each is 1
        divided by their number.
        """
        self._loads.pop(replica, None)
        active = self._active_at_death.setdefault(replica, self._active[replica])
        self._release(replica)
        return 1.0 / max(1, active)

    async def embed(self, texts: Sequence[Prompt], **_: object) -> Array:  # noqa: ARG002
        """Raise ``OptionError``, because replicas compute no embeddings."""
        msg = (
            "input: expected a server that computes embeddings, found replicas; start pronk serve "
            "without --replicas"
        )
        raise OptionError(msg)

    def stop(self) -> None:
        """Fail all requests at their next step and refuse new ones."""
        self._closed = True
        self.executor.shutdown()

    async def close(self) -> None:
        """Call :meth:`stop`, without waiting for requests; a coroutine as ``AsyncLLM.close`` is."""
        self.stop()

    def _check_open(self) -> None:
        if self._closed:
            msg = (
                "expected a running server, found one that is stopping; "
                "send the request to another one"
            )
            raise ClosedError(msg)


@dataclass
class _FailureCounts:
    """Counts of the failures of one request since its last new token."""

    # Number of failed attempts: the replica died, ended the stream too early, or did not match.
    count: int = 0
    # Number of replicas that died while repeating tokens that the client already has.
    replay_deaths: int = 0
    # Number of replicas with another model or other bits, which cannot continue the text.
    mismatches: int = 0
    # Sum of 1 / (number of requests on the replica at its death) over the dead replicas, because
    # any of these requests may be the cause.
    blame: float = 0.0

    def add_death(self, blame: float, *, replaying: bool) -> None:
        """Count the death of a replica during this request; at a limit, raise ``ClosedError``.

        Args:
            blame: probability that this request is the cause: 1 / (requests on the replica).
            replaying: whether the replica was repeating tokens that the client already has.
        """
        self.count += 1
        self.replay_deaths += replaying
        self.blame += blame
        too_many = self.count >= _MAX_DEATHS or self.replay_deaths >= _MAX_REPLAY_DEATHS
        if too_many or self.blame >= _MAX_BLAME:
            msg = (
                f"expected a running replica, found {self.count} that ended in a row; see the logs "
                "of the replicas"
            )
            raise ClosedError(msg)

    def add_mismatch(self, error: ReplicaMismatchError) -> None:
        """Count a replica that cannot continue the text; at the limit, raise ``ResumeError``."""
        self.count += 1
        self.mismatches += 1
        if self.mismatches >= _MAX_MISMATCHES:
            msg = (
                f"expected a replica of the same model and bits to resume on, found {error}; "
                "try again"
            )
            raise ResumeError(msg) from error


async def _next_message(
    messages: AsyncGenerator[ReplicaMessage], ends_at: float | None
) -> ReplicaMessage | None:
    """Return the next message of a replica; ``None`` at the end of the stream.

    Raises:
        DeadlineError: the deadline has passed, and the replica has not reported this error itself.
    """
    wait = None if ends_at is None else max(0.0, ends_at - perf_counter()) + _GRACE
    try:
        async with asyncio.timeout(wait) as limit:
            return await anext(messages, None)
    except TimeoutError as error:
        if not limit.expired():
            raise
        msg = (
            "the request was not done by its deadline, and its replica does not respond; "
            "try again later"
        )
        raise DeadlineError(msg) from error


def _seconds_left(ends_at: float | None) -> float | None:
    """Return the seconds to the deadline; raise ``DeadlineError`` if it has passed."""
    seconds = None if ends_at is None else ends_at - perf_counter()
    if seconds is not None and seconds <= 0.0:
        msg = "the request was not done by its deadline; try again later"
        raise DeadlineError(msg)
    return seconds
