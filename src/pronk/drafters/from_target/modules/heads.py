"""Multi-token heads (Gloeckle et al. 2024, *Better & Faster LLMs via Multi-token Prediction*).

Let ``z`` be the output of one of the target's layers at position ``t``, ``u`` the unembedding, and ``h_i`` the head for
the token at position ``t + i``. The target itself predicts the next token, ``i = 1``; the heads have ``i = 2 … n``::

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
from pronk.checks import check_choice
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
    """Sizes of the heads that do not follow from the target."""

    num_heads: int  # number of heads, 1..63; the first head predicts the token after the next
    layer: int  # number (from 1) of the target's layer whose output the heads read
    mlp: int = 1  # width of a transformer head's feed-forward network
    kind: str = "transformer"  # type of each head's layer, one of ``KINDS``
    order: str = "parallel"  # whether heads read the target's layer or each other, one of ``ORDERS`` (module docstring)
    unembeddings: str = "shared"  # ``"shared"``: all heads use the target's; ``"replicated"``: each head has a copy

    def __post_init__(self) -> None:
        for name, maximum in (("num_heads", _MAX_HEADS), ("layer", None), ("mlp", None)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1 or (maximum is not None and value > maximum):
                expected = "at least 1" if maximum is None else f"1 to {maximum}"
                msg = f"{name.replace('_', '-')}: expected {expected}, found {value!r}"
                raise OptionError(msg)
        for name, choices in (("kind", KINDS), ("order", ORDERS), ("unembeddings", UNEMBEDDINGS)):
            check_choice(name, getattr(self, name), choices)

    def check(self, config: ModelConfig) -> None:
        """Raise :class:`~pronk.errors.OptionError` if the target has no layer ``layer``."""
        if self.layer > config.num_layers:
            msg = f"layer: expected 1 to {config.num_layers}, the target's layers, found {self.layer}"
            raise OptionError(msg)

    @property
    def is_chained(self) -> bool:
        """Whether a head reads another head's output."""
        return self.order != "parallel"

    @property
    def execution_order(self) -> Sequence[int]:
        """Indices of the heads in order of execution; 0 is the first head, ``h_2``."""
        heads = range(self.num_heads)
        return heads[::-1] if self.order == "anticausal" else heads


def heads_config(shape: HeadsShape, target: ModelConfig) -> ModelConfig:
    """Return the configuration of the heads' attention: a decoder with one layer for each head.

    All heads have the target's sliding window, since hidden states of tokens outside the window are not kept.
    """
    count = shape.num_heads
    return replace(target, num_layers=count, intermediate_size=shape.mlp, windows=(target.window,) * count)


class MultiTokenHeads(nn.Module):
    """Heads on packed rows ``[rows, hidden]``; the weights are float32 and not initialized.

    ``layers``, one per head, are shared with a target that is trained together with its heads. By default the heads
    have layers of their own.
    """

    def __init__(self, shape: HeadsShape, target: ModelConfig, layers: Sequence[nn.Module] | None = None) -> None:
        super().__init__()
        shape.check(target)
        self.shape = shape
        self.config = heads_config(shape, target)
        size, heads = target.hidden_size, range(shape.num_heads)
        self.layers = nn.ModuleList([self._layer() for _ in heads] if layers is None else layers)
        self.norms = nn.ModuleList(make_norm(target, size) for _ in heads)
        with_copy = heads if shape.unembeddings == "replicated" else ()
        self.unembeddings = nn.ModuleList(empty_linear(target.vocab_size, size, bias=False) for _ in with_copy)

    def _layer(self) -> nn.Module:
        if self.shape.kind == "transformer":
            return Layer(self.config, empty_linear)
        return empty_linear(self.config.hidden_size, self.config.hidden_size, bias=False)

    def run_part(self, index: int, x: Tensor, rope: tuple[Tensor, Tensor] | None, attend: Attend) -> Tensor:
        """Run the layer of head ``index`` on ``x`` ``[rows, hidden]``; return the same shape.

        ``x`` is ``z``, or in the causal and anticausal orders the output of the head that ran before.
        """
        layer = self.layers[index]
        out: Tensor = layer(x, rope, index, attend) if self.shape.kind == "transformer" else layer(x)
        return out.to(x.dtype)  # autocast makes a linear layer return a narrower dtype

    def compile_part(self, index: int, program: Program) -> None:
        """Append the operations of head ``index`` (see :meth:`run_part`) to a program of the kernels."""
        layer = self.layers[index]
        if isinstance(layer, Layer):
            layer.compile(program, index)
        else:
            program.linear(layer)

    def run(self, z: Tensor, apply: Callable[[int, Tensor], Tensor], count: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the index and the output ``[rows, hidden]`` of each head, in order of execution.

        ``apply(index, x)`` runs one head: :meth:`run_part` or its compiled form. Only the first ``count`` heads run,
        except in the anticausal order, in which the first heads need the others' outputs.
        """
        x = z
        for index in self.shape.execution_order:
            if index >= count and self.shape.order != "anticausal":
                return
            out = apply(index, x)
            x = out if self.shape.is_chained else z
            yield index, out

    def norm(self, index: int, x: Tensor) -> Tensor:
        """Apply the norm of head ``index`` to its output; both are ``[rows, hidden]``."""
        out: Tensor = self.norms[index](x)
        return out

    def unembedding(self, index: int, shared: Linear) -> Linear:
        """Return the unembedding of this head; ``shared`` (the target's) if it has none of its own."""
        copy = self.unembeddings[index] if self.unembeddings else None
        return copy if isinstance(copy, Linear) else shared

    def initialize(self, generator: torch.Generator, norm: nn.Module | None = None, head: Tensor | None = None) -> None:
        """Set initial weights for training: small random ones, so that a head nearly returns its input.

        ``norm``, the target's final norm, is copied to each head's norm; if it is ``None``, the norms' weights are 1.
        ``head`` ``[vocab, hidden]``, the target's unembedding, is copied to the heads' own; ``None``: these are random.
        """
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 1:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                else:
                    # As in GPT-2, the last matrix of a residual branch starts smaller if there are more layers.
                    shrink = (2 * len(self.layers)) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                    parameter.normal_(0.0, 0.02 * shrink, generator=generator)
            if self.shape.kind == "linear":
                for layer in self.layers:
                    weight = layer.get_parameter("weight")
                    weight.add_(torch.eye(len(weight)))
            if norm is not None:
                for head_norm in self.norms:
                    head_norm.load_state_dict({name: value.float() for name, value in norm.state_dict().items()})
            if head is not None:
                for unembedding in self.unembeddings:
                    unembedding.get_parameter("weight").copy_(head)
