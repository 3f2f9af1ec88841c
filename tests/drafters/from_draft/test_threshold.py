"""Threshold decoding against the survey's loop, written down again the slow way."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from drafters.drafting import Asked, decode, dense, watched
from drafters.from_draft.drafts import draft_folder
from drafters.helpers import context, hear, met
from drafters.scripted import Scripted, guess
from pronk.drafters import FirstOf, Threshold, make_drafter
from pronk.drafters.combined.merged import Merged
from pronk.engine.request import Request
from pronk.sampling.noise import gumbel_noise
from tiny_models import VOCAB

FAIR = 0.03
TOKENS = (1, 2, 3, 4, 5, 6)
OTHER = 9


@dataclass
class Survey:
    """The survey's variables and rules; ``step`` is told the probabilities of a draft's tokens, as they come."""

    threshold: float = 0.4
    boost: float = 0.1
    lowest: float = 0.05
    highest: float = 0.95
    max_draft: int = 16
    toward: str = "rejected"
    cumulative: list[float] = field(default_factory=list)

    def draft(self, probabilities: Sequence[float]) -> int:
        """How many of these tokens are drafted."""
        self.cumulative = []
        for probability in probabilities[: self.max_draft]:
            self.cumulative.append(probability * (self.cumulative[-1] if self.cumulative else 1.0))
            if self.cumulative[-1] < self.threshold:
                break
        return len(self.cumulative)

    def hear(self, accepted: int) -> None:
        if accepted < len(self.cumulative):
            products = [1.0, *self.cumulative]
            aim = products[accepted] if self.toward == "accepted" else products[accepted + 1]
            self.threshold = (self.threshold + aim) / 2
        else:
            self.threshold -= self.boost
        self.threshold = min(max(self.threshold, self.lowest), self.highest)


def test_the_worked_example() -> None:
    """From 0.4, two tokens of 0.75 and 0.5, of which the first is right."""
    drafter = met(Threshold((Scripted((guess(1, 0.75), guess(2, 0.5), guess(3, 0.9))),)))
    state, tokens = drafter.start([0]), [0]
    (tree,) = drafter.propose([context(state, tokens)])
    assert tree.tokens == (0, 1, 2)
    hear(drafter, state, tree, tokens, lambda text: 1 if text == [0] else OTHER)
    assert state.own.threshold == pytest.approx(0.3875)


@pytest.mark.parametrize(("accepted", "threshold"), [(0, 0.7), (1, 0.65), (2, 0.575), (3, 0.35)])
def test_the_threshold_moves_towards_the_last_accepted_token(accepted: int, threshold: float) -> None:
    """c = 1, 0.9, 0.75·0.9 …; c_0 is 1, and after full acceptance the threshold falls."""
    script = (guess(1, 0.9), guess(2, 0.75 / 0.9), guess(3, 0.1))
    drafter = met(Threshold((Scripted(script),), boost=0.05, toward="accepted"))
    state, tokens = drafter.start([0]), [0]
    (tree,) = drafter.propose([context(state, tokens)])
    assert tree.num_draft_tokens == 3
    hear(drafter, state, tree, tokens, lambda text: len(text) if len(text) <= accepted else OTHER)
    assert state.own.threshold == pytest.approx(threshold)


def test_or_towards_the_first_rejected_one() -> None:
    """As the survey's code does."""
    drafter = met(Threshold((Scripted((guess(1, 0.9), guess(2, 0.5), guess(3, 0.1))),)))
    for accepted, want in ((0, (0.4 + 0.9) / 2), (1, (0.4 + 0.45) / 2), (2, (0.4 + 0.045) / 2), (3, 0.3)):
        state, tokens = drafter.start([0]), [0]
        (tree,) = drafter.propose([context(state, tokens)])
        hear(drafter, state, tree, tokens, lambda text, n=accepted: len(text) if len(text) <= n else OTHER)
        assert state.own.threshold == pytest.approx(want)


def test_a_product_at_the_threshold_is_not_below_it() -> None:
    halves = tuple(guess(token, 0.5) for token in TOKENS)
    for threshold, count in ((0.5, 2), (0.25, 3), (math.nextafter(0.25, 1), 2), (0.125, 4)):
        drafter = met(Threshold((Scripted(halves),), threshold=threshold))
        (tree,) = drafter.propose([context(drafter.start([0]), [0])])
        assert tree.num_draft_tokens == count


def test_the_threshold_stays_within_its_bounds() -> None:
    sure = met(Threshold((Scripted((guess(1, 1.0),)),), threshold=0.3, boost=0.2, lowest=0.05, highest=0.6))
    for right, want in ((True, [0.1, 0.05, 0.05]), (False, [0.6, 0.6, 0.6])):
        state, tokens, seen = sure.start([0]), [0], []
        for _ in want:
            (tree,) = sure.propose([context(state, tokens)])
            hear(sure, state, tree, tokens, lambda _, right=right: 1 if right else OTHER)
            seen.append(state.own.threshold)
        assert seen == pytest.approx(want)


