"""The decoder module; Llama, Mistral, Qwen and GPT-2 are configurations of it.

Input is *packed rows* ``[rows, hidden]`` of any requests and positions. All interaction between rows (KV cache, mask,
batch) is behind the :class:`Attend` argument, so the same module is trained with dense causal attention and served from
a paged cache. A range of layers can run alone, as early-exit drafters require.

``forward`` is the torch reference and is used for training. ``compile`` describes a module to the kernels, which run
all layers of a forward pass in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pronk.architecture.config import Activation, ModelConfig
from pronk.architecture.rope import RotaryEmbedding, apply_rope
from pronk.kernels.library import Kernels
from pronk.models.linear import KernelLinear, Linear, LinearFactory, PlainLinear, WeightLayout
from pronk.models.program import Program

__all__ = ["Attend", "Decoder", "Layer", "empty_linear", "make_norm", "pack_linears"]

_ACTIVATE: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class Attend(Protocol):
    """Attention over the keys and values that the caller holds: a KV cache or a training batch."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Map ``q`` ``[rows, heads, d]``, new ``k``, ``v`` ``[rows, kv_heads, d]`` to ``[rows, heads * d]``."""
        ...


class RMSNorm(nn.Module):
    """RMSNorm (Zhang & Sennrich 2019), computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Layer(nn.Module):
    """One transformer block on packed rows."""

    def __init__(self, config: ModelConfig, linear: Callable[[int, int, bool], Linear]) -> None:
        super().__init__()
        c = config
        self.config = c
        self.attention_norm = make_norm(c, c.hidden_size)
        self.qkv = linear(sum(c.qkv_sizes), c.hidden_size, c.qkv_bias)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else None
        self.out = linear(c.hidden_size, c.num_heads * c.head_dim, c.out_bias)
        self.mlp_norm = make_norm(c, c.hidden_size)
        self.up = linear(c.intermediate_size * (2 if c.gated else 1), c.hidden_size, c.mlp_bias)
        self.down = linear(c.hidden_size, c.intermediate_size, c.mlp_bias)
        self.activate = _ACTIVATE[c.activation]

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, index: int, attend: Attend) -> Tensor:
        """Map ``x`` ``[rows, hidden]`` to the same shape; ``index`` is the layer number passed to ``attend``."""
        return self.apply_mlp(self.apply_attention(x, rope, index, attend))

    def apply_attention(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, index: int, attend: Attend) -> Tensor:
        """Apply self-attention and its residual; arguments as in :meth:`forward`."""
        q, k, v = self._project(self.attention_norm(x), rope)
        return x + self.out(attend(index, q, k, v))

    def apply_mlp(self, x: Tensor) -> Tensor:
        """Apply the MLP and its residual: ``x`` ``[rows, hidden]`` to the same shape."""
        h = self.up(self.mlp_norm(x))
        if self.config.gated:
            gate, up = h.chunk(2, dim=-1)
            return x + self.down(self.activate(gate) * up)
        return x + self.down(self.activate(h))

    def compile(self, program: Program, index: int) -> None:
        """Add the layer to a kernel program; ``index`` is the layer number in the cache."""
        program.attention(self, index)
        program.mlp(self)

    def layout(self, name: str) -> WeightLayout:
        """Return the weight layout of the linear layer ``name``."""
        if name == "qkv":
            return WeightLayout(unit=self.config.head_dim)
        return WeightLayout(gated=self.config.gated and name == "up")

    def _project(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        both = c.num_heads + c.num_kv_heads
        heads = self.qkv(x).view(x.shape[0], both + c.num_kv_heads, c.head_dim)
        qk, v = heads[:, :both], heads[:, both:]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, : c.num_heads]), self.k_norm(qk[:, c.num_heads :])), dim=1)
        if rope is not None:
            qk = apply_rope(qk, *rope)
        return qk[:, : c.num_heads], qk[:, c.num_heads :], v


class Decoder(nn.Module):
    """A decoder-only language model on packed rows; its plain weights are uninitialized at first.

    Attributes:
        embedding: ``[vocab, hidden]``; empty if there is a ``table``.
        table: quantized embedding from which the kernels look up rows; a tied ``head`` is the same object.
        positions: learned positions ``[context, hidden]``, or ``None``.
    """

    def __init__(self, config: ModelConfig, layer_config: ModelConfig | None = None) -> None:
        """``layer_config``: with tensor parallelism, the layer configuration of this process."""
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.table: KernelLinear | None = None
        learned = config.rope is None
        self.positions = nn.Parameter(torch.empty(config.context, config.hidden_size)) if learned else None
        self.layers = nn.ModuleList(Layer(layer_config or config, empty_linear) for _ in range(config.num_layers))
        self.norm = make_norm(config, config.hidden_size)
        self.head: Linear = (
            PlainLinear(self.embedding) if config.tied else empty_linear(config.vocab_size, config.hidden_size, False)
        )
        self._rotary: dict[torch.device, RotaryEmbedding] = {}

    @property
    def kernels(self) -> Kernels | None:
        """The kernels that run the model; ``None`` means torch."""
        return self.head.packed.kernels if isinstance(self.head, KernelLinear) else None

    def embed(self, tokens: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the input of layer 0: ``tokens`` ``[rows]`` to ``[rows, hidden]``."""
        x = F.embedding(tokens, self.embedding)
        if self.positions is not None:
            x = x.to(dtype) + F.embedding(positions, self.positions).to(dtype)
        return x.to(dtype)

    def rope(self, positions: Tensor, spans: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Return the rotations of a forward pass, shared by all layers; ``None`` for learned positions."""
        if self.config.rope is None:
            return None
        device = positions.device
        if device not in self._rotary:
            self._rotary[device] = RotaryEmbedding(self.config.rope, device)
        return self._rotary[device](positions, spans, dtype)

    def run(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None, attend: Attend, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Run layers ``start..stop-1``; after layer ``i`` yield ``(i + 1, input of layer i + 1)``."""
        for index in range(start, len(self.layers) if stop is None else stop):
            x = self.layers[index](x, rope, index, attend)
            yield index + 1, x

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the final norm and the head: ``[rows, hidden]`` to ``[rows, vocab]``."""
        return self.head(self.norm(hidden))

    def initialize(self, generator: torch.Generator) -> None:
        """Draw random weights: normal, residual outputs scaled down by depth (Radford et al. 2019)."""
        shrink = (2 * self.config.num_layers) ** -0.5
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 1:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                    continue
                std = 0.02 * (shrink if name.endswith(("out.weight", "down.weight")) else 1.0)
                parameter.normal_(0.0, std, generator=generator)


def make_norm(config: ModelConfig, size: int) -> nn.Module:
    """Return a norm layer of the model's type over ``size`` features."""
    return RMSNorm(size, config.norm_eps) if config.norm == "rms" else nn.LayerNorm(size, config.norm_eps)


def empty_linear(out_features: int, in_features: int, bias: bool) -> PlainLinear:
    """Return a plain linear layer with uninitialized weights."""
    return PlainLinear(
        torch.empty(out_features, in_features, requires_grad=True),
        torch.empty(out_features, requires_grad=True) if bias else None,
    )


def pack_linears(module: nn.Module, linear: LinearFactory) -> None:
    """Replace every plain linear layer within ``module`` by the result of ``linear``."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PlainLinear):
                layout = parent.layout(name) if isinstance(parent, Layer) else WeightLayout(head=name == "head")
                bias = None if child.bias is None else child.bias.detach()
                setattr(parent, name, linear(child.weight.detach(), bias, layout))
