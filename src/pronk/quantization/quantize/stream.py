"""Forward pass over a text, one layer at a time to save memory; measurement of perplexity."""

from __future__ import annotations

import math

import numpy as np

from pronk.architecture.rope import RopeTable
from pronk.arrays import FLOAT32, Array
from pronk.kv_cache.blocks import BlockTable
from pronk.models.backend import Backend
from pronk.models.decoder import Layer
from pronk.models.linear import Linear, Norm, WeightLayout
from pronk.models.program_rows import ProgramRows
from pronk.quantization.quantize.rounding import LINEARS
from pronk.quantization.quantize.source import LayerWeights, SourceCheckpoint
from pronk.speculation.tree import TokenTree

__all__ = ["LayerStream", "build_layer"]

_BLOCK_SIZE = 16  # number of tokens in a block of the KV cache
_MAX_ROWS = 4096  # maximum tokens of sequences that a layer computes together; a longer one is alone
_MAX_LOGITS = 1 << 21  # maximum number of logits (rows times vocabulary) at a time, unless _MIN_ROWS rows have more
_MIN_ROWS = 128


class LayerStream:
    """Hidden states of a text, computed by a backend one layer after the other, in float32.

    Args:
        source: checkpoint with the embedding, final norm and LM head.
        backend: backend that computes the layers.
        tokens: token ids ``[sequences, length]``.

    Attributes:
        rows: input of the next layer, float32 ``[sequences * length, hidden]``.
    """

    def __init__(self, source: SourceCheckpoint, backend: Backend, tokens: Array) -> None:
        self.source, self.backend, self.tokens = source, backend, tokens
        self.length = tokens.shape[1]
        self.rows = source.weight("embedding")[tokens.reshape(-1)].astype(FLOAT32)
        batch = min(len(tokens), max(1, _MAX_ROWS // self.length))
        self._cache = backend.make_cache(
            source.config.layers_like(0),
            num_blocks=batch * math.ceil(self.length / _BLOCK_SIZE),
            block_size=_BLOCK_SIZE,
            dtype=FLOAT32,
        )
        self._tables = [BlockTable() for _ in range(batch)]
        for table in self._tables:
            self._cache.prepare(table, self.length)
        self._tree, self._rope = TokenTree.chain([0] * self.length), RopeTable(source.config.rope)

    def run_layer(self, layer: Layer) -> None:
        """Replace :attr:`rows` by the output of a layer that :func:`build_layer` returned."""
        program = self.backend.program(self.rows.shape[1], FLOAT32, self._cache)
        layer.compile(program, 0)
        step = len(self._tables) * self.length
        for start in range(0, len(self.rows), step):
            rows = self.rows[start : start + step]
            # Every sequence begins in an empty cache, since no table has committed tokens.
            count = len(rows) // self.length
            packed = ProgramRows().set_segments([(table, self._tree, 0) for table in self._tables[:count]])
            packed.rotate(self._rope)
            program.run(packed, rows)

    def perplexity(self) -> float:
        """Return the perplexity, without the first token of each sequence; NaN or inf after an overflow.

        All layers must have been run before.
        """
        config, hidden = self.source.config, self.rows.shape[1]
        rows = self.rows.reshape(-1, self.length, hidden)[:, :-1].reshape(-1, hidden)
        labels = self.tokens[:, 1:].reshape(-1)
        program = self.backend.program(hidden, FLOAT32)
        head = Linear(self.backend, self.source.weight("head").astype(FLOAT32), None, WeightLayout(head=True), None)
        program.linear(head, norm=Norm.of(config, self.source.weight("norm")), to="logits")
        total, step = 0.0, max(_MIN_ROWS, _MAX_LOGITS // config.vocab_size)
        for start in range(0, len(rows), step):
            chunk = rows[start : start + step]
            logits = np.empty((len(chunk), config.vocab_size), np.float32)
            program.run(ProgramRows.without_segments(len(chunk)), chunk, logits)
            total += _cross_entropy(logits, labels[start : start + step])
        self.source.checkpoint.release()
        mean = total / len(rows)
        return math.exp(min(mean, 700.0)) if math.isfinite(mean) else mean  # math.exp(710) overflows


def build_layer(source: SourceCheckpoint, backend: Backend, weights: LayerWeights, index: int) -> Layer:
    """Return layer ``index`` (from 0) of the model as the only layer of a decoder, with the given weights."""
    layer = Layer(source.config.layers_like(index))
    for name in LINEARS:
        weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
        setattr(layer, name, Linear(backend, weight, bias, layer.layout(name), None))
    for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm"):
        if f"{name}.weight" in weights:
            setattr(layer, name, Norm.of(layer.config, weights[f"{name}.weight"]))
    return layer


def _cross_entropy(logits: Array, labels: Array) -> float:
    """Return the sum of ``-log softmax(logits)[label]`` over the rows; the logits are overwritten."""
    with np.errstate(all="ignore"):  # after an overflow, the sum is NaN or infinite
        logits -= logits.max(axis=1, keepdims=True)
        of_labels = logits[np.arange(len(labels)), labels].astype(np.float64)
        return float((np.log(np.exp(logits, out=logits).sum(axis=1, dtype=np.float64)) - of_labels).sum())
