"""Inputs that drafters read from the target: hidden states, logits, keys and values, and single
ranges of layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import pytest
from torch import Tensor

from oracle import Attend, DenseAttend, DenseModel, to_array
from pronk.base.arrays import FLOAT32, Array
from pronk.cache.blocks import BlockTable
from pronk.cache.paged import PagedCache
from pronk.drafting import Capabilities, DraftContext, Outcome, Proposer
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.layer_executor import LayerExecutor
from pronk.sampling.params import SamplingParams
from pronk.sampling.tree import TokenTree
from tiny_models import (
    VOCAB,
    make_cache,
    make_engine,
    make_request,
    read_kv,
    run,
    tiny_decoder,
    tiny_module,
)

LAYERS = (1, 2, 3)


@dataclass(frozen=True, eq=False)
class ModelReader(Proposer[list[int]]):
    """Proposes a small tree and keeps all outcomes; its draft state is the committed text."""

    name = "reader"
    capabilities: ClassVar[Capabilities] = Capabilities(hidden=LAYERS, logits=True)

    outcomes: list[tuple[list[int], Outcome[list[int]]]] = field(default_factory=list)

    def start(self, prompt: Sequence[int]) -> list[int]:
        return list(prompt)

    def propose(self, contexts: Sequence[DraftContext[list[int]]]) -> list[TokenTree]:
        trees = []
        for context in contexts:
            assert list(context.tokens) == context.state
            assert context.block_table.length == len(context.tokens) - 1
            root = context.tokens[-1]
            tokens = tuple((root + step) % VOCAB for step in (0, 1, 2, 3, 5))
            # The last node cannot be accepted, but its outputs are computed.
            trees.append(TokenTree(tokens, (-1, 0, 1, 1, 0), (True,) * 4 + (False,)))
        return trees

    def observe(self, outcome: Outcome[list[int]]) -> None:
        root = list(outcome.state)
        assert outcome.tree.tokens[0] == root[-1]
        self.outcomes.append((root, outcome))
        outcome.state.extend(outcome.committed)


def dense(
    module: DenseModel, tokens: Sequence[int], attend: Attend
) -> tuple[dict[int, Array], Array]:
    """Return hidden states after each layer and logits of a whole text in one pass."""
    states = module.states(tokens, attend=attend)
    logits = module.logits(states[-1])
    return dict(enumerate(map(to_array, states))), to_array(logits)


def test_a_drafter_reads_hidden_states_and_logits_of_every_node() -> None:
    decoder = tiny_decoder(windows=(None, 7, None))
    engine = make_engine(decoder, prefill_chunk=16)
    reader = ModelReader()
    module = tiny_module(windows=(None, 7, None))
    requests = [
        make_request(prompt, SamplingParams(max_tokens=6, seed=3, temperature=0.5), reader)
        for prompt in ([5, 9, 3], list(range(40)), [7])
    ]
    run(engine, requests)
    assert len(reader.outcomes) >= 3 * 5
    for root, outcome in reader.outcomes:
        tree = outcome.tree
        assert outcome.logits is not None
        assert outcome.logits.shape == (len(tree), VOCAB)
        assert set(outcome.hidden) == set(LAYERS)
        for node in range(len(tree)):
            text = root + [tree.tokens[i] for i in tree.path(node)]
            states, logits = dense(module, text, DenseAttend(module.config))
            for layer in LAYERS:
                np.testing.assert_allclose(
                    outcome.hidden[layer][node], states[layer][-1], atol=2e-4, rtol=1e-4
                )
            np.testing.assert_allclose(outcome.logits[node], logits[-1], atol=2e-4, rtol=1e-4)


@dataclass(frozen=True, eq=False)
class CacheReader(ModelReader):
    """Reads the target's keys and values in ``propose``."""

    capabilities: ClassVar[Capabilities] = Capabilities()
    read: list[tuple[list[int], list[tuple[Array, Array]]]] = field(default_factory=list)
    cache: list[PagedCache] = field(default_factory=list)

    def propose(self, contexts: Sequence[DraftContext[list[int]]]) -> list[TokenTree]:
        for context in contexts:
            held = list(context.tokens[: context.block_table.length])
            kv = [read_kv(self.cache[0], layer, context.block_table) for layer in range(2)]
            self.read.append((held, [(k.copy(), v.copy()) for k, v in kv]))
        return [TokenTree.chain(context.tokens[-1:]) for context in contexts]


@dataclass
class Recorder:
    """Dense attention that keeps its keys and values."""

    attend: DenseAttend
    seen: list[tuple[Array, Array]] = field(default_factory=list)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.seen.append((to_array(k), to_array(v)))
        return self.attend(layer, q, k, v)


def test_keys_and_values_can_be_read() -> None:
    decoder = tiny_decoder()
    engine = make_engine(decoder)
    reader = CacheReader()
    reader.cache.append(engine.cache)
    run(engine, [make_request([5, 9, 3, 8], SamplingParams(max_tokens=5), reader)])
    assert [len(held) for held, _ in reader.read] == [4, 5, 6], "the last token has no draft tokens"
    for held, layers in reader.read:
        recorder = Recorder(DenseAttend(decoder.config))
        dense(tiny_module(), held, recorder)
        for (k, v), (expected_k, expected_v) in zip(layers, recorder.seen, strict=True):
            np.testing.assert_allclose(k, expected_k.swapaxes(0, 1), atol=1e-4, rtol=1e-4)
            np.testing.assert_allclose(v, expected_v.swapaxes(0, 1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cut", [1, 2])
def test_first_layers_run_on_their_own(cut: int) -> None:
    decoder = tiny_decoder(windows=(None, None, None))
    cache = make_cache(decoder.config, FLOAT32)
    executor = LayerExecutor(decoder, cache)
    block_table = BlockTable()
    cache.prepare(block_table, 12)
    entry = BatchEntry(block_table, TokenTree.chain(range(12)), range(0), 12)
    batch = ForwardBatch([entry])
    first, no_logits, *_ = executor.run(batch, cut, range(cut + 1))
    executor.run(batch, cut, [cut])
    executor.run(batch, 3, [cut])  # a program of its own, which stores the later layers, too
    held = replace(block_table, length=12)
    stored = [array.copy() for layer in range(3) for array in read_kv(cache, layer, held)]
    whole, logits, *_ = executor.run(batch, 3, range(4))
    assert logits is not None
    assert no_logits is None
    assert list(whole) == [0, 1, 2, 3], "the embedding, then the layers"
    assert list(first) == [*range(cut + 1)]
    for layer, states in first.items():
        assert np.array_equal(states, whole[layer])
    again = [array for layer in range(3) for array in read_kv(cache, layer, held)]
    assert all(np.array_equal(one, other) for one, other in zip(stored, again, strict=True))
