"""Drafters made of drafters: who speaks, what is merged, who is told, and whose guesses were right."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import pytest

from drafters.helpers import context, hear, looping, met
from pronk.drafters import (
    Capabilities,
    DraftContext,
    Drafter,
    FirstOf,
    Jacobi,
    Lookahead,
    Merged,
    Outcome,
    PromptLookup,
    Proposer,
    make_drafter,
)
from pronk.errors import OptionError
from pronk.sampling.params import SamplingParams
from pronk.speculation.target import Target
from pronk.speculation.tree import TokenTree
from tiny_models import make_engine, make_request, run, tiny_decoder


@dataclass(frozen=True)
class Says(Proposer[list[int]]):
    """Guesses what it was told to, and writes down what it hears."""

    name = "says"

    draft_tokens: tuple[int, ...] = ()
    gains: tuple[float, ...] = ()
    verify: bool = True
    calls: list[str] = field(default_factory=list, compare=False)

    def bind(self, target: Target) -> Self:
        self.calls.append("bind")
        return self

    def start(self, prompt: Sequence[int]) -> list[int]:
        return list(prompt)

    def propose(self, contexts: Sequence[DraftContext[list[int]]]) -> list[TokenTree]:
        self.calls.append(f"propose {len(contexts)}")
        size = len(self.draft_tokens) + 1
        return [
            TokenTree(
                (c.tokens[-1], *self.draft_tokens),
                tuple(range(-1, size - 1)),
                verify=(True, *(self.verify,) * (size - 1)),
                gain=(1.0, *self.gains) if self.gains else None,
            )
            for c in contexts
        ]

    def observe(self, outcome: Outcome[list[int]]) -> None:
        outcome.state.extend(outcome.committed)

    def stop(self, state: list[int]) -> None:
        self.calls.append(f"stop {state}")


def test_the_first_drafter_with_a_proposal_is_used() -> None:
    silent, exploring, one, other = Says(), Says((7, 8), verify=False), Says((1, 2)), Says((3,))
    drafter = met(FirstOf((silent, exploring, one, other)))
    state = drafter.start([9])
    (tree,) = drafter.propose([context(state, [9])])
    assert tree.tokens == (9, 1, 2)
    asked = ["bind", "propose 1"]
    assert (silent.calls, exploring.calls, one.calls, other.calls) == (asked, asked, asked, ["bind"])


def test_each_text_uses_its_own_drafter() -> None:
    lookup, other = PromptLookup(min_ngram=1), Says((3,))
    drafter = met(FirstOf((lookup, other)))
    texts = [[1, 2, 1], [4, 5, 6], [7, 7]]
    trees = drafter.propose([context(drafter.start(text), text) for text in texts])
    assert [tree.tokens[1] for tree in trees] == [2, 3, 7]
    assert other.calls == ["bind", "propose 1"]


def test_without_a_proposal_the_last_window_is_verified() -> None:
    drafter = met(FirstOf((Says(), Says((7, 8), verify=False))))
    (tree,) = drafter.propose([context(drafter.start([9]), [9])])
    assert tree.tokens == (9, 7, 8)
    assert sum(tree.acceptable) == 1


def test_merged_guesses_are_one_tree_under_one_budget() -> None:
    a, b = Says((1, 2, 3), (0.5, 0.4, 0.1)), Says((1, 5), (0.6, 0.3))
    drafter = met(Merged((a, b), num_nodes=3))
    (tree,) = drafter.propose([context(drafter.start([9]), [9])])
    assert (tree.tokens, tree.parents) == ((9, 1, 2, 5), (-1, 0, 1, 1))
    assert tree.gain == (1.0, 0.6, 0.4, 0.3)
    (small,) = drafter.propose([context(drafter.start([9]), [9], nodes=1)])
    assert small.tokens == (9, 1)


def test_nodes_that_cannot_be_accepted_are_not_merged() -> None:
    drafter = met(Merged((Says((7, 8), verify=False), Says((1,)))))
    (tree,) = drafter.propose([context(drafter.start([9]), [9])])
    assert tree.tokens == (9, 1)


@pytest.mark.parametrize("kind", [FirstOf, Merged])
def test_all_parts_meet_the_target_hear_and_stop(kind: type[FirstOf | Merged]) -> None:
    a, b = Says((1,)), Says((2,))
    engine = make_engine(tiny_decoder())
    drafter = kind((a, b)).bind(engine.target)
    request = make_request([4, 5], SamplingParams(max_tokens=6), drafter)
    run(engine, [request])
    for part in (a, b):
        assert part.calls[0] == "bind"
        assert part.calls[-1] == f"stop {request.tokens}"


@dataclass(frozen=True)
class Fails(Says):
    """Raises in a verb, each time with its own words."""

    name = "fails"

    verb: str = ""
    words: str = ""

    def start(self, prompt: Sequence[int]) -> list[int]:
        if self.verb == "start":
            raise RuntimeError(self.words)
        return super().start(prompt)

    def stop(self, state: list[int]) -> None:
        super().stop(state)
        if self.verb != "start":
            raise RuntimeError(self.words)


@pytest.mark.parametrize("kind", [FirstOf, Merged])
def test_every_part_stops_whatever_others_raise(kind: type[FirstOf | Merged]) -> None:
    parts = (Says(), Fails(words="first"), Says(), Fails(words="second"), Says())
    drafter = met(kind(parts))
    with pytest.raises(RuntimeError, match="first"):
        drafter.stop(drafter.start([9]))
    assert all(part.calls == ["bind", "stop [9]"] for part in parts)


@pytest.mark.parametrize("kind", [FirstOf, Merged])
def test_parts_that_have_started_stop_where_another_one_cannot(kind: type[FirstOf | Merged]) -> None:
    begun, inner = (Says(), Fails(words="stop")), (Says(), Fails(verb="start", words="start"), Says())
    drafter = met(kind((*begun, FirstOf(inner), Says())))
    with pytest.raises(RuntimeError, match="start"):
        drafter.start([9])
    assert all(part.calls == ["bind", "stop [9]"] for part in (*begun, inner[0]))
    assert all(part.calls == ["bind"] for part in (*inner[1:], drafter.parts[-1]))


def test_needs_are_those_of_all_parts() -> None:
    @dataclass(frozen=True)
    class Hidden(Says):
        capabilities = Capabilities(hidden=(2,))

    drafter = Merged((Hidden(), Jacobi(), FirstOf((PromptLookup(), Hidden()))))
    assert met(drafter).capabilities == Capabilities(hidden=(2,), logits=True)
    assert met(FirstOf((PromptLookup(),))).capabilities == Capabilities()


def test_stats_count_accepted_drafts_by_source() -> None:
    engine = make_engine(tiny_decoder())
    drafter = make_drafter("merged(prompt_lookup(min_ngram=1), recycling)").bind(engine.target)
    params = SamplingParams(max_tokens=40, temperature=0.7, seed=1, logit_bias={3: 100.0, 5: 100.0})
    request = make_request([3, 5, 3, 3, 5], params, drafter)
    run(engine, [request])
    stats = request.stats
    assert set(stats.sources) == {"prompt_lookup", "recycling"}
    assert sum(source.drafted for source in stats.sources.values()) == stats.drafted
    assert 0 < sum(source.accepted for source in stats.sources.values()) == stats.accepted
    assert stats.to_dict()["sources"]["recycling"].keys() == {"drafted", "accepted"}


def test_parts_in_a_name() -> None:
    made = make_drafter("merged(prompt_lookup(num_tokens=3), first_of(jacobi, recycling), num_nodes=9)")
    assert isinstance(made, Merged)
    assert made.num_nodes == 9
    assert made.parts[0] == PromptLookup(num_tokens=3)
    assert isinstance(made.parts[1], FirstOf)
    assert made.parts[1].parts[0] == Jacobi()


@pytest.mark.parametrize("parts", [(), [PromptLookup()], ("recycling",), PromptLookup()], ids=str)
def test_bad_parts(parts: Any) -> None:
    with pytest.raises(OptionError, match="first_of: parts: expected a tuple of drafters"):
        FirstOf(parts)


@pytest.mark.parametrize(
    "spec",
    [
        "first_of(lookahead(window=3, ngram=3), lookahead(window=5, ngram=4))",
        "first_of(lookahead, lookahead(window=2))",
        "first_of(lookahead(window=1, ngram=2), lookahead(window=1, ngram=4), lookahead(window=2, ngram=2))",
        "merged(lookahead(window=3), first_of(jacobi, lookahead(window=2)), recycling)",
    ],
)
def test_windows_are_told_apart(spec: str) -> None:
    """Each lookahead reads its own window, and none mistakes another's nodes for it."""
    engine = make_engine(tiny_decoder())
    drafter = make_drafter(spec).bind(engine.target)
    options = SamplingParams(max_tokens=60, temperature=0.7, seed=1, logit_bias={3: 9.0, 5: 9.0})
    request, plain = make_request([3, 5, 3], options, drafter), make_request([3, 5, 3], options)
    run(engine, [request])
    run(engine, [plain])
    assert request.output == plain.output
    assert request.stats.accepted > 0


@pytest.mark.parametrize("part", [Lookahead(window=2), met(Lookahead(window=2))], ids=["options", "proposer"])
def test_one_drafter_in_two_places(part: Drafter) -> None:
    drafter, tokens = met(FirstOf((part, part))), [1, 2]
    state = drafter.start(tokens)
    for _ in range(12):
        (tree,) = drafter.propose([context(state, tokens)])
        hear(drafter, state, tree, tokens, looping)
    assert tokens[:8] == [1, 2, 3, 4, 0, 1, 2, 3]
    assert len(tokens) > 20
