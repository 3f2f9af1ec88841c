"""Decoder-only transformer, configured as Llama, Mistral, Qwen or GPT-2.

The input is *packed rows* ``[rows, hidden]``: tokens of any requests and positions, without a batch dimension. Only the
attention, which the caller passes as :class:`Attend`, lets rows interact, so the same module is trained with dense
causal attention and served from a paged KV cache. A range of layers can run alone, for early-exit drafters.

``forward`` computes with torch, for training and as a reference. ``compile`` appends the operations of a layer to a
:class:`Program`, which the kernels run in one call.
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
    """Attention over a KV cache or over a training batch, implemented by the caller of the decoder."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention output of layer ``layer``, ``[rows, heads * d]``.

        ``q`` is ``[rows, heads, d]``; ``k`` and ``v`` are ``[rows, kv_heads, d]``.
        """
        ...


class Layer(nn.Module):
    """Transformer layer on packed rows: attention, then MLP."""

    def __init__(self, config: ModelConfig, linear: Callable[[int, int, bool], Linear]) -> None:
        super().__init__()
        self.config = config
        self.attention_norm = make_norm(config, config.hidden_size)
        self.qkv = linear(sum(config.qkv_sizes), config.hidden_size, config.qkv_bias)
        self.q_norm = nn.RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.out = linear(config.hidden_size, config.num_heads * config.head_dim, config.out_bias)
        self.mlp_norm = make_norm(config, config.hidden_size)
        self.up = linear(config.intermediate_size * (2 if config.gated else 1), config.hidden_size, config.mlp_bias)
        self.down = linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.activate = _ACTIVATE[config.activation]

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, index: int, attend: Attend) -> Tensor:
        """Map ``x`` ``[rows, hidden]`` to the same shape; ``index`` is the number of the layer, from 0."""
        return self.apply_mlp(self.apply_attention(x, rope, index, attend))

    def apply_attention(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, index: int, attend: Attend) -> Tensor:
        """Return ``x`` plus its self-attention; the arguments are those of :meth:`forward`."""
        q, k, v = self._project(self.attention_norm(x), rope)
        return x + self.out(attend(index, q, k, v))

    def apply_mlp(self, x: Tensor) -> Tensor:
        """Return ``x`` ``[rows, hidden]`` plus its MLP."""
        hidden = self.up(self.mlp_norm(x))
        if self.config.gated:
            gate, up = hidden.chunk(2, dim=-1)
            return x + self.down(self.activate(gate) * up)
        return x + self.down(self.activate(hidden))

    def compile(self, program: Program, index: int) -> None:
        """Append the layer's operations to a program; ``index`` is its layer number (from 0) in the KV cache."""
        program.attention(self, index)
        program.mlp(self)

    def layout(self, name: str) -> WeightLayout:
        """Return how to pack the linear layer ``name`` (``qkv``, ``out``, ``up`` or ``down``) for the kernels."""
        if name == "qkv":
            return WeightLayout(unit=self.config.head_dim)
        return WeightLayout(gated=self.config.gated and name == "up")

    def _project(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, both rotated, and values: each ``[rows, heads or kv_heads, head_dim]``."""
        config = self.config
        num_qk = config.num_heads + config.num_kv_heads
        heads = self.qkv(x).view(x.shape[0], num_qk + config.num_kv_heads, config.head_dim)
        qk, v = heads[:, :num_qk], heads[:, num_qk:]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, : config.num_heads]), self.k_norm(qk[:, config.num_heads :])), dim=1)
        if rope is not None:
            qk = apply_rope(qk, *rope)
        return qk[:, : config.num_heads], qk[:, config.num_heads :], v


class Decoder(nn.Module):
    """Language model on packed rows; the weights of a new object are uninitialized.

    Attributes:
        embedding: ``[vocab, hidden]``; ``[0, hidden]`` if the embedding is quantized (``table``).
        table: the quantized embedding, which with tied weights is also the ``head``; ``None`` if it is not quantized.
        positions: learned position embeddings ``[context, hidden]``; ``None`` with RoPE.
        stored_bytes: size in the checkpoint's files of all tensors except lookup tables; ``None`` without files.
    """

    def __init__(self, config: ModelConfig, layer_config: ModelConfig | None = None) -> None:
        """Create the modules; ``layer_config`` has the sizes of this process's layers in tensor parallelism."""
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.table: KernelLinear | None = None
        self.stored_bytes: int | None = None
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
        """Kernels that compute the model; ``None`` means torch."""
        return self.head.packed.kernels if isinstance(self.head, KernelLinear) else None

    def embed(self, tokens: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the input of layer 0, ``[rows, hidden]``, for token ids and positions ``[rows]``."""
        x = F.embedding(tokens, self.embedding)
        if self.positions is not None:
            x = x.to(dtype) + F.embedding(positions, self.positions).to(dtype)
        return x.to(dtype)

    def rope(self, positions: Tensor, spans: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Return cosines and sines of the rows (see :class:`RotaryEmbedding`), or ``None`` without RoPE."""
        if self.config.rope is None:
            return None
        device = positions.device
        if device not in self._rotary:
            self._rotary[device] = RotaryEmbedding(self.config.rope, device)
        return self._rotary[device](positions, spans, dtype)

    def run(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None, attend: Attend, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Run layers ``start .. stop - 1``; after each layer yield its number (from 1) and its output."""
        for index in range(start, len(self.layers) if stop is None else stop):
            x = self.layers[index](x, rope, index, attend)
            yield index + 1, x

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the final norm and the head: ``[rows, hidden]`` to ``[rows, vocab]``."""
        return self.head(self.norm(hidden))

    def initialize(self, generator: torch.Generator) -> None:
        """Initialize as GPT-2: normal, with deviation 0.02, or 0.02 / √(2 · layers) for ``out`` and ``down``."""
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
    return nn.RMSNorm(size, config.norm_eps) if config.norm == "rms" else nn.LayerNorm(size, config.norm_eps)


def empty_linear(out_features: int, in_features: int, bias: bool) -> PlainLinear:
    """Return a plain linear layer with uninitialized weights."""
    return PlainLinear(
        torch.empty(out_features, in_features, requires_grad=True),
        torch.empty(out_features, requires_grad=True) if bias else None,
    )


def pack_linears(module: nn.Module, linear: LinearFactory) -> None:
    """Replace each plain linear layer in ``module`` by one that ``linear`` builds from the same weights."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PlainLinear):
                layout = parent.layout(name) if isinstance(parent, Layer) else WeightLayout(head=name == "head")
                bias = None if child.bias is None else child.bias.detach()
                setattr(parent, name, linear(child.weight.detach(), bias, layout))
