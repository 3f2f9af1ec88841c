"""Keys of ``config.json``: values of absent keys, and keys that turn on unsupported computations."""

from __future__ import annotations

from typing import Any

__all__ = ["DEFAULTS", "MULTIMODAL", "REFUSED", "UNSUPPORTED_KEYS"]

# Families whose config has that of a language model as ``text_config``, with the default of its ``model_type``.
MULTIMODAL = {"gemma3": "gemma3_text", "mistral3": "mistral"}

_RECURRENT = "layers with a recurrent state are not supported (docs/families.md); use a model with attention, or LFM2"
_LATENT = "multi-head latent attention is not supported; use a model with grouped heads, such as Qwen3 or Qwen3-MoE"
_OTHER_MIXTURE = "are not supported; use Mixtral, Qwen3-MoE, gpt-oss or Granite MoE"
# Families that are close to a supported one, or asked for often: the reason, and what to use.
REFUSED = {
    "lfm2_moe": "short convolutions with mixtures of experts are not supported; use a dense LFM2",
    "lfm2_vl": "images are not supported; use the text model LFM2",
    **dict.fromkeys("deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite kimi_k2 minicpm3 mistral4".split(), _LATENT),
    **dict.fromkeys("llama4 llama4_text".split(), f"mixtures with a shared expert {_OTHER_MIXTURE}"),
    **dict.fromkeys("dots1 glm4_moe minimax_m2 qwen2_moe".split(), f"these mixtures of experts {_OTHER_MIXTURE}"),
    **dict.fromkeys(
        "gemma3n gemma3n_text gemma4 gemma4_text".split(),
        "embeddings per layer and shared keys are not supported; use Gemma 3",
    ),
    **dict.fromkeys(
        "bamba falcon_h1 falcon_mamba jamba kimi_linear mamba mamba2 minimax nemotron_h qwen3_5 qwen3_5_moe "
        "qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma rwkv zamba zamba2".split(),
        _RECURRENT,
    ),
}

# Values of keys that config.json lacks, by family, as in transformers. A key with the value null has another default:
# that of the call which reads the key.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {
        "max_position_embeddings": 8192,
        "head_dim": 256,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "head_dim": 256,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
    "lfm2": {
        "block_ffn_dim_multiplier": 1.0,
        "intermediate_size": 12288,
        "max_position_embeddings": 128000,
        "num_key_value_heads": 8,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "ministral3": {
        "max_position_embeddings": 262144,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "olmo2": {"rms_norm_eps": 1e-5},
    "olmo3": {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096},
    "phi3": {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "smollm3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "max_position_embeddings": 131072,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
    },
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "mixtral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
    },
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
}
DEFAULTS["mimo"] = DEFAULTS["qwen2"]

# Keys that turn on computations. A family whose reader does not read such a key refuses a value other than null, 0 or
# false: no family implements most of them, and others belong to some families only.
UNSUPPORTED_KEYS = (
    "add_cross_attention alibi attention_chunk_size attention_multiplier attn_logit_softcapping clip_qkv "
    "embedding_multiplier final_logit_softcapping is_encoder_decoder logit_scale logits_scaling no_rope_layers "
    "num_experts num_local_experts query_pre_attn_scalar residual_multiplier scale_attn_by_inverse_layer_idx "
    "use_bidirectional_attention"
).split()
