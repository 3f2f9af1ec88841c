"""Multi-token heads (Gloeckle et al. 2024) and Medusa heads (Cai et al. 2024).

Multi-token heads are those of *Better & Faster LLMs via Multi-token Prediction*. Let ``z`` be the
output of one of the target's layers at position ``t``, ``u`` the unembedding, and ``h_i`` the head
for the token at ``t + i``. The target itself predicts the next token, ``i = 1``; the heads have ``i
= 2 … n``::

    parallel       P(x[t+i] | z) = softmax u(norm(h_i(z)))                        section 2
    causal         P(x[t+i] | z) = softmax u(norm(h_i(… h_3(h_2(z)))))            appendix B
    anticausal     P(x[t+i] | z) = softmax u(norm(h_i(h_(i+1)(… h_n(z)))))        appendix B

Each ``h_i`` is a transformer layer, which attends to its own keys and values of all earlier rows,
or a single linear layer. Each head has its own norm. The unembedding is the target's, or a copy for
each head ("replicated").

Medusa heads read the output ``h`` of the target's last layer and final norm at position ``t``. Head
``i`` (1 is the first) predicts the token at ``t + 1 + i``, with ``n`` residual blocks::

    h_0 = h      h_j = h_(j-1) + SiLU(W_j h_(j-1) + b_j)  for j = 1 … n      logits = u h_n

``W_j`` and ``b_j`` are initialized to zeros, so every head at first predicts what the target
predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pronk import OptionError
from pronk.backends import Layer, Linear, Norm, Program
from pronk.base.arrays import Array
from pronk.base.checks import check_choice, check_integer
from pronk.checkpoint import ModelConfig
from pronk.lab.drafters.modules.files import DrafterWeights

HEAD_LAYERS = ("transformer", "linear")
HEAD_ORDERS = ("parallel", "causal", "anticausal")
UNEMBEDDINGS = ("shared", "replicated")

_MAX_HEADS = 63


@dataclass(frozen=True)
class HeadsShape:
    """Sizes of the heads that do not follow from the target.

    Attributes:
        num_heads: number of heads, 1..63; the first head predicts the token after the next.
        layer: number (from 1) of the target's layer whose output the heads read.
        mlp: width of a transformer head's feed-forward network.
        kind: type of each head's layer, one of ``HEAD_LAYERS``.
        order: what a head reads, one of ``HEAD_ORDERS`` (module docstring).
        unembeddings: ``"shared"``: all heads use the target's unembedding; ``"replicated"``: each
            has a copy.
    """

    num_heads: int
    layer: int
    mlp: int = 1
    kind: str = "transformer"
    order: str = "parallel"
    unembeddings: str = "shared"

    def __post_init__(self) -> None:
        check_integer("num-heads", self.num_heads, 1, _MAX_HEADS)
        check_integer("layer", self.layer, 1)
        check_integer("mlp", self.mlp, 1)
        check_choice("kind", self.kind, HEAD_LAYERS)
        check_choice("order", self.order, HEAD_ORDERS)
        check_choice("unembeddings", self.unembeddings, UNEMBEDDINGS)

    def check(self, config: ModelConfig) -> None:
        """Raise :class:`~pronk.base.errors.OptionError` if the target has no layer ``layer``."""
        if self.layer > config.num_layers:
            msg = (
                f"layer: expected 1 to {config.num_layers}, the target's layers, found {self.layer}"
            )
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

    All heads have the target's sliding window, since hidden states of tokens outside the window are
    not kept.
    """
    count = shape.num_heads
    windows = (target.window,) * count
    return target.plain_layers(0, count, intermediate_size=shape.mlp, windows=windows)


