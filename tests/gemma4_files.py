"""GGUF files of Gemma 4 as llama.cpp's converter writes them.

Source: ``conversion/gemma.py`` of llama.cpp, and the tensor names of its package ``gguf``.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from gguf_files import decode, encode, finish, kind_of, write_bytes_bpe

Single = NDArray[np.float32]

# Sizes whose matrices have whole blocks of all types in each row; of tensors with experts, too.
BLOCKS: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "head_dim": 64,
    "global_head_dim": 128,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 256,
    "moe_intermediate_size": 256,
}


def write_gguf(
    folder: Path,
    path: Path,
    kinds: str | Mapping[str, str] = "F32",
    *,
    twin: Path | None = None,
    extra: bool = False,
) -> Path:
    """Write a checkpoint of the family ``gemma4_text`` as a GGUF file.

    Args:
        folder: checkpoint in one safetensors file.
        path: output file.
        kinds: type of all matrices, or types by suffixes of names with ``""`` as the default.
        twin: output folder for a checkpoint with the weights that a reader of the file gets.
        extra: add keys and values of layers that read those of other layers, as published files
            have them.
    """
    raw = json.loads((folder / "config.json").read_text())
    tensors: dict[str, Single] = load_file(folder / "model.safetensors")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, raw["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, "gemma4")
    _write_keys(writer, raw)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    write_bytes_bpe(writer, tokenizer, "gpt-2")
    written = dict[str, Single]()
    for seed, (name, weight) in enumerate(sorted(tensors.items())):
        theirs = _name(name, names)
        is_matrix = weight.ndim > 1 and "ffn_gate_inp" not in theirs
        kind = kind_of(theirs, kinds) if is_matrix else "F32"
        rows = weight.reshape(-1, weight.shape[-1]) if weight.ndim > 1 else weight
        stored = encode(kind, rows, seed)
        written[name] = decode(kind, stored).reshape(weight.shape) if is_matrix else weight
        stored = stored.reshape(*weight.shape[:-1], -1)
        raw_dtype = None if kind in ("F32", "F16") else Type[kind]
        writer.add_tensor(theirs, stored, raw_dtype=raw_dtype)
    if extra:
        last = raw["num_hidden_layers"] - 1
        writer.add_tensor(f"blk.{last}.attn_k.weight", np.ones((32, raw["hidden_size"]), "f4"))
        writer.add_tensor(f"blk.{last}.attn_k_norm.weight", np.ones(16, np.float32))
    finish(writer)
    if twin is not None:
        twin.mkdir()
        for name in ("config.json", "tokenizer.json"):
            shutil.copy(folder / name, twin / name)
        save_file(written, twin / "model.safetensors")
    return path


def _name(name: str, names: Any) -> str:
    """Return the name of a tensor in a GGUF file."""
    layer = name.removeprefix("model.layers.").partition(".")[0]
    if name.endswith("router.scale"):
        return f"blk.{layer}.ffn_gate_inp.scale"
    if name.endswith("router.per_expert_scale"):
        return f"blk.{layer}.ffn_down_exps.scale"
    is_bare = name.endswith("layer_scalar") or ".experts." in name
    found: str = names.get_name(f"{name}.weight" if is_bare else name, (".weight",))
    return found


def _write_keys(writer: gguf.GGUFWriter, raw: Mapping[str, Any]) -> None:
    layers = raw["num_hidden_layers"]
    slides = [kind == "sliding_attention" for kind in raw["layer_types"]]
    sizes = {int(layer): own for layer, own in raw["per_layer_config"].items()}
    own = sizes[slides.index(False)]
    full_dim = own["head_dim"]
    shared = raw["num_kv_shared_layers"]
    width = raw["intermediate_size"]
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(layers)
    writer.add_head_count(raw["num_attention_heads"])
    kv_heads = raw["num_key_value_heads"]
    full_heads = own.get("num_key_value_heads", kv_heads)
    writer.add_head_count_kv(
        kv_heads
        if full_heads == kv_heads
        else [kv_heads if each else full_heads for each in slides]
    )
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(raw["rope_parameters"]["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(raw["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(raw["sliding_window"])
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(raw["hidden_size_per_layer_input"] or 0)
    writer.add_key_length(full_dim)
    writer.add_value_length(full_dim)
    writer.add_key_length_swa(raw["head_dim"])
    writer.add_value_length_swa(raw["head_dim"])
    writer.add_rope_dimension_count(full_dim)
    writer.add_rope_dimension_count_swa(raw["head_dim"])
    is_double = raw["use_double_wide_mlp"]
    widths = [width * (1 + (is_double and layer >= layers - shared)) for layer in range(layers)]
    writer.add_feed_forward_length(widths if is_double else width)
    if raw["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(raw["final_logit_softcapping"])
    if raw["enable_moe_block"]:
        writer.add_expert_count(raw["num_experts"])
        writer.add_expert_used_count(raw["top_k_experts"])
        writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
    share = raw["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    rotated = int(full_dim * share / 2)
    divisors = [1.0] * rotated + [1e30] * (full_dim // 2 - rotated)
    writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))


def write_gemma4_bpe(path: Path, tokens: list[str], merges: list[str], kinds: list[int]) -> Path:
    """Write a GGUF file with a tokenizer of Gemma 4 and no weights."""
    writer = gguf.GGUFWriter(path, "gemma4")
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<bos>"))
    writer.add_unk_token_id(tokens.index("<unk>"))
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(True)
    finish(writer)
    return path
