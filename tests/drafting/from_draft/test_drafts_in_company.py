"""State that draft models, requests and steps must not share: random numbers, acceptance rates,
waiting time.
"""

import signal
from collections import defaultdict
from typing import Any

import pytest

import pronk.sampling.sampler
from drafting.drafting import bound, watch_draft
from drafting.from_draft.drafts import draft_folder
from engine.cases import text
from pronk.engine.request import Request
from pronk.sampling.logits_processors import TokenContext
from pronk.sampling.noise import trial_seed
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from tiny_models import make_engine, make_request, run, tiny_decoder

RIGHT = 0.03
FAIR = 0.25
WRONG = 3.0


def model(noise: float, more: str = "") -> str:
    return f"draft_model(model={draft_folder(noise)!r}{more})"


@pytest.mark.parametrize(
    "spec",
    [
        f"first_of(prompt_lookup(min_ngram=2), {model(RIGHT)})",
        model(FAIR),
    ],
    ids=["first_of", "chain"],
)
@pytest.mark.parametrize("rule", [pytest.param("rejection", marks=pytest.mark.slow), "block"])
def test_random_numbers_of_drawn_draft_tokens_are_used_in_one_step(
    monkeypatch: pytest.MonkeyPatch, spec: str, rule: Any
) -> None:
    """Draft tokens of two steps would be correlated if both steps used the same random number."""
    steps = defaultdict[tuple[int, ...], set[int]](set)
    now = [0]
    draw = pronk.sampling.sampler.draft_noise

    def spy(seed: int, root: int, position: int, ids: Any) -> Any:
        steps[seed, root, position].add(now[0])
        return draw(seed, root, position, ids)

    monkeypatch.setattr(pronk.sampling.sampler, "draft_noise", spy)
    engine = make_engine(tiny_decoder())
    drafter = bound(spec, engine)
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=5, rule=rule)
    request = make_request(text(3, 20), params, drafter)
    engine.add(request)
    while request.result.finish_reason is None:
        engine.step()
        now[0] += 1
    assert request.stats.drafted > 0
    assert all(len(seen) == 1 for seen in steps.values())
    assert bool(steps) == (not spec.startswith("staged"))


def test_prompts_with_one_seed_have_different_trial_seeds() -> None:
    assert trial_seed(7, [1, 2, 3]) == trial_seed(7, [1, 2, 3])
    assert (
        len(
            {
                trial_seed(seed, prompt)
                for seed in (0, 7)
                for prompt in ((1, 2, 3), (1, 2), (3, 2, 1))
            }
        )
        == 6
    )
    assert all(0 <= trial_seed(2**63 - 1, [token]) < 2**63 for token in range(50))
    rejecting = SamplingParams(temperature=1.0, rule="rejection")
    assert (
        Sampler(rejecting, 7, TokenContext([1, 2]), 9).trial_seed
        != Sampler(rejecting, 7, TokenContext([2, 1]), 9).trial_seed
    )
    coupled = SamplingParams(temperature=1.0)
    assert (
        Sampler(coupled, 7, TokenContext([1, 2]), 9).seed
        == Sampler(coupled, 7, TokenContext([2, 1]), 9).seed
        == 7
    )


def test_a_draft_does_not_learn_from_another_drafts_tokens() -> None:
    engine = make_engine(tiny_decoder())
    drafter = bound(f"first_of({model(WRONG)}, {model(RIGHT)})", engine)
    request = make_request(text(1, 30), SamplingParams(max_tokens=40), drafter)
    run(engine, [request])
    wrong, right = (
        request.speculation.ledger.acceptance.rates(part.label) for part in drafter.parts
    )
    assert wrong.mean(0.5) < 0.5
    assert sum(wrong.reached.values()) > 0
    assert right.reached == {}
    assert len(request.stats.sources) == 1


def test_a_long_prompt_does_not_delay_other_requests() -> None:
    """The draft reads at most one chunk per step and proposes for requests with a complete
    prompt.
    """
    engine = make_engine(tiny_decoder(), num_blocks=800)
    drafter = bound(model(RIGHT, ", num_tokens=2"), engine)
    passes = watch_draft(drafter.draft)
    long = text(5, 1500)
    short = text(4, 60)
    requests = [
        make_request(prompt, SamplingParams(max_tokens=60), drafter) for prompt in (short, long)
    ]
    for request in requests:
        engine.add(request)
    before = 0
    while not all(request.result.finish_reason for request in requests):
        engine.step()
        assert sum(sum(each.rows) for each in passes[before:]) <= 512 + 2 * 8
        before = len(passes)
    assert all(request.stats.accepted > 0 for request in requests)
    alone = make_engine(tiny_decoder(), num_blocks=800)
    for request in requests:
        other = make_request(request.prompt, SamplingParams(max_tokens=60))
        run(alone, [other])
        assert other.output == request.output


class Burn(list[int]):
    """A list that raises KeyboardInterrupt at the ``left``-th append or deletion while it is
    ``armed``.
    """

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left
        self.armed = False

    def append(self, token: int) -> None:
        super().append(token)
        self.burn()

    def __delitem__(self, key: Any) -> None:
        self.burn()
        super().__delitem__(key)

    def burn(self) -> None:
        self.left -= self.armed
        if self.armed and not self.left:
            signal.raise_signal(signal.SIGINT)

    def install(self, patch: pytest.MonkeyPatch, drafter: type, request: Request) -> None:
        """Replace the tentative tokens of the request's sampler by this list, armed while the
        drafter proposes.
        """
        propose = drafter.propose

        def armed_propose(drafter: Any, contexts: Any) -> Any:
            self.armed = True
            try:
                return propose(drafter, contexts)
            finally:
                self.armed = False

        patch.setattr(request.sampler.context, "tentative", self)
        patch.setattr(drafter, "propose", armed_propose)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(f"threshold({model(FAIR)})", id="threshold"),
    ],
)
def test_samplers_recover_from_an_interrupted_update(spec: str) -> None:
    """After an interruption between noting and counting a token, penalties see the true text."""
    params = SamplingParams(
        30, temperature=0.8, seed=3, frequency_penalty=1.0, repetition_penalty=1.2
    )
    want = make_request(text(2, 25), params)
    run(make_engine(tiny_decoder()), [want])
    for at in range(1, 40, 3):
        engine = make_engine(tiny_decoder())
        drafter = bound(spec, engine)
        got = make_request(text(2, 25), params, drafter)
        engine.add(got)
        interrupted = 0
        with pytest.MonkeyPatch.context() as patch:
            Burn(at).install(patch, type(drafter), got)
            while got.result.finish_reason is None:
                try:
                    engine.step()
                except KeyboardInterrupt:
                    interrupted += 1
        assert interrupted == 1
        assert got.output == want.output
