"""Models with Mamba 2: overrides of their checkpoints, and their GGUF files.

The families are hybrid Granites (``granitemoehybrid``), Bamba (``bamba``) and Falcon-H1
(``falcon_h1``). :func:`write_gguf` writes the tensors that llama.cpp's converter writes; the names
are those of the package ``gguf``, and the transforms those of ``conversion/granite.py``,
``conversion/falcon_h1.py`` and ``conversion/mamba.py`` in llama.cpp.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from safetensors.numpy import load_file

from checkpoints import MAMBA
from gguf_files import finish, reorder, write_bytes_bpe, write_twin
from recurrent_models import Single, add_tensor

FAMILIES = ("granitemoehybrid", "bamba", "falcon_h1")
_ARCHITECTURES = {
    "granitemoehybrid": "granitehybrid",
    "bamba": "granitehybrid",
    "falcon_h1": "falcon-h1",
}
# Overrides of a hybrid Granite: experts and a shared MLP, no rotary embedding.
GRANITE: dict[str, Any] = MAMBA | {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "shared_intermediate_size": 40,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "position_embedding_type": None,
    "embedding_multiplier": 1.5,
}
# Overrides of all families: groups of heads, and sizes that are not multiples of a vector.
SIZES: dict[str, dict[str, Any]] = {
    "two groups": {},
    "one group": {"mamba_n_groups": 1},
    "as many groups as heads": {"mamba_n_groups": 4},
    "large states": {"mamba_d_state": 40},
    "odd": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 5,
        "mamba_n_groups": 4,
        "mamba_d_conv": 3,
    },
    "no bias": {"mamba_conv_bias": False},
    "tied": {"tie_word_embeddings": True},
}
# Overrides of single families.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense Granite": ("granitemoehybrid", {"num_local_experts": 0}),
    "Granite with rotations": ("granitemoehybrid", {"position_embedding_type": "rope"}),
    "Falcon with a norm": (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
}
CASES = {
    **{f"{family}, {name}": (family, SIZES[name]) for family in FAMILIES for name in SIZES},
    **VARIANTS,
}
# Sizes that are multiples of the largest block, 256.
BLOCKS: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "shared_intermediate_size": 256,
    "num_attention_heads": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_ssm": 512,
    "mamba_d_state": 32,
}


def overrides_of(family: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides of a checkpoint, with those of every hybrid Granite."""
    base = GRANITE if family == "granitemoehybrid" else {}
    return {**base, **overrides}


def write_gguf(
    folder: Path,
    path: Path,
    kinds: str | Mapping[str, str] = "F32",
    *,
    twin: Path | None = None,
) -> Path:
    """Write a checkpoint of :data:`FAMILIES` as a GGUF file, as llama.cpp's converter does.

    Args:
        folder: checkpoint in one safetensors file, with the names that transformers writes.
        path: output file.
        kinds: type of all matrices, or types by suffixes of names with ``""`` as the default.
        twin: output folder for a checkpoint with the weights that a reader of the file gets.
    """
    raw = json.loads((folder / "config.json").read_text())
    tensors: dict[str, Single] = load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(path, _ARCHITECTURES[raw["model_type"]])
    _write_keys(writer, raw)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    write_bytes_bpe(writer, tokenizer, "gpt-2")
    written = {name: weight.copy() for name, weight in tensors.items()}
    for seed, (name, source) in enumerate(sorted(_sources(raw, tensors).items())):
        part = written[source.tensor][source.rows]
        factors = source.factors.reshape(-1, *[1] * (part.ndim - 1))
        values = np.ascontiguousarray(_transform(name, raw, part * factors))
        found = add_tensor(writer, name, values, kinds, seed)
        part[...] = _undo(name, raw, found).reshape(part.shape) / factors
    finish(writer)
    if twin is not None:
        write_twin(folder, twin, written)
    return path


@dataclass(frozen=True)
class _Source:
    """Rows of a tensor of the checkpoint, and the factor of each row in the GGUF file."""

    tensor: str
    factors: Single
    rows: tuple[slice, ...] = ()  # indices of the leading axes


def _sources(raw: Mapping[str, Any], tensors: Mapping[str, Single]) -> dict[str, _Source]:
    """Return the source of each tensor of the GGUF file, by its name there."""
    arch = gguf.MODEL_ARCH.GRANITE_HYBRID
    if raw["model_type"] == "falcon_h1":
        arch = gguf.MODEL_ARCH.FALCON_H1
    names = gguf.get_tensor_name_map(arch, raw["num_hidden_layers"])
    found: dict[str, _Source] = {}
    for tensor, weight in tensors.items():
        layer = tensor.split(".")[2] if ".layers." in tensor else ""
        blk = f"blk.{layer}"
        shared = "" if not raw.get("num_local_experts") else "_shexp"
        halves = {
            "shared_mlp.input_linear.weight": (f"ffn_gate{shared}", f"ffn_up{shared}"),
            "block_sparse_moe.input_linear.weight": ("ffn_gate_exps", "ffn_up_exps"),
        }
        stacked = next((both for end, both in halves.items() if tensor.endswith(end)), None)
        if stacked is not None:
            size = weight.shape[-2] // 2
            experts = (slice(None),) * (weight.ndim - 2)
            for name, rows in zip(stacked, (slice(size), slice(size, None)), strict=True):
                taken = (*experts, rows)
                found[f"{blk}.{name}.weight"] = _Source(tensor, np.ones(1, np.float32), taken)
            continue
        name = names.get_name(tensor.replace("dt_bias", "dt_proj.bias"), (".weight", ".bias"))
        if tensor.endswith("shared_mlp.output_linear.weight"):
            name = f"{blk}.ffn_down{shared}.weight"
        assert name is not None, tensor
        found[name] = _Source(tensor, _factors(raw, tensor))
    return found


