"""AsyncLLM: simultaneous requests have the texts of LLM; cancelled requests release their
blocks.
"""

import asyncio
import gc
import inspect
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager, suppress
from math import log2
from pathlib import Path
from typing import Any

import pytest

from adapters import write_adapter
from checkpoints import MakeCheckpoint
from pronk.async_llm import AdmissionLimit, AsyncLLM, split_prompts
from pronk.base.errors import (
    CheckpointError,
    ClosedError,
    DeadlineError,
    OptionError,
    OverloadedError,
    PromptError,
    PronkError,
)
from pronk.base.fair_executor import SMALL_JOB
from pronk.engine import engine_thread
from pronk.engine.outputs import Piece
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from pronk.text.guide import Guide
from waiting import HUNG, TimeLimits, until

PROMPTS = ["a b c", "one two", "x", "the quick brown fox", "def f(x):", "0 1 2 3 4 5 6 7"]


@pytest.fixture(scope="module")
def llm(checkpoint: MakeCheckpoint) -> Iterator[LLM]:
    return LLM(checkpoint("llama"), prefix_cache=True, max_batch=3)


@asynccontextmanager
async def served(llm: LLM, **options: Any) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(llm, **options) as made:
        yield made
    assert not llm.engine.scheduler.running
    assert not llm.engine.scheduler.waiting
    assert llm.engine.cache.allocator.num_free == llm.engine.cache.allocator.num_blocks


