"""Kangaroo with other drafters, requests, windows and interruptions; the text must equal plain
decoding.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from drafting.drafting import abort_one_and_finish, assert_no_blocks, decode, text
from drafting.kernel_calls import burning
from engine.cases import total
from lab.drafters.exits import (
    OPTIONS,
    PROMPTS,
    WINDOWS,
    kangaroo_of,
    named,
    watched,
)
from lab.drafters.trained_kangaroo import calm_decoder
from parallel.dealt import partition_randomly, tree_parallel_engine
from pronk.base.arrays import BFLOAT16, FLOAT32
from pronk.drafting import Capabilities, DraftContext, Outcome, Proposer, make_drafter
from pronk.models.decoder import Decoder
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.parallel.runner import TreeRunner
from pronk.sampling.params import SamplingParams
from pronk.sampling.tree import TokenTree
from tiny_models import VOCAB, assert_idle, make_engine, make_request, run


def overwrite_rows(drafter: Proposer[Any], context: DraftContext[Any]) -> None:
    """Overwrite what the target's cache holds after the committed tokens with the rows of other
    tokens.
    """
    block_table = context.block_table
    tree = TokenTree.chain([0] * (1 + context.max_nodes))
    kangaroo_of(drafter).early_exit.runner.forward(
        ForwardBatch([BatchEntry(block_table, tree, range(0), len(tree))])
    )


@dataclass(frozen=True, eq=False)
class Spoiled(Proposer[Any]):
    """Changes the proposals of a drafter at random, or the KV rows that drafting has written
    ("overwritten").
    """

    name = "spoiled"

    inner: Proposer[Any]
    how: str

    def start(self, prompt: Sequence[int]) -> Any:
        return self.inner.start(prompt)

    def propose(self, contexts: Sequence[DraftContext[Any]]) -> list[TokenTree]:
        return [
            self.spoil(*each) for each in zip(contexts, self.inner.propose(contexts), strict=True)
        ]

    def spoil(self, context: DraftContext[Any], tree: TokenTree) -> TokenTree:
        dice = random.Random(len(context.tokens))
        if self.how == "cut":
            return tree.limit(dice.randrange(5), 64)
        if self.how == "thinned":
            return tree.keep(node for node in range(len(tree)) if dice.random() < 0.8)
        if self.how == "dropped":
            return TokenTree.chain(tree.tokens[:1]) if dice.random() < 0.4 else tree
        if self.how == "replaced" and dice.random() < 0.5:
            return TokenTree.chain([tree.tokens[0], *(dice.randrange(VOCAB) for _ in range(3))])
        if dice.random() < 0.5:
            overwrite_rows(self.inner, context)
        return tree

    def observe(self, outcome: Outcome[Any]) -> None:
        self.inner.observe(outcome)

    def stop(self, state: Any) -> None:
        self.inner.stop(state)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("wrapped", "options"), [(False, "penalties"), (True, "greedy")], ids=["chain", "cape"]
)
@pytest.mark.parametrize("how", ["cut", "thinned", "dropped", "replaced", "overwritten"])
def test_changed_proposals(how: str, options: str, *, wrapped: bool) -> None:
    decoder = calm_decoder(windows=WINDOWS)
    engine = make_engine(decoder)
    made = named(decoder, eta=0.3)
    drafter = Spoiled(make_drafter(f"cape({made})" if wrapped else made).bind(engine.target), how)
    requests = decode(engine, drafter, PROMPTS, **OPTIONS[options])
    assert total(requests, "accepted") > 5
    assert_no_blocks(drafter.inner)


def composite(decoder: Decoder, name: str) -> str:
    """Return a drafter made of Kangaroo and others."""
    made = named(decoder, eta=0.3)
    other = named(decoder, 1, eta=0.5)
    return {
        "cape": f"cape({made})",
        "cape of threshold": f"cape(threshold({made}), sizes='fine')",
        "first_of": f"first_of(prompt_lookup(min_ngram=1), {made})",
        "first": f"first_of({made}, prompt_lookup(min_ngram=1))",
        "merged": f"merged({made}, recycling)",
        "two exits": f"merged({made}, {other})",
        "two exits, one by one": f"first_of({other}, {made})",
    }[name]


COMPOSITES = [
    "cape",
    "cape of threshold",
    "first_of",
    "first",
    "merged",
    "two exits",
    "two exits, one by one",
]


@pytest.mark.few(5)
@pytest.mark.parametrize("options", ["greedy", "sampling"])
@pytest.mark.parametrize("name", COMPOSITES)
def test_parts_of_a_composite(name: str, options: str) -> None:
    kind = FLOAT32 if options == "greedy" else BFLOAT16
    decoder = calm_decoder(kind, windows=WINDOWS if options == "greedy" else (None, 24, None, None))
    engine = make_engine(decoder, prefill_chunk=32)
    drafter = make_drafter(composite(decoder, name)).bind(engine.target)
    requests = decode(engine, drafter, [*PROMPTS, text(5, 90)], **OPTIONS[options])
    sources = [
        s for request in requests for s in request.stats.sources.items() if "kangaroo" in s[0]
    ]
    assert sum(each.accepted for _, each in sources) > 5
    assert_no_blocks(drafter)
    assert_idle(engine)


@pytest.mark.parametrize(
    "windows", [(None,) * 4, WINDOWS, (None, 24, None, 24)], ids=["all", "window", "mixed"]
)
@pytest.mark.parametrize("exit_layer", [1, 3])
def test_long_prompts_in_small_chunks(exit_layer: int, windows: tuple[int | None, ...]) -> None:
    decoder = calm_decoder(windows=windows)
    engine = make_engine(decoder, prefill_chunk=16, max_batch=2, block_size=16)
    drafter = make_drafter(named(decoder, exit_layer, eta=0.4)).bind(engine.target)
    prompts = [text(seed, length) for seed, length in enumerate((60, 3, 90))]
    requests = decode(engine, drafter, prompts, max_tokens=45, temperature=0.8)
    assert total(requests, "accepted") > 10
    assert_no_blocks(drafter)


def test_learned_positions() -> None:
    decoder = calm_decoder(calm=0.1, classic=True)
    engine, drafter = watched(decoder, named(decoder))
    assert total(decode(engine, drafter, PROMPTS, temperature=0.8), "accepted") > 20


@pytest.mark.few(3)
@pytest.mark.parametrize("made", ["{}", "cape({})", "threshold({})"])
@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_the_target_reads_no_row_that_drafting_has_written(rule: Any, made: str) -> None:
    """The outputs equal those of the same proposals after which all rows of the draft are
    overwritten.
    """
    decoder = calm_decoder()
    outputs = list[list[list[int]]]()
    accepted = 0
    for how in ("unchanged", "overwritten"):
        engine = make_engine(decoder)
        inner = make_drafter(made.format(named(decoder, eta=0.2, noise=0.05))).bind(engine.target)
        drafter = Overwriting(inner) if how == "overwritten" else inner
        params = [
            SamplingParams(max_tokens=30, temperature=1.0, seed=seed, rule=rule)
            for seed in range(4)
        ]
        requests = [
            make_request(prompt, own, drafter) for prompt, own in zip(PROMPTS, params, strict=True)
        ]
        run(engine, requests)
        outputs.append([request.output for request in requests])
        accepted += total(requests, "accepted")
        assert total(requests, "accepted") < total(requests, "drafted")
    assert outputs[0] == outputs[1]
    assert accepted > 20


class Overwriting(Spoiled):
    """Proposes the same trees, and overwrites their rows."""

    def __init__(self, inner: Proposer[Any]) -> None:
        super().__init__(inner, "overwritten")

    def spoil(self, context: DraftContext[Any], tree: TokenTree) -> TokenTree:
        overwrite_rows(self.inner, context)
        return tree


@pytest.mark.few(3)
@pytest.mark.parametrize("own", [False, True], ids=["first layers", "adapter"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("made", ["{}", "cape(threshold({}))"])
def test_an_interrupted_forward_pass_changes_no_text(made: str, *, after: bool, own: bool) -> None:
    decoder = calm_decoder()
    interrupted = 0
    # In the target, pass 0 reads the prompts; then passes through the first layers precede each
    # verification.
    for at in (0, 1, 4, 8) if own else (1, 2, 5, 8, 11):
        engine = make_engine(decoder)
        drafter = make_drafter(made.format(named(decoder))).bind(engine.target)
        beside = kangaroo_of(drafter).early_exit.module
        assert beside is not None
        params = SamplingParams(max_tokens=16, seed=1, temperature=0.8, frequency_penalty=0.6)
        requests = [make_request(prompt, params, drafter) for prompt in PROMPTS]
        with (
            pytest.raises(KeyboardInterrupt),
            burning(beside.pool if own else engine.cache, at, after=after),
        ):
            run(engine, requests)
        interrupted += any(request.output for request in requests)
        abort_one_and_finish(engine, drafter, requests)
    assert interrupted > 0


class ModelReader(Spoiled):
    """Reads the outputs of all layers beside a drafter that runs the first ones."""

    capabilities = Capabilities(hidden=(1, 2, 3, 4))

    def spoil(self, context: DraftContext[Any], tree: TokenTree) -> TokenTree:
        return tree

    def observe(self, outcome: Outcome[Any]) -> None:
        assert [len(rows) for rows in outcome.hidden.values()] == [len(outcome.tree)] * 4
        super().observe(outcome)


def test_another_part_reads_the_first_layers() -> None:
    decoder = calm_decoder()
    engine = make_engine(decoder)
    requests = decode(
        engine, ModelReader(make_drafter(named(decoder)).bind(engine.target), "read"), PROMPTS
    )
    assert total(requests, "accepted") > 20


def test_several_processes_share_the_verifying_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver drafts in its own cache, also after tokens that workers have verified."""
    decoder = calm_decoder()
    partition_randomly(monkeypatch)
    steps = list[list[Any]]()
    with tree_parallel_engine(decoder, 3) as several:
        for engine in (make_engine(decoder), several):
            drafter = make_drafter(named(decoder, eta=0)).bind(engine.target)
            requests = decode(engine, drafter, PROMPTS, temperature=0.8)
            steps.append(
                [
                    [(step.drafted, step.accepted) for step in request.stats.steps]
                    for request in requests
                ]
            )
            assert total(requests, "accepted") > 20
        assert isinstance(several.runner, TreeRunner)
        assert several.runner.num_shared_passes > 5
    assert steps[0] == steps[1]
