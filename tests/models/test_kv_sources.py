"""Layers that read keys and values of earlier layers, or of other models' caches, against plain
loops in NumPy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from oracle import DenseModel
from pronk.base.arrays import FLOAT32, Array
from pronk.cache.blocks import BlockTable
from pronk.cache.paged import PagedCache
from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.rope import RopeConfig
from pronk.kernels.library import Kernels, candidates
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.model_runner import ModelRunner
from pronk.models.program import KVSource, Program
from pronk.sampling.tree import TokenTree
from tiny_models import POISON, decoder_of, make_cache, sharing_decoder, tiny_config

EVERY = pytest.mark.parametrize("by", candidates(), ids=lambda by: by.name)
# the second rotates half of a head
SLOW = RopeConfig(16)
FAST = RopeConfig(8, theta=100.0)

# Windows and rotations of the layers that read keys differ from those of the layers that store
# them.
WINDOWS = (None, 5, 3, None, None, 2)
ROPES = (SLOW, FAST, FAST, SLOW, None, SLOW)
OTHER_WINDOWS = ((None, 6), (None,))
OWN = {2: KVSource(0), 3: KVSource(1)}
OTHERS = {4: KVSource(1, cache=1), 5: KVSource(0, cache=2)}


class Cached(NamedTuple):
    """The first ``length`` tokens of a text in another model's cache, of which the first ``start``
    were released.
    """

    config: ModelConfig
    keys: list[list[Array]]  # by layer and position: ``[kv_heads, head_dim]``
    values: list[list[Array]]
    length: int
    start: int = 0


def rms(x: Array, weight: Array) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * weight


def rotate(x: Array, position: int, rope: RopeConfig | None) -> Array:
    """Rotate each pair of dimensions ``i`` and ``i + dim / 2`` of heads ``[heads, head_dim]``."""
    if rope is None:
        return x
    half = rope.dim // 2
    turn = np.exp(1j * position * rope.theta ** (-np.arange(half) / half))
    turned = (x[:, :half] + 1j * x[:, half : rope.dim]) * turn
    return np.concatenate((turned.real, turned.imag, x[:, rope.dim :]), axis=1)


def attend(queries: Array, keys: Sequence[Array], values: Sequence[Array]) -> Array:
    """Return the outputs ``[heads, head_dim]``, one head after the other; without keys they are
    zero.
    """
    out = np.zeros_like(queries)
    for head, query in enumerate(queries):
        if keys:
            shared = head * len(keys[0]) // len(queries)
            weights = np.exp([query @ key[shared] / np.sqrt(len(query)) for key in keys])
            out[head] = (
                sum(w * value[shared] for w, value in zip(weights, values, strict=True))
                / weights.sum()
            )
    return out


def slow(
    module: DenseModel,
    text: Sequence[int],
    reads: Mapping[int, KVSource],
    others: Sequence[Cached] = (),
) -> tuple[Array, Cached]:
    """Return logits ``[len(text), vocab]`` of a text, and the keys and values, in float64."""
    c = module.config
    weights = {name: value.double().numpy() for name, value in module.named_parameters()}
    own = Cached(c, [[] for _ in range(c.num_layers)], [[] for _ in range(c.num_layers)], len(text))
    logits = []
    for position, token in enumerate(text):
        x = weights["embedding"][token]
        for index in range(c.num_layers):
            w = {
                name.split(".", 2)[2]: value
                for name, value in weights.items()
                if name.startswith(f"layers.{index}.")
            }
            kv = reads.get(index, KVSource(index))
            source = others[kv.cache - 1] if kv.cache else own
            rope = source.config.rope_of(kv.layer)
            projected = np.split(
                w["qkv.weight"] @ rms(x, w["attention_norm.weight"]), np.cumsum(c.qkv_sizes)[:2]
            )
            q, k, v = (part.reshape(-1, c.head_dim) for part in projected)
            if c.whole_qk_norm:
                q, k = (
                    rms(each.ravel(), w[name]).reshape(each.shape) for each, name in qk_norms(q, k)
                )
            elif c.qk_norm:
                q, k = (rms(each, w[name]) for each, name in qk_norms(q, k))
            if index not in reads:
                own.keys[index].append(rotate(k, position, rope))
                own.values[index].append(v)
            window = source.config.windows[kv.layer] or 10**6
            # The model's own cache has a key of this row, another cache only those of tokens before
            # it.
            stop = min(source.length, position) if kv.cache else position + 1
            seen = range(max(source.start, position - window + 1), stop)
            kept = ([of[kv.layer][i] for i in seen] for of in (source.keys, source.values))
            x = x + w["out.weight"] @ attend(rotate(q, position, rope), *kept).ravel()
            gate, up = np.split(w["up.weight"] @ rms(x, w["mlp_norm.weight"]), 2)
            x = x + w["down.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        logits.append(weights["head.weight"] @ rms(x, weights["norm.weight"]))
    return np.stack(logits), own


def qk_norms(q: Array, k: Array) -> tuple[tuple[Array, str], ...]:
    return (q, "q_norm.weight"), (k, "k_norm.weight")


def module_of(config: ModelConfig, seed: int = 0) -> DenseModel:
    module = DenseModel(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.5 * parameter.shape[1] ** -0.5, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
        module.embedding.mul_(8.0)
    return module.requires_grad_(requires_grad=False)


def new_cache(config: ModelConfig, by: Kernels) -> PagedCache:
    return make_cache(config, FLOAT32, num_blocks=24, poison=POISON)


def text_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 131, length).tolist()


@cache
def reader_module(norms: str) -> DenseModel:
    """Return the weights of the model whose layers read other layers, the same for all instruction sets."""
    fields: dict[str, Any] = {"qk_norm": bool(norms), "whole_qk_norm": norms == "whole"}
    return module_of(replace(tiny_config(windows=WINDOWS), layer_ropes=ROPES, **fields))


@cache
def other_modules() -> tuple[DenseModel, ...]:
    """Return the weights of the two models whose caches are read."""
    return tuple(
        module_of(
            replace(tiny_config(windows=windows, kv_heads=kv_heads, heads=kv_heads), rope=rope),
            seed,
        )
        for seed, (windows, kv_heads, rope) in enumerate(
            zip(OTHER_WINDOWS, (3, 1), (SLOW, FAST), strict=True), 1
        )
    )


@cache
def slow_cache(index: int, length: int, start: int) -> Cached:
    """Return what another model's cache holds of a text, by :func:`slow`."""
    held = text_of(77, length) or [0]
    return slow(other_modules()[index], held, {})[1]._replace(length=length, start=start)


