"""Composite drafters: which inner drafter proposes, how trees are merged, what each inner drafter
observes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import pytest

from drafting.helpers import bind, context, looping, verify_step
from pronk.base.errors import OptionError
from pronk.drafting import (
    Auto,
    Capabilities,
    DraftContext,
    Drafter,
    FirstOf,
    Merged,
    Outcome,
    PromptLookup,
    Proposer,
    Recycling,
    Suffix,
    make_drafter,
)
from pronk.drafting.target import Target
from pronk.sampling.params import SamplingParams
from pronk.sampling.tree import TokenTree
from tiny_models import make_engine, make_request, run, tiny_decoder


@dataclass(frozen=True)
class Fixed(Proposer[list[int]]):
    """Proposes given draft tokens and records its calls."""

    name = "fixed"

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
    empty = Fixed()
    exploring = Fixed((7, 8), verify=False)
    one = Fixed((1, 2))
    other = Fixed((3,))
    drafter = bind(FirstOf((empty, exploring, one, other)))
    state = drafter.start([9])
    (tree,) = drafter.propose([context(state, [9])])
    assert tree.tokens == (9, 1, 2)
    asked = ["bind", "propose 1"]
    assert (empty.calls, exploring.calls, one.calls, other.calls) == (asked, asked, asked, ["bind"])


def test_each_request_uses_its_own_drafter() -> None:
    lookup = PromptLookup(min_ngram=1)
    other = Fixed((3,))
    drafter = bind(FirstOf((lookup, other)))
    texts = [[1, 2, 1], [4, 5, 6], [7, 7]]
    trees = drafter.propose([context(drafter.start(text), text) for text in texts])
    assert [tree.tokens[1] for tree in trees] == [2, 3, 7]
    assert other.calls == ["bind", "propose 1"]


def test_without_draft_tokens_the_last_window_is_used() -> None:
    drafter = bind(FirstOf((Fixed(), Fixed((7, 8), verify=False))))
    (tree,) = drafter.propose([context(drafter.start([9]), [9])])
    assert tree.tokens == (9, 7, 8)
    assert sum(tree.acceptable) == 1


def test_merged_draft_tokens_are_one_tree_within_the_limits() -> None:
    a = Fixed((1, 2, 3), (0.5, 0.4, 0.1))
    b = Fixed((1, 5), (0.6, 0.54))
    drafter = bind(Merged((a, b), num_nodes=3))
    (tree,) = drafter.propose([context(drafter.start([9]), [9])])
    assert (tree.tokens, tree.parents) == ((9, 1, 2, 5), (-1, 0, 1, 1))
    # 5 is right with probability 0.9 by its drafter, if 2, which has 0.4 of the parent's 0.6, is
    # wrong.
    assert tree.gain == pytest.approx((1.0, 0.6, 0.4, 0.6 * 0.9 * (1.0 - 0.4 / 0.6)))
    (small,) = drafter.propose([context(drafter.start([9]), [9], nodes=1)])
    assert small.tokens == (9, 1)


@pytest.mark.parametrize("kind", [FirstOf, Merged])
def test_all_parts_are_bound_and_stopped(kind: type[FirstOf | Merged]) -> None:
    a = Fixed((1,))
    b = Fixed((2,))
    engine = make_engine(tiny_decoder())
    drafter = kind((a, b)).bind(engine.target)
    request = make_request([4, 5], SamplingParams(max_tokens=6), drafter)
    run(engine, [request])
    for part in (a, b):
        assert part.calls[0] == "bind"
        assert part.calls[-1] == f"stop {request.tokens}"


@dataclass(frozen=True)
class Fails(Fixed):
    """Raises in ``start`` or ``stop``."""

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
def test_every_part_stops_after_exceptions(kind: type[FirstOf | Merged]) -> None:
    parts = (Fixed(), Fails(words="first"), Fixed(), Fails(words="second"), Fixed())
    drafter = bind(kind(parts))
    with pytest.raises(RuntimeError, match="first"):
        drafter.stop(drafter.start([9]))
    assert all(part.calls == ["bind", "stop [9]"] for part in parts)


@pytest.mark.parametrize("kind", [FirstOf, Merged])
def test_started_parts_stop_if_another_part_cannot_start(kind: type[FirstOf | Merged]) -> None:
    begun = (Fixed(), Fails(words="stop"))
    inner = (Fixed(), Fails(verb="start", words="start"), Fixed())
    drafter = bind(kind((*begun, FirstOf(inner), Fixed())))
    with pytest.raises(RuntimeError, match="start"):
        drafter.start([9])
    assert all(part.calls == ["bind", "stop [9]"] for part in (*begun, inner[0]))
    assert all(part.calls == ["bind"] for part in (*inner[1:], drafter.parts[-1]))


def test_capabilities_are_the_union_of_the_parts() -> None:
    @dataclass(frozen=True)
    class Hidden(Fixed):
        capabilities = Capabilities(hidden=(2,))

    drafter = Merged((Hidden(), Recycling(), FirstOf((PromptLookup(), Hidden()))))
    assert bind(drafter).capabilities == Capabilities(hidden=(2,), logits=True)
    assert bind(FirstOf((PromptLookup(),))).capabilities == Capabilities()


def test_stats_count_draft_tokens_by_source() -> None:
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


@pytest.mark.parametrize("kind", [FirstOf, Merged, Auto])
@pytest.mark.parametrize("gains", [(), (0.9, 0.8)], ids=["without gains", "with gains"])
def test_draft_tokens_without_origin_count_for_their_part(
    kind: type[FirstOf | Merged | Auto], gains: tuple[float, ...]
) -> None:
    engine = make_engine(tiny_decoder())
    part = Fixed((3, 5), gains)
    part.__dict__["model_name"] = "models/small"  # the label has the name of a model
    params = SamplingParams(max_tokens=12, logit_bias={3: 100.0, 5: 100.0})
    request = make_request([3, 5, 3], params, kind((part,)).bind(engine.target))
    run(engine, [request])
    assert request.stats.sources["fixed small"].accepted > 0
    assert {*request.stats.sources} <= {"fixed small", "suffix", "recycling"}


def test_the_first_drafter_learns_rates_of_its_own() -> None:
    engine = make_engine(tiny_decoder())
    drafter = FirstOf((Fixed(), Fixed((3, 5)))).bind(engine.target)
    params = SamplingParams(max_tokens=12, logit_bias={3: 100.0, 5: 100.0})
    request = make_request([3, 5, 3], params, drafter)
    run(engine, [request])
    rates = request.speculation.ledger.acceptance.rates("fixed")
    assert rates.reached[0] > rates.accepted[0] > 0.0


def test_parts_may_be_part_of_the_name() -> None:
    made = make_drafter(
        "merged(prompt_lookup(num_tokens=3), first_of(suffix, recycling), num_nodes=9)"
    )
    assert isinstance(made, Merged)
    assert made.num_nodes == 9
    assert made.parts[0] == PromptLookup(num_tokens=3)
    assert isinstance(made.parts[1], FirstOf)
    assert made.parts[1].parts[0] == Suffix()


@pytest.mark.parametrize("parts", [(), [PromptLookup()], ("recycling",), PromptLookup()], ids=str)
def test_invalid_parts_are_refused(parts: Any) -> None:
    with pytest.raises(OptionError, match="first_of: parts: expected a tuple of drafters"):
        FirstOf(parts)


@pytest.mark.parametrize("part", [Recycling(), bind(Recycling())], ids=["options", "proposer"])
def test_one_drafter_may_be_two_parts(part: Drafter) -> None:
    drafter = bind(FirstOf((part, part)))
    tokens = [1, 2]
    state = drafter.start(tokens)
    for _ in range(12):
        (tree,) = drafter.propose([context(state, tokens)])
        verify_step(drafter, state, tree, tokens, looping)
    assert tokens[:8] == [1, 2, 3, 4, 0, 1, 2, 3]
    assert len(tokens) > 20


@dataclass(frozen=True)
class WrongRoot(Fixed):
    """Proposes trees below another token than the last one."""

    name = "astray"

    def propose(self, contexts: Sequence[DraftContext[list[int]]]) -> list[TokenTree]:
        return [TokenTree.chain([each.tokens[-1] + 1, 5]) for each in contexts]


@pytest.mark.parametrize("kind", [Merged, FirstOf, Auto])
def test_a_part_with_a_wrong_root_is_named(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    astray = WrongRoot()
    engine = make_engine(tiny_decoder())
    proposer = kind((astray,)).bind(engine.target)
    request = make_request([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True), proposer)
    engine.run([request])
    message = "drafter astray: expected a tree with root token "
    assert message in str(request.stats.draft_error)
    assert len(request.output) == 4
    caplog.clear()
