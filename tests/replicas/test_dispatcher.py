"""What stands before the replicas: one stream, whoever dies, with the text of one model that does not."""

import asyncio
import json
import shutil
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pronk import LLM, AsyncLLM, SamplingParams
from pronk.drafters import Suffix
from pronk.errors import ClosedError, DeadlineError, OptionError, OverloadedError, PronkError, ResumeError
from pronk.kv_cache.budget import BLOCK_SIZE
from pronk.outputs import Completion, Piece
from pronk.replicas.dispatcher import Dispatcher, ModelReader, ReplicaLostError
from pronk.replicas.identity import identity
from pronk.replicas.messages import GenerateRequest, ReplicaInfo, RequestAccepted, RequestFailed, Said, StepReply
from pronk.replicas.prefix_routes import InFlight, PrefixRoutes, prefix_digests

PROMPT = "def add(a, b):\n    return a + b\n\n\nclass Stack:\n"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    return LLM(threads=1, prefix_cache=True)


class Mortal:
    """Replicas in this process, each of which dies after so many steps."""

    def __init__(self, llm: LLM, lives: Sequence[int], identities: Sequence[str] = ()) -> None:
        self.engine = AsyncLLM(llm)
        self.lives, self.identities = [*lives], [*identities]
        self.asked: list[GenerateRequest] = []
        self.exact = True

    async def ask(self, ask: GenerateRequest) -> AsyncGenerator[Said]:
        self.asked.append(ask)
        left = self.lives.pop(0) if self.lives else 1_000
        identity = self.identities.pop(0) if self.identities else "one"
        yield RequestAccepted(f"replica {len(self.asked)}", identity, exact=self.exact)
        assert ask.identity in (None, identity), "it has been told of another model"
        steps = self.engine.steps(ask.prompts, ask.params, drafter=ask.drafter, given=ask.given)
        try:
            async with aclosing(steps):
                async for pieces in steps:
                    if not left:
                        raise ReplicaLostError("it has died")
                    left -= 1
                    yield StepReply(pieces, self.engine.load)
        except PronkError as error:
            yield RequestFailed(error)


def front(llm: LLM, replicas: Any, **options: Any) -> Dispatcher:
    about = ReplicaInfo("one", identity(llm, {})[1], llm.kernels, "recycling")
    return Dispatcher(ModelReader(llm.path, "recycling", about), replicas, **options)


async def collect(
    made: Dispatcher, params: SamplingParams, prompts: Sequence[str] = (PROMPT,), **more: Any
) -> list[Piece]:
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


def test_another_model_does_not_go_on_with_a_text(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """But one that has not begun, it may have; and where there is one of the same, that one goes on."""
    monkeypatch.setattr("pronk.replicas.dispatcher._PAUSE", 0.0)
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)

    async def main() -> None:
        want = whole(await collect(front(llm, Mortal(llm, [])), params))
        made = front(llm, Mortal(llm, [4], ["one", *["other"] * 3]))
        said = r"expected a replica of the same model and kernels .* found other instead of one; ask again"
        with pytest.raises(ResumeError, match=said):
            await collect(made, params)
        assert not made._held
        replicas = Mortal(llm, [4], ["one", "other"])
        assert whole(await collect(front(llm, replicas), params)) == want
        # Where its prompt was read last is not asked for again, if there are others.
        assert [ask.avoid for ask in replicas.asked] == [frozenset(), frozenset(), {"replica 2"}]
        assert whole(await collect(front(llm, Mortal(llm, [0], ["one", "other"])), params)) == want

    asyncio.run(main())


def test_a_text_whose_bits_depend_on_its_company_is_not_gone_on_with(llm: LLM) -> None:
    """As torch computes it; unless nobody promises which text it is."""
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True, temperature=0.8)

    async def main() -> None:
        for own, lives in ((params, [4]), (replace(params, rule="rejection"), [4]), (params, [0])):
            replicas = Mortal(llm, lives)
            replicas.exact = False
            if own is params and lives[0]:
                with pytest.raises(ResumeError, match=r"expected kernels of equal bits .* found torch; ask again"):
                    await collect(front(llm, replicas), own)
            else:
                assert len(await collect(front(llm, replicas), own)) == 20

    asyncio.run(main())


