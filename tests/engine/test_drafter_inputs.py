"""Inputs that drafters read from the target: hidden states, logits, keys and values, and single ranges of layers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from oracle import DenseAttend
from pronk.drafters import Capabilities, DraftContext, Outcome, Proposer
from pronk.kv_cache.paged import PagedCache
from pronk.models.decoder import Decoder
from pronk.sampling.params import SamplingParams
from pronk.speculation.tree import TokenTree
from tiny_models import VOCAB, make_engine, make_request, run, tiny_decoder

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


def dense(decoder: Decoder, tokens: Sequence[int]) -> tuple[dict[int, Tensor], Tensor]:
    """Return hidden states after each layer and logits of a whole text in one pass."""
    ids, positions = torch.tensor(tokens), torch.arange(len(tokens))
    x = decoder.embed(ids, positions, torch.float32)
    rope = decoder.rope(positions, positions + 1, torch.float32)
    states = dict(decoder.run(x, rope, DenseAttend(decoder.config)))
    return states, decoder.logits(states[len(decoder.layers)])


@torch.inference_mode()
def test_a_drafter_reads_hidden_states_and_logits_of_every_node() -> None:
    decoder = tiny_decoder(windows=(None, 7, None))
    engine, reader = make_engine(decoder, prefill_chunk=16), ModelReader()
    plain = tiny_decoder(windows=(None, 7, None), packed=False)
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
            states, logits = dense(plain, text)
            for layer in LAYERS:
                torch.testing.assert_close(outcome.hidden[layer][node], states[layer][-1], atol=2e-4, rtol=1e-4)
            torch.testing.assert_close(outcome.logits[node], logits[-1], atol=2e-4, rtol=1e-4)


@dataclass(frozen=True, eq=False)
class CacheReader(ModelReader):
    """Reads the target's keys and values in ``propose``."""

    capabilities: ClassVar[Capabilities] = Capabilities()
    read: list[tuple[list[int], list[tuple[Tensor, Tensor]]]] = field(default_factory=list)
    cache: list[PagedCache] = field(default_factory=list)

    def propose(self, contexts: Sequence[DraftContext[list[int]]]) -> list[TokenTree]:
        for context in contexts:
            held = list(context.tokens[: context.block_table.length])
            kv = [self.cache[0].read(layer, context.block_table) for layer in range(2)]
            self.read.append((held, [(k.clone(), v.clone()) for k, v in kv]))
        return [TokenTree.chain(context.tokens[-1:]) for context in contexts]


@dataclass
class Recorder:
    """Dense attention that keeps its keys and values."""

    attend: DenseAttend
    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.seen.append((k, v))
        return self.attend(layer, q, k, v)


@torch.inference_mode()
def test_keys_and_values_can_be_read() -> None:
    decoder = tiny_decoder()
    engine, reader, plain = make_engine(decoder), CacheReader(), tiny_decoder(packed=False)
    reader.cache.append(engine.cache)
    run(engine, [make_request([5, 9, 3, 8], SamplingParams(max_tokens=5), reader)])
    assert [len(held) for held, _ in reader.read] == [4, 5, 6], "the last token has no draft tokens"
    for held, layers in reader.read:
        recorder = Recorder(DenseAttend(decoder.config))
        positions = torch.arange(len(held))
        x = plain.embed(torch.tensor(held), positions, torch.float32)
        list(plain.run(x, plain.rope(positions, positions + 1, torch.float32), recorder))
        for (k, v), (expected_k, expected_v) in zip(layers, recorder.seen, strict=True):
            torch.testing.assert_close(k, expected_k.transpose(0, 1), atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(v, expected_v.transpose(0, 1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cut", [1, 2])
@torch.inference_mode()
def test_ranges_of_layers_run_on_their_own(cut: int) -> None:
    decoder = tiny_decoder(windows=(None, None, None), packed=False)
    tokens, positions = torch.arange(12), torch.arange(12)
    rope = decoder.rope(positions, positions + 1, torch.float32)
    attend = DenseAttend(decoder.config)
    x = decoder.embed(tokens, positions, torch.float32)
    whole = dict(decoder.run(x, rope, attend))
    first = dict(decoder.run(x, rope, attend, 0, cut))
    rest = dict(decoder.run(first[cut], rope, attend, cut))
    assert list(first) == list(range(1, cut + 1))
    assert list(rest) == list(range(cut + 1, 4))
    for layer, state in whole.items():
        assert torch.equal(state, first.get(layer, rest.get(layer)))
