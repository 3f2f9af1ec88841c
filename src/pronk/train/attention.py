"""Attention in training: in sequences of equal length, and on a drafter's own output (EAGLE-3)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.train.modules.decoder import Attend, DecoderModule, Rope, apply_rope


def _capped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, cap: float) -> Tensor:
    """Return attention with a soft cap of the scores, ``[…, rows, d]``.

    Args:
        q: queries ``[…, rows, d]``.
        k: keys ``[…, keys, d]``.
        v: values ``[…, keys, d]``.
        mask: whether a row sees a key, bool ``[rows, keys]``.
        cap: soft cap ``c``: a score ``s`` becomes ``c · tanh(s / c)``.
    """
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    scores = cap * torch.tanh(scores / cap)
    weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)
    return weights.to(v.dtype) @ v


@dataclass(frozen=True)
class DenseAttention:
    """Causal attention within ``batch`` sequences of ``length`` tokens, which are packed as rows.

    The rows of a sequence are adjacent, and the sequences follow one another.
    """

    batch: int
    length: int
    # Sliding window of each layer in tokens, ``None`` for full attention. An empty tuple: all
    # layers have full attention.
    windows: tuple[int | None, ...] = ()
    # c in ``c · tanh(score / c)``, which limits attention scores; ``None``: no limit
    cap: float | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output ``[rows, heads * d]`` of the attention of layer ``layer`` (from 0).

        ``q`` is ``[rows, heads, d]``, ``k`` and ``v`` are ``[rows, kv_heads, d]``, with ``rows =
        batch * length``.
        """
        q = self._by_sequence(q)
        k = self._by_sequence(k)
        v = self._by_sequence(v)
        mask = self._mask(layer, q.device)
        if mask is not None and self.cap is not None:
            group = q.shape[1] // k.shape[1]
            k = k.repeat_interleave(group, dim=1)
            v = v.repeat_interleave(group, dim=1)
            out = _capped_attention(q, k, v, mask, self.cap)
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, enable_gqa=True
            )
        return out.transpose(1, 2).reshape(self.batch * self.length, -1)

    def _by_sequence(self, x: Tensor) -> Tensor:
        """Return ``x`` ``[rows, heads, d]`` as ``[batch, heads, length, d]``."""
        return x.reshape(self.batch, self.length, *x.shape[1:]).transpose(1, 2)

    def _mask(self, layer: int, device: torch.device) -> Tensor | None:
        """Return the attention mask ``[length, length]`` of a layer: True where a row sees a key.

        The result is ``None`` if plain causal attention will do: without a window and without a
        cap.
        """
        window = self.windows[layer] if self.windows else None
        if (window is None or window >= self.length) and self.cap is None:
            return None
        past = torch.ones(self.length, self.length, dtype=torch.bool, device=device).tril()
        return past if window is None else past.triu(1 - window)


@dataclass(frozen=True)
class DelayedAttention(DenseAttention):
    """Attention of GLIDE in training: self-attention, and cross-attention to the target's cache.

    The rows are those of :class:`DenseAttention`.
    """

    rotation: Rope = None  # rotations of the rows by the target's RoPE; ``None`` if it has none
    # For each draft layer: keys of the target's cache, ``[rows, kv_heads, d]``.
    keys: Sequence[Tensor] = ()
    values: Sequence[Tensor] = ()  # for each draft layer: values of the same shape
    # For each draft layer: which keys of the cache a row sees, bool ``[length, length]``.
    masks: Sequence[Tensor] = ()

    def cross(self, layer: int, q: Tensor) -> Tensor:
        """Return the cross-attention output ``[rows, heads * d]`` of a draft layer (from 0).

        ``q`` are the queries, ``[rows, heads, d]``.
        """
        rotated = q if self.rotation is None else apply_rope(q, *self.rotation)
        dtype = self.values[layer].dtype
        seen = self.masks[layer]
        q = self._by_sequence(rotated.to(dtype))
        k = self._by_sequence(self.keys[layer].to(dtype))
        v = self._by_sequence(self.values[layer])
        # A softmax over no keys is NaN. Rows that see no key attend to all keys instead, and their
        # output is then set to zero.
        sees_any = seen.any(1)
        out = F.scaled_dot_product_attention(q, k, v, seen | ~sees_any[:, None], enable_gqa=True)
        out = out * sees_any[:, None]
        return out.transpose(1, 2).reshape(self.batch * self.length, -1).to(rotated.dtype)


