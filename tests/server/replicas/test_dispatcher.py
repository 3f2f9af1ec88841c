"""Dispatcher: one stream with the text of a single model, whenever replicas die."""

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adapters import write_adapter
from checkpoints import MakeCheckpoint
from pronk import BITS, LLM, AsyncLLM, SamplingParams
from pronk.base.errors import (
    ClosedError,
    DeadlineError,
    OptionError,
    OverloadedError,
    PronkError,
    ResumeError,
)
from pronk.cache.budget import BLOCK_SIZE
from pronk.drafting import Suffix
from pronk.engine.outputs import Piece
from pronk.engine.request import Request
from pronk.kernels.library import candidates
from pronk.server.replicas.dispatcher import Dispatcher, ModelReader, ReplicaLostError
from pronk.server.replicas.messages import (
    GenerateRequest,
    ReplicaInfo,
    ReplicaMessage,
    RequestAccepted,
    RequestFailed,
    StepReply,
    identity,
)
from pronk.server.replicas.prefix_routes import InFlightRequests, PrefixRoutes, prefix_digests
from server.serving import hold_requests
from waiting import HUNG, ShiftedClock, until

PROMPT = "def add(a, b):\n    return a + b\n\n\nclass Stack:\n"
INSTRUCTION_SETS = [each.name for each in candidates(bits="portable")]  # the widest first
# identities of replicas
ONE = '{"bits": "portable 1"}'
OTHER = '{"bits": "fast avx2"}'


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    return LLM(threads=1, prefix_cache=True)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Go on with the next replica at once: those of the tests need no time to start."""
    monkeypatch.setattr("pronk.server.replicas.dispatcher._PAUSE", 0.0)


class DyingReplicas:
    """Replicas in this process; ``lives`` has the number of steps after which each dies."""

    def __init__(self, llm: LLM, lives: Sequence[int], identities: Sequence[str] = ()) -> None:
        self.engines = [AsyncLLM(llm)]  # that of each request in turn
        self.lives = [*lives]
        self.identities = [*identities]
        self.requests: list[GenerateRequest] = []
        self.exact = True

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[ReplicaMessage]:
        self.requests.append(request)
        steps_left = self.lives.pop(0) if self.lives else 1_000
        identity = self.identities.pop(0) if self.identities else ONE
        engine = self.engines[(len(self.requests) - 1) % len(self.engines)]
        yield RequestAccepted(f"replica {len(self.requests)}", identity, exact=self.exact)
        assert request.identity in (None, identity), "the stream goes on after a mismatch"
        options: Any = {
            "drafter": request.drafter,
            "adapter": request.adapter,
            "given": request.given,
            "branch_positions": request.branch_positions,
        }
        steps = engine.steps(request.prompts, request.params, **options)
        try:
            async with aclosing(steps):
                async for pieces in steps:
                    if not steps_left:
                        raise ReplicaLostError("the replica died")
                    steps_left -= 1
                    yield StepReply(pieces, engine.load)
        except PronkError as error:
            yield RequestFailed(error)


def dispatcher(llm: LLM, replicas: Any, **options: Any) -> Dispatcher:
    about = ReplicaInfo(ONE, identity(llm, {})[1], llm.kernels, "recycling")
    return Dispatcher(ModelReader(llm.path, "recycling", about), replicas, **options)


async def collect(
    made: Dispatcher, params: SamplingParams, prompts: Sequence[str] = (PROMPT,), **more: Any
) -> list[Piece]:
    return [piece async for pieces in made.steps([*prompts], params, **more) for piece in pieces]


def whole(pieces: Sequence[Piece]) -> list[Any]:
    """Return the pieces and the completion of each sample without statistics; check that they
    agree.
    """
    found = []
    for index in sorted({piece.index for piece in pieces}):
        own = [piece for piece in pieces if piece.index == index]
        (end,) = [piece.completion for piece in own if piece.completion is not None]
        assert own[-1].completion is end
        assert [piece.token_id for piece in own] == end.token_ids
        assert "".join(piece.text for piece in own) == end.text
        assert [piece.step for piece in own] == sorted(piece.step for piece in own)
        result = (
            end.text,
            end.token_ids,
            end.logprobs,
            end.prompt_logprobs,
            end.finish_reason,
            end.stop_reason,
            end.seed,
        )
        found.append(([(piece.token_id, piece.text, piece.logprobs) for piece in own], *result))
    return found


def test_texts_of_adapters_are_independent_of_deaths(
    checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """The replica that continues a text uses the same adapter; adapters are part of the identity of
    replicas.
    """
    model = checkpoint("llama")
    llm = LLM(
        model, adapters={"a": write_adapter(tmp_path / "a", model)}, threads=1, prefix_cache=True
    )
    params = SamplingParams(max_tokens=24, seed=7, ignore_eos=True, logprobs=1)
    want = [llm.generate(PROMPT, params, adapter=name) for name in (None, "a")]
    assert want[0].token_ids != want[1].token_ids
    for name, one in zip((None, "a"), want, strict=True):
        replicas = DyingReplicas(llm, [3, 5])
        pieces = asyncio.run(collect(dispatcher(llm, replicas), params, adapter=name))
        assert whole(pieces)[0][2:4] == (one.token_ids, one.logprobs)
        assert len(replicas.requests) == 3
    plain = LLM(model, threads=1)
    assert identity(llm, {})[0] != identity(plain, {})[0]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.9, "logprobs": 2, "n": 2, "repetition_penalty": 1.2},
        {"temperature": 0.7, "prompt_logprobs": 1, "logprobs": 0},
        {"temperature": 1.0, "stop": ("(", "self"), "ignore_eos": False},
    ],
)
def test_text_is_independent_of_deaths(llm: LLM, options: dict[str, Any]) -> None:
    params = SamplingParams(**{"max_tokens": 24, "seed": 7, "ignore_eos": True, **options})

    async def main() -> None:
        want = whole(await collect(dispatcher(llm, DyingReplicas(llm, [])), params))
        for lives in ([0], [1], [2, 3], [5, 0, 6, 7], [3, 6, 9, 12]):
            replicas = DyingReplicas(llm, lives)
            made = dispatcher(llm, replicas)
            assert whole(await collect(made, params)) == want
            assert made.resumed == len(replicas.requests) - 1 > 0
            assert made.num_requests == 0

    asyncio.run(main())


def test_replicas_get_the_branch_positions(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    added = list[Request]()
    add = llm.engine.add

    def record(request: Request) -> None:
        added.append(request)
        add(request)

    monkeypatch.setattr(llm.engine, "add", record)
    replicas = DyingReplicas(llm, [4])
    made = dispatcher(llm, replicas)
    asyncio.run(collect(made, params, branch_positions=[(1, 2)]))
    assert [request.branch_positions for request in replicas.requests] == [[(1, 2)]] * 2
    assert [request.branch_positions for request in added] == [(1, 2)] * 2


def test_request_without_a_seed_keeps_one_seed(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True)

    async def main() -> None:
        replicas = DyingReplicas(llm, [4, 4])
        ((*_, seed),) = whole(await collect(dispatcher(llm, replicas), params))
        assert {request.params.seed for request in replicas.requests} == {seed}
        assert (
            whole(
                await collect(dispatcher(llm, DyingReplicas(llm, [])), replace(params, seed=seed))
            )[0][-1]
            == seed
        )

    asyncio.run(main())


def test_another_model_does_not_resume(llm: LLM) -> None:
    """Another model may start a text, but a text in progress waits for a replica of its own
    model.
    """
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)

    async def main() -> None:
        want = whole(await collect(dispatcher(llm, DyingReplicas(llm, [])), params))
        made = dispatcher(llm, DyingReplicas(llm, [4], [ONE, *[OTHER] * 3]))
        message = (
            r"expected a replica of the same model and bits .* found bits fast avx2 instead of "
            r"portable 1; try again"
        )
        with pytest.raises(ResumeError, match=message):
            await collect(made, params)
        assert not made._active
        replicas = DyingReplicas(llm, [4], [ONE, OTHER])
        assert whole(await collect(dispatcher(llm, replicas), params)) == want
        # The router sends the prompt to the last replica with its prefix, so the request must
        # exclude it.
        assert [request.avoid for request in replicas.requests] == [
            frozenset(),
            frozenset(),
            {"replica 2"},
        ]
        assert (
            whole(await collect(dispatcher(llm, DyingReplicas(llm, [0], [ONE, OTHER])), params))
            == want
        )

    asyncio.run(main())


def test_inexact_kernels_do_not_resume(llm: LLM) -> None:
    """The rule ``rejection`` resumes all the same, because it does not promise one text per
    seed.
    """
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True, temperature=0.8)

    async def main() -> None:
        for own, lives in ((params, [4]), (replace(params, rule="rejection"), [4]), (params, [0])):
            replicas = DyingReplicas(llm, lives)
            replicas.exact = False
            if own is params and lives[0]:
                with pytest.raises(
                    ResumeError, match=r"expected bits that do not depend on the batch .* try again"
                ):
                    await collect(dispatcher(llm, replicas), own)
            else:
                assert len(await collect(dispatcher(llm, replicas), own)) == 20

    asyncio.run(main())


def copy(llm: LLM, folder: Path, **config: Any) -> Path:
    """Copy the model and change values of its config."""
    shutil.copytree(llm.path, folder, symlinks=True)
    file = folder / "config.json"
    file.chmod(0o644)
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


@pytest.mark.parametrize(
    "config", [{"rope_theta": 500.0}, {"rms_norm_eps": 0.01}, {"max_position_embeddings": 1024}, {}]
)
def test_identity_covers_the_config(llm: LLM, tmp_path: Path, config: dict[str, Any]) -> None:
    own = identity(llm, {})
    other = LLM(copy(llm, tmp_path / "model", **config), threads=1)
    assert (identity(other, {}) == own) == (not config)
    about = ReplicaInfo(*own, llm.kernels, "recycling")
    if config:
        with pytest.raises(
            OptionError, match=r"replicas: expected the server's config, .*; found "
        ) as caught:
            ModelReader(other.path, "recycling", about)
        assert "\n" not in str(caught.value)
    else:
        assert ModelReader(other.path, "recycling", about).about == about


def test_identity_covers_the_tokenizer(llm: LLM, tmp_path: Path) -> None:
    folder = copy(llm, tmp_path / "model")
    file = folder / "tokenizer.json"
    file.chmod(0o644)
    content = json.loads(file.read_text())
    content["model"]["merges"] = content["model"]["merges"][::-1]
    file.write_text(json.dumps(content))
    own = identity(llm, {})
    assert identity(LLM(folder, threads=1), {}) != own
    with pytest.raises(OptionError, match="replicas: expected the server's tokenizer"):
        ModelReader(folder, "recycling", ReplicaInfo(*own, llm.kernels, "recycling"))


def test_the_server_knows_the_end_tokens_of_replicas(llm: LLM, tmp_path: Path) -> None:
    """They include tokens that only the tokenizer names; the config of the files has none here."""
    folder = copy(llm, tmp_path / "model", eos_token_id=None)
    made = LLM(folder, threads=1)
    reader = ModelReader(
        folder, "recycling", ReplicaInfo(*identity(made, {}), made.kernels, "recycling")
    )
    assert reader.config.eos_ids == made.config.eos_ids != ()


def test_identity_covers_formats_and_bits(llm: LLM) -> None:
    own, model = identity(llm, {})
    for options in (
        {"weights": "int8"},
        {"kv_dtype": "int8"},
        {"workers": 2, "parallel": "tensor"},
    ):
        assert identity(llm, options)[1] != model
    # same bits as one worker
    assert identity(llm, {"workers": 2, "parallel": "tree"}) == (own, model)
    portable = [
        LLM(threads=1, kernels=name, bits="portable", calibration=False)
        for name in INSTRUCTION_SETS[:2]
    ]
    found = {identity(each, {}) for each in portable}
    expected = json.dumps({**json.loads(model), "bits": f"portable {BITS}"})
    assert found == {(expected, model)}
    assert (own == expected) == (llm.bits == "portable")
    assert ReplicaInfo(expected, model, "avx2", "suffix").bits == "portable"
    assert ReplicaInfo(own, model, llm.kernels, "suffix").bits == llm.bits


def test_replicas_of_other_processors_continue_a_text() -> None:
    """Replicas with AVX2 and with the widest kernels die in turn; text and log-probabilities are
    those of plain decoding, also if prompt log-probabilities need a replay.
    """
    if "avx2" not in INSTRUCTION_SETS[1:]:
        pytest.skip("expected a processor with AVX2 and wider instructions")
    options: dict[str, Any] = {"threads": 1, "prefix_cache": True, "bits": "portable"}
    kernels = ("avx2", INSTRUCTION_SETS[0])
    llms = [LLM(kernels=name, calibration=False, **options) for name in kernels]
    assert [each.kernels for each in llms] == [*kernels]
    shared = {"max_tokens": 24, "seed": 7, "ignore_eos": True, "logprobs": 2}
    identities = [identity(each, {})[0] for each in llms]
    for own in ({"temperature": 0.9, "top_p": 0.9}, {"temperature": 0.7, "prompt_logprobs": 1}):
        params = SamplingParams(**shared, **own)
        want = llms[1].generate(PROMPT, params, drafter="autoregressive")
        replicas = DyingReplicas(llms[0], [2, 3, 2], identities * 2)
        replicas.engines = [AsyncLLM(each) for each in llms]
        pieces = asyncio.run(collect(dispatcher(llms[0], replicas), params))
        found = whole(pieces)[0]
        assert found[1:5] == (want.text, want.token_ids, want.logprobs, want.prompt_logprobs)
        assert len(replicas.requests) == 4


@pytest.mark.few(2)
@pytest.mark.parametrize("spec", ["prompt_lookup", "suffix", "recycling", "lookahead"])
def test_drafters_know_the_text_before_a_death(llm: LLM, spec: str) -> None:
    params = SamplingParams(max_tokens=64, seed=7, ignore_eos=True)
    prompt = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n    return a +"

    async def steps(lives: Sequence[int]) -> tuple[int, int]:
        made = dispatcher(LLM(threads=1, budget="all"), DyingReplicas(llm, lives))
        made._replicas.engines = [AsyncLLM(LLM(threads=1, budget="all"))]  # type: ignore[attr-defined]
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

    (num_steps, _), (num_resumed_steps, cached) = [asyncio.run(steps(lives)) for lives in ([], [3])]
    assert num_steps < 50
    assert num_resumed_steps <= num_steps + 8
    assert cached == 0


def test_replay_with_other_tokens_fails(llm: LLM) -> None:
    """With ``prompt_logprobs`` the text is generated again and must equal the delivered pieces."""

    class OtherSeed(DyingReplicas):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[ReplicaMessage]:
            if self.requests:
                request = replace(request, params=replace(request.params, seed=99))
            async for message in super().generate(request):
                yield message

    params = SamplingParams(
        max_tokens=20, seed=1, ignore_eos=True, prompt_logprobs=0, temperature=1.5
    )
    with pytest.raises(
        PronkError, match="expected the tokens of the replica that ended, found others; try again"
    ):
        asyncio.run(collect(dispatcher(llm, OtherSeed(llm, [6])), params))


def test_request_that_kills_every_replica_fails(llm: LLM) -> None:
    replicas = DyingReplicas(llm, [0] * 50)
    with pytest.raises(ClosedError, match="found 3 that ended in a row"):
        asyncio.run(collect(dispatcher(llm, replicas), SamplingParams(max_tokens=4)))
    assert len(replicas.requests) == 3


def test_invalid_requests_are_not_retried(llm: LLM) -> None:
    async def main() -> None:
        replicas = DyingReplicas(llm, [])
        made = dispatcher(llm, replicas, max_requests=2)
        with pytest.raises(OptionError, match="max_tokens"):
            await collect(made, SamplingParams(max_tokens=100_000))
        with pytest.raises(OptionError, match="n: expected at most 2 samples at a time, found 3"):
            await collect(made, SamplingParams(n=3))
        first = made.steps([PROMPT], SamplingParams(max_tokens=400, ignore_eos=True))
        async with aclosing(first):
            await anext(first)
            with pytest.raises(
                OverloadedError, match="expected at most 2 requests at a time, found 2 more"
            ):
                await collect(made, SamplingParams(n=2))
        with pytest.raises(DeadlineError, match="not done by its deadline"):
            await collect(made, SamplingParams(), deadline=0.0)
        assert len(replicas.requests) == 2
        assert made.num_requests == 0
        made.stop()
        assert not made.alive
        with pytest.raises(ClosedError):
            await collect(made, SamplingParams())

    asyncio.run(main())


def test_the_deadline_counts_while_prompts_wait_for_a_thread(llm: LLM) -> None:
    gate = threading.Event()

    async def main() -> None:
        made = dispatcher(llm, DyingReplicas(llm, []))
        for _ in range(2):
            made.executor.submit("", lambda: gate.wait(HUNG), size=1)
        steps = made.steps([PROMPT], deadline=0.05)
        try:
            with pytest.raises(DeadlineError, match="not done by its deadline"):
                await anext(steps)
        finally:
            gate.set()

    asyncio.run(main())


def test_deadline_ends_a_request_on_a_stalled_replica(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ShiftedClock()
    monkeypatch.setattr("pronk.server.replicas.dispatcher._GRACE", 0.05)
    monkeypatch.setattr("pronk.server.replicas.dispatcher.perf_counter", clock)

    class Stalled(DyingReplicas):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[ReplicaMessage]:
            clock.shift = 2 * HUNG
            yield RequestAccepted("stalled", ONE)
            await asyncio.Event().wait()

    async def main() -> None:
        made = dispatcher(llm, Stalled(llm, []))
        with pytest.raises(DeadlineError, match="its replica does not respond"):
            await asyncio.wait_for(collect(made, SamplingParams(), deadline=2 * HUNG), HUNG)
        assert made.num_requests == 0
        assert not made._active

    asyncio.run(main())


def test_deaths_during_replay_carry_no_blame(llm: LLM) -> None:
    """With ``prompt_logprobs`` each replica replays the text from its beginning."""
    params = SamplingParams(
        max_tokens=20, seed=1, ignore_eos=True, prompt_logprobs=0, temperature=0.8
    )

    async def main() -> None:
        want = whole(
            await collect(dispatcher(llm, DyingReplicas(llm, [])), params, drafter="autoregressive")
        )
        replicas = DyingReplicas(llm, [6, 5, 4, 3, 2])
        made = dispatcher(llm, replicas)
        again = await collect(made, params, drafter="autoregressive")
        assert whole(again) == want
        assert made.resumed == 5
        (end,) = [piece.completion for piece in again if piece.completion is not None]
        # without replays
        assert [sum(step.tokens for step in end.stats.steps), end.stats.target_steps] == [20, 20]
        assert not made._active
        assert not made._active_at_death
        assert not made._loads
        # A request that kills every replica fails after 9 replicas.
        poisoned = DyingReplicas(llm, [6] * 100)
        with pytest.raises(ClosedError, match="found 9 that ended in a row"):
            await collect(dispatcher(llm, poisoned), params, drafter="autoregressive")
        assert len(poisoned.requests) == 9

    asyncio.run(main())


def test_rejection_rule_does_not_replay(llm: LLM) -> None:
    """The text depends on the draft tokens, which may differ on another replica."""
    params = SamplingParams(
        max_tokens=20, seed=1, ignore_eos=True, rule="rejection", temperature=0.8
    )

    async def main() -> None:
        assert len(await collect(dispatcher(llm, DyingReplicas(llm, [4])), params)) == 20
        with pytest.raises(
            PronkError,
            match=r'prompt_logprobs: expected rule="coupled" to resume .* found "rejection"',
        ):
            await collect(
                dispatcher(llm, DyingReplicas(llm, [4])), replace(params, prompt_logprobs=0)
            )

    asyncio.run(main())


def test_get_proposer_checks_drafters(llm: LLM) -> None:
    made = dispatcher(llm, DyingReplicas(llm, []))
    assert made.llm.get_proposer().name == "recycling"
    assert made.llm.get_proposer("suffix(max_match=3)") == Suffix(max_match=3)
    with pytest.raises(OptionError, match="found 'nobody'"):
        made.llm.get_proposer("nobody")


def test_cancelled_requests_leave_no_state(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_requests(llm, monkeypatch, num_tokens=1)

    async def main() -> None:
        replicas = DyingReplicas(llm, [])
        made = dispatcher(llm, replicas)
        steps = made.steps([PROMPT], SamplingParams(max_tokens=200, ignore_eos=True))
        async with aclosing(steps):
            await anext(steps)
            assert made.num_requests == 1
            assert made.load.running == 1
        assert made.num_requests == 0
        assert made.load.running == 0
        await until(lambda: not llm.engine.scheduler.running)

    asyncio.run(main())


def test_stream_that_ends_too_early_counts_as_a_death(llm: LLM) -> None:
    class Truncated(DyingReplicas):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[ReplicaMessage]:
            try:
                async for message in super().generate(request):
                    yield message
            except ReplicaLostError:
                return

    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    made = dispatcher(llm, Truncated(llm, [4, 3]))
    assert len(asyncio.run(collect(made, params))) == 20
    assert made.resumed == 2


class Future:
    def __init__(self) -> None:
        self.is_cancelled = False

    def cancelled(self) -> bool:
        return self.is_cancelled


def test_in_flight_counts_requests_from_the_selection_on() -> None:
    busy = InFlightRequests[str]()
    futures = [Future() for _ in range(4)]
    assert busy.count_requests("ab") == {"a": 0, "b": 0}
    busy.choose("1", "a", futures[0])
    assert busy.count_requests("ab") == {"a": 1, "b": 0}
    busy.accept("1", "b")  # accepted by "b" after a rejection by "a"
    assert busy.count_requests("ab") == {"a": 0, "b": 1}
    busy.choose("2", "a", futures[1])
    futures[1].is_cancelled = True  # cancelled before any replica has accepted it
    assert busy.count_requests("ab") == {"a": 0, "b": 1}
    for name in ("2", "3"):  # Ray reports the end of requests that no replica accepted, too
        busy.end(name, "a")
    assert busy.count_requests("ab") == {"a": 0, "b": 1}
    busy.choose("4", "a", futures[2])
    busy.end("4", "a")  # "a" rejects the request, which is routed to "b"
    busy.choose("4", "b", futures[2])
    busy.end("4", "a")  # a second, late report
    busy.accept("4", "b")
    assert busy.count_requests("ab") == {"a": 0, "b": 2}
    busy.choose("5", "a", futures[3])
    busy.end("5", "a")  # the end is reported before the acceptance
    busy.accept("5", "a")
    assert busy.count_requests("ab") == {"a": 0, "b": 2}
    busy.end("4", "b")
    busy.retain_replicas({"a"})
    assert busy.count_requests("ab") == {"a": 0, "b": 0}


def test_prompts_with_one_prefix_go_to_one_replica() -> None:
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
    routes.learn(digests[1], "b")  # the shared prefix now belongs to "b"
    assert routes.choose(digests[2], {"a": 0, "b": 3}) == "b"
    assert routes.choose(digests[0], {"a": 0, "b": 0}) == "a"
    # "a" has the prefix but is much busier
    assert routes.choose(digests[0], {"a": 9, "b": 0}) == "b"
    # "a" is gone; "b" has the shorter prefix
    assert routes.choose(digests[0], {"b": 5, "c": 1}) == "b"
    assert routes.choose((), {"a": 2, "b": 1}) == "b"
    routes.retain_replicas({"a"})
    assert routes.choose(digests[1], {"b": 0, "a": 3}) == "b"  # the prefixes of "b" are dropped
    assert routes.choose(digests[0], {"b": 0, "a": 3}) == "a"
    routes.retain_replicas(())
    assert routes.choose(digests[0], {"b": 0, "a": 3}) == "b"


def test_embeddings_are_refused_by_name(llm: LLM) -> None:
    message = (
        "input: expected a server that computes embeddings, found replicas; start pronk serve "
        "without --replicas"
    )
    with pytest.raises(OptionError, match=message):
        asyncio.run(dispatcher(llm, None).embed(["a"], pooling="mean"))


def test_ready_means_that_a_replica_answers(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pronk.server.replicas.dispatcher._READY_TIMEOUT", HUNG)
    monkeypatch.setattr("pronk.server.replicas.dispatcher._READY_SECONDS", HUNG)

    class Answering(DyingReplicas):
        # of the next calls; the last one is repeated
        answers: Sequence[str] = ("lost", "fine", "silent")
        calls = 0

        async def about_async(self) -> ReplicaInfo:
            answer = self.answers[min(self.calls, len(self.answers) - 1)]
            self.calls += 1
            if answer == "silent":
                await asyncio.Event().wait()
            if answer == "lost":
                raise ReplicaLostError("the replica died")
            return made.llm.about

    replicas = Answering(llm, [])
    made = dispatcher(llm, replicas)

    async def main() -> None:
        assert await made.is_ready()  # the second replica answers
        assert await made.is_ready()  # the answer is still valid
        assert replicas.calls == 2
        made._ready_until = 0.0  # the answer is not valid any more
        monkeypatch.setattr("pronk.server.replicas.dispatcher._READY_TIMEOUT", 0.3)
        assert not await made.is_ready()
        replicas.answers = ("lost",)
        assert not await made.is_ready()
        replicas.answers = ("fine",)
        monkeypatch.setattr("pronk.server.replicas.dispatcher._READY_TIMEOUT", HUNG)
        assert await made.is_ready()
        made.stop()
        assert not await made.is_ready()

    asyncio.run(asyncio.wait_for(main(), HUNG))
