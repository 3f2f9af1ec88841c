"""Recurrent layers: formulas against plain loops, and equal bits however a text is computed."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from random import Random

import numpy as np
import pytest

from covering import covering
from pronk.base.arrays import BFLOAT16, FLOAT32, Array, DType
from pronk.cache.blocks import BlockTable
from pronk.cache.paged import PagedCache
from pronk.cache.states import StateCounts
from pronk.checkpoint.config import ModelConfig, RecurrentConfig, llama_config
from pronk.kernels.library import Kernels, candidates
from pronk.models.decoder import Decoder, Layer
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.layer_executor import LayerExecutor
from pronk.models.linear import Linear, Norm, StackedLinear
from pronk.sampling.tree import TokenTree

EVERY = pytest.mark.parametrize("by", candidates(), ids=lambda by: by.name)
HIDDEN = 48
VOCAB = 32

GROUPED = RecurrentConfig((True, True), 2, 4, 8, 24, taps=4)
MAMBA = replace(GROUPED, rule="mamba2", norm="after_gate", filter_bias=True)
SHAPES = {
    "grouped": GROUPED,
    "tiled": replace(GROUPED, tiled_heads=True),
    "equal": RecurrentConfig((True, True), 3, 3, 16, 16, taps=2),
    "wide": RecurrentConfig((True, True), 1, 2, 32, 128, taps=4),
    # a row of 88 + 8 numbers fills its memory: nothing may be written behind it
    "odd": RecurrentConfig((True, True), 1, 1, 40, 8, taps=3),
    "odd_keys": RecurrentConfig((True, True), 1, 2, 7, 5, taps=3),
    "one_tap": RecurrentConfig((True, True), 2, 2, 16, 40, taps=1),
    "mamba": MAMBA,
    "mamba, no norm": replace(MAMBA, norm="none", filter_bias=False),
    "mamba, odd": replace(MAMBA, key_dim=7, value_dim=5, taps=3),
    "mamba, wide": replace(MAMBA, key_heads=1, value_heads=3, key_dim=32, value_dim=64),
    "parallel": replace(MAMBA, parallel=True),
}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES)


def _linear(by: Kernels, weights: dict[str, Array], layer: Layer, name: str, place: str) -> Linear:
    return Linear(by, weights[name], None, layer.layout(place), None)


class Model:
    """Embedding, two recurrent layers with MLPs, and a head; with random weights."""

    def __init__(self, by: Kernels, recurrent: RecurrentConfig, dtype: DType = FLOAT32) -> None:
        config = llama_config(
            hidden=HIDDEN, layers=2, heads=4, kv_heads=2, mlp=32, vocab=VOCAB, context=512
        )
        self.config: ModelConfig = replace(config, recurrent=recurrent)
        self.dtype = dtype
        random = np.random.default_rng(5)
        decoder = Decoder(self.config, by)
        decoder.embedding = self._round(random.normal(size=(VOCAB, HIDDEN)))
        self.weights: list[dict[str, Array]] = []
        for layer in decoder.layers:
            heads = recurrent.value_heads
            weights = {
                "channels": random.normal(size=(recurrent.num_channels, HIDDEN)) * 0.3,
                "gates": random.normal(size=(recurrent.num_outputs, HIDDEN)) * 0.3,
                "scalars": random.normal(size=(recurrent.num_scalars, HIDDEN)) * 0.3,
                "filter": random.normal(size=(recurrent.num_channels, 1, recurrent.taps)),
                "filter_bias": random.normal(size=recurrent.num_channels) * 0.5,
                "rate": -np.exp(random.uniform(-0.5, 2.0, heads)),
                "bias": random.normal(size=heads) * 0.5,
                "skip": random.normal(size=heads),
                "norm": 1 + 0.2 * random.normal(size=norm_size(recurrent)),
                "qkv": random.normal(size=(sum(config.qkv_sizes), HIDDEN)) * 0.2,
                "attention_out": random.normal(size=(HIDDEN, HIDDEN)) * 0.2,
                "out": random.normal(size=(HIDDEN, recurrent.num_outputs)) * 0.3,
                "up": random.normal(size=(64, HIDDEN)) * 0.1,
                "down": random.normal(size=(HIDDEN, 32)) * 0.1,
            }
            weights = {name: self._round(weight) for name, weight in weights.items()}
            self.weights.append(weights)

            linear = partial(_linear, by, weights, layer)
            layer.mixer_in = StackedLinear(
                [linear("channels", "mixer_in"), linear("gates", "mixer_in")]
            )
            layer.mixer_gates = linear("scalars", "mixer_gates")
            layer.filter = weights["filter"]
            layer.decay_rate = weights["rate"].astype(np.float32)
            layer.decay_bias = weights["bias"].astype(np.float32)
            if recurrent.filter_bias:
                layer.filter_bias = weights["filter_bias"]
            if recurrent.rule == "mamba2":
                layer.skip = weights["skip"]
            if recurrent.norm != "none":
                layer.mixer_norm = Norm.of(self.config, weights["norm"])
            layer.mixer_out = linear("out", "mixer_out")
            if recurrent.parallel:
                layer.qkv = linear("qkv", "qkv")
                layer.out = linear("attention_out", "out")
            layer.up = linear("up", "up")
            layer.down = linear("down", "down")
            layer.attention_norm = layer.mlp_norm = Norm.of(self.config, np.ones(HIDDEN))
        self.head = self._round(random.normal(size=(VOCAB, HIDDEN)) * 0.3)
        decoder.head = Linear(by, self.head, None, decoder.layers[0].layout("down"), None)
        decoder.norm = Norm.of(self.config, np.ones(HIDDEN))
        self.decoder = decoder

    def _round(self, values: Array) -> Array:
        return values.astype(self.dtype)

    def cache(self, requests: int = 3, checkpoints: int = 2, updates: int = 96) -> PagedCache:
        cache = PagedCache(
            self.config,
            num_blocks=64,
            block_size=16,
            dtype=self.dtype,
            kernels=self.decoder.kernels,
            poison=float("nan"),
            share_prefixes=True,
        )
        cache.resize_states(StateCounts(requests, checkpoints, updates))
        return cache


class Text:
    """A request of a model, whose passes are scripted."""

    def __init__(self, executor: LayerExecutor) -> None:
        self.executor = executor
        self.cache = executor.cache
        self.table = BlockTable()

    def run(
        self, tree: TokenTree, num_final: int, num_computed: int = 0, num_layers: int = 2
    ) -> Array:
        self.cache.prepare(self.table, self.table.length + len(tree))
        entry = BatchEntry(
            self.table,
            tree,
            range(num_computed, len(tree)),
            num_final=self.table.length + num_final,
            num_computed=num_computed,
        )
        batch = ForwardBatch([entry])
        if num_layers < 2:
            return self.executor.run(batch, num_layers, [num_layers]).hidden[num_layers]
        logits = self.executor.run(batch, num_layers).logits
        assert logits is not None
        return logits

    def commit(self, nodes: Sequence[int]) -> None:
        self.cache.commit_slots(self.table, nodes)

    def read(self, tokens: Sequence[int], chunk: int = 512) -> Array:
        """Read tokens of the text in chunks; return their logits."""
        rows = list[Array]()
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            rows.append(self.run(TokenTree.chain(part), len(part)))
            self.commit(range(len(part)))
        return np.concatenate(rows)

    def state(self) -> bytes:
        """Return the bytes of the states and of the inputs of the convolutions."""
        states = self.cache.states
        table = self.table.states
        assert states is not None
        assert table is not None
        assert table.length == self.table.length, "expected a state of all committed tokens"
        arrays = [*states.states.values(), *states.inputs.values()]
        return b"".join(array[table.slot].tobytes() for array in arrays)


def random_tokens(count: int, seed: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCAB) for _ in range(count)]


def norm_size(config: RecurrentConfig) -> int:
    """Return the number of weights of the norm of a recurrence's outputs."""
    return config.value_dim if config.norm == "before_gate" else config.num_outputs


