"""Write a checkpoint of a chosen shape that computes the same function as a small one.

Its text and acceptance are the small model's, its cost per pass is the large one's, and every engine loads it. So a
benchmark has real text at a realistic cost, without gigabytes to download.

Why the function stays, for Llama, Mistral, Qwen2 and Qwen3:

- Hidden size ``d`` to ``D``: the residual stream is padded with zeros. Nothing writes to the padding (embedding
  columns, rows of ``o_proj`` and ``down_proj`` are 0), so what reads it (columns of the other matrices) is random: its
  products with 0 cost as much as any. The mean of squares shrinks by ``d / D``; the norms' epsilon and, by the square
  root, their gains follow.
- Heads, MLP units and layers that are added compute random values that leave through zeros. ``head_dim`` stays: the
  softmax scale and RoPE follow from it. A key/value head with more queries than one of the large model has is copied.
- The vocabulary stays: the logits of added tokens would have to be below all others, and there is no bias to do that.

Rounding: when ``D / d`` is a power of four, everything is exact. Otherwise the gains are stored in float32, whatever
the dtype of the matrices. An engine that computes in 16 bits rounds them once as it loads, which moves the logits no
further from float32's than its other roundings do.
"""

from __future__ import annotations

import hashlib
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pronk.bench.shards import Entry, Progress, check_target, write_folder, write_json, write_weights
from pronk.errors import CheckpointError, ConfigError, OptionError
from pronk.model.checkpoint import Checkpoint, read_json
from pronk.model.config import ModelConfig, parse_config
from pronk.model.families import FAMILY_NAMES, Piece, plan_tensors
from pronk.model.loader import parse_dtype, read_config

__all__ = ["InflatedInfo", "Shape", "inflate"]

_MARK = "pronk_inflated"
_MAX_SIZE = 1 << 20
_COPIED = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json tokenizer.model vocab.json "
    "merges.txt chat_template.jinja chat_template.json generation_config.json LICENSE LICENSE.txt LICENSE.md NOTICE"
).split()

# What the rows and the columns of a tensor are, and what is added to it: zeros, ones, or random numbers (None).
_ROLES: dict[str, tuple[str, str, float | None]] = {
    "embed_tokens": ("vocab", "hidden", 0.0),
    "lm_head": ("vocab", "hidden", None),
    "self_attn.q_proj": ("query", "hidden", None),
    "self_attn.k_proj": ("kv", "hidden", None),
    "self_attn.v_proj": ("kv", "hidden", None),
    "self_attn.q_norm": ("head", "", 1.0),
    "self_attn.k_norm": ("head", "", 1.0),
    "self_attn.o_proj": ("hidden", "query", 0.0),
    "mlp.gate_proj": ("mlp", "hidden", None),
    "mlp.up_proj": ("mlp", "hidden", None),
    "mlp.down_proj": ("hidden", "mlp", 0.0),
}
_KEYS = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}
_GAINS = ("norm", "input_layernorm", "post_attention_layernorm")
_ROLES |= dict.fromkeys(_GAINS, ("hidden", "", 1.0))

_CARD = """\
# {name}: simulated size

**Real acceptance, simulated size: same function as {source} ({info.source_parameters:,} parameters), cost of \
{info.parameters:,} parameters.**
It is made to measure decoding with: the added weights are random or zero and have no influence on its output.

```
{command}
```
"""


@dataclass(frozen=True)
class Shape:
    """The shape to reach; ``None`` is the source's size.

    For ``num_heads``, ``None`` is the least divisor of the hidden size that is ``hidden_size // head_dim`` or more, and
    not below the source's; for ``num_kv_heads`` the least that fits and is an eighth of the heads or more.
    """

    hidden_size: int | None = None
    num_layers: int | None = None
    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None


@dataclass(frozen=True)
class InflatedInfo:
    """What was written: ``num_bytes`` of ``parameters`` weights; the source has ``source_parameters``."""

    folder: Path
    parameters: int
    source_parameters: int
    num_bytes: int


def inflate(
    source: Path,
    out: Path,
    shape: Shape,
    *,
    name: str | None = None,
    dtype: str | None = None,
    seed: int = 0,
    command: str | None = None,
    progress: Progress | None = None,
    shard_bytes: int = 10**9,
) -> InflatedInfo:
    """Write the checkpoint ``out``, tensor by tensor; it appears under this name when it is complete.

    Args:
        source: folder of a Llama, Mistral, Qwen2 or Qwen3 checkpoint.
        out: a folder that does not exist or is empty.
        shape: the sizes to reach, none below the source's.
        name: what to call the source; the name of its folder by default.
        dtype: float32, bfloat16 or float16; the source's own by default.
        seed: of the random weights; equal arguments give equal bytes.
        command: shown in the model card.
        progress: called with the bytes written so far and in total.
        shard_bytes: a file with more than one tensor is no larger than this.

    Raises:
        OptionError: a shape, dtype or folder that cannot be had, or too little disk space.
        CheckpointError: the source cannot be read, or is not of a supported family.
    """
    small, raw = _read_source(source)
    document = _document(raw, small, _sizes(shape, small), parse_dtype(dtype or "auto", small))
    document[_MARK]["source"] = name = name or source.resolve().name
    big = parse_config(document)
    builder = _Builder(Checkpoint(source), small, big, seed)
    entries = [builder.entry(piece) for piece in _pieces(big)]
    info = InflatedInfo(out, _count(big), _count(small), sum(entry.size for entry in entries))
    check_target(out, info.num_bytes)
    card = _CARD.format(name=out.name, source=name, info=info, command=command or shape)

    def fill(folder: Path) -> None:
        write_weights(folder, entries, builder.tensor, shard_bytes, progress or (lambda *_: None))
        for file in _COPIED:
            if (source / file).is_file():
                shutil.copyfile(source / file, folder / file)
        (folder / "README.md").write_text(card, encoding="utf-8")
        write_json(folder / "config.json", document)

    write_folder(out, fill)
    return info


