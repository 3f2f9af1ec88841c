"""The target's final state of a token, which MTP heads and Gemma 4's assistants read."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

from pronk.base.arrays import DType
from pronk.models.decoder import Decoder
from pronk.models.program import Program


class FinalState:
    """Feature of a token: the last layer's output after the final norm, as the LM head reads it.

    Attributes:
        layers: the target's last layer, from 1.
        width: number of values, the target's hidden size.
        only_logits_rows: whether only rows with logits need a state (``Feature`` of the cache).
        identity: digest of what the values depend on besides the target, in hexadecimal digits.
    """

    def __init__(self, target: Decoder, dtype: DType, *, only_logits_rows: bool = False) -> None:
        self.layers: tuple[int, ...] = (len(target.layers),)
        self.width = target.config.hidden_size
        self.only_logits_rows = only_logits_rows
        rows = "rows with logits" if only_logits_rows else "all rows"
        name = f"final state of {rows} {self.layers} {dtype}"
        self.identity = sha256(name.encode()).hexdigest()
        self._norm = target.norm

    def compile(self, program: Program, collected: Mapping[int, int]) -> None:  # noqa: ARG002 - no other layer is read
        """Append the final norm of the last layer's output, which the cache saves."""
        program.norm(self._norm, feature=self)
