"""What stands before the replicas: one stream, whoever dies, with the text of one model that does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from pronk import LLM, AsyncLLM, SamplingParams
from pronk.cache.budget import BLOCK_SIZE
from pronk.drafters import Suffix
from pronk.errors import ClosedError, DeadlineError, OptionError, OverloadedError, PronkError
from pronk.outputs import Completion, Piece
from pronk.replicas.front import Front, LostError, Reader
from pronk.replicas.messages import About, Ask, Begun, Failed, Said, Step
from pronk.replicas.prefixes import Routes, prefix_digests

PROMPT = "def add(a, b):\n    return a + b\n\n\nclass Stack:\n"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    return LLM(threads=1, prefix_cache=True)


class Mortal:
    """Replicas in this process, each of which dies after so many steps."""

    def __init__(self, llm: LLM, lives: Sequence[int], identities: Sequence[str] = ()) -> None:
        self.engine = AsyncLLM(llm)
        self.lives, self.identities = [*lives], [*identities]
        self.asked: list[Ask] = []

    async def ask(self, ask: Ask) -> AsyncGenerator[Said]:
        self.asked.append(ask)
        left = self.lives.pop(0) if self.lives else 1_000
        identity = self.identities.pop(0) if self.identities else "one"
        yield Begun(f"replica {len(self.asked)}", identity)
        if ask.identity not in (None, identity):
            yield Failed(PronkError("another model"))
            return
        steps = self.engine.steps(ask.prompts, ask.params, drafter=ask.drafter, given=ask.given)
        try:
            async with aclosing(steps):
                async for pieces in steps:
                    if not left:
                        raise LostError("it has died")
                    left -= 1
                    yield Step(pieces, self.engine.load)
        except PronkError as error:
            yield Failed(error)


def front(llm: LLM, replicas: Any, **options: Any) -> Front:
    return Front(Reader(llm.path, "recycling", About("one", "", llm.kernels, "recycling")), replicas, **options)


async def collect(made: Front, params: SamplingParams, prompts: Sequence[str] = (PROMPT,), **more: Any) -> list[Piece]:
    return [piece async for pieces in made.steps([*prompts], params, **more) for piece in pieces]


def whole(pieces: Sequence[Piece]) -> list[Any]:
    """Of each sample: its pieces, and its end, but for what it has cost."""
    found = []
    for index in sorted({piece.index for piece in pieces}):
        own = [piece for piece in pieces if piece.index == index]
        (end,) = [piece.completion for piece in own if piece.completion is not None]
        assert own[-1].completion is end
        assert [piece.token_id for piece in own] == end.token_ids
        assert "".join(piece.text for piece in own) == end.text
        assert [piece.step for piece in own] == sorted(piece.step for piece in own)
        found.append(([(piece.token_id, piece.text, piece.logprobs) for piece in own], *of(end)))
    return found


def of(end: Completion) -> tuple[Any, ...]:
    return end.text, end.token_ids, end.logprobs, end.prompt_logprobs, end.finish_reason, end.stop_reason, end.seed


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.9, "logprobs": 2, "n": 2, "repetition_penalty": 1.2},
        {"temperature": 0.7, "prompt_logprobs": 1, "logprobs": 0},
        {"temperature": 1.0, "stop": ("(", "self"), "ignore_eos": False},
    ],
)
def test_one_text_whoever_dies(llm: LLM, options: dict[str, Any]) -> None:
    params = SamplingParams(**{"max_tokens": 24, "seed": 7, "ignore_eos": True, **options})

    async def main() -> None:
        want = whole(await collect(front(llm, Mortal(llm, [])), params))
        for lives in ([0], [1], [2, 3], [5, 0, 6, 7], [3, 6, 9, 12]):
            replicas = Mortal(llm, lives)
            made = front(llm, replicas)
            assert whole(await collect(made, params)) == want
            assert made.resumed == len(replicas.asked) - 1 > 0
            assert made.num_requests == 0

    asyncio.run(main())


def test_without_a_seed_the_text_is_one_all_the_same(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True)

    async def main() -> None:
        replicas = Mortal(llm, [4, 4])
        ((*_, seed),) = whole(await collect(front(llm, replicas), params))
        assert {ask.params.seed for ask in replicas.asked} == {seed}
        assert whole(await collect(front(llm, Mortal(llm, [])), replace(params, seed=seed)))[0][-1] == seed

    asyncio.run(main())


def test_another_model_does_not_go_on_with_a_text(llm: LLM) -> None:
    """But one that has not begun, it may have."""
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)

    async def main() -> None:
        with pytest.raises(PronkError, match="another model"):
            await collect(front(llm, Mortal(llm, [4], ["one", "other"])), params)
        made = front(llm, Mortal(llm, [0], ["one", "other"]))
        assert len(await collect(made, params)) == 20

    asyncio.run(main())


def test_a_text_that_differs_when_it_is_said_again(llm: LLM) -> None:
    """Reports on the prompt make it be said again: what was given out must come once more."""

    class Liar(Mortal):
        async def ask(self, ask: Ask) -> AsyncGenerator[Said]:
            if self.asked:
                ask = replace(ask, params=replace(ask.params, seed=99))
            async for said in super().ask(ask):
                yield said

    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True, prompt_logprobs=0, temperature=1.5)
    with pytest.raises(PronkError, match="expected the text that was given out before, found another; ask again"):
        asyncio.run(collect(front(llm, Liar(llm, [6])), params))


def test_a_request_that_kills_whoever_takes_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pronk.replicas.front._PAUSE", 0.0)
    replicas = Mortal(llm, [0] * 50)
    with pytest.raises(ClosedError, match="found 3 that ended one after the other"):
        asyncio.run(collect(front(llm, replicas), SamplingParams(max_tokens=4)))
    assert len(replicas.asked) == 3


def test_what_is_wrong_with_a_request_is_said_once(llm: LLM) -> None:
    async def main() -> None:
        replicas = Mortal(llm, [])
        made = front(llm, replicas, max_requests=2)
        with pytest.raises(OptionError, match="max_tokens"):
            await collect(made, SamplingParams(max_tokens=100_000))
        with pytest.raises(OptionError, match="n: expected at most 2 samples at a time, found 3"):
            await collect(made, SamplingParams(n=3))
        first = made.steps([PROMPT], SamplingParams(max_tokens=400, ignore_eos=True))
        async with aclosing(first):
            await anext(first)
            with pytest.raises(OverloadedError, match="expected at most 2 requests at a time, found 2 more"):
                await collect(made, SamplingParams(n=2))
        with pytest.raises(DeadlineError, match="not done by its deadline"):
            await collect(made, SamplingParams(), deadline=0.0)
        assert len(replicas.asked) == 2
        assert made.num_requests == 0
        made.stop()
        assert not made.alive
        with pytest.raises(ClosedError):
            await collect(made, SamplingParams())

    asyncio.run(main())


def test_a_replica_that_says_nothing_is_waited_for_to_the_deadline(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the deadline, but it may stand still."""
    monkeypatch.setattr("pronk.replicas.front._GRACE", 0.05)

    class Still(Mortal):
        async def ask(self, ask: Ask) -> AsyncGenerator[Said]:
            yield Begun("still", "one")
            await asyncio.sleep(60)

    async def main() -> None:
        made = front(llm, Still(llm, []))
        with pytest.raises(DeadlineError, match="its replica says nothing"):
            await asyncio.wait_for(collect(made, SamplingParams(), deadline=0.1), 5)
        assert made.num_requests == 0
        assert not made._held

    asyncio.run(main())


