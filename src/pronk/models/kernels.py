"""Selection of CPU kernels: the fastest instruction set of this machine that passes a self-check.

The self-check runs before a model is loaded and takes 0.2 to 0.4 s. If it passes, an empty file in
``~/.cache/pronk/self-check`` records this for the library, instruction set and processor, and later
processes skip it. It computes matrix products and small decoder layers, with attention, latent
attention, a short convolution, a recurrence and a mixture of experts, each in batches of several
sizes. For all batches, the bits of the results must be the same, and must differ from NumPy's in
float64 by a small tolerance only. Argmax and sampling are compared with NumPy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from pronk.base.arrays import BFLOAT16, FLOAT32, INT4, INT8, Array, DType
from pronk.cache.blocks import BlockTable
from pronk.cache.paged import PagedCache
from pronk.checkpoint.config import (
    ConvolutionConfig,
    LatentConfig,
    MixtureConfig,
    ModelConfig,
    RecurrentConfig,
    llama_config,
)
from pronk.checkpoint.formats.matrix import Bits
from pronk.checkpoint.gguf.blocks import PACKED_BLOCKS, TENSOR_TYPES, BlockMatrix, BlockRows
from pronk.checkpoint.rope import RopeConfig, RopeTable
from pronk.kernels.library import (
    Kernels,
    KernelsError,
    RoundingBits,
    arithmetic_digest,
    candidates,
)
from pronk.kernels.rounding import round_weights
from pronk.models.decoder import Decoder, Layer
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.linear import AnyWeight, Experts, Linear, Norm, WeightLayout
from pronk.models.program import Program
from pronk.sampling.noise import gumbel_noise, noise_key
from pronk.sampling.tree import TokenTree

_BATCH_SIZES = (1, 4, 20, 64, 512)  # numbers of rows in the checked matrix products
# (inputs, outputs) of the checked matrix products
_MATRIX_SIZES = ((96, 80), (320, 48), (1100, 48))
_BLOCK_INPUTS = 512  # inputs of the checked products with GGUF blocks
# Offsets in bytes of the float16 scales of a GGUF block; 0 and 2 for other types. In IQ1_M, the two
# bytes have the exponent of the scale.
_SCALE_OFFSETS = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "IQ1_M": (54,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
# Allowed error of the checked decoder layer, relative to its largest output. The key is the dtype
# of the weights, or that of a quantized KV cache.
_TOLERANCES = {FLOAT32: 1e-5, BFLOAT16: 2e-2, INT8: 5e-2, INT4: 0.2}
# Number of experts of the checked mixture, and number of tokens of which the checked short
# convolution takes the weighted sum.
_EXPERTS = 5
_TAPS = 3
_VALUE_DIM = 24  # size of a value head of the checked recurrence
# Latents of more than one vector, and keys that are not whole vectors.
_LATENT = LatentConfig(rank=32, rope_dim=6, plain_dim=10, value_dim=16)

_LayerKind = Literal["attention", "convolution", "experts", "gated_delta", "latent", "mamba2"]


@cache
def load_kernels(
    choice: str = "auto", path: Path | None = None, bits: RoundingBits = "fast"
) -> Kernels:
    """Return the best kernels that ``choice`` allows and that pass the self-check.

    ``choice`` is ``"auto"`` or an instruction set; one that the processor lacks raises an
    OptionError. If no kernels pass, a KernelsError gives the reason in one line. ``path`` is the
    library's file, by default the installed one. ``bits`` are those of products with bfloat16
    weights.
    """
    failure = ""
    for kernels in candidates(choice, path, bits):
        with suppress(OSError, RuntimeError):  # RuntimeError: there is no home folder
            if _passed_marker(kernels).exists():
                return kernels
        error = self_check(kernels)
        if error is None:
            # if the marker cannot be written, the next process checks again
            with suppress(OSError, RuntimeError):
                marker = _passed_marker(kernels)
                marker.parent.mkdir(parents=True, exist_ok=True)
                marker.touch()
            return kernels
        failure = f"{kernels.path}: the {kernels.name} kernels fail their self-check: {error}"
    raise KernelsError(failure)


def _passed_marker(kernels: Kernels) -> Path:
    """Return the path of a marker file, which exists if the kernels have passed their self-check.

    The path depends on the library, the instruction set, the bits and the processor.
    """
    return Path.home() / ".cache" / "pronk" / "self-check" / arithmetic_digest(kernels)[:32]


def self_check(kernels: Kernels) -> str | None:
    """Return a description of the first failure of the self-check; ``None`` if there is none."""
    return next(_failures(kernels), None)


def _failures(kernels: Kernels) -> Iterator[str]:
    for dtype in (FLOAT32, BFLOAT16):
        layers = [_check_layer(kernels, dtype, kind=kind) for kind in get_args(_LayerKind)]
        # The kinds of attention read a quantized cache by functions of its own.
        for kv_dtype in (INT8, INT4):
            layers += [
                _check_layer(kernels, dtype, kv_dtype, kind) for kind in ("attention", "latent")
            ]
        failures = chain(_check_products(kernels, dtype), *layers)
        yield from (f"{failure} in {dtype}" for failure in failures)
    yield from chain(
        _check_quantized_products(kernels), _check_blocks(kernels), _check_sampling(kernels)
    )


def _check_products(kernels: Kernels, dtype: DType) -> Iterator[str]:
    random = np.random.default_rng(0)
    for inputs, outputs in _MATRIX_SIZES:
        weight, x = (
            random.normal(size=(rows, inputs)).astype(dtype)
            for rows in (outputs, max(_BATCH_SIZES))
        )
        # Tolerance: 1e-4 times the standard deviation of an output, a sum of `inputs` products of
        # random numbers.
        yield from _check_product(_linear(kernels, weight), x, weight, 1e-4 * inputs**0.5)


def _linear(kernels: Kernels, weight: AnyWeight) -> Linear:
    return Linear(kernels, weight, None, WeightLayout(), None)


def _check_product(linear: Linear, x: Array, weight: Array, tolerance: float) -> Iterator[str]:
    """Check that ``x Wᵀ`` has equal bits in smaller batches, and is near NumPy's values."""
    product = linear.logits(x)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    for rows in _BATCH_SIZES:
        if not np.array_equal(linear.logits(x[:rows]), product[:rows]):
            yield f"a product of {rows} rows is not that of {len(x)} rows"
    error = float(np.abs(product - expected).max())
    if not error <= tolerance:
        yield f"a product of {linear.in_features} by {linear.out_features} is off by {error:.1g}"


