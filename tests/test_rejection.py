"""The rejection rule: the exact law of what it emits, by following every outcome of every draw with its probability.

Nothing is random here: a source of numbers is put in whose answers are tried one after the other. The code that is
followed is the one that the engine runs: the walk, and the rule at each node.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import pronk.choice
from chi_square import p_value
from pronk.choice import Chooser
from pronk.errors import OptionError
from pronk.sampling import SamplingParams, gumbel_noise, rejection_noise, rejection_uniform
from pronk.tree import TokenTree
from pronk.verify import reject, walk
from test_choice import LOGITS, OPTIONS, scores_of

VOCAB = 3
DEPTH = 3  # of the strings whose law is compared

String = tuple[int, ...]
Rule = Callable[..., int]


class Source:
    """Answers of a random source, one sequence after the other until all have occurred, each with its probability."""

    def __init__(self) -> None:
        self.plan: list[list[int]] = []  # at each place the answers that are left, the last one first
        self.place = 0
        self.weight = 1.0

    def take(self, probabilities: Sequence[float]) -> int:
        if self.place == len(self.plan):
            self.plan.append([answer for answer, chance in enumerate(probabilities) if chance > 0])
        answer = self.plan[self.place][-1]
        self.place += 1
        self.weight *= probabilities[answer]
        return answer

    def accepts(self, _: int, chance: float) -> bool:
        assert -1e-12 <= chance <= 1 + 1e-12
        return self.take((chance, 1 - chance)) == 0

    def draw(self, p: Tensor) -> int:
        return self.take(p.tolist())

    def runs(self) -> Iterator[None]:
        while True:
            self.place, self.weight = 0, 1.0
            yield
            while self.plan and len(self.plan[-1]) == 1:
                self.plan.pop()
            if not self.plan:
                return
            self.plan[-1].pop()


def contexts(depth: int) -> Iterator[String]:
    for length in range(depth):
        yield from product(range(VOCAB), repeat=length)


def target(seed: int) -> dict[String, Tensor]:
    """A distribution after every context, in which some tokens are impossible and one is certain."""
    dice = random.Random(seed)
    table = {}
    for context in contexts(6):
        weights = [dice.choice((0.0, dice.random(), dice.random())) for _ in range(VOCAB)]
        weights[dice.randrange(VOCAB)] += 0.05
        table[context] = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    return table


def outputs(tree: TokenTree, table: dict[String, Tensor], rule: Rule = reject) -> dict[String, float]:
    """The probability of each output of the walk."""
    law, source = defaultdict[String, float](float), Source()
    for _ in source.runs():
        context: list[int] = []

        def choose(node: int, _: int, context: list[int] = context) -> int:
            context.append(rule(table[tuple(context)], tree.guesses(node), source.accepts, source.draw))
            return context[-1]

        tokens = walk(tree, choose).tokens
        law[tokens] += source.weight
    return law


def strings(law: dict[String, float], table: dict[String, Tensor]) -> dict[String, float]:
    """The law of the first tokens of a text, of which a walk gave the beginning and plain sampling the rest."""
    joint = defaultdict[String, float](float)
    for tokens, weight in law.items():
        kept = tokens[:DEPTH]
        for rest in product(range(VOCAB), repeat=DEPTH - len(kept)):
            joint[kept + rest] += weight * chance(table, rest, kept)
    return joint


def chance(table: dict[String, Tensor], tokens: String, after: String = ()) -> float:
    result = 1.0
    for place, token in enumerate(tokens):
        result *= float(table[after + tokens[:place]][token])
    return result


def trees(size: int) -> Iterator[TokenTree]:
    """Every tree over the vocabulary, its children in every order."""
    for parents in product(*(range(node) for node in range(1, size))):
        for tokens in product(range(VOCAB), repeat=size - 1):
            if len(set(zip(parents, tokens, strict=True))) == size - 1:
                yield TokenTree((0, *tokens), (-1, *parents))


def wrong_by(tree: TokenTree, table: dict[String, Tensor], rule: Rule = reject) -> float:
    got = strings(outputs(tree, table, rule), table)
    return max(abs(got[string] - chance(table, string)) for string in product(range(VOCAB), repeat=DEPTH))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_every_small_tree_leaves_the_law_as_it_is(size: int) -> None:
    every = list(trees(size))
    chosen = every if size < 5 else random.Random(0).sample(every, 300)
    tables = [target(seed) for seed in range(4)]
    for count, tree in enumerate(chosen):
        assert wrong_by(tree, tables[count % 4]) < 1e-12


def test_nodes_that_may_not_be_accepted_are_not_tried() -> None:
    tree = TokenTree((0, 1, 1, 2, 0, 2), (-1, 0, 0, 0, 0, 2), (True, False, True, False, True, True))
    assert tree.guesses(0) == (1, 0)
    assert (tree.guesses(1), tree.guesses(2), tree.guesses(4)) == ((), (2,), ())
    for seed in range(4):
        assert wrong_by(tree, target(seed)) < 1e-12
        # The nodes in question make no difference at all.
        assert outputs(tree, target(seed)) == outputs(tree.keep([2, 4, 5]), target(seed))


def without_norm(p: Tensor, guesses: Sequence[int], accepts: Any, draw: Any) -> int:
    p = p.clone()
    for j, x in enumerate(guesses):
        if accepts(j, float(p[x])):
            return x
        p[x] = 0.0
    return draw(p / p.sum()) if bool(p.any()) else 0


def without_removal(p: Tensor, guesses: Sequence[int], accepts: Any, draw: Any) -> int:
    for j, x in enumerate(guesses):
        if accepts(j, float(p[x])):
            return x
    return draw(p)


def first_is_right(p: Tensor, guesses: Sequence[int], accepts: Any, draw: Any) -> int:
    """One draw, which takes the first guess for the other ones as well."""
    token = draw(p)
    return guesses[0] if token in guesses else token


@pytest.mark.parametrize("rule", [without_norm, without_removal, first_is_right])
def test_wrong_rules_are_found(rule: Rule) -> None:
    table = target(1)
    assert max(wrong_by(tree, table, rule) for tree in trees(3)) > 0.02


def algorithm_4(grams: Sequence[String], table: dict[String, Tensor], source: Source) -> String:
    """The paper's loop over disjoint n-grams, line by line."""
    v, o = list(grams), list[int]()
    for i in range(len(grams[0])):
        p = table[tuple(o)].clone()
        for j, gram in enumerate(v):
            s = gram[i]
            if source.accepts(j, float(p[s])):
                o.append(s)
                v = [other for other in v[j:] if other[i] == s]
                break
            p[s] = 0.0
            p = p / p.sum()
        else:
            return (*o, source.draw(p))
    return (*o, source.draw(table[tuple(o)]))


