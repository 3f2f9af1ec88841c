"""GGUF files of Nemotron-H, as llama.cpp's converter writes them.

The transforms are those of ``conversion/nemotron.py`` and ``conversion/granite.py`` in llama.cpp.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from safetensors.numpy import load_file

from gguf_files import (
    decode,
    encode,
    finish,
    reorder,
    write_bytes_bpe,
    write_router_keys,
    write_twin,
)

Single = NDArray[np.float32]

# Sizes that are multiples of the largest block, 256.
BLOCKS: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "head_dim": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "ssm_state_size": 32,
    "moe_intermediate_size": 256,
    "moe_shared_expert_intermediate_size": 256,
}
# Names of a layer's tensors in GGUF files.
_NAMES = {
    "norm.weight": "attn_norm.weight",
    "mixer.in_proj.weight": "ssm_in.weight",
    "mixer.conv1d.weight": "ssm_conv1d.weight",
    "mixer.conv1d.bias": "ssm_conv1d.bias",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.norm.weight": "ssm_norm.weight",
    "mixer.out_proj.weight": "ssm_out.weight",
    "mixer.q_proj.weight": "attn_q.weight",
    "mixer.k_proj.weight": "attn_k.weight",
    "mixer.v_proj.weight": "attn_v.weight",
    "mixer.o_proj.weight": "attn_output.weight",
    "mixer.up_proj.weight": "ffn_up.weight",
    "mixer.down_proj.weight": "ffn_down.weight",
    "mixer.gate.weight": "ffn_gate_inp.weight",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mixer.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}
_ENDS = {
    "embeddings.weight": "token_embd.weight",
    "norm_f.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
# Tensors that are never quantized.
_FULL = ("ssm_conv1d.weight", "ssm_norm.weight", "ffn_gate_inp.weight")


def write_gguf(folder: Path, path: Path, kind: str = "F32", *, twin: Path | None = None) -> Path:
    """Write a checkpoint as a GGUF file.

    Args:
        folder: checkpoint in one safetensors file.
        path: output file.
        kind: type of all matrices but those of convolutions and routers.
        twin: output folder for a checkpoint with the weights that a reader of the file gets.
    """
    raw = json.loads((folder / "config.json").read_text())
    tensors: dict[str, Single] = load_file(folder / "model.safetensors")
    has_experts = "moe" in raw["layers_block_type"]
    writer = gguf.GGUFWriter(path, "nemotron_h_moe" if has_experts else "nemotron_h")
    _write_keys(writer, raw, has_experts=has_experts)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    write_bytes_bpe(writer, tokenizer, "gpt-2")
    written = dict(tensors)
    for seed, (name, sources) in enumerate(_stacks(tensors).items()):
        stack = np.stack([tensors[source] for source in sources])
        is_plain = name.endswith(_FULL) or stack.ndim < 3
        used = "F32" if is_plain else kind
        rows = stack.reshape(-1, stack.shape[-1])
        stored = encode(used, rows, seed)
        values = decode(used, stored).reshape(stack.shape)
        for source, value in zip(sources, values, strict=True):
            written[source] = np.ascontiguousarray(value)
        shape = stack.shape if len(sources) > 1 else stack.shape[1:]
        stored = stored.reshape(*shape[:-1], -1)
        _add(writer, raw, name, stored, None if used == "F32" else Type[used])
    finish(writer)
    if twin is not None:
        write_twin(folder, twin, written)
    return path


def _stacks(tensors: Mapping[str, Single]) -> dict[str, list[str]]:
    """Return the tensors of the checkpoint that each tensor of a file stacks: those of experts."""
    found: dict[str, list[str]] = {}
    for name in sorted(tensors, key=lambda name: [len(name), name]):
        rest = name.removeprefix("backbone.")
        if not rest.startswith("layers."):
            found[_ENDS[rest]] = [name]
            continue
        _, layer, module = rest.split(".", 2)
        if ".experts." in module:
            theirs = "ffn_up_exps" if "up_proj" in module else "ffn_down_exps"
            found.setdefault(f"blk.{layer}.{theirs}.weight", []).append(name)
        else:
            found[f"blk.{layer}.{_NAMES[module]}"] = [name]
    return found


def _add(
    writer: gguf.GGUFWriter, raw: Mapping[str, Any], name: str, stored: Any, kind: Type | None
) -> None:
    """Write a tensor with the converter's transform."""
    if name.endswith(("ssm_a", "ssm_d")):
        stored = (-np.exp(stored) if name.endswith("ssm_a") else stored).reshape(-1, 1)
    elif name.endswith("ssm_conv1d.weight"):
        stored = stored.squeeze(1)
    elif name.endswith("ssm_norm.weight"):
        stored = stored.reshape(raw["n_groups"], -1)
    elif name.endswith(("attn_q.weight", "attn_k.weight")):
        # As in files of a Llama; without a rotary embedding, it changes no score.
        is_query = name.endswith("attn_q.weight")
        heads = raw["num_attention_heads"] if is_query else raw["num_key_value_heads"]
        stored = reorder(stored, heads)
    writer.add_tensor(name, np.ascontiguousarray(stored), raw_dtype=kind)


def _write_keys(writer: gguf.GGUFWriter, raw: Mapping[str, Any], *, has_experts: bool) -> None:
    kinds = raw["layers_block_type"]
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(len(kinds))
    writer.add_head_count(raw["num_attention_heads"])
    kv_heads = raw["num_key_value_heads"]
    writer.add_head_count_kv([kv_heads if kind == "full_attention" else 0 for kind in kinds])
    widths = {"moe": raw["moe_intermediate_size"], "mlp": raw["intermediate_size"]}
    writer.add_feed_forward_length([widths.get(kind, 0) for kind in kinds])
    writer.add_key_length(raw["head_dim"])
    writer.add_value_length(raw["head_dim"])
    writer.add_layer_norm_eps(raw["layer_norm_epsilon"])  # as the converter names it
    writer.add_rope_dimension_count(raw["head_dim"])
    writer.add_ssm_conv_kernel(raw["conv_kernel"])
    writer.add_ssm_state_size(raw["ssm_state_size"])
    writer.add_ssm_group_count(raw["n_groups"])
    writer.add_ssm_time_step_rank(raw["mamba_num_heads"])
    writer.add_ssm_inner_size(raw["mamba_num_heads"] * raw["mamba_head_dim"])
    if has_experts:
        writer.add_expert_count(raw["n_routed_experts"])
        writer.add_expert_used_count(raw["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(raw["moe_shared_expert_intermediate_size"])
        writer.add_expert_shared_count(raw["n_shared_experts"])
        write_router_keys(writer, raw)
