"""Write what was trained: a decoder as a Hugging Face checkpoint that transformers loads as ``LlamaForCausalLM``.

A drafter of another kind is a folder of its own layout (:mod:`pronk.drafters.from_target.modules.files`).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from pronk.architecture.config import ModelConfig
from pronk.files.atomic import replace_folder, write_json, writing
from pronk.models.decoder import Decoder

__all__ = ["export_drafter", "export_model", "hugging_face_config", "hugging_face_tensors"]

_TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json chat_template.jinja "
    "tokenizer.model vocab.json merges.txt"
).split()
_LAYER_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "out.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "down.weight": "mlp.down_proj.weight",
}


def export_model(
    decoder: Decoder,
    tokenizer_folder: Path,
    folder: Path,
    card: str,
    documents: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Replace ``folder`` by the checkpoint, in bfloat16; at no time is it half written.

    Args:
        decoder: a Llama-architecture decoder with plain, tied weights.
        tokenizer_folder: has the tokenizer's files.
        folder: the checkpoint; overwritten when it exists.
        card: text of ``README.md``.
        documents: more JSON files, by name.
    """
    with writing(folder, "the model", SafetensorError), replace_folder(folder) as partial:
        save_file(hugging_face_tensors(decoder), partial / "model.safetensors", metadata={"format": "pt"})
        config = hugging_face_config(decoder.config)
        write_json(partial / "config.json", config, indent=2)
        special = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
        write_json(partial / "generation_config.json", {**special, "do_sample": False}, indent=2)
        for name in _TOKENIZER_FILES:
            if (tokenizer_folder / name).is_file():
                shutil.copyfile(tokenizer_folder / name, partial / name)
        for name, document in (documents or {}).items():
            write_json(partial / name, document, indent=2)
        (partial / "README.md").write_text(card, encoding="utf-8")


def export_drafter(folder: Path, module: nn.Module, document: Mapping[str, Any], card: str) -> None:
    """Replace ``folder`` by a drafter that :mod:`pronk.drafters.from_target.modules.files` reads, in bfloat16.

    Args:
        folder: overwritten when it exists; at no time is it half written.
        module: its weights.
        document: what ``drafter.json`` is to say.
        card: text of ``README.md``.
    """
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in module.state_dict().items()
    }
    with writing(folder, "the model", SafetensorError), replace_folder(folder) as partial:
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        write_json(partial / "drafter.json", document, indent=2)
        (partial / "README.md").write_text(card, encoding="utf-8")


def hugging_face_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """Weights under their Hugging Face names, bfloat16, with the fused projections split."""
    tensors: dict[str, Tensor] = {
        "model.embed_tokens.weight": decoder.embedding,
        "model.norm.weight": decoder.get_parameter("norm.weight"),
    }
    q_size, k_size, _ = decoder.config.qkv_sizes
    for index, layer in enumerate(decoder.layers):
        prefix = f"model.layers.{index}."
        for ours, theirs in _LAYER_NAMES.items():
            tensors[prefix + theirs] = layer.get_parameter(ours)
        q, k, v = layer.get_parameter("qkv.weight").tensor_split((q_size, q_size + k_size))
        gate, up = layer.get_parameter("up.weight").chunk(2)
        parts = {"self_attn.q": q, "self_attn.k": k, "self_attn.v": v, "mlp.gate": gate, "mlp.up": up}
        tensors |= {f"{prefix}{name}_proj.weight": part for name, part in parts.items()}
    return {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}


def hugging_face_config(config: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` document of a Llama-architecture decoder."""
    theta = 10000.0 if config.rope is None else config.rope.theta
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tied,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids),
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }
