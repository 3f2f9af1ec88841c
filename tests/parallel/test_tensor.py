"""Tensor parallelism: logits close to those of one process; draft tokens change no bit of them."""

import itertools
import os
import signal
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch.distributed as dist

from checkpoints import MakeCheckpoint
from gguf_files import convert
from parallel.dealt import thread_groups
from parallel.test_trees import PROMPTS, tokens_and_logprobs
from pronk import LLM, OptionError, PronkError, SamplingParams
from pronk.base.arrays import FLOAT32, Array, split_rows
from pronk.base.errors import CheckpointError, ConnectionLostError
from pronk.cache.blocks import BlockTable
from pronk.checkpoint.config import ConvolutionConfig, ModelConfig
from pronk.models.choice import compute_dtype
from pronk.models.decoder import Decoder
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.loader import load_decoder, parse_dtype, read_config
from pronk.models.model_runner import ModelRunner
from pronk.models.placer import WeightPlacer
from pronk.models.split import TensorSplit
from pronk.parallel import connection as messages
from pronk.parallel import tensor
from pronk.parallel.connection import PeerConnection
from pronk.parallel.processes import WorkerProcesses
from pronk.parallel.tensor import (
    AllReduceGroup,
    SplitCache,
    TensorParallelExecutor,
    serve_layer_commands,
)
from pronk.parallel.wire_format import LayerCommand
from pronk.sampling.tree import TokenTree
from quantized_formats import FORMATS, write_quantized
from tiny_models import kernels, text_logits
from waiting import HUNG

# ``test_lost_driver.py`` starts workers as new interpreters.
pytestmark = pytest.mark.usefixtures("forked_workers")

TEXT = [5, 17, 230, 41, 3, 99, 250, 7, 64, 128, 12, 280, 9, 9, 31, 2, 77, 101, 18, 4]
FURTHER = (
    "suffix",
    "lookahead(window=10, ngram=5)",
    "cape(draft_model)",
    "medusa",
    "multi_token",
    "vanilla",
    "auto",
)

# Tolerance for quantized weights: the groups of a shard, in which inputs are rounded, may differ
# from the whole's.
FOREVER = 1e6  # seconds
ROUNDED = 0.1


def load(
    folder: Path, rank: int, workers: int, **options: Any
) -> tuple[Decoder, SplitCache, TensorSplit]:
    """Return the shard of a model for one rank, with its KV cache."""
    config = read_config(folder)
    dtype = parse_dtype("auto", config)
    split = TensorSplit(config, rank, workers)
    decoder = load_decoder(folder, config, dtype=dtype, kernels=kernels(), split=split, **options)
    computed = compute_dtype(dtype)
    cache = SplitCache(
        split.shard_config, num_blocks=8, block_size=16, dtype=computed, kernels=kernels()
    )
    return decoder, cache, split


@contextmanager
def together(folder: Path, workers: int, **options: Any) -> Generator[ModelRunner]:
    """Yield the runner of a model whose shards are in ``workers`` threads instead of processes."""
    store = dist.HashStore()

    def work(rank: int) -> None:
        peer = PeerConnection(store, rank, driver=False, timeout=HUNG)
        group = AllReduceGroup(store, rank, workers, timeout=HUNG)
        decoder, cache, split = load(folder, rank, workers, **options)
        with suppress(ConnectionLostError):
            serve_layer_commands(peer, TensorParallelExecutor(decoder, cache, split, group))

    with thread_groups(workers), ThreadPoolExecutor(workers) as pool:
        others = [pool.submit(work, rank) for rank in range(1, workers)]
        peers = [
            PeerConnection(store, rank, driver=True, timeout=HUNG) for rank in range(1, workers)
        ]
        group = AllReduceGroup(store, 0, workers, timeout=HUNG)
        decoder, cache, split = load(folder, 0, workers, **options)
        try:
            yield ModelRunner(
                decoder,
                cache,
                executor=TensorParallelExecutor(decoder, cache, split, group, peers=peers),
            )
        finally:
            for peer in peers:
                peer.send(messages.MessageKind.STOP)
        for other in others:
            other.result()


