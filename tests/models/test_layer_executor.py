"""Rows of prompts end after the last layer that stores keys; no bit changes."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pronk.base.arrays import BFLOAT16, FLOAT32, INT8, Array, DType
from pronk.cache.blocks import BlockTable
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.model_runner import ModelRunner
from pronk.models.program import Program
from pronk.sampling.tree import TokenTree
from tiny_models import VOCAB, kernels, make_cache, read_kv, tiny_decoder

# The last two of four layers read the keys of the first two.
SHARING: dict[str, Any] = {"special": "gemma4", "windows": (20, None, 20, None)}
LENGTHS = (40, 1, 23, 16)
TREE = TokenTree([5, 6, 7, 6], [-1, 0, 0, 1])


@pytest.fixture
def num_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of rows of each run of a program."""
    kernels()  # runs programs to check itself
    found = list[int]()
    run = Program.run

    def count(self: Program, batch: Any, stream: Array, *arguments: Any) -> int:
        found.append(len(stream))
        return run(self, batch, stream, *arguments)

    monkeypatch.setattr(Program, "run", count)
    return found


class Texts:
    """Four texts in a cache, the last of which is followed by a tree."""

    def __init__(self, dtype: DType, kv_dtype: DType | None = None, **shape: Any) -> None:
        decoder = tiny_decoder(dtype, **(shape or SHARING))
        cache = make_cache(decoder.config, dtype, kv_dtype=kv_dtype)
        self.runner = ModelRunner(decoder, cache)
        self.tables = [BlockTable() for _ in LENGTHS]
        dice = random.Random(1)
        self.texts = [[dice.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]

    def entries(self, logits: Sequence[range]) -> list[BatchEntry]:
        """Return the entries of a pass that reads all texts; the nodes ``logits`` have logits."""
        found = list[BatchEntry]()
        for table, text, nodes in zip(self.tables, self.texts, logits, strict=True):
            self.runner.cache.prepare(table, len(text) + len(TREE))
            found.append(BatchEntry(table, TokenTree.chain(text), nodes, len(text)))
        return found

    def read(self, logits: Sequence[range]) -> list[Array]:
        """Read all texts in one pass, and return the logits of the nodes ``logits``."""
        result = self.runner.forward(ForwardBatch(self.entries(logits)))
        for table, text in zip(self.tables, self.texts, strict=True):
            table.length = len(text)
        return [rows[:] for rows in result.logits]

    def stored(self) -> list[Array]:
        cache = self.runner.cache
        layers = range(len(cache.keys))
        return [
            part
            for table in self.tables
            for layer in layers
            for part in read_kv(cache, layer, table)
        ]


ALL = [range(length) for length in LENGTHS]
LAST = [range(length - 1, length) for length in LENGTHS]


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(FLOAT32, None), (BFLOAT16, None), (FLOAT32, INT8)], ids=str
)
def test_bits_of_prompts(dtype: DType, kv_dtype: DType | None, num_rows: list[int]) -> None:
    whole = Texts(dtype, kv_dtype)
    want = whole.read(ALL)
    assert num_rows == [80]
    short = Texts(dtype, kv_dtype)
    got = short.read(LAST)
    assert num_rows[1:] == [80, 4]
    for one, other in zip(got, want, strict=True):
        assert np.array_equal(one, other[-1:])
    for one, other in zip(short.stored(), whole.stored(), strict=True):
        assert np.array_equal(one, other)


def test_prompts_without_logits_and_trees(num_rows: list[int]) -> None:
    """A pass with a chunk of a prompt, the end of another, and two requests with draft tokens."""
    nodes = [range(0), range(1), range(20, 23), range(0)]
    short = Texts(FLOAT32)
    got = short.read(nodes)
    assert num_rows == [80, 4]
    assert len(got[0]) == len(got[3]) == 0
    whole = Texts(FLOAT32)
    want = whole.read(ALL)
    assert np.array_equal(got[1], want[1])
    assert np.array_equal(got[2], want[2][20:])
    num_rows.clear()
    results = list[Array]()
    for texts in (short, whole):
        dice = random.Random(2)
        tail = TokenTree.chain([dice.randrange(VOCAB) for _ in range(4)])
        entries = [
            BatchEntry(texts.tables[0], TREE, range(len(TREE))),
            BatchEntry(texts.tables[2], tail, range(3, 4) if texts is short else range(4)),
        ]
        results += [rows[:] for rows in texts.runner.forward(ForwardBatch(entries)).logits]
    assert num_rows == [8, 5, 8]
    assert np.array_equal(results[0], results[2])
    assert np.array_equal(results[1], results[3][3:])


def test_nothing_is_left_out_that_a_drafter_reads(num_rows: list[int]) -> None:
    texts = Texts(FLOAT32)
    result = texts.runner.forward(ForwardBatch(texts.entries(LAST)), frozenset({4}))
    assert num_rows == [80]
    assert [len(rows) for rows in result.hidden[4]] == [*LENGTHS]
    early = texts.runner.forward(ForwardBatch(texts.entries(LAST)), frozenset({2}))
    assert num_rows == [80, 80, 4]
    assert [len(rows) for rows in early.hidden[2]] == [*LENGTHS]
    owner = object.__new__(type("Owner", (), {}))
    texts.runner.cache.save_feature(3, owner)
    texts.read(LAST)
    assert num_rows[3:] == [80]


def test_models_whose_layers_all_store_keys_run_once(num_rows: list[int]) -> None:
    Texts(FLOAT32, windows=(20, None)).read(LAST)
    assert num_rows == [80]
