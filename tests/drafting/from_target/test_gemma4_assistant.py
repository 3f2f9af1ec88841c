"""Gemma 4's assistant: drafts equal those of transformers, and texts those of plain decoding."""

from pathlib import Path
from typing import Any

import pytest

from checkpoints import MakeCheckpoint
from drafting.drafting import Watched, assert_plain, sampler_at, text
from drafting.from_target.random_assistant import (
    AssistantOracle,
    copying_folder,
    write_for_gemma4,
)
from drafting.from_target.trained_eagle import bigram_decoder
from engine.cases import total
from models.test_loader import load
from pronk import SamplingParams
from pronk.drafting import Proposer, make_drafter
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from tiny_models import kernels, make_engine, make_request, run

CLUSTERS = 12  # of 25 tokens
PROMPTS = [[1, 2, 3], [5], [token % 300 for token in text(7, 40)]]


class Pair:
    """A target and its assistant, in files."""

    def __init__(self, target: Path, assistant: Path) -> None:
        self.target = target
        self.assistant = assistant

    def engine(self, **options: Any) -> Engine:
        return make_engine(load(self.target, kernels=kernels()), folder=self.target, **options)

    def spec(self, **options: Any) -> str:
        given = "".join(f", {name}={value!r}" for name, value in options.items())
        return f"gemma4_assistant(model={str(self.assistant)!r}{given})"


@pytest.fixture(scope="module", params=[0, CLUSTERS], ids=["full head", "two stages"])
def pair(
    request: pytest.FixtureRequest,
    checkpoint: MakeCheckpoint,
    tmp_path_factory: pytest.TempPathFactory,
) -> Pair:
    target = checkpoint("gemma4_text")
    width = load(target, kernels=kernels()).config.hidden_size
    folder = tmp_path_factory.mktemp("assistant")
    return Pair(target, write_for_gemma4(folder, width, clusters=request.param))


def decode(
    engine: Engine, drafter: Proposer[Any], prompts: list[list[int]], **options: Any
) -> list[Request]:
    """Decode prompts in one batch; the outputs must be those of plain decoding."""
    params = [
        SamplingParams(**{"max_tokens": 14, "seed": seed, "ignore_eos": True, **options})
        for seed in range(len(prompts))
    ]
    requests = [
        make_request(prompt, own, drafter) for prompt, own in zip(prompts, params, strict=True)
    ]
    run(engine, requests)
    assert_plain(engine, requests)
    return requests


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_equal_those_of_transformers(pair: Pair, temperature: float) -> None:
    """The texts are longer than the window of the target's sliding layers."""
    engine = pair.engine()
    drafter = Watched(make_drafter(pair.spec(num_tokens=4)).bind(engine.target))
    requests = decode(engine, drafter, PROMPTS, temperature=temperature)
    oracle = AssistantOracle(pair.target, pair.assistant)
    num_drafted = 0
    for request in requests:
        for asked in drafter.of(request)[::2]:
            if len(asked.tokens) == 1:
                assert not asked.tree.num_draft_tokens
                continue
            oracle.begin(asked.tokens)
            sampler = sampler_at(request, asked.tokens)
            for token in asked.tree.tokens[1:]:
                assert token == sampler.choose(oracle.logits)
                oracle.add(token)
                sampler.advance(token)
            num_drafted += asked.tree.num_draft_tokens
    assert num_drafted > 40


def test_right_drafts_are_accepted() -> None:
    spec = f"gemma4_assistant(model={copying_folder()!r}, num_tokens=4)"
    engine = make_engine(bigram_decoder())
    drafter = make_drafter(spec).bind(engine.target)
    requests = decode(engine, drafter, PROMPTS[:2], max_tokens=30)
    assert total(requests, "accepted") > 0.9 * total(requests, "drafted")
    assert total(requests, "target_steps") < 0.4 * total(requests, "generated_tokens")
