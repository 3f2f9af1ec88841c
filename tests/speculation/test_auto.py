"""``auto``: the choice between sources, with made-up sources and costs and a simulated clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drafters.helpers import context
from pronk import LLM, OptionError
from pronk.drafters import Capabilities, DraftContext, Outcome, Proposer
from pronk.drafters.combined.grammar import GrammarProposer
from pronk.sampling.params import SamplingParams
from pronk.speculation.auto import Auto, AutoProposer
from pronk.speculation.cost_model import CostCurve
from pronk.speculation.node_selection import select_paying_nodes
from pronk.speculation.source_states import SourceStates
from pronk.speculation.source_value import SourceCost
from pronk.speculation.tree import TokenTree
from pronk.testing import tiny_checkpoint
from tiny_models import Clock

VOCAB = 1000

# In seconds: a plain step takes 1, and each further row 0.1.
COSTS = CostCurve((1, 2), (1.0, 1.1), slope=0.1)

# Probability that a source's draft token is right, as a function of the step's number.
Truth = Callable[[int], float]


class Source(Proposer[None]):
    """A drafter with the true text, whose draft tokens are right with a given probability; its gains are exact."""

    capabilities = Capabilities(observes_all_steps=False)

    def __init__(self, world: World, name: str, seconds: float, right: Truth, count: int = 4) -> None:
        self.world, self.name, self.seconds, self.right, self.count = world, name, seconds, right, count
        self.asked: list[int] = []

    def start(self, prompt: Sequence[int]) -> None:
        """Return no state."""

    def propose(self, contexts: Sequence[DraftContext[None]]) -> list[TokenTree]:
        self.world.clock.now += self.seconds
        self.asked.append(self.world.step)
        right, trees = self.right(self.world.step), list[TokenTree]()
        for each in contexts:
            place, good, tokens = len(each.tokens), True, [each.tokens[-1]]
            for depth in range(self.count):
                good = good and self.world.dice.random() < right
                tokens.append(self.world.text[place + depth] if good else VOCAB - 1)
            gain = [right**depth for depth in range(self.count + 1)]
            trees.append(TokenTree.chain(tokens, gain=gain) if right > 0.05 else TokenTree.chain(tokens[:1]))
        return trees

    def observe(self, outcome: Outcome[None]) -> None:
        """Ignore the outcome."""


@dataclass
class World:
    """A random text, decoded with simulated sources and a simulated clock."""

    dice: random.Random = field(default_factory=lambda: random.Random(0))
    clock: Clock = field(default_factory=Clock)
    step: int = 0
    text: list[int] = field(default_factory=list)
    tokens: int = 0

    def __post_init__(self) -> None:
        self.text = [self.dice.randrange(VOCAB - 1) for _ in range(20_000)]

    def proposer(self, *sources: Source) -> AutoProposer:
        target: Any = SimpleNamespace(clock=self.clock)
        return AutoProposer(Auto(), sources, target)

    def decode(self, proposer: AutoProposer, steps: int, params: SamplingParams | None = None) -> SourceStates:
        """Decode ``steps`` steps of a new request, with the draft tokens that ``select_paying_nodes`` keeps."""
        made, params = self.text[: self.tokens + 4], params or SamplingParams(max_tokens=10_000)
        state = proposer.start(made)
        for _ in range(steps):
            tree = TokenTree.chain(made[-1:])
            if not proposer.should_skip(state, made):
                (tree,) = proposer.propose([context_of(state, made, params=params)])
                (tree,) = select_paying_nodes([tree], 1, COSTS)
            path = [0]
            while (node := tree.child(path[-1], self.text[len(made) + len(path) - 1])) is not None:
                path.append(node)
            new = tuple(self.text[len(made) : len(made) + len(path)])
            proposer.observe(Outcome(state, tree, tuple(path[1:]), new, len(made) - 1, params))
            self.clock.now += COSTS.at(len(tree))
            made, self.step, self.tokens = [*made, *new], self.step + 1, self.tokens + len(new)
        return state


def context_of(state: SourceStates, text: Sequence[int], costs: CostCurve = COSTS, **more: Any) -> DraftContext[Any]:
    """Return the context of a request with a budget."""
    values = {"params": SamplingParams(max_tokens=10_000)} | more
    return context(state, text, vocab=VOCAB, costs=costs, prune_unprofitable=True, **values)


def always(right: float) -> Truth:
    return lambda _: right


def test_a_cheap_and_accurate_source_displaces_an_expensive_one() -> None:
    world = World()
    copy, draft = Source(world, "copy", 0.01, always(0.98), 8), Source(world, "draft", 0.6, always(0.9))
    world.decode(world.proposer(copy, draft), 300)
    assert len(copy.asked) == 300
    assert len(draft.asked) < 15


def test_an_expensive_source_is_used_if_the_cheap_one_has_nothing() -> None:
    world = World()
    copy, draft = Source(world, "copy", 0.01, always(0.0)), Source(world, "draft", 0.6, always(0.9))
    world.decode(world.proposer(copy, draft), 300)
    assert len(draft.asked) > 290
    assert world.tokens / world.clock.now > 1.4


def test_unprofitable_sources_are_tried_rarely() -> None:
    world = World()
    sources = [Source(world, str(seconds), seconds, always(0.1)) for seconds in (0.2, 0.6, 3.0)]
    proposer = world.proposer(*sources)
    world.decode(proposer, 1000)
    plain = world.tokens * COSTS.at(1)
    first = sum(source.seconds for source in sources)
    assert world.clock.now <= plain + 2.0 + 0.01 * 1000 + 2 * first
    assert all(source.asked[-1] > 300 for source in sources)  # still tried


@pytest.mark.parametrize("seed", range(30))
def test_exploring_stays_within_its_budget(seed: int) -> None:
    """Exploring costs at most 2 plain steps, 1 % of each step, and one proposal of each source."""
    dice = random.Random(seed)
    world = World(random.Random(seed))
    sources = [
        Source(world, str(number), dice.choice((0.01, 0.1, 0.5, 2.0)), changing(dice), dice.randint(1, 8))
        for number in range(dice.randint(1, 4))
    ]
    proposer, explored_seconds, explored = world.proposer(*sources), 0.0, 0
    ask = proposer._ask

    def watched(number: int, asked: Any, requests: int) -> None:
        nonlocal explored_seconds, explored
        ask(number, asked, requests)
        if asked[0][1] == "explores":
            explored_seconds += sources[number].seconds
            explored += 1

    proposer._ask = watched  # type: ignore[method-assign]
    for _ in range(4):
        world.decode(proposer, 250)
    assert explored
    assert explored_seconds <= 2.0 + 0.01 * 1000 + sum(source.seconds for source in sources)


def changing(dice: random.Random) -> Truth:
    """Return a probability that changes at random every 100 steps."""
    rates = [dice.choice((0.0, 0.1, 0.5, 0.8, 0.95)) for _ in range(20)]
    return lambda step: rates[step // 100 % 20]


def test_a_change_of_the_text_changes_the_source() -> None:
    """The sources' accuracies change every 120 steps, as between code, prose and copied passages."""
    phases = {"copy": (0.05, 0.05, 0.97), "draft": (0.85, 0.2, 0.85)}
    late: dict[bool, list[int]] = {True: [], False: []}
    for seed in range(20):
        world = World(random.Random(seed))

        def right(name: str) -> Truth:
            return lambda step: phases[name][step // 120 % 3]

        copy, draft = Source(world, "copy", 0.02, right("copy"), 8), Source(world, "draft", 0.25, right("draft"))
        world.decode(world.proposer(copy, draft), 120 * 7)
        for change in range(120 * 3, 120 * 6, 120):
            wanted = change // 120 % 3 == 0
            late[wanted].append(settled(draft, change, wanted=wanted))
    # ``late[True]`` has the delays until a source is used again, ``late[False]`` those until it is dropped.
    for steps in (late[True], late[True] + late[False]):
        steps.sort()
        assert steps[len(steps) // 2] <= 10
        assert steps[9 * len(steps) // 10] <= 40


def settled(source: Source, change: int, *, wanted: bool) -> int:
    """Return the steps after ``change`` until the source is used (``wanted``) or dropped for 10 steps."""
    for step in range(change, change + 110):
        asked = sum(step <= each < step + 10 for each in source.asked)
        if (asked >= 8) if wanted else (asked <= 2):
            return step - change
    return 110


def test_decisions_are_reproducible() -> None:
    runs = []
    for _ in range(2):
        world = World(random.Random(5))
        sources = [Source(world, "a", 0.1, changing(random.Random(1))), Source(world, "b", 0.5, always(0.6))]
        world.decode(world.proposer(*sources), 400)
        runs.append(([source.asked for source in sources], world.clock.now))
    assert runs[0] == runs[1]
    assert all(runs[0][0])


def test_a_new_request_uses_the_measured_values_of_sources() -> None:
    world = World()
    poor, good = Source(world, "poor", 0.5, always(0.1)), Source(world, "good", 0.3, always(0.9))
    proposer = world.proposer(poor, good)
    world.decode(proposer, 200)
    poor.asked.clear(), good.asked.clear()
    began = world.step
    world.decode(proposer, 20)
    assert good.asked[:5] == [*range(began, began + 5)]
    assert len(poor.asked) <= 1


def test_one_request_has_a_bounded_share_of_the_statistics() -> None:
    world = World()
    proposer = world.proposer(Source(world, "a", 0.01, always(0.9)))
    world.decode(proposer, 500)
    assert sum(proposer.worth[0].count) == 64.0
    world.decode(proposer, 10)
    assert sum(proposer.worth[0].count) == 74.0


def test_requests_under_rejection_add_nothing_to_the_statistics() -> None:
    world = World()
    proposer = world.proposer(Source(world, "a", 0.01, always(0.9)))
    world.decode(proposer, 50, SamplingParams(max_tokens=10_000, temperature=0.8, rule="rejection"))
    assert sum(proposer.worth[0].count) == 0.0


def test_offered_draft_tokens_count_without_verification() -> None:
    """Draft tokens that were dropped before verification are judged by the text that follows."""
    outcomes: list[Outcome[None]] = []

    class Listener(Source):
        def observe(self, outcome: Outcome[None]) -> None:
            outcomes.append(outcome)

    world = World()
    proposer = world.proposer(Listener(world, "a", 0.01, always(0.9)), Listener(world, "b", 0.01, always(0.9)))
    world.decode(proposer, 60)
    assert len(outcomes) > 60
    for outcome in outcomes:
        tree, path = outcome.evaluated
        assert outcome.own_proposal is not None
        assert tree.tokens == outcome.own_proposal.tokens[: len(tree)]
        if len(path) < len(outcome.committed):
            assert tree is outcome.own_proposal
        else:  # draft tokens beyond the committed ones are not judged
            assert len(tree) == 1 + len(path)
        assert tuple(tree.tokens[node] for node in path) == outcome.committed[: len(path)]
        ends = len(path) == len(outcome.committed)
        assert ends or tree.child(path[-1] if path else 0, outcome.committed[len(path)]) is None


def test_draft_tokens_below_rejected_ones_are_not_judged() -> None:
    state = SourceStates((), [], [], lead=(7, 8), root=12)
    tree = TokenTree.chain([8, 1, 2])
    outcome = Outcome(None, tree, (), (7, 8, 1, 9), 10, SamplingParams())
    right = state.judged(outcome, tree)
    assert right.evaluated == (tree, (1,))
    wrong = state.judged(Outcome(None, tree, (), (7, 5, 1, 9), 10, SamplingParams()), tree)
    assert wrong.evaluated[0].num_draft_tokens == 0
    assert wrong.evaluated[1] == ()


def test_repetitions_are_found_in_the_text_alone() -> None:
    state, text = SourceStates((), [], []), [1, 2, 3, 4, 1, 2, 3]
    assert not state.repeats(text[:6], 6)
    assert state.repeats(text, 7)
    assert state.repeats([*text, 1, 2, 3], 7)
    assert not state.repeats([*text, 9, 9, 9], 7)
    assert not state.repeats([*text, 9, 9, 9], 8)
    assert not SourceStates((), [], []).repeats([1], 1)


def test_copied_passages_are_longer_than_chance_repetitions() -> None:
    state, text = SourceStates((), [], []), [*range(9), 50, *range(9), 51, *range(4)]
    copied = [state.copies for end in range(1, len(text) + 1) if state.repeats(text[:end], end) or True]
    assert [end for end, found in enumerate(copied, 1) if found] == [18, 19]


def one_decision(proposer: AutoProposer, text: list[int], allowance: float) -> tuple[SourceStates, int]:
    """Return the state of a request that may spend ``allowance`` seconds, and its number of draft tokens."""
    state = proposer.start(text[:4])
    (tree,) = proposer.propose([context_of(state, text, max_seconds=allowance)])
    return state, tree.num_draft_tokens


def test_the_last_allowance_is_kept_for_copied_passages() -> None:
    """With less than two plain steps of allowance left, sources wait for a copy of an earlier passage."""
    world, plain = World(), COSTS.at(1)
    proposer = world.proposer(Source(world, "copy", 0.01, always(0.98), 8))
    world.text[:9] = world.text[9:18] = [*range(9)]
    fresh, copied = world.text[:9], world.text[:18]
    assert one_decision(proposer, fresh, 2.2 * plain)[1] == 8
    assert one_decision(proposer, copied, 0.5 * plain)[1] == 8
    state, draft_tokens = one_decision(proposer, fresh, 1.9 * plain)
    assert (draft_tokens, state.sparing) == (0, True)
    # A short repetition does not end the back-off; a copied passage does.
    state.rest = 1, 1
    assert proposer.should_skip(state, [*fresh, 0, 1, 2])
    state.rest = 1, 1
    assert not proposer.should_skip(state, [*fresh, 0, 1, 2, 3, 4, 5, 6, 7, 8])


@pytest.mark.parametrize(("seconds", "rest"), [(0.0, 0), (0.025, 2), (0.3, 15)])
def test_back_off_grows_with_the_cost_of_a_source(seconds: float, rest: int) -> None:
    world = World()
    empty = Source(world, "empty", seconds * COSTS.at(1), always(0.0))
    proposer, text = world.proposer(empty), world.text[:9]
    proposer.worth[0].learn(0, 1.0, 0.0)  # a profitable step
    state, rests = proposer.start(text[:4]), []
    for _ in range(6):
        proposer.propose([context_of(state, text)])
        rests.append(state.rest[1])
    assert rests == [min(rest, most) for most in (1, 3, 7, 15, 15, 15)][: len(rests)]


def test_a_source_with_a_model_does_not_block_exploration() -> None:
    """With short steps, a source with a model is first tried late, and other sources are tried before."""
    world = World()
    model, other = Source(world, "model", 0.001, always(0.1)), Source(world, "other", 0.001, always(0.1))
    model.models = (object(),)
    proposer = world.proposer(model, other)
    # Plain steps of half a millisecond.
    swift = replace(COSTS, seconds=tuple(0.0005 * each / COSTS.seconds[0] for each in COSTS.seconds))
    text = world.text[:9]
    state = proposer.start(text[:4])
    asked = context_of(state, text, swift)
    for _ in range(2000):
        proposer.propose([asked])
        proposer.observe(Outcome(state, TokenTree.chain(text[-1:]), (), (1,), len(text) - 1, asked.params))
    assert len(other.asked) > 2
    assert len(model.asked) > 0
    assert not proposer.propose([])


def test_a_model_is_tried_before_it_is_expected_to_pay() -> None:
    """The budget of exploration pays for the first try; other sources are used from the first step."""
    for models, why in ((), "pays"), ((object(),), "explores"):
        world = World()
        source = Source(world, "source", 0.3, always(0.9))
        source.models = models
        proposer = world.proposer(source)
        state, _ = one_decision(proposer, world.text[:9], 9.0 * COSTS.at(1))
        assert [each.reason for each in proposer.source_reports(state)] == [why]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(tiny_checkpoint(tmp_path_factory.mktemp("auto") / "tiny"))


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("auto", ["suffix", "recycling", "lookahead"]),
        ("auto(recycling(num_nodes=3))", ["suffix", "recycling", "lookahead"]),
        ("auto(prompt_lookup, suffix)", ["prompt_lookup", "suffix", "recycling", "lookahead"]),
        ("auto(autoregressive)", ["suffix", "recycling", "lookahead"]),
    ],
)
def test_sources_of_a_model_with_another_vocabulary(llm: LLM, spec: str, names: list[str]) -> None:
    assert [part.name for part in llm.get_proposer(spec).parts] == names


def test_sources_of_pronk_tiny() -> None:
    llm = LLM()
    assert [part.name for part in llm.get_proposer().parts] == ["suffix", "recycling", "lookahead", "cape"]
    assert "cape" not in [part.name for part in llm.get_proposer("auto(bundled=False)").parts]
    assert [part.name for part in llm.get_proposer("auto(glide)").parts][3:] == ["glide"]


def test_a_source_of_another_model_is_refused(llm: LLM) -> None:
    with pytest.raises(OptionError, match="kangaroo"):
        llm.get_proposer("auto(kangaroo)")


def test_a_repetition_ends_the_back_off() -> None:
    world = World()
    proposer = world.proposer(Source(world, "one", 2.0, always(0.0)))
    state = proposer.start([1, 2, 3])
    text = [5, 6, 7, 8, 9]
    state.rest = 7, 7
    assert proposer.should_skip(state, text)
    assert proposer.should_skip(state, [*text, 10, 5, 6])
    assert state.rest == (5, 7)
    assert not proposer.should_skip(state, [*text, 10, 5, 6, 7])
    state.repeating = True  # the repetition began before the back-off
    assert proposer.should_skip(state, [*text, 10, 5, 6, 7, 8])


@pytest.mark.parametrize(("name", "seconds"), [("lookahead", 0.1), ("slow", 100.0)])
def test_an_unavailable_source_does_not_block_retries(name: str, seconds: float) -> None:
    """Lookahead's rows and the proposals of ``slow`` are too expensive; ``draft`` is still retried."""
    world = World()
    copy = Source(world, "copy", 0.01, always(0.1))
    draft = Source(world, "draft", 0.25, lambda step: 0.1 if step < 300 else 0.9)
    proposer = world.proposer(copy, Source(world, name, seconds, always(0.5)), draft)
    world.decode(proposer, 1500)
    assert sum(step >= 700 for step in draft.asked) > 600


def test_the_preparation_of_a_source_is_not_charged() -> None:
    world = World()
    source = Source(world, "one", 30.0, always(0.0))
    proposer = world.proposer(source)
    world.decode(proposer, 1)
    assert source.asked == [0]
    assert proposer.account >= 0.0


def test_costs_include_unread_text() -> None:
    cost = SourceCost()
    cost.learn(1.0, 1, [5])  # the first call prepares the source; it does not count
    for _ in range(3):
        cost.learn(0.1, 1, [2])
    cost.learn(1.1, 1, [200])
    assert cost.seconds(1) == pytest.approx(0.1)
    assert cost.reads(400) == pytest.approx(2.0)
    assert cost.reads(2) == 0.0


def test_parts_of_given_composites_are_not_added_again(llm: LLM) -> None:
    proposer = llm.get_proposer("auto(first_of(suffix, recycling), bundled=False)")
    assert isinstance(proposer, AutoProposer)
    assert [each.name for each in proposer.parts] == ["first_of", "lookahead"]


def test_a_given_window_is_always_computed(tmp_path: Path) -> None:
    llm = LLM(tiny_checkpoint(tmp_path / "tiny"), budget="all")
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompt = "the cat and the dog and the cat and the dog and the cat"
    out = llm.generate(prompt, params, drafter="auto(lookahead(window=15, ngram=5), bundled=False)")
    assert out.token_ids == llm.generate(prompt, params, drafter="autoregressive").token_ids
    assert max(step.rows for step in out.stats.steps) > 32


def test_requests_with_guides_share_the_budget(llm: LLM) -> None:
    """Each request with a guide has its own proposer, which must not start with a full budget of its own."""
    proposer = llm.get_proposer("auto(bundled=False)")
    assert proposer.budget_owner is proposer
    one, other = GrammarProposer(proposer), GrammarProposer(proposer)
    budget = llm.engine.speculator._shared_budget
    assert budget(one) is budget(other) is budget(proposer)
    assert budget(llm.get_proposer("suffix")) is not budget(proposer)
