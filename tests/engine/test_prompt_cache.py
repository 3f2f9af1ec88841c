"""Prompt cache on disk: texts that continue from disk have the tokens, bits and draft tokens of a
fresh computation.
"""

from collections.abc import Iterator, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

from drafting.drafting import Watched
from drafting.trees import TreeDrafter, oracle_trees
from engine.cases import (
    CORE,
    DRAFTERS,
    OPTIONS,
    ask,
    assert_not_vacuous,
    assert_same,
    drafter,
    engine_of,
    params,
    plain,
    step_until_ended,
    text,
    texts,
    total,
)
from engine.test_drafters_prefixes import AGAIN, FIRST, ONCE, conversation
from engine.test_equality import VARIANTS
from engine.test_shared_pool import WITH_POOLS
from pronk.base.arrays import BFLOAT16, FLOAT32, INT4, INT8, DType
from pronk.cache import block_store, prompt_cache
from pronk.cache.block_store import BlockStore
from pronk.cache.prompt_cache import PromptCache
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.models.cost_model import CostModel
from pronk.models.decoder import Decoder
from pronk.sampling.params import SamplingParams
from pronk.sampling.tree import TokenTree
from tiny_models import (
    assert_idle,
    make_engine,
    make_request,
    run,
    run_alone,
    samples,
    tiny_decoder,
)

BLOCK = 16


class Server:
    """Engines on one folder, as a server that is started several times."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stores: list[BlockStore] = []

    def start(
        self, decoder: Decoder, identity: str = "tiny", *, max_bytes: int = 1 << 30, **options: Any
    ) -> Engine:
        """Return a new engine, with an empty KV cache; the engine before is closed."""
        return self.attach(
            make_engine(decoder, share_prefixes=True, **options), identity, max_bytes
        )

    def attach(self, engine: Engine, identity: str = "tiny", max_bytes: int = 1 << 30) -> Engine:
        self.close()
        self.stores.append(BlockStore(self.folder, max_bytes))
        PromptCache(self.stores[-1], identity).attach(engine.cache)
        return engine

    def close(self) -> None:
        for store in self.stores:
            store.close()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    yield from servers(tmp_path, monkeypatch)


def servers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Yield engines that read whatever is on disk; with models as small as these, computing is
    faster.
    """
    monkeypatch.setattr(PromptCache, "_pays", lambda *_: True)
    made = Server(folder)
    yield made
    made.close()


def turn(
    engine: Engine,
    prompt: Sequence[int],
    params: SamplingParams,
    made: Any = None,
    salt: bytes = b"",
) -> tuple[Request, list[Any]]:
    """Run one request alone; return it and its proposals."""
    proposer = None if made is None else Watched(made.bind(engine.target))
    request = make_request(prompt, params, proposer)
    request.salt = salt
    run(engine, [request])
    notes = [] if proposer is None else proposer.of(request)
    return request, [
        (note.tokens, note.tree.tokens, note.tree.parents, note.path) for note in notes
    ]


