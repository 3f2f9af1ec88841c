"""An OpenVINO model of a Llama-like checkpoint, built operation by operation.

It is the graph that a traced export gives (stateful cache, ``beam_idx``, rotary embedding and attention in the forms
that the runtime fuses), without the tracing and without a dependency on one version of transformers. The weights keep
their type, or NNCF compresses them, as it does for every exporter, with the exporters' defaults.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops
from openvino.op.util import Variable, VariableInfo

from .checkpoint import ArrayCheckpoint, Shape

__all__ = ["write_openvino"]

# Inputs that share a scale in 4 bits: what optimum-intel, the usual exporter, takes by default.
_GROUP = 128

_TYPES = {"bfloat16": ov.Type.bf16, "float16": ov.Type.f16, "float32": ov.Type.f32}


def write_openvino(checkpoint: ArrayCheckpoint, folder: Path, dtype: str, weights: str | None = None) -> str:
    """Write ``openvino_model.xml`` and ``.bin``, compressed to ``int8`` or ``int4``; returns what the weights are."""
    model = _Graph(checkpoint, dtype).build()
    kept = dtype if weights is None else _compress(model, weights)
    ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    return kept


class _Graph:
    """Shapes: ``B`` batch, ``T`` new tokens, ``H`` heads, ``D`` head dimension."""

    def __init__(self, checkpoint: ArrayCheckpoint, dtype: str) -> None:
        self.checkpoint = checkpoint
        self.shape = checkpoint.shape
        self.dtype = dtype
        self.sinks: list[Any] = []
        self.ids = _parameter("input_ids", ov.Type.i64, 2)
        self.mask = _parameter("attention_mask", ov.Type.i64, 2)
        self.positions = _parameter("position_ids", ov.Type.i64, 2)
        self.beams = _parameter("beam_idx", ov.Type.i32, 1)

    def build(self) -> ov.Model:
        embedding = self.weight("model.embed_tokens.weight")
        x = ops.gather(embedding, self.ids, np.int64(0))
        cos, sin = self.rotation()
        visible = self.visible()
        for layer in range(self.shape.layers):
            prefix = f"model.layers.{layer}."
            normed = self.norm(x, prefix + "input_layernorm.weight")
            x = ops.add(x, self.attention(normed, layer, cos, sin, visible))
            normed = self.norm(x, prefix + "post_attention_layernorm.weight")
            gate = ops.swish(self.linear(normed, prefix + "mlp.gate_proj"))
            up = self.linear(normed, prefix + "mlp.up_proj")
            x = ops.add(x, self.linear(ops.multiply(gate, up), prefix + "mlp.down_proj"))
        x = self.norm(x, "model.norm.weight")
        head = embedding if self.shape.tied else self.weight("lm_head.weight")
        result = ops.result(ops.matmul(x, head, transpose_a=False, transpose_b=True))
        result.get_output_tensor(0).set_names({"logits"})
        return ov.Model([result], self.sinks, [self.ids, self.mask, self.positions, self.beams], "pronk")

    def weight(self, name: str) -> Any:
        """A weight in its own type, converted to float32 where it is used: the runtime folds that into its kernels."""
        array = self.checkpoint.tensor(name, self.dtype)
        constant = ops.constant(ov.Tensor(array, array.shape, _TYPES[self.dtype]), shared_memory=False)
        constant.set_friendly_name(name)
        return constant if self.dtype == "float32" else ops.convert(constant, ov.Type.f32)

    def linear(self, x: Any, name: str) -> Any:
        y = ops.matmul(x, self.weight(name + ".weight"), transpose_a=False, transpose_b=True)
        if name + ".bias" not in self.checkpoint:
            return y
        return ops.add(y, _vector(self.checkpoint, name + ".bias"))

    def norm(self, x: Any, name: str) -> Any:
        """Root-mean-square norm over the last axis."""
        square = ops.power(x, np.float32(2))
        mean = ops.reduce_mean(square, np.array([-1], np.int64), keep_dims=True)
        root = ops.sqrt(ops.add(mean, np.float32(self.shape.eps)))
        normed = ops.multiply(x, ops.divide(np.float32(1), root))
        return ops.multiply(_vector(self.checkpoint, name), normed)

    def rotation(self) -> tuple[Any, Any]:
        """Cosines and sines, ``[B, 1, T, D]``."""
        frequencies = self.shape.inv_freq.astype(np.float32).reshape(1, -1, 1)
        positions = ops.convert(ops.unsqueeze(self.positions, np.int64(1)), ov.Type.f32)
        angles = ops.transpose(ops.matmul(frequencies, positions, False, False), np.array([0, 2, 1], np.int64))
        both = ops.concat([angles, angles], -1)
        return ops.unsqueeze(ops.cos(both), np.int64(1)), ops.unsqueeze(ops.sin(both), np.int64(1))

    def visible(self) -> Any:
        """``[B, 1, T, all positions]``: a token sees itself and what came before; one text, so no padding."""
        count = ops.gather(ops.shape_of(self.mask), np.int64(1), np.int64(0))
        keys = ops.range(np.int64(0), count, np.int64(1), output_type="i64")
        queries = ops.unsqueeze(self.positions, np.array([1, 3], np.int64))
        return ops.less_equal(ops.unsqueeze(keys, np.array([0, 1, 2], np.int64)), queries)

    def attention(self, x: Any, layer: int, cos: Any, sin: Any, visible: Any) -> Any:
        s, prefix = self.shape, f"model.layers.{layer}.self_attn."
        q = self.heads(x, prefix + "q", s.heads)
        k = self.heads(x, prefix + "k", s.kv_heads)
        v = self.heads(x, prefix + "v", s.kv_heads)
        k = self.remember(_rotate(k, cos, sin, s.head_dim), f"past_key_values.{layer}.key")
        v = self.remember(v, f"past_key_values.{layer}.value")
        q, k, v = _rotate(q, cos, sin, s.head_dim), _repeat(k, s), _repeat(v, s)
        mixed = ops.scaled_dot_product_attention(q, k, v, visible)
        rows = ops.transpose(mixed, np.array([0, 2, 1, 3], np.int64))
        flat = ops.reshape(rows, np.array([0, 0, s.heads * s.head_dim], np.int64), special_zero=True)
        return self.linear(flat, prefix + "o_proj")

    def heads(self, x: Any, name: str, count: int) -> Any:
        """Project and split into heads, ``[B, H, T, D]``; Qwen3 norms each head."""
        y = self.linear(x, name + "_proj")
        y = ops.reshape(y, np.array([0, 0, count, self.shape.head_dim], np.int64), special_zero=True)
        if f"{name}_norm.weight" in self.checkpoint:
            y = self.norm(y, f"{name}_norm.weight")
        return ops.transpose(y, np.array([0, 2, 1, 3], np.int64))

    def remember(self, new: Any, name: str) -> Any:
        """The cache of one layer's keys or values with the new ones appended."""
        s = self.shape
        info = VariableInfo()
        info.data_shape = ov.PartialShape([-1, s.kv_heads, -1, s.head_dim])
        info.data_type = ov.Type.f32
        info.variable_id = name
        variable = Variable(info)
        batch = ops.gather(ops.shape_of(self.ids), np.array([0], np.int64), np.int64(0))
        empty = ops.concat([batch, np.array([s.kv_heads, 0, s.head_dim], np.int64)], 0)
        past = ops.read_value(ops.broadcast(np.float32(0), empty), variable)
        grown = ops.concat([ops.gather(past, self.beams, np.int64(0)), new], 2)
        self.sinks.append(ops.assign(grown, variable))
        return grown


