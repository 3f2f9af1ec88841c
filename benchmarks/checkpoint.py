"""Write a checkpoint of random weights in a chosen shape, to time the engine at real cost without a download.

    python benchmarks/checkpoint.py FOLDER --tokenizer src/pronk/bundled/pronk-tiny

Its text is noise; its cost per pass is that of a real model of that shape (default: 1.1 B parameters, TinyLlama's).
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCAB, CONTEXT = 2048, 5632, 32, 4, 32000, 2048


def write_random(folder: Path, tokenizer: Path, *, layers: int = 22, seed: int = 0) -> None:
    """A Llama checkpoint in bfloat16, with the tokenizer of another model whose vocabulary is no larger."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)

    tensors = {"model.embed_tokens.weight": weight(VOCAB, HIDDEN), "lm_head.weight": weight(VOCAB, HIDDEN)}
    tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    for layer in range(layers):
        for name, (rows, columns) in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = weight(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder / file)


def main() -> None:
    """Read the arguments and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--layers", type=int, default=22)
    args = parser.parse_args()
    write_random(args.folder, args.tokenizer, layers=args.layers)


if __name__ == "__main__":
    main()
