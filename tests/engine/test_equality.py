"""Same seed, same tokens for all drafters of the engine, batches, options and dtypes.

The reference is plain decoding of each request alone. Bits of logprobs are compared too, because
they show a difference long before a token changes.

Guests call these tests with their drafters, workers and backends.
"""

import random
from collections.abc import Sequence
from itertools import cycle, product
from typing import Any

import pytest

from covering import covering
from drafting.trees import ADVERSARIAL, TreeDrafter, off_chain, outside, too_large
from engine.cases import (
    CORE,
    DRAFTERS,
    ENDS,
    MIXED,
    OPTIONS,
    PROMPTS,
    ask,
    assert_not_vacuous,
    assert_same,
    drafter,
    engine_of,
    params,
    plain,
    text,
    texts,
    total,
    watch,
)
from pronk.base.arrays import BFLOAT16, FLOAT32, INT4, INT8, DType
from pronk.cache.states import StateCounts
from pronk.drafting import Autoregressive, Proposer
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.models.forward_batch import ForwardBatch
from pronk.models.model_runner import ForwardResult
from tiny_models import assert_idle, make_engine, run, tiny_decoder, toy_tokenizer

Prompts = tuple[tuple[int, ...], ...]

DTYPES = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])


def decode(
    engine: Engine,
    proposers: Sequence[Proposer[Any]],
    options: str,
    prompts: Prompts = PROMPTS,
    max_tokens: int = 40,
) -> list[Request]:
    """Decode all prompts in one batch; prompt number i has drafter number i modulo their count."""
    proposer = cycle([each.bind(engine.target) for each in proposers])
    requests = [
        ask(p, params(options, i, max_tokens), next(proposer)) for i, p in enumerate(prompts)
    ]
    run(engine, requests)
    return requests


# Drafters that run with all options, each in a batch of its own; for the others most such cases are
# slow tests.
CLOSE = ("suffix", "oracle", "adversarial")
DRAFTING = [name for name in DRAFTERS if name != "autoregressive"]


def matrix(
    names: Sequence[str],
    close: Sequence[str],
    others: Sequence[str],
    dtype: DType,
    closely: Sequence[str] = CLOSE,
) -> list[Any]:
    """Return the cases (name, options, dtype), most of them slow.

    Args:
        names: names of drafters.
        close: options of the drafters ``closely``, in float32; ``all`` also in bfloat16.
        others: options of all other drafters, in ``dtype``.
        closely: names of drafters that run with most options.
    """
    cases = []
    for name, options, each in product(names, OPTIONS, (FLOAT32, BFLOAT16)):
        runs = each == dtype and options in others
        if name in closely:
            runs = options in (close if each == FLOAT32 else ("all",))
        cases.append(pytest.param(name, options, each, marks=() if runs else pytest.mark.slow))
    return cases


# Options of ragged batches, of the drafters that run with most options.
RAGGED = (*CORE, "top_k", "min_tokens", "repetitive", "stop")


def assert_stats_add_up(request: Request) -> None:
    stats = request.stats
    assert stats.generated_tokens == len(request.output) == len(request.result.from_draft)
    assert stats.prompt_tokens == len(request.prompt)
    pieces = [(piece.token_id, piece.source is not None) for piece in request.result.undelivered]
    assert pieces == [*zip(request.output, request.result.from_draft, strict=True)]
    assert sum(request.result.from_draft) <= stats.accepted <= stats.drafted
    assert stats.generated_tokens - sum(request.result.from_draft) <= stats.target_steps
    assert all(0 <= share <= 1 for share in stats.acceptance)
    assert sum(step.tokens for step in stats.steps) == stats.generated_tokens
    assert all(step.accepted <= step.depth <= step.drafted < step.rows for step in stats.steps)
    for timer in ("draft_clock", "target_clock", "clock"):
        readings = [getattr(step, timer) for step in stats.steps]
        assert readings == sorted(readings)
    last = stats.steps[-1]
    assert last.draft_clock <= stats.draft_seconds
    assert last.target_clock == stats.target_seconds
    assert last.draft_clock + last.target_clock < last.clock
    assert stats.step_compression == stats.generated_tokens / stats.target_steps >= 1


