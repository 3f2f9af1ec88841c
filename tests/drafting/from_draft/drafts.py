"""Draft models for tests: checkpoints of the tiny target's weights with noise."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafting.helpers import CHECKPOINTS
from oracle import DenseModel
from pronk.models.loader import read_config
from tiny_models import tiny_module


@cache
def draft_folder(noise: float = 0.3, *, context: int = 4096) -> str:
    """Return a checkpoint of :func:`tiny_models.tiny_module` with noise of ``noise`` standard
    deviations.
    """
    folder = CHECKPOINTS / f"draft-{noise}-{context}"
    write_checkpoint(folder, tiny_module(), noise=noise, context=context)
    return str(folder)


def write_checkpoint(
    folder: Path, decoder: DenseModel, *, noise: float = 0.0, context: int = 4096
) -> None:
    """Write the weights of ``decoder`` plus noise as a Hugging Face Llama."""
    folder.mkdir(parents=True, exist_ok=True)
    c = decoder.config
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, Tensor] = {
        "model.embed_tokens.weight": decoder.embedding,
        "model.norm.weight": decoder.norm.weight,
        "lm_head.weight": decoder.head.weight,
    }
    for i, layer in enumerate(decoder.layers):
        q, k, v = layer.qkv.weight.split(c.qkv_sizes)
        gate, up = layer.up.weight.chunk(2)
        parts = {
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.out.weight,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down.weight,
            "input_layernorm": layer.attention_norm.weight,
            "post_attention_layernorm": layer.mlp_norm.weight,
        }
        tensors |= {f"model.layers.{i}.{name}.weight": tensor for name, tensor in parts.items()}
    disturbed = {
        name: (each + noise * each.std() * torch.randn(each.shape, generator=generator))
        .float()
        .contiguous()
        for name, each in tensors.items()
    }
    save_file(disturbed, folder / "model.safetensors")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": c.norm_eps,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))


def read_checkpoint(folder: Path) -> DenseModel:
    """Return the oracle with the weights of a folder that :func:`write_checkpoint` has written."""
    tensors = load_file(folder / "model.safetensors")
    model = DenseModel(read_config(folder))
    found = {
        "embedding": tensors["model.embed_tokens.weight"],
        "norm.weight": tensors["model.norm.weight"],
        "head.weight": tensors["lm_head.weight"],
    }
    names = {
        "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "out": ["self_attn.o_proj"],
        "up": ["mlp.gate_proj", "mlp.up_proj"],
        "down": ["mlp.down_proj"],
        "attention_norm": ["input_layernorm"],
        "mlp_norm": ["post_attention_layernorm"],
    }
    for layer in range(model.config.num_layers):
        for name, parts in names.items():
            weights = [tensors[f"model.layers.{layer}.{part}.weight"] for part in parts]
            found[f"layers.{layer}.{name}.weight"] = torch.cat(weights)
    model.load_state_dict(found)
    return model


def spec(**options: object) -> str:
    """Return the specification of a draft model."""
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    return f"draft_model(model={draft_folder()!r}{given})"


def specs() -> dict[str, str]:
    """Return the specifications of the engine's drafters with a draft model, for tests of all
    drafters.
    """
    return {
        "draft_model": spec(num_tokens=4),
        "threshold": f"threshold({spec()})",
    }
