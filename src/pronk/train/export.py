"""Export of trained decoders as Hugging Face checkpoints, and of drafters in a layout of their own.

transformers loads the checkpoints as ``LlamaForCausalLM``; drafters are read by
:mod:`pronk.drafters.from_target.modules.files`. Weights are bfloat16. The output folder is replaced atomically.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from pronk.architecture.config import ModelConfig
from pronk.files.atomic import convert_write_errors, replace_folder, write_json
from pronk.files.companions import TOKENIZER_FILES, copy_companions
from pronk.quantization.gguf.checkpoint import is_gguf
from pronk.tokenization.tokenizer import Tokenizer
from pronk.train.modules.decoder import DecoderModule

__all__ = ["export_drafter", "export_head", "export_model", "hugging_face_config", "hugging_face_tensors"]

_LAYER_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "out.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "down.weight": "mlp.down_proj.weight",
}


def export_model(
    decoder: DecoderModule,
    tokenizer_of: Path,
    folder: Path,
    card: str,
    documents: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Write ``folder``, replacing its contents, as a checkpoint in the Hugging Face layout.

    Args:
        decoder: decoder of the Llama architecture with unquantized weights.
        tokenizer_of: folder or GGUF file that has the tokenizer.
        folder: folder of the checkpoint.
        card: content of ``README.md``.
        documents: contents of further JSON files, by file name.
    """
    config = hugging_face_config(decoder.config)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    files = {"config.json": config, "generation_config.json": {**special, "do_sample": False}, **(documents or {})}
    _export(folder, hugging_face_tensors(decoder), files, card, tokenizer_of)


def export_drafter(folder: Path, module: nn.Module, document: Mapping[str, Any], card: str) -> None:
    """Write ``module`` to ``folder``, replacing its contents; ``document`` becomes ``drafter.json``."""
    _export(folder, module.state_dict(), {"drafter.json": document}, card)


def export_head(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], card: str) -> None:
    """Write an EAGLE-3 head in the layout speculators; ``config`` becomes ``config.json``."""
    _export(folder, tensors, {"config.json": config}, card)


def _export(
    folder: Path,
    tensors: Mapping[str, Tensor],
    files: Mapping[str, Mapping[str, Any]],
    card: str,
    tokenizer_of: Path | None = None,
) -> None:
    stored = {
        name: tensor.detach().to("cpu", torch.bfloat16 if tensor.is_floating_point() else None).contiguous()
        for name, tensor in tensors.items()
    }
    with convert_write_errors(folder, "the model", SafetensorError), replace_folder(folder) as partial:
        save_file(stored, partial / "model.safetensors", metadata={"format": "pt"})
        if tokenizer_of is not None and is_gguf(tokenizer_of):
            Tokenizer.load(tokenizer_of).save(partial)
        elif tokenizer_of is not None:
            copy_companions(tokenizer_of, partial, TOKENIZER_FILES)
        for name, document in files.items():
            write_json(partial / name, document, indent=2)
        (partial / "README.md").write_text(card, encoding="utf-8")


def hugging_face_tensors(decoder: DecoderModule) -> dict[str, Tensor]:
    """Return the weights under their Hugging Face names, with the fused projections split."""
    tensors: dict[str, Tensor] = {
        "model.embed_tokens.weight": decoder.embedding,
        "model.norm.weight": decoder.get_parameter("norm.weight"),
    }
    if not decoder.config.tied:
        tensors["lm_head.weight"] = decoder.head.get_parameter("weight")
    q_size, k_size, _ = decoder.config.qkv_sizes
    for index, layer in enumerate(decoder.layers):
        prefix = f"model.layers.{index}."
        for ours, theirs in _LAYER_NAMES.items():
            tensors[prefix + theirs] = layer.get_parameter(ours)
        q, k, v = layer.get_parameter("qkv.weight").tensor_split((q_size, q_size + k_size))
        gate, up = layer.get_parameter("up.weight").chunk(2)
        parts = {"self_attn.q": q, "self_attn.k": k, "self_attn.v": v, "mlp.gate": gate, "mlp.up": up}
        tensors |= {f"{prefix}{name}_proj.weight": part for name, part in parts.items()}
    return tensors


def hugging_face_config(config: ModelConfig) -> dict[str, Any]:
    """Return the ``config.json`` of a Llama with the sizes of ``config``."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **config.document_sizes(),
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": 10000.0 if config.rope is None else config.rope.theta,
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
