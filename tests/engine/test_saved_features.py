"""Layers' outputs and projections in the target's KV cache: one row per token of the text."""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import pytest

from drafting.trees import TreeDrafter, oracle_trees, random_trees
from engine.cases import ENDS, PROMPTS, step_until_ended, texts, total
from oracle import DenseModel, to_array
from pronk.base.arrays import BFLOAT16, FLOAT32, Array, DType
from pronk.base.errors import CacheFullError, OptionError
from pronk.cache.blocks import BlockTable
from pronk.cache.budget import KVBudget
from pronk.cache.layout import kv_bytes_per_token
from pronk.cache.paged import PagedCache, SavedFeature
from pronk.drafting import Drafter, PromptLookup
from pronk.drafting.target import Target
from pronk.engine.engine import Engine
from pronk.engine.options import BatchOptions
from pronk.engine.request import Request
from pronk.kernels.library import Kernels
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.linear import Linear, WeightLayout
from pronk.models.model_runner import ModelRunner
from pronk.models.program import LinearOutput, Program
from pronk.sampling.params import SamplingParams
from pronk.sampling.tree import TokenTree
from tiny_models import kernels, make_engine, make_request, run_alone, tiny_decoder, tiny_module


class Part:
    """A projection: some of the embedding, and some of layer 2."""

    layers = (0, 2)
    width = 10
    identity = "part of the embedding and of layer 2"
    only_logits_rows = False

    def __init__(self, by: Kernels) -> None:
        self._backend = by

    def compile(self, program: Program, collected: Mapping[int, int]) -> None:
        size = program.hidden
        weight = np.zeros((self.width, 2 * size), FLOAT32)
        for output in range(self.width):
            weight[output, output if output < 4 else size + output - 4] = 1 if output < 4 else 2
        linear = Linear(self._backend, weight, None, WeightLayout(), None)
        program.norm(None, source=collected[0], part=(0, 2))
        program.norm(None, part=(1, 2))
        program.linear(linear, source="A", output=LinearOutput(feature=self))

    def compute(self, outputs: Sequence[Array]) -> Array:
        """Return the values ``[rows, width]`` of the outputs of both layers."""
        embedding, output = outputs
        return np.concatenate((embedding[:, :4], 2 * output[:, :6]), axis=1)


PART = Part(kernels())


def dense(module: DenseModel, tokens: Sequence[int], feature: SavedFeature) -> Array:
    """Return the outputs of a layer, or a projection, computed in one pass without a KV cache."""
    if not isinstance(feature, int):
        assert isinstance(feature, Part)
        return feature.compute([dense(module, tokens, layer) for layer in feature.layers])
    if feature == 0:
        return to_array(module.embedding[list(tokens)].float())
    return to_array(module.states(tokens)[feature])


def check(
    engine: Engine, module: DenseModel, requests: Sequence[Request], layers: Sequence[SavedFeature]
) -> int:
    """Compare saved features of running requests with dense passes of ``module``; return the number
    of rows.
    """
    rows = 0
    for request in requests:
        block_table = request.block_table
        first = request.block_table.num_released * engine.cache.block_size
        if block_table.length <= first:
            continue
        rows += block_table.length - first
        for layer in layers:
            want = dense(module, request.tokens[: block_table.length], layer)[first:]
            found = engine.cache.read_feature(layer, block_table, first, block_table.length)
            np.testing.assert_allclose(found, want, atol=3e-4, rtol=1e-3)
    return rows


@pytest.mark.parametrize("windows", [(None, None), (24, 24)], ids=["all", "window"])
def test_saved_features_equal_those_of_a_dense_pass(windows: tuple[int | None, ...]) -> None:
    decoder = tiny_decoder(windows=windows)
    module = tiny_module(windows=windows)
    params = [
        SamplingParams(max_tokens=24, seed=i, temperature=0.0 if i % 2 else 0.9) for i in range(4)
    ]
    known = [run_alone(decoder, PROMPTS[i], params[i], stop_token_ids=ENDS) for i in range(4)]
    oracle = TreeDrafter(oracle_trees(0.8), texts(known), stop_token_ids=ENDS)
    drafters: list[Drafter] = [oracle, TreeDrafter(random_trees), PromptLookup()]
    engine = make_engine(decoder, prefill_chunk=32)
    features = (1, 2, Part(decoder.kernels))
    for feature in features:
        engine.target.save_feature(feature, engine)
    requests = [
        make_request(PROMPTS[i], params[i], drafters[i % 3], stop_token_ids=ENDS) for i in range(4)
    ]
    for request in requests:
        engine.add(request)
    rows = 0
    while not all(request.ended for request in requests):
        engine.step()
        rows += check(
            engine, module, [request for request in requests if not request.ended], features
        )
    assert [request.output for request in requests] == [request.output for request in known]
    assert rows > 1000 or windows[0]
    assert rows > 500
    assert total(requests, "accepted") > 10
    assert total(requests, "moved") > 0


