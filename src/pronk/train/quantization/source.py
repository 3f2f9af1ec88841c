"""The checkpoint to quantize: its weights and forward pass, layer by layer to save memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from pronk import ConfigError, TokenTree
from pronk.backends import (
    BatchEntry,
    BlockTable,
    ForwardBatch,
    Kernels,
    Layer,
    Linear,
    Norm,
    PagedCache,
    Program,
    WeightLayout,
)
from pronk.base import refuse
from pronk.base.arrays import FLOAT32, Array
from pronk.checkpoint import (
    Checkpoint,
    CheckpointTensor,
    Inventory,
    QuantizedMatrix,
    get_family,
    is_gguf,
    parse_dtype,
    plan_tensors,
    read_config,
    read_json,
)
from pronk.train.quantization.rounding import LINEARS

_REMEDY = "give the checkpoint with float32, float16 or bfloat16 weights that it was made from"

# Weights and biases of a layer in float32, by module and kind: ``{"qkv.weight": …, "qkv.bias": …,
# "out.weight": …}``.
LayerWeights = dict[str, Array]

_BLOCK_SIZE = 16  # number of tokens in a block of the KV cache with which layers are run
# Maximum number of tokens of the sequences that a layer computes together. A longer sequence is
# computed alone.
_MAX_ROWS = 4096
# Maximum number of logits (rows times vocabulary) that are computed at a time, unless _MIN_ROWS
# rows have more.
_MAX_LOGITS = 1 << 21
_MIN_ROWS = 128


class SourceCheckpoint:
    """The checkpoint that is to be quantized: its configuration, and access to its tensors.

    Attributes:
        folder: folder of the checkpoint.
        config: configuration of the model.
        document: content of ``config.json``, for the new checkpoint.
        names: names of the tensors of the model's family.
        dtype: data type of the weights.
        checkpoint: the files with the tensors.
        parts: modules of the model, each with its tensors in the checkpoint.
        inventory: reads the tensors of ``parts``.

    Raises:
        CheckpointError: the checkpoint is unreadable, already quantized, or of a family that this
            package cannot quantize, such as GPT-2.
    """

    def __init__(self, folder: Path) -> None:
        if is_gguf(folder):
            refuse(
                folder, f"expected a folder with safetensors files, found a GGUF file; {_REMEDY}"
            )
        self.folder = folder
        self.config = read_config(folder)
        self.document = read_json(folder / "config.json", ConfigError)
        self.names = get_family(self.config.family).names
        self._check_supported()
        self.dtype = parse_dtype("auto", self.config)
        self.checkpoint = Checkpoint(folder)
        self.parts = list(plan_tensors(self.config))
        self.inventory = Inventory(self.checkpoint, self.config, self.parts)

    def _check_supported(self) -> None:
        """Raise CheckpointError for a quantized model, and for layers unlike a Llama's."""
        config = self.config
        if config.quantization is not None:
            method = config.quantization.get("quant_method", "unknown")
            refuse(
                self.folder,
                f"expected plain weights, found a model that is quantized already ({method}); "
                f"{_REMEDY}",
            )
        has_fused_qkv = len(self.names.layer["qkv"]) == 1
        if self.names.transposed or has_fused_qkv or not config.is_plain:
            refuse(
                self.folder,
                f"expected a llama, mistral, qwen2 or qwen3 model, found {config.family}, which "
                "this command does not support; load it with --weights int8 or int4",
            )

    def stored_name(self, name: str) -> str:
        """Return the name in the checkpoint of a tensor that the model calls ``name``.

        The family's prefix (``model.``) is added, except for the LM head.
        """
        return name if name.startswith(f"{self.names.head}.") else self.names.prefix + name

    def _stacks(self, index: int) -> Iterator[tuple[str, str, tuple[CheckpointTensor, ...]]]:
        """Yield (module, ``weight`` or ``bias``, tensors) for each parameter of layer ``index``.

        A parameter is its tensors in the checkpoint, stacked: the weight of ``qkv`` has three.
        """
        for part in self.parts:
            if part.target.startswith(f"layers.{index}."):
                name = part.target.rpartition(".")[2]
                if part.weight:
                    yield name, "weight", part.weight
                if part.bias:
                    yield name, "bias", part.bias

    def weight(self, target: str) -> Array:
        """Return the weight of ``embedding``, ``norm`` or ``head`` in the checkpoint's dtype.

        The embedding and the LM head are ``[vocab, hidden]``, the final norm is ``[hidden]``. The
        weight of a tied LM head is the embedding.
        """
        part = next(part for part in self.parts if part.target == target)
        if not part.weight:  # a tied LM head has no weight of its own
            return self.weight("embedding")
        return self.inventory.tensor(part.weight[0])

    def load_layer(self, index: int) -> LayerWeights:
        """Return copies of the weights and biases of layer ``index`` (from 0), in float32."""
        weights = LayerWeights()
        for name, kind, tensors in self._stacks(index):
            arrays = [self.inventory.tensor(tensor).astype(FLOAT32) for tensor in tensors]
            weights[f"{name}.{kind}"] = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        self.checkpoint.release()
        return weights

    def layer_tensors(
        self, index: int, weights: LayerWeights, matrices: Mapping[str, QuantizedMatrix]
    ) -> Iterator[tuple[str, Array | QuantizedMatrix]]:
        """Yield name and value of each tensor of a layer (from 0) for the new checkpoint.

        Args:
            index: number of the layer.
            weights: norms and biases, which are converted to their dtypes in the checkpoint.
            matrices: quantized matrices by module; a matrix that is stacked of several tensors
                (``qkv``) is split.
        """
        for name, kind, tensors in self._stacks(index):
            start = 0
            matrix = matrices.get(name) if kind == "weight" else None
            for tensor in tensors:
                end = start + tensor.shape[0]
                if matrix is not None:
                    yield tensor.name, matrix.slice_outputs(start, end)
                else:
                    values = weights[f"{name}.{kind}"][start:end]
                    dtype = self.inventory.tensor(tensor).dtype
                    yield tensor.name, values.astype(dtype)
                start = end


