"""Same seed, same tokens on the GPU runner: drafters, trees, chunks, batches and cached prefixes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from engine.cases import SPECS, ask, assert_same, text, total, watch
from gpu.tiny_gpu import count_calls, gpu_engine, gpu_runner
from guides import TOY
from pronk import OptionError
from pronk.base.arrays import BFLOAT16, FLOAT32, Array, DType
from pronk.cache.blocks import BlockTable
from pronk.drafting import Capabilities, make_drafter
from pronk.drafting.proposer import check_needs
from pronk.engine.request import Request
from pronk.gpu import attention, steps
from pronk.gpu import runner as gpu_runner_module
from pronk.gpu.chains import Chains
from pronk.gpu.runner import GpuRunner
from pronk.gpu.steps import ROW_BUCKETS
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.sampling.params import SamplingParams
from pronk.sampling.tree import TokenTree
from tiny_models import run

pytestmark = pytest.mark.usefixtures("small_tiles")

# One key head: the interpreter takes a tenth of a millisecond for each operation of a program.
SMALL: dict[str, Any] = {"heads": 2, "kv_heads": 1}
# Two tokens, so that texts repeat themselves, for the drafters that need it.
REPETITIVE = {3: 100.0, 5: 100.0}
PROMPT = (3, 5, 9, 3, 5)
DRAFTERS = {
    "suffix": ("suffix", REPETITIVE),
    "prompt_lookup": ("prompt_lookup(min_ngram=1, num_tokens=4)", REPETITIVE),
    "recycling": ("recycling(num_nodes=4, top_k=3)", None),
    "lookahead": ("lookahead(window=2, ngram=2, guesses=2)", None),
    "jacobi": ("jacobi(num_tokens=3)", None),
    "draft_model": (SPECS["draft_model"], None),
    "threshold": (SPECS["threshold"], None),
    "cape": (f"cape({SPECS['draft_model']})", None),
    "eagle3": (SPECS["eagle3"], None),
    "grammar": ("autoregressive", None),  # with a guide, whose forced tokens are proposed
}


def options(index: int) -> SamplingParams:
    """Return greedy decoding or sampling, by turns; a guide for the drafter ``grammar``."""
    name = [*DRAFTERS][index]
    return SamplingParams(
        max_tokens=5,
        seed=40 + index,
        temperature=0.8 * (index % 2),
        logprobs=1,
        logit_bias=DRAFTERS[name][1] or {},
        guide=TOY if name == "grammar" else None,
    )


def decode(*, drafts: bool) -> list[Request]:
    """Decode the prompt in one batch, once for each drafter, with these drafters or without.

    Without drafters, the host chooses all tokens from the logits.
    """
    engine = gpu_engine(**SMALL, windows=(None, 8), max_batch=len(DRAFTERS))
    made = []
    for index, (spec, _) in enumerate(DRAFTERS.values()):
        drafter = make_drafter(spec).bind(engine.target) if drafts else None
        made.append(ask(PROMPT, options(index), drafter))
        if not drafts:
            made[-1].sampler.stateless_sampler = None
    run(engine, made)
    return made


@pytest.mark.long
def test_drafters_equal_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device verifies the trees, and drafts chains, of requests whose options allow it."""
    want = decode(drafts=False)
    verified = count_calls(monkeypatch, gpu_runner_module, "verified_paths")
    chains = count_calls(monkeypatch, Chains, "draft")
    got = decode(drafts=True)
    assert len(verified) > 2
    assert len(chains) > 2
    assert_same(got, want)
    for name, request in zip(DRAFTERS, got, strict=True):
        assert request.stats.drafted > 0, name
    assert total(got, "accepted") > 3
    assert got[-1].stats.sources["grammar"].accepted > 0