def _read_source(folder: Path) -> tuple[ModelConfig, dict[str, Any]]:
    small, raw = read_config(folder), read_json(folder / "config.json", ConfigError)
    if small.norm != "rms":
        msg = (
            f"source: expected a llama, mistral, qwen2 or qwen3 model, found {small.family}; only RMSNorm can be padded"
        )
        raise ConfigError(msg)
    if _MARK in raw:
        msg = f"source: expected a real model, found {folder}, which is inflated itself; inflate its source"
        raise ConfigError(msg)
    return small, raw


def _sizes(shape: Shape, small: ModelConfig) -> dict[str, int]:
    """The sizes of the large model, by their keys in ``config.json``; checked."""
    least = {size: getattr(small, size) for size in asdict(shape)}
    chosen = least | {key: value for key, value in asdict(shape).items() if value is not None}
    for option, value in chosen.items():
        if not least[option] <= value <= _MAX_SIZE:
            msg = f"{option}: expected {least[option]} (the source's) to {_MAX_SIZE}, found {value}"
            raise OptionError(msg)
    hidden, heads, kv_heads = (chosen[size] for size in ("hidden_size", "num_heads", "num_kv_heads"))
    if shape.num_heads is None:
        heads = min((n for n in _divisors(hidden) if n >= max(heads, hidden // small.head_dim)), default=heads)
    if hidden % heads:  # nothing here depends on it, but transformers insists
        msg = f"num_heads: expected a divisor of the hidden size {hidden}, found {heads}"
        raise OptionError(msg)
    # With ``heads // k`` queries per key/value head, so many copies of each are needed.
    divisors = _divisors(heads)
    fitting = [k for k in divisors if k >= small.num_kv_heads * math.ceil(small.group / (heads // k))]
    if shape.num_kv_heads is None:
        kv_heads = min(k for k in fitting if 8 * k >= heads)
    if kv_heads not in fitting:
        wanted = f"a divisor of {heads} heads" if kv_heads not in divisors else f"{fitting[0]} with {heads} heads"
        msg = f"num_kv_heads: expected {wanted}, found {kv_heads}; those that fit are {', '.join(map(str, fitting))}"
        raise OptionError(msg)
    chosen |= {"num_heads": heads, "num_kv_heads": kv_heads}
    return {_KEYS.get(size, size): value for size, value in chosen.items()}


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def _document(raw: dict[str, Any], small: ModelConfig, sizes: dict[str, int], dtype: torch.dtype) -> dict[str, Any]:
    """``config.json`` of the large model."""
    layers, eps = sizes["num_hidden_layers"], small.norm_eps * small.hidden_size / sizes["hidden_size"]
    document = {**raw, **sizes, "head_dim": small.head_dim, "rms_norm_eps": eps}
    for key in {"dtype", "torch_dtype"} & raw.keys() or {"torch_dtype"}:
        document[key] = str(dtype).removeprefix("torch.")
    sliding = [small.windows[real] is not None for real, _ in _real_layers(small.num_layers, layers)]
    # Qwen counts the layers that slide from below: the real ones would get other windows than they had.
    if small.family.startswith("qwen") or raw.get("layer_types") is not None:
        document["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in sliding]
    if "max_window_layers" in raw:
        document["max_window_layers"] = sliding.index(True) if True in sliding else layers
    document[_MARK] = {key: raw[key] for key in sizes if key in raw} | {"parameters": _count(small)}
    return document


def _real_layers(small: int, big: int) -> list[tuple[int, bool]]:
    """For every layer of the large model, the last real one up to there, and whether it is this very one.

    The first and the last layer are real, and the added ones are spread evenly: 2 in 4 gives 0, (0), (0), 1.
    """
    places = [index * (big - 1) // max(1, small - 1) for index in range(small)]
    return [(sum(place <= index for place in places) - 1, index in places) for index in range(big)]


def _pieces(config: ModelConfig) -> Iterator[Piece]:
    return (piece for part in plan_tensors(config) for piece in part.pieces)


def _count(config: ModelConfig) -> int:
    return sum(math.prod(piece.shape) for piece in _pieces(config))


def _axes(small: ModelConfig, big: ModelConfig) -> dict[str, tuple[Tensor, Tensor]]:
    """Which rows or columns of the source go where, as two lists of indices, for every kind of them.

    Queries follow their key/value head. With 5 queries per head in the source and 2 in the large model, source head 0
    becomes the heads 0, 1, 2 with the queries 0 1, 2 3, 4 and one that is random.
    """
    old, new, dim = small.group, big.group, small.head_dim
    copies = math.ceil(old / new)
    queries = [(q, (q // old * copies + q % old // new) * new + q % old % new) for q in range(small.num_heads)]
    kv_heads = [(kv, kv * copies + copy) for kv in range(small.num_kv_heads) for copy in range(copies)]
    same = {"": 1, "vocab": small.vocab_size, "hidden": small.hidden_size, "mlp": small.intermediate_size, "head": dim}
    axes = {kind: (torch.arange(count), torch.arange(count)) for kind, count in same.items()}
    for kind, pairs in (("query", queries), ("kv", kv_heads)):
        rows = torch.tensor(pairs)[..., None] * dim + torch.arange(dim)
        axes[kind] = rows[:, 0].flatten(), rows[:, 1].flatten()
    return axes


class _Builder:
    """Makes the tensors of the large model, one at a time."""

    def __init__(self, checkpoint: Checkpoint, small: ModelConfig, big: ModelConfig, seed: int) -> None:
        self.checkpoint, self.names, self.seed = checkpoint, FAMILY_NAMES[small.family], seed
        self.matrix_dtype = parse_dtype("auto", big)
        self.stored = {self.names.canonical(name): name for name in checkpoint}
        self.layers = _real_layers(small.num_layers, big.num_layers)
        self.axes = _axes(small, big)
        self.shrink = math.sqrt(small.hidden_size / big.hidden_size)
        # The norms of queries and keys share the epsilon, so what they norm shrinks likewise. Rounding that to 16 bits
        # would harm more than the next power of two, which leaves them an epsilon of half to twice the source's.
        qk = self.shrink if self.matrix_dtype == torch.float32 else 2.0 ** round(math.log2(self.shrink))
        self.factors = dict.fromkeys(_GAINS, self.shrink)
        self.factors |= {"self_attn.q_proj": qk, "self_attn.k_proj": qk} if small.qk_norm else {}
        for piece in _pieces(small):
            name = self.stored.get(piece.name)
            if name is None or checkpoint.shape(name) != piece.shape:
                msg = f"{checkpoint.folder}: expected a tensor {piece.name} of shape {list(piece.shape)}, found none"
                raise CheckpointError(msg)
            checkpoint.check_dtype(name)

    def entry(self, piece: Piece) -> Entry:
        """Its name and dtype in the file: gains that would lose by rounding stay in float32."""
        prefix = "" if piece.name.startswith(self.names.head) else self.names.prefix
        rounds = _module(piece.name)[1] in _GAINS and math.frexp(self.shrink)[0] != 0.5
        return Entry(piece, prefix + piece.name, torch.float32 if rounds else self.matrix_dtype)

    def tensor(self, piece: Piece) -> Tensor:
        """A tensor of the large model, in the shape and dtype of its :meth:`entry`."""
        layer, module = _module(piece.name)
        rows, columns, filling = _ROLES[module]
        made = torch.full(piece.shape, filling or 0.0, dtype=self.entry(piece).dtype)
        if filling is None:
            self._randomize(made, piece.name)
        index, real = (0, True) if layer is None else self.layers[layer]
        if real:
            stored = self.stored[re.sub(r"\d+", str(index), piece.name, count=1)]
            source = self._convert(self.checkpoint.tensor(stored), module, made.dtype)
            # A vector is a matrix of one column.
            (from_rows, to_rows), (from_columns, to_columns) = self.axes[rows], self.axes[columns * (made.dim() - 1)]
            source = source.view(len(source), -1)[from_rows[:, None], from_columns]
            made.view(len(made), -1)[to_rows[:, None], to_columns] = source
        self.checkpoint.release()
        return made

    def _convert(self, source: Tensor, module: str, dtype: torch.dtype) -> Tensor:
        """``source`` times what its module needs, rounded once."""
        factor = self.factors.get(module, 1.0)
        made = (source if factor == 1.0 else source.double() * factor).to(dtype)
        if not made.isfinite().all():
            msg = f"dtype: expected one that can hold the source's weights, found {dtype}; choose bfloat16 or float32"
            raise OptionError(msg)
        return made

    def _randomize(self, made: Tensor, name: str) -> None:
        # Seeded by name, so that a tensor does not depend on what else is written.
        digest = hashlib.blake2b(f"{self.seed} {name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        for part in made.view(-1).split(1 << 22):  # drawn in float32, so not all at once
            part.copy_(torch.randn(part.shape, generator=generator).mul_(0.02))


def _module(name: str) -> tuple[int | None, str]:
    """``layers.3.mlp.up_proj.weight`` to ``(3, "mlp.up_proj")``."""
    ((layer, module),) = re.findall(r"^(?:layers\.(\d+)\.)?(.+)\.(?:weight|bias)$", name)
    return (int(layer) if layer else None), module
