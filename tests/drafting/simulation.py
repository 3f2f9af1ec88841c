"""Decoding with a simulated clock, text and drafters, as
:class:`~pronk.engine.speculator.Speculator` does it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pronk.cache.blocks import BlockTable
from pronk.drafting import Capabilities, DraftContext, Outcome, Proposer
from pronk.drafting.acceptance_stats import AcceptanceStats, RequestAcceptance
from pronk.drafting.ledger import FinishedStep, Ledger, RequestLedger
from pronk.drafting.planned_calls import observe_planned, propose_planned
from pronk.drafting.planner import select_nodes
from pronk.drafting.shared.stepwise import extension_rule
from pronk.drafting.step_costs import ChainCosts, StepCosts
from pronk.drafting.tree_union import TreeUnion
from pronk.models.cost_model import CostCurve
from pronk.sampling.params import SamplingParams
from pronk.sampling.tree import TokenTree
from tiny_models import Clock

VOCAB = 1000
PARAMS = SamplingParams(max_tokens=10_000)

# In seconds: a plain step takes 1, and each further row 0.1.
COSTS = CostCurve(1.0, 0.9, 0.1)

# A probability, as a function of the step's number.
Truth = Callable[[int], float]


def always(right: float) -> Truth:
    return lambda _: right


def changing(dice: random.Random, steps: int = 100) -> Truth:
    """Return a probability that changes at random every ``steps`` steps."""
    rates = [dice.choice((0.0, 0.1, 0.5, 0.8, 0.95)) for _ in range(20)]
    return lambda step: rates[step // steps % 20]


class Source(Proposer[Any]):
    """A drafter with the true text, whose draft tokens are right with a given probability.

    ``claims`` are its gains: by default the probability; ``None``: it gives none. Its proposals
    take ``seconds`` times a random factor of up to ``spread``.
    """

    capabilities = Capabilities(observes_all_steps=False)

    def __init__(
        self,
        world: World,
        name: str,
        seconds: float,
        right: Truth,
        count: int = 4,
        claims: Truth | str | None = "right",
        spread: float = 1.0,
    ) -> None:
        self.world = world
        self.name = name
        self.seconds = seconds
        self.right = right
        self.count = count
        self.claims = right if claims == "right" else claims
        self.spread = spread
        self.asked: list[int] = []

    def start(self, prompt: Sequence[int]) -> None:
        """Return no state."""

    def observe(self, outcome: Outcome[Any]) -> None:
        """Ignore the outcome."""

    def tokens(self, context: DraftContext[Any]) -> list[int]:
        """Return draft tokens below the root: those of the text, and wrong ones after the first
        wrong one.
        """
        dice = self.world.dice
        right = self.right(self.world.step)
        place = len(context.tokens)
        count = min(self.count, context.max_depth, context.max_nodes)
        good = 0
        while good < count and dice.random() < right:
            good += 1
        return [*self.world.text[place : place + good], *[VOCAB - 1] * (count - good)]

    def propose(self, contexts: Sequence[DraftContext[Any]]) -> list[TokenTree]:
        world = self.world
        total = self.seconds * self.world.dice.uniform(1.0 / self.spread, self.spread)
        world.clock.now += total
        known = contexts[0].ledger.ledger.drafters[self.name]
        if known.num_calls > 1:  # the first call is not counted
            world.beyond += max(0.0, total - len(contexts) * known.seconds)
        self.asked.append(world.step)
        trees = []
        for each in contexts:
            tokens = self.tokens(each)
            if self.claims is None:
                trees.append(TokenTree.chain([each.tokens[-1], *tokens]))
                continue
            claims = self.claims(world.step)
            tokens = tokens if claims > 0.05 else []
            gain = [claims**depth for depth in range(len(tokens) + 1)]
            origin = (("", 0), *[(self.name, round(100 * claims))] * len(tokens))
            parents = tuple(range(-1, len(tokens)))
            trees.append(
                TokenTree((each.tokens[-1], *tokens), parents, gain=tuple(gain), origin=origin)
            )
        return trees


class ChainSource(Source):
    """A drafter that drafts token by token: ``seconds`` each, and ``reading`` for each token since
    its last one.
    """

    reading = 0.0

    def start(self, prompt: Sequence[int]) -> dict[str, int]:
        return {"read": len(prompt)}

    def chain_costs(self, context: DraftContext[Any], costs: StepCosts) -> ChainCosts:
        unread = len(context.tokens) - context.state["read"]
        return ChainCosts(self.seconds / costs.num_requests, self.reading * unread)

    def propose(self, contexts: Sequence[DraftContext[Any]]) -> list[TokenTree]:
        world = self.world
        rate = self.right(self.world.step)
        self.asked.append(world.step)
        for each in contexts:
            each.acceptance.rates(self.name, {0: 0.7})
        trees = []
        passes = 0
        reading = 0.0
        for each in contexts:
            assert each.plan.chain is not None
            reading += each.plan.chain.prefill
            extends = extension_rule(self, each)
            gains = list[float]()
            tokens = self.tokens(each)
            while len(gains) < len(tokens) and extends(gains):
                gains.append((gains or [1.0])[-1] * max(0.01, rate))
            passes = max(passes, len(gains))
            origin = (("", 0), *[(self.name, 0)] * len(gains))
            chain = (each.tokens[-1], *tokens[: len(gains)])
            trees.append(
                TokenTree(chain, tuple(range(-1, len(gains))), gain=(1.0, *gains), origin=origin)
            )
        for each in contexts:
            each.state["read"] = len(each.tokens)
        world.clock.now += passes * self.seconds + reading
        return trees


@dataclass
class SimulatedRequest:
    """A request: its ledger, its text so far, and the states of the drafters."""

    ledger: RequestLedger
    tokens: list[int]
    states: list[Any]
    most: int = 10_000  # length of the text at which the request ends


@dataclass
class World:
    """A random text, decoded with simulated sources and a simulated clock.

    Attributes:
        step: number of the step.
        beyond: seconds that this step's proposals have taken beyond their expected price.
        worst: largest ``beyond`` of a step.
        loss: largest excess of what was spent over what the bound allows, in seconds.
        num_draft_tokens: verified draft tokens of each step.
    """

    dice: random.Random = field(default_factory=lambda: random.Random(0))
    curve: CostCurve = COSTS
    length: int = 20_000
    clock: Clock = field(default_factory=Clock)
    ledger: Ledger = field(default_factory=Ledger)
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    step: int = 0
    beyond: float = 0.0
    worst: float = 0.0
    loss: float = -1.0
    text: list[int] = field(default_factory=list)
    num_draft_tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.text = [self.dice.randrange(VOCAB - 1) for _ in range(self.length)]

    def request(
        self, sources: Sequence[Source], place: int = 4, most: int = 10_000
    ) -> SimulatedRequest:
        ledger = RequestLedger(self.ledger, RequestAcceptance(self.stats))
        return SimulatedRequest(
            ledger, self.text[:place], [source.start(self.text[:place]) for source in sources], most
        )

    def decode(
        self, requests: Sequence[SimulatedRequest], sources: Sequence[Source], steps: int = 1
    ) -> None:
        """Decode ``steps`` steps of all ``requests``."""
        for _ in range(steps):
            self._step(requests, sources)

    def _step(self, requests: Sequence[SimulatedRequest], sources: Sequence[Source]) -> None:
        ledger = self.ledger
        began = self.clock.now
        count = len(requests)
        self.beyond = 0.0
        costs = StepCosts(self.curve, count)
        ledger.begin_step(costs, count)
        for each in requests:
            each.ledger.begin()
            each.ledger.set_costs(costs, ledger.request_allowance)
        unions = [TreeUnion(costs) for _ in requests]
        for number, source in enumerate(sources):
            contexts = [self._context(each, each.states[number]) for each in requests]
            propose_planned(source, contexts, unions, self.clock)
        proposed = [
            union.tree(each.tokens[-1], 31) for each, union in zip(requests, unions, strict=True)
        ]
        drafting = self.clock.now - began
        kept = select_nodes(proposed, costs, drafting=drafting, allowance=ledger.allowance)
        draft_tokens = sum(tree.num_draft_tokens for tree in kept)
        seconds = self.curve.at(count + draft_tokens)
        accepted = 0
        for each, tree in zip(requests, kept, strict=True):
            accepted += self._commit(each, tree, sources)
        self.clock.now += seconds
        finished = FinishedStep(
            seconds, drafting, count, num_draft_rows=draft_tokens, num_saved=accepted
        )
        ledger.record_step(finished, [each.ledger for each in requests])
        self.worst = max(self.worst, self.beyond)
        self.loss = max(self.loss, -ledger.allowance)
        self.num_draft_tokens.append(draft_tokens)
        self.step += 1

    def _commit(self, request: SimulatedRequest, tree: TokenTree, sources: Sequence[Source]) -> int:
        """Verify a tree; return the number of accepted draft tokens."""
        path = [0]
        place = len(request.tokens)
        while (node := tree.child(path[-1], self.text[place + len(path) - 1])) is not None:
            path.append(node)
        new = tuple(self.text[place : place + len(path)])
        request.ledger.acceptance.advance(new)
        request.ledger.end(new, len(path) - 1, tree.num_draft_tokens)
        for source, state in zip(sources, request.states, strict=True):
            outcome = Outcome(
                state, tree, tuple(path[1:]), new, place - 1, PARAMS, ledger=request.ledger
            )
            observe_planned(source, outcome, self.clock)
        request.tokens += new
        return len(path) - 1

    def _context(self, request: SimulatedRequest, state: Any) -> DraftContext[Any]:
        depth = max(0, request.most - len(request.tokens) - 1)
        table = BlockTable(length=len(request.tokens) - 1)
        no_sampler = Any
        return DraftContext(  # type: ignore[arg-type]
            state, request.tokens, depth, 31, PARAMS, no_sampler, table, ledger=request.ledger
        )