def copy(llm: LLM, folder: Path, **config: Any) -> Path:
    """The model once more, with some other words in its config."""
    shutil.copytree(llm.path, folder, symlinks=True)
    file = folder / "config.json"
    file.chmod(0o644)
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


@pytest.mark.parametrize(
    "config", [{"rope_theta": 500.0}, {"rms_norm_eps": 0.01}, {"max_position_embeddings": 1024}, {}]
)
def test_whatever_a_text_depends_on_is_in_the_identity(llm: LLM, tmp_path: Path, config: dict[str, Any]) -> None:
    own = identity(llm, {})
    other = LLM(copy(llm, tmp_path / "model", **config), threads=1)
    assert (identity(other, {}) == own) == (not config)
    about = ReplicaInfo(*own, llm.kernels, "recycling")
    if config:
        with pytest.raises(OptionError, match=r"replicas: expected the same config as here, .*; found ") as caught:
            ModelReader(other.path, "recycling", about)
        assert "\n" not in str(caught.value)
    else:
        assert ModelReader(other.path, "recycling", about).about == about


def test_the_tokenizer_is_in_the_identity_too(llm: LLM, tmp_path: Path) -> None:
    folder = copy(llm, tmp_path / "model")
    file = folder / "tokenizer.json"
    file.chmod(0o644)
    said = json.loads(file.read_text())
    said["model"]["merges"] = said["model"]["merges"][::-1]
    file.write_text(json.dumps(said))
    own = identity(llm, {})
    assert identity(LLM(folder, threads=1), {}) != own
    with pytest.raises(OptionError, match="replicas: expected the same tokenizer as here"):
        ModelReader(folder, "recycling", ReplicaInfo(*own, llm.kernels, "recycling"))


def test_forms_and_kernels_are_in_the_identity(llm: LLM) -> None:
    own, model = identity(llm, {})
    for options in ({"weights": "int8"}, {"kv_dtype": "int8"}, {"workers": 2, "parallel": "tensor"}):
        assert identity(llm, options)[1] != model
    assert identity(llm, {"workers": 2, "parallel": "tree"}) == (own, model)  # whose bits are those of one
    other = LLM(threads=1, kernels="portable")
    assert identity(other, {})[0] != own
    assert identity(other, {})[1] == model


@pytest.mark.parametrize("spec", ["prompt_lookup", "suffix", "recycling", "lookahead"])
def test_guesses_are_as_good_after_a_death(llm: LLM, spec: str) -> None:
    """Who guesses knows the text that was given out before."""
    params = SamplingParams(max_tokens=64, seed=7, ignore_eos=True)
    prompt = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n    return a +"

    async def steps(lives: Sequence[int]) -> tuple[int, int]:
        made = front(LLM(threads=1, budget="all"), Mortal(llm, lives))
        made._replicas.engine = AsyncLLM(LLM(threads=1, budget="all"))  # type: ignore[attr-defined]
        pieces = await collect(made, params, (prompt,), drafter=spec)
        end = pieces[-1].completion
        assert end is not None
        assert end.stats.target_steps == len({piece.step for piece in pieces})
        assert end.stats.accepted == sum(piece.guessed for piece in pieces)
        assert end.stats.generated_tokens == 64
        assert sum(step.tokens for step in end.stats.steps) == 64
        assert sum(source.accepted for source in end.stats.sources.values()) == end.stats.accepted
        clocks = [step.clock for step in end.stats.steps]
        assert clocks == sorted(clocks)
        assert clocks[-1] <= end.stats.total_seconds
        return end.stats.target_steps, end.stats.cached_tokens

    (whole_text, _), (cut, cached) = [asyncio.run(steps(lives)) for lives in ([], [3])]
    assert whole_text < 50
    assert cut <= whole_text + 8
    assert cached == 0


def test_a_text_that_differs_when_it_is_said_again(llm: LLM) -> None:
    """Reports on the prompt make it be said again: what was given out must come once more."""

    class Liar(Mortal):
        async def ask(self, ask: GenerateRequest) -> AsyncGenerator[Said]:
            if self.asked:
                ask = replace(ask, params=replace(ask.params, seed=99))
            async for said in super().ask(ask):
                yield said

    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True, prompt_logprobs=0, temperature=1.5)
    with pytest.raises(PronkError, match="expected the text that was given out before, found another; ask again"):
        asyncio.run(collect(front(llm, Liar(llm, [6])), params))


