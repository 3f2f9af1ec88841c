"""Embeddings of prompts: the model's last hidden states, pooled over the tokens of a prompt.

The *last hidden state* of a token is the output of the last layer after the model's final norm,
``last_hidden_state`` in transformers. A prompt is computed in chunks, whose boundaries depend on
the batch. Rows are therefore added one after the other, in float64: the bits of an embedding do not
depend on the chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Self, get_args

import numpy as np

from pronk.base.arrays import Array, is_finite
from pronk.base.checks import check_choice, check_flag, check_integer
from pronk.base.errors import OptionError, PronkError, refuse
from pronk.checkpoint.config import EmbeddingDefaults
from pronk.kernels.exact_math import total

Pooling = Literal["mean", "last"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


@dataclass(frozen=True)
class EmbeddingOptions:
    """Options of embeddings.

    Attributes:
        pooling: ``"mean"`` is the mean over all tokens of the prompt, ``"last"`` the hidden state
            of its last token.
        dimensions: number of leading components to keep; ``None`` keeps all.
        normalize: whether to divide the vector, after the choice of components, by its Euclidean
            norm.
    """

    pooling: Pooling = "mean"
    dimensions: int | None = None
    normalize: bool = True

    @classmethod
    def for_model(
        cls,
        defaults: EmbeddingDefaults,
        pooling: Pooling | None,
        dimensions: int | None,
        normalize: bool | None,
    ) -> Self:
        """Return the options of a call; ``None`` means what the model's files say.

        Raises:
            OptionError: the files ask for a pooling or a module that pronk does not compute.
        """
        if pooling is None:
            if defaults.modules:
                refuse(
                    "pooling",
                    f"expected a model without further modules, found {defaults.modules[0]} in its "
                    "modules.json; name mean or last to leave it out",
                    OptionError,
                )
            if defaults.pooling not in POOLINGS:
                refuse(
                    "pooling",
                    f"expected a model that pools by mean or last, found {defaults.pooling!r:.40} "
                    "in its files; name mean or last",
                    OptionError,
                )
            pooling = defaults.pooling
        scaled = defaults.normalize if normalize is None else normalize
        return cls(pooling, dimensions, scaled)

    def check(self, hidden_size: int) -> None:
        """Raise ``OptionError`` if an option is invalid for a model of this hidden size."""
        check_choice("pooling", self.pooling, POOLINGS)
        if self.dimensions is not None:
            check_integer("dimensions", self.dimensions, 1, hidden_size)
        check_flag("normalize", self.normalize)

    def embeddings(self, poolers: Iterable[HiddenPooler | None], hidden_size: int) -> Array:
        """Return the embeddings, float32 ``[texts, dimensions]``, of completely computed prompts.

        There is one pooler per text.
        """
        vectors = [pooler.embedding for pooler in poolers if pooler is not None]
        return np.array(vectors, np.float32).reshape(len(vectors), self.dimensions or hidden_size)


class HiddenPooler:
    """Pools the hidden states of one prompt while the engine computes its chunks."""

    def __init__(
        self, options: EmbeddingOptions, num_tokens: int, layer: int, norm: Callable[[Array], Array]
    ) -> None:
        """Create a pooler of a prompt of ``num_tokens`` tokens.

        ``layer`` is the number (from 1) of the model's last layer, and ``norm`` applies the final
        norm to its outputs.
        """
        self.options = options
        self.num_tokens = num_tokens
        self.layer = layer
        # Whether every token of the prompt has to be computed, even if its keys and values are
        # cached.
        self.needs_all_rows = options.pooling == "mean"
        self._norm = norm
        self._sum: Array | None = None  # float64 ``[hidden]``
        self._num_seen = 0

    def add(self, first: int, rows: Array) -> bool:
        """Add the last layer's outputs ``[rows, hidden]`` of the tokens from index ``first`` on.

        Tokens that were added before a preemption are skipped. Returns whether the last token of
        the prompt was added. Raises ``PronkError`` if a state is not finite.
        """
        stop = first + len(rows)
        start = (
            max(self._num_seen, first) if self.needs_all_rows else max(first, self.num_tokens - 1)
        )
        if start < stop:
            states = self._norm(rows[start - first :]).astype(np.float64)
            if not is_finite(states):
                msg = (
                    "expected finite hidden states, found infinity or NaN; "
                    "check the weights of the model"
                )
                raise PronkError(msg)
            for state in states:
                self._sum = state if self._sum is None else self._sum + state
        self._num_seen = max(self._num_seen, stop)
        return self._num_seen == self.num_tokens

    @property
    def embedding(self) -> Array:
        """Embedding, float64 ``[dimensions]``, once the last token of the prompt was added."""
        assert self._sum is not None, "expected a prompt that is done, found one in progress"
        vector = (self._sum / (self.num_tokens if self.needs_all_rows else 1))[
            : self.options.dimensions
        ]
        norm = math.sqrt(total(vector * vector)) if self.options.normalize else 1.0
        return vector / (norm or 1.0)  # a zero vector stays zero