class MultiTokenHeads:
    """Multi-token heads with their weights; ``target`` is the configuration of the target model."""

    def __init__(self, shape: HeadsShape, target: ModelConfig, weights: DrafterWeights) -> None:
        shape.check(target)
        self.shape = shape
        self.config = heads_config(shape, target)
        size = target.hidden_size
        heads = range(shape.num_heads)
        self.layers: list[Layer | Linear] = []
        for head in heads:
            name = f"layers.{head}"
            if shape.kind == "transformer":
                self.layers.append(weights.layer(Layer(self.config), name))
            else:
                self.layers.append(weights.linear(name, size, size))
        self.norms = [weights.norm(f"norms.{head}", target, size) for head in heads]
        self.unembeddings = _own_unembeddings(shape, target, weights)

    def compile_part(self, index: int, program: Program) -> None:
        """Append the operations of head ``index``'s layer to a program.

        Their input ``[rows, hidden]`` is ``z``, or in the causal and anticausal orders the output
        of the head that ran before.
        """
        layer = self.layers[index]
        if isinstance(layer, Layer):
            layer.compile(program, index)
        else:
            program.linear(layer)

    def run(
        self, z: Array, apply: Callable[[int, Array], Array], count: int
    ) -> Iterator[tuple[int, Array]]:
        """Yield the index and the output ``[rows, hidden]`` of each head, in order of execution.

        ``apply(index, x)`` runs one head. Only the first ``count`` heads run, except in the
        anticausal order, in which the first heads need the outputs of the others.
        """
        x = z
        for index in self.shape.execution_order:
            if index >= count and self.shape.order != "anticausal":
                return
            out = apply(index, x)
            x = out if self.shape.is_chained else z
            yield index, out


@dataclass(frozen=True)
class MedusaShape:
    """Sizes of Medusa heads, and the tree of their tokens.

    Attributes:
        num_heads: number of heads, 1..16.
        blocks: number of residual blocks of a head, 1..8.
        unembeddings: ``"shared"``: all heads use the target's unembedding; ``"replicated"``: each
            has a copy.
        tree: paths of ranks (``rank_tree``), parents first; empty during training.
        accuracies: ``accuracies[head][rank]``: fraction of positions, 0..1, at which the head's
            token of this rank is the target's likeliest token; empty during training.
    """

    num_heads: int = 4
    blocks: int = 2
    unembeddings: str = "shared"
    tree: tuple[tuple[int, ...], ...] = ()
    accuracies: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        # Convert the lists of a JSON file to tuples, so that the shape is hashable.
        object.__setattr__(self, "tree", tuple(tuple(path) for path in self.tree))
        object.__setattr__(self, "accuracies", tuple(tuple(ranks) for ranks in self.accuracies))
        check_integer("heads", self.num_heads, 1, 16)
        check_integer("blocks", self.blocks, 1, 8)
        check_choice("unembeddings", self.unembeddings, UNEMBEDDINGS)
        if self.accuracies and len(self.accuracies) != self.num_heads:
            found = len(self.accuracies)
            msg = f"accuracies: expected those of {self.num_heads} heads, found {found}"
            raise OptionError(msg)


class MedusaHeads:
    """Medusa heads with their weights; ``config`` is the configuration of the target model."""

    def __init__(self, shape: MedusaShape, config: ModelConfig, weights: DrafterWeights) -> None:
        self.shape = shape
        size = config.hidden_size
        self._blocks: list[list[Linear]] = []
        for head in range(shape.num_heads):
            names = [f"layers.{head}.blocks.{block}" for block in range(shape.blocks)]
            self._blocks.append([weights.linear(name, size, size, bias=True) for name in names])
        self.unembeddings = _own_unembeddings(shape, config, weights)

    def compile(self, head: int, norm: Norm, program: Program) -> None:
        """Append the target's final ``norm``, then the residual blocks of a head (from 0)."""
        program.norm(norm)
        for block in self._blocks[head]:
            program.linear(block, activation="silu", residual=True)


def _own_unembeddings(
    shape: HeadsShape | MedusaShape, target: ModelConfig, weights: DrafterWeights
) -> list[Linear]:
    """Return each head's copy of the unembedding; an empty list if all heads use the target's."""
    if shape.unembeddings == "shared":
        return []
    names = [f"unembeddings.{head}" for head in range(shape.num_heads)]
    return [weights.linear(name, target.vocab_size, target.hidden_size) for name in names]
