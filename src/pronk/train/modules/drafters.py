"""Trained drafters as modules of torch; :mod:`pronk.lab.drafters.modules` has their formulas."""

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
    """Multi-token heads on packed rows ``[rows, hidden]``; new weights are uninitialized float32.

    ``layers``, one per head, are given if they are also layers of a target that is trained together
    with its heads. By default the heads have layers of their own.
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
        if layers is None and shape.kind == "linear":
            layers = [empty_linear(size, size, bias=False) for _ in heads]
        elif layers is None:
            layers = [ModuleLayer(self.config) for _ in heads]
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(make_norm(target) for _ in heads)
        with_copy = heads if shape.unembeddings == "replicated" else ()
        self.unembeddings = nn.ModuleList(
            empty_linear(target.vocab_size, size, bias=False) for _ in with_copy
        )

    def run_part(self, index: int, x: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """Run the layer of head ``index`` on ``x`` ``[rows, hidden]``; return the same shape.

        ``x`` is the output of the target's layer. In the causal and anticausal orders it is the
        output of the head before instead.
        """
        layer = self.layers[index]
        is_transformer = self.shape.kind == "transformer"
        out: Tensor = layer(x, rope, index, attend) if is_transformer else layer(x)
        # under autocast, a linear layer returns a narrower dtype than that of its input
        return out.to(x.dtype)

    def initialize(
        self, generator: torch.Generator, norm: nn.Module | None = None, head: Tensor | None = None
    ) -> None:
        """Set initial weights with which a head nearly returns its input.

        Args:
            generator: generator of the small random weights.
            norm: the target's final norm, which is copied to the norm of each head; without it, the
                weights of the norms are 1.
            head: the target's unembedding ``[vocab, hidden]``, which is copied to the unembeddings
                of the heads; without it, they are random.
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
    """A layer of GLIDE's decoder: self-attention, cross-attention to the target's cache, MLP.

    ``attend`` in its methods is a :class:`DelayedAttention`.
    """

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
    """GLIDE's decoder; its embedding is also its LM head, so there is no module ``head``."""

    def __init__(self, shape: GlideShape, target: ModelConfig) -> None:
        super().__init__(shape.config(target))
        self.cache_layers = shape.cache_layers(target)
        if shape.cross:
            self.layers = nn.ModuleList(
                _GlideLayer(self.config, target) for _ in range(shape.layers)
            )
        del self.head


class KangarooModule(nn.Module):
    """Kangaroo's adapter on packed rows ``[rows, hidden]``; new weights are not initialized."""

    def __init__(self, shape: KangarooShape, target: ModelConfig) -> None:
        super().__init__()
        shape.check(target)
        self.shape = shape
        self.config = shape.config(target)
        self.layers = nn.ModuleList([_BLOCKS[shape.adapter](self.config)])
        self.norm = make_norm(target)
        self.head: nn.Linear | None = None
        if shape.has_own_head:
            self.head = empty_linear(target.vocab_size, target.hidden_size, bias=False)

    def forward(self, x: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """Return the input of the LM head ``[rows, hidden]`` for ``x``.

        ``x``, of the same shape, is the output of the target's exit layer.
        """
        return self.norm(self.layers[0](x, rope, 0, attend))

    def initialize(self, generator: torch.Generator, norm: nn.Module, head: Tensor) -> None:
        """Set random weights of the adapter's layer; copy the target's final norm and LM head."""
        initialize_parameters(self.layers.named_parameters(), generator)
        self.norm.load_state_dict(norm.state_dict())
        if self.head is not None:
            self.head.load_state_dict({"weight": head})


class _Attention(ModuleLayer):
    """A decoder layer without its MLP: ``x + attention(norm(x))``."""

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
    """The residual blocks of one Medusa head.

    Their first weights are zeros, so that a new head returns its input.
    """

    def __init__(self, size: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(empty_linear(size, size, bias=True) for _ in range(blocks))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the input of the head's unembedding ``[rows, hidden]``.

        ``hidden``, of the same shape, is the target's last output after the final norm.
        """
        for block in self.blocks:
            hidden = hidden + F.silu(block(hidden))
        return hidden


class MedusaModule(nn.Module):
    """Medusa heads on packed rows ``[rows, hidden]``; ``config`` is the target's configuration."""

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
        """Copy the target's unembedding ``[vocab, hidden]`` to heads that have one of their own."""
        for own_unembedding in self.unembeddings:
            own_unembedding.load_state_dict({"weight": unembedding})