def dense_logits(
    decoder: DecoderModule, tokens: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return a decoder's logits ``[batch * length, vocab]`` for ``tokens [batch, length]``."""
    return decoder.logits(dense_hidden(decoder, tokens, dtype))


def dense_hidden(
    decoder: DecoderModule,
    tokens: Tensor,
    dtype: torch.dtype = torch.float32,
    attend: Attend | None = None,
    stop: int | None = None,
) -> Tensor:
    """Return the output ``[batch * length, hidden]`` of layer ``stop`` for ``tokens``.

    Layers count from 1; the default is the last layer, before the final norm. ``tokens`` is
    ``[batch, length]``. ``attend`` is by default :class:`DenseAttention` with the decoder's
    windows.
    """
    *_, (_, hidden) = dense_states(decoder, tokens, dtype, attend, stop)
    return hidden


def dense_states(
    decoder: DecoderModule,
    tokens: Tensor,
    dtype: torch.dtype,
    attend: Attend | None = None,
    stop: int | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Yield number (from 1) and output ``[batch * length, hidden]`` of the layers up to ``stop``.

    By default, all layers run. ``tokens`` is ``[batch, length]``.
    """
    batch, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).repeat(batch)
    x = decoder.embed(tokens.reshape(-1), positions, dtype)
    if attend is None:
        config = decoder.config
        attend = DenseAttention(batch, length, config.windows, config.attention_cap)
    yield from decoder.run(x, decoder.layer_ropes(positions, dtype), attend, stop)


def dense_rope(
    decoder: DecoderModule, batch: int, length: int, dtype: torch.dtype, device: torch.device
) -> Rope:
    """Return the rotations of RoPE for the rows of ``batch`` sequences of ``length`` tokens each.

    ``None`` if the decoder has no RoPE.
    """
    return decoder.rope(torch.arange(length, device=device).repeat(batch), dtype)


@dataclass
class Features:
    """Outputs, keys and values of a target's layers for ``rows = batch * length`` tokens.

    Layers count from 1.
    """

    last: Tensor  # output of the last layer before the final norm, ``[rows, hidden]``
    # Outputs of layers, ``[rows, hidden]``, by number of the layer.
    hidden: dict[int, Tensor] = field(default_factory=dict)
    # Attention keys of layers, ``[rows, kv_heads, head_dim]``, by number of the layer.
    keys: dict[int, Tensor] = field(default_factory=dict)
    # Attention values of layers, ``[rows, kv_heads, head_dim]``, by number of the layer.
    values: dict[int, Tensor] = field(default_factory=dict)


@torch.no_grad()
def compute_features(
    decoder: DecoderModule,
    tokens: Tensor,
    dtype: torch.dtype,
    hidden: Collection[int] = (),
    cache: Collection[int] = (),
) -> Features:
    """Run the decoder on ``tokens`` ``[batch, length]``, and return what a drafter learns from.

    The result has the outputs of the layers ``hidden``, and the keys and values of the layers
    ``cache``; layers count from 1.
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
    """Attention of training-time test (Li et al. 2025), in which a drafter reads its own output.

    In decoding, a drafter's later draft tokens depend on its own output in place of the target's
    features; so they do in training. Step 0 has a row for each position of the text, with the
    target's features. Row ``i`` of step ``s`` continues row ``i`` of step ``s - 1`` as if the row
    were the ``s``-th draft token. A row attends to the same keys as in decoding: the rows of step 0
    up to ``i``, and its own earlier steps. For three positions, where ``x`` is seen by row 1 of
    step 2::

        keys of   step 0   step 1   step 2
                  x x .    . x .    . x .

    The object is for one batch of texts, and is called once per step, in order.

    Args:
        lengths: number of rows of each text in step 0.
        active: for each text, the indices of the rows that draft; only these rows have queries.
        chained: for each text, a part of ``active``: the indices of the rows that draft further
            tokens, which later steps have; by default all of ``active``.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        active: Sequence[Tensor],
        chained: Sequence[Tensor] | None = None,
    ) -> None:
        self._lengths = list(lengths)
        self._queries = (active, active if chained is None else chained)
        self._cache: list[tuple[Tensor, Tensor]] = []  # keys and values of each step so far

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention output ``[queries, heads * d]`` of the next step.

        ``q`` is ``[queries, heads, d]``, for the active rows in step 0, and for the chained ones in
        later steps. ``k`` and ``v`` are ``[keys, kv_heads, d]``, for all rows in step 0, and for
        the chained ones in later steps.
        """
        rows = self._queries[bool(self._cache)]
        counts = [len(each) for each in rows]
        self._cache.append((k, v))
        first = [each.split(self._lengths) for each in self._cache[0]]
        later = [[each.split(counts) for each in pair] for pair in self._cache[1:]]
        outputs = []
        for i, queries in enumerate(q.split(counts)):
            if len(queries):
                chain = [(keys[i], values[i]) for keys, values in later]
                hidden = rows[i][:, None] < torch.arange(self._lengths[i])
                outputs.append(
                    _attend(queries, first[0][i], first[1][i], hidden.to(q.device), chain)
                )
        return torch.cat(outputs)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, chain: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Return the output ``[rows, heads * d]`` of attention within one text.

    Args:
        q: queries ``[rows, heads, d]``.
        k: keys of step 0, ``[positions, kv_heads, d]``.
        v: values of step 0, of the same shape.
        hidden: bool ``[rows, positions]``, True where a row does not see a key of step 0.
        chain: keys and values ``[rows, kv_heads, d]`` of each later step; a row sees only its
            own key of a step.
    """
    rows, heads, size = q.shape
    kv_heads = k.shape[1]
    # Shape: ``[kv_heads, group, rows, d]``.
    grouped = q.view(rows, kv_heads, heads // kv_heads, size).permute(1, 2, 0, 3) * size**-0.5
    scores = [(grouped @ k.permute(1, 2, 0)[:, None]).masked_fill(hidden, -torch.inf)]
    scores += [(grouped * keys.transpose(0, 1)[:, None]).sum(-1, keepdim=True) for keys, _ in chain]
    weights = torch.cat(scores, dim=-1).softmax(-1)
    out = weights[..., : len(k)] @ v.transpose(0, 1)[:, None]
    for step, (_, values) in enumerate(chain, len(k)):
        out = out + weights[..., step : step + 1] * values.transpose(0, 1)[:, None]
    return out.permute(2, 0, 1, 3).reshape(rows, heads * size)