def test_requests_have_thresholds_of_their_own() -> None:
    drafter = met(Threshold((Scripted(tuple(guess(token, 0.8) for token in TOKENS)),)))
    models: list[Any] = [lambda _: OTHER, len]
    texts = [[0], [0]]
    states = [drafter.start(text) for text in texts]
    loops = [Survey(), Survey()]
    for _ in range(5):
        trees = drafter.propose([context(state, text[-1:]) for state, text in zip(states, texts, strict=True)])
        for state, tree, model, loop in zip(states, trees, models, loops, strict=True):
            assert tree.num_draft_tokens == min(len(TOKENS), loop.draft([0.8] * 16))
            loop.cumulative = loop.cumulative[: tree.num_draft_tokens]
            path = hear(drafter, state, tree, [0], model)
            loop.hear(len(path))
            assert state.own.threshold == pytest.approx(loop.threshold)
    assert 0.75 < states[0].own.threshold < 0.8  # towards the product of the one that is always wrong
    assert states[1].own.threshold == pytest.approx(0.05)


@pytest.mark.parametrize("toward", ["accepted", "rejected"])
def test_random_drafts_and_verdicts(toward: str) -> None:
    dice = random.Random(0)
    for _ in range(60):
        options = {"boost": dice.random(), "lowest": 0.3 * dice.random(), "highest": 0.6 + 0.4 * dice.random()}
        start = dice.uniform(0.3, 0.6)
        loop = Survey(threshold=start, max_draft=dice.randint(1, 6), toward=toward, **options)
        state: Any = None
        for _ in range(12):
            shares = [1 - dice.random() ** 2 for _ in TOKENS]
            script = tuple(guess(token, max(share, 0.01)) for token, share in zip(TOKENS, shares, strict=True))
            options = {**options, "max_tokens": loop.max_draft, "threshold": start, "toward": toward}
            drafter = met(Threshold((Scripted(script),), **options))
            state = state or drafter.start([0])
            (tree,) = drafter.propose([context(state, [0])])
            count = loop.draft([each.confidence for each in script])
            assert tree.tokens == (0, *TOKENS[:count])
            right = dice.randint(0, count)
            path = hear(drafter, state, tree, [0], lambda text, right=right: len(text) if len(text) <= right else OTHER)
            assert len(path) == right
            loop.hear(right)
            assert state.own.threshold == pytest.approx(loop.threshold)


def shares_of(request: Request, asked: Asked, count: int) -> tuple[list[int], list[float]]:
    """What the draft would write after a text, and how sure it is, by the obvious softmax of logits (and noise)."""
    tokens, shares = list(asked.tokens), []
    for _ in range(count):
        scores = dense(FAIR)(tokens).double()
        if request.params.temperature:
            noise = gumbel_noise(request.seed, len(tokens), torch.arange(VOCAB))
            scores = (scores.float() / request.params.temperature).double() + noise
        tokens.append(int(scores.argmax()))
        shares.append(float(scores.softmax(0).max()))
    return tokens[len(asked.tokens) :], shares


@pytest.mark.parametrize("kind", ["threshold", "cape"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_whole_decoding_goes_as_the_slow_loop(temperature: float, kind: str) -> None:
    """Under cape too: what hangs beside the chain does not matter to the threshold."""
    inner = f"threshold(draft_model(model={draft_folder(FAIR)!r}, num_tokens=1), max_tokens=7)"
    engine, drafter = watched(inner if kind == "threshold" else f"cape({inner})")
    thresholds = set()
    for request in decode(engine, drafter, [[1, 2, 3], [4, 5, 6, 7]], temperature=temperature):
        loop = Survey(max_draft=7)
        for asked in drafter.of(request):
            most = min(7, asked.depth, asked.nodes)
            tokens, shares = shares_of(request, asked, most)
            count = loop.draft(shares)
            chain = [node for node in range(1, len(asked.tree)) if asked.tree.origin[node][0].startswith("draft_model")]
            assert [asked.tree.tokens[node] for node in chain] == tokens[:count]
            if count:
                loop.hear(len({*chain} & {*asked.path}))
            thresholds.add(round(loop.threshold, 6))
    assert len(thresholds) > 5


def test_others_guesses_do_not_move_it() -> None:
    """Neither those of a drafter that spoke in its place, nor those of one of the same name beside it."""
    loud, own = Scripted((guess(1, 0.9), guess(2, 0.9), guess(3, 0.9))), Scripted((guess(1, 0.3), guess(2, 0.3)))
    first = met(FirstOf((loud, Threshold((own,)))))
    state, tokens = first.start([0]), [0]
    for _ in range(3):
        (tree,) = first.propose([context(state, tokens)])
        hear(first, state, tree, tokens, lambda _: OTHER)
    assert state[1].own.threshold == 0.4
    merged = met(Merged((Threshold((own,)), loud)))
    state, tokens = merged.start([0]), [0]
    (tree,) = merged.propose([context(state, tokens)])
    assert tree.tokens == (0, 1, 2, 3)
    hear(merged, state, tree, tokens, lambda text: len(text) if len(text) < 3 else OTHER)
    assert state[0].own.threshold == pytest.approx(0.3)  # its own chain, of one token, was right


def test_by_default_it_ends_the_chains_of_a_draft_model() -> None:
    made = make_drafter("threshold(max_tokens=3)")
    assert made.parts[0].name == "draft_model"
    assert made.max_tokens == 3
