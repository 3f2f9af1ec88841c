"""Trained drafters as modules of torch.

The formulas are in :mod:`pronk.drafting.from_target.modules`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pronk.checkpoint import ModelConfig
from pronk.lab import GlideShape, HeadsShape, KangarooShape, MedusaShape, heads_config
from pronk.train.attention import DelayedAttention
from pronk.train.modules.decoder import (
    Attend,
    DecoderModule,
    ModuleLayer,
    Rope,
    empty_linear,
    initialize_parameters,
    make_norm,
)


class HeadsModule(nn.Module):
    """Heads on packed rows ``[rows, hidden]``; the weights are float32 and not initialized.

    ``layers``, one per head, are shared with a target that is trained together with its heads. By
    default the heads have layers of their own.
    """

    def __init__(
        self, shape: HeadsShape, target: ModelConfig, layers: Sequence[nn.Module] | None = None
    ) -> None:
        super().__init__()
        shape.check(target)
        self.shape = shape
        self.config = heads_config(shape, target)
        size = target.hidden_size
        heads = range(shape.num_heads)
        if layers is None:
            is_linear = shape.kind == "linear"
            layers = [
                empty_linear(size, size, bias=False) if is_linear else ModuleLayer(self.config)
                for _ in heads
            ]
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(make_norm(target) for _ in heads)
        with_copy = heads if shape.unembeddings == "replicated" else ()
        self.unembeddings = nn.ModuleList(
            empty_linear(target.vocab_size, size, bias=False) for _ in with_copy
        )

    def run_part(self, index: int, x: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """Run the layer of head ``index`` on ``x`` ``[rows, hidden]``; return the same shape.

        ``x`` is the output of the target's layer, or in the causal and anticausal orders that of
        the head before.
        """
        layer = self.layers[index]
        out: Tensor = (
            layer(x, rope, index, attend) if self.shape.kind == "transformer" else layer(x)
        )
        return out.to(x.dtype)  # autocast makes a linear layer return a narrower dtype

    def initialize(
        self, generator: torch.Generator, norm: nn.Module | None = None, head: Tensor | None = None
    ) -> None:
        """Set initial weights for training: small random ones, so that a head nearly returns its input.

        ``norm``, the target's final norm, is copied to each head's norm; if it is ``None``, the
        norms' weights are 1. ``head`` ``[vocab, hidden]``, the target's unembedding, is copied to
        the heads' own; ``None``: these are random.
        """
        initialize_parameters(self.named_parameters(), generator, len(self.layers))
        with torch.no_grad():
            if self.shape.kind == "linear":
                for layer in self.layers:
                    weight = layer.get_parameter("weight")
                    weight.add_(torch.eye(len(weight)))
            if norm is not None:
                for head_norm in self.norms:
                    head_norm.load_state_dict(norm.state_dict())
            if head is not None:
                for unembedding in self.unembeddings:
                    unembedding.load_state_dict({"weight": head})


class _GlideLayer(ModuleLayer):
    """A layer with cross-attention before the MLP; ``attend`` is a :class:`DelayedAttention`."""

    def __init__(self, config: ModelConfig, target: ModelConfig) -> None:
        super().__init__(config)
        self.heads = target.num_heads
        self.head_dim = target.head_dim
        size = self.heads * self.head_dim
        self.cross_norm = make_norm(config)
        self.cross_query = empty_linear(size, config.hidden_size, bias=False)
        self.cross_out = empty_linear(config.hidden_size, size, bias=False)

    def forward(self, x: Tensor, rope: Rope, index: int, attend: Attend) -> Tensor:
        x = self.apply_attention(x, rope, index, attend)
        q = self.cross_query(self.cross_norm(x)).unflatten(-1, (self.heads, self.head_dim))
        assert isinstance(attend, DelayedAttention)
        return self.apply_mlp(x + self.cross_out(attend.cross(index, q)))


class GlideDecoderModule(DecoderModule):
    """GLIDE's decoder; its head is the transposed ``embedding``, without a module of its own."""

    def __init__(self, shape: GlideShape, target: ModelConfig) -> None:
        super().__init__(shape.config(target))
        self.cache_layers = shape.cache_layers(target)
        if shape.cross:
            self.layers = nn.ModuleList(
                _GlideLayer(self.config, target) for _ in range(shape.layers)
            )
        del self.head


