"""The target's final state of a token, which MTP heads and Gemma 4's assistants read."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import numpy as np

from pronk.base.arrays import Array, DType
from pronk.models.decoder import Decoder


class FinalState:
    """Feature of a token: the last layer's output after the final norm, as the LM head reads it.

    Attributes:
        layers: the target's last layer, from 1.
        width: number of values, the target's hidden size.
        identity: digest of what the values depend on besides the target, in hexadecimal digits.
    """

    def __init__(self, target: Decoder, dtype: DType) -> None:
        self.layers: tuple[int, ...] = (len(target.layers),)
        self.width = target.config.hidden_size
        self.identity = sha256(f"final state {self.layers} {dtype}".encode()).hexdigest()
        self._program = target.backend.program(self.width, dtype)
        self._program.norm(target.norm)

    def compute(self, outputs: Sequence[Array]) -> Array:
        """Return the states ``[rows, width]`` of the layer's output, ``[rows, width]``."""
        states = np.array(outputs[0])  # a copy, which the program overwrites
        self._program.run(None, states)
        return states
