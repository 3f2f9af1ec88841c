"""On a CPU a token's logits are the same bits, whatever shares its pass and however its text was cut into passes.

Everything goes through :meth:`Runner.forward` directly, so that what is compared is all logits of a text and not only
the tokens that were chosen from them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from models import VOCAB, make_cache, tiny_decoder
from oracle import dense_logits
from pronk.cache.blocks import BlockTable
from pronk.engine.runner import Job, Runner
from pronk.model.attention import Segment
from pronk.model.decoder import Decoder
from pronk.tree import TokenTree

LENGTH = 640  # crosses one boundary of 512 keys

# Query heads per key/value head: 1 to 8, and the single head of multi-query attention, where threads split differently.
GROUPS: dict[str, dict[str, Any]] = {
    "group 1": {"heads": 4, "kv_heads": 4},
    "group 2": {"heads": 4, "kv_heads": 2},
    "group 3": {"heads": 6, "kv_heads": 2},
    "group 8": {"heads": 16, "kv_heads": 2},
    "one kv head, group 8": {"heads": 8, "kv_heads": 1},
    "one kv head, group 3": {"heads": 3, "kv_heads": 1},
    "one head": {"heads": 1, "kv_heads": 1},
}
VARIANTS: dict[str, dict[str, Any]] = GROUPS | {
    "windows": {"windows": (100, 100)},
    "some windows": {"windows": (None, 37)},
    "head of 64": {"head_dim": 64},
    "head of 80": {"heads": 2, "head_dim": 80},
    "classic": {"heads": 4, "kv_heads": 4, "classic": True},
    "plain linear": {"packed": False},
    "classic, plain linear": {"heads": 4, "kv_heads": 4, "classic": True, "packed": False},
}
WIDE = {"hidden": 576, "heads": 9, "kv_heads": 3, "head_dim": 64, "vocab": 1024, "windows": (None,)}

# Around the start and around the boundary one token at a time, the rest at once.
SINGLES = [1] * 48 + [432] + [1] * 64 + [96]


def text(seed: int = 0, length: int = LENGTH, vocab: int = VOCAB) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(vocab) for _ in range(length)]


def cut(size: int, length: int = LENGTH) -> list[int]:
    """Chunks of ``size``; small ones only at the start and around the boundary."""
    if size < 4:
        return [*[size] * (48 // size), 432, *[size] * (48 // size), length - 432 - 2 * (48 // size * size)]
    return [size] * (length // size) + [length % size] * (length % size > 0)


def mixed(seed: int, length: int = LENGTH) -> list[int]:
    dice, chunks = random.Random(seed), list[int]()
    while (left := length - sum(chunks)) > 0:
        chunks.append(min(left, dice.choice((1, 2, 3, 4, 5, 7, 8, 16, 31, 33, 64, 100, 129))))
    return chunks


def job(table: BlockTable, tree: TokenTree) -> Job:
    return Job(Segment(table, tree), range(len(tree)), prompt_length=1)


def logits(decoder: Decoder, tokens: Sequence[int], chunks: Sequence[int]) -> Tensor:
    """``[len(tokens), vocab]``, computed chunk by chunk."""
    runner = Runner(decoder, make_cache(decoder.config, decoder.embedding.dtype, num_blocks=80))
    table, rows = BlockTable(), list[Tensor]()
    for start, stop in zip((0, *accumulate(chunks)), accumulate(chunks), strict=False):
        runner.cache.prepare(table, stop)
        rows += runner.forward([job(table, TokenTree.chain(tokens[start:stop]))]).logits
        runner.cache.commit(table, range(stop - start))
    return torch.cat(rows)


def differing(a: Tensor, b: Tensor) -> list[int]:
    """Rows in which some bit differs."""
    assert a.shape == b.shape
    return (a != b).any(-1).nonzero().flatten().tolist()


def check_chunkings(decoder: Decoder, chunkings: dict[str, list[int]]) -> None:
    tokens = text(vocab=decoder.config.vocab_size)
    want = logits(decoder, tokens, SINGLES)
    if decoder.embedding.dtype == torch.float32:
        torch.testing.assert_close(want, dense_logits(decoder, tokens), rtol=0.0, atol=1e-4)
    wrong = {name: differing(logits(decoder, tokens, chunks), want) for name, chunks in chunkings.items()}
    assert not {name: rows for name, rows in wrong.items() if rows}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_any_chunking(variant: str, dtype: torch.dtype) -> None:
    chunkings = {f"{size}": cut(size) for size in (2, 3, 4, 5, 8, 16, 33, 64, 128, 512, LENGTH)}
    chunkings |= {f"mixed {seed}": mixed(seed) for seed in range(2)}
    check_chunkings(tiny_decoder(dtype, **VARIANTS[variant]), chunkings)


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        ("group 3", torch.float32),
        ("group 3", torch.bfloat16),
        ("one kv head, group 8", torch.bfloat16),
        ("one kv head, group 3", torch.bfloat16),
    ],
    ids=str,
)
def test_any_chunking_with_threads(variant: str, dtype: torch.dtype) -> None:
    # A product inside a kernel that has only one task may be split over threads, along the sum over 512 keys. It was,
    # for one key/value head, which shows where the second half of the keys is not empty.
    torch.set_num_threads(2)
    decoder, tokens = tiny_decoder(dtype, windows=(None,) * 6, **VARIANTS[variant]), text(length=440)
    want = logits(decoder, tokens, [400] + [1] * 16 + [24])
    for chunks in ([400] + [5] * 8, [440]):
        assert not differing(logits(decoder, tokens, chunks), want), chunks


@pytest.mark.parametrize("threads", [3, 4, 6])
@pytest.mark.parametrize("variant", ["group 3", "classic"])
def test_large_pass_with_many_threads(variant: str, threads: int) -> None:
    # Elementwise functions of a large pass are cut between threads anywhere in a row.
    torch.set_num_threads(threads)
    decoder = tiny_decoder(**VARIANTS[variant])
    whole, parts = (logits(decoder, text(length=604), chunks) for chunks in ([604], [100] * 6 + [4]))
    assert not differing(whole, parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_any_chunking_of_a_wider_model(dtype: torch.dtype, *, packed: bool) -> None:
    # The products' kernels are chosen by their sizes, so the tiny ones prove little about real ones.
    check_chunkings(tiny_decoder(dtype, packed=packed, **WIDE), {f"{n}": cut(n) for n in (3, 8, 16, 33, 100, LENGTH)})


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_by_one_everywhere(variant: str, dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    decoder, length = tiny_decoder(dtype, **VARIANTS[variant]), 1100
    tokens = text(1, length)
    want = logits(decoder, tokens, [1] * length)
    chunkings = [[size] * (length // size) + [length % size] * (length % size > 0) for size in (2, 3, 4, 5, 8, 33, 512)]
    for chunks in (*chunkings, *(mixed(seed, length) for seed in range(3))):
        assert not differing(logits(decoder, tokens, chunks), want), chunks[:3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["group 3", "group 8", "windows", "plain linear"])
def test_any_company(variant: str, dtype: torch.dtype) -> None:
    """Texts that share passes, in random order and chunks, have the logits that they have alone."""
    decoder, dice = tiny_decoder(dtype, **VARIANTS[variant]), random.Random(2)
    lengths = (40, 150, 530, 300, 5)
    texts = [text(seed, length) for seed, length in enumerate(lengths)]
    runner = Runner(decoder, make_cache(decoder.config, dtype, num_blocks=120))
    tables = [BlockTable() for _ in texts]
    rows: list[list[Tensor]] = [[] for _ in texts]
    while unfinished := [i for i, table in enumerate(tables) if table.length < lengths[i]]:
        chosen = dice.sample(unfinished, dice.randint(1, len(unfinished)))
        jobs = []
        for i in chosen:
            start = tables[i].length
            stop = min(lengths[i], start + dice.choice((1, 1, 2, 3, 5, 8, 21, 64)))
            runner.cache.prepare(tables[i], stop)
            jobs.append(job(tables[i], TokenTree.chain(texts[i][start:stop])))
        for i, share, got in zip(chosen, jobs, runner.forward(jobs).logits, strict=True):
            rows[i].append(got)
            runner.cache.commit(tables[i], range(len(share.segment.tree)))
    for i, tokens in enumerate(texts):
        assert not differing(torch.cat(rows[i]), logits(decoder, tokens, [len(tokens)])), i


def bushy(tokens: Sequence[int], start: int, count: int, dice: random.Random) -> tuple[TokenTree, list[int]]:
    """A tree over the true text: ``count`` nodes of it as the main chain, and further ones among wrong siblings.

    Returns the tree, and the nodes that stand for true tokens, in the order of the text.
    """
    ids, parents = list(tokens[start : start + count]), list(range(-1, count - 1))
    true = list(range(count))

    def wrong(right: int) -> int:
        return dice.choice([token for token in range(VOCAB) if token != right])

    for place in range(start + count, start + count + 6):
        parent = true[-1]
        for _ in range(dice.randint(place == start + count, 2)):
            ids.append(wrong(tokens[place]))
            parents.append(parent)
            parent = len(ids) - 1
        ids.append(tokens[place])
        parents.append(true[-1])
        true.append(len(ids) - 1)
    return TokenTree(tuple(ids), tuple(parents)), true


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["group 1", "group 3", "group 8", "windows", "some windows", "plain linear"])
def test_trees(variant: str, dtype: torch.dtype) -> None:
    """The main chain of a tree has the bits of plain decoding; what is off it is close, and no more is promised."""
    decoder, tokens, dice = tiny_decoder(dtype, **VARIANTS[variant]), text(3), random.Random(4)
    want = logits(decoder, tokens, [LENGTH])
    runner = Runner(decoder, make_cache(decoder.config, dtype, num_blocks=60))
    table, off_chain = BlockTable(), 0
    for start in (0, 3, 30, 99, 200, 495, 503, 508, 511, 512, 515, 600):
        runner.cache.prepare(table, start)
        if start > table.length:
            runner.forward([job(table, TokenTree.chain(tokens[table.length : start]))])
            runner.cache.commit(table, range(start - table.length))
        tree, true = bushy(tokens, start, dice.choice((1, 2, 5, 8)), dice)
        runner.cache.prepare(table, start + len(tree))
        (got,) = runner.forward([job(table, tree)]).logits
        main = sum(node < tree.main_chain for node in true)
        assert not differing(got[:main], want[start : start + main]), start
        off_chain += len(true) - main
        nearby = {"rtol": 0.0, "atol": 1e-4 if dtype == torch.float32 else 0.5}
        torch.testing.assert_close(got[true], want[start : start + len(true)], **nearby)
    assert off_chain == 12 * 6


def test_only_the_wanted_nodes() -> None:
    """The logits of some nodes are those of all; hidden states come for every node, per request."""
    decoder = tiny_decoder()
    trees = [TokenTree.chain(text(seed, size)) for seed, size in enumerate((7, 1, 12))]
    runner = Runner(decoder, make_cache(decoder.config, torch.float32))
    tables = [BlockTable() for _ in trees]
    for table, tree in zip(tables, trees, strict=True):
        runner.cache.prepare(table, len(tree))
    segments = [Segment(table, tree) for table, tree in zip(tables, trees, strict=True)]
    every = runner.forward([Job(s, range(len(s.tree)), 1) for s in segments], frozenset({1, 2}))
    wanted = [range(3, 7), range(0), range(11, 12)]
    some = runner.forward([Job(s, w, 1) for s, w in zip(segments, wanted, strict=True)])
    for i, nodes in enumerate(wanted):
        assert some.logits[i].shape == (len(nodes), VOCAB)
        assert torch.equal(some.logits[i], every.logits[i][list(nodes)])
        assert torch.equal(decoder.logits(every.hidden[2][i]), every.logits[i])
        assert every.hidden[1][i].shape == (len(trees[i]), 64)
        assert not torch.equal(every.hidden[1][i], every.hidden[2][i])
    assert not some.hidden
    none = runner.forward([Job(segments[0], range(7, 7), 1)])
    assert none.logits[0].shape == (0, VOCAB)
