"""The tensors of an inflated checkpoint, made of its source's; see :mod:`pronk.inflate.checkpoint` for why they fit."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import torch
from torch import Tensor

from pronk.architecture.config import ModelConfig
from pronk.errors import CheckpointError, OptionError
from pronk.files.shards import ShardEntry
from pronk.inflate.padding import (
    Axis,
    blank,
    gain_factor,
    is_rounded,
    part_axes,
    pick,
    put,
    query_key_factor,
    real_layers,
)
from pronk.models.checkpoint import Checkpoint
from pronk.models.families import FAMILY_NAMES, CheckpointTensor, plan_tensors
from pronk.models.loader import parse_dtype

__all__ = ["LargeWeights", "count", "pieces"]

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
_GAINS = ("norm", "input_layernorm", "post_attention_layernorm")
_ROLES |= dict.fromkeys(_GAINS, ("hidden", "", 1.0))


def pieces(config: ModelConfig) -> Iterator[CheckpointTensor]:
    """The tensors of a checkpoint."""
    return (piece for part in plan_tensors(config) for piece in part.pieces)


def count(config: ModelConfig) -> int:
    """Its parameters."""
    return sum(math.prod(piece.shape) for piece in pieces(config))


class LargeWeights:
    """Makes the tensors of the large model, one at a time.

    Args:
        checkpoint: of the source.
        small: its configuration.
        big: the large model's.
        seed: of the random weights.

    Raises:
        CheckpointError: a tensor of the source is missing, or of another shape or dtype.
    """

    def __init__(self, checkpoint: Checkpoint, small: ModelConfig, big: ModelConfig, seed: int) -> None:
        self.checkpoint, self.names, self.seed = checkpoint, FAMILY_NAMES[small.family], seed
        self.big, self.matrix_dtype = big, parse_dtype("auto", big)
        self.stored = {self.names.canonical(name): name for name in checkpoint}
        self.layers = real_layers(small.num_layers, big.num_layers)
        self.axes = part_axes(small, big)
        self.shrink = gain_factor(small, big)
        qk = query_key_factor(self.shrink, self.matrix_dtype)
        self.factors = dict.fromkeys(_GAINS, self.shrink)
        self.factors |= {"self_attn.q_proj": qk, "self_attn.k_proj": qk} if small.qk_norm else {}
        for piece in pieces(small):
            name = self.stored.get(piece.name)
            if name is None or checkpoint.shape(name) != piece.shape:
                msg = f"{checkpoint.folder}: expected a tensor {piece.name} of shape {list(piece.shape)}, found none"
                raise CheckpointError(msg)
            checkpoint.check_dtype(name)

    def entry(self, piece: CheckpointTensor) -> ShardEntry:
        """Its name and dtype in the file: gains that would lose by rounding stay in float32."""
        prefix = "" if piece.name.startswith(self.names.head) else self.names.prefix
        rounds = _module(piece.name)[1] in _GAINS and is_rounded(self.shrink)
        return ShardEntry(piece, prefix + piece.name, torch.float32 if rounds else self.matrix_dtype)

    def tensor(self, piece: CheckpointTensor) -> Tensor:
        """A tensor of the large model, in the shape and dtype of its :meth:`entry`."""
        filling = _ROLES[_module(piece.name)[1]][2]
        made = blank(piece.shape, self.entry(piece).dtype, filling, f"{self.seed} {piece.name}")
        if real := self._real(piece):
            put(made, *real)
        self.checkpoint.release()
        return made

    def fits(self, checkpoint: Checkpoint) -> bool:
        """Whether the tensors of ``checkpoint`` hold the source's."""
        for entry in map(self.entry, pieces(self.big)):
            if entry.name not in checkpoint or checkpoint.shape(entry.name) != entry.piece.shape:
                return False
            if real := self._real(entry.piece):
                source, rows, columns = real
                stored = pick(checkpoint.tensor(entry.name), rows[1], columns[1])
                if not torch.equal(stored, pick(source, rows[0], columns[0])):
                    return False
            checkpoint.release()
        return True

    def _real(self, piece: CheckpointTensor) -> tuple[Tensor, Axis, Axis] | None:
        """The source's tensor and the places of its rows and columns; ``None`` for a tensor of an added layer."""
        layer, module = _module(piece.name)
        index, real = (0, True) if layer is None else self.layers[layer]
        if not real:
            return None
        stored = self.stored[re.sub(r"\d+", str(index), piece.name, count=1)]
        rows, columns, _ = _ROLES[module]
        source = self._convert(self.checkpoint.tensor(stored), module, self.entry(piece).dtype)
        return source, self.axes[rows], self.axes[columns * (len(piece.shape) - 1)]

    def _convert(self, source: Tensor, module: str, dtype: torch.dtype) -> Tensor:
        """``source`` times what its module needs, rounded once."""
        factor = self.factors.get(module, 1.0)
        made = (source if factor == 1.0 else source.double() * factor).to(dtype)
        if not made.isfinite().all():
            msg = f"dtype: expected one that can hold the source's weights, found {dtype}; choose bfloat16 or float32"
            raise OptionError(msg)
        return made


def _module(name: str) -> tuple[int | None, str]:
    """``layers.3.mlp.up_proj.weight`` to ``(3, "mlp.up_proj")``."""
    ((layer, module),) = re.findall(r"^(?:layers\.(\d+)\.)?(.+)\.(?:weight|bias)$", name)
    return (int(layer) if layer else None), module
