"""Dense causal attention over a batch of equally long sequences, for training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.torch_backend.attention import capped_attention
from pronk.train.modules.decoder import Attend, DecoderModule

__all__ = ["DenseAttention", "dense_hidden", "dense_logits", "dense_rope", "dense_states"]


@dataclass(frozen=True)
class DenseAttention:
    """Causal attention whose rows are ``batch`` sequences of ``length`` tokens, one after the other.

    ``windows`` has the sliding window of each layer in tokens; ``None``: full attention. If empty, all layers have it.
    ``cap`` is the soft cap of the scores.
    """

    batch: int
    length: int
    windows: tuple[int | None, ...] = ()
    cap: float | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output ``[rows, heads * d]`` for ``q [rows, heads, d]``, ``k, v [rows, kv_heads, d]``."""
        q, k, v = (t.reshape(self.batch, self.length, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
        if self.cap is not None:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
            mask = self._mask(layer, q.device, always=True)
            assert mask is not None
            out = capped_attention(q, k, v, mask, q.shape[-1] ** -0.5, self.cap)
            return out.transpose(1, 2).reshape(self.batch * self.length, -1)
        mask = self._mask(layer, q.device)
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        return out.transpose(1, 2).reshape(self.batch * self.length, -1)

    def _mask(self, layer: int, device: torch.device, *, always: bool = False) -> Tensor | None:
        """Return the mask of a layer; ``None``, unless ``always``, if it is causal without a window."""
        window = self.windows[layer] if self.windows else None
        if (window is None or window >= self.length) and not always:
            return None
        past = torch.ones(self.length, self.length, dtype=torch.bool, device=device).tril()
        return past if window is None else past.triu(1 - window)


def dense_logits(decoder: DecoderModule, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the logits ``[batch * length, vocab]`` of ``tokens`` ``[batch, length]``."""
    return decoder.logits(dense_hidden(decoder, tokens, dtype))


def dense_hidden(
    decoder: DecoderModule,
    tokens: Tensor,
    dtype: torch.dtype = torch.float32,
    attend: Attend | None = None,
    stop: int | None = None,
) -> Tensor:
    """Return layer ``stop``'s output ``[batch * length, hidden]`` (default: last layer, before the norm)."""
    *_, (_, hidden) = dense_states(decoder, tokens, dtype, attend, stop)
    return hidden


def dense_states(
    decoder: DecoderModule, tokens: Tensor, dtype: torch.dtype, attend: Attend | None = None, stop: int | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yield number and output ``[batch * length, hidden]`` of the layers 1 to ``stop`` (default: all)."""
    batch, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).repeat(batch)
    x = decoder.embed(tokens.reshape(-1), positions, dtype)
    rope, config = decoder.layer_ropes(positions, dtype), decoder.config
    attend = attend or DenseAttention(batch, length, config.windows, config.attention_cap)
    yield from decoder.run(x, rope, attend, 0, stop)


def dense_rope(
    decoder: DecoderModule, batch: int, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Return RoPE's rotations for ``batch`` sequences of ``length`` tokens; ``None`` without RoPE."""
    positions = torch.arange(length, device=device).repeat(batch)
    return decoder.rope(positions, dtype)
