"""GGUF files of families with latent attention, as llama.cpp's converter writes them.

The families are ``deepseek_v2``, ``deepseek_v3`` and ``glm4_moe_lite``; the keys and transforms are
those of ``conversion/deepseek.py`` and ``conversion/glm.py`` in llama.cpp.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray
from safetensors.numpy import load_file

from gguf_files import decode, encode, finish, write_bytes_bpe, write_twin

Single = NDArray[np.float32]

FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
# Sizes that are multiples of the largest block, 256.
BLOCKS: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_proj.bias": "attn_q_a.bias",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_proj_with_mqa.bias": "attn_kv_a_mqa.bias",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.kv_b_proj.weight": "attn_kv_b.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.o_proj.bias": "attn_output.bias",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}
_EXPERT = re.compile(r"(model\.layers\.(\d+)\.mlp\.experts)\.\d+\.(\w+)_proj\.weight")


def write_gguf(
    folder: Path,
    path: Path,
    kinds: str | Mapping[str, str] = "F32",
    *,
    twin: Path | None = None,
    older: bool = False,
    tokenizer: tokenizers.Tokenizer | None = None,
) -> Path:
    """Write a checkpoint of :data:`FAMILIES` as a GGUF file of the architecture ``deepseek2``.

    Args:
        folder: checkpoint in one safetensors file, with the names that transformers writes.
        path: output file.
        kinds: type of all matrices, or types by suffixes of names with ``""`` as the default.
            Vectors, routers, and matrices whose rows are no multiple of a block have float32.
        twin: output folder for a checkpoint with the weights that a reader of the file gets.
        older: as files before April 2025, in which one tensor has the matrices of keys and values,
            and the sizes are those of queries and values of a head.
        tokenizer: a byte-level BPE; ``None``: the tokenizer of the folder.
    """
    raw = json.loads((folder / "config.json").read_text())
    tensors: dict[str, Single] = load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(path, "deepseek2")
    _write_keys(writer, raw, older=older)
    if tokenizer is None:
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    write_bytes_bpe(writer, tokenizer, "gpt-2")
    written = dict[str, Single]()
    experts = dict[str, list[str]]()
    for seed, name in enumerate(sorted(tensors, key=_numbers)):
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            stacked = f"blk.{expert[2]}.ffn_{expert[3]}_exps.weight"
            experts.setdefault(stacked, []).append(name)
        elif name.endswith("kv_b_proj.weight") and not older:
            prefix = f"blk.{_layer(name)}"
            written[name] = _write_halves(writer, raw, prefix, tensors[name], kinds, seed)
        else:
            written[name] = _add(writer, _theirs(name), tensors[name], kinds, seed)
    for seed, (stacked, names) in enumerate(experts.items()):
        values = _add(writer, stacked, np.stack([tensors[name] for name in names]), kinds, seed)
        written.update(zip(names, values, strict=True))
    finish(writer)
    if twin is not None:
        write_twin(folder, twin, written)
    return path


def _numbers(name: str) -> list[int | str]:
    """Return a key that sorts experts by their numbers."""
    return [int(part) if part.isdigit() else part for part in name.split(".")]


def _layer(name: str) -> str:
    return name.removeprefix("model.layers.").split(".")[0]


def _theirs(name: str) -> str:
    """Return the name of a tensor in a GGUF file."""
    if name in _NAMES:
        return _NAMES[name]
    layer = _layer(name)
    return f"blk.{layer}.{_LAYER_NAMES[name.removeprefix(f'model.layers.{layer}.')]}"


def _write_halves(
    writer: gguf.GGUFWriter,
    raw: Mapping[str, Any],
    prefix: str,
    weight: Single,
    kinds: str | Mapping[str, str],
    seed: int,
) -> Single:
    """Write the matrices of keys, transposed for each head, and of values.

    Return the matrix of both with the values that a reader gets.
    """
    heads = raw["num_attention_heads"]
    rank = weight.shape[1]
    keys, values = np.split(weight.reshape(heads, -1, rank), [raw["qk_nope_head_dim"]], axis=1)
    keys = _add(writer, f"{prefix}.attn_k_b.weight", keys.swapaxes(1, 2), kinds, seed)
    values = _add(writer, f"{prefix}.attn_v_b.weight", values, kinds, seed + 1000)
    both = np.concatenate((keys.swapaxes(1, 2), values), axis=1)
    return np.ascontiguousarray(both.reshape(weight.shape))


def _add(
    writer: gguf.GGUFWriter,
    name: str,
    weight: Single,
    kinds: str | Mapping[str, str],
    seed: int,
) -> Single:
    """Write a tensor, and return the values that a reader of the file gets."""
    kind = kinds if isinstance(kinds, str) else kinds[""]
    if isinstance(kinds, Mapping):
        ends = (end for end in kinds if end and name.removesuffix(".weight").endswith(end))
        kind = kinds[next(ends, "")]
    values_per_block, _ = GGML_QUANT_SIZES[Type[kind]]
    if weight.ndim == 1 or "ffn_gate_inp" in name or weight.shape[-1] % values_per_block:
        kind = "F32"
    stored = encode(kind, np.ascontiguousarray(weight).reshape(-1, weight.shape[-1]), seed)
    shape = (*weight.shape[:-1], -1)
    writer.add_tensor(
        name,
        stored.reshape(shape),
        raw_dtype=None if kind in ("F32", "F16") else Type[kind],
    )
    return decode(kind, stored).reshape(weight.shape)


def _write_keys(writer: gguf.GGUFWriter, raw: Mapping[str, Any], *, older: bool) -> None:
    layers = raw["num_hidden_layers"]
    rank = raw["kv_lora_rank"]
    rotated = raw["qk_rope_head_dim"]
    query = raw["qk_nope_head_dim"] + rotated
    value = raw["v_head_dim"]
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_block_count(layers)
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    if raw.get("q_lora_rank") is not None:
        writer.add_q_lora_rank(raw["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(rotated)
    if older:
        writer.add_head_count_kv(raw["num_attention_heads"])
        writer.add_key_length(query)
        writer.add_value_length(value)
    else:
        writer.add_head_count_kv(1)
        writer.add_key_length(rank + rotated)
        writer.add_value_length(rank)
        writer.add_key_length_mla(query)
        writer.add_value_length_mla(value)
    _write_rope(writer, raw["rope_parameters"])
    _write_experts(writer, raw, older=older)


def _write_rope(writer: gguf.GGUFWriter, rope: Mapping[str, Any]) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] != "yarn":
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope.get("mscale_all_dim") is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _write_experts(writer: gguf.GGUFWriter, raw: Mapping[str, Any], *, older: bool) -> None:
    """Write the keys of mixtures of experts; older files do not state the function of scores."""
    kinds = raw.get("mlp_layer_types")
    dense = raw.get("first_k_dense_replace", 0) if kinds is None else kinds.count("dense")
    writer.add_leading_dense_block_count(dense)
    writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
    writer.add_expert_count(raw["n_routed_experts"])
    writer.add_expert_used_count(raw["num_experts_per_tok"])
    writer.add_expert_shared_count(raw["n_shared_experts"])
    writer.add_expert_weights_scale(raw["routed_scaling_factor"])
    is_softmax = raw["model_type"] == "deepseek_v2"
    kind = gguf.ExpertGatingFuncType.SOFTMAX if is_softmax else gguf.ExpertGatingFuncType.SIGMOID
    if not older:
        writer.add_expert_gating_func(kind)
    if raw["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    if raw.get("n_group") is not None:
        writer.add_expert_group_count(raw["n_group"])
        writer.add_expert_group_used_count(raw["topk_group"])
