"""Random requests with recurrent targets: nothing but the text decides what comes next.

Each script runs one engine with random limits, which may be restarted from disk. Its requests have
random prompts, options, drafters and priorities; some are interrupted, preempted, aborted and
resumed. Each one is compared with plain decoding, and the states with a fresh reading.
"""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from drafting.from_target import trained_eagle
from drafting.trees import TreeDrafter, explore_trees, last_branch, oracle_trees, random_trees
from engine.cases import ENDS, OPTIONS, ask, assert_same, engine_of, text
from engine.recurrent import (
    FAIR,
    RECURRENT,
    RIGHT,
    StateWatch,
    draft_spec,
    use_draft_models,
)
from engine.test_prompt_cache import Server, servers
from pronk.base.arrays import FLOAT32
from pronk.cache.blocks import BlockTable
from pronk.cache.states import StateCounts, StatePass, StatePool
from pronk.drafting import Proposer, make_drafter
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.models.program import Program
from pronk.sampling.params import SamplingParams
from pronk.sampling.tree import TokenTree
from tiny_models import assert_idle, run, tiny_decoder

# Targets with each rule of recurrent layers, and with a recurrence beside attention.
TARGETS = ("recurrent", "mamba", "parallel", "sublayers")
KINDS = ("greedy", "temperature", "penalties", "top_p", "guided", "repetitive", "thinking")
TREES = {
    "oracle": oracle_trees(0.8),
    "sloppy oracle": oracle_trees(0.5, 20),
    "explore": explore_trees,
    "last branch": last_branch,
    "random": random_trees,
}
DRAFTERS = (
    *TREES,
    "autoregressive",
    "suffix",
    "recycling(num_nodes=12, top_k=4)",
    "prompt_lookup(min_ngram=1, num_tokens=8, num_chains=2)",
    draft_spec(FAIR),
    draft_spec(RIGHT, num_tokens=5),
    trained_eagle.block_spec(),
    f"threshold({draft_spec(FAIR)})",
    f"merged({draft_spec(FAIR)}, recycling, num_nodes=10)",
)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    use_draft_models(monkeypatch)
    yield from servers(tmp_path, monkeypatch)


def options_of(kind: str, seed: int, max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, logprobs=1, **OPTIONS[kind])


@cache
def plain(target: str, prompt: tuple[int, ...], kind: str, seed: int, max_tokens: int) -> Request:
    """Return a request of plain decoding, alone."""
    request = ask(prompt, options_of(kind, seed, max_tokens))
    run(engine_of(FLOAT32, **(RECURRENT | {"special": target})), [request])
    return request