def _factors(raw: Mapping[str, Any], tensor: str) -> Single:
    """Return the factor of each row, or of all rows, of a tensor: multipliers of Falcon-H1."""
    if raw["model_type"] != "falcon_h1":
        return np.ones(1, np.float32)
    gate, down = raw["mlp_multipliers"]
    attention = raw["attention_in_multiplier"]
    ends = {
        "gate_proj.weight": gate,
        "down_proj.weight": down,
        "k_proj.weight": raw["key_multiplier"] * attention,
        "q_proj.weight": attention,
        "v_proj.weight": attention,
        "o_proj.weight": raw["attention_out_multiplier"],
        "out_proj.weight": raw["ssm_out_multiplier"],
        "lm_head.weight": raw["lm_head_multiplier"],
        "embed_tokens.weight": raw["embedding_multiplier"],
    }
    if not tensor.endswith("mamba.in_proj.weight"):
        factor = next((each for end, each in ends.items() if tensor.endswith(end)), 1.0)
        return np.full(1, factor, np.float32)
    keys = raw["mamba_n_groups"] * raw["mamba_d_state"]
    sizes = (raw["mamba_d_ssm"], raw["mamba_d_ssm"], keys, keys, raw["mamba_n_heads"])
    return raw["ssm_in_multiplier"] * np.repeat(np.float32(raw["ssm_multipliers"]), sizes)


def _transform(name: str, raw: Mapping[str, Any], weight: Single) -> Single:
    """Return a tensor as the file has it."""
    if name.endswith("ssm_a"):
        return -np.exp(weight)[:, None]
    if name.endswith("ssm_d"):
        return weight[:, None]
    if name.endswith("ssm_conv1d.weight"):
        return weight[:, 0]
    if name.endswith("ssm_norm.weight"):
        return weight.reshape(raw["mamba_n_groups"], -1)
    heads = _permuted_heads(name, raw)
    return reorder(weight, heads) if heads else weight


def _undo(name: str, raw: Mapping[str, Any], weight: Single) -> Single:
    """Invert :func:`_transform`, but for the shape."""
    if name.endswith("ssm_a"):
        return np.log(-weight)
    heads = _permuted_heads(name, raw)
    if not heads:
        return weight
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _permuted_heads(name: str, raw: Mapping[str, Any]) -> int:
    """Return the number of heads whose rows are permuted in the file; 0: none are."""
    if raw["model_type"] == "falcon_h1":
        return 0
    heads = {"attn_q.weight": "num_attention_heads", "attn_k.weight": "num_key_value_heads"}
    key = next((key for end, key in heads.items() if name.endswith(end)), None)
    return 0 if key is None else raw[key]


def _write_keys(writer: gguf.GGUFWriter, raw: Mapping[str, Any]) -> None:
    """Write the keys that the converter writes."""
    is_falcon = raw["model_type"] == "falcon_h1"
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(_feed_forward_length(raw))
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(raw["rope_parameters"]["rope_theta"])
    writer.add_ssm_conv_kernel(raw["mamba_d_conv"])
    writer.add_ssm_state_size(raw["mamba_d_state"])
    writer.add_ssm_group_count(raw["mamba_n_groups"])
    writer.add_ssm_inner_size(raw["mamba_n_heads"] * raw["mamba_d_head"])
    writer.add_ssm_time_step_rank(raw["mamba_n_heads"])
    kv_heads = raw["num_key_value_heads"]
    if is_falcon:
        writer.add_head_count_kv(kv_heads)
        writer.add_key_length(raw["head_dim"])
        writer.add_value_length(raw["head_dim"])
        return
    writer.add_head_count_kv([kv_heads if each else 0 for each in _attention_layers(raw)])
    size = raw["hidden_size"] // raw["num_attention_heads"]
    if raw["model_type"] == "bamba":
        writer.add_rope_dimension_count(size // 2)
        writer.add_rope_scaling_finetuned(True)
        return
    writer.add_rope_dimension_count(size)
    writer.add_rope_scaling_finetuned(raw["position_embedding_type"] == "rope")
    writer.add_attention_scale(raw["attention_multiplier"])
    writer.add_embedding_scale(raw["embedding_multiplier"])
    writer.add_residual_scale(raw["residual_multiplier"])
    writer.add_logit_scale(raw["logits_scaling"])
    writer.add_expert_shared_feed_forward_length(raw["shared_intermediate_size"])
    if raw["num_local_experts"]:
        writer.add_expert_count(raw["num_local_experts"])
        writer.add_expert_used_count(raw["num_experts_per_tok"])


def _feed_forward_length(raw: Mapping[str, Any]) -> int:
    is_dense = raw.get("num_local_experts") == 0
    size: int = raw["shared_intermediate_size" if is_dense else "intermediate_size"]
    return size


def _attention_layers(raw: Mapping[str, Any]) -> list[bool]:
    if raw["model_type"] == "bamba":
        layers = raw["attn_layer_indices"]
        return [layer in layers for layer in range(raw["num_hidden_layers"])]
    return [kind == "full_attention" for kind in raw["layer_types"]]