@pytest.mark.few(14)
@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    matrix([*DRAFTERS], RAGGED, (), FLOAT32),
    ids=str,
)
def test_ragged_batch(name: str, options: str, dtype: DType) -> None:
    want = plain(dtype, options)
    got = decode(make_engine(tiny_decoder(dtype)), [drafter(name, want)], options)
    assert_same(got, want)
    assert_not_vacuous(name, got)
    for request in got:
        assert_stats_add_up(request)
    assert any(any(request.result.from_draft) for request in got) == (total(got, "accepted") > 0)


# Options of batches of one, of the drafters that run with most options.
ALONE = ("greedy", "temperature", "penalties", "all")
BESIDE = ("greedy", "all", "repetitive", "thinking", "stop")


# By how many options those of the prompts are shifted, in one or two batches.
SHIFTS = pytest.mark.parametrize(
    "shifts", [(0,), pytest.param((2, 4), marks=pytest.mark.slow)], ids=str
)


@pytest.mark.few(7)
@SHIFTS
@pytest.mark.parametrize("name", [name for name in DRAFTERS if name not in CLOSE])
def test_options_beside_each_other(name: str, shifts: Sequence[int]) -> None:
    """The requests of a batch have different options; each option has one prompt or more."""
    by_options: dict[str, list[Request]] = {options: [] for options in BESIDE}
    for shift in shifts:
        chosen = [BESIDE[(index + shift) % len(BESIDE)] for index in range(len(PROMPTS))]
        want = [plain(FLOAT32, options)[index] for index, options in enumerate(chosen)]
        engine = make_engine(tiny_decoder())
        proposer = drafter(name, want).bind(engine.target)
        got = [
            ask(PROMPTS[index], params(options, index), proposer)
            for index, options in enumerate(chosen)
        ]
        run(engine, got)
        assert_same(got, want)
        for options, request in zip(chosen, got, strict=True):
            assert_stats_add_up(request)
            by_options[options].append(request)
    for requests in by_options.values():
        assert_not_vacuous(name, requests)


@pytest.mark.few(12)
@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    matrix(DRAFTING, ALONE, ("temperature",), BFLOAT16),
    ids=str,
)
def test_batch_of_one(name: str, options: str, dtype: DType) -> None:
    want = plain(dtype, options)
    engine = make_engine(tiny_decoder(dtype))
    proposer = drafter(name, want).bind(engine.target)
    got = [ask(PROMPTS[i], params(options, i), proposer) for i in (1, 4)]
    for request in got:
        run(engine, [request])
    assert_same(got, [want[1], want[4]])
    assert total(got, "drafted") > 0


@pytest.mark.parametrize("options", ["greedy", "temperature", "penalties", "recommended"])
def test_choices_of_the_library_and_of_numpy(options: str) -> None:
    """The library verifies whole trees; with the same options, NumPy chooses token by token."""
    want = plain(FLOAT32, options)
    engine = make_engine(tiny_decoder())
    proposer = drafter("oracle", want).bind(engine.target)
    got = [ask(prompt, params(options, i), proposer) for i, prompt in enumerate(PROMPTS)]
    for request in got:
        assert request.sampler.library_sampler is not None
        request.sampler.library_sampler = None
        request.sampler.kernels = None
        request.sampler.stateless_sampler = None
    run(engine, got)
    assert_same(got, want)
    assert total(got, "accepted") > 0