class Script:
    """Random requests on one engine, which is restarted from time to time.

    The seed chooses the target, too: one of :data:`TARGETS`.
    """

    def __init__(self, seed: int, server: Server, patch: pytest.MonkeyPatch) -> None:
        self.dice = random.Random(seed)
        self.target = TARGETS[seed % len(TARGETS)]
        self.server = server
        self.patch = patch
        self.counts = Counter[str]()
        self.texts = [tuple(text(seed + number, 120)) for number in range(2)]

    def run(self, num_requests: int) -> None:
        """Run several batches of requests; restart the engine between some of them."""
        left = num_requests
        while left:
            engine = self.start()
            for _ in range(self.dice.randrange(1, 4)):
                size = min(left, self.dice.randrange(1, 6))
                if size:
                    self.run_batch(engine, size)
                    left -= size
            self.counts["states"] += self.watch.check()

    def start(self) -> Engine:
        dice = self.dice
        requests = dice.choice((1, 2, 4))
        counts = StateCounts(
            requests + dice.randrange(2), dice.choice((0, 1, 4, 9)), dice.choice((16, 40, 120))
        )
        engine = self.server.start(
            tiny_decoder(FLOAT32, **(RECURRENT | {"special": self.target})),
            self.target,
            state_counts=counts,
            max_batch=requests,
            prefill_chunk=dice.choice((1, 7, 16, 33, 200)),
            num_blocks=dice.choice((14, 30, 100)),
            max_tree=dice.choice((3, 9, 30)),
        )
        self.watch = StateWatch(engine)
        self.proposers = dict[str, Proposer[Any]]()
        return engine

    def proposer(self, engine: Engine, name: str, want: Request) -> Proposer[Any]:
        if name in TREES:
            known = {(tuple(want.prompt), want.seed): want.tokens}
            return TreeDrafter(TREES[name], known, stop_token_ids=ENDS).bind(engine.target)
        if name not in self.proposers:
            self.proposers[name] = make_drafter(name).bind(engine.target)
        return self.proposers[name]

    def prompt(self) -> tuple[int, ...]:
        """Return a beginning of a text, sometimes with other tokens after it."""
        dice = self.dice
        chosen = dice.choice(self.texts)
        length = dice.choice((16 * dice.randrange(1, 8) + dice.randrange(-1, 2), 1, 50, 90, 119))
        end = tuple(dice.randrange(131) for _ in range(dice.choice((0, 0, 1, 20))))
        return (*chosen[:length], *end)

    def run_batch(self, engine: Engine, size: int) -> None:
        dice = self.dice
        pairs = list[tuple[Request, Request]]()
        for _ in range(size):
            prompt = self.prompt()
            case = (dice.choice(KINDS), dice.randrange(3), dice.randrange(1, 25))
            want = plain(self.target, prompt, *case)
            proposer = self.proposer(engine, dice.choice(DRAFTERS), want)
            request = ask(prompt, options_of(*case), proposer)
            request.branch_positions = tuple(
                sorted(dice.randrange(len(prompt) + 1) for _ in range(dice.randrange(3)))
            )
            request.priority = dice.randrange(2)
            pairs.append((request, want))
        self.serve(engine, [request for request, _ in pairs])
        for request, want in pairs:
            assert request.result.error is None
            assert request.stats.draft_error is None
            if request.aborted:
                assert request.output == want.output[: len(request.output)]
            else:
                assert_same([request], [want])
            for name in ("accepted", "cached_tokens", "disk_tokens", "preemptions", "moved"):
                self.counts[name] += getattr(request.stats, name)
        self.texts.append(tuple(pairs[0][0].tokens))
        assert_idle(engine)

    def serve(self, engine: Engine, requests: list[Request]) -> None:
        """Add the requests one by one; disturb some steps."""
        dice = self.dice
        waiting = list(requests)
        while waiting or not all(each.ended or each.aborted for each in requests):
            if waiting and dice.random() < 0.4:
                engine.add(waiting.pop())
            chance = dice.random()
            if chance < 0.03:
                chosen = dice.choice(requests)
                if chosen not in waiting and not chosen.ended:
                    engine.abort(chosen)
            if 0.03 < chance < 0.1:
                self.interrupted_step(engine)
            elif chance > 0.98:
                with self.patch.context() as patch:
                    has_states = engine.cache.has_states
                    patch.setattr(
                        engine.cache,
                        "has_states",
                        lambda table, known=has_states: known(table) and dice.random() < 0.5,
                    )
                    self.watch.step()
            else:
                self.watch.step()

    def interrupted_step(self, engine: Engine) -> None:
        """Interrupt a step after a pass of the target or of a draft model, or before the commit."""
        dice = self.dice
        left = dice.randrange(1, 5)
        owner, name = dice.choice(
            (
                (Program, "run"),
                (Program, "draft_chain"),
                (engine.runner, "forward"),
                (engine.cache, "commit_slots"),
            )
        )
        before = getattr(owner, name)

        def interrupted(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            result = before(*arguments, **options)
            left -= 1
            if not left:
                self.counts["interrupts"] += 1
                raise KeyboardInterrupt
            return result

        with self.patch.context() as patch:
            patch.setattr(owner, name, interrupted)
            with suppress(KeyboardInterrupt):
                engine.step()


def count_replays(patch: pytest.MonkeyPatch, counts: Counter[str]) -> None:
    """Count the tokens that passes replay, in targets and draft models."""
    begin_pass = StatePool.begin_pass

    def counted(pool: StatePool, table: BlockTable, tree: TokenTree, **options: int) -> StatePass:
        begun = begin_pass(pool, table, tree, **options)
        counts["replayed"] += begun.struct.replayed
        counts["copies"] += begun.struct.num_copies
        return begun

    patch.setattr(StatePool, "begin_pass", counted)


@pytest.mark.parametrize(
    ("seeds", "num_requests"),
    [
        (range(4), 15),
        pytest.param(range(100, 150), 40, marks=pytest.mark.slow),
    ],
    ids=["60 requests", "2000 requests"],
)
def test_random_requests(
    seeds: range, num_requests: int, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = Counter[str]()
    count_replays(monkeypatch, counts)
    for seed in seeds:
        script = Script(seed, server, monkeypatch)
        script.run(num_requests)
        counts.update(script.counts)
    for name in (
        "accepted",
        "moved",
        "cached_tokens",
        "disk_tokens",
        "preemptions",
        "interrupts",
        "replayed",
        "copies",
        "states",
    ):
        assert counts[name] > len(seeds), name