@cache
def slow_logits(
    norms: str,
    text: tuple[int, ...],
    reads: tuple[tuple[int, KVSource], ...],
    held: tuple[tuple[int, int], ...],
) -> Array:
    """Return the logits of :func:`slow`, which are computed once for all instruction sets.

    ``held`` has the length and the start of what each other cache holds.
    """
    others = [slow_cache(index, *each) for index, each in enumerate(held)]
    return slow(reader_module(norms), text, dict(reads), others)[0]


class Model:
    """A model with layers that read earlier layers, or the caches of two other models."""

    def __init__(
        self, by: Kernels, norms: str = "", reads: Mapping[int, KVSource] = OWN | OTHERS
    ) -> None:
        self.norms = norms
        self.module = reader_module(norms)
        self.others = other_modules()
        self.kernels = by
        self.cache = new_cache(self.module.config, by)
        self.other_caches = [new_cache(other.config, by) for other in self.others]
        decoder = sharing_decoder(self.module, by, reads)
        self.runner = ModelRunner(decoder, self.cache, self.other_caches)
        self.other_runners = [
            ModelRunner(decoder_of(other, by), cache)
            for other, cache in zip(self.others, self.other_caches, strict=True)
        ]


class Text:
    """A request of a :class:`Model`: its tokens, and the tokens that the other caches hold."""

    def __init__(
        self, model: Model, tokens: Sequence[int], lengths: tuple[int, int], released: int = 0
    ) -> None:
        self.model = model
        self.tokens = list(tokens)
        self.table = BlockTable()
        self.others = []
        tables = []
        for index, (runner, length) in enumerate(zip(model.other_runners, lengths, strict=True)):
            table = BlockTable()
            held = text_of(77, length)
            if held:
                runner.cache.prepare(table, length)
                runner.forward(
                    ForwardBatch([BatchEntry(table, TokenTree.chain(held), range(0), length)])
                )
                runner.cache.commit_slots(table, range(length))
            runner.cache.release_before(table, released)
            start = table.num_released * runner.cache.block_size
            self.others.append(slow_cache(index, length, start))
            tables.append(table)
        self.tables = tuple(tables)

    def entry(self, tree: TokenTree, computed: int = 0) -> BatchEntry:
        """Return the entry for the nodes of a tree from number ``computed`` on."""
        self.model.cache.prepare(self.table, self.table.length + len(tree))
        return BatchEntry(
            self.table,
            tree,
            range(computed, len(tree)),
            1,
            num_computed=computed,
            other_tables=self.tables,
        )

    def want(self, tree: TokenTree, reads: Mapping[int, KVSource] = OWN | OTHERS) -> Array:
        """Return the logits ``[nodes, vocab]`` of a tree below the committed tokens."""
        before = self.tokens[: self.table.length]
        paths = [[tree.tokens[i] for i in (0, *tree.path(node))] for node in range(len(tree))]
        return np.stack([self.slow_logits(before + path, reads)[-1] for path in paths])

    def slow_logits(
        self, tokens: Sequence[int], reads: Mapping[int, KVSource] = OWN | OTHERS
    ) -> Array:
        """Return the logits ``[len(tokens), vocab]`` of a text, by :func:`slow`."""
        held = tuple((each.length, each.start) for each in self.others)
        return slow_logits(self.model.norms, tuple(tokens), tuple(reads.items()), held)

    def read(self, *chunks: int) -> Array:
        """Run the tokens in chunks; return their logits ``[tokens, vocab]``."""
        rows = []
        for count in chunks:
            tree = TokenTree.chain(self.tokens[self.table.length :][:count])
            rows.append(self.model.runner.forward(ForwardBatch([self.entry(tree)])).logits[0][:])
            self.model.cache.commit_slots(self.table, range(len(tree)))
        return np.concatenate(rows)


