"""Threshold decoding against the survey's algorithm."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from drafting.drafting import Asked, decode, dense, watched
from drafting.from_draft.drafts import draft_folder
from drafting.helpers import bind, context, verify_step
from drafting.scripted import Scripted, drafted
from pronk.drafting import FirstOf, Threshold, make_drafter
from pronk.drafting.combined.merged import Merged
from pronk.engine.request import Request
from pronk.sampling.noise import gumbel_noise
from softmax import softmax
from tiny_models import VOCAB

FAIR = 0.03
TOKENS = (1, 2, 3, 4, 5, 6)
OTHER = 9


@dataclass
class Survey:
    """The survey's variables and rules."""

    threshold: float = 0.4
    boost: float = 0.1
    lowest: float = 0.05
    highest: float = 0.95
    max_draft: int = 16
    toward: str = "rejected"
    cumulative: list[float] = field(default_factory=list)

    def draft(self, probabilities: Sequence[float]) -> int:
        """Return the number of drafted tokens for the probabilities of the draft model's tokens."""
        self.cumulative = []
        for probability in probabilities[: self.max_draft]:
            self.cumulative.append(probability * (self.cumulative[-1] if self.cumulative else 1.0))
            if self.cumulative[-1] < self.threshold:
                break
        return len(self.cumulative)

    def observe(self, accepted: int) -> None:
        if accepted < len(self.cumulative):
            products = [1.0, *self.cumulative]
            aim = products[accepted] if self.toward == "accepted" else products[accepted + 1]
            self.threshold = (self.threshold + aim) / 2
        else:
            self.threshold -= self.boost
        self.threshold = min(max(self.threshold, self.lowest), self.highest)


def right_for(count: int) -> Callable[[Sequence[int]], int]:
    """Return a model whose first ``count`` tokens equal the script's."""
    return lambda text: len(text) if len(text) <= count else OTHER


def test_worked_example() -> None:
    """0.75 * 0.5 = 0.375 < 0.4 ends the chain; one token is accepted: the threshold becomes (0.4 +
    0.375) / 2.
    """
    drafter = bind(Threshold((Scripted((drafted(1, 0.75), drafted(2, 0.5), drafted(3, 0.9))),)))
    state = drafter.start([0])
    tokens = [0]
    (tree,) = drafter.propose([context(state, tokens)])
    assert tree.tokens == (0, 1, 2)
    verify_step(drafter, state, tree, tokens, right_for(1))
    assert state[1].threshold == pytest.approx(0.3875)


@pytest.mark.parametrize(("accepted", "threshold"), [(0, 0.7), (1, 0.65), (2, 0.575), (3, 0.35)])
def test_the_threshold_moves_toward_the_last_accepted_token(
    accepted: int, threshold: float
) -> None:
    """Products 1, 0.9, 0.75, 0.075: from 0.4 half-way to the last accepted one; after three, down
    by ``boost``.
    """
    script = (drafted(1, 0.9), drafted(2, 0.75 / 0.9), drafted(3, 0.1))
    drafter = bind(Threshold((Scripted(script),), boost=0.05, toward="accepted"))
    state = drafter.start([0])
    tokens = [0]
    (tree,) = drafter.propose([context(state, tokens)])
    assert tree.num_draft_tokens == 3
    verify_step(drafter, state, tree, tokens, right_for(accepted))
    assert state[1].threshold == pytest.approx(threshold)


def test_a_product_at_the_threshold_is_not_below_it() -> None:
    halves = tuple(drafted(token, 0.5) for token in TOKENS)
    for threshold, count in ((0.5, 2), (0.25, 3), (math.nextafter(0.25, 1), 2), (0.125, 4)):
        drafter = bind(Threshold((Scripted(halves),), threshold=threshold))
        (tree,) = drafter.propose([context(drafter.start([0]), [0])])
        assert tree.num_draft_tokens == count


def test_each_request_has_its_own_threshold() -> None:
    drafter = bind(Threshold((Scripted(tuple(drafted(token, 0.8) for token in TOKENS)),)))
    models: list[Any] = [lambda _: OTHER, len]
    texts = [[0], [0]]
    states = [drafter.start(text) for text in texts]
    surveys = [Survey(), Survey()]
    for _ in range(5):
        trees = drafter.propose(
            [context(state, text[-1:]) for state, text in zip(states, texts, strict=True)]
        )
        for state, tree, model, survey in zip(states, trees, models, surveys, strict=True):
            assert tree.num_draft_tokens == min(len(TOKENS), survey.draft([0.8] * 16))
            survey.cumulative = survey.cumulative[: tree.num_draft_tokens]
            path = verify_step(drafter, state, tree, [0], model)
            survey.observe(len(path))
            assert state[1].threshold == pytest.approx(survey.threshold)
    assert 0.75 < states[0][1].threshold < 0.8
    assert states[1][1].threshold == pytest.approx(0.05)