def test_more_rows_than_a_graph_has() -> None:
    """A window of 135 rows, which the host reads; a step of plain launches."""
    # the window is as deep as 22 tokens, so that many are wanted; three steps are enough
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=3)
    rows = list[int]()
    texts = list[list[int]]()
    for spec in ("autoregressive", "lookahead(window=9, ngram=16, warm_up='random')"):
        engine = gpu_engine(**SMALL, windows=(None,), max_tree=160)
        request = ask(PROMPT, params, make_drafter(spec).bind(engine.target))
        watch(engine, lambda batch, _: rows.append(batch.num_rows))
        engine.add(request)
        for _ in range(3):
            engine.step()
        texts.append(request.tokens[: len(PROMPT) + 3])
    assert max(rows) > ROW_BUCKETS[-1]
    assert texts[0] == texts[1]


def test_drafters_that_read_the_targets_keys_are_refused() -> None:
    target = gpu_engine(**SMALL, windows=(None, 8)).target
    message = "^reader: expected the target's KV cache in the machine's memory, found it on another"
    with pytest.raises(OptionError, match=message):
        check_needs("reader", Capabilities(kv_layers=(1,)), target)


def forward(
    runner: GpuRunner, table: BlockTable, tree: TokenTree, others: Sequence[BatchEntry] = ()
) -> Array:
    """Return the logits of a tree below a table's committed tokens, in a batch with others."""
    runner.cache.prepare(table, table.length + len(tree))
    entry = BatchEntry(table, tree, range(len(tree)))
    return runner.forward(ForwardBatch([*others, entry])).logits[-1][:]


def read(runner: GpuRunner, tokens: Sequence[int]) -> tuple[BlockTable, Array]:
    """Commit a text in one pass; return its table and logits."""
    table = BlockTable()
    logits = forward(runner, table, TokenTree.chain(tokens))
    runner.cache.commit_slots(table, range(len(tokens)))
    return table, logits


@pytest.mark.long
@pytest.mark.parametrize(
    "dtype", [BFLOAT16, pytest.param(FLOAT32, marks=pytest.mark.slow)], ids=str
)
def test_bits_of_a_row_depend_on_its_text_alone(
    dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chain, chunks, tree, batch, padded step and cached prefix, across blocks and splits of keys."""
    monkeypatch.setattr(attention, "KEY_BLOCK", 16)
    monkeypatch.setattr(attention, "SPLIT", 16)
    monkeypatch.setattr(steps, "_MIN_CONTEXT", 32)
    runner = gpu_runner(dtype, **SMALL, windows=(10,), share_prefixes=True)
    tokens = text(8, 22)
    table, whole = read(runner, tokens)
    want = whole[16:]
    assert np.ptp(want) > 1.0
    # chunks of 16 and 2 tokens, then a tree in which the rest of the text is a branch
    chunked, first = read(runner, tokens[:16])
    assert np.array_equal(first, whole[:16])
    second = forward(runner, chunked, TokenTree.chain(tokens[16:18]))
    runner.cache.commit_slots(chunked, range(2))
    assert np.array_equal(second, whole[16:18])
    tree = TokenTree((tokens[18], 7, tokens[19], 7, tokens[20], tokens[21]), (-1, 0, 0, 2, 2, 4))
    branch = [0, 2, 4, 5]
    assert np.array_equal(forward(runner, chunked, tree)[branch], want[2:])
    # the same tree beside another request, in a step that is padded
    beside, _ = read(runner, tokens[:2])
    runner.cache.prepare(beside, 4)
    other = BatchEntry(beside, TokenTree.chain([1, 2]), range(2))
    runner.steps.pads = True
    assert np.array_equal(forward(runner, chunked, tree, [other])[branch], want[2:])
    runner.steps.pads = False
    # the accepted branch is moved behind the text; the next token sees it
    runner.cache.commit_slots(chunked, branch)
    following = forward(runner, chunked, TokenTree.chain([9]))
    assert np.array_equal(following, forward(runner, table, TokenTree.chain([9])))
    # a cached prefix
    runner.cache.cache_blocks(table, tokens)
    cached = runner.cache.match_prefix([*tokens[:16], 1])
    assert cached is not None
    assert cached.length == 16
    assert np.array_equal(forward(runner, cached, TokenTree.chain(tokens[16:18])), want[:2])