def _check_quantized_products(kernels: Kernels) -> Iterator[str]:
    random = np.random.default_rng(0)
    weight, x = (
        random.normal(size=(rows, 320)).astype(np.float32) for rows in (48, max(_BATCH_SIZES))
    )
    for bits in get_args(Bits):
        quantized = round_weights(kernels, weight, bits)
        dequantized = quantized.dequantize().astype(np.float64)
        # The kernels round x to 8 bits: each number by at most 1/254 of the largest magnitude in
        # its group.
        tolerance = 0.02 * float((x @ dequantized.T).max())
        failures = _check_product(_linear(kernels, quantized), x, dequantized, tolerance)
        yield from (f"{failure} in {bits} bits" for failure in failures)


def _check_blocks(kernels: Kernels) -> Iterator[str]:
    """Check matrix products with weights in GGUF blocks.

    The bits must be those of the portable kernels, and the values near those of NumPy.
    """
    random = np.random.default_rng(0)
    x = random.normal(size=(64, _BLOCK_INPUTS)).astype(np.float32)
    for type_ in TENSOR_TYPES.values():
        if type_.name not in PACKED_BLOCKS:
            continue
        stored = random.integers(
            256, size=(48, _BLOCK_INPUTS // type_.values, type_.size), dtype=np.uint8
        )
        for offset in _SCALE_OFFSETS.get(type_.name, (0, 2)):
            # clear a bit of the exponent, so that float16 scales are finite
            stored[..., offset + 1] &= 0xBF
        matrix = BlockMatrix(type_.name, _BLOCK_INPUTS, (BlockRows(stored.reshape(48, -1)),))
        portable = _linear(dataclasses.replace(kernels, isa=0), matrix).logits(x)
        linear = _linear(kernels, matrix)
        expected = x.astype(np.float64) @ linear.packed.unpack().astype(np.float64).T
        # The kernels round x to 8 bits, see _check_quantized_products.
        if not np.abs(portable - expected).max() <= 0.02 * np.abs(expected).max():
            yield f"a product with {type_.name} weights is wrong"
        for rows in (1, 4, 20, 64):
            if not np.array_equal(
                linear.logits(x[:rows]).view(np.int32), portable[:rows].view(np.int32)
            ):
                yield f"{rows} rows with {type_.name} weights differ from the portable kernels"


def _check_sampling(kernels: Kernels) -> Iterator[str]:
    random = np.random.default_rng(0)
    temperature = 0.7
    position = 5
    for seed, vocab in enumerate((33, 700)):
        logits = random.normal(size=vocab).astype(np.float32)
        scores = (logits / np.float32(temperature)).astype(np.float64) + gumbel_noise(
            seed, position, np.arange(vocab)
        )
        if kernels.choose(logits, 0.0, 0) != int(logits.argmax()):
            yield f"the argmax of {vocab} logits is not that of NumPy"
        if kernels.choose(logits, temperature, noise_key(seed, position)) != int(scores.argmax()):
            yield f"a sample from {vocab} tokens is not that of NumPy"


def _check_layer(
    kernels: Kernels, dtype: DType, kv_dtype: DType | None = None, kind: _LayerKind = "attention"
) -> Iterator[str]:
    """Check that a decoder layer computes the same bits for a text in three ways.

    In one forward pass, token by token, and as a path of a draft tree. The values are compared with
    NumPy's.
    """
    config, sizes = _layer_sizes(kind, dtype)
    random = np.random.default_rng(0)
    # the other weights are scaled so that outputs are about as large as inputs
    scales = {"filter": 1.0, "router": 1.0}
    weights = {
        name: scales.get(name, 0.125) * random.normal(size=size) for name, size in sizes.items()
    }
    embedding = random.normal(size=(32, 64))
    runner = _LayerRunner(
        kernels, config, {name: weight.astype(dtype) for name, weight in weights.items()}, kv_dtype
    )
    runner.decoder.embedding = embedding.astype(dtype)
    tokens = random.integers(32, size=70).tolist()
    one_pass = runner.run(TokenTree.chain(tokens))
    runner.cache.release(runner.block_table)
    token_by_token = np.concatenate([runner.run(TokenTree.chain([token])) for token in tokens])
    if not np.array_equal(one_pass, token_by_token):
        yield "a text in one forward pass is not that text token by token"
    runner.cache.release(runner.block_table)
    start = 61
    runner.run(TokenTree.chain(tokens[:start]))
    # Draft tree of the remaining tokens: nodes 0, 2, 4, … are the text; each odd node is a wrong
    # sibling of the next.
    ids = [tokens[start]]
    parents = [-1]
    for token in tokens[start + 1 :]:
        parent = len(ids) - 1
        ids += [(token + 1) % 32, token]
        parents += [parent, parent]
    in_tree = runner.run(TokenTree(tuple(ids), tuple(parents)))[::2]
    if not np.array_equal(in_tree, one_pass[start:]):
        yield "a path of a draft tree is not that text in one forward pass"
    expected = _reference(config, weights, embedding[tokens])
    error = float(np.abs(one_pass - expected).max() / np.abs(expected).max())
    if not error < _TOLERANCES[kv_dtype or dtype]:
        yield f"a layer with {kind} is off by {error:.1g}"


def _layer_sizes(kind: _LayerKind, dtype: DType) -> tuple[ModelConfig, dict[str, tuple[int, ...]]]:
    """Return the config of a small layer for the self-check, and the shapes of its weights."""
    config = llama_config(hidden=64, layers=1, heads=4, kv_heads=2, mlp=96, vocab=32, context=128)
    sizes: dict[str, tuple[int, ...]] = {"out": (64, 64), "up": (2 * 96, 64), "down": (64, 96)}
    if kind == "convolution":
        sizes |= {"gates": (3 * 64, 64), "filter": (64, _TAPS)}
        config = dataclasses.replace(config, convolution=ConvolutionConfig(_TAPS, (True,)))
    elif kind in ("gated_delta", "mamba2"):
        recurrent = RecurrentConfig((True,), 2, 4, 8, _VALUE_DIM, _TAPS)
        if kind == "mamba2":
            recurrent = dataclasses.replace(recurrent, rule="mamba2", norm="after_gate")
            sizes["skip"] = (recurrent.value_heads,)
        sizes |= {
            "mixer_in": (recurrent.num_channels + recurrent.num_outputs, 64),
            "mixer_gates": (recurrent.num_scalars, 64),
            "filter": (recurrent.num_channels, _TAPS),
            "decay": (2, recurrent.value_heads),
            "mixer_out": (64, recurrent.num_outputs),
        }
        config = dataclasses.replace(config, recurrent=recurrent)
    elif kind == "latent":
        heads = config.num_heads
        sizes |= {
            "q_b": (heads * _LATENT.query_dim, 64),
            "kv_a": (_LATENT.rank + _LATENT.rope_dim, 64),
            "k_b": (heads * _LATENT.rank, _LATENT.plain_dim),
            "v_b": (heads * _LATENT.value_dim, _LATENT.rank),
            "out": (64, heads * _LATENT.value_dim),
        }
        config = dataclasses.replace(
            config,
            latent=_LATENT,
            head_dim=_LATENT.rank + _LATENT.rope_dim,
            num_kv_heads=1,
            attention_scale=_LATENT.query_dim**-0.5,
            rope=RopeConfig(_LATENT.rope_dim),
        )
    else:
        sizes["qkv"] = (sum(config.qkv_sizes), 64)
    if kind == "experts":
        sizes |= {
            "router": (_EXPERTS, 64),
            "up": (_EXPERTS, 2 * 96, 64),
            "down": (_EXPERTS, 64, 96),
        }
        # In bfloat16, rounding may change which experts have the largest scores, so all are chosen.
        mixture = MixtureConfig(
            _EXPERTS, 2 if dtype == FLOAT32 else _EXPERTS, 96, normalized=True, layers=(True,)
        )
        config = dataclasses.replace(config, mixture=mixture)
    return config, sizes


class _LayerRunner:
    """Runs the small layer of the self-check, after an embedding, by the kernels on one text."""

    def __init__(
        self,
        kernels: Kernels,
        config: ModelConfig,
        weights: dict[str, Array],
        kv_dtype: DType | None,
    ) -> None:
        self.dtype = weights["out"].dtype
        self.decoder = Decoder(config, kernels)
        layer: Layer = self.decoder.layers[0]
        for name, weight in weights.items():
            experts = getattr(layer, name, None)
            if isinstance(experts, Experts):
                for number, matrix in enumerate(weight):
                    experts.set(number, Linear(kernels, matrix, None, experts.layout, None))
            elif name in ("filter", "skip"):
                setattr(layer, name, weight)
            elif name == "decay":
                layer.decay_rate = -np.abs(weight[0].astype(np.float32))
                layer.decay_bias = weight[1].astype(np.float32)
            else:
                setattr(layer, name, Linear(kernels, weight, None, layer.layout(name), None))
        layer.attention_norm = layer.mlp_norm = Norm.of(config, np.ones(config.hidden_size))
        if config.recurrent is not None:
            is_last = config.recurrent.norm == "after_gate"
            size = config.recurrent.num_outputs if is_last else config.recurrent.value_dim
            layer.mixer_norm = Norm.of(config, np.ones(size))
        if config.latent is not None:
            layer.kv_a_norm = Norm(np.ones(config.latent.rank, FLOAT32), None, config.norm_eps)
        self.cache = PagedCache(
            config,
            num_blocks=8,
            block_size=16,
            dtype=self.dtype,
            kernels=kernels,
            kv_dtype=kv_dtype,
        )
        self.block_table = BlockTable()

    def run(self, tree: TokenTree) -> Array:
        """Return the layer's output for every node of a tree after the committed tokens.

        Afterwards the first nodes are committed, as far as each is the child of the one before.
        """
        length = self.block_table.length
        config = self.decoder.config
        self.cache.prepare(self.block_table, length + len(tree))
        stop = length + len(tree)
        num_final = stop if tree.main_chain == len(tree) else 0
        batch = ForwardBatch([BatchEntry(self.block_table, tree, num_final=num_final)])
        program = Program(self.decoder.kernels, config.hidden_size, self.dtype, self.cache)
        program.embed(self.decoder)
        self.decoder.layers[0].compile(program, 0)
        out = np.empty((len(tree), config.hidden_size), self.dtype)
        program.run(batch, out)
        self.cache.commit_slots(self.block_table, range(tree.main_chain))
        return out.astype(np.float32)


def _reference(config: ModelConfig, weights: dict[str, Array], x: Array) -> Array:
    """Return the layer's output for a text by NumPy in float64, ``[tokens, hidden]``."""
    branch = _attention
    out = weights["out"]
    if config.convolution is not None:
        branch = _convolution
    elif config.latent is not None:
        branch = _latent_attention
    elif config.recurrent is not None:
        branch = _recurrence
        out = weights["mixer_out"]
    x = x + branch(config, weights, _norm(config, x)) @ out.T
    rows = _norm(config, x)
    if config.mixture is None:
        return x + _mlp(rows, weights["up"], weights["down"])
    scores = rows @ weights["router"].T
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, : config.mixture.per_row]
    shares = np.zeros_like(scores)
    np.put_along_axis(shares, chosen, np.exp(np.take_along_axis(scores, chosen, axis=1)), axis=1)
    shares /= shares.sum(1, keepdims=True)
    outputs = np.stack(
        [_mlp(rows, up, down) for up, down in zip(weights["up"], weights["down"], strict=True)],
        axis=1,
    )
    return x + (shares[:, :, None] * outputs).sum(1)


