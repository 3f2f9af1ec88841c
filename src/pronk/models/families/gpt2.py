"""GPT-2: LayerNorm, learned position embeddings, and an MLP without a gate."""

from __future__ import annotations

import re

from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.rope import refuse_config
from pronk.models.config_reader import ConfigReader
from pronk.models.family import Family, TensorNames


def _parse(keys: ConfigReader) -> ModelConfig:
    if not keys.get("scale_attn_weights", True):
        refuse_config("scale_attn_weights = false is not supported")
    hidden = keys.integer("n_embd")
    heads = keys.integer("n_head")
    layers = keys.layers("n_layer")
    if hidden % heads:
        refuse_config(f"{heads} heads do not divide the hidden size {hidden}")
    bos, eos = keys.special_ids()
    return ModelConfig(
        family=keys.family,
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.integer("n_inner", 4 * hidden),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        context=keys.integer("n_positions", 1024),
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        norm="layer",
        activation=keys.activation("activation_function", "gelu_new"),
        gated=False,
        windows=(None,) * layers,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=keys.flag("tie_word_embeddings", default=True),
        bos_id=bos,
        eos_ids=eos,
        dtype=keys.dtype(),
    )


FAMILIES = (
    Family(
        "gpt2",
        _parse,
        TensorNames(
            prefix="transformer.",
            layers="h",
            layer={
                "attention_norm": ("ln_1",),
                "qkv": ("attn.c_attn",),
                "out": ("attn.c_proj",),
                "mlp_norm": ("ln_2",),
                "up": ("mlp.c_fc",),
                "down": ("mlp.c_proj",),
            },
            embedding="wte",
            norm="ln_f",
            positions="wpe",
            transposed=True,
            ignored=re.compile(r"h\.\d+\.attn\.(masked_)?bias"),
        ),
    ),
)