def test_on_a_trie_it_is_the_papers_algorithm() -> None:
    dice, lengths = random.Random(3), set[int]()
    for seed in range(40):
        table = target(seed)
        grams = [tuple(dice.choices(range(VOCAB), k=3)) for _ in range(3)]
        nodes: dict[String, int] = {(): 0}
        tokens, parents = [0], [-1]
        for gram in grams:
            for end in range(1, 4):
                if gram[:end] not in nodes:
                    nodes[gram[:end]] = len(tokens)
                    tokens.append(gram[end - 1])
                    parents.append(nodes[gram[: end - 1]])
        want, source = defaultdict[String, float](float), Source()
        for _ in source.runs():
            output = algorithm_4(grams, table, source)
            want[output] += source.weight
        got = outputs(TokenTree(tuple(tokens), tuple(parents)), table)
        assert dict(got) == pytest.approx(dict(want), rel=0, abs=1e-12)
        lengths |= {len(output) for output in got}
    assert lengths == {1, 2, 3, 4}


def test_extremes() -> None:
    """A certain token is always accepted, an impossible one never, and the distribution is left as it was."""
    p = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    for u in (0.0, 1 - 2**-53):
        assert reject(p, (0, 2, 1), lambda _, chance, u=u: u < chance, lambda _: pytest.fail("drew")) == 1
        assert reject(p, (0, 0, 2), lambda _, chance, u=u: u < chance, lambda rest: int(rest.argmax())) == 1
    assert p.tolist() == [0.0, 1.0, 0.0]
    # Next to nothing is left after the rejection, and it is a distribution all the same.
    p = torch.tensor([1e-300, 1.0, 3e-300], dtype=torch.float64)
    drawn: list[Tensor] = []
    reject(p, (1,), lambda *_: False, lambda rest: drawn.append(rest) or 0)  # type: ignore[func-returns-value]
    torch.testing.assert_close(drawn[0], torch.tensor([0.25, 0.0, 0.75], dtype=torch.float64))


def chooser(seed: int, vocab: int = 8, **options: Any) -> Chooser:
    return Chooser(SamplingParams(rule="rejection", **options), seed, [1, 2], vocab, ends=(3,))


@pytest.mark.parametrize("options", [option for option in OPTIONS if option.get("temperature")], ids=str)
def test_distribution_is_the_processed_softmax(options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    made = chooser(0, 40, max_tokens=50, **options)
    for token in (6, 4, 9, 6):
        logits = 3 * torch.randn(40, generator=generator)
        before = logits.clone()
        made.ends = torch.tensor([3, 17])  # as the oracle has them
        want = torch.tensor(scores_of(logits, made), dtype=torch.float64).softmax(0)
        torch.testing.assert_close(made.distribution(logits), want, rtol=1e-5, atol=1e-7)
        assert torch.equal(logits, before)
        made.advance(token)


@pytest.mark.parametrize("guesses", [(), (6, 1), (1, 0, 7, 3, 2, 4, 5, 6)], ids=str)
@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"temperature": 1.4, "top_p": 0.9}], ids=str)
def test_draws_over_seeds(guesses: tuple[int, ...], options: dict[str, Any]) -> None:
    exact = chooser(0, **options).distribution(LOGITS)
    chosen = [chooser(seed, **options).reject(LOGITS, guesses) for seed in range(2000)]
    assert p_value(torch.bincount(torch.tensor(chosen), minlength=8), exact) > 1e-4