@pytest.mark.parametrize("options", ["greedy", "temperature", "penalties", "recommended"])
def test_choices_in_the_pass_and_in_a_call(options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass verifies the trees of a batch; a call for each tree chooses the same tokens."""
    want = plain(FLOAT32, options)
    monkeypatch.setattr(ForwardBatch, "make_choices", lambda _: None)
    engine = make_engine(tiny_decoder())
    proposer = drafter("oracle", want).bind(engine.target)
    got = [ask(prompt, params(options, i), proposer) for i, prompt in enumerate(PROMPTS)]
    run(engine, got)
    assert_same(got, want)
    assert total(got, "accepted") > 0


def test_texts_of_plain_decoding_are_varied() -> None:
    """Outputs do not loop, differ between options and seeds, and have both finish reasons."""
    outputs = [request.output for options in CORE for request in plain(FLOAT32, options)]
    # equal noise for all options
    assert len({tuple(output) for output in outputs}) > 0.9 * len(outputs)
    for output in outputs:
        grams = list(zip(*(output[i:] for i in range(4)), strict=False))
        assert len(grams) - len(set(grams)) <= 0.1 * len(grams)
    ended = [
        request for options in OPTIONS if options != "stop" for request in plain(FLOAT32, options)
    ]
    assert {request.result.finish_reason for request in ended} == {"stop", "length"}
    assert {request.result.stop_reason for request in ended} == {None, *ENDS}
    for request in ended:
        assert (len(request.output) == 40) == (
            request.result.finish_reason == "length"
        ) or request.output[-1] in ENDS
        assert len(request.output) <= 40
        assert [token in ENDS for token in request.output].count(True) == (
            request.result.finish_reason == "stop"
        )
    assert all(len(request.output) >= 30 for request in plain(FLOAT32, "min_tokens"))


def test_texts_of_plain_decoding_end_at_stop_strings_with_a_special_token() -> None:
    """The tokens go up to the stop string's last token; the text lacks the stop string and the
    names of tokens.
    """
    requests = plain(FLOAT32, "stop")
    stops = requests[0].params.stops
    ended = [request for request in requests if request.result.stop_reason is not None]
    assert {request.result.stop_reason for request in ended} == {*stops}
    for request in requests:
        named = toy_tokenizer().decode(request.output, skip_special_tokens=False)
        found = [stop for stop in stops if stop in named]
        assert found == ([] if request.result.stop_reason is None else [request.result.stop_reason])
        assert not any(stop in named[: len(named) - 1] for stop in stops)
        before = named.removesuffix(str(request.result.stop_reason))
        assert request.result.text == before.replace("<|11|>", "")


GEMMA4: dict[str, Any] = {"special": "gemma4", "windows": (50, None, 50, None)}
VARIANTS: dict[str, dict[str, Any]] = {
    "group 1": {"heads": 4, "kv_heads": 4},
    "group 2": {"heads": 4, "kv_heads": 2},
    "group 8": {"heads": 16, "kv_heads": 2},
    "one kv head": {"heads": 3, "kv_heads": 1},
    "windows": {"windows": (50, 50)},
    "short window": {"windows": (3, 3)},
    "different windows": {"windows": (20, 90)},
    "some windows": {"windows": (50, None)},
    "classic": {"heads": 4, "kv_heads": 4, "classic": True},
    "norms and a scaling": {"qk_norm": True, "dynamic": True},
    "gemma": {"special": "gemma", "windows": (50, None)},
    "other deviations": {"special": "others", "windows": (None, 50, None)},
    "experts": {"special": "experts"},
    "routers": {"special": "routers", "windows": (None, None, 50)},
    "sublayers": {"special": "sublayers", "windows": (None,) * 6},
    "sublayers, int4": {
        "special": "sublayers",
        "weights": "int4",
        "windows": (None,) * 6,
        "kv_dtype": INT8,
    },
    "experts, int4": {"special": "experts", "weights": "int4", "windows": (50, None, None)},
    "convolutions": {"special": "convolutions", "windows": (None, None, None)},
    "convolutions, int4": {
        "special": "convolutions",
        "weights": "int4",
        "windows": (None, None, None),
        "kv_dtype": INT8,
    },
    "recurrent": {"special": "recurrent", "windows": (None, None, None)},
    "recurrent, int4": {
        "special": "recurrent",
        "weights": "int4",
        "windows": (None, None, None),
        "kv_dtype": INT8,
    },
    "latent attention": {"special": "latent", "windows": (None, None, None)},
    "latent attention, int4": {"special": "plain latent", "weights": "int4", "kv_dtype": INT8},
    "gemma4": GEMMA4,
    "gemma4, int8 cache": GEMMA4 | {"kv_dtype": INT8, "weights": "int4"},
    "gemma4, int4 cache": GEMMA4 | {"kv_dtype": INT4},
    "latent attention, int4 cache": {"special": "latent", "kv_dtype": INT4},
    "recurrent, int4 cache": {
        "special": "recurrent",
        "windows": (None, None, None),
        "kv_dtype": INT4,
    },
    "mamba": {"special": "mamba", "windows": (None, None, None)},
    "parallel": {"special": "parallel", "windows": (None, None, None)},
    "parallel, int4": {
        "special": "parallel",
        "weights": "int4",
        "windows": (None, None, None),
        "kv_dtype": INT8,
    },
    "int8": {"weights": "int8"},
    "int4": {"weights": "int4"},
    "stored blocks": {
        "weights": "stored",
        "hidden": 256,
        "heads": 16,
        "windows": (None, 50, None, None),
    },
    "int8 cache": {"kv_dtype": INT8},
    "int8 cache, windows": {"kv_dtype": INT8, "windows": (50, None), "heads": 4},
    "int8 cache, int4": {"kv_dtype": INT8, "weights": "int4"},
    "int4 cache, windows": {"kv_dtype": INT4, "windows": (50, None), "heads": 4},
    "int4 cache, classic": {"kv_dtype": INT4, "heads": 4, "kv_heads": 4, "classic": True},
    "int4 cache, biases": {"kv_dtype": INT4, "special": "biases", "head_dim": 32},
    "int4 cache, int8": {"kv_dtype": INT4, "weights": "int8"},
}


@pytest.mark.parametrize("options", ["temperature", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("variant", "dtype"), covering([*VARIANTS], [FLOAT32, BFLOAT16], strength=1), ids=str
)
def test_other_models(variant: str, options: str, dtype: DType) -> None:
    want = plain(dtype, options, **VARIANTS[variant])
    proposers = [
        drafter(name, want) for name in ("oracle", "adversarial", "prompt_lookup", "random")
    ]
    got = decode(engine_of(dtype, **VARIANTS[variant]), proposers, options)
    assert_same(got, want)
    assert total(got, "accepted") > 0
    assert total(got, "moved") > 0


DEVIATING = pytest.mark.parametrize(
    "variant",
    [
        *("gemma", "gemma4", "other deviations", "convolutions"),
        *("recurrent", "mamba", "sublayers", "latent attention"),
    ],
)


@pytest.mark.few(6)
@DEVIATING
@pytest.mark.parametrize(
    "settings", [{"prefill_chunk": 16, "max_batch": 2}, {"share_prefixes": True}], ids=str
)
def test_settings_of_deviating_models(settings: dict[str, Any], variant: str) -> None:
    """Chunks of prompts and small batches; a second turn with prompts from the prefix cache."""
    shape = VARIANTS[variant]
    shares = "share_prefixes" in settings
    want = plain(BFLOAT16, "temperature", **shape)
    # room for the checkpoints of all prompts
    counts = StateCounts(requests=9, checkpoints=64, updates=272)
    engine = make_engine(tiny_decoder(BFLOAT16, **shape), **settings, state_counts=counts)
    got = [
        decode(engine, [drafter(name, want) for name in MIXED], "temperature")
        for _ in range(1 + shares)
    ]
    for requests in got:
        assert_same(requests, want)
        assert total(requests, "accepted") > 0
    assert (total(got[-1], "cached_tokens") > 1000) == shares


@DEVIATING
def test_preemption_in_deviating_models(variant: str) -> None:
    """Each request is more urgent than the earlier ones."""
    shape = VARIANTS[variant]
    want = plain(BFLOAT16, "temperature", **shape)
    engine = make_engine(tiny_decoder(BFLOAT16, **shape), max_batch=1)
    proposer = drafter("oracle", want).bind(engine.target)
    got = [ask(prompt, params("temperature", i), proposer) for i, prompt in enumerate(PROMPTS)]
    for priority, request in enumerate(got):
        request.priority = priority
        engine.add(request)
        for _ in range(3):
            engine.step()
    while not all(request.ended for request in got):
        engine.step()
    assert_same(got, want)
    assert total(got, "preemptions") > 0
    assert total(got, "accepted") > 0


@pytest.mark.few(7)
@pytest.mark.parametrize(
    "dtype", [FLOAT32, pytest.param(BFLOAT16, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("variant", ["convolutions", "gemma4", "recurrent", "mamba", "parallel"])
@pytest.mark.parametrize("name", ["recycling", "suffix", "eagle3 tree", "auto"])
def test_drafters_of_a_model_with_states(name: str, variant: str, dtype: DType) -> None:
    """Trees, chains, first layers and kept features."""
    want = plain(dtype, "temperature", **VARIANTS[variant])
    engine = make_engine(tiny_decoder(dtype, **VARIANTS[variant]), max_batch=4, prefill_chunk=48)
    got = decode(engine, [drafter(name, want)], "temperature")
    assert_same(got, want)
    assert total(got, "drafted") > 0


@pytest.mark.parametrize(
    "name",
    [name if name in CLOSE else pytest.param(name, marks=pytest.mark.slow) for name in DRAFTING],
)
@pytest.mark.parametrize("kv_dtype", [INT8, INT4], ids=str)
def test_quantized_cache(name: str, kv_dtype: DType) -> None:
    want = plain(BFLOAT16, "temperature", kv_dtype=kv_dtype)
    got = decode(engine_of(BFLOAT16, kv_dtype=kv_dtype), [drafter(name, want)], "temperature")
    assert_same(got, want)
    assert_not_vacuous(name, got)
    others = plain(BFLOAT16, "temperature")
    assert [request.result.logprobs for request in want] != [
        request.result.logprobs for request in others
    ]


@pytest.mark.few(6)
@DTYPES
@pytest.mark.parametrize(
    "settings",
    [
        {"max_batch": 2},
        {"max_batch": 1, "max_tree": 4},
        {"prefill_chunk": 16},
        {"prefill_chunk": 48, "max_batch": 3},
        {"max_tree": 2},
        {"max_tree": 7, "block_size": 32},
        {"block_size": 64},
        {"num_blocks": 48},  # memory for one long request at a time
        {"poison": None},
    ],
    ids=str,
)
def test_other_settings(settings: dict[str, Any], dtype: DType) -> None:
    want = plain(dtype, "temperature")
    engine = make_engine(tiny_decoder(dtype), **settings)
    got = decode(engine, [drafter(name, want) for name in MIXED], "temperature")
    assert_same(got, want)
    assert total(got, "accepted") > 0


@pytest.mark.few(2)
@DTYPES
@pytest.mark.parametrize("windows", [(None, None), (100, 600)], ids=str)
def test_boundaries_of_blocks(windows: tuple[int | None, ...], dtype: DType) -> None:
    """Prompts end and outputs cross near boundaries of panels, attention's blocks and tables of
    rotations.
    """
    prompts = tuple(
        tuple(text(i, n))
        for i, n in enumerate((15, 16, 62, 63, 64, 65, 511, 512, 1021, 1022, 1023, 1024))
    )
    want = plain(dtype, "temperature", prompts, 12, windows=windows)
    for names in (["oracle"], ["prompt_lookup", "adversarial"]):
        engine = make_engine(tiny_decoder(dtype, windows=windows), num_blocks=1000)
        got = decode(engine, [drafter(name, want) for name in names], "temperature", prompts, 12)
        assert_same(got, want)
        assert total(got, "moved") > 0


@pytest.mark.few(6)
@pytest.mark.parametrize("options", ["greedy", "temperature"])
@pytest.mark.parametrize("shape", ADVERSARIAL, ids=lambda shape: shape.__name__)
def test_adversarial_trees(shape: Any, options: str) -> None:
    want = plain(FLOAT32, options)
    got = decode(
        make_engine(tiny_decoder()), [TreeDrafter(shape, texts(want), stop_token_ids=ENDS)], options
    )
    assert_same(got, want)
    assert total(got, "drafted") > total(got, "accepted") > 0
    assert (total(got, "moved") > 0) == (shape not in (too_large, outside))
    # Nodes off the main chain are accepted too.
    assert total(got, "target_steps") < 0.6 * total(got, "generated_tokens")


@pytest.mark.few(3)
@pytest.mark.parametrize("options", ["greedy", "penalties"])
@pytest.mark.parametrize("name", ["oracle", "adversarial", "recycling", "merged"])
def test_committed_tokens_never_change(name: str, options: str) -> None:
    """After each step the KV cache holds all tokens of the text but the last one."""
    want = plain(FLOAT32, options, max_tokens=80)
    engine = make_engine(tiny_decoder())
    proposer = drafter(name, want).bind(engine.target)
    got = [ask(prompt, params(options, i, 80), proposer) for i, prompt in enumerate(PROMPTS)]
    for request in got:
        engine.add(request)
    steps = 0
    while running := [request for request in got if request.result.finish_reason is None]:
        engine.step()
        for request, other in zip(got, want, strict=True):
            assert request.output == other.output[: len(request.output)]
            if request in running and not request.ended and request.output:
                assert request.block_table.length == len(request.tokens) - 1
                steps += 1
    assert_same(got, want)
    assert total(got, "moved") > 10
    assert steps > 20


@pytest.mark.parametrize("max_tree", [1, 2, 3, 9])
def test_no_pass_is_larger_than_allowed(max_tree: int) -> None:
    want = plain(FLOAT32, "greedy")
    engine = make_engine(tiny_decoder(), max_tree=max_tree, prefill_chunk=64)
    sizes = list[int]()

    def check(batch: ForwardBatch, _: ForwardResult) -> None:
        prefill = 0
        for entry in batch.entries:
            block_table = entry.block_table
            tree = entry.tree
            if block_table.length < entry.prompt_length - 1:
                prefill += len(tree)
                continue
            assert len(tree) <= max_tree
            # the 40th token has no row
            assert block_table.length + max(tree.depths) < entry.prompt_length + 39
            sizes.append(len(tree))
        assert prefill <= 64

    watch(engine, check)
    shapes = [
        TreeDrafter(shape, texts(want), stop_token_ids=ENDS)
        for shape in (too_large, off_chain, *ADVERSARIAL)
    ]
    assert_same(decode(engine, shapes, "greedy"), want)
    assert max(sizes) == max_tree


@pytest.mark.parametrize("max_batch", [1, 2, 4])
def test_requests_are_served_in_order(max_batch: int) -> None:
    engine = make_engine(tiny_decoder(), max_batch=max_batch)
    started = list[int]()

    def check(batch: ForwardBatch, _: ForwardResult) -> None:
        assert len(batch.entries) <= max_batch
        started.extend(
            entry.prompt_length for entry in batch.entries if entry.block_table.length == 0
        )

    watch(engine, check)
    done = decode(engine, [Autoregressive()], "greedy", max_tokens=1)
    assert [request.output for request in done] == [
        request.output[:1] for request in plain(FLOAT32, "greedy")
    ]
    assert started == [len(prompt) for prompt in PROMPTS]


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("seed", range(6))
def test_long_outputs_of_random_models(seed: int, dtype: DType) -> None:
    dice = random.Random(seed)
    prompts = tuple(
        tuple(text(dice.randrange(999), dice.choice((3, 60, 400, 900)))) for _ in range(8)
    )
    windows = dice.choice(((None, None, None), (70, None, 70), (64, 64, 64)))
    variant: dict[str, Any] = dice.choice(list(VARIANTS.values())[:4]) | {
        "seed": seed,
        "windows": windows,
    }
    want = plain(dtype, "temperature", prompts, 300, **variant)
    for settings in ({}, {"prefill_chunk": 33, "max_batch": 3, "max_tree": 20}):
        engine = make_engine(tiny_decoder(dtype, **variant), num_blocks=1500, **settings)
        got = decode(engine, [drafter(name, want) for name in MIXED], "temperature", prompts, 300)
        assert_same(got, want)


SETTINGS_OF_READERS = pytest.mark.parametrize(
    ("windows", "settings"),
    [
        ((70, None, 70), {"max_tree": 6}),
        ((64, 64), {"prefill_chunk": 33, "max_batch": 3}),
        ((None, None), {"num_blocks": 60, "max_batch": 2}),
    ],
    ids=["tiny trees", "short windows", "tight cache"],
)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["recycling", "merged"])
@SETTINGS_OF_READERS
def test_drafters_that_read_logits(
    name: str, windows: tuple[int | None, ...], settings: dict[str, Any]
) -> None:
    want = plain(BFLOAT16, "temperature", windows=windows)
    engine = make_engine(tiny_decoder(BFLOAT16, windows=windows), **settings)
    got = decode(engine, [drafter(name, want)], "temperature")
    assert_same(got, want)
    assert total(got, "drafted") > 0
    assert_idle(engine)