MODELS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": BFLOAT16},
    "int8 cache": {"kv_dtype": INT8},
    "int8 cache of bfloat16": {"dtype": BFLOAT16, "kv_dtype": INT8},
    "int4 cache of bfloat16": {"dtype": BFLOAT16, "kv_dtype": INT4},
    "int4 weights": {"weights": "int4"},
    "gpt-2": {"classic": True},
    "two windows": {"windows": (50, 30)},
    "a window and none": {"windows": (50, None)},
    "heads of 32": {"head_dim": 32, "kv_heads": 3},
    "heads of several sizes": {"special": "gemma4", "windows": (50, None, 50, None)},
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", MODELS)
def test_continuations_from_disk_are_equal(name: str, server: Server) -> None:
    """The prompt of the second turn is read from disk, and its tokens and log-probabilities are
    those of no cache.
    """
    options = dict(MODELS[name])
    kv_dtype = options.pop("kv_dtype", None)
    decoder = tiny_decoder(options.pop("dtype", FLOAT32), **options)
    first, _ = turn(server.start(decoder, kv_dtype=kv_dtype), FIRST, ONCE)
    prompt = [*first.tokens, *text(4, 23)]
    plain, _ = turn(make_engine(decoder, kv_dtype=kv_dtype), prompt, AGAIN)
    engine = server.start(decoder, kv_dtype=kv_dtype)
    got, _ = turn(engine, prompt, AGAIN)
    assert_same([got], [plain])
    assert got.stats.disk_tokens == got.stats.cached_tokens == 128
    assert server.stores[-1].counts.blocks_read == (4 if name == "two windows" else 8)
    assert len(plain.output) == 40
    assert plain.stats.disk_tokens == plain.stats.cached_tokens == 0
    server.stores[-1].flush()
    # from memory, and from disk where blocks before the window are missing
    third, _ = turn(engine, prompt, AGAIN)
    assert_same([third], [plain])
    assert third.stats.cached_tokens == 160
    assert (third.stats.disk_tokens == 0) == (name != "two windows")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "dtype", [pytest.param(FLOAT32, marks=pytest.mark.slow), BFLOAT16], ids=str
)
@pytest.mark.parametrize(
    "name",
    [
        name if name in (*WITH_POOLS, "suffix") else pytest.param(name, marks=pytest.mark.slow)
        for name in DRAFTERS
    ],
)
def test_drafters_propose_as_after_a_fresh_prompt(name: str, dtype: DType, server: Server) -> None:
    decoder = tiny_decoder(dtype)
    prompts = conversation(decoder)
    known = [run_alone(decoder, prompts[0], ONCE), run_alone(decoder, prompts[1], AGAIN)]
    made = drafter(name, known)
    fresh, trees = turn(make_engine(decoder), prompts[1], AGAIN, made)
    turn(server.start(decoder), prompts[0], ONCE, made)
    got, others = turn(server.start(decoder), prompts[1], AGAIN, made)
    assert_same([got, fresh], [known[1], known[1]])
    assert others == trees
    assert (got.stats.drafted > 0) == (name != "autoregressive")
    assert got.stats.disk_tokens == got.stats.cached_tokens == 128


def ask_twice(
    server: Server, names: Sequence[str], options: str, dtype: DType, **variant: Any
) -> list[list[Request]]:
    """Decode a ragged batch, prompt number i with drafter number i modulo their count, computed and
    then from disk.
    """
    want = plain(dtype, options, **variant)
    found = list[list[Request]]()
    for _ in range(2):
        engine = server.attach(engine_of(dtype, share_prefixes=True, **variant))
        proposers = cycle([drafter(name, want).bind(engine.target) for name in names])
        got = [
            ask(request.prompt, params(options, i), next(proposers))
            for i, request in enumerate(want)
        ]
        run(engine, got)
        assert_same(got, want)
        found.append(got)
    assert total(found[0], "disk_tokens") == 0
    return found


MOSTLY = [("adversarial", options, BFLOAT16) for options in ("greedy", "all")]
CASES = [
    pytest.param(*case, marks=() if fast else pytest.mark.slow)
    for case in product(DRAFTERS, OPTIONS, (FLOAT32, BFLOAT16))
    for fast in [
        case in MOSTLY or (case[0] == "oracle" and case[1] in CORE and case[2] is BFLOAT16)
    ]
]
# Variants of the model whose blocks have the form of another variant's.
SAME_BLOCKS = (
    *("group 1", "group 2", "group 8", "classic", "experts", "experts, int4"),
    *("int8", "int4", "stored blocks", "int8 cache, int4"),
)


@pytest.mark.few(4)
@pytest.mark.parametrize(("name", "options", "dtype"), CASES, ids=str)
def test_equality_matrix(name: str, options: str, dtype: DType, server: Server) -> None:
    """Every drafter with all sampling options."""
    for got in ask_twice(server, [name], options, dtype):
        assert_not_vacuous(name, got)
    assert [each.stats.disk_tokens for each in got] == [
        (len(each.prompt) - 1) // BLOCK * BLOCK for each in got
    ]


@pytest.mark.few(11)
@pytest.mark.parametrize(
    "dtype", [pytest.param(FLOAT32, marks=pytest.mark.slow), BFLOAT16], ids=str
)
@pytest.mark.parametrize("options", ["temperature", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, marks=pytest.mark.slow if variant in SAME_BLOCKS else ())
        for variant in VARIANTS
    ],
)
def test_other_models_and_mixed_batches(
    variant: str, options: str, dtype: DType, server: Server
) -> None:
    names = ("oracle", "adversarial", "prompt_lookup", "random")
    got = ask_twice(server, names, options, dtype, **VARIANTS[variant])[1]
    assert total(got, "accepted") > 0
    # keys depend on the length of the prompt, so nothing is shared
    dynamic = VARIANTS[variant].get("dynamic")
    assert (total(got, "disk_tokens") > 1000) != bool(dynamic)


