"""A trained drafter for an inflated target: it guesses what the original guesses for the source.

Its modules over the target's outputs grow as the target does (:mod:`pronk.inflate.checkpoint`): what they add to the
residual stream is 0 in the padding, gains follow the root of the hidden size, and heads or MLP units that are added
leave through zeros. What has a size of its own beside the target's (the width of an MLP, the heads of Kangaroo's
adapter) grows in proportion, so that the drafter costs what it would cost beside a real target of that size.

- A layer's number becomes that of the same real layer: in 8 layers inflated to 24, layer 2 is layer 4.
- GLIDE is a model of its own and stays as large as it is. It asks the target's cache with the large model's query
  heads; those that are added ask, too, and what they hear leaves through zeros.
- Numbers are the original's where ``D / d`` is a power of four. Elsewhere they are equal up to rounding; norms of
  queries and keys may have another epsilon in 16 bits, as in the target.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from pronk.architecture.config import ModelConfig
from pronk.drafters.from_target.modules.files import Trained
from pronk.drafters.from_target.modules.glide import GlideModule, GlideShape
from pronk.drafters.from_target.modules.heads import HeadsShape, MultiTokenHeads
from pronk.drafters.from_target.modules.kangaroo import KangarooAdapter, KangarooShape
from pronk.drafters.from_target.modules.medusa import MedusaHeads, MedusaShape
from pronk.errors import OptionError
from pronk.files.atomic import write_json
from pronk.files.shards import ShardEntry, write_weights
from pronk.inflate.padding import (
    Axis,
    blank,
    gain_factor,
    is_rounded,
    part_axes,
    put,
    query_key_factor,
    real_layers,
    same,
)
from pronk.models.families import CheckpointTensor
from pronk.models.fingerprint import Fingerprint

__all__ = ["DrafterInfo", "LargeDrafter", "large_drafters"]

_SHARD_BYTES = 10**9

_CARD = """\
# {name}: inflated

**Same guesses as {name} makes for {source}, for {target}, which is {source} at a simulated size: cost of \
{info.parameters:,} parameters, where the original has {info.source_parameters:,}.**
It is made to measure decoding with: the added weights are random or zero and have no influence on its guesses.
{exact} What follows is the card of the original; its target, its sizes and its figures are those of {source}.

```
{command}
```
"""
_EXACT = "None of the original's weights is rounded."
_ROUNDED = "Its gains follow the larger hidden size; an engine that computes in 16 bits rounds them."
_EPSILON = "Its norms of queries and keys have {:.2f} times the original's epsilon."


@dataclass(frozen=True)
class _Role:
    """What the rows and the columns of a module's weights are, and what is added to them; ``None`` is random."""

    rows: str
    columns: str
    filling: float | None = None


_GAIN, _UNEMBEDDING, _SQUARE = _Role("hidden", "", 1.0), _Role("vocab", "hidden"), _Role("hidden", "hidden", 0.0)

# Of modules over the target's outputs, by the last word of their names.
_ROLES = {
    **dict.fromkeys(("attention_norm", "mlp_norm", "input_norm", "norm", "norms"), _GAIN),
    **dict.fromkeys(("q_norm", "k_norm"), _Role("head", "", 1.0)),
    **dict.fromkeys(("head", "unembeddings"), _UNEMBEDDING),
    **dict.fromkeys(("blocks", "layers"), _SQUARE),
    "qkv": _Role("qkv", "hidden"),
    "out": _Role("hidden", "query", 0.0),
    "up": _Role("up", "hidden"),
    "down": _Role("hidden", "mlp", 0.0),
}
# The rest of GLIDE does not know of the target's sizes.
_GLIDE_ROLES = {"cross_query": _Role("query", "own"), "cross_out": _Role("own", "query", 0.0)}


@dataclass(frozen=True)
class DrafterInfo:
    """What was written: a drafter of ``parameters`` weights; the original has ``source_parameters``."""

    name: str
    parameters: int
    source_parameters: int


@dataclass(frozen=True)
class _Kind:
    """A kind of drafter: what makes its module, and its shape for the large target of the small one's."""

    shape: type[Any]
    module: Callable[[Any, ModelConfig], nn.Module]
    grow: Callable[[Any, ModelConfig, ModelConfig], Any]
    roles: Mapping[str, _Role]