def _parameter(name: str, kind: ov.Type, rank: int) -> Any:
    parameter = ops.parameter(ov.PartialShape([-1] * rank), kind)
    # The conversion to paged attention goes by the node's name, the pipeline by the tensor's.
    parameter.set_friendly_name(name)
    parameter.get_output_tensor(0).set_names({name})
    return parameter


def _vector(checkpoint: ArrayCheckpoint, name: str) -> NDArray[np.float32]:
    return checkpoint.tensor(name, "float32")


def _rotate(x: Any, cos: Any, sin: Any, head_dim: int) -> Any:
    """``x * cos + rotate_half(x) * sin``."""
    half, axis, step = np.array([head_dim // 2], np.int64), np.array([3], np.int64), np.array([1], np.int64)
    first = ops.slice(x, np.array([0], np.int64), half, step, axis)
    second = ops.slice(x, half, np.array([np.iinfo(np.int64).max], np.int64), step, axis)
    turned = ops.concat([ops.multiply(second, np.float32(-1)), first], -1)
    return ops.add(ops.multiply(x, cos), ops.multiply(turned, sin))


def _repeat(x: Any, s: Shape) -> Any:
    """Each key/value head as often as it is shared; the runtime recognizes this form and copies nothing."""
    group = s.heads // s.kv_heads
    if group == 1:
        return x
    shape = ops.shape_of(x)
    outer = ops.gather(shape, np.array([0, 1], np.int64), np.int64(0))
    inner = ops.gather(shape, np.array([2, 3], np.int64), np.int64(0))
    wide = ops.concat([outer, np.array([group], np.int64), inner], 0)
    spread = ops.broadcast(ops.unsqueeze(x, np.int64(2)), wide, "BIDIRECTIONAL")
    return ops.reshape(spread, np.array([0, s.heads, -1, s.head_dim], np.int64), special_zero=True)


def _compress(model: ov.Model, weights: str) -> str:
    """Round the weights of a graph in place, without data; returns what was done."""
    import nncf  # noqa: PLC0415 - only compressed weights need it

    nncf.set_log_level(logging.ERROR)
    if weights == "int8":
        nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
        return f"int8 by rows, with zero points, by nncf {nncf.__version__}"
    smaller = nncf.AdvancedCompressionParameters(group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST)
    nncf.compress_weights(
        model, mode=nncf.CompressWeightsMode.INT4_ASYM, group_size=_GROUP, ratio=1.0, advanced_parameters=smaller
    )
    kept = f"int4 in groups of {_GROUP} or less, with zero points; embedding and head int8"
    return f"{kept}; by nncf {nncf.__version__}"
