"""Attention in training: over equally long sequences, and along the drafts of training-time test."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.torch import capped_attention
from pronk.train.modules.decoder import Attend, DecoderModule, Rope, apply_rope


@dataclass(frozen=True)
class DenseAttention:
    """Causal attention whose rows are ``batch`` sequences of ``length`` tokens, one after the other."""

    batch: int
    length: int
    # sliding window of each layer in tokens; ``None``, or empty: full attention
    windows: tuple[int | None, ...] = ()
    cap: float | None = None  # soft cap of the scores

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output ``[rows, heads * d]`` for ``q [rows, heads, d]``, ``k, v [rows, kv_heads, d]``."""
        q, k, v = (
            t.reshape(self.batch, self.length, *t.shape[1:]).transpose(1, 2) for t in (q, k, v)
        )
        mask = self._mask(layer, q.device)
        if mask is not None and self.cap is not None:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
            out = capped_attention(q, k, v, mask, q.shape[-1] ** -0.5, self.cap)
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, enable_gqa=True
            )
        return out.transpose(1, 2).reshape(self.batch * self.length, -1)

    def _mask(self, layer: int, device: torch.device) -> Tensor | None:
        """Return the mask of a layer.

        ``None`` if it is causal, without a window and without a cap.
        """
        window = self.windows[layer] if self.windows else None
        if (window is None or window >= self.length) and self.cap is None:
            return None
        past = torch.ones(self.length, self.length, dtype=torch.bool, device=device).tril()
        return past if window is None else past.triu(1 - window)


@dataclass(frozen=True)
class DelayedAttention(DenseAttention):
    """Causal self-attention, and cross-attention to the target's cache, for training sequences."""

    rotation: Rope = None  # RoPE rotations of the target, if it has RoPE
    # per draft layer: keys of the target's cache, ``[rows, kv_heads, d]``
    keys: Sequence[Tensor] = ()
    values: Sequence[Tensor] = ()  # per draft layer: values of the same shape
    # per draft layer: which keys a row sees, bool ``[length, length]``
    masks: Sequence[Tensor] = ()

    def cross(self, layer: int, q: Tensor) -> Tensor:
        """Return the cross-attention output ``[rows, heads * d]`` for ``q [rows, heads, d]``."""
        rotated = q if self.rotation is None else apply_rope(q, *self.rotation)
        k = self.keys[layer]
        v = self.values[layer]
        seen = self.masks[layer]
        q, k, v = (
            t.to(v.dtype).reshape(self.batch, self.length, *t.shape[1:]).transpose(1, 2)
            for t in (rotated, k, v)
        )
        # A softmax over no key is NaN. Rows that see no key attend to all keys, and their output is
        # set to zero.
        sees_any = seen.any(1)
        out = F.scaled_dot_product_attention(q, k, v, seen | ~sees_any[:, None], enable_gqa=True)
        out = out * sees_any[:, None]
        return out.transpose(1, 2).reshape(self.batch * self.length, -1).to(rotated.dtype)