class LargeDrafter:
    """The drafter of a folder, for the target that its own one has been inflated to.

    Args:
        folder: what ``pronk train`` has written.
        source: of the small target.
        small: its configuration.
        big: the large target's.
        seed: of the random weights.

    Raises:
        CheckpointError: the folder is not one of a trained drafter, or is damaged.
        OptionError: it was trained on another target, or cannot be inflated.
    """

    def __init__(self, folder: Path, source: Fingerprint, small: ModelConfig, big: ModelConfig, seed: int) -> None:
        self.trained, self.seed = Trained.read(folder), seed
        if self.trained.kind not in _KINDS:
            msg = f"drafter: expected one of {', '.join(_KINDS)}, found {self.trained.kind} in {folder}"
            raise OptionError(msg)
        if self.trained.target != source:
            msg = (
                f"drafter: expected one that was trained on the source ({source}), found {folder}, which was trained "
                f"on another target ({self.trained.target})"
            )
            raise OptionError(msg)
        kind = _KINDS[self.trained.kind]
        shape = self.trained.make(kind.shape)
        self.shape, self.roles = kind.grow(shape, small, big), kind.roles
        with torch.device("meta"):
            old, new = kind.module(shape, small), kind.module(self.shape, big)
        self.checkpoint = self.trained.open(old)
        self.axes = _axes(shape, (old, new), small, big)
        self.gain = gain_factor(small, big)
        # Rows of queries and keys, if they are normed.
        config = cast(ModelConfig, getattr(old, "config", small))
        self.normed = sum(config.qkv_sizes[:2]) if config.qk_norm and "qkv" in self.roles else 0
        self.entries = [self._entry(name, tensor) for name, tensor in new.state_dict().items()]
        counts = (sum(tensor.numel() for tensor in module.state_dict().values()) for module in (new, old))
        self.info = DrafterInfo(folder.resolve().name, *counts)

    @property
    def num_bytes(self) -> int:
        """Size of its weights."""
        return sum(entry.size for entry in self.entries)

    def write(self, folder: Path, target: Mapping[str, str], source: str, command: str) -> None:
        """Fill ``folder``, which is there and empty.

        Args:
            folder: where.
            target: name and fingerprint of the large target, as they go into ``drafter.json``.
            source: what to call the small one.
            command: shown in the model card.
        """
        write_weights(folder, self.entries, self.tensor, _SHARD_BYTES, lambda *_: None)
        facts = self.trained.facts
        document = {**facts, "shape": asdict(self.shape), "target": target, "inflated_from": facts["target"]}
        card = _CARD.format(
            name=self.info.name, source=source, target=target["name"], info=self.info, exact=self.exact, command=command
        )
        original = self.trained.folder / "README.md"
        text = original.read_text(encoding="utf-8") if original.is_file() else ""
        front = re.match(r"---\n.*?\n---\n\n?", text, re.DOTALL)
        start = front.end() if front else 0
        (folder / "README.md").write_text(f"{text[:start]}{card}\n{text[start:]}", encoding="utf-8")
        write_json(folder / "drafter.json", document, indent=2)

    @property
    def exact(self) -> str:
        """How near its numbers are to the original's, in words."""
        rounded = is_rounded(self.gain) and (self.normed or _GAIN in {self._role(e.piece.name) for e in self.entries})
        words = [_ROUNDED if rounded else _EXACT]
        matrices = {entry.dtype for entry in self.entries if "qkv" in entry.name}
        factors = [query_key_factor(self.gain, dtype) for dtype in matrices] if self.normed else []
        return " ".join(words + [_EPSILON.format((self.gain / f) ** 2) for f in factors if f != self.gain])

    def tensor(self, piece: CheckpointTensor) -> Tensor:
        """A tensor of the large drafter, in the shape and dtype of its entry."""
        source, role = self.checkpoint.tensor(piece.name), self._role(piece.name)
        if role is None:
            return source.clone()
        if role is _GAIN:
            source = source.double() * self.gain
        elif role.rows == "qkv" and self.normed:
            factor = query_key_factor(self.gain, source.dtype)
            source = torch.cat((source[: self.normed].double() * factor, source[self.normed :].double()))
        dtype = self._dtype(piece.name)
        made = blank(piece.shape, dtype, role.filling, f"{self.seed} {self.info.name} {piece.name}")
        columns = role.columns if made.dim() > 1 else ""
        put(made, source.to(dtype), self.axes[role.rows], self.axes[columns])
        return made

    def _entry(self, name: str, tensor: Tensor) -> ShardEntry:
        return ShardEntry(CheckpointTensor(name, tuple(tensor.shape)), name, self._dtype(name))

    def _dtype(self, name: str) -> torch.dtype:
        """That of the file, but gains that would lose by rounding are float32."""
        rounds = self._role(name) is _GAIN and is_rounded(self.gain)
        return torch.float32 if rounds else self.checkpoint.tensor(name).dtype

    def _role(self, name: str) -> _Role | None:
        """What a tensor is: ``layers.0.blocks.1.weight`` is one of the ``blocks``."""
        (word,) = re.findall(r"([a-z_]+)(?:\.\d+)*(?:\.(?:weight|bias))?$", name)
        return self.roles.get(word)


