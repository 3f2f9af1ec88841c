"""Heads that predict several tokens at once (Gloeckle et al. 2024).

*Better & Faster LLMs via Multi-token Prediction*: let ``z`` be the output of one of the target's layers (the trunk),
``u`` the unembedding and ``h_i`` the head of the token ``i`` places ahead. The target itself predicts the next token,
and the heads predict those after it::

    parallel       P(x[t+i] | z) = softmax u(norm(h_i(z)))                        section 2
    causal         P(x[t+i] | z) = softmax u(norm(h_i(… h_3(h_2(z)))))            appendix B
    anticausal     P(x[t+i] | z) = softmax u(norm(h_i(h_(i+1)(… h_n(z)))))        appendix B

Each ``h_i`` is a transformer layer, which attends to its own keys and values of all earlier rows, or a single linear
layer. Each head has its own norm. The unembedding is the target's, or a copy for each head ("replicated").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pronk.architecture.config import ModelConfig
from pronk.errors import OptionError
from pronk.models.decoder import Attend, Layer, empty_linear, make_norm
from pronk.models.linear import Linear
from pronk.models.program import Program

__all__ = ["KINDS", "ORDERS", "UNEMBEDDINGS", "HeadsShape", "MultiTokenHeads", "heads_config"]

KINDS = ("transformer", "linear")
ORDERS = ("parallel", "causal", "anticausal")
UNEMBEDDINGS = ("shared", "replicated")

_MAX_HEADS = 63


@dataclass(frozen=True)
class HeadsShape:
    """Sizes of the heads, beside the target's.

    Attributes:
        num_heads: number of heads, 1..63; the first predicts the token after the next.
        layer: the target's layer whose output is read, from 1.
        mlp: width of a transformer head's feed-forward network.
        kind: one of :data:`KINDS`.
        order: one of :data:`ORDERS`.
        unembeddings: one of :data:`UNEMBEDDINGS`.
    """

    num_heads: int
    layer: int
    mlp: int = 1
    kind: str = "transformer"
    order: str = "parallel"
    unembeddings: str = "shared"

    def __post_init__(self) -> None:
        for name, maximum in (("num_heads", _MAX_HEADS), ("layer", None), ("mlp", None)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1 or (maximum is not None and value > maximum):
                expected = "at least 1" if maximum is None else f"1 to {maximum}"
                msg = f"{name.replace('_', '-')}: expected {expected}, found {value!r}"
                raise OptionError(msg)
        for name, known in (("kind", KINDS), ("order", ORDERS), ("unembeddings", UNEMBEDDINGS)):
            value = getattr(self, name)
            if value not in known:
                msg = f"{name}: expected one of {', '.join(known)}, found {value!r}"
                raise OptionError(msg)

    def check(self, config: ModelConfig) -> None:
        """Raise :class:`~pronk.errors.OptionError` if the target has no such layer."""
        if self.layer > config.num_layers:
            msg = f"layer: expected 1 to {config.num_layers}, the target's layers, found {self.layer}"
            raise OptionError(msg)

    @property
    def chained(self) -> bool:
        """Whether a head reads another head's output."""
        return self.order != "parallel"

    @property
    def sequence(self) -> Sequence[int]:
        """Indices of the heads in order of execution; 0 is the head of the nearest token."""
        heads = range(self.num_heads)
        return heads[::-1] if self.order == "anticausal" else heads


def heads_config(shape: HeadsShape, target: ModelConfig) -> ModelConfig:
    """Return the configuration of the heads' attention: a decoder with one layer for each head.

    The heads see no further back than the target: rows that left a sliding window may be gone.
    """
    count = shape.num_heads
    return replace(target, num_layers=count, intermediate_size=shape.mlp, windows=(target.window,) * count)


class MultiTokenHeads(nn.Module):
    """The heads, on packed rows; the weights are float32 and not initialized.

    ``layers`` are layers of the heads that are also the target's own; by default the heads have new layers.
    """

    def __init__(self, shape: HeadsShape, target: ModelConfig, layers: Sequence[nn.Module] | None = None) -> None:
        super().__init__()
        shape.check(target)
        self.shape = shape
        self.config = heads_config(shape, target)
        size, heads = target.hidden_size, range(shape.num_heads)
        self.layers = nn.ModuleList([self._layer() for _ in heads] if layers is None else layers)
        self.norms = nn.ModuleList(make_norm(target, size) for _ in heads)
        own = heads if shape.unembeddings == "replicated" else ()
        self.unembeddings = nn.ModuleList(empty_linear(target.vocab_size, size, False) for _ in own)

    def _layer(self) -> nn.Module:
        size = self.config.hidden_size
        return Layer(self.config, empty_linear) if self.shape.kind == "transformer" else empty_linear(size, size, False)

    def part(self, index: int, x: Tensor, rope: tuple[Tensor, Tensor] | None, attend: Attend) -> Tensor:
        """Run head ``index`` without its norm: ``[rows, hidden]`` to the same shape.

        ``x`` is the trunk's output or that of the head before. ``attend`` is called for layer ``index``.
        """
        layer = self.layers[index]
        out: Tensor = layer(x, rope, index, attend) if self.shape.kind == "transformer" else layer(x)
        return out.to(x.dtype)  # autocast returns a narrower dtype for a linear layer

    def compile_part(self, index: int, program: Program) -> None:
        """Compile :meth:`part` for the kernels."""
        layer = self.layers[index]
        if isinstance(layer, Layer):
            layer.compile(program, index)
        else:
            program.linear(layer)

    def run(self, z: Tensor, apply: Callable[[int, Tensor], Tensor], count: int) -> Iterator[tuple[int, Tensor]]:
        """Yield index and output ``[rows, hidden]`` of the first ``count`` heads, in order of execution.

        ``apply(index, x)`` runs one head: :meth:`part` or its compiled form. The anticausal order runs all heads.
        """
        x = z
        for index in self.shape.sequence:
            if index >= count and self.shape.order != "anticausal":
                return
            out = apply(index, x)
            x = out if self.shape.chained else z
            yield index, out

    def norm(self, index: int, x: Tensor) -> Tensor:
        """Return the input of the unembedding for a head's output; both are ``[rows, hidden]``."""
        out: Tensor = self.norms[index](x)
        return out

    def unembedding(self, index: int, shared: Linear) -> Linear:
        """Return the head's own unembedding, or else ``shared``, the target's."""
        own = self.unembeddings[index] if self.unembeddings else None
        return own if isinstance(own, Linear) else shared

    def initialize(self, generator: torch.Generator, norm: nn.Module | None = None, head: Tensor | None = None) -> None:
        """Initialize for training: heads near the identity, with the target's norm and unembedding.

        ``norm`` is the target's final norm; by default it scales by 1. ``head`` ``[vocab, hidden]`` is the target's
        unembedding, for replicated ones; random by default.
        """
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 1:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                else:
                    shrink = (2 * len(self.layers)) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                    parameter.normal_(0.0, 0.02 * shrink, generator=generator)
            if self.shape.kind == "linear":
                for layer in self.layers:
                    weight = layer.get_parameter("weight")
                    weight.add_(torch.eye(len(weight)))
            if norm is not None:
                for own in self.norms:
                    own.load_state_dict({name: value.float() for name, value in norm.state_dict().items()})
            if head is not None:
                for own in self.unembeddings:
                    own.get_parameter("weight").copy_(head)