def _norm(config: ModelConfig, rows: Array) -> Array:
    return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + config.norm_eps)


def _mlp(rows: Array, up: Array, down: Array) -> Array:
    gate, linear = np.split(rows @ up.T, 2, axis=-1)
    return (_silu(gate) * linear) @ down.T


def _convolution(
    config: ModelConfig,  # noqa: ARG001 - all branches have one signature
    weights: dict[str, Array],
    rows: Array,
) -> Array:
    b, c, x = np.split(rows @ weights["gates"].T, 3, axis=-1)
    states = np.concatenate((np.zeros((_TAPS - 1, len(b[0]))), b * x))
    return c * sum(weights["filter"][:, tap] * states[tap : tap + len(b)] for tap in range(_TAPS))


def _recurrence(config: ModelConfig, weights: dict[str, Array], rows: Array) -> Array:
    recurrent = config.recurrent
    assert recurrent is not None
    inputs, gates = np.split(rows @ weights["mixer_in"].T, [recurrent.num_channels], axis=1)
    padded = np.concatenate((np.zeros((_TAPS - 1, recurrent.num_channels)), inputs))
    mixed = sum(weights["filter"][:, tap] * padded[tap : tap + len(rows)] for tap in range(_TAPS))
    num_keys = recurrent.key_heads * recurrent.key_dim
    queries, keys, values = np.split(_silu(mixed), [num_keys, 2 * num_keys], axis=1)
    is_mamba = recurrent.rule == "mamba2"
    if not is_mamba:
        queries = _unit(queries, recurrent.key_dim) / recurrent.key_dim**0.5
        keys = _unit(keys, recurrent.key_dim)
    shape = (len(rows), recurrent.key_heads, recurrent.key_dim)
    group = recurrent.value_heads // recurrent.key_heads
    q = queries.reshape(shape).repeat(group, axis=1)
    k = keys.reshape(shape).repeat(group, axis=1)
    v = values.reshape(len(rows), recurrent.value_heads, recurrent.value_dim)
    scalars = (rows @ weights["mixer_gates"].T).reshape(len(rows), -1, recurrent.value_heads)
    rate, bias = weights["decay"]
    growth = np.log1p(np.exp(scalars[:, -1] + bias))
    decay = np.exp(-np.abs(rate) * growth)
    beta = growth if is_mamba else 1.0 / (1.0 + np.exp(-scalars[:, 0]))
    state = np.zeros((recurrent.value_heads, recurrent.key_dim, recurrent.value_dim))
    outputs = np.empty_like(v)
    for t in range(len(rows)):
        state = decay[t][:, None, None] * state
        known = 0.0 if is_mamba else np.einsum("hkv,hk->hv", state, k[t])
        delta = beta[t][:, None] * (v[t] - known)
        state = state + k[t][:, :, None] * delta[:, None]
        outputs[t] = np.einsum("hkv,hk->hv", state, q[t])
    if not is_mamba:
        return _norm(config, outputs).reshape(len(rows), -1) * _silu(gates)
    outputs += weights["skip"][:, None] * v
    gated = outputs.reshape(len(rows), -1) * _silu(gates)
    grouped = gated.reshape(len(rows), recurrent.key_heads, -1)
    return _norm(config, grouped).reshape(len(rows), -1)