def assert_near(found: Array, want: Array) -> None:
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=2e-4 * float(np.abs(want).max()))


TREE = TokenTree((5, 9, 30, 2, 2, 71, 8), (-1, 0, 1, 0, 1, 3, 5))


@pytest.mark.parametrize("norms", ["", "heads", "whole"])
@EVERY
def test_prompts_in_chunks(by: Kernels, norms: str) -> None:
    model = Model(by, norms)
    for chunks in ((23,), (1,) * 23, (4, 16, 3)):
        text = Text(model, text_of(0, 23), (19, 7))
        found = text.read(*chunks)
        assert_near(found, text.slow_logits(text.tokens))


@pytest.mark.few(2)
@EVERY
def test_trees_of_several_requests(by: Kernels) -> None:
    """The other caches hold nothing, fewer or more tokens than the request, and have released the
    first ones.
    """
    model = Model(by)
    texts = [
        Text(model, text_of(1, 20), (20, 20)),
        Text(model, text_of(2, 3), (40, 2)),
        Text(model, text_of(3, 35), (34, 0), released=30),
    ]
    for text in texts:
        text.read(len(text.tokens))
    trees = [TREE, TokenTree.chain([4, 100]), TREE.keep(range(5))]
    entries = [text.entry(tree) for text, tree in zip(texts, trees, strict=True)]
    for text, tree, found in zip(
        texts, trees, model.runner.forward(ForwardBatch(entries)).logits, strict=True
    ):
        assert_near(found[:], text.want(tree))


@EVERY
def test_trees_in_several_passes_and_accepted_paths(by: Kernels) -> None:
    model = Model(by)
    text = Text(model, text_of(4, 18), (17, 30))
    text.read(18)
    parts = [(TREE.keep(range(2)), 0), (TREE.keep(range(4)), 2), (TREE, 4)]
    found = np.concatenate(
        [model.runner.forward(ForwardBatch([text.entry(*part)])).logits[0][:] for part in parts]
    )
    assert_near(found, text.want(TREE))
    path = [0, *TREE.path(6)]
    model.cache.commit_slots(text.table, path)
    text.tokens += [TREE.tokens[node] for node in path]
    after = model.runner.forward(ForwardBatch([text.entry(TREE)])).logits[0][:]
    assert_near(after, text.want(TREE))


@EVERY
def test_each_source_matters(by: Kernels) -> None:
    """Logits differ from those with another layer's keys, rotations and window, far above the
    tolerance.
    """
    model = Model(by)
    text = Text(model, text_of(5, 12), (12, 12))
    found = text.read(12)
    for wrong in (OWN | {2: KVSource(1)}, OWN | {3: KVSource(0)}, {2: KVSource(0)}):
        other = slow(model.module, text.tokens, wrong | OTHERS, text.others)[0]
        assert np.abs(other - found)[2:].max(-1).min() > 0.01 * np.abs(found).max()
    for index in range(2):
        less = [
            each._replace(length=6) if i == index else each for i, each in enumerate(text.others)
        ]
        other = slow(model.module, text.tokens, OWN | OTHERS, less)[0]
        assert np.abs(other - found)[8:].max(-1).min() > 0.01 * np.abs(found).max()


@EVERY
def test_a_model_without_keys_of_its_own_needs_no_blocks(by: Kernels) -> None:
    reads = {
        index: KVSource(index % 2, cache=1) if index < 4 else KVSource(0, cache=2)
        for index in range(6)
    }
    model = Model(by, reads=reads)
    text = Text(model, text_of(6, 30), (30, 9))
    text.table.length = 30
    entry = BatchEntry(text.table, TREE, range(len(TREE)), 1, other_tables=text.tables)
    assert not text.table.blocks
    assert_near(model.runner.forward(ForwardBatch([entry])).logits[0][:], text.want(TREE, reads))


def test_rows_without_the_tables_of_a_cache_are_refused() -> None:
    kernels = candidates()[0]
    model = Model(kernels)
    text = Text(model, [1, 2], (2, 2))
    entry = text.entry(TokenTree.chain([1, 2]))
    program = Program(model.kernels, 64, FLOAT32, model.cache, model.other_caches)
    program.attend(model.module.config, KVSource(0, cache=2))
    for tables, fits in ((text.tables, True), (text.tables[:1], False)):
        batch = ForwardBatch([entry._replace(other_tables=tables)])
        if fits:
            program.run(batch, np.zeros((2, 64), np.float32))
        else:
            with pytest.raises(AssertionError, match="kernels: pass of 2 rows failed"):
                program.run(batch, np.zeros((2, 64), np.float32))
