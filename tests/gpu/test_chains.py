"""Chains of draft tokens in one graph, against those of the processor."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gpu.tiny_gpu import gpu_runner
from pronk.cache.blocks import BlockTable
from pronk.gpu import runner as module
from pronk.gpu.chains import ChainJob, deliver
from pronk.models.forward_batch import BatchEntry
from pronk.models.model_runner import ModelRunner
from pronk.sampling.draft_token import DraftToken
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.sampling.tree import TokenTree
from tiny_models import decoder_of, kernels, make_engine, make_request, tiny_module

pytestmark = pytest.mark.usefixtures("small_tiles")

SMALL: dict[str, Any] = {"heads": 2, "kv_heads": 1}
TEXTS = ([5, 17, 9], [40], [8, 8, 3, 60, 2])


def sampler_of(text: Sequence[int], temperature: float) -> Sampler:
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=9)
    return make_request(text, params).sampler


def draft(
    runner: ModelRunner, text: Sequence[int], sampler: Sampler, most: int
) -> list[DraftToken]:
    """Return a chain of ``most`` tokens after a text that is not cached."""
    table = BlockTable()
    runner.cache.prepare(table, len(text) + most - 1)
    entry = BatchEntry(table, TokenTree.chain(text), range(len(text) - 1, len(text)))
    tokens = list[DraftToken]()

    def take(token: DraftToken) -> bool:
        tokens.append(token)
        return len(tokens) < most

    assert runner.draft_chain(entry, sampler, most, take) == most
    runner.cache.release(table)
    return tokens


def assert_same_chain(got: Sequence[DraftToken], want: Sequence[DraftToken]) -> None:
    """Check the tokens, their confidences, and the siblings that ``cape`` may add."""
    assert [each.token for each in got] == [each.token for each in want]
    for one, other in zip(got, want, strict=True):
        assert one.confidence == pytest.approx(other.confidence, rel=1e-4)
        tokens, probabilities = zip(*one.top_tokens(17), strict=True)
        others, expected = zip(*other.top_tokens(17), strict=True)
        assert tokens == others
        assert np.allclose(probabilities, expected, rtol=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chains_are_those_of_the_processor(temperature: float) -> None:
    """The graph is that of 4 passes, of which 3 are used; unused rows write no slot of a text."""
    runner = gpu_runner(**SMALL)
    runner.device_executor.chains.pads = True
    own = make_engine(decoder_of(tiny_module(**SMALL), kernels())).runner
    text = TEXTS[0]
    got = draft(runner, text, sampler_of(text, temperature), 3)
    assert_same_chain(got, draft(own, text, sampler_of(text, temperature), 3))


def test_chains_of_a_batch_are_those_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests of different lengths, greedy and sampled, in one padded graph."""
    runner = gpu_runner(**SMALL)
    jobs = list[ChainJob]()
    alone = list[list[DraftToken]]()
    for number, text in enumerate(TEXTS):
        sampler = sampler_of(text, 0.4 * number)
        assert sampler.stateless_sampler is not None
        alone.append(draft(runner, text, sampler, 1 + number))
        table = BlockTable()
        runner.cache.prepare(table, len(text) + number)
        entry = BatchEntry(table, TokenTree.chain(text), range(len(text) - 1, len(text)))
        jobs.append(ChainJob(entry, sampler.stateless_sampler, len(text), 1 + number))
    monkeypatch.setattr(runner.device_executor.chains, "pads", True)
    for got, want in zip(runner.device_executor.chains.draft(jobs), alone, strict=True):
        found = [each for each in got if each is not None]
        assert [each.token for each in found] == [each.token for each in want]
        assert [each.confidence for each in found] == [each.confidence for each in want]


def test_rows_before_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of more rows than the first pass of a graph has."""
    runner = gpu_runner(**SMALL)
    text = TEXTS[2]
    want = draft(runner, text, sampler_of(text, 0.0), 2)
    monkeypatch.setattr(module, "MAX_FIRST_ROWS", 2)
    got = draft(runner, text, sampler_of(text, 0.0), 2)
    assert [each.token for each in got] == [each.token for each in want]
    assert [each.confidence for each in got] == [each.confidence for each in want]


def test_only_plain_requests_draft_at_once() -> None:
    runner = gpu_runner(**SMALL)
    plain = make_request([1], SamplingParams(temperature=0.8)).sampler
    truncated = make_request([1], SamplingParams(temperature=0.8, top_k=4)).sampler
    assert runner.supports_draft_chain(plain)
    assert not runner.supports_draft_chain(truncated)


def test_a_chain_ends_where_its_receiver_ends_it() -> None:
    token = DraftToken(4, 0.5, np.zeros(3, np.float32))
    assert deliver([token, token, token], lambda _: True) == 3
    assert deliver([token, token, token], lambda _: False) == 1
    assert deliver([token, None, token], lambda _: True) == 2