def logits(runner: ModelRunner, ends: Sequence[int]) -> Array:
    """Return the logits of all of TEXT, from one forward pass up to each index of ``ends``."""
    block_table = BlockTable()
    found = list[Array]()
    for begin, end in pairwise([0, *ends]):
        runner.cache.prepare(block_table, end)
        entry = BatchEntry(
            block_table, TokenTree.chain(TEXT[begin:end]), range(end - begin), len(TEXT)
        )
        found.append(runner.forward(ForwardBatch([entry])).logits[0][:])
        runner.cache.commit_slots(block_table, range(end - begin))
    return np.concatenate(found)


def check(folder: Path, workers: int, tolerance: float, **options: Any) -> None:
    """Check that logits are within ``tolerance`` standard deviations, with the same bits row by
    row.
    """
    config = read_config(folder)
    dtype = parse_dtype("auto", config)
    whole = load_decoder(folder, config, dtype=dtype, kernels=kernels(), **options)
    want = text_logits(whole, TEXT, dtype)
    with together(folder, workers, **options) as runner:
        found = logits(runner, [len(TEXT)])
        assert np.array_equal(logits(runner, range(1, len(TEXT) + 1)), found)
    assert np.sqrt(np.square(found - want).mean()) < tolerance * want.std()
    assert not np.array_equal(found, want)  # the sums have another order


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("family", "workers", "shape"),
    [
        ("llama", 2, {}),
        ("llama", 3, {"num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True}),
        ("mistral", 2, {"sliding_window": 8}),
        ("qwen2", 2, {"tie_word_embeddings": True}),
        ("qwen3", 2, {}),
        ("gpt2", 4, {}),
        ("gpt2", 3, {"vocab_size": 290}),
        ("granite", 2, {"embedding_multiplier": 3.0}),
        ("granitemoehybrid", 2, {}),
        ("ministral3", 2, {}),
        ("phi3", 2, {}),
        ("smollm3", 2, {}),
    ],
)
def test_families(
    checkpoint: MakeCheckpoint, family: str, workers: int, shape: dict[str, Any]
) -> None:
    check(checkpoint(family, **shape), workers, 1e-5)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_rounded_while_loading(checkpoint: MakeCheckpoint, weights: str) -> None:
    """Shards are rounded in other groups than the whole model; the error is about the same."""
    folder = checkpoint("llama")
    given: dict[str, Any] = {"dtype": FLOAT32, "kernels": kernels()}
    plain, whole = (
        text_logits(load_decoder(folder, read_config(folder), weights=kind, **given), TEXT)
        for kind in ("plain", weights)
    )
    with together(folder, 2, weights=weights) as runner:
        found = logits(runner, [len(TEXT)])
        assert np.array_equal(logits(runner, range(1, len(TEXT) + 1)), found)
    errors = [np.sqrt(np.square(each - plain).mean()) for each in (found, whole)]
    assert 0.0 < errors[0] < 1.3 * errors[1]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name",
    ["gptq-4", "gptq-8-zeros", "awq", "packed-4-group-zeros", "int-8-channel", "float-block"],
)
@pytest.mark.filterwarnings("ignore:.*are dequantized")
def test_quantized_checkpoints(checkpoint: MakeCheckpoint, tmp_path: Path, name: str) -> None:
    plain = checkpoint("llama", hidden_size=96, intermediate_size=160, num_key_value_heads=6)
    quantized, _ = write_quantized(plain, tmp_path, FORMATS[name])
    check(quantized, 3, ROUNDED)