def large_drafters(
    folders: Sequence[Path], source: Path, small: ModelConfig, big: ModelConfig, seed: int
) -> list[LargeDrafter]:
    """The drafters of ``folders``, which were trained on ``source``.

    Raises:
        CheckpointError: as of :class:`LargeDrafter`.
        OptionError: so, too; or two folders have the same name.
    """
    if not folders:
        return []
    fingerprint = Fingerprint.of(source)
    large = [LargeDrafter(folder, fingerprint, small, big, seed) for folder in folders]
    names = [drafter.info.name for drafter in large]
    for name in names:
        if names.count(name) > 1:
            msg = f"drafter: expected folders of different names, found {name} twice; rename one"
            raise OptionError(msg)
    return large


def _axes(shape: object, modules: tuple[nn.Module, nn.Module], small: ModelConfig, big: ModelConfig) -> dict[str, Axis]:
    """Where rows and columns of the modules go, those of matrices on top of each other included."""
    if isinstance(shape, GlideShape):
        return {**part_axes(small, big), "own": same(shape.hidden)}
    old, new = (cast(ModelConfig, getattr(m, "config", c)) for m, c in zip(modules, (small, big), strict=True))
    axes = part_axes(old, new)
    qkv = [axes[part] for part in ("query", "kv", "kv")]
    mlp, widths = 2 if old.gated else 1, (old.intermediate_size, new.intermediate_size)
    axes["qkv"] = _stacked(qkv, old.qkv_sizes, new.qkv_sizes)
    axes["up"] = _stacked([axes["mlp"]] * mlp, widths[:1] * mlp, widths[1:] * mlp)
    if isinstance(shape, KangarooShape) and shape.adapter == "mlp":  # two matrices as wide as the target
        axes["up"] = axes["mlp"] = axes["hidden"]
    return axes


def _stacked(parts: Sequence[Axis], old: Sequence[int], new: Sequence[int]) -> Axis:
    """The rows of stacked matrices with the given numbers of rows."""
    starts = [(sum(old[:i]), sum(new[:i])) for i in range(len(parts))]
    there = [(part[0] + start[0], part[1] + start[1]) for part, start in zip(parts, starts, strict=True)]
    return torch.cat([part[0] for part in there]), torch.cat([part[1] for part in there])


def _place(layer: int, small: ModelConfig, big: ModelConfig) -> int:
    """The large model's number of a layer of the small one; both count from 1."""
    layers = real_layers(small.num_layers, big.num_layers)
    return [index for index, (_, real) in enumerate(layers, 1) if real][layer - 1]


def _scaled(size: int, small: int, big: int) -> int:
    return math.ceil(size * big / small)


def _grow_heads(shape: HeadsShape, small: ModelConfig, big: ModelConfig) -> HeadsShape:
    shape.check(small)
    widths = small.intermediate_size, big.intermediate_size
    mlp = _scaled(shape.mlp, *widths) if shape.kind == "transformer" else shape.mlp
    return replace(shape, layer=_place(shape.layer, small, big), mlp=mlp)


def _grow_kangaroo(shape: KangarooShape, small: ModelConfig, big: ModelConfig) -> KangarooShape:
    shape.check(small)
    return replace(
        shape,
        exit_layer=_place(shape.exit_layer, small, big),
        heads=_scaled(shape.heads, small.num_heads, big.num_heads),
        mlp=_scaled(shape.mlp, small.intermediate_size, big.intermediate_size),
    )


def _grow_glide(shape: GlideShape, small: ModelConfig, big: ModelConfig) -> GlideShape:
    layers = [_place(layer, small, big) for layer in shape.cache_layers(small)]
    if not layers:
        return shape
    # One number says them all: the next draft layer asks the next layer of the target.
    if layers != list(range(layers[0], layers[0] + len(layers))):
        asked = ", ".join(map(str, layers))
        msg = (
            f"drafter: expected a GLIDE drafter of one layer for {big.num_layers} layers of the target, found "
            f"{len(layers)}, which would ask the layers {asked}, not adjacent ones; inflate the other sizes alone"
        )
        raise OptionError(msg)
    return replace(shape, cache_layer=layers[0])


_GLIDE = _Kind(GlideShape, GlideModule, _grow_glide, _GLIDE_ROLES)
_KINDS = {
    "multi_token": _Kind(HeadsShape, MultiTokenHeads, _grow_heads, _ROLES),
    "medusa": _Kind(MedusaShape, MedusaHeads, lambda shape, *_: shape, _ROLES),
    "kangaroo": _Kind(KangarooShape, KangarooAdapter, _grow_kangaroo, _ROLES),
    "glide": _GLIDE,
    "vanilla": _GLIDE,
}