class KangarooModule(nn.Module):
    """Adapter on packed rows ``[rows, hidden]``; the weights are float32 and not initialized."""

    def __init__(self, shape: KangarooShape, target: ModelConfig) -> None:
        super().__init__()
        shape.check(target)
        self.shape = shape
        self.config = shape.config(target)
        self.layers = nn.ModuleList([_BLOCKS[shape.adapter](self.config)])
        self.norm = make_norm(target)
        self.head = (
            empty_linear(target.vocab_size, target.hidden_size, bias=False)
            if shape.has_own_head
            else None
        )

    def forward(self, x: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """Map the exit layer's output ``[rows, hidden]`` to the head's input, of the same shape."""
        return self.norm(self.layers[0](x, rope, 0, attend))

    def initialize(self, generator: torch.Generator, norm: nn.Module, head: Tensor) -> None:
        """Set initial weights for training: random ones, and copies of the target's ``norm`` and ``head``."""
        initialize_parameters(self.layers.named_parameters(), generator)
        self.norm.load_state_dict(norm.state_dict())
        if self.head is not None:
            self.head.load_state_dict({"weight": head})


class _Attention(ModuleLayer):
    """The first half of a decoder layer: ``x + attention(norm(x))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        del self.mlp_norm, self.up, self.down

    def forward(self, x: Tensor, rope: Rope, index: int, attend: Attend) -> Tensor:
        return self.apply_attention(x, rope, index, attend)


class _TwoLinears(nn.Module):
    """Adapter without attention: ``x + down(silu(up(norm(x))))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.input_norm = make_norm(config)
        self.up = empty_linear(size, size, bias=False)
        self.down = empty_linear(size, size, bias=False)

    def forward(self, x: Tensor, rope: Rope, index: int, attend: Attend) -> Tensor:  # noqa: ARG002 - as all blocks
        return x + self.down(F.silu(self.up(self.input_norm(x))))


_BLOCKS: dict[str, type[nn.Module]] = {
    "attention": _Attention,
    "head": _Attention,
    "transformer": ModuleLayer,
    "mlp": _TwoLinears,
}


class MedusaHeadModule(nn.Module):
    """One head: its residual blocks, zeros at first, without the unembedding."""

    def __init__(self, size: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(empty_linear(size, size, bias=True) for _ in range(blocks))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map rows ``[rows, hidden]`` after the target's final norm to the input of the unembedding."""
        for block in self.blocks:
            hidden = hidden + F.silu(block(hidden))
        return hidden


class MedusaModule(nn.Module):
    """Heads of one target, on packed rows ``[rows, hidden]``; ``config`` is the target's."""

    def __init__(self, shape: MedusaShape, config: ModelConfig) -> None:
        super().__init__()
        self.shape = shape
        vocab = config.vocab_size
        size = config.hidden_size
        self.layers = nn.ModuleList(
            MedusaHeadModule(size, shape.blocks) for _ in range(shape.num_heads)
        )
        num_copies = shape.num_heads if shape.unembeddings == "replicated" else 0
        self.unembeddings = nn.ModuleList(
            empty_linear(vocab, size, bias=False) for _ in range(num_copies)
        )

    def initialize(self, unembedding: Tensor) -> None:
        """Copy the target's unembedding ``[vocab, hidden]`` to the heads' own unembeddings, if there are any."""
        for own_unembedding in self.unembeddings:
            own_unembedding.load_state_dict({"weight": unembedding})
