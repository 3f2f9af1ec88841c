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
from dataclasses import dataclass

from pronk.architecture.config import ModelConfig
from pronk.arrays import Array
from pronk.checks import check_choice, check_integer
from pronk.drafters.from_target.modules.files import DrafterWeights
from pronk.errors import OptionError
from pronk.models.decoder import Layer
from pronk.models.program import Program

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
            check_integer(name.replace("_", "-"), getattr(self, name), 1, maximum)
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
    windows = (target.window,) * count
    return target.plain_layers(0, count, intermediate_size=shape.mlp, windows=windows)


class MultiTokenHeads:
    """Heads of one target, whose configuration is ``target``."""

    def __init__(self, shape: HeadsShape, target: ModelConfig, weights: DrafterWeights) -> None:
        shape.check(target)
        self.shape = shape
        self.config = heads_config(shape, target)
        size, heads = target.hidden_size, range(shape.num_heads)
        self.layers = [
            weights.layer(Layer(self.config), f"layers.{head}")
            if shape.kind == "transformer"
            else weights.linear(f"layers.{head}", size, size)
            for head in heads
        ]
        self.norms = [weights.norm(f"norms.{head}", target, size) for head in heads]
        with_copy = heads if shape.unembeddings == "replicated" else ()
        self.unembeddings = [weights.linear(f"unembeddings.{head}", target.vocab_size, size) for head in with_copy]

    def compile_part(self, index: int, program: Program) -> None:
        """Append the operations of the layer of head ``index`` to a program, on the stream ``[rows, hidden]``.

        The stream is ``z``, or in the causal and anticausal orders the output of the head that ran before.
        """
        layer = self.layers[index]
        if isinstance(layer, Layer):
            layer.compile(program, index)
        else:
            program.linear(layer)

    def run(self, z: Array, apply: Callable[[int, Array], Array], count: int) -> Iterator[tuple[int, Array]]:
        """Yield the index and the output ``[rows, hidden]`` of each head, in order of execution.

        ``apply(index, x)`` runs one head. Only the first ``count`` heads run,
        except in the anticausal order, in which the first heads need the others' outputs.
        """
        x = z
        for index in self.shape.execution_order:
            if index >= count and self.shape.order != "anticausal":
                return
            out = apply(index, x)
            x = out if self.shape.is_chained else z
            yield index, out
