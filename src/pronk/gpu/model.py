"""The plain families on a GPU: Llama, Mistral, Qwen 2 and 3, SmolLM, Phi-3, Gemma 2 and 3, Granite.

A family is its :class:`~pronk.checkpoint.config.ModelConfig`. All rows of a pass go through the
layers together; only attention lets rows of one text interact.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pronk import OptionError
from pronk.backends import Decoder, Kernels, Layer, ModelConfig, Norm
from pronk.base.convert import to_tensor, torch_dtype
from pronk.checkpoint import load_decoder
from pronk.gpu.attention import AttentionOptions, attend
from pronk.gpu.gemm import multiply
from pronk.gpu.layout import RowLayout
from pronk.gpu.pool import GpuPool
from pronk.gpu.program import DeviceProgram, Uploads
from pronk.gpu.rotations import LayerRotations
from pronk.gpu.rows import ACTIVATIONS, Heads, RowNorm, gate, normalize, rotate
from pronk.gpu.weights import GpuLinear, gpu_linear

# Fields of a config whose other values than the default this module does not compute, with the
# name of what they describe.
_REFUSED = {
    "mixture": "mixtures of experts",
    "convolution": "short convolutions",
    "recurrent": "recurrent layers",
    "latent": "latent attention",
    "attention_shapes": "layers of different shapes",
    "layer_input_size": "embeddings of layers",
    "layer_scalars": "scaled layers",
    "sublayers": "layers of one sublayer",
    "clamped_gate": "clamped gates",
    "gated_attention": "gated attention",
    "head_gates": "gates of heads",
    "value_norm": "norms of values",
    "whole_qk_norm": "norms over all heads",
    "query_growth": "growing queries",
    "attention_sinks": "attention sinks",
}


def check_supported(config: ModelConfig, device: str) -> None:
    """Raise an OptionError, of one line, for a model that a GPU runner does not compute."""
    defaults = ModelConfig.__dataclass_fields__
    kinds = [
        kind for name, kind in _REFUSED.items() if getattr(config, name) != defaults[name].default
    ]
    if config.has_dynamic_rope:
        kinds.append("dynamic RoPE scaling")
    if config.norm != "rms" or not config.gated or config.activation not in ACTIVATIONS:
        kinds.append("layers of another kind than Llama's")
    if kinds:
        msg = (
            f"device: expected a plain model such as Llama or Qwen with {device!r}, found "
            f"{kinds[0]} of {config.family}; use device='cpu'"
        )
        raise OptionError(msg)


class ModelOutput(NamedTuple):
    """Result of a pass on the device."""

    hidden: dict[int, Tensor]  # output ``[rows, hidden]`` of each layer that was asked for
    logits: Tensor | None  # float32 ``[rows, vocab]``; ``None`` without the LM head


@dataclass(frozen=True, eq=False)
class _GpuLayer:
    """One layer on the device; a norm is ``None`` where the family has none."""

    config: ModelConfig
    qkv: tuple[GpuLinear, ...]
    out: GpuLinear
    up: GpuLinear
    down: GpuLinear
    attention_norm: RowNorm | None
    attention_output_norm: RowNorm | None
    mlp_norm: RowNorm | None
    mlp_output_norm: RowNorm | None
    head_norms: tuple[RowNorm, RowNorm] | None
    options: AttentionOptions


class GpuModel:
    """The weights of a model on a device, and its forward pass.

    Attributes:
        config: the model.
        decoder: the model with its layers on the device.
        pool: the KV pool.
        embedding: ``[vocab, hidden]`` on the device; empty if the decoder has a table instead.

    Args:
        decoder: the model, with linear layers of :func:`~pronk.gpu.weights.gpu_linear`.
        pool: the KV pool of the target.

    Raises:
        OptionError: the model is not a plain one (:func:`check_supported`).
    """

    def __init__(self, decoder: Decoder, pool: GpuPool) -> None:
        config = decoder.config
        check_supported(config, str(pool.device))
        self.config = config
        self.decoder = decoder
        self.pool = pool
        self._uploads = Uploads(pool.device)
        self.device = pool.device
        self.dtype = torch_dtype(pool.dtype)
        self._head = _linear(decoder.head)
        self._norm = self._load_norm(decoder.norm)
        self._layers = [
            self._load_layer(layer, index) for index, layer in enumerate(decoder.layers)
        ]
        table = decoder.table
        self._table = None if table is None else _linear(table).matrix
        self.embedding = torch.empty(0)
        if self._table is None:
            rows = np.ascontiguousarray(decoder.embedding)
            self.embedding = to_tensor(rows).to(self.device, self.dtype)
        # rounded to the model's dtype, as in training
        self._embedding_scale = float(np.asarray(config.embedding_scale).astype(pool.dtype))
        self._rotations = LayerRotations(pool)

    @property
    def version(self) -> tuple[int, int]:
        """Versions of the pool and of the rotations, whose tensors a recorded pass uses."""
        return self.pool.version, self._rotations.version

    def reserve_positions(self, count: int) -> None:
        """Make rotations of at least ``count`` positions ready."""
        self._rotations.reserve(count)

    @torch.inference_mode()
    def forward(
        self,
        layout: RowLayout,
        *,
        num_layers: int,
        collect: Collection[int] = (),
        logits_rows: Tensor | None = None,
    ) -> ModelOutput:
        """Run rows through the first layers; store their keys, values and features.

        :meth:`reserve_positions` has been called for all positions.

        Args:
            layout: the rows.
            num_layers: number of layers.
            collect: numbers (from 1; 0: the embedding) of the layers whose output is returned.
            logits_rows: int64 indices of the rows whose logits are returned, after all layers;
                ``None``: no logits.
        """
        stream = self._embed(layout.tokens)
        outputs = {0: stream}
        for index in range(num_layers):
            stream = self._attention(self._layers[index], index, stream, layout)
            stream = self._mlp(self._layers[index], stream)
            outputs[index + 1] = stream
        self._save_features(outputs, layout)
        hidden = {layer: outputs[layer] for layer in collect}
        if logits_rows is None:
            return ModelOutput(hidden, None)
        return ModelOutput(hidden, self._logits(stream[logits_rows]))

    def _save_features(self, outputs: Mapping[int, Tensor], layout: RowLayout) -> None:
        """Save the features that drafters read, as far as these layers have been run."""
        for feature, pool in self.pool.features_on_device():
            if isinstance(feature, int):
                if feature in outputs:
                    pool[0, layout.slots] = outputs[feature]
                continue
            last = max(feature.layers)
            if last not in outputs:
                continue
            program = DeviceProgram(
                self._uploads,
                self.pool,
                layout,
                outputs[last],
                collected=outputs,
                features={feature: pool},
            )
            feature.compile(program, {layer: layer for layer in feature.layers if layer < last})

    def _embed(self, tokens: Tensor) -> Tensor:
        if self._table is None:
            rows = self.embedding[tokens]
        else:
            rows = self._table.rows(tokens.long()).to(self.dtype)
        return rows if self._embedding_scale == 1.0 else rows * self._embedding_scale

    def _attention(self, layer: _GpuLayer, index: int, stream: Tensor, layout: RowLayout) -> Tensor:
        """Return the stream plus the attention of a layer."""
        config = layer.config
        heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        x = _norm(stream, layer.attention_norm)
        parts = [multiply(x, part.matrix) for part in layer.qkv]
        projected = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        keys, values = self.pool.layer(index)
        queries = rotate(
            projected,
            heads,
            self._rotations.of(index),
            layer.head_norms,
            layout.positions,
            layout.slots,
            keys,
            values,
        )
        attended = attend(queries, keys, values, layout, layer.options)
        return self._add(stream, multiply(attended, layer.out.matrix), layer.attention_output_norm)

    def _mlp(self, layer: _GpuLayer, stream: Tensor) -> Tensor:
        """Return the stream plus the MLP of a layer."""
        x = _norm(stream, layer.mlp_norm)
        activated = gate(multiply(x, layer.up.matrix), self.config.activation)
        return self._add(stream, multiply(activated, layer.down.matrix), layer.mlp_output_norm)

    def _add(self, stream: Tensor, branch: Tensor, norm: RowNorm | None) -> Tensor:
        """Return the stream plus the output of a branch, normed and scaled."""
        branch = _norm(branch, norm)
        scale = self.config.residual_scale
        return stream + (branch if scale == 1.0 else branch * scale)

    def _logits(self, stream: Tensor) -> Tensor:
        x = _norm(stream, self._norm)
        logits = multiply(x, self._head.matrix, torch.float32)
        if self._head.scale != 1.0:
            logits = logits * self._head.scale
        if self._head.cap is not None:
            logits = self._head.cap * torch.tanh(logits / self._head.cap)
        return logits

    def _load_layer(self, layer: Layer, index: int) -> _GpuLayer:
        config = layer.config
        head_norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            head_norms = (self._some_norm(layer.q_norm), self._some_norm(layer.k_norm))
        options = AttentionOptions(
            config.query_scale, config.attention_cap, self.config.window_of(index)
        )
        return _GpuLayer(
            config,
            tuple(_linear(part) for part in layer.qkv.parts),
            _linear(layer.out),
            _linear(layer.up),
            _linear(layer.down),
            self._load_norm(layer.attention_norm),
            self._load_norm(layer.attention_output_norm),
            self._load_norm(layer.mlp_norm),
            self._load_norm(layer.mlp_output_norm),
            head_norms,
            options,
        )

    def _load_norm(self, norm: Norm | None) -> RowNorm | None:
        return None if norm is None else self._some_norm(norm)

    def _some_norm(self, norm: Norm) -> RowNorm:
        return RowNorm(to_tensor(norm.weight).to(self.device), norm.eps)


def load_model(folder: Path, pool: GpuPool, kernels: Kernels, weights: str) -> GpuModel:
    """Copy the weights of a checkpoint to a device.

    Args:
        folder: folder or GGUF file.
        pool: the model's KV pool on the device.
        kernels: the CPU's kernels, which round weights.
        weights: how weights are stored, as for :class:`~pronk.llm.LLM`.
    """
    # its layers have the attributes of Linear that loading sets
    linear: Any = gpu_linear(kernels, weights, pool.dtype, pool.device)
    decoder = load_decoder(folder, pool.config, dtype=pool.dtype, kernels=kernels, weights=linear)
    return GpuModel(decoder, pool)


def _norm(x: Tensor, norm: RowNorm | None) -> Tensor:
    return x if norm is None else normalize(x, norm)


def _linear(linear: Any) -> GpuLinear:
    """Return a layer, which must be on a device."""
    assert isinstance(linear, GpuLinear), f"expected a layer on a device, found {type(linear)}"
    return linear
