"""Draft models for tests: the tiny target's own weights, more or less disturbed, as checkpoints on disk."""

import atexit
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from pronk.models.decoder import Decoder
from tiny_models import tiny_decoder

_PLACE = TemporaryDirectory()
atexit.register(_PLACE.cleanup)


@cache
def draft_folder(noise: float = 0.3, *, context: int = 4096) -> str:
    """A checkpoint of :func:`models.tiny_decoder` whose weights are off by ``noise`` of their size."""
    folder = Path(_PLACE.name) / f"draft-{noise}-{context}"
    write_checkpoint(folder, tiny_decoder(packed=False), noise=noise, context=context)
    return str(folder)


def write_checkpoint(folder: Path, decoder: Decoder, *, noise: float = 0.0, context: int = 4096) -> None:
    """A decoder of plain weights in the Hugging Face layout of a Llama."""
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
        name: (each + noise * each.std() * torch.randn(each.shape, generator=generator)).float().contiguous()
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


def specs() -> dict[str, str]:
    """How tests make the drafters that need a draft model; wrapped ones are composed of several."""
    model = f"draft_model(model={draft_folder()!r})"
    return {
        "draft_model": f"draft_model(model={draft_folder()!r}, num_tokens=4)",
        "threshold": f"threshold({model})",
        "staged": f"staged({model}, prompt_lookup(min_ngram=1))",
        "cape": f"cape(threshold({model}))",
        "beam": f"beam({model}, width=3)",
    }
