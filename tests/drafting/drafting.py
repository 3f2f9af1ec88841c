"""Helpers that record what a draft model computes, and references without a KV cache."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from drafting.from_draft.drafts import draft_folder, read_checkpoint
from drafting.helpers import context as plain_context
from oracle import dense_logits
from pronk.base.arrays import FLOAT32, Array
from pronk.cache.blocks import BlockTable
from pronk.drafting import DraftContext, Outcome, Proposer, make_drafter
from pronk.drafting.shared.draft_runner import DraftRunner
from pronk.drafting.step_costs import ChainCosts, StepCosts
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.models.decoder import Decoder
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.layer_executor import ChainJob
from pronk.models.loader import load_decoder, read_config
from pronk.models.model_runner import ModelRunner
from pronk.sampling.logits_processors import TokenContext
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import DraftToken, Sampler
from pronk.sampling.tree import TokenTree
from tiny_models import (
    VOCAB,
    StrictAllocator,
    assert_idle,
    kernels,
    make_cache,
    make_engine,
    make_request,
    read_kv,
    run,
    tiny_decoder,
)

# A bias that leaves few likely tokens, so that some draft tokens of random heads are right.
LIKELY = dict.fromkeys(range(5), 30.0)


class Dense:
    """Reference of a draft model without a KV cache: computes the whole text for every call.

    The results of the kernels (``decoder``) are compared bit by bit; those of torch must be close
    to them.
    """

    def __init__(self, folder: str) -> None:
        path = Path(folder)
        by = kernels()
        self.decoder = load_decoder(path, read_config(path), dtype=FLOAT32, kernels=by)
        self.model = read_checkpoint(path)
        self._after: dict[tuple[int, ...], Array] = {}

    def __call__(self, tokens: Sequence[int]) -> Array:
        """Return the logits ``[vocab]`` after ``tokens``."""
        key = tuple(tokens)
        if key not in self._after:
            self._after[key] = self._run(key)[0]
        return self._after[key]

    def rows(self, tokens: Sequence[int]) -> list[Array]:
        """Return keys and values of all layers for ``tokens``, ``[kv_heads, tokens, head_dim]``
        each.
        """
        return self._run(tuple(tokens))[1]

    def _run(self, tokens: tuple[int, ...]) -> tuple[Array, list[Array]]:
        blocks = -(-len(tokens) // 16)
        runner = ModelRunner(
            self.decoder, make_cache(self.decoder.config, FLOAT32, num_blocks=blocks)
        )
        block_table = BlockTable()
        runner.cache.prepare(block_table, len(tokens))
        entry = BatchEntry(
            block_table, TokenTree.chain(tokens), range(len(tokens) - 1, len(tokens)), len(tokens)
        )
        logits = runner.forward(ForwardBatch([entry])).logits[0][0]
        want = dense_logits(self.model, tokens)[-1]
        np.testing.assert_allclose(logits, want, rtol=1e-4, atol=1e-4)
        block_table.length = len(tokens)
        return logits, kept_rows(runner, block_table)


@cache
def dense(noise: float) -> Dense:
    return Dense(draft_folder(noise))


def kept_rows(runner: ModelRunner, block_table: BlockTable) -> list[Array]:
    """Return copies of the cached keys and values of a request in all layers."""
    pools = [
        pool
        for layer in range(len(runner.cache.keys))
        for pool in read_kv(runner.cache, layer, block_table)
    ]
    return [pool.copy() for pool in pools]


@dataclass
class Asked:
    """One proposal: text, limits of depth and nodes, tree, and accepted path."""

    tokens: list[int]
    depth: int
    nodes: int
    tree: TokenTree
    path: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Watched(Proposer[Any]):
    """Wraps a proposer and records its proposals for each request."""

    name = "watched"

    inner: Proposer[Any]
    asked: dict[int, list[Asked]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "capabilities", self.inner.capabilities)
        object.__setattr__(self, "models", self.inner.models)

    @property
    def source(self) -> str:
        return self.inner.label

    def chain_costs(self, context: DraftContext[Any], costs: StepCosts) -> ChainCosts | None:
        return self.inner.chain_costs(context, costs)

    def start(self, prompt: Sequence[int]) -> Any:
        return self.inner.start(prompt)

    def propose(self, contexts: Sequence[DraftContext[Any]]) -> list[TokenTree]:
        trees = self.inner.propose(contexts)
        for c, tree in zip(contexts, trees, strict=True):
            note = Asked(list(c.tokens), c.max_depth, c.max_nodes, tree)
            self.asked.setdefault(id(c.sampler), []).append(note)
        return trees

    def observe(self, outcome: Outcome[Any]) -> None:
        for notes in self.asked.values():
            if (
                notes[-1].tokens[-1] == outcome.tree.tokens[0]
                and len(notes[-1].tokens) - 1 == outcome.position
            ):
                notes[-1].path = outcome.path
        self.inner.observe(outcome)

    def on_preempt(self, state: Any) -> None:
        self.inner.on_preempt(state)

    def stop(self, state: Any) -> None:
        self.inner.stop(state)

    def of(self, request: Request) -> list[Asked]:
        """Return the proposals for one request."""
        return self.asked.get(id(request.sampler), [])


@dataclass(frozen=True, eq=False)
class Turns(Proposer[Any]):
    """Alternates between two drafters, which both observe every step."""

    name = "turns"

    one: Proposer[Any]
    other: Proposer[Any]

    def start(self, prompt: Sequence[int]) -> Any:
        return [0, self.one.start(prompt), self.other.start(prompt)]

    def propose(self, contexts: Sequence[DraftContext[Any]]) -> list[TokenTree]:
        (context,) = contexts
        context.state[0] += 1
        number = 1 + context.state[0] % 2
        return (self.one, self.other)[number - 1].propose(
            [replace(context, state=context.state[number])]
        )

    def observe(self, outcome: Outcome[Any]) -> None:
        for number, part in enumerate((self.one, self.other), 1):
            part.observe(replace(outcome, state=outcome.state[number]))

    def stop(self, state: Any) -> None:
        for number, part in enumerate((self.one, self.other), 1):
            part.stop(state[number])


@dataclass
class Pass:
    """A forward pass of a draft model: for each request, one text per row, which ends with the
    row's token.
    """

    texts: list[list[tuple[int, ...]]]

    @property
    def rows(self) -> list[int]:
        return [len(each) for each in self.texts]


def watch_draft(draft: DraftRunner) -> list[Pass]:
    """Record the forward passes of ``draft``, whose pool gets a strict allocator."""
    passes = list[Pass]()
    caches = []
    make_cache = draft.make_cache
    forward = draft.runner.forward
    grow = draft.runner.draft_chains
    allocator = draft.runner.cache.allocator
    draft.runner.cache.allocator = StrictAllocator(allocator.num_blocks, allocator.block_size)
    if draft.runner.cache.prefix_cache is not None:
        draft.runner.cache.prefix_cache.attach(draft.runner.cache.allocator)

    def watched_cache() -> Any:
        caches.append(make_cache())
        return caches[-1]

    def texts_of(entry: BatchEntry, more: int = 0) -> list[tuple[int, ...]]:
        (own,) = [each for each in caches if each.block_table is entry.block_table]
        assert own.block_table.length == len(own.tokens)
        tree = entry.tree
        places = len(own.block_table.blocks) * draft.runner.cache.block_size
        assert own.block_table.length + len(tree) + more <= places, (
            "the request has no KV slots for its rows"
        )
        nodes = range(entry.num_computed, len(tree))
        return [
            (*own.tokens, tree.tokens[0], *(tree.tokens[i] for i in tree.path(n))) for n in nodes
        ]

    def watched(batch: ForwardBatch, collect: frozenset[int] = frozenset()) -> Any:
        passes.append(Pass([texts_of(entry) for entry in batch.entries]))
        return forward(batch, collect)

    def watched_growth(jobs: Sequence[ChainJob]) -> list[int]:
        (job,) = jobs
        before = texts_of(job.entry, job.max_tokens - 1)
        draft_tokens = list[int]()

        def recorded(draft_token: DraftToken) -> bool:
            draft_tokens.append(draft_token.token)
            return job.on_token(draft_token)

        (count,) = grow([job._replace(on_token=recorded)])
        assert count - len(draft_tokens) in (0, 1)
        passes.append(Pass([before]))
        passes.extend(Pass([[(*before[-1], *draft_tokens[:number])]]) for number in range(1, count))
        return [count]

    draft.runner.forward = watched  # type: ignore[method-assign]
    draft.runner.draft_chains = watched_growth  # type: ignore[method-assign]
    draft.make_cache = watched_cache  # type: ignore[method-assign]
    return passes


def assert_no_blocks(drafter: Proposer[Any]) -> None:
    """Check that no request holds a block of the caches of a drafter's models."""
    assert drafter.models
    for model in drafter.models:
        module = getattr(model, "module", None)
        pool = getattr(model, "runner", model).cache if module is None else module.pool
        allocator = pool.allocator
        assert allocator.num_free == allocator.num_blocks
        assert not any(allocator.references)