def drawn_by_noise(seed: int, position: int, share: float) -> int:
    """The guess of a draft model that samples with the target's noise, from a law that is not the target's."""
    return int((share * LOGITS.flip(0) + gumbel_noise(seed, position, torch.arange(8))).argmax())


def draws_with_guesses_by_noise() -> float:
    counts = torch.zeros(8)
    for seed in range(3000):
        counts[chooser(seed, temperature=1.0).reject(LOGITS, [drawn_by_noise(seed, 2, 0.7)])] += 1
    return p_value(counts, LOGITS.double().softmax(0))


def test_guesses_drawn_with_the_coupled_noise() -> None:
    assert draws_with_guesses_by_noise() > 1e-4


def test_the_draw_must_not_share_the_noise_of_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pronk.choice, "rejection_noise", gumbel_noise)
    assert draws_with_guesses_by_noise() < 1e-6


@pytest.mark.parametrize("shared", ["trials", "trial and draw"])
def test_numbers_used_twice_are_found(monkeypatch: pytest.MonkeyPatch, shared: str) -> None:
    if shared == "trials":
        monkeypatch.setattr(pronk.choice, "rejection_uniform", lambda s, place, _: rejection_uniform(s, place, 0))
    else:

        def inverse(p: Tensor, guesses: Sequence[int], accepts: Any, _: Any) -> int:
            """Draws from what is left with the number that has just led to a rejection."""
            used: list[int] = []

            def tried(j: int, chance: float) -> bool:
                used.append(j)
                return accepts(j, chance)

            def draw(rest: Tensor) -> int:
                low, high = 0.0, 1.0
                for _ in range(40):
                    mid = (low + high) / 2
                    low, high = (low, mid) if accepts(used[-1], mid) else (mid, high)
                return int((rest.cumsum(0) > low).nonzero()[0])

            return reject(p, guesses, tried, draw)

        monkeypatch.setattr(pronk.choice, "reject", inverse)
    exact = LOGITS.double().softmax(0)
    chosen = [chooser(seed, temperature=1.0).reject(LOGITS, (1, 0)) for seed in range(1500)]
    assert p_value(torch.bincount(torch.tensor(chosen), minlength=8), exact) < 1e-6


def test_uniform_numbers() -> None:
    """Pure, in [0, 1), flat, and independent of neighbours and of the draw's noise."""
    trials = [[rejection_uniform(5, place, trial) for trial in range(4)] for place in range(2000)]
    values = torch.tensor(trials, dtype=torch.float64).flatten()
    assert trials[0] == [rejection_uniform(5, 0, trial) for trial in range(4)]
    assert bool((values >= 0).all())
    assert bool((values < 1).all())
    assert len(values.unique()) > 7990
    assert p_value(torch.histc(values, 50, 0.0, 1.0), torch.ones(50)) > 1e-4
    draws = torch.stack([rejection_noise(5, place, torch.arange(3)) for place in range(2000)])
    guesses = torch.stack([gumbel_noise(5, place, torch.arange(3)) for place in range(2000)])
    every = torch.cat((values.view(2000, 4), draws, guesses), 1)
    correlations = torch.corrcoef(every.T) - torch.eye(10)
    assert float(correlations.abs().max()) * 2000**0.5 < 4.5
    for seed, place, trial in ((0, 0, 0), (2**63 - 1, 2**31, 127)):
        assert 0 <= rejection_uniform(seed, place, trial) < 1


def test_numbers_stay_what_they_are() -> None:
    """A seed and the same guesses give the same text in the next release."""
    got = [rejection_uniform(1, 5, 0), rejection_uniform(1, 5, 1), rejection_uniform(7, 123, 0)]
    assert got == pytest.approx([0.138236753997, 0.719373297950, 0.366973556788], abs=1e-11)
    assert rejection_noise(1, 5, torch.tensor([0, 70_000])).tolist() == pytest.approx(
        [-1.056932047332, 2.701661860240], abs=1e-10
    )


def test_the_option() -> None:
    assert SamplingParams().rule == "coupled"
    assert SamplingParams(rule="rejection").to_dict()["rule"] == "rejection"
    assert not SamplingParams(rule="rejection").rejects
    assert SamplingParams(rule="rejection", temperature=0.1).rejects
    assert not SamplingParams(temperature=0.1).rejects
    for wrong in ("Rejection", "", None, 1, ["coupled"]):
        with pytest.raises(OptionError, match='rule: expected "coupled" or "rejection", found'):
            SamplingParams(rule=wrong)  # type: ignore[arg-type]