def dense_logits(
    decoder: DecoderModule, tokens: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
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
    decoder: DecoderModule,
    tokens: Tensor,
    dtype: torch.dtype,
    attend: Attend | None = None,
    stop: int | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Yield number and output ``[batch * length, hidden]`` of the layers 1 to ``stop`` (default: all)."""
    batch, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).repeat(batch)
    x = decoder.embed(tokens.reshape(-1), positions, dtype)
    attend = attend or DenseAttention(
        batch, length, decoder.config.windows, decoder.config.attention_cap
    )
    yield from decoder.run(x, decoder.layer_ropes(positions, dtype), attend, stop)


def dense_rope(
    decoder: DecoderModule, batch: int, length: int, dtype: torch.dtype, device: torch.device
) -> Rope:
    """Return RoPE's rotations for ``batch`` sequences of ``length`` tokens.

    ``None`` without RoPE.
    """
    return decoder.rope(torch.arange(length, device=device).repeat(batch), dtype)


@dataclass
class Features:
    """Hidden states, keys and values of ``rows = batch * length`` tokens; layers count from 1."""

    last: Tensor  # output of the last layer before the final norm, ``[rows, hidden]``
    # by layer: its output, ``[rows, hidden]``
    hidden: dict[int, Tensor] = field(default_factory=dict)
    # by layer: its keys, ``[rows, kv_heads, head_dim]``
    keys: dict[int, Tensor] = field(default_factory=dict)
    # by layer: its values, of the same shape
    values: dict[int, Tensor] = field(default_factory=dict)


@torch.no_grad()
def compute_features(
    decoder: DecoderModule,
    tokens: Tensor,
    dtype: torch.dtype,
    hidden: Collection[int] = (),
    cache: Collection[int] = (),
) -> Features:
    """Run the decoder.

    Keep outputs of the layers ``hidden``, and keys and values of the layers ``cache``.
    """
    batch, length = tokens.shape
    config = decoder.config
    features = Features(tokens.new_empty(0))
    dense = DenseAttention(batch, length, config.windows, config.attention_cap)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer + 1 in cache:
            features.keys[layer + 1] = k
            features.values[layer + 1] = v
        return dense(layer, q, k, v)

    for layer, features.last in dense_states(decoder, tokens, dtype, attend):
        if layer in hidden:
            features.hidden[layer] = features.last
    return features


class ChainAttention:
    """Attention of training-time test (Li et al. 2025) over several texts at once.

    Call it once per step.

    A drafter that reads its own output is trained on its own output: step 0 has a row for each
    position of the text, with the target's features, and row ``i`` of step ``s`` continues row
    ``i`` of step ``s - 1`` as if it were the ``s``-th draft token. It attends to the same keys as
    in decoding: the real rows up to ``i``, and its own earlier steps. For three positions, where
    ``x`` is seen by row 1 of step 2::

        keys of   step 0   step 1   step 2
                  x x .    . x .    . x .

    ``lengths`` has the number of rows of each text in step 0, ``active`` the rows of each text
    (from 0) that draft: only they have queries, and later steps.
    """

    def __init__(self, lengths: Sequence[int], active: Sequence[Tensor]) -> None:
        self._lengths = list(lengths)
        self._counts = [len(rows) for rows in active]
        self._hidden = [
            rows[:, None] < torch.arange(n) for n, rows in zip(lengths, active, strict=True)
        ]
        self._cache: list[tuple[Tensor, Tensor]] = []  # by step: its keys and values

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return ``[active, heads * d]`` for ``q [active, heads, d]``, ``k`` and ``v [keys, kv_heads, d]``.

        ``keys`` are all rows in step 0, and the active rows in later steps.
        """
        self._cache.append((k, v))
        first = [each.split(self._lengths) for each in self._cache[0]]
        later = [[each.split(self._counts) for each in pair] for pair in self._cache[1:]]
        outputs = []
        for i, queries in enumerate(q.split(self._counts)):
            if len(queries):
                chain = [(keys[i], values[i]) for keys, values in later]
                outputs.append(
                    _attend(queries, first[0][i], first[1][i], self._hidden[i].to(q.device), chain)
                )
        return torch.cat(outputs)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, chain: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Attend within one text.

    ``chain`` has keys and values of the later steps, row by row those of ``q``.
    """
    rows, heads, size = q.shape
    kv_heads = k.shape[1]
    # Shape: ``[kv, group, rows, d]``.
    grouped = q.view(rows, kv_heads, heads // kv_heads, size).permute(1, 2, 0, 3) * size**-0.5
    scores = [(grouped @ k.permute(1, 2, 0)[:, None]).masked_fill(hidden, -torch.inf)]
    scores += [(grouped * keys.transpose(0, 1)[:, None]).sum(-1, keepdim=True) for keys, _ in chain]
    weights = torch.cat(scores, dim=-1).softmax(-1)
    out = weights[..., : len(k)] @ v.transpose(0, 1)[:, None]
    for step, (_, values) in enumerate(chain, len(k)):
        out = out + weights[..., step : step + 1] * values.transpose(0, 1)[:, None]
    return out.permute(2, 0, 1, 3).reshape(rows, heads * size)