def test_what_is_said_again_is_no_death_in_vain(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """With reports on the prompt, a text is said from its beginning: replicas that say it have not died of it."""
    monkeypatch.setattr("pronk.replicas.front._PAUSE", 0.0)
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True, prompt_logprobs=0, temperature=0.8)

    async def main() -> None:
        want = whole(await collect(front(llm, Mortal(llm, [])), params, drafter="autoregressive"))
        replicas = Mortal(llm, [6, 5, 4, 3, 2])
        made = front(llm, replicas)
        assert whole(await collect(made, params, drafter="autoregressive")) == want
        assert made.resumed == 5
        assert not made._held
        assert not made._fallen
        assert not made._loads

    asyncio.run(main())


def test_rejection_is_not_said_again(llm: LLM) -> None:
    """What guesses were drawn decides its text, and another replica may have others."""
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True, rule="rejection", temperature=0.8)

    async def main() -> None:
        assert len(await collect(front(llm, Mortal(llm, [4])), params)) == 20
        with pytest.raises(PronkError, match="prompt_logprobs: a text that is drawn by rejection cannot be said again"):
            await collect(front(llm, Mortal(llm, [4])), replace(params, prompt_logprobs=0))

    asyncio.run(main())


def test_drafters_by_their_options(llm: LLM) -> None:
    """As the server asks for those that it was started with."""
    made = front(llm, Mortal(llm, []))
    assert made.llm.meet().name == "recycling"
    assert made.llm.meet("suffix(max_match=3)") == Suffix(max_match=3)
    with pytest.raises(OptionError, match="unknown drafter 'nobody'"):
        made.llm.meet("nobody")


def test_whoever_leaves_is_forgotten(llm: LLM) -> None:
    async def main() -> None:
        replicas = Mortal(llm, [])
        made = front(llm, replicas)
        steps = made.steps([PROMPT], SamplingParams(max_tokens=200, ignore_eos=True))
        async with aclosing(steps):
            await anext(steps)
            assert made.num_requests == 1
            assert made.load.running == 1
        assert made.num_requests == 0
        assert made.load.running == 0
        for _ in range(100):
            if not llm.engine.scheduler.running:
                break
            await asyncio.sleep(0.02)
        assert not llm.engine.scheduler.running

    asyncio.run(main())


def test_prompts_that_begin_alike_go_to_one_replica() -> None:
    routes = Routes()
    texts = [[7] * 2 * BLOCK_SIZE + [number] * 3 * BLOCK_SIZE for number in range(3)]
    digests = [prefix_digests(text, b"salt") for text in texts]
    assert [len(each) for each in digests] == [5, 5, 5]
    assert digests[0][:2] == digests[1][:2]
    assert digests[0][2:] != digests[1][2:]
    assert prefix_digests(texts[0], b"other")[0] != digests[0][0]
    assert routes.choose(digests[0], {"a": 1, "b": 0}) == "b"
    routes.learn(digests[0], "a")
    assert routes.choose(digests[1], {"a": 3, "b": 0}) == "a"
    routes.learn(digests[1], "b")  # the latest is where the beginning is warm
    assert routes.choose(digests[2], {"a": 0, "b": 3}) == "b"
    assert routes.choose(digests[0], {"a": 0, "b": 0}) == "a"
    assert routes.choose(digests[0], {"a": 9, "b": 0}) == "b"  # much busier
    assert routes.choose(digests[0], {"b": 5, "c": 1}) == "b"  # gone; the shorter beginning is another's
    assert routes.choose((), {"a": 2, "b": 1}) == "b"
    routes.keep({"a"})
    assert routes.choose(digests[1], {"b": 0, "a": 3}) == "b"  # what it has read is forgotten
    assert routes.choose(digests[0], {"b": 0, "a": 3}) == "a"
    routes.keep(())
    assert routes.choose(digests[0], {"b": 0, "a": 3}) == "b"