def test_kept_features_belong_to_the_blocks(server: Server) -> None:
    """Blocks without the features that a head reads are not used, and neither are those of another
    head or layer.
    """
    found = disk_tokens(server, ["autoregressive", "eagle3", "mtp"])
    assert not {name for (name, again), tokens in found.items() if not again and tokens}
    assert all(tokens == 160 for (_, again), tokens in found.items() if again)


def disk_tokens(server: Server, drafters: Sequence[str]) -> dict[tuple[str, bool], int]:
    """Return the tokens that are read from disk for a prompt with each drafter, for the first and
    second time.
    """
    decoder = tiny_decoder()
    prompts = conversation(decoder)
    found = dict[tuple[str, bool], int]()
    for name in drafters:
        for again in (False, True):
            engine = server.start(decoder)
            proposer = drafter(name, ()).bind(engine.target)
            request = make_request(prompts[1], AGAIN, proposer)
            run(engine, [request])
            assert_same([request], [run_alone(decoder, prompts[1], AGAIN)])
            found[proposer.name, again] = request.stats.disk_tokens
    return found


def test_nothing_is_shared_across_salts_and_identities(server: Server) -> None:
    decoder = tiny_decoder()
    prompt = conversation(tiny_decoder())[1]
    turn(server.start(decoder), prompt, ONCE, salt=b"one")
    want = run_alone(decoder, prompt, AGAIN)
    cases = {
        (b"one", "tiny"): True,
        (b"other", "tiny"): False,
        (b"", "tiny"): False,
        (b"one", "other model"): False,
    }
    for (salt, identity), hits in cases.items():
        got, _ = turn(server.start(decoder, identity), prompt, AGAIN, salt=salt)
        assert_same([got], [want])
        assert got.stats.disk_tokens == (160 if hits else 0)


@pytest.mark.parametrize(
    "other", [{"kv_dtype": INT8}, {"kv_dtype": INT4}, {"block_size": 32}], ids=str
)
def test_another_form_of_the_cache_shares_nothing(other: dict[str, Any], server: Server) -> None:
    decoder = tiny_decoder()
    prompt = text(3, 100)
    turn(server.start(decoder), prompt, ONCE)
    got, _ = turn(server.start(decoder, **other), prompt, ONCE)
    assert got.stats.disk_tokens == 0


def test_other_texts_share_their_common_blocks(server: Server) -> None:
    decoder = tiny_decoder()
    beginning = text(9, 70)
    turn(server.start(decoder), beginning + text(1, 60), ONCE)
    for length, tokens in ((70, 64), (64, 48), (65, 64), (17, 16), (16, 0)):
        engine = server.start(decoder)
        prompt = beginning[:length]
        got, _ = turn(engine, prompt + (text(2, 60) if length == 70 else []), AGAIN)
        assert got.stats.disk_tokens == tokens
        assert_same([got], [run_alone(decoder, got.prompt, AGAIN)])


def test_memory_is_continued_from_disk(server: Server) -> None:
    """The first blocks are in memory, the next ones on disk, and the last ones are computed."""
    decoder = tiny_decoder()
    whole = text(9, 200)
    turn(server.start(decoder), whole[:150], ONCE)
    engine = server.start(decoder)
    turn(engine, whole[:40], ONCE)
    got, _ = turn(engine, whole, AGAIN)
    assert_same([got], [run_alone(decoder, whole, AGAIN)])
    assert (got.stats.cached_tokens, got.stats.disk_tokens) == (144, 144 - 32)


def test_samples_of_a_prompt_share_the_blocks_that_were_read(server: Server) -> None:
    decoder = tiny_decoder()
    prompt = text(3, 100)
    options = SamplingParams(max_tokens=20, seed=1, temperature=0.8, n=3, logprobs=2)
    want = samples(prompt, options)
    run(make_engine(decoder), want)
    run(server.start(decoder), [make_request(prompt, ONCE)])
    got = samples(prompt, options)
    run(server.start(decoder), got)
    assert_same(got, want)
    assert [request.stats.disk_tokens for request in got] == [96, 0, 0]
    assert all(request.stats.cached_tokens >= 96 for request in got)


def test_preempted_requests_read_their_own_text(server: Server) -> None:
    """Two requests that together do not fit: blocks that memory has dropped come back from disk."""
    decoder = tiny_decoder()
    low, urgent = (
        make_request(text(seed, 100), SamplingParams(max_tokens=90, seed=seed)) for seed in (1, 2)
    )
    want = [run_alone(decoder, each.prompt, each.params) for each in (low, urgent)]
    engine = server.start(decoder, num_blocks=13, max_batch=2)
    urgent.priority = 1
    engine.add(low)
    while low.num_generated < 30:
        engine.step()
    server.stores[-1].flush()
    engine.add(urgent)
    step_until_ended(engine, [low, urgent])
    assert_same([low, urgent], want)
    assert low.stats.preemptions == 1
    assert low.stats.disk_tokens > 0