def rms(x: Array, weight: Array | float = 1.0) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * weight


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def gated_delta(
    config: RecurrentConfig, w: dict[str, Array], q: Array, k: Array, v: Array, scalars: Array
) -> Array:
    """Return the outputs of Gated DeltaNet, ``[tokens, value_heads, value_dim]``."""
    q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) / np.sqrt(config.key_dim)
    k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
    beta, decay = np.split(scalars, 2, axis=1)
    beta = 1 / (1 + np.exp(-beta))
    decay = np.exp(w["rate"] * np.log1p(np.exp(decay + w["bias"])))
    group = config.value_heads // config.key_heads
    outputs = np.zeros_like(v)
    for head in range(config.value_heads):
        key_head = head % config.key_heads if config.tiled_heads else head // group
        state = np.zeros((config.key_dim, config.value_dim))
        for t in range(len(v)):
            state = decay[t, head] * state
            delta = beta[t, head] * (v[t, head] - state.T @ k[t, key_head])
            state = state + np.outer(k[t, key_head], delta)
            outputs[t, head] = state.T @ q[t, key_head]
    return outputs


def mamba2(
    config: RecurrentConfig, w: dict[str, Array], c: Array, b: Array, x: Array, scalars: Array
) -> Array:
    """Return the outputs of Mamba 2, ``[tokens, heads, head_dim]``, in the names of its paper.

    The state of a head is ``[head_dim, state_dim]``, transposed to that of the kernels.
    """
    per_group = config.value_heads // config.key_heads
    outputs = np.zeros_like(x)
    for head in range(config.value_heads):
        group = head // per_group
        state = np.zeros((config.value_dim, config.key_dim))
        for t in range(len(x)):
            dt = np.log1p(np.exp(scalars[t, head] + w["bias"][head]))
            decay = np.exp(dt * w["rate"][head])
            state = decay * state + np.outer(dt * x[t, head], b[t, group])
            outputs[t, head] = state @ c[t, group] + w["skip"][head] * x[t, head]
    return outputs