def _silu(x: Array) -> Array:
    return x / (1.0 + np.exp(-x))


def _unit(rows: Array, size: int) -> Array:
    """Return rows of heads of ``size`` numbers, each divided by its length."""
    heads = rows.reshape(len(rows), -1, size)
    unit = heads / np.sqrt((heads * heads).sum(-1, keepdims=True) + 1e-6)
    return unit.reshape(rows.shape)


def _attention(config: ModelConfig, weights: dict[str, Array], rows: Array) -> Array:
    tokens = len(rows)
    dim = config.head_dim
    heads = (rows @ weights["qkv"].T).reshape(tokens, -1, dim)
    q = _rotate(config, heads[:, :4])
    k = _rotate(config, heads[:, 4:6]).repeat(2, axis=1)
    v = heads[:, 6:].repeat(2, axis=1)
    return _weighted_values(q, k, v, dim**-0.5).reshape(tokens, -1)


def _latent_attention(config: ModelConfig, weights: dict[str, Array], rows: Array) -> Array:
    """Return the outputs of all heads, computed with keys and values of each head."""
    sizes = config.latent
    assert sizes is not None
    tokens = len(rows)
    heads = config.num_heads
    queries = rows @ weights["q_b"].T
    plain, rotated = np.split(queries, [heads * sizes.plain_dim], axis=1)
    latent, key = np.split(rows @ weights["kv_a"].T, [sizes.rank], axis=1)
    latent = _norm(config, latent)
    # ``k_b`` multiplies queries: it is the transposed matrix of the keys.
    k_b = weights["k_b"].reshape(heads, sizes.rank, sizes.plain_dim)
    v_b = weights["v_b"].reshape(heads, sizes.value_dim, sizes.rank)
    own_keys = np.einsum("tr,hrd->thd", latent, k_b)
    shared_key = _rotate(config, key[:, None]).repeat(heads, axis=1)
    rotated = _rotate(config, rotated.reshape(tokens, heads, -1))
    q = np.concatenate((plain.reshape(tokens, heads, -1), rotated), axis=-1)
    k = np.concatenate((own_keys, shared_key), axis=-1)
    v = np.einsum("tr,hvr->thv", latent, v_b)
    return _weighted_values(q, k, v, sizes.query_dim**-0.5).reshape(tokens, -1)


def _rotate(config: ModelConfig, heads: Array) -> Array:
    """Return the heads ``[tokens, heads, size]`` rotated by RoPE."""
    tokens, _, size = heads.shape
    cos, sin = (
        RopeTable(config.rope).up_to(tokens)[:tokens].astype(np.float64).swapaxes(0, 1)[:, :, None]
    )
    first = heads[..., : size // 2]
    second = heads[..., size // 2 :]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def _weighted_values(q: Array, k: Array, v: Array, scale: float) -> Array:
    """Return causal attention for ``[tokens, heads, size]``."""
    is_visible = np.tri(len(q), dtype=bool)
    scores = scale * np.einsum("qhd,khd->hqk", q, k) + np.where(is_visible, 0.0, -np.inf)
    attention = np.exp(scores - scores.max(-1, keepdims=True))
    attention /= attention.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", attention, v)