@pytest.mark.parametrize("toward", ["accepted", "rejected"])
def test_random_drafts_equal_the_survey(toward: str) -> None:
    dice = random.Random(0)
    for _ in range(60):
        options = {
            "boost": dice.random(),
            "lowest": 0.3 * dice.random(),
            "highest": 0.6 + 0.4 * dice.random(),
        }
        start = dice.uniform(0.3, 0.6)
        survey = Survey(threshold=start, max_draft=dice.randint(1, 6), toward=toward, **options)
        state: Any = None
        for _ in range(12):
            probabilities = [1 - dice.random() ** 2 for _ in TOKENS]
            script = tuple(
                drafted(token, max(p, 0.01)) for token, p in zip(TOKENS, probabilities, strict=True)
            )
            options = {
                **options,
                "max_tokens": survey.max_draft,
                "threshold": start,
                "toward": toward,
            }
            drafter = bind(Threshold((Scripted(script),), **options))
            state = state or drafter.start([0])
            (tree,) = drafter.propose([context(state, [0])])
            count = survey.draft([each.confidence for each in script])
            assert tree.tokens == (0, *TOKENS[:count])
            right = dice.randint(0, count)
            assert len(verify_step(drafter, state, tree, [0], right_for(right))) == right
            survey.observe(right)
            assert state[1].threshold == pytest.approx(survey.threshold)


def next_probabilities(request: Request, asked: Asked, count: int) -> tuple[list[int], list[float]]:
    """Return the draft model's next tokens and their probabilities, by a softmax over logits (and
    noise).
    """
    tokens = list(asked.tokens)
    probabilities = []
    for _ in range(count):
        scores = dense(FAIR)(tokens)
        if request.params.temperature:
            noise = gumbel_noise(request.seed, len(tokens), np.arange(VOCAB))
            scores = scores / request.params.temperature + noise
        tokens.append(int(scores.argmax()))
        probabilities.append(float(softmax(scores).max()))
    return tokens[len(asked.tokens) :], probabilities


@pytest.mark.parametrize("kind", ["{}"], ids=["threshold"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_whole_decoding_equals_the_survey(temperature: float, kind: str) -> None:
    """``kind`` is the specification around that of ``threshold``."""
    inner = f"threshold(draft_model(model={draft_folder(FAIR)!r}, num_tokens=1), max_tokens=7)"
    engine, drafter = watched(kind.format(inner))
    thresholds = set()
    for request in decode(engine, drafter, [[1, 2, 3], [4, 5, 6, 7]], temperature=temperature):
        survey = Survey(max_draft=7)
        for asked in drafter.of(request):
            most = min(7, asked.depth, asked.nodes)
            tokens, probabilities = next_probabilities(request, asked, most)
            count = survey.draft(probabilities)
            chain = [
                node
                for node in range(1, len(asked.tree))
                if asked.tree.origin[node][0].startswith("draft_model")
            ]
            assert [asked.tree.tokens[node] for node in chain] == tokens[:count]
            if count:
                survey.observe(len({*chain} & {*asked.path}))
            thresholds.add(round(survey.threshold, 6))
    assert len(thresholds) > 5


def test_draft_tokens_of_other_drafters_do_not_move_the_threshold() -> None:
    """The other drafter comes first in ``first_of``; in ``merged`` it even has the same name."""
    other = Scripted((drafted(1, 0.9), drafted(2, 0.9), drafted(3, 0.9)))
    own = Scripted((drafted(1, 0.3), drafted(2, 0.3)))
    first = bind(FirstOf((other, Threshold((own,)))))
    state = first.start([0])
    tokens = [0]
    for _ in range(3):
        (tree,) = first.propose([context(state, tokens)])
        verify_step(first, state, tree, tokens, lambda _: OTHER)
    assert state[1][1].threshold == 0.4
    merged = bind(Merged((Threshold((own,)), other)))
    state = merged.start([0])
    tokens = [0]
    (tree,) = merged.propose([context(state, tokens)])
    assert tree.tokens == (0, 1, 2, 3)
    verify_step(merged, state, tree, tokens, right_for(2))
    assert state[0][1].threshold == pytest.approx(0.3)  # its own chain of one token was accepted


def test_default_inner_drafter() -> None:
    made = make_drafter("threshold(max_tokens=3)")
    assert made.parts[0].name == "draft_model"
    assert made.max_tokens == 3
