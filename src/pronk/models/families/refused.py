"""Families that pronk refuses by name, with the reason and a family to use instead.

A config of another unknown family gets a general error.
"""

from __future__ import annotations

from pronk.models.family import RefusedFamily

_RECURRENT = """
falcon_mamba jamba kimi_linear mamba mamba2 minimax recurrent_gemma rwkv
zamba zamba2
"""
_LATENT_ATTENTION = "deepseek_v32 kimi_k2 minicpm3 mistral4"
_ENCODERS = """
albert bert camembert deberta deberta_v2 distilbert electra eurobert gte_modernbert jina_bert
modernbert mpnet new nomic_bert roberta xlm_roberta xlm_roberta_xl
"""
_MIXTURES = """
afmoe bailing_hybrid dots1 ernie4_5_moe exaone_moe flex_olmo hunyuan_v1_moe minimax_m2 olmoe
"""
_USE_MIXTURE = "use Mixtral, Qwen3-MoE, gpt-oss, GLM-4.5 or Granite MoE"


def _refuse(names: str, reason: str, remedy: str) -> tuple[RefusedFamily, ...]:
    return tuple(RefusedFamily(name, f"{reason}; {remedy}") for name in names.split())


FAMILIES = (
    *_refuse(
        _RECURRENT,
        "layers with a recurrent state of this kind are not supported (docs/families.md)",
        "use a model with attention, Qwen3.5 or LFM2",
    ),
    *_refuse(
        _ENCODERS,
        "encoders are not supported",
        "use a decoder such as Qwen3-Embedding or Qwen3-Reranker",
    ),
    *_refuse(
        _LATENT_ATTENTION,
        "latent attention of this kind is not supported",
        "use GLM-4.7-Flash, DeepSeek-V2-Lite or Moonlight",
    ),
    *_refuse(
        "llama4 llama4_text",
        "attention in chunks and a router that scales the inputs of experts are not supported",
        _USE_MIXTURE,
    ),
    *_refuse(
        "phimoe",
        "a router that draws its experts one after the other is not supported",
        _USE_MIXTURE,
    ),
    *_refuse(
        _MIXTURES,
        "this mixture of experts has no reader of its config yet",
        _USE_MIXTURE,
    ),
    *_refuse(
        "nemotron",
        "LayerNorm with RoPE is not supported",
        "use Nemotron-H or Nemotron 3",
    ),
    *_refuse(
        "lfm2_vl",
        "images are not supported",
        "use the text model LFM2",
    ),
    *_refuse(
        "gemma3n gemma3n_text",
        "the layers of Gemma 3n are not supported",
        "use Gemma 4",
    ),
    *_refuse(
        "gemma4_assistant",
        "this model drafts for a Gemma 4, and generates no text alone",
        "use the Gemma 4 with drafter=\"gemma4_assistant(model='…')\"",
    ),
)