def test_input_orders_cannot_be_split(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    quantized, _ = write_quantized(checkpoint("llama"), tmp_path, FORMATS["gptq-4-order"])
    with pytest.raises(
        CheckpointError,
        match=r"layers\.\d\..*split between processes.*order of their inputs.*'tree'",
    ) as found:
        load(quantized, 0, 2)
    assert "\n" not in str(found.value)


def test_gguf_file(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    plain = checkpoint("llama", hidden_size=96, intermediate_size=160, tie_word_embeddings=True)
    check(convert(plain, tmp_path / "model.gguf", "Q8_0"), 2, ROUNDED)


def test_every_weight_is_in_one_shard(checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("llama", num_key_value_heads=6)
    config = read_config(folder)
    parts = [load(folder, rank, 3)[0] for rank in range(3)]
    whole = load_decoder(folder, config, dtype=FLOAT32, kernels=kernels())
    for name, axis in (("out", 1), ("down", 1)):
        joined = np.concatenate(
            [getattr(part.layers[1], name).packed.unpack() for part in parts], axis
        )
        assert np.array_equal(joined, getattr(whole.layers[1], name).packed.unpack())
    for name, sections in (("qkv", 3), ("up", 2)):
        split = [getattr(part.layers[1], name).packed.unpack() for part in parts]
        sizes = [config.qkv_sizes if sections == 3 else (config.intermediate_size,) * 2]
        shares = [
            split_rows(part, [*share.qkv_sizes] if sections == 3 else [share.intermediate_size] * 2)
            for part, share in zip(
                split, (TensorSplit(config, rank, 3).shard_config for rank in range(3)), strict=True
            )
        ]
        joined = np.concatenate([each[section] for section in range(sections) for each in shares])
        assert len(joined) == sum(sizes[0])
        assert np.array_equal(joined, getattr(whole.layers[1], name).packed.unpack())
    heads = [part.head.packed.unpack() for part in parts]
    tokens = [TensorSplit(config, rank, 3).tokens(rank) for rank in range(3)]
    assert [*tokens[0], *tokens[1], *tokens[2]] == [*range(config.vocab_size)]
    for rank in (1, 2):
        assert np.array_equal(heads[rank], heads[0][tokens[rank].start : tokens[rank].stop])


def test_orders_are_read_as_they_were_written() -> None:
    block_table = BlockTable([3, 1], 0, 18)
    tree = TokenTree((7, 8, 9), (-1, 0, 0), verify=(True, False, False))
    entry = BatchEntry(block_table, tree, range(1, 3), 11, num_computed=1)
    moves = [(np.arange(2), np.arange(2, 4))]
    found = LayerCommand.parse(LayerCommand((4, 20), moves, [entry], 3).serialize())
    assert (found.pool, found.num_layers) == ((4, 20), 3)
    assert [[each.tolist() for each in batch] for batch in found.moves] == [[[0, 1], [2, 3]]]
    (parsed,) = found.entries
    assert (parsed.logits_nodes, parsed.prompt_length) == (range(1, 3), 11)
    assert (parsed.block_table.blocks, parsed.block_table.length, parsed.num_computed) == (
        [3, 1],
        18,
        1,
    )
    assert (parsed.tree.tokens, parsed.tree.parents) == (tree.tokens, tree.parents)


@pytest.fixture(scope="module")
def several() -> Iterator[LLM]:
    llm = LLM(workers=2, parallel="tensor", threads=1, budget="all", prefix_cache=True)
    yield llm
    passes(llm)._on_lost()


def passes(llm: LLM) -> TensorParallelExecutor:
    found = llm.engine.runner._executor
    assert isinstance(found, TensorParallelExecutor)
    return found


@pytest.mark.parametrize(
    "drafter",
    ["kangaroo", *(pytest.param(each, marks=pytest.mark.slow) for each in FURTHER)],
)
def test_draft_tokens_change_no_bit(several: LLM, drafter: str) -> None:
    for temperature, samples in ((0.0, 1), (0.8, 2)):
        params = SamplingParams(
            max_tokens=20, temperature=temperature, seed=3, n=samples, logprobs=2, ignore_eos=True
        )
        want = [several.generate(prompt, params, drafter="autoregressive") for prompt in PROMPTS]
        found = several.generate(PROMPTS, params, drafter=drafter)
        assert tokens_and_logprobs(found) == tokens_and_logprobs(want)
        steps = [sum(len(each.stats.steps) for each in group) for group in (found, want)]
        assert steps[0] < steps[1]


def test_near_one_process(several: LLM) -> None:
    """In float32 the tokens are equal, and the log-probabilities within 1e-4."""
    alone = LLM(threads=1, budget="all", dtype="float32")
    parts = LLM(threads=1, budget="all", dtype="float32", workers=2, parallel="tensor")
    params = SamplingParams(max_tokens=24, logprobs=2, ignore_eos=True)
    for one, other in zip(
        alone.generate(PROMPTS, params), parts.generate(PROMPTS, params), strict=True
    ):
        assert one.token_ids == other.token_ids
        assert one.logprobs is not None
        assert other.logprobs is not None
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert theirs == pytest.approx(mine, abs=1e-4)
    assert several.exact
    passes(parts)._on_lost()


def test_texts_differ_first_at_a_near_tie(several: LLM) -> None:
    """In bfloat16 another order of sums may change the choice between two nearly equally likely
    tokens.
    """
    alone = LLM(threads=1, budget="all")
    params = SamplingParams(max_tokens=48, logprobs=8, ignore_eos=True)
    compared = 0
    for one, other in zip(
        alone.generate(PROMPTS, params), several.generate(PROMPTS, params), strict=True
    ):
        assert one.logprobs is not None
        assert other.logprobs is not None
        for mine, theirs, token, instead in zip(
            one.logprobs, other.logprobs, one.token_ids, other.token_ids, strict=True
        ):
            if token != instead:
                assert mine[token] - mine[instead] < 0.1
                break
            assert theirs[token] == pytest.approx(mine[token], abs=0.1)
            compared += 1
    assert compared > 48


@pytest.mark.slow
def test_a_pool_that_is_too_small_for_all() -> None:
    options: dict[str, Any] = {"threads": 1, "budget": "all", "workers": 2, "parallel": "tensor"}
    small = LLM(kv_memory="300KB", prefix_cache=True, **options)
    large = LLM(kv_dtype="auto", **options)
    params = SamplingParams(max_tokens=60, temperature=0.8, seed=1, ignore_eos=True, logprobs=1)
    prompts = [PROMPTS[number % 3] + "a" * number for number in range(6)]
    want, found = (llm.generate(prompts, params, drafter="recycling") for llm in (large, small))
    assert tokens_and_logprobs(found) == tokens_and_logprobs(want)
    assert sum(each.stats.preemptions for each in found) > 0
    assert sum(each.stats.moved for each in found) > 0
    for llm in (small, large):
        passes(llm)._on_lost()


@pytest.mark.parametrize("kv_dtype", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_quantized_kv_cache(kv_dtype: str, several: LLM) -> None:
    llm = LLM(
        workers=2, parallel="tensor", threads=1, budget="all", kv_dtype=kv_dtype, weights="int8"
    )
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=1, ignore_eos=True, logprobs=1)
    want, found = (
        llm.generate(PROMPTS, params, drafter=drafter) for drafter in ("autoregressive", "suffix")
    )
    assert tokens_and_logprobs(found) == tokens_and_logprobs(want)
    assert tokens_and_logprobs(found) != tokens_and_logprobs(several.generate(PROMPTS, params))
    passes(llm)._on_lost()


@pytest.mark.parametrize(
    "way", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_worker_that_is_lost_ends_the_model(
    way: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other process has the shard of the lost worker: generation raises in time, and the
    processes end.

    A killed worker is recognized by its connection, a stopped one by its silence.
    """
    monkeypatch.setattr(tensor, "_TIMEOUT", FOREVER)
    llm = LLM(workers=2, parallel="tensor", threads=1, budget="all")
    started: Any = passes(llm)._on_lost.__self__  # type: ignore[attr-defined]
    assert isinstance(started, WorkerProcesses)
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=60, ignore_eos=True))
    next(stream)
    os.kill(started.processes[0].pid, way)
    if way == signal.SIGSTOP:
        monkeypatch.setattr(tensor, "_TIMEOUT", 2.0)
    with pytest.raises(
        PronkError, match=r"is gone, or does not answer.*; load the model again"
    ) as found:
        list(stream)
    assert "\n" not in str(found.value)
    assert started.processes[0].poll() is not None
    with pytest.raises(PronkError, match="is gone"):
        llm.generate("x")


def test_a_part_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(workers=2, parallel="tensor", threads=1, budget="all")
    numbers = LayerCommand.serialize
    monkeypatch.setattr(LayerCommand, "serialize", lambda order: numbers(order)[:-1])
    monkeypatch.setattr(tensor, "_TIMEOUT", FOREVER)
    monkeypatch.setattr(tensor, "_ERROR_TIMEOUT", HUNG)
    said = (
        "worker 1 has failed: ValueError: expected a command to run layers, found a malformed one: "
        ".*load the"
    )
    with pytest.raises(PronkError, match=said) as found:
        llm.generate("x", SamplingParams(max_tokens=4))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("count", [1, 7, 50])
def test_an_interruption_between_two_stages(
    count: int, several: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt waits for the end of the current stage, after which all processes can
    continue.
    """
    params = SamplingParams(max_tokens=1500, ignore_eos=True, temperature=0.8, seed=2)
    operations = itertools.count(1)
    wait = AllReduceGroup._wait

    def interrupt_operation(*given: Any) -> None:
        if next(operations) == count:
            signal.raise_signal(signal.SIGINT)
        wait(*given)

    monkeypatch.setattr(AllReduceGroup, "_wait", interrupt_operation)
    with pytest.raises(KeyboardInterrupt):
        several.generate(PROMPTS, params, drafter="suffix")
    short = replace(params, max_tokens=12)
    one, other = (
        several.generate(PROMPTS, short, drafter=name) for name in ("suffix", "autoregressive")
    )
    assert tokens_and_logprobs(one) == tokens_and_logprobs(other)


def test_refused_options() -> None:
    with pytest.raises(
        OptionError,
        match=r"workers: expected at most 2, the number of key/value heads.*found 3; use",
    ):
        LLM(workers=3, parallel="tensor")
    with pytest.raises(OptionError, match=r"parallel: expected .*tree.*tensor.*found 'pipeline'"):
        LLM(workers=2, parallel="pipeline")
    config: ModelConfig = read_config(Path(LLM().path))
    assert TensorSplit(config, 1, 2).shard_config.num_heads == config.num_heads // 2
    convolution = ConvolutionConfig(3, (True,) * config.num_layers)
    with pytest.raises(
        OptionError,
        match=r"without short convolutions for 'tensor', found llama; use parallel='tree'",
    ):
        TensorSplit(replace(config, convolution=convolution), 0, 2)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        *(
            (family, "norms of the inputs of attention and MLP only")
            for family in ("gemma2", "gemma3_text", "olmo2")
        ),
        *(
            (family, "without experts")
            for family in ("gpt_oss", "granitemoe", "mixtral", "qwen3_moe")
        ),
        ("granite_swa", "without attention sinks"),
        ("lfm2", "without short convolutions"),
    ],
)
def test_families_that_cannot_be_split_are_refused(
    family: str, message: str, checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes before a weight is read or a process starts."""
    monkeypatch.setattr(WeightPlacer, "place", None)
    monkeypatch.setattr(BaseProcess, "start", None)
    with pytest.raises(
        OptionError, match=f"expected a model .*{message}.*found {family}; use parallel='tree'"
    ):
        LLM(checkpoint(family), workers=2, parallel="tensor")


@pytest.mark.parametrize("parallel", ["tensor", "tree"])
def test_recurrent_layers_are_refused(
    parallel: Literal["tensor", "tree"],
    checkpoint: MakeCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(WeightPlacer, "place", None)
    monkeypatch.setattr(BaseProcess, "start", None)
    with pytest.raises(OptionError, match=r"workers: expected 1 for a model with recurrent layers"):
        LLM(checkpoint("qwen3_5_text"), workers=2, parallel=parallel)


def test_a_drafter_that_reads_all_keys_is_refused(several: LLM) -> None:
    with pytest.raises(
        OptionError, match=r"glide: expected the target's whole KV cache.*use parallel='tree'"
    ):
        several.generate("x", drafter="glide")
