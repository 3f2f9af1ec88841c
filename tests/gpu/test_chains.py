"""Chains of draft tokens in one graph, against those of the processor."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from engine.cases import SPECS
from gpu.tiny_gpu import count_calls, gpu_engine, gpu_runner
from pronk.cache.blocks import BlockTable
from pronk.drafting import make_drafter
from pronk.gpu import chains as module
from pronk.gpu.chains import Chains, deliver
from pronk.models.forward_batch import BatchEntry
from pronk.models.layer_executor import ChainJob
from pronk.models.model_runner import ModelRunner
from pronk.sampling.draft_token import DraftToken
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.sampling.tree import TokenTree
from tiny_models import decoder_of, kernels, make_engine, make_request, run, tiny_module

pytestmark = pytest.mark.usefixtures("small_tiles")

SMALL: dict[str, Any] = {"heads": 2, "kv_heads": 1}
TEXTS = ([5, 17, 9], [40], [8, 8, 3, 60, 2])


def sampler_of(text: Sequence[int], temperature: float) -> Sampler:
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=9)
    return make_request(text, params).sampler


def chain_job(
    runner: ModelRunner, text: Sequence[int], sampler: Sampler, most: int
) -> tuple[ChainJob, list[DraftToken]]:
    """Return a job of ``most`` tokens after a text that is not cached, and its tokens' list."""
    table = BlockTable()
    runner.cache.prepare(table, len(text) + most - 1)
    entry = BatchEntry(table, TokenTree.chain(text), range(len(text) - 1, len(text)))
    tokens = list[DraftToken]()

    def take(token: DraftToken) -> bool:
        tokens.append(token)
        return len(tokens) < most

    return ChainJob(entry, sampler, most, take), tokens


def draft(
    runner: ModelRunner, text: Sequence[int], sampler: Sampler, most: int
) -> list[DraftToken]:
    """Return the chain of :func:`chain_job`."""
    job, tokens = chain_job(runner, text, sampler, most)
    assert runner.draft_chains([job]) == [most]
    runner.cache.release(job.entry.block_table)
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
    """Three requests of different lengths, greedy and sampled, in one padded graph.

    A part of the longest text is run before the graph.
    """
    runner = gpu_runner(**SMALL)
    samplers = [sampler_of(text, 0.4 * number) for number, text in enumerate(TEXTS)]
    alone = [
        draft(runner, text, sampler, 1 + number)
        for number, (text, sampler) in enumerate(zip(TEXTS, samplers, strict=True))
    ]
    # three rows for each text
    monkeypatch.setattr(module, "MAX_FIRST_ROWS", 9)
    monkeypatch.setattr(runner.device_executor.chains, "pads", True)
    made = [
        chain_job(runner, text, sampler, 1 + number)
        for number, (text, sampler) in enumerate(zip(TEXTS, samplers, strict=True))
    ]
    passes = count_calls(monkeypatch, runner.device_executor, "run")
    assert runner.draft_chains([job for job, _ in made]) == [1, 2, 3]
    assert len(passes) == 1
    for (_, got), want in zip(made, alone, strict=True):
        assert [each.token for each in got] == [each.token for each in want]
        assert [each.confidence for each in got] == [each.confidence for each in want]


def test_requests_of_a_step_share_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """One drafter, two requests: the text of each is that of plain decoding."""
    counts = list[int]()
    draft_chains = Chains.draft

    def counted(chains: Chains, jobs: Sequence[ChainJob], *arguments: Any) -> list[int]:
        counts.append(len(jobs))
        return draft_chains(chains, jobs, *arguments)

    monkeypatch.setattr(Chains, "draft", counted)
    texts = []
    for spec in ("autoregressive", SPECS["draft_model"]):
        engine = gpu_engine(**SMALL, windows=(None,))
        drafter = make_drafter(spec).bind(engine.target)
        requests = [
            make_request(text, SamplingParams(max_tokens=4, temperature=temperature), drafter)
            for text, temperature in zip(TEXTS[:2], (0.0, 0.8), strict=True)
        ]
        run(engine, requests)
        texts.append([request.tokens for request in requests])
    assert 2 in counts
    assert sum(request.stats.drafted for request in requests) > 2
    assert texts[0] == texts[1]


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
