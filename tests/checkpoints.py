"""Small random checkpoints written by transformers, with a matching tokenizer.

Weights, norm gains and biases are far larger than at the start of a training run. Otherwise all
logits are almost equal and a comparison of logits shows nothing.
"""

import json
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pronk.base.arrays import Array
from pronk.testing import byte_tokenizer, portable_normal

MakeCheckpoint = Callable[..., Path]

VOCAB = 300

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}

_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
# Rotations and query scaling of Ministral 3.
_GROWING = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.4,
}

_GRANITE = {"attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 0.7}
# A dense Granite 4.0, under the name of the hybrid family.
_DENSE_HYBRID = {
    "shared_intermediate_size": 80,
    "num_local_experts": 0,
    "layer_types": ["full_attention"] * 3,
    "position_embedding_type": "rope",
    "mamba_n_heads": 4,
}

# Three layers of Gated DeltaNet, then one of gated attention.
_RECURRENT = _COMMON | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}
_SECTIONS = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
_QWEN3_5 = _RECURRENT | {"rope_parameters": _RECURRENT["rope_parameters"] | _SECTIONS}
_SHARED_EXPERT = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}

# A dense layer, then two with experts, of which two are shared.
_LATENT = _COMMON | {
    "num_key_value_heads": 6,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
# Changes of a Gemma 4: experts in place of inputs of layers, and values that are keys.
GEMMA4_EXPERTS: dict[str, Any] = {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
}
# Mamba 2: two groups of two heads, whose states have 8 by 16 numbers.
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_HYBRID = _COMMON | MAMBA | {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
# Multipliers of Falcon-H1, none of which is 1.
_MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 1.4,
    "lm_head_multiplier": 0.8,
    "mlp_multipliers": [0.9, 1.2],
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.1,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [1.2, 0.8, 1.1, 0.9, 0.7],
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.9,
}

_DEFAULTS: dict[str, dict[str, Any]] = {
    "bamba": _HYBRID | {"attn_layer_indices": [1]},
    "falcon_h1": _HYBRID | _MULTIPLIERS | {"head_dim": 8, "mamba_d_ssm": 64},
    "llama": _COMMON,
    "mistral": _COMMON | {"sliding_window": None},
    "qwen2": _COMMON,
    "qwen3": _COMMON | {"head_dim": 16},
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5 | _SHARED_EXPERT,
    "qwen3_next": _RECURRENT | _SHARED_EXPERT,
    "gemma2": _COMMON | {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8},
    "gemma3_text": _COMMON
    | {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8, "layer_types": _MIXED},
    "gemma4_text": _COMMON
    | {
        "vocab_size_per_layer_input": VOCAB,
        "num_hidden_layers": 6,
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 30.0,
    },
    "granite": _COMMON | _GRANITE,
    "granite_swa": _COMMON
    | _GRANITE
    | {
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "layer_rope_theta": [0.0, 10000.0, 500.0],
        "tie_word_embeddings": False,
    },
    "granitemoehybrid": _COMMON | _GRANITE | _DENSE_HYBRID,
    "granitemoe": _COMMON | _GRANITE | {"num_local_experts": 6},
    "gpt_oss": _COMMON
    | {
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": 8,
        "layer_types": _MIXED,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    },
    "mixtral": _COMMON | {"num_local_experts": 5, "sliding_window": None},
    "qwen3_moe": _COMMON
    | {
        "head_dim": 16,
        "num_experts": 9,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "ministral3": _COMMON | {"head_dim": 16, "rope_parameters": _GROWING},
    "olmo2": _COMMON,
    "olmo3": _COMMON | {"sliding_window": 8, "layer_types": _MIXED},
    "phi3": _COMMON,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT | {"n_group": 4, "topk_group": 2},
    "glm4_moe_lite": {
        key: value for key, value in _LATENT.items() if key != "first_k_dense_replace"
    },
    "qwen2_moe": _COMMON
    | {
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "glm4": _COMMON | {"head_dim": 16, "rms_norm_eps": 1e-5},
    "glm4_moe": _COMMON
    | {
        "head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 1.8,
    },
    "nemotron_h": _COMMON
    | {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "head_dim": 16,
        "layers_block_type": [
            "linear_attention",
            "moe",
            "full_attention",
            "mlp",
            "linear_attention",
            "moe",
        ],
        "intermediate_size": 48,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 24,
        "routed_scaling_factor": 2.5,
    },
    "lfm2_moe": _COMMON
    | {
        "layer_types": ["conv", "full_attention", "conv"],
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "num_dense_layers": 1,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 1.3,
    },
    "lfm3": _COMMON
    | {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
    },
    "lfm2": _COMMON | {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
    "smollm3": _COMMON | {"no_rope_layers": [1, 0, 1]},
    "gpt2": {
        "vocab_size": VOCAB,
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 256,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}


# The smallest image encoder.
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
}
# Multimodal families.
_DEFAULTS["gemma3"] = {
    "text_config": {"model_type": "gemma3_text", **_DEFAULTS["gemma3_text"]},
    "vision_config": _VISION,
    "mm_tokens_per_image": 1,
    "eos_token_id": [0, 1],
}
_DEFAULTS["mistral3"] = {
    "text_config": {"model_type": "ministral3", **_DEFAULTS["ministral3"]},
    "vision_config": _VISION,
}


FAMILIES = tuple(_DEFAULTS)


def _auto_class(family: str) -> Any:
    """Return the class of transformers that makes and loads a family."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if family in ("gemma3", "mistral3") else AutoModelForCausalLM


def load_with_transformers(folder: Path, dtype: torch.dtype) -> Any:
    """Return the model of a folder in transformers.

    Later calls return the same object; copy it before a change.
    """
    written = tuple(sorted((file.name, file.stat().st_mtime_ns) for file in folder.iterdir()))
    return _load_with_transformers(folder, dtype, written)


@lru_cache(maxsize=2)
def _load_with_transformers(
    folder: Path, dtype: torch.dtype, written: tuple[tuple[str, int], ...]
) -> Any:
    family = json.loads((folder / "config.json").read_text())["model_type"]
    return (
        _auto_class(family).from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    )


def make_checkpoint(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    save_dtype: torch.dtype = torch.float32,
    shard_size: str = "5GB",
    tokenizer: bool = True,
    portable: bool = False,
    **overrides: Any,
) -> Path:
    """Write a random model of a family into a folder; ``overrides`` are values of its config.

    With ``portable``, the weights are the same on every machine (:class:`PortableDraws`).
    """
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **(_DEFAULTS[family] | overrides))
    torch.manual_seed(seed)
    model = _auto_class(family).from_config(config, dtype=torch.float32)
    randomize(model, PortableDraws(seed) if portable else Draws(seed))
    model.to(save_dtype).save_pretrained(folder, max_shard_size=shard_size)
    if tokenizer:
        byte_tokenizer(config.get_text_config().vocab_size).save(str(folder / "tokenizer.json"))
    return folder


class Draws:
    """Random numbers of torch, whose last bits depend on the processor."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, tensor: torch.Tensor, std: float) -> None:
        """Fill a tensor with numbers of mean 0 and standard deviation ``std``."""
        tensor.normal_(0.0, std, generator=self._generator)

    def uniform(self, tensor: torch.Tensor, low: float, high: float) -> None:
        """Fill a tensor with numbers of an interval."""
        tensor.uniform_(low, high, generator=self._generator)


class PortableDraws(Draws):
    """Random numbers that are the same on every machine: sums of integers, times a factor."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._bits = np.random.PCG64(seed)

    def normal(self, tensor: torch.Tensor, std: float) -> None:
        """Fill a tensor with the numbers of :func:`pronk.testing.portable_normal`."""
        values = portable_normal(self._bits, tensor.numel(), std)
        tensor.copy_(torch.from_numpy(values).view(tensor.shape))

    def uniform(self, tensor: torch.Tensor, low: float, high: float) -> None:
        words = self._bits.random_raw(tensor.numel()) >> np.uint64(32)
        values = low + words.astype(np.float64) * ((high - low) * 2.0**-32)
        tensor.copy_(torch.from_numpy(values.astype(np.float32)).view(tensor.shape))


@torch.no_grad()
def randomize(model: torch.nn.Module, draws: Draws | None = None) -> None:
    """Replace the weights of a model by random ones.

    A product with a matrix keeps the scale of its input; gains are around 1, and biases far from 0.
    The states of some recurrent layers forget a token within one step, those of others keep it for
    more than 200.
    """
    draws = draws or Draws()
    family = model.config.model_type
    recurrent = any(name.endswith("A_log") for name, _ in model.named_parameters())
    # gains are stored as gain - 1
    offset = family.startswith(("gemma2", "gemma3", "qwen3_5", "qwen3_next"))
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            # The first size of a tensor with the matrices of all experts is their number.
            inputs = parameter.shape[-1] if recurrent else min(parameter.shape[-2:])
            # Norms of small outputs of a recurrence magnify errors of rounding.
            gain = 0.7 if recurrent else 1.2
            std = (
                0.7 if "emb" in name or "wte" in name or "wpe" in name else gain / math.sqrt(inputs)
            )
            draws.normal(parameter, std)
        elif name.endswith("A_log"):
            draws.uniform(parameter, -0.5, 2.0)
        elif name.endswith("dt_bias"):
            # In prompts, transformers raises small steps of Nemotron-H to a limit.
            low = -2.0 if family == "nemotron_h" else -5.0
            draws.uniform(parameter, low, 1.0)
        elif name.endswith("norm.weight") and offset and "linear_attn" not in name:
            draws.uniform(parameter, -0.5, 0.5)
        elif name.endswith("bias"):
            draws.normal(parameter, 0.3)
        else:
            draws.uniform(parameter, 0.5, 1.5)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            draws.normal(buffer, 0.2)
    if family.startswith("gemma4"):
        soften_gemma4(model, draws)


def soften_gemma4(model: torch.nn.Module, draws: Draws) -> None:
    """Reduce random weights of a Gemma 4, and draw the factors of its layers.

    Attention scores have no other scale than the gains of queries, and large scores magnify errors
    of rounding.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("q_norm.weight"):
            parameter.mul_(0.25)
        elif parameter.dim() > 1:
            parameter.mul_(0.3 if "embed" in name else 0.6)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            draws.uniform(buffer, 0.5, 0.9)


def transformers_logits(
    folder: Path, tokens: list[int], dtype: torch.dtype = torch.float32
) -> Array:
    """Return logits, float32 ``[len(tokens), vocab]``, of transformers' own implementation."""
    model = load_with_transformers(folder, dtype)
    with torch.no_grad():
        logits: Array = model(torch.tensor([tokens])).logits[0].float().numpy()
    return logits


def transformers_greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Return ``count`` greedy tokens of transformers, computed in float32 without a KV cache."""
    model = load_with_transformers(folder, torch.float32)
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def transformers_cached_greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Return ``count`` greedy tokens of transformers, decoded one by one with its cache."""
    model = load_with_transformers(folder, torch.float32)
    tokens = list(prompt)
    rows = torch.tensor([tokens])
    cache = None
    with torch.no_grad():
        for _ in range(count):
            found = model(rows, cache=cache, use_cache=True)
            cache = found.cache
            rows = found.logits[:, -1:].argmax(-1)
            tokens.append(int(rows))
    return tokens[len(prompt) :]


def transformers_choices(folder: Path, prompt: list[int], output: list[int]) -> list[int]:
    """Return the greedy tokens of transformers after each beginning of ``output``, in one pass.

    They are equal to ``output`` if and only if ``output`` is the greedy output of transformers.
    """
    logits = transformers_logits(folder, [*prompt, *output[:-1]])
    return [int(token) for token in logits[len(prompt) - 1 :].argmax(axis=-1)]


def transformers_hidden(
    folder: Path, tokens: list[int], dtype: torch.dtype = torch.float32
) -> Array:
    """Return ``last_hidden_state`` of transformers, float32 ``[len(tokens), hidden]``."""
    model = load_with_transformers(folder, dtype)
    with torch.no_grad():
        states: Array = (
            model.base_model(torch.tensor([tokens])).last_hidden_state[0].float().numpy()
        )
    return states