def bound(spec: str, engine: Engine | None = None) -> Proposer[Any]:
    """Bind a drafter to the target of ``engine``, by default to the tiny decoder."""
    engine = engine or make_engine(tiny_decoder())
    return make_drafter(spec).bind(engine.target)


def watched(spec: str, **options: Any) -> tuple[Engine, Watched]:
    """Return an engine, and a proposer that records its proposals for this engine."""
    engine = make_engine(tiny_decoder(), **options)
    return engine, Watched(bound(spec, engine))


def decode(
    engine: Engine, drafter: Proposer[Any], prompts: Sequence[Sequence[int]], **options: Any
) -> list[Request]:
    """Decode the prompts in one batch; the outputs must equal plain decoding."""
    params = [
        SamplingParams(**{"max_tokens": 30, "seed": seed, **options})
        for seed in range(len(prompts))
    ]
    requests = [
        make_request(prompt, own, drafter) for prompt, own in zip(prompts, params, strict=True)
    ]
    run(engine, requests)
    assert_plain(engine, requests)
    return requests


def abort_one_and_finish(
    engine: Engine, drafter: Proposer[Any], requests: Sequence[Request]
) -> None:
    """Abort the second request after an interrupted step; the others must end with the tokens of
    plain decoding.
    """
    engine.abort(requests[1])
    rest = [*requests[:1], *requests[2:]]
    while any(request.result.finish_reason is None for request in rest):
        engine.step()
    assert_plain(engine, rest)
    assert all(request.stats.accepted > 0 for request in rest)
    assert_idle(engine)
    assert_no_blocks(drafter)


