"""What stands before the replicas: it reads prompts, hands them on, and keeps a text going when a replica dies."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Protocol

from pronk.admission import AdmissionQueue
from pronk.async_llm import EngineLoad
from pronk.drafters import Drafter, make_drafter
from pronk.engine.request_factory import RequestFactory
from pronk.errors import ClosedError, DeadlineError, ResumeError
from pronk.llm import Prompt
from pronk.models.loader import read_config
from pronk.outputs import Piece
from pronk.replicas.identity import check_model
from pronk.replicas.messages import GenerateRequest, ReplicaInfo, RequestAccepted, Said, StepReply
from pronk.replicas.prefix_routes import prefix_digests
from pronk.replicas.stream_resume import ReplicaMismatchError, ResumableStream
from pronk.sampling.noise import fresh_seed
from pronk.sampling.params import SamplingParams
from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["Dispatcher", "ModelReader", "ReplicaLostError", "Replicas"]

# So many replicas may die under a request that is to blame for them, without a token in between. Where others died
# with it, each of them is as much to blame; and however many they were, so many deaths are enough, of which fewer may
# come while what was given out before is said again.
_BLAME = 3.0
_MOST_DEATHS, _MOST_AGAIN = 50, 8
# So many replicas of another model may be met before a text is given up that one of them had to go on with.
_OTHERS = 3
_PAUSE, _LONGEST = 0.1, 2.0  # seconds, more each time
_GRACE = 1.0  # seconds after a deadline in which a replica says so itself


class ReplicaLostError(Exception):
    """The replica is gone, or cannot be reached."""


class Replicas(Protocol):
    """Where replicas are; :class:`~pronk.replicas.cluster.Deployed` is it on Ray."""

    def ask(self, ask: GenerateRequest) -> AsyncGenerator[Said]:
        """Let one of them continue prompts.

        Raises:
            ReplicaLostError: it is gone.
        """
        ...


@dataclass(frozen=True)
class NamedProposer:
    """Who guesses, where one knows its name alone."""

    name: str


class ModelReader:
    """What is known of a model without its weights.

    Attributes:
        path: its folder.
        config: its shape.
        tokenizer: its own.
        request_factory: reads prompts.
        drafter: who guesses, if a request does not say.
        about: what a replica says of itself.
        kernels: what computes.
    """

    def __init__(self, path: Path, drafter: str | Drafter, about: ReplicaInfo) -> None:
        """What is in a folder, of which ``about`` is said by a replica.

        Raises:
            CheckpointError: the folder cannot be read.
            OptionError: the replica has another model.
        """
        self.path, self.about = path, about
        self.config = read_config(path)
        self.tokenizer = Tokenizer.load(path, self.config.vocab_size)
        check_model(path, self.config, self.tokenizer, about.model)
        self.request_factory = RequestFactory(self.config, self.tokenizer, None)
        self.drafter = make_drafter(drafter)
        self.kernels = about.kernels

    def get_proposer(self, spec: str | Drafter | None = None) -> NamedProposer | Drafter:
        """Who guesses: it meets the model where that is.

        Raises:
            OptionError: an unknown drafter, or an option out of its range.
        """
        return NamedProposer(self.about.drafter) if spec is None else make_drafter(spec)


class Dispatcher:
    """A model that is elsewhere, for the server: as :class:`~pronk.async_llm.AsyncLLM`.

    The same seed gives the same text on every replica. So where one dies, another goes on behind the tokens that have
    been given out, and whoever reads them sees one stream. Where the other one is of another model, or computes with
    other kernels, the stream ends with an error.

    Attributes:
        llm: what is known of the model.
        resumed: times that a request was asked again elsewhere, so far.
    """

    def __init__(self, llm: ModelReader, replicas: Replicas, *, max_requests: int = 1024) -> None:
        """``max_requests`` samples are served at a time, waiting ones included."""
        self.llm, self.resumed = llm, 0
        self._replicas, self._room = replicas, AdmissionQueue(max_requests)
        self._closed = False
        self._loads: dict[str, EngineLoad] = {}
        self._held = Counter[str]()  # requests that each replica has
        self._fallen: dict[str, int] = {}  # and had, when it died

    @property
    def alive(self) -> bool:
        """Whether requests are still served."""
        return not self._closed

    @property
    def num_requests(self) -> int:
        """Samples that are here."""
        return self._room.taken

    @property
    def load(self) -> EngineLoad:
        """What the replicas that have spoken last were busy with."""
        loads = [*self._loads.values()]
        if not self.num_requests or not loads:
            return EngineLoad(resumed=self.resumed)
        running, waiting = (sum(each) for each in zip(*((load.running, load.waiting) for load in loads), strict=True))
        used, idle = sum(load.kv_used for load in loads) / len(loads), sum(load.kv_idle for load in loads)
        return EngineLoad(running, waiting, used, idle, self.resumed)

    async def steps(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        drafter: str | Drafter | None = None,
        priority: int = 0,
        deadline: float | None = None,
        salt: bytes = b"",
        tenant: str = "",
    ) -> AsyncGenerator[list[Piece]]:
        """Continue prompts side by side, wherever there is room; see :meth:`pronk.async_llm.AsyncLLM.steps`.

        Raises:
            ClosedError: it is being closed, or replicas die one after the other.
            DeadlineError: it was not done in time, or its replica says nothing.
            ResumeError: nobody goes on with a text whose replica died.
            PronkError: as there.
        """
        params = params or SamplingParams()
        if params.seed is None:
            params = replace(params, seed=fresh_seed())
        ends_at = None if deadline is None else perf_counter() + deadline
        self._check_open()
        with self._room.hold(len(prompts) * params.n):
            own = None if drafter is None else make_drafter(drafter)
            ids = await asyncio.to_thread(lambda: [self.llm.request_factory.ids(prompt) for prompt in prompts])
            prefix = await asyncio.to_thread(prefix_digests, ids[0], salt)
            about = self.llm.about
            ask = GenerateRequest(ids, params, prefix, about.model, None, {}, own, priority, None, salt, tenant)
            async with aclosing(self._kept_going(ask, ends_at)) as steps:
                async for pieces in steps:
                    yield pieces

    async def _kept_going(self, ask: GenerateRequest, ends_at: float | None) -> AsyncGenerator[list[Piece]]:
        """By one replica after the other, until all samples have ended."""
        told, deaths = ResumableStream(ask), _Deaths()
        while True:
            told.replica = ""
            try:
                async with aclosing(self._asked(told.ask(_left(ends_at), deaths.count), told, ends_at)) as steps:
                    async for pieces in steps:
                        if pieces:
                            deaths = _Deaths()
                            yield pieces
                if told.ended:
                    return
                told.avoid()  # it said no more
                deaths.add(0.0, again=told.repeats)
            except ReplicaMismatchError as error:
                told.avoid()
                deaths.get_proposer(error)
            except ReplicaLostError:
                blame = self._blame(told.replica)
                self._check_open()
                if told.ended:
                    return
                deaths.add(0.0 if told.repeats else blame, again=told.repeats)
            self.resumed += 1
            await asyncio.sleep(min(_LONGEST, _PAUSE * deaths.count))

    async def _asked(
        self, ask: GenerateRequest, told: ResumableStream, ends_at: float | None
    ) -> AsyncGenerator[list[Piece]]:
        """By one replica, to the end, or to its end: what is new of each of its steps, which may be nothing.

        Raises:
            ReplicaLostError: it is gone.
        """
        async with aclosing(self._replicas.ask(ask)) as said:
            try:
                while (each := await _in_time(said, ends_at)) is not None:
                    self._check_open()
                    if isinstance(each, RequestAccepted):
                        self._held[each.replica] += 1
                    pieces = told.hear(each)
                    if isinstance(each, StepReply):
                        self._loads[told.replica] = each.load
                        yield pieces
            except ReplicaLostError:
                raise
            except BaseException:
                self._let_go(told.replica)
                raise
            self._let_go(told.replica)

    def _let_go(self, replica: str) -> None:
        """A replica has one request less; of one that has none, nothing is remembered."""
        self._held[replica] -= 1
        if self._held[replica] <= 0:
            for known in (self._held, self._fallen, self._loads):
                known.pop(replica, None)

    def _blame(self, replica: str) -> float:
        """A replica has died: how much of that one of its requests is to blame for."""
        self._loads.pop(replica, None)
        had = self._fallen.setdefault(replica, self._held[replica])
        self._let_go(replica)
        return 1.0 / max(1, had)

    def stop(self) -> None:
        """End what still runs, with an error, at its next step."""
        self._closed = True

    async def close(self) -> None:
        """The same."""
        self.stop()

    def _check_open(self) -> None:
        if self._closed:
            msg = "expected a model that is open, found one that is being closed"
            raise ClosedError(msg)


@dataclass
class _Deaths:
    """Of replicas under a request, since it last had a token.

    Attributes:
        count: how many, and others that were not of its model.
        again: of these, while what was given out before was said again.
        others: replicas of another model.
        blame: how much of it all is the request's.
    """

    count: int = 0
    again: int = 0
    others: int = 0
    blame: float = 0.0

    def add(self, blame: float, *, again: bool) -> None:
        """One more.

        Raises:
            ClosedError: these are enough.
        """
        self.count, self.again, self.blame = self.count + 1, self.again + again, self.blame + blame
        if self.blame >= _BLAME or self.count >= _MOST_DEATHS or self.again >= _MOST_AGAIN:
            msg = f"expected a replica that goes on, found {self.count} that ended one after the other"
            raise ClosedError(msg)

    def get_proposer(self, other: ReplicaMismatchError) -> None:
        """A replica of another model.

        Raises:
            ResumeError: there seem to be no others.
        """
        self.count, self.others = self.count + 1, self.others + 1
        if self.others >= _OTHERS:
            msg = f"expected a replica of the same model and kernels to go on with the text, found {other}; ask again"
            raise ResumeError(msg) from other


async def _in_time(said: AsyncGenerator[Said], ends_at: float | None) -> Said | None:
    """What a replica says next; ``None`` is the end.

    Raises:
        DeadlineError: it says nothing, not even that it is too late.
    """
    wait = None if ends_at is None else max(0.0, ends_at - perf_counter()) + _GRACE
    try:
        async with asyncio.timeout(wait) as limit:
            return await anext(said, None)
    except TimeoutError as error:
        if not limit.expired():
            raise
        msg = "the request was not done by its deadline, as its replica says nothing"
        raise DeadlineError(msg) from error


def _left(ends_at: float | None) -> float | None:
    """Seconds that are left.

    Raises:
        DeadlineError: none are.
    """
    if ends_at is None:
        return None
    left = ends_at - perf_counter()
    if left <= 0.0:
        msg = "the request was not done by its deadline, which replicas that ended took up"
        raise DeadlineError(msg)
    return left
