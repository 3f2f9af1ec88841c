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

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pronk.architecture.config import ModelConfig, parse_config
from pronk.errors import ConfigError, OptionError
from pronk.files.atomic import new_folder, write_json, writing
from pronk.files.companions import copy_companions
from pronk.files.shards import Progress, check_target, write_weights
from pronk.inflate.drafter import DrafterInfo, large_drafters
from pronk.inflate.padding import real_layers
from pronk.inflate.weights import LargeWeights, count, pieces
from pronk.models.checkpoint import Checkpoint, read_json
from pronk.models.fingerprint import Fingerprint
from pronk.models.loader import parse_dtype, read_config
from pronk.quantization.gguf.checkpoint import is_gguf

__all__ = ["InflatedInfo", "Shape", "add_drafters", "inflate", "is_inflated"]

_MARK = "pronk_inflated"
_DRAFTERS = "drafters"
_MAX_SIZE = 1 << 20

_KEYS = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}

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
    drafters: tuple[DrafterInfo, ...] = ()


def inflate(
    source: Path,
    out: Path,
    shape: Shape,
    *,
    drafters: Sequence[Path] = (),
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
        drafters: folders of drafters that were trained on the source, to go into ``out / "drafters"`` for it.
        name: what to call the source; the name of its folder by default.
        dtype: float32, bfloat16 or float16; the source's own by default.
        seed: of the random weights; equal arguments give equal bytes.
        command: shown in the model card.
        progress: called with the bytes written so far and in total.
        shard_bytes: a file with more than one tensor is no larger than this.

    Raises:
        OptionError: a shape, dtype, drafter or folder that cannot be had, or too little disk space.
        CheckpointError: the source or a drafter cannot be read, or is not of a supported family, or ``out`` cannot be
            written.
    """
    small, raw = _read_source(source)
    document = _document(raw, small, _sizes(shape, small), parse_dtype(dtype or "auto", small))
    document[_MARK]["source"] = name = name or source.resolve().name
    big = parse_config(document)
    builder = LargeWeights(Checkpoint(source), small, big, seed)
    entries = [builder.entry(piece) for piece in pieces(big)]
    large = large_drafters(drafters, source, small, big, seed)
    size = sum(entry.size for entry in entries)
    info = InflatedInfo(out, count(big), count(small), size, tuple(drafter.info for drafter in large))
    check_target(out, size + sum(drafter.num_bytes for drafter in large))
    words = command or str(shape)
    card = _CARD.format(name=out.name, source=name, info=info, command=words)

    with writing(out, "the checkpoint"), new_folder(out) as partial:
        write_weights(partial, entries, builder.tensor, shard_bytes, progress or (lambda *_: None))
        copy_companions(source, partial)
        (partial / "README.md").write_text(card, encoding="utf-8")
        write_json(partial / "config.json", document, indent=2)
        target = {"name": out.name, **asdict(Fingerprint.of(partial))} if large else {}
        for drafter in large:
            place = partial / _DRAFTERS / drafter.info.name
            place.mkdir(parents=True)
            drafter.write(place, target, name, words)
    return info


def add_drafters(
    source: Path,
    out: Path,
    drafters: Sequence[Path],
    shape: Shape | None = None,
    *,
    name: str | None = None,
    dtype: str | None = None,
    seed: int = 0,
    command: str | None = None,
) -> tuple[DrafterInfo, ...]:
    """Put drafters of the source into the folder of a checkpoint that :func:`inflate` has written.

    Args:
        source: what the checkpoint was made of.
        out: the checkpoint.
        drafters: as those of :func:`inflate`.
        shape: sizes that the checkpoint must have; any by default.
        name: what to call the source; the name of its folder by default.
        dtype: what the checkpoint must have, if not ``auto``.
        seed: of the random weights.
        command: shown in the drafters' cards.

    Raises:
        OptionError: the checkpoint is none, another one's, or of another shape; or as of :func:`inflate`.
        CheckpointError: as of :func:`inflate`.
    """
    small, raw = _read_source(source)
    big = _check_inflated(source, out, small, raw)
    wanted = {size: value for size, value in asdict(shape or Shape()).items() if value is not None}
    if dtype not in (None, "auto"):
        wanted["dtype"] = dtype
    for option, value in wanted.items():
        if getattr(big, option) != value:
            msg = f"{option}: expected {getattr(big, option)}, as {out} has, found {value}; leave it out"
            raise OptionError(msg)
    large = large_drafters(drafters, source, small, big, seed)
    places = [out / _DRAFTERS / drafter.info.name for drafter in large]
    for place, drafter in zip(places, large, strict=True):
        check_target(place, drafter.num_bytes)
    target = {"name": out.resolve().name, **asdict(Fingerprint.of(out))}
    name = name or source.resolve().name
    for place, drafter in zip(places, large, strict=True):
        words = command or f"{drafter.info.name} for {target['name']}"
        with writing(place, "the drafter"), new_folder(place) as folder:
            drafter.write(folder, target, name, words)
    return tuple(drafter.info for drafter in large)


def is_inflated(folder: Path) -> bool:
    """Whether :func:`inflate` has written it."""
    file = folder / "config.json"
    return file.is_file() and _MARK in read_json(file, ConfigError)


def _check_inflated(source: Path, out: Path, small: ModelConfig, raw: dict[str, Any]) -> ModelConfig:
    """The configuration of ``out``, which holds the weights of the source at their places."""
    big = read_config(out)
    mark = dict(read_json(out / "config.json", ConfigError).get(_MARK, {}))
    own = {key: raw[key] for key in mark if key in raw} | {"parameters": count(small), "source": mark.get("source")}
    if not mark or mark != own or big.family != small.family:
        found = f"that of {mark.get('source')}" if mark else "another one"
        msg = f"out: expected a checkpoint that pronk inflate has made of {source}, found {found} in {out}"
        raise OptionError(msg)
    if big.quantization is not None:
        msg = (
            f"out: expected plain weights, found {out}, which is quantized; add drafters to what it was made from: "
            "they guess for both"
        )
        raise OptionError(msg)
    if not LargeWeights(Checkpoint(source), small, big, 0).fits(Checkpoint(out)):
        msg = f"out: expected the weights of {source} in {out}, found others; give the source that it was inflated from"
        raise OptionError(msg)
    return big


def _read_source(folder: Path) -> tuple[ModelConfig, dict[str, Any]]:
    if is_gguf(folder):
        msg = f"source: expected a model folder, found the file {folder}; inflate what it was made from"
        raise ConfigError(msg)
    small, raw = read_config(folder), read_json(folder / "config.json", ConfigError)
    if small.norm != "rms":
        msg = (
            f"source: expected a llama, mistral, qwen2 or qwen3 model, found {small.family}; only RMSNorm can be padded"
        )
        raise ConfigError(msg)
    if small.quantization is not None:
        msg = f"source: expected plain weights, found {folder}, which is quantized; inflate what it was made from"
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
    sliding = [small.windows[real] is not None for real, _ in real_layers(small.num_layers, layers)]
    # Qwen counts the layers that slide from below: the real ones would get other windows than they had.
    if small.family.startswith("qwen") or raw.get("layer_types") is not None:
        document["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in sliding]
    if "max_window_layers" in raw:
        document["max_window_layers"] = sliding.index(True) if True in sliding else layers
    document[_MARK] = {key: raw[key] for key in sizes if key in raw} | {"parameters": count(small)}
    return document