def assert_plain(engine: Engine, requests: Sequence[Request]) -> None:
    """Check that the outputs equal plain decoding."""
    for request in requests:
        params = replace(request.params, n=1, seed=request.seed)
        assert request.output == plain_output(request.prompt, params, engine.runner.decoder)


def plain_output(
    prompt: Sequence[int], params: SamplingParams, decoder: Decoder | None = None
) -> list[int]:
    """Return the output of plain decoding, by default of the tiny decoder."""
    decoder = decoder or tiny_decoder()
    key = (decoder, tuple(prompt), repr(params))
    if key not in _PLAIN:
        plain = make_request(prompt, params)
        run(make_engine(decoder), [plain])
        _PLAIN[key] = plain.output
    return _PLAIN[key]


_PLAIN: dict[Any, list[int]] = {}


def text(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def sampler_at(request: Request, tokens: Sequence[int]) -> Sampler:
    """Return a new sampler with the request's options and seed, for the token after ``tokens``."""
    return Sampler(
        request.params, request.seed, TokenContext(list(tokens), len(request.prompt)), VOCAB
    )


def context(
    drafter: Proposer[Any],
    tokens: Sequence[int],
    *,
    state: Any = None,
    drafted: int = 0,
    depth: int = 20,
    nodes: int = 60,
    params: SamplingParams | None = None,
    **more: Any,
) -> DraftContext[Any]:
    """Return the context of a proposal after ``tokens``, whose last ``drafted`` are another
    drafter's draft tokens.
    """
    state = drafter.start(tokens) if state is None else state
    return plain_context(
        state, tokens, depth, nodes, drafted=drafted, params=params, vocab=VOCAB, **more
    )


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    """Return the root paths of all draft tokens of a tree."""
    return {tuple(tree.tokens[i] for i in tree.path(node)) for node in range(1, len(tree))}
