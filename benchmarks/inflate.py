"""Pad a Llama checkpoint to a large shape: the same texts at the cost of a large model.

    python benchmarks/inflate.py big --layers 24     # 9.7 M model padded to 1.07 B, from pronk-tiny

Some figures in benchmarks/results/ are measured with padded checkpoints. A real model of the same
size is preferable.

- The residual stream is padded with zeros from hidden size d to D. The mean of squares shrinks by d
  / D, so the epsilon of a norm is multiplied by d / D and its gain by the root of d / D. Gains are
  stored in float32, unless D / d is a power of four: then the factor is a power of two, and
  products are exact in 16 bits.
- Added heads, MLP units and layers compute random values whose output matrices are zero. The head
  size does not change, because the scale of the softmax and RoPE depend on the head size.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronk.base.arrays import FLOAT32, Array
from pronk.base.errors import OptionError, PronkError
from pronk.base.files.atomic import convert_write_errors, new_folder, write_json
from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.hub.clone_models import tiny_model
from pronk.checkpoint.tensors import Checkpoint
from pronk.models.families import get_family, parse_config
from pronk.models.loader import parse_dtype, read_config
from pronk.models.shards import ShardEntry, check_output_folder, copy_companions, write_weights
from pronk.models.tensor_plan import CheckpointTensor, plan_tensors

MARK = "pronk_inflated"  # entry of config.json, which the reports of `pronk bench` show
GROUP = 8  # minimum number of query heads per key/value head
SHARD_BYTES = 10**9

# Rows and columns of each module, and the value of its added weights; None means random values.
GAIN = ("hidden", "", 1.0)
MODULES: dict[str, tuple[str, str, float | None]] = {
    "embed_tokens": ("vocab", "hidden", 0.0),
    "lm_head": ("vocab", "hidden", None),
    "norm": GAIN,
    "input_layernorm": GAIN,
    "post_attention_layernorm": GAIN,
    "self_attn.q_proj": ("query", "hidden", None),
    "self_attn.k_proj": ("kv", "hidden", None),
    "self_attn.v_proj": ("kv", "hidden", None),
    "self_attn.o_proj": ("hidden", "query", 0.0),
    "mlp.gate_proj": ("mlp", "hidden", None),
    "mlp.up_proj": ("mlp", "hidden", None),
    "mlp.down_proj": ("hidden", "mlp", 0.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to write, new or empty")
    parser.add_argument("--source", type=Path, default=tiny_model())
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--intermediate", type=int, default=5632, help="width of the gated MLP")
    options = parser.parse_args()
    try:
        count = inflate(
            options.source, options.out, options.hidden, options.layers, options.intermediate
        )
    except PronkError as error:
        sys.exit(f"error: {error}")
    print(f"{options.out}: {count / 1e6:,.1f} M parameters; the size is simulated")


def inflate(source: Path, out: Path, hidden: int, layers: int, intermediate: int) -> int:
    """Write the padded checkpoint to the folder ``out``; return its number of parameters.

    Raises:
        PronkError: the source is not a plain Llama checkpoint, the shape does not hold it, or
            ``out`` is in use.
    """
    small, raw = read_source(source)
    document = grown_config(raw, small, hidden, layers, intermediate)
    weights = LargeWeights(Checkpoint(source), small, parse_config(document))
    entries = [weights.entry(piece) for piece in pieces(weights.big)]
    check_output_folder(out, sum(entry.num_bytes for entry in entries))
    count = sum(math.prod(entry.tensor.shape) for entry in entries)
    with convert_write_errors(out, "the checkpoint"), new_folder(out) as partial:
        write_weights(partial, entries, weights.tensor, SHARD_BYTES, lambda *_: None)
        copy_companions(source, partial)
        write_json(partial / "config.json", document | {MARK: mark(source, small)}, indent=2)
    return count


def read_source(folder: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """Return the config of a Llama checkpoint, parsed and as JSON values.

    Raises:
        OptionError: the folder has no Llama checkpoint, or one that is quantized or padded.
    """
    if (folder / "config.json").is_file():
        small = read_config(folder)
        raw = json.loads((folder / "config.json").read_text())
        if small.family == "llama" and small.quantization is None and MARK not in raw:
            return small, raw
    msg = (
        "source: expected the folder of a Llama checkpoint, neither quantized nor inflated, "
        f"found {folder}"
    )
    raise OptionError(msg)


def grown_config(
    raw: dict[str, Any], small: ModelConfig, hidden: int, layers: int, intermediate: int
) -> dict[str, Any]:
    """Return ``config.json`` of the large model."""
    group = max(GROUP, small.group)
    heads = hidden // small.head_dim
    least = {
        "hidden": small.hidden_size,
        "layers": small.num_layers,
        "intermediate": small.intermediate_size,
    }
    for name, found in (("hidden", hidden), ("layers", layers), ("intermediate", intermediate)):
        if found < least[name]:
            msg = f"{name}: expected at least {least[name]}, the size of the source, found {found}"
            raise OptionError(msg)
    if hidden % (small.head_dim * group) or heads // group < small.num_kv_heads:
        found_heads = f"for {small.num_kv_heads} key/value heads or more"
        msg = (
            f"hidden: expected a multiple of {small.head_dim * group}, with room {found_heads}, "
            f"found {hidden}"
        )
        raise OptionError(msg)
    return raw | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // group,
        "head_dim": small.head_dim,
        "rms_norm_eps": small.norm_eps * small.hidden_size / hidden,
    }


def mark(source: Path, small: ModelConfig) -> dict[str, Any]:
    """Return the entry of ``config.json`` that names the source and its number of parameters."""
    num_parameters = sum(math.prod(piece.shape) for piece in pieces(small))
    return {"source": source.resolve().name, "parameters": num_parameters}


def pieces(config: ModelConfig) -> list[CheckpointTensor]:
    """Return all tensors of a checkpoint."""
    return [piece for part in plan_tensors(config) for piece in part.tensors]


class LargeWeights:
    """Source of the tensors of the large model; equal arguments give equal tensors."""

    def __init__(self, checkpoint: Checkpoint, small: ModelConfig, big: ModelConfig) -> None:
        self.checkpoint = checkpoint
        self.big = big
        self.dtype = parse_dtype("auto", big)
        self.names = get_family(small.family).names
        self.stored = {self.names.canonical(name): name for name in checkpoint}
        self.places = places(small, big)
        # Layer of the source by layer of the large model. The source's layers are spread evenly:
        # 2 layers in 4 are the layers 0 and 3.
        step = max(1, small.num_layers - 1)
        self.layers = {
            index * (big.num_layers - 1) // step: index for index in range(small.num_layers)
        }
        self.shrink = math.sqrt(small.hidden_size / big.hidden_size)
        self.random = np.random.default_rng(0)

    def entry(self, piece: CheckpointTensor) -> ShardEntry:
        """Return the name and dtype of a tensor; gains that 16 bits would round are in float32."""
        prefix = "" if piece.name.startswith(self.names.head) else self.names.prefix
        _, module = module_of(piece.name)
        is_power_of_two = math.frexp(self.shrink)[0] == 0.5
        rounded = MODULES[module] is GAIN and not is_power_of_two
        return ShardEntry(piece, prefix + piece.name, FLOAT32 if rounded else self.dtype)

    def tensor(self, piece: CheckpointTensor) -> Array:
        """Return a tensor of the large model; those of added layers have no source weights."""
        layer, module = module_of(piece.name)
        rows, columns, filling = MODULES[module]
        dtype = self.entry(piece).dtype
        made = np.full(piece.shape, filling or 0.0, dtype)
        if filling is None:
            made[:] = self.random.standard_normal(piece.shape, np.float32) * np.float32(0.02)
        if layer is None or layer in self.layers:
            name = piece.name
            if layer is not None:
                name = re.sub(r"\d+", str(self.layers[layer]), name, count=1)
            source = self.checkpoint.tensor(self.stored[name])
            if MODULES[module] is GAIN:
                source = source.astype(np.float64) * self.shrink
            where = np.ix_(self.places[rows], self.places[columns if len(piece.shape) > 1 else ""])
            made.reshape(len(made), -1)[where] = source.reshape(len(source), -1)
        self.checkpoint.release()
        return made


def module_of(name: str) -> tuple[int | None, str]:
    """Return layer and module of a tensor, such as ``(3, "mlp.up_proj")``."""
    ((layer, module),) = re.findall(r"^(?:layers\.(\d+)\.)?(.+)\.(?:weight|bias)$", name)
    return (int(layer) if layer else None), module


def places(small: ModelConfig, big: ModelConfig) -> dict[str, NDArray[np.int64]]:
    """Return the indices of the source's rows or columns of each kind in the large model.

    A query head stays with its key/value head: query head q of key/value head k of the source is
    query head q of key/value head k of the large model.
    """
    heads = np.arange(small.num_heads)
    heads = heads // small.group * big.group + heads % small.group
    queries = (heads[:, None] * small.head_dim + np.arange(small.head_dim)).reshape(-1)
    sizes = {
        "": 1,
        "vocab": small.vocab_size,
        "hidden": small.hidden_size,
        "mlp": small.intermediate_size,
        "kv": small.num_kv_heads * small.head_dim,
    }
    return {"query": queries, **{kind: np.arange(size) for kind, size in sizes.items()}}


if __name__ == "__main__":
    main()
