"""The drafter ``prediction``: what it proposes, and that it drafts again after each kind of edit."""

import random
from typing import Any

import pytest

from drafting.helpers import context, looping, step
from pronk.drafting import Auto, Autoregressive, Prediction, make_drafter
from pronk.drafting.from_text.prediction import PRIORS
from pronk.engine.request import Request
from pronk.sampling.params import SamplingParams
from tiny_models import VOCAB, make_engine, make_request, run, tiny_decoder

PROMPT = [1, 2, 3]


def propose(
    output: list[int], prediction: list[int] | None, drafter: Prediction | None = None, **more: Any
) -> tuple[int, ...]:
    """Return the draft tokens after an output; the prompt is not a part of it."""
    drafter = drafter or Prediction()
    params = SamplingParams(prediction=prediction)
    made = context(drafter.start(PROMPT), [*PROMPT, *output], params=params, **more)
    made.sampler.context.num_prompt = len(PROMPT)
    (tree,) = drafter.propose([made])
    return tree.tokens[1:]


def test_the_prediction_is_proposed_from_its_place_on() -> None:
    prediction = [*range(10, 50)]
    assert propose([], prediction) == tuple(range(10, 41))
    assert propose([10, 11], prediction) == tuple(range(12, 43))
    assert propose([10, 11, 5, 20], prediction, depth=3) == (21, 22, 23, 12, 13, 14)
    assert propose([*range(10, 50)], prediction) == ()


def test_the_prompt_is_not_aligned() -> None:
    assert propose([], [1, 2, 3, 4], depth=2) == (1, 2)


def test_limits_bound_the_tree() -> None:
    prediction = [*range(10, 60)]
    assert len(propose([], prediction, Prediction(num_tokens=5))) == 5
    assert len(propose([], prediction, depth=4)) == 4
    assert len(propose([], prediction, nodes=3)) == 3
    assert propose([], prediction, nodes=0) == ()


@pytest.mark.parametrize("prediction", [None, []])
def test_without_a_prediction_nothing_is_proposed(prediction: list[int] | None) -> None:
    assert propose([7], prediction) == ()
    assert not Prediction().drafts_for(SamplingParams(prediction=prediction))


def test_draft_tokens_of_a_composite_drafter_come_before_the_proposal() -> None:
    drafter = Prediction()
    params = SamplingParams(prediction=[*range(10, 50)])
    state = drafter.start(PROMPT)
    for drafted in (2, 0):  # the first call must not change the state of the second one
        tokens = [*PROMPT, 10, 11, *[12, 13][:drafted]]
        made = context(state, tokens, params=params, drafted=drafted, depth=1)
        made.sampler.context.num_prompt = len(PROMPT)
        (tree,) = drafter.propose([made])
        assert tree.tokens[1:] == (12 + drafted,)


def test_gains_grow_with_the_match() -> None:
    drafter = Prediction()
    prediction = [*range(10, 50)]
    gains = []
    for length in range(12):
        params = SamplingParams(prediction=prediction)
        tokens = [*PROMPT, *prediction[:length]]
        made = context(drafter.start(PROMPT), tokens, params=params)
        made.sampler.context.num_prompt = len(PROMPT)
        (tree,) = drafter.propose([made])
        assert tree.gain is not None
        assert list(tree.gain) == sorted(tree.gain, reverse=True)
        gains.append(tree.gain[1])
    assert gains == sorted(gains)
    assert len({*gains}) == len({*PRIORS.values()})


def test_state_follows_the_text_also_through_steps_without_a_proposal() -> None:
    drafter = Prediction()
    prediction = [(3 + number) % 5 for number in range(40)]
    params = SamplingParams(prediction=prediction)
    tokens = [2]
    state = drafter.start(tokens)
    tokens += [3, 4, 0]  # steps in which the drafter was not asked
    made = context(state, tokens, params=params, depth=4)
    made.sampler.context.num_prompt = 1
    (tree,) = drafter.propose([made])
    assert tree.tokens[1:] == (1, 2, 3, 4)
    assert step(drafter, state, tokens, looping, params=params) is not None


EDITS = ("none", "insertion", "deletion", "replacement", "preface")


def edited(output: list[int], edit: str) -> tuple[list[int], int]:
    """Return a prediction from which the output differs by one edit, and the number of output tokens
    up to the end of the edit.
    """
    half = len(output) // 2
    other = [(token + 1) % VOCAB for token in output[half : half + 4]]
    return {
        "none": (output, 0),
        # the output has four tokens that the prediction lacks, and so on
        "insertion": ([*output[:half], *output[half + 4 :]], half + 4),
        "deletion": ([*output[:half], *other, *output[half:]], half),
        "replacement": ([*output[:half], *other, *output[half + 4 :]], half + 4),
        "preface": (output[6:], 6),
    }[edit]


def decode(drafter: Any, params: SamplingParams, seed: int = 0) -> Request:
    dice = random.Random(seed)
    prompt = [dice.randrange(VOCAB) for _ in range(40)]
    engine = make_engine(tiny_decoder())
    request = make_request(prompt, params, make_drafter(drafter).bind(engine.target))
    run(engine, [request])
    return request


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafting_goes_on_after_an_edit(edit: str, temperature: float) -> None:
    """Tokens after the edit are accepted draft tokens, and the text is that of plain decoding."""
    options: dict[str, Any] = {"max_tokens": 60, "temperature": temperature, "seed": 3}
    plain = decode(Autoregressive(), SamplingParams(**options))
    prediction, end = edited(plain.output, edit)
    request = decode(Prediction(), SamplingParams(**options, prediction=prediction))
    assert request.output == plain.output
    after = request.result.from_draft[end + 4 :]  # four tokens to find the place again
    assert len(after) >= 20
    # all but the bonus token of each step
    assert sum(after) >= 0.8 * len(after)
    assert request.stats.target_steps < 0.4 * len(plain.output)


@pytest.mark.parametrize("edit", EDITS)
def test_statistics_count_the_tokens_that_the_output_has(edit: str) -> None:
    """The counts do not depend on the drafter."""
    params = SamplingParams(max_tokens=60, temperature=0.8, seed=3)
    plain = decode(Autoregressive(), params)
    prediction, _ = edited(plain.output, edit)
    in_both = len(prediction) - (4 if edit in ("deletion", "replacement") else 0)
    for drafter in (Autoregressive(), Prediction(), Auto(bundled=False)):
        options = SamplingParams(max_tokens=60, temperature=0.8, seed=3, prediction=prediction)
        stats = decode(drafter, options).stats
        assert stats.predicted_tokens == len(prediction)
        assert in_both - 2 <= stats.found_tokens <= in_both
    assert plain.stats.predicted_tokens == plain.stats.found_tokens == 0


def test_auto_drafts_from_the_prediction() -> None:
    options: dict[str, Any] = {"max_tokens": 60, "temperature": 0.8, "seed": 3}
    plain = decode(Auto(bundled=False), SamplingParams(**options))
    request = decode(Auto(bundled=False), SamplingParams(**options, prediction=plain.output))
    assert request.output == plain.output
    assert request.stats.sources["prediction"].accepted > 40
    assert "prediction" not in plain.stats.sources
