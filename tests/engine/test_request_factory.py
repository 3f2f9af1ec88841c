"""Requests with custom logits processors."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from checkpoints import MakeCheckpoint
from pronk import LLM, OptionError, SamplingParams
from pronk.base.arrays import Array
from pronk.checkpoint.config import ModelConfig, RecurrentConfig
from pronk.engine.request_factory import RequestFactory
from pronk.text.tokenizer import Tokenizer


class Steps:
    """Allows the tokens ``last + 1`` and ``last + 2``, modulo ``size``."""

    def __init__(self, made: list[Steps], size: int = 7) -> None:
        self.tokens: list[int] = []
        self.size = size
        made.append(self)

    def mask(self, logits: Array) -> Array:
        last = self.tokens[-1] if self.tokens else 0
        allowed = [(last + step) % self.size for step in (1, 2)]
        masked = np.full_like(logits, -math.inf)
        masked[allowed] = logits[allowed]
        return masked

    def advance(self, token: int) -> None:
        self.tokens.append(token)

    def rollback(self, count: int) -> None:
        del self.tokens[len(self.tokens) - count :]


@pytest.fixture(scope="module")
def llm(checkpoint: MakeCheckpoint) -> LLM:
    return LLM(checkpoint("llama"), drafter="prompt_lookup(min_ngram=1)", budget="all")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_sample_has_its_own_processors(llm: LLM, temperature: float) -> None:
    params = SamplingParams(n=3, max_tokens=40, temperature=temperature, seed=1, ignore_eos=True)
    outputs: dict[str, list[list[int]]] = {}
    for drafter in ("autoregressive", "prompt_lookup(min_ngram=1)"):
        made: list[Steps] = []
        requests = llm.request_factory.create_samples(
            [5, 6, 7], params, llm.get_proposer(drafter), processors=lambda made=made: [Steps(made)]
        )
        llm.engine.run(requests)
        outputs[drafter] = [request.output for request in requests]
        assert [each.tokens for each in made] == outputs[drafter]
        assert any(request.stats.accepted for request in requests) == (drafter != "autoregressive")
    one, other = outputs.values()
    assert one == other
    assert len({tuple(output) for output in one}) == (1 if temperature == 0.0 else 3)
    for output in one:
        assert all((b - a) % 7 in (1, 2) for a, b in zip([0, *output], output, strict=False))


def test_processors_do_not_see_given_output(llm: LLM) -> None:
    made: list[Steps] = []
    params = SamplingParams(max_tokens=12, ignore_eos=True, logit_bias={3: 100.0, 4: 100.0})
    request = llm.request_factory.create_request(
        [5, 6], params, llm.get_proposer(), output=[9, 9], processors=[Steps(made)]
    )
    llm.engine.run([request])
    assert made[0].tokens == request.output[2:]
    assert request.output[:2] == [9, 9]
    assert {3, 4} & {*request.output} == {3, 4}  # logit_bias applies as well


MESSAGES = [{"role": "user", "content": "Hi?"}]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant><think>"


def recurrent(config: ModelConfig) -> ModelConfig:
    """Return a config whose layers are all recurrent."""
    layers = (True,) * config.num_layers
    return replace(config, recurrent=RecurrentConfig(layers, 1, 1, 8, 8, 4))


def test_conversations_have_branch_positions_with_states_and_a_prefix_cache(llm: LLM) -> None:
    tokenizer = Tokenizer(llm.tokenizer.backend, chat_template=TEMPLATE)
    found = RequestFactory(recurrent(llm.config), tokenizer, None, share_prefixes=True).encode_chat(
        MESSAGES
    )
    assert found.token_ids == tokenizer.chat_ids(MESSAGES)
    texts = [tokenizer.decode(found.token_ids[:at]) for at in found.branch_positions]
    assert texts == ["<user>", "<user>Hi?<assistant>"]


@pytest.mark.parametrize(("has_states", "shares"), [(False, True), (True, False)])
def test_other_conversations_are_rendered_once(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, *, has_states: bool, shares: bool
) -> None:
    tokenizer = Tokenizer(llm.tokenizer.backend, chat_template=TEMPLATE)
    monkeypatch.setattr(Tokenizer, "chat_prompt", lambda *_, **__: pytest.fail("rendered again"))
    config = recurrent(llm.config) if has_states else llm.config
    found = RequestFactory(config, tokenizer, None, share_prefixes=shares).encode_chat(MESSAGES)
    assert found == (tokenizer.chat_ids(MESSAGES), ())


def test_branch_positions_belong_to_all_samples_of_a_prompt(llm: LLM) -> None:
    factory = llm.request_factory
    proposer = llm.get_proposer()
    params = [SamplingParams(max_tokens=2, n=2), SamplingParams(max_tokens=2)]
    groups = factory.create_batch([[1, 2, 3], [4, 5]], params, proposer, None, [(1, 2), ()])
    positions = [[request.branch_positions for request in group] for group in groups]
    assert positions == [[(1, 2), (1, 2)], [()]]
    (group,) = factory.create_batch([[1, 2, 3]], params[:1], proposer, None)
    assert [request.branch_positions for request in group] == [(), ()]


def test_a_prediction_is_encoded_as_plain_text(llm: LLM) -> None:
    """Names of special tokens in it are ordinary tokens; token ids stay as they are."""
    text = "a <|endoftext|> b"
    create = llm.request_factory.create_request
    params = SamplingParams(max_tokens=4, prediction=text)
    request = create([5, 6], params, llm.get_proposer())
    assert request.params.prediction == llm.tokenizer.encode_plain(text)
    params = SamplingParams(max_tokens=4, prediction=(3, 4))
    assert create([5, 6], params, llm.get_proposer()).params.prediction == (3, 4)


def test_token_ids_of_a_prediction_are_checked(llm: LLM) -> None:
    size = llm.config.vocab_size
    params = SamplingParams(max_tokens=4, prediction=[0, size])
    with pytest.raises(OptionError, match=f"^prediction: expected token ids in 0..{size - 1}"):
        llm.generate([5, 6], params)