class LayerStream:
    """Runs a text through a model layer by layer, in float32, with weights that the caller passes.

    Args:
        source: the checkpoint, whose embedding, final norm and LM head are used.
        kernels: the kernels that compute.
        tokens: token ids of the text, int ``[sequences, length]``. Sequences are independent.

    Attributes:
        rows: input of the next layer, float32 ``[sequences * length, hidden]``: at first the
            embeddings of the tokens.
    """

    def __init__(self, source: SourceCheckpoint, kernels: Kernels, tokens: Array) -> None:
        self.source = source
        self.kernels = kernels
        self.tokens = tokens
        self.length = tokens.shape[1]
        self.rows = source.weight("embedding")[tokens.reshape(-1)].astype(FLOAT32)
        num_tables = min(len(tokens), max(1, _MAX_ROWS // self.length))
        config = source.config.layers_like(0)
        num_blocks = num_tables * math.ceil(self.length / _BLOCK_SIZE)
        self._cache = PagedCache(
            config,
            num_blocks=num_blocks,
            block_size=_BLOCK_SIZE,
            dtype=FLOAT32,
            kernels=kernels,
        )
        self._tables = [BlockTable() for _ in range(num_tables)]
        for table in self._tables:
            self._cache.prepare(table, self.length)
        # The rows of a sequence. Layers read :attr:`rows`, so the token ids do not matter.
        self._tree = TokenTree.chain([0] * self.length)

    def run_layer(self, layer: Layer) -> None:
        """Run a layer, from :func:`build_layer`, on :attr:`rows`, and replace them by its output.

        The outputs are those of the whole layer, residual connections included.
        """
        program = Program(self.kernels, self.rows.shape[1], FLOAT32, self._cache)
        layer.compile(program, 0)
        rows_per_pass = len(self._tables) * self.length
        for start in range(0, len(self.rows), rows_per_pass):
            rows = self.rows[start : start + rows_per_pass]
            # Each sequence begins with an empty cache, because no block table has committed tokens.
            tables = self._tables[: len(rows) // self.length]
            batch = ForwardBatch([BatchEntry(table, self._tree) for table in tables])
            program.run(batch, rows)

    def perplexity(self) -> float:
        """Return the perplexity of the text; all layers must have been run.

        The first token of each sequence is not predicted and does not count. The result is NaN or
        infinite after an overflow.
        """
        config = self.source.config
        hidden = self.rows.shape[1]
        rows = self.rows.reshape(-1, self.length, hidden)[:, :-1].reshape(-1, hidden)
        labels = self.tokens[:, 1:].reshape(-1)
        program = Program(self.kernels, hidden, FLOAT32)
        weight = self.source.weight("head").astype(FLOAT32)
        head = Linear(self.kernels, weight, None, WeightLayout(head=True), None)
        program.linear(head, norm=Norm.of(config, self.source.weight("norm")), to="logits")
        total = 0.0
        step = max(_MIN_ROWS, _MAX_LOGITS // config.vocab_size)
        for start in range(0, len(rows), step):
            chunk = rows[start : start + step]
            logits = np.empty((len(chunk), config.vocab_size), np.float32)
            program.run(None, chunk, logits)
            total += _cross_entropy(logits, labels[start : start + step])
        self.source.checkpoint.release()
        mean = total / len(rows)
        if not math.isfinite(mean):
            return mean
        return math.exp(min(mean, 700.0))  # larger values overflow: math.exp(710)


def build_layer(
    source: SourceCheckpoint, kernels: Kernels, weights: LayerWeights, index: int
) -> Layer:
    """Return layer ``index`` (from 0) of the model with the given weights.

    :class:`LayerStream` runs it. Other layers of the model are not loaded.
    """
    layer = Layer(source.config.layers_like(index))
    for name in LINEARS:
        weight = weights[f"{name}.weight"]
        bias = weights.get(f"{name}.bias")
        setattr(layer, name, Linear(kernels, weight, bias, layer.layout(name), None))
    for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm"):
        if f"{name}.weight" in weights:
            setattr(layer, name, Norm.of(layer.config, weights[f"{name}.weight"]))
    return layer


def _cross_entropy(logits: Array, labels: Array) -> float:
    """Return the sum of ``-log softmax(logits)[label]`` over the rows; overwrite ``logits``."""
    with np.errstate(all="ignore"):  # after an overflow, the sum is NaN or infinite
        logits -= logits.max(axis=1, keepdims=True)
        of_labels = logits[np.arange(len(labels)), labels].astype(np.float64)
        sums = np.exp(logits, out=logits).sum(axis=1, dtype=np.float64)
        return float((np.log(sums) - of_labels).sum())