def drive(llm: LLM, work: Callable[[AsyncLLM], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with served(llm, **options) as made:
            await asyncio.wait_for(work(made), HUNG)

    asyncio.run(main())


def params(seed: int, **options: Any) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": 12, "seed": seed, "temperature": 0.8, "ignore_eos": True, **options}
    )


async def collected(pieces: AsyncIterator[Piece]) -> list[Piece]:
    return [piece async for piece in pieces]


def test_simultaneous_requests_have_the_texts_of_single_ones(llm: LLM) -> None:
    options = [params(seed) for seed in range(len(PROMPTS))]
    want = [llm.generate(prompt, own) for prompt, own in zip(PROMPTS, options, strict=True)]

    async def work(made: AsyncLLM) -> None:
        tasks = [
            collected(made.stream(p, o, drafter="recycling"))
            for p, o in zip(PROMPTS, options, strict=True)
        ]
        streams = await asyncio.gather(*tasks)
        whole = await asyncio.gather(
            *(made.generate(p, o) for p, o in zip(PROMPTS, options, strict=True))
        )
        for pieces, completion, one in zip(streams, whole, want, strict=True):
            assert "".join(piece.text for piece in pieces) == completion.text == one.text
            assert [piece.token_id for piece in pieces] == completion.token_ids == one.token_ids
            assert [piece.completion is not None for piece in pieces] == [False] * 11 + [True]

    drive(llm, work)


def test_requests_of_several_adapters(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    model = checkpoint("llama")
    adapters = {
        name: write_adapter(tmp_path / name, model, seed=seed) for seed, name in enumerate("ab")
    }
    llm = LLM(model, adapters=adapters, max_batch=3)
    names = (None, "a", "b", "a", None, "b")
    want = [
        llm.generate(p, params(i), adapter=n)
        for i, (p, n) in enumerate(zip(PROMPTS, names, strict=True))
    ]

    async def work(made: AsyncLLM) -> None:
        requests = [
            made.generate(p, params(i), adapter=n)
            for i, (p, n) in enumerate(zip(PROMPTS, names, strict=True))
        ]
        assert [each.token_ids for each in await asyncio.gather(*requests)] == [
            each.token_ids for each in want
        ]
        with pytest.raises(OptionError, match="adapter: expected one of a, b, found 'c'"):
            await made.generate("x", params(0), adapter="c")

    drive(llm, work)
    assert (
        len(
            {
                tuple(llm.generate("x", params(0), adapter=name).token_ids)
                for name in (None, "a", "b")
            }
        )
        == 3
    )


def test_samples(llm: LLM) -> None:
    want = llm.generate(PROMPTS[3], params(5, n=3))

    async def work(made: AsyncLLM) -> None:
        got = await made.generate(PROMPTS[3], params(5, n=3))
        assert [got.text, *(other.text for other in got.others)] == [
            want.text,
            *(other.text for other in want.others),
        ]
        pieces = await collected(made.stream(PROMPTS[3], params(5, n=3)))
        assert {piece.index for piece in pieces if piece.completion} == {0, 1, 2}

    drive(llm, work)


@pytest.mark.parametrize("how", ["break", "cancel"])
def test_cancelled_requests_release_their_blocks(llm: LLM, how: str) -> None:
    want = llm.generate(PROMPTS[1], params(1))

    async def leave(made: AsyncLLM) -> None:
        async for _ in (stream := made.stream(PROMPTS[0], params(0, max_tokens=100))):
            if how == "break":
                break
            asyncio.current_task().cancel()  # type: ignore[union-attr]
        await stream.aclose()

    async def work(made: AsyncLLM) -> None:
        leaving = [asyncio.create_task(leave(made)) for _ in range(5)]
        assert (await made.generate(PROMPTS[1], params(1))).token_ids == want.token_ids
        for task in leaving:
            with suppress(asyncio.CancelledError):
                await task

    drive(llm, work)


def test_errors_are_raised_in_their_own_request(llm: LLM) -> None:
    async def work(made: AsyncLLM) -> None:
        good = asyncio.create_task(made.generate(PROMPTS[0], params(0)))
        with pytest.raises(PromptError):
            await made.generate("", params(0))
        with pytest.raises(OptionError):
            await made.generate(PROMPTS[0], params(0), drafter="psychic")
        with pytest.raises(DeadlineError, match="was not done by its deadline"):
            await made.generate(PROMPTS[0], params(0, max_tokens=100), deadline=0.0)
        assert len((await good).token_ids) == 12

    drive(llm, work)


@pytest.mark.parametrize(
    "options", [{"priority": "high"}, {"salt": "tenant"}, {"deadline": -1.0}], ids=str
)
def test_invalid_options_disturb_no_other_request(llm: LLM, options: dict[str, Any]) -> None:
    async def work(made: AsyncLLM) -> None:
        good = asyncio.create_task(made.generate(PROMPTS[0], params(0)))
        with pytest.raises(OptionError, match=f"{next(iter(options))}: expected"):
            await made.generate(PROMPTS[1], params(0), **options)
        assert len((await good).token_ids) == 12

    drive(llm, work)


def test_too_many(llm: LLM) -> None:
    async def work(made: AsyncLLM) -> None:
        stream = made.stream(PROMPTS[0], params(0, n=2, max_tokens=100))
        await anext(stream)
        with pytest.raises(OverloadedError, match="at most 2 requests at a time"):
            await made.generate(PROMPTS[1], params(0))
        await stream.aclose()
        got = None
        while got is None:  # the closed stream's request is removed after the current step
            with suppress(OverloadedError):
                got = await made.generate(PROMPTS[1], params(0))
        assert got.token_ids

    drive(llm, work, max_requests=2)


@pytest.mark.parametrize("limit", [2, 3, 4, 9, 256])
def test_no_tenant_takes_the_last_place(limit: int) -> None:
    """Tenants that take all they get, one after the other, have half of the places, a quarter, an
    eighth, ….
    """
    limits = AdmissionLimit(limit, shared=True)
    with ExitStack() as held:
        for tenant in range(int(log2(limit)) + 1):
            admitted = 0
            with suppress(OverloadedError):
                while True:
                    held.enter_context(limits.hold(1, str(tenant)))
                    admitted += 1
            assert admitted == max(1, limit // 2 ** (tenant + 1)), tenant
        assert limits.num_admitted <= limit
    assert limits.num_admitted == 0


def test_a_call_beyond_the_share_of_a_tenant_is_refused() -> None:
    limits = AdmissionLimit(256, shared=True)
    with pytest.raises(
        OptionError, match="n: expected at most 128 samples at a time, found 256; ask for fewer"
    ):
        limits.hold(256, "a").__enter__()
    with limits.hold(128, "a"):
        with pytest.raises(
            OverloadedError,
            match="of one key now, as others share the server, found 129; try again",
        ):
            limits.hold(1, "a").__enter__()
        with limits.hold(64, "b"), limits.hold(32, "c"):
            pass
    with AdmissionLimit(256).hold(256, "a"):
        pass


def test_samples_are_admitted_until_the_jobs_of_their_request_have_ended() -> None:
    """A job that runs in a thread goes on when the request is cancelled, and needs its place."""
    limits = AdmissionLimit(8)
    running, waiting, done = (Future[None]() for _ in range(3))
    assert running.set_running_or_notify_cancel()
    done.set_result(None)
    with pytest.raises(TimeoutError), limits.hold(3, "a") as admission:  # noqa: PT012 - the block is the request
        for job in (running, waiting, done):
            assert admission.until(job) is job
        assert waiting.cancel()
        assert not running.cancel()
        raise TimeoutError
    assert limits.num_admitted == 3
    running.set_result(None)
    assert limits.num_admitted == 0


@pytest.mark.parametrize("where", ["guide", "prompts", "embeddings"])
def test_a_cancelled_request_keeps_its_place_while_its_job_runs(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    begun = threading.Event()
    gate = threading.Event()
    factory = llm.request_factory
    owner, name = {
        "guide": (type(factory.grammars), "compile"),
        "prompts": (type(factory), "create_batch"),
        "embeddings": (type(factory), "create_embeddings"),
    }[where]
    function = getattr(owner, name)

    def wait(*given: Any) -> Any:
        begun.set()
        assert gate.wait(HUNG)
        return function(*given)

    monkeypatch.setattr(owner, name, wait)

    async def work(made: AsyncLLM) -> None:
        guide = Guide(regex="left+") if where == "guide" else None
        task: asyncio.Future[Any]
        if where == "embeddings":
            task = asyncio.ensure_future(made.embed(["x", "y", "z"]))
        else:
            task = asyncio.ensure_future(
                made.generate("x", params(0, guide=guide, ignore_eos=guide is None))
            )
        assert await asyncio.to_thread(begun.wait, HUNG)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert made.num_requests == (3 if where == "embeddings" else 1)
        gate.set()
        await until(lambda: not made.num_requests)

    drive(llm, work)


@pytest.mark.parametrize("tenant", ["a", "b"])
@pytest.mark.parametrize("call", ["generate", "stream", "chat", "stream_chat", "embed"])
def test_the_deadline_counts_while_a_request_waits_for_a_thread(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, call: str, tenant: str
) -> None:
    gate = threading.Event()
    started = threading.Semaphore(0)
    template = type(llm.tokenizer)
    monkeypatch.setattr(template, "chat_ids", lambda *_, **__: [5])

    def occupy() -> None:
        started.release()
        gate.wait(HUNG)

    async def work(made: AsyncLLM) -> None:
        for size in (1, SMALL_JOB + 1):
            for _ in range(2):
                made.executor.submit("a", occupy, size=size)
                assert started.acquire(timeout=HUNG)  # else the other tenant may be first
        given: Any = [{"role": "user", "content": "x"}] if "chat" in call else "x"
        given = ["x"] if call == "embed" else given
        answer = getattr(made, call)(given, deadline=0.05, tenant=tenant)
        awaited = collected(answer) if call.startswith("stream") else answer
        try:
            with pytest.raises(DeadlineError):
                await awaited
        finally:
            gate.set()

    drive(llm, work)


@pytest.mark.parametrize("messages", [None, 5, "x", [5], [{"role": "user"}], [{"content": [1]}]])
def test_malformed_conversations_are_refused_as_by_the_llm(llm: LLM, messages: Any) -> None:
    async def work(made: AsyncLLM) -> None:
        with pytest.raises(PronkError) as own:
            llm.chat(messages)
        with pytest.raises(type(own.value)) as found:
            await made.chat(messages)
        assert str(found.value) == str(own.value)

    drive(llm, work)


@pytest.mark.parametrize("call", ["generate", "stream", "chat", "stream_chat", "embed"])
def test_a_small_request_waits_for_no_large_job(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(type(llm.tokenizer), "chat_ids", lambda *_, **__: [5])

    async def work(made: AsyncLLM) -> None:
        jobs = [made.executor.submit("", lambda: gate.wait(HUNG)) for _ in range(4)]
        given: Any = [{"role": "user", "content": "x"}] if "chat" in call else "x"
        options: dict[str, Any] = {} if call == "embed" else {"params": params(0)}
        answer = getattr(made, call)(["x"] if call == "embed" else given, **options)
        await (collected(answer) if call.startswith("stream") else answer)
        assert not any(job.done() for job in jobs)
        gate.set()

    drive(llm, work)


@pytest.mark.parametrize(
    ("length", "sizes"),
    [(1, [64, 64, 22]), (1000, [64, 64, 22]), (30_000, [2] * 75), (70_000, [1] * 150)],
)
def test_prompts_are_split_into_groups(length: int, sizes: list[int]) -> None:
    prompts = [f"{number:05}".ljust(length) for number in range(150)]
    groups = [*split_prompts(prompts)]
    assert [prompt for group in groups for prompt in group] == prompts
    assert [len(group) for group in groups] == sizes


@pytest.mark.parametrize(("num_texts", "admitted"), [(0, 0), (1, 1), (64, 64), (65, 64), (150, 64)])
def test_embeddings_are_admitted_once(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, num_texts: int, admitted: int
) -> None:
    """Between two groups of texts, another tenant cannot take the places of a request that has
    begun.
    """
    held = list[int]()
    admit = AdmissionLimit._admit

    def note(limits: AdmissionLimit, count: int, tenant: str) -> None:
        held.append(count)
        admit(limits, count, tenant)

    monkeypatch.setattr(AdmissionLimit, "_admit", note)
    texts = [f"text {number % 7}" for number in range(num_texts)]

    async def work(made: AsyncLLM) -> None:
        found = await made.embed(texts, tenant="a")
        assert found.tobytes() == llm.embed(texts).tobytes()

    drive(llm, work, max_requests=128, shared=True)
    assert held == [admitted]


class Counts(list[Piece]):
    """A caller that reads what it is told to."""

    def __init__(self, stream: AsyncIterator[Piece]) -> None:
        super().__init__()
        self.stream = stream

    async def read(self, count: int) -> None:
        while len(self) < count:
            self.append(await anext(self.stream))


@pytest.mark.parametrize("others", [False, True])
def test_a_stream_that_is_not_read_is_paused_and_goes_on(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, others: bool
) -> None:
    """Its text is that of a stream that is read at once; other requests go on meanwhile."""
    llm = LLM(checkpoint("llama"), max_batch=1)
    monkeypatch.setattr(engine_thread, "MAX_UNREAD", 8)
    want = llm.generate(PROMPTS[0], params(0, max_tokens=60)).token_ids

    async def work(made: AsyncLLM) -> None:
        unread = Counts(made.stream(PROMPTS[0], params(0, max_tokens=60), drafter="recycling"))
        await unread.read(1)
        if others:
            assert len((await made.generate(PROMPTS[1], params(1))).token_ids) == 12
        (call,) = made._thread._calls
        await until(lambda: call.is_paused)
        (request,) = call.requests.values()
        generated = request.num_generated
        assert generated < 60
        assert len((await made.generate(PROMPTS[2], params(2))).token_ids) == 12, (
            "the place in the batch is free"
        )
        assert request.num_generated == generated
        await unread.read(60)
        assert [piece.token_id for piece in unread] == want
        assert request.stats.preemptions > 0

    drive(llm, work)


def test_a_stream_that_is_not_read_ends_at_its_deadline(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(checkpoint("llama"), max_batch=1)
    monkeypatch.setattr(engine_thread, "MAX_UNREAD", 4)

    async def work(made: AsyncLLM) -> None:
        def clock() -> float:
            """Return a time shortly before the deadline, or later, once the stream is paused."""
            is_paused = any(call.is_paused for call in made._thread._calls)
            return time.perf_counter() + (2 * HUNG - 0.2 if is_paused else 0.0)

        monkeypatch.setattr(llm.engine.runner, "clock", clock)
        monkeypatch.setattr(llm.engine.scheduler, "clock", clock)
        stream = made.stream(PROMPTS[0], params(0, max_tokens=100), deadline=2 * HUNG)
        await anext(stream)
        await until(lambda: not made._thread._calls)
        with pytest.raises(DeadlineError):
            await collected(stream)

    drive(llm, work)


def test_a_failed_step_ends_its_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(made: AsyncLLM) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.runner, "forward", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await made.generate(PROMPTS[0], params(0))
        assert (await made.generate(PROMPTS[0], params(0))).token_ids

    drive(llm, work)


def test_closing_ends_what_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llm.engine.step
    first_step_done = threading.Event()
    stopped = threading.Event()

    def wait_after_the_first_step() -> None:
        step()
        first_step_done.set()
        assert stopped.wait(HUNG)

    async def main() -> None:
        made = AsyncLLM(llm)
        task = asyncio.create_task(made.generate(PROMPTS[0], params(0, max_tokens=100)))
        assert await asyncio.to_thread(first_step_done.wait, HUNG)
        made.stop()
        stopped.set()
        await made.close()
        with pytest.raises(ClosedError, match="found one that was closed"):
            await task
        with pytest.raises(ClosedError, match="found one that is closing"):
            await made.generate(PROMPTS[0])
        assert not made.alive

    monkeypatch.setattr(llm.engine, "step", wait_after_the_first_step)
    asyncio.run(main())


def test_other_threads_use_the_same_model(llm: LLM) -> None:
    want = [llm.generate(prompt, params(3)).token_ids for prompt in PROMPTS]

    async def work(made: AsyncLLM) -> None:
        mine = asyncio.gather(*(made.generate(prompt, params(3)) for prompt in PROMPTS))
        theirs = await asyncio.to_thread(llm.generate, PROMPTS, params(3))
        assert [each.token_ids for each in await mine] == want
        assert [each.token_ids for each in theirs] == want

    drive(llm, work)


def test_the_thread_ends_if_the_model_is_deleted(llm: LLM) -> None:
    made = AsyncLLM(llm)
    thread = made._thread.thread
    assert thread.is_alive()
    del made
    gc.collect()
    thread.join(HUNG)
    assert not thread.is_alive()


LEAVES_A_STREAM = """
import asyncio, atexit, threading
atexit.register(lambda: print([thread.name for thread in threading.enumerate() if thread.name == "pronk-engine"]))
from pronk import LLM, SamplingParams
from pronk.async_llm import AsyncLLM

async def main():
    async for _ in llm.stream("x", SamplingParams(max_tokens=1500, ignore_eos=True)):
        print(any(thread.name == "pronk-engine" for thread in threading.enumerate()))
        return

llm = AsyncLLM(LLM("models/pronk-tiny", threads=1))
asyncio.new_event_loop().run_until_complete(main())
"""


def test_a_program_that_ends_waits_for_the_current_step() -> None:
    # Without this, Python unwinds the thread inside C++ code, which aborted one program in seven.
    command = [sys.executable, "-c", LEAVES_A_STREAM]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=HUNG, check=True, cwd=root)
    assert done.stdout == b"True\n[]\n"


def test_prompts_side_by_side(llm: LLM) -> None:
    own = params(3, n=2)
    firsts = [llm.generate(prompt, own) for prompt in PROMPTS[:3]]
    want = [sample for first in firsts for sample in (first, *first.others)]

    async def work(made: AsyncLLM) -> None:
        done = {}
        async for pieces in made.steps(PROMPTS[:3], own):
            done.update(
                (piece.index, piece.completion) for piece in pieces if piece.completion is not None
            )
        assert [done[index].token_ids for index in range(6)] == [
            sample.token_ids for sample in want
        ]
        with pytest.raises(PromptError):
            async for _ in made.steps([PROMPTS[0], ""], own):
                pass
        assert made.num_requests == 0

    drive(llm, work)


def test_requests_raise_if_the_thread_dies(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class DeadError(BaseException):
        pass

    def die() -> None:
        raise DeadError

    async def work(made: AsyncLLM) -> None:
        monkeypatch.setattr(llm.engine, "step", die)
        with pytest.raises(DeadError):
            await made.generate("x", params(1))
        with pytest.raises(ClosedError, match="found one that is closing"):
            await made.generate("x", params(1))

    drive(llm, work)


def test_tokenization_has_the_deadline(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()
    held = threading.Event()
    times = TimeLimits()

    def encode(_: Any) -> list[int]:
        begun.set()
        held.wait(HUNG)
        return [1]

    async def work(engine: AsyncLLM) -> None:
        monkeypatch.setattr(llm.request_factory, "encode_prompt", encode)
        monkeypatch.setattr(asyncio, "timeout", times)
        generating = asyncio.ensure_future(engine.generate("x", deadline=1.5 * HUNG))
        await asyncio.to_thread(begun.wait, HUNG)
        times.end()
        with pytest.raises(DeadlineError, match=f"after {1.5 * HUNG:.1f} s"):
            await generating
        assert engine.num_requests == 1, "its thread still works"
        held.set()
        await until(lambda: engine.num_requests == 0)

    drive(llm, work)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.0},
        {"logprobs": 2, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 4},
        {"stop": ("0", "st", "\ufffd"), "max_tokens": 30},
        {"n": 3, "logprobs": 0},
        {
            "guide": Guide(regex="[a-z]{2,5}( [a-z]{2,5}){4}"),
            "ignore_eos": False,
            "guide_mode": "jump",
        },
    ],
    ids=["plain", "greedy", "penalties", "stop", "samples", "guide"],
)
def test_a_text_resumes_after_its_given_pieces(llm: LLM, options: dict[str, Any]) -> None:
    """After any number of given pieces, the other pieces and the completions are the same."""
    asked = params(5, **options)

    async def all_of(made: AsyncLLM, given: dict[int, list[Piece]] | None = None) -> list[Piece]:
        steps = made.steps(["the quick"], asked, drafter="recycling", given=given)
        return [piece async for pieces in steps for piece in pieces]

    def seen(pieces: Sequence[Piece]) -> list[Any]:
        ends = [piece.completion for piece in pieces]
        whole = [
            end and (end.text, end.token_ids, end.logprobs, end.finish_reason, end.stop_reason)
            for end in ends
        ]
        fields = [(piece.index, piece.token_id, piece.text, piece.logprobs) for piece in pieces]
        return sorted(zip(fields, whole, strict=True), key=lambda each: each[0][0])

    async def work(made: AsyncLLM) -> None:
        want = await all_of(made)
        assert len(want) > 6
        for cut in range(len(want)):
            given: dict[int, list[Piece]] = {}
            for piece in want[:cut]:
                given.setdefault(piece.index, []).append(piece)
            found = await all_of(made, given)
            assert seen([*want[:cut], *found]) == seen(want)

    drive(llm, work)


MESSAGES = [{"role": "user", "content": "Hello there"}]
# Keyword arguments that every coroutine has, for the scheduler.
SCHEDULE = {"priority": 0, "deadline": None, "salt": b"", "tenant": ""}
# Methods of LLM that do not wait for the model.
IMMEDIATE = {"chat_ids", "get_default_sampling_params", "get_proposer"}


def public_methods(of: type) -> dict[str, inspect.Signature]:
    members = {name: value for name, value in vars(of).items() if not name.startswith("_")}
    return {
        name: inspect.signature(value)
        for name, value in members.items()
        if inspect.isfunction(value)
    }


def test_methods_of_llm_are_coroutines_with_the_same_arguments() -> None:
    """``generate`` takes one prompt, as several calls run at the same time, and so reports no
    progress.
    """
    mine = public_methods(AsyncLLM)
    theirs = public_methods(LLM)
    assert theirs.keys() - mine.keys() <= IMMEDIATE
    for name in theirs.keys() & mine.keys() - {"close"}:
        given = dict(theirs[name].parameters)
        if name == "generate":
            given = {"self": given["self"], "prompt": None, **dict([*given.items()][2:])}
            del given["progress"]
        schedule = {} if name == "choose" else SCHEDULE
        assert [*mine[name].parameters] == [*given, *schedule], name
        for argument, parameter in mine[name].parameters.items():
            expected = given.get(argument)
            if argument in schedule:
                assert parameter.default == schedule[argument]
            elif expected is not None:
                assert (parameter.default, parameter.kind) == (expected.default, expected.kind), (
                    name,
                    argument,
                )


@pytest.mark.parametrize("how", ["name", "keyword", "path", "loaded"])
def test_the_model_is_given_as_to_llm(how: str) -> None:
    """A model that the constructor loads is closed with it."""
    root = Path(__file__).parents[1] / "models/pronk-tiny"
    options: dict[str, Any] = {"threads": 1, "drafter": "suffix", "max_batch": 2}
    if how == "name":
        made = AsyncLLM("pronk-tiny", max_requests=3, **options)
    elif how == "keyword":
        made = AsyncLLM(model=str(root), **options)
    else:
        made = AsyncLLM(root, **options) if how == "path" else AsyncLLM(LLM(root, **options))
    assert made.llm.engine.scheduler.max_batch == 2
    closed = list[bool]()
    made.llm.close = lambda: closed.append(True)  # type: ignore[method-assign]

    async def main() -> None:
        async with made:
            done = await made.generate("Hello", params(1))
            assert done.token_ids == made.llm.generate("Hello", params(1)).token_ids
            plain = SamplingParams(max_tokens=9)
            for given in (plain, None):
                want = made.llm.chat(MESSAGES, given)
                assert (await made.chat(MESSAGES, given)).token_ids == want.token_ids
                pieces = await collected(made.stream_chat(MESSAGES, given))
                assert [piece.token_id for piece in pieces] == want.token_ids
            assert await made.choose("Hello", [" a", " b"]) == made.llm.choose(
                "Hello", [" a", " b"]
            )
            both = await made.chat(
                MESSAGES, SamplingParams(max_tokens=4, n=2, temperature=1.0, seed=1)
            )
            assert len(both.others) == 1

    asyncio.run(main())
    assert closed == ([] if how == "loaded" else [True])


def test_wrong_arguments(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match=r"^threads: expected no options of LLM with a loaded model, found one"
    ):
        AsyncLLM(llm, threads=1)
    with pytest.raises(
        OptionError, match=r"^max_requests: expected an integer of at least 1, found 0"
    ):
        AsyncLLM(llm, max_requests=0)
    for wrong in (5, b"a", [llm], AsyncLLM(llm)):
        for load in (LLM, AsyncLLM):
            with pytest.raises(
                OptionError, match=r"^model: expected a folder, a GGUF file or a name, found"
            ):
                load(wrong)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match="no such folder"):
        AsyncLLM(tmp_path / "none")
    with pytest.raises(TypeError, match="nonsense"):
        AsyncLLM("pronk-tiny", nonsense=1)


def test_errors_of_conversations() -> None:
    async def main() -> None:
        async with AsyncLLM("pronk-tiny", threads=1) as made:
            with pytest.raises(PromptError, match="expected a role"):
                await made.chat([{"role": "usr", "content": "Hi"}])
            with pytest.raises(OptionError, match="priority"):
                await made.chat(MESSAGES, priority="x")  # type: ignore[arg-type]
            with pytest.raises(DeadlineError):
                await made.chat(
                    MESSAGES, SamplingParams(max_tokens=200, ignore_eos=True), deadline=0
                )

    asyncio.run(main())