@pytest.fixture
def single_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read one block per part."""
    monkeypatch.setattr(prompt_cache, "_READ_BYTES", 1)


@pytest.mark.usefixtures("single_blocks")
def test_other_requests_go_on_while_blocks_are_read(server: Server) -> None:
    decoder = tiny_decoder()
    prompts = [text(3, 200), text(4, 20), text(5, 200)]
    counts = list[int]()
    options = SamplingParams(max_tokens=40, seed=1, temperature=0.8, logprobs=1)
    want = [run_alone(decoder, prompt, options) for prompt in prompts]
    for prompt in prompts:
        turn(server.start(decoder), prompt, ONCE)
    engine = server.start(decoder)
    got = [make_request(prompt, options) for prompt in prompts]
    engine.add(got[0])
    engine.step()  # no other request can go on meanwhile, so all blocks are read
    assert (got[0].num_generated, got[0].stats.disk_tokens) == (1, 192)
    engine.add(got[1])
    engine.step()
    assert (got[1].num_generated, got[1].stats.disk_tokens) == (1, 16)
    engine.add(got[2])
    while not got[2].num_generated:
        engine.step()
        counts.append(got[2].stats.disk_tokens)
    assert counts == [*range(16, 193, 16)]
    assert [request.num_generated for request in got] == [14, 13, 1]
    step_until_ended(engine, got)
    assert_same(got, want)
    assert [request.stats.cached_tokens for request in got] == [192, 16, 192]
    assert engine.cache.prompt_cache is not None
    assert engine.cache.prompt_cache.num_hits == 3


@pytest.mark.usefixtures("single_blocks")
def test_requests_that_start_together_read_common_blocks_once(server: Server) -> None:
    decoder = tiny_decoder()
    common = text(3, 200)
    prompts = [common, [*common[:150], *text(4, 50)], text(5, 20), common]
    want = [run_alone(decoder, prompt, AGAIN) for prompt in prompts]
    turn(server.start(decoder), common, ONCE)
    engine = server.start(decoder)
    got = [make_request(prompt, AGAIN) for prompt in prompts]
    run(engine, got)
    assert_same(got, want)
    assert [request.stats.disk_tokens for request in got] == [192, 0, 0, 0]
    assert [request.stats.cached_tokens for request in got] == [192, 144, 0, 192]


@pytest.mark.usefixtures("single_blocks")
@pytest.mark.parametrize("ending", ["abort", "deadline", "preempt"])
def test_requests_that_end_while_their_blocks_are_read(ending: str, server: Server) -> None:
    decoder = tiny_decoder()
    options = SamplingParams(max_tokens=30, seed=1, temperature=0.8, logprobs=1)
    prompts = [text(4, 20), text(5, 200), text(6, 100)]
    want = [run_alone(decoder, prompt, options) for prompt in prompts]
    turn(server.start(decoder), prompts[1], ONCE)
    engine = server.start(decoder, max_batch=2)
    first, reading, urgent = (make_request(prompt, options) for prompt in prompts)
    engine.add(first)
    engine.step()
    engine.add(reading)
    engine.step()
    assert 0 < reading.stats.disk_tokens < 192
    if ending == "abort":
        engine.abort(reading)
    elif ending == "deadline":
        reading.deadline = 0.0
    else:
        urgent.priority = 1
        engine.add(urgent)
        engine.step()
        assert reading.stats.preemptions == 1
        step_until_ended(engine, [urgent, reading])
        assert_same([urgent, reading], [want[2], want[1]])
        assert reading.stats.disk_tokens >= 16
    step_until_ended(engine, [first])
    assert_same([first], [want[0]])
    assert_idle(engine)


@pytest.mark.few(2)
@pytest.mark.parametrize("read_bytes", [1, 16 << 20])
@pytest.mark.parametrize("windows", [(None, None), (50, 30)], ids=str)
def test_batches_with_drafts_in_a_small_cache(
    windows: tuple[int | None, ...],
    read_bytes: int,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests with common beginnings, preemptions and evictions in memory and on disk, in two
    processes.
    """
    monkeypatch.setattr(prompt_cache, "_READ_BYTES", read_bytes)
    decoder = tiny_decoder(windows=windows)
    prompts = [text(9, 70)[: 20 + 7 * index] + text(index, 15) for index in range(8)]
    settings = [
        SamplingParams(max_tokens=40, seed=index, temperature=0.7, logprobs=1) for index in range(8)
    ]
    want = [run_alone(decoder, *each) for each in zip(prompts, settings, strict=True)]
    made = TreeDrafter(oracle_trees(0.7), texts(want))
    found = 0
    for _ in range(3):
        engine = server.start(decoder, num_blocks=22, max_bytes=400_000)
        proposer = made.bind(engine.target)
        got = [make_request(*each, proposer) for each in zip(prompts, settings, strict=True)]
        run(engine, got)
        assert_same(got, want)
        assert total(got, "moved") > 0
        found += total(got, "disk_tokens")
        server.stores[-1].flush()
    assert found > 100
    assert server.stores[-1].counts.blocks_evicted > 0