def test_a_request_that_kills_whoever_takes_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pronk.replicas.dispatcher._PAUSE", 0.0)
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
    monkeypatch.setattr("pronk.replicas.dispatcher._GRACE", 0.05)

    class Still(Mortal):
        async def ask(self, ask: GenerateRequest) -> AsyncGenerator[Said]:
            yield RequestAccepted("still", "one")
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
    monkeypatch.setattr("pronk.replicas.dispatcher._PAUSE", 0.0)
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True, prompt_logprobs=0, temperature=0.8)

    async def main() -> None:
        want = whole(await collect(front(llm, Mortal(llm, [])), params, drafter="autoregressive"))
        replicas = Mortal(llm, [6, 5, 4, 3, 2])
        made = front(llm, replicas)
        again = await collect(made, params, drafter="autoregressive")
        assert whole(again) == want
        assert made.resumed == 5
        (end,) = [piece.completion for piece in again if piece.completion is not None]
        assert [sum(step.tokens for step in end.stats.steps), end.stats.target_steps] == [20, 20]  # and not twice
        assert not made._held
        assert not made._fallen
        assert not made._loads
        # But not for ever: whoever says the same again and dies of it each time has a poisonous request.
        poisoned = Mortal(llm, [6] * 100)
        with pytest.raises(ClosedError, match="found 9 that ended one after the other"):
            await collect(front(llm, poisoned), params, drafter="autoregressive")
        assert len(poisoned.asked) == 9

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
    assert made.llm.get_proposer().name == "recycling"
    assert made.llm.get_proposer("suffix(max_match=3)") == Suffix(max_match=3)
    with pytest.raises(OptionError, match="unknown drafter 'nobody'"):
        made.llm.get_proposer("nobody")


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


def test_a_replica_that_says_no_more_before_the_end_has_died(llm: LLM) -> None:
    class Quiet(Mortal):
        async def ask(self, ask: GenerateRequest) -> AsyncGenerator[Said]:
            try:
                async for said in super().ask(ask):
                    yield said
            except ReplicaLostError:
                return

    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    made = front(llm, Quiet(llm, [4, 3]))
    assert len(asyncio.run(collect(made, params))) == 20
    assert made.resumed == 2


class Future:
    def __init__(self) -> None:
        self.left = False

    def cancelled(self) -> bool:
        return self.left


def test_who_is_busy_is_known_from_the_choice_on() -> None:
    busy, futures = InFlight[str](), [Future() for _ in range(4)]
    assert busy.counts("ab") == {"a": 0, "b": 0}
    busy.choose("1", "a", futures[0])
    assert busy.counts("ab") == {"a": 1, "b": 0}
    busy.take("1", "b")  # "a" had no room
    assert busy.counts("ab") == {"a": 0, "b": 1}
    busy.choose("2", "a", futures[1])
    futures[1].left = True  # who asked has left before it was sent
    assert busy.counts("ab") == {"a": 0, "b": 1}
    for name in ("2", "3"):  # of requests that nobody took the end is told as well
        busy.end(name, "a")
    assert busy.counts("ab") == {"a": 0, "b": 1}
    busy.choose("4", "a", futures[2])
    busy.end("4", "a")  # not taken, and sent once more
    busy.choose("4", "b", futures[2])
    busy.end("4", "a")  # which may be told late
    busy.take("4", "b")
    assert busy.counts("ab") == {"a": 0, "b": 2}
    busy.choose("5", "a", futures[3])
    busy.end("5", "a")  # it had ended before it was said that it was taken
    busy.take("5", "a")
    assert busy.counts("ab") == {"a": 0, "b": 2}
    busy.end("4", "b")
    busy.keep({"a"})
    assert busy.counts("ab") == {"a": 0, "b": 0}


def test_prompts_that_begin_alike_go_to_one_replica() -> None:
    routes = PrefixRoutes()
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