def attention(config: ModelConfig, w: dict[str, Array], h: Array) -> Array:
    """Return the output of causal attention with rotary embeddings, ``[tokens, hidden]``."""
    size = config.head_dim
    heads = (h @ w["qkv"].T).reshape(len(h), -1, size)
    half = size // 2
    angles = np.arange(len(h))[:, None] * 10000.0 ** (-np.arange(half) / half)
    first = heads[..., :half]
    second = heads[..., half:]
    cos = np.cos(angles)[:, None]
    sin = np.sin(angles)[:, None]
    turned = np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    stop = config.num_heads + config.num_kv_heads
    keys = turned[:, config.num_heads : stop].repeat(config.group, axis=1)
    values = heads[:, stop:].repeat(config.group, axis=1)
    scores = np.einsum("qhd,khd->hqk", turned[:, : config.num_heads], keys) / np.sqrt(size)
    scores[:, ~np.tri(len(h), dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    outputs = np.einsum("hqk,khd->qhd", weights, values).reshape(len(h), -1)
    return outputs @ w["attention_out"].T


def loop(model: Model, tokens: Sequence[int]) -> Array:
    """Return the logits of a text by the formulas, token by token in float64."""
    config = model.config.recurrent
    assert config is not None
    x = model.decoder.embedding[list(tokens)].astype(np.float64)
    for stored in model.weights:
        w = {name: weight.astype(np.float64) for name, weight in stored.items()}
        h = rms(x)
        inputs = h @ w["channels"].T
        padded = np.concatenate((np.zeros((config.taps - 1, config.num_channels)), inputs))
        mixed = sum(
            padded[tap : tap + len(inputs)] * w["filter"][:, 0, tap] for tap in range(config.taps)
        )
        mixed = silu(mixed + w["filter_bias"] if config.filter_bias else mixed)
        keys = config.key_heads * config.key_dim
        q = mixed[:, :keys].reshape(len(x), config.key_heads, config.key_dim)
        k = mixed[:, keys : 2 * keys].reshape(q.shape)
        v = mixed[:, 2 * keys :].reshape(len(x), config.value_heads, config.value_dim)
        recur = mamba2 if config.rule == "mamba2" else gated_delta
        outputs = recur(config, w, q, k, v, h @ w["scalars"].T)
        z = (h @ w["gates"].T).reshape(v.shape)
        normed = rms(outputs, w["norm"]) if config.norm == "before_gate" else outputs
        y = normed * silu(z)
        if config.norm == "after_gate":
            groups = y.reshape(len(x), config.key_heads, -1)
            y = rms(groups).reshape(len(x), -1) * w["norm"]
        attended = attention(model.config, w, h) if config.parallel else 0.0
        x = x + y.reshape(len(x), -1) @ w["out"].T + attended
        gate, up = np.split(rms(x) @ w["up"].T, 2, axis=1)
        x = x + (silu(gate) * up) @ w["down"].T
    return rms(x) @ model.head.astype(np.float64).T


@EVERY
@EVERY_SHAPE
def test_formulas(by: Kernels, shape: str) -> None:
    model = Model(by, SHAPES[shape])
    tokens = random_tokens(70, 1)
    logits = Text(LayerExecutor(model.decoder, model.cache())).read(tokens)
    np.testing.assert_allclose(logits, loop(model, tokens), rtol=0, atol=1e-3)


@EVERY
def test_bfloat16(by: Kernels) -> None:
    model = Model(by, GROUPED, BFLOAT16)
    tokens = random_tokens(40, 2)
    logits = Text(LayerExecutor(model.decoder, model.cache())).read(tokens)
    expected = loop(model, tokens)
    # A norm of outputs that nearly cancel enlarges the rounding of single rows.
    assert np.median(np.abs(logits - expected)) < 0.02 * np.abs(expected).max()


@pytest.mark.few(16)
@EVERY
@EVERY_SHAPE
def test_chunks(by: Kernels, shape: str, *, is_sanitized: bool) -> None:
    """Logits and states have the same bits for chunks of every size."""
    model = Model(by, SHAPES[shape])
    tokens = random_tokens(37, 3)
    executor = LayerExecutor(model.decoder, model.cache())
    whole = Text(executor)
    expected = whole.read(tokens)
    for chunk in (1, 5, 17) if is_sanitized else (1, 2, 3, 5, 16, 17, 36):
        other = Text(executor)
        assert np.array_equal(other.read(tokens, chunk), expected)
        assert other.state() == whole.state()
        other.cache.release(other.table)


def random_tree(random: Random, root: int, num_nodes: int) -> TokenTree:
    """Return a tree in which children follow their parents; siblings differ."""
    tokens = [root]
    parents = [-1]
    taken = set[tuple[int, int]]()
    while len(tokens) < num_nodes:
        parent = random.randrange(max(0, len(tokens) - 4), len(tokens))
        token = random.randrange(VOCAB)
        if (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return TokenTree(tuple(tokens), tuple(parents))


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("by", "shape"),
    covering(candidates(), [*SHAPES], strength=1),
    ids=lambda value: value.name if isinstance(value, Kernels) else value,
)
def test_random_scripts(by: Kernels, shape: str) -> None:
    """Random trees, of which random paths are accepted, leave the state of a fresh reading."""
    model = Model(by, SHAPES[shape])
    executor = LayerExecutor(model.decoder, model.cache())
    random = Random(shape)
    for _ in range(6):
        text = Text(executor)
        tokens = random_tokens(random.randrange(2, 20), random.randrange(1000))
        text.read(tokens[:-1], chunk=7)
        pending = tokens[-1]
        for _ in range(12):
            tree = random_tree(random, pending, random.randrange(1, 12))
            if random.random() < 0.3:  # a drafter runs the first layer before
                text.run(tree, 0, num_layers=1)
            logits = text.run(tree, 1)
            node = random.randrange(len(tree))
            path = [node]
            while tree.parents[path[-1]] >= 0:
                path.append(tree.parents[path[-1]])
            path.reverse()
            plain = Text(executor)
            expected = plain.read([*tokens[:-1], *[tree.tokens[each] for each in path]])
            assert np.array_equal(logits[path], expected[len(tokens) - 1 :])
            plain.cache.release(plain.table)
            text.commit(path)
            pending = random.randrange(VOCAB)
            tokens = [*tokens[:-1], *[tree.tokens[each] for each in path], pending]
        text.run(TokenTree.chain([pending]), 1)
        text.commit(range(1))
        plain = Text(executor)
        plain.read(tokens)
        assert text.state() == plain.state()
        for each in (plain, text):
            each.cache.release(each.table)
    states = executor.cache.states
    assert states is not None
    assert states.num_free_updates == states.num_updates


@pytest.mark.parametrize("pool", ["states", "updates"])
def test_other_layouts_are_refused(pool: str) -> None:
    """The kernels compare the sizes of the arrays with those that they compute themselves."""
    model = Model(candidates()[0], MAMBA)
    cache = model.cache()
    states = cache.states
    assert states is not None
    arrays = getattr(states, pool)
    arrays[1] = np.zeros((len(arrays[1]), 16, *arrays[1].shape[1:]), np.float32)
    with pytest.raises(AssertionError, match="unsupported shape"):
        Text(LayerExecutor(model.decoder, cache)).read([1, 2, 3])


def test_room_for_keys() -> None:
    """Only recurrent layers that have attention, too, have room for keys and values."""
    for parallel in (False, True):
        cache = Model(candidates()[0], replace(MAMBA, parallel=parallel)).cache()
        assert [keys.size > 0 for keys in cache.keys] == [parallel] * 2
        assert [values.size > 0 for values in cache.values] == [parallel] * 2