def test_trees_below_a_prompt(server: Server) -> None:
    decoder = tiny_decoder()
    prompt = text(3, 100)
    trees = [TokenTree.chain([5, 6, 7])]
    (want,) = make_engine(decoder).tree_logits(prompt, trees)
    server.start(decoder).tree_logits(prompt, trees)
    (got,) = server.start(decoder).tree_logits(prompt, trees)
    assert (got == want).all()
    assert server.stores[-1].counts.blocks_read == 6


def test_prompts_with_prompt_logprobs_are_computed(server: Server) -> None:
    decoder = tiny_decoder()
    options = SamplingParams(max_tokens=4, seed=0, prompt_logprobs=2)
    one, _ = turn(server.start(decoder), FIRST, options)
    other, _ = turn(server.start(decoder), FIRST, options)
    assert other.stats.disk_tokens == 0
    assert other.result.prompt_logprobs == one.result.prompt_logprobs


def test_blocks_that_did_not_fit_into_the_queue_are_stored_later(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = tiny_decoder()
    prompt = text(3, 200)
    engine = server.start(decoder)
    monkeypatch.setattr(block_store, "_MAX_QUEUE_BYTES", 3 * BLOCK * engine.cache.bytes_per_token)
    turn(engine, prompt, SamplingParams(max_tokens=1))
    server.stores[-1].flush()
    assert server.stores[-1].counts.blocks_written == 3
    for _ in range(4):  # hits in memory
        turn(engine, prompt, SamplingParams(max_tokens=1))
        server.stores[-1].flush()
    got, _ = turn(server.start(decoder), prompt, AGAIN)
    assert got.stats.disk_tokens == 192
    assert_same([got], [run_alone(decoder, prompt, AGAIN)])


def test_a_missing_block_ends_the_hit(server: Server) -> None:
    for windows, hit in (((None, None), 64), ((50, 30), 0)):
        decoder = tiny_decoder(windows=windows)
        turn(server.start(decoder, str(windows)), FIRST, ONCE)
        engine = server.start(decoder, str(windows))
        read = server.stores[-1].read
        wanted = iter([True] * (4 if hit else 1))

        def broken(keys: Sequence[bytes]) -> list[bytes | None]:
            return [content if next(wanted, False) else None for content in read(keys)]  # noqa: B023

        server.stores[-1].read = broken  # type: ignore[method-assign]
        got, _ = turn(engine, FIRST, AGAIN)
        assert_same([got], [run_alone(decoder, FIRST, AGAIN)])
        assert got.stats.disk_tokens == got.stats.cached_tokens == hit


def test_blocks_are_read_only_if_that_is_faster(tmp_path: Path) -> None:
    decoder = tiny_decoder()
    server = Server(tmp_path)
    turn(server.start(decoder), FIRST, ONCE)
    found = []
    for seconds_per_block, seconds_per_token in (
        (None, 1e-9),
        (1.0, None),
        (1.0, 1.0 / 15),
        (1.0, 1.0 / 17),
    ):
        engine = server.start(decoder)
        assert engine.cache.prompt_cache is not None
        engine.cache.prompt_cache._seconds_per_block = seconds_per_block
        engine.scheduler.disk_reads.costs = CostModel()
        if seconds_per_token is not None:
            engine.scheduler.disk_reads.costs.learn_prompt(1, seconds_per_token)
        found.append(turn(engine, FIRST, AGAIN)[0].stats.disk_tokens)
    assert found == [96, 96, 96, 0]
    estimate = engine.cache.prompt_cache._seconds_per_block
    assert estimate == pytest.approx(0.9)
    server.close()