@pytest.mark.parametrize("weights", ["plain", "int8"])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_features_do_not_change_the_bits_of_the_model(dtype: DType, weights: str) -> None:
    """A feature's matrix of float32 leaves the model's activations in bfloat16."""
    decoder = tiny_decoder(dtype, weights=weights)
    prompt = PROMPTS[2]
    logits = list[Array]()
    for features in ((), (1, PART)):
        engine = make_engine(decoder)
        for feature in features:
            engine.target.save_feature(feature, engine)
        table = BlockTable()
        engine.cache.prepare(table, len(prompt))
        entry = BatchEntry(table, TokenTree.chain(prompt), range(len(prompt)))
        logits.append(engine.target.runner.forward(ForwardBatch([entry])).logits[0][:])
    table.length = len(prompt)
    assert engine.cache.read_feature(PART, table, 0, len(prompt)).any()
    np.testing.assert_array_equal(*logits)


def test_samples_share_the_saved_features_of_their_prompt() -> None:
    engine = make_engine(tiny_decoder())
    for feature in (1, PART):
        engine.target.save_feature(feature, engine)
    first = make_request(
        PROMPTS[2], SamplingParams(max_tokens=8, temperature=0.9, seed=1), stop_token_ids=()
    )
    second = make_request(
        PROMPTS[2], SamplingParams(max_tokens=8, temperature=0.9, seed=2), stop_token_ids=()
    )
    second.parent = first
    for request in (first, second):
        engine.add(request)
    shared = 0
    while not (first.ended and second.ended):
        engine.step()
        check(
            engine, tiny_module(), [each for each in (first, second) if not each.ended], (1, PART)
        )
        shared += bool(set(first.block_table.blocks) & set(second.block_table.blocks))
    assert shared
    assert first.output != second.output


def test_saved_features_count_in_the_memory_budget() -> None:
    config = tiny_decoder().config
    make_pool = partial(PagedCache, kernels=kernels())
    budget = KVBudget("1MB", 4)
    pool = budget.add(config, FLOAT32, make_pool)
    before = pool.allocator.num_blocks
    budget.save_feature(pool, 2, budget)
    assert pool.features.keys() == {2}
    own = kv_bytes_per_token(config, FLOAT32)
    wanted = own / (own + config.hidden_size * 4)
    assert pool.allocator.num_blocks == pytest.approx(before * wanted, abs=1)
    after = pool.allocator.num_blocks
    budget.save_feature(pool, 2, budget)
    assert pool.allocator.num_blocks == after
    block_table = make_request(PROMPTS[0], SamplingParams()).block_table
    pool.prepare(block_table, 20)
    with pytest.raises(OptionError, match="finish or abort them first"):
        budget.save_feature(pool, 1, budget)
    assert pool.features.keys() == {2}


def test_outputs_without_a_reader_are_not_kept() -> None:
    config = tiny_decoder().config
    make_pool = partial(PagedCache, kernels=kernels())
    budget = KVBudget("1MB", 4)
    pool = budget.add(config, FLOAT32, make_pool)

    class Reader:
        pass

    first = Reader()
    second = Reader()
    budget.save_feature(pool, 1, first)
    blocks = pool.allocator.num_blocks
    budget.save_feature(pool, 1, second)
    del first
    budget.save_feature(pool, 2, second)
    assert pool.features.keys() == {1, 2}
    del second
    third = Reader()
    budget.save_feature(pool, 2, third)
    budget.add(config, FLOAT32, make_pool)
    assert pool.features.keys() == {2}
    assert pool.allocator.num_blocks < blocks


def test_a_waiting_request_that_no_longer_fits_ends_with_an_error() -> None:
    decoder = tiny_decoder()
    budget = KVBudget("320kB", 4)
    pool = budget.add(decoder.config, FLOAT32, partial(PagedCache, kernels=decoder.kernels))
    target = Target(ModelRunner(decoder, pool), budget=budget, max_tree=16)
    engine = Engine(target, BatchOptions())
    num_slots = pool.allocator.num_blocks * pool.block_size
    request = make_request(PROMPTS[0], SamplingParams(max_tokens=num_slots - 40), stop_token_ids=())
    engine.add(request)
    engine.target.save_feature(2, engine)
    engine.step()
    assert isinstance(request.result.error, CacheFullError)
    engine.step()
    small = make_request(PROMPTS[0], SamplingParams(max_tokens=4), stop_token_ids=())
    engine.add(small)
    step_until_ended(engine, [small])
    assert small.result.error is None


def test_prefix_hits_have_saved_features() -> None:
    """Blocks written before a layer's outputs were saved give no prefix hits."""
    engine = make_engine(tiny_decoder(), share_prefixes=True)
    module = tiny_module()
    prompt = PROMPTS[2]
    for kept in ((), (1,), (1, 2), (1, PART)):
        for layer in kept:
            engine.target.save_feature(layer, engine)
        for seed in range(2):
            request = make_request(
                prompt, SamplingParams(max_tokens=20, temperature=0.9, seed=seed)
            )
            engine.add(request)
            rows = 0
            while not request.ended:
                engine.step()
                rows += check(engine, module, [] if request.ended else [request], kept)
            assert (request.stats.cached_tokens > 0) == bool(seed)
            assert rows > 0
