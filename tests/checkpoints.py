"""Small random checkpoints, written by transformers, and a tokenizer that fits them.

The weights are far larger than a training run would start from, norm gains and biases included: otherwise all
logits are almost equal and a comparison of them shows nothing.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

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

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "mistral": _COMMON | {"sliding_window": None},
    "qwen2": _COMMON,
    "qwen3": _COMMON | {"head_dim": 16},
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


def make_checkpoint(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    save_dtype: torch.dtype = torch.float32,
    shard_size: str = "5GB",
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Write a random model of ``family`` into ``folder``; ``overrides`` are config values."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **(_DEFAULTS[family] | overrides))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, seed)
    model.to(save_dtype).save_pretrained(folder, max_shard_size=shard_size)
    if tokenizer:
        byte_tokenizer(config.vocab_size).save(str(folder / "tokenizer.json"))
    return folder


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Weights whose products keep the scale of their input; gains around 1; biases well away from 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            std = 0.7 if "emb" in name or "wte" in name or "wpe" in name else 1.2 * min(parameter.shape) ** -0.5
            parameter.normal_(0.0, std, generator=generator)
        elif name.endswith("bias"):
            parameter.normal_(0.0, 0.3, generator=generator)
        else:
            parameter.uniform_(0.5, 1.5, generator=generator)


def transformers_logits(folder: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The oracle: logits ``[len(tokens), vocab]`` of transformers' own implementation."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def byte_tokenizer(vocab_size: int = VOCAB) -> Tokenizer:
    """A byte-level BPE: id 0 ends a text, 256 bytes, then as many merges as fit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer


_TEXT = [
    "def add(a, b):\n    return a + b\n\n\ndef mean(values):\n    return sum(values) / len(values)\n",
    "The quick brown fox jumps over the lazy dog, and then the dog sleeps in the sun.",
    "for i in range(10):\n    print(i, i * i)\n",
    "Grüße aus Köln — naïve café, 東京と大阪, 🙂🙃",
]
