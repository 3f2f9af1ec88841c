"""A GGUF file of a Llama-like checkpoint: the same weights in the same type, under llama.cpp's names, no tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from .checkpoint import ArrayCheckpoint, Shape

__all__ = ["write_gguf"]

_TYPES = {
    "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "float16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "float32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
}

# Ours to theirs, within a layer.
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(checkpoint: ArrayCheckpoint, path: Path, dtype: str) -> None:
    """Convert a checkpoint; matrices in ``dtype``, vectors in float32 as llama.cpp wants them."""
    s = checkpoint.shape
    # Mistral is a Llama to llama.cpp.
    writer = gguf.GGUFWriter(path, "llama" if s.family == "mistral" else s.family)
    _write_keys(writer, s, dtype)
    _add(writer, "token_embd.weight", checkpoint.tensor("model.embed_tokens.weight", dtype), dtype)
    _add(writer, "output_norm.weight", checkpoint.tensor("model.norm.weight", "float32"), dtype)
    if not s.tied:
        _add(writer, "output.weight", checkpoint.tensor("lm_head.weight", dtype), dtype)
    for layer in range(s.layers):
        for ours, theirs in _LAYER.items():
            for part in ("weight", "bias"):
                name = f"model.layers.{layer}.{ours}.{part}"
                if name in checkpoint:
                    matrix = part == "weight" and not ours.endswith("norm")
                    weight = _reorder(checkpoint.tensor(name, dtype if matrix else "float32"), ours, s)
                    _add(writer, f"blk.{layer}.{theirs}.{part}", weight, dtype)
    plain = s.theta ** -(np.arange(0, s.head_dim, 2) / s.head_dim)
    if not np.allclose(plain, s.inv_freq):
        _add(writer, "rope_freqs.weight", (plain / s.inv_freq).astype(np.float32), dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_keys(writer: gguf.GGUFWriter, s: Shape, dtype: str) -> None:
    writer.add_file_type(_TYPES[dtype][1])
    writer.add_vocab_size(s.vocab)
    writer.add_context_length(s.context)
    writer.add_embedding_length(s.hidden)
    writer.add_feed_forward_length(s.intermediate)
    writer.add_block_count(s.layers)
    writer.add_head_count(s.heads)
    writer.add_head_count_kv(s.kv_heads)
    writer.add_key_length(s.head_dim)
    writer.add_value_length(s.head_dim)
    writer.add_rope_dimension_count(s.head_dim)
    writer.add_rope_freq_base(s.theta)
    writer.add_layer_norm_rms_eps(s.eps)
    writer.add_tokenizer_model("no_vocab")


def _add(writer: gguf.GGUFWriter, name: str, array: NDArray[Any], dtype: str) -> None:
    if array.dtype == np.uint16:
        # The writer takes types that numpy does not have as bytes.
        writer.add_tensor(name, array.view(np.uint8), raw_dtype=_TYPES[dtype][0])
    else:
        writer.add_tensor(name, array)


def _reorder(weight: NDArray[Any], name: str, s: Shape) -> NDArray[Any]:
    """Rows of queries and keys in the order of llama.cpp's ``llama``, which rotates neighbours, not halves.

    With a head of 6: rows 0 1 2 | 3 4 5, whose pairs are 0-3, 1-4 and 2-5, become 0 3 1 4 2 5.
    """
    if s.family not in ("llama", "mistral") or name not in ("self_attn.q_proj", "self_attn.k_proj"):
        return weight
    heads = s.heads if name.endswith("q_proj") else s.kv_heads
    halves = weight.reshape(heads, 2, s.head_dim // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)
