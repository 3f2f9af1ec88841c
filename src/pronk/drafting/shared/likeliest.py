"""Likeliest tokens after a node, and initial draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pronk.base.arrays import Array, address_of
from pronk.drafting.proposer import Outcome
from pronk.kernels.exact_math import find_library
from pronk.sampling.truncation import likeliest

_GROUP = 64  # number of ids in a group


def top_tokens(
    outcome: Outcome[Any], count: int, nodes: Sequence[int] | None = None
) -> list[list[int]]:
    """Return the ``count`` tokens of largest logits after each node, the largest first.

    ``nodes`` are all nodes by default.

    The request's logit bias is applied first. Temperature and truncation do not change the order.
    Penalties are not applied, since they depend on the tokens before each node.
    """
    ids, _ = top_logits(outcome, count, nodes)
    return ids


def top_logits(
    outcome: Outcome[Any], count: int, nodes: Sequence[int] | None = None
) -> tuple[list[list[int]], list[list[float]]]:
    """Return the tokens of :func:`top_tokens`, and their logits with the request's logit bias."""
    logits = outcome.logits
    assert count > 0, "expected at least one token"
    assert logits is not None, "expected a drafter with Capabilities(logits=True)"
    remaining = logits if nodes is None else logits[list(nodes)]
    if outcome.params.logit_bias:
        remaining = logits.copy() if nodes is None else remaining
        ids, values = zip(*outcome.params.logit_bias.items(), strict=True)
        remaining[:, list(ids)] += np.array(values, np.float32)
    tokens, largest = _likeliest(remaining, min(count, remaining.shape[-1]))
    return tokens.tolist(), largest.tolist()


def _likeliest(logits: Array, count: int) -> tuple[Array, Array]:
    """Return ids and values of each row's ``count`` largest logits, ``[rows, count]``.

    The largest comes first, and equal logits are in the order of their ids.

    The kernels' library finds them; without a usable library, NumPy finds the same ids.
    """
    library = find_library()
    if library is None:
        tokens = np.array(_likeliest_by_numpy(logits, count)).reshape(len(logits), count)
        return tokens, np.take_along_axis(logits, tokens, 1)
    rows, size = logits.shape
    contiguous = np.ascontiguousarray(logits, np.float32)
    ids = np.empty((rows, count), np.int32)
    largest = np.empty((rows, count), np.float32)
    library.functions.pronk_likeliest(
        address_of(contiguous), rows, size, count, address_of(ids), address_of(largest)
    )
    return ids, largest


def _likeliest_by_numpy(logits: Array, count: int) -> list[Array]:
    """Return the ids of :func:`_likeliest`, found with NumPy.

    The ids are divided into groups. The ``count`` largest logits are in the ``count`` groups of the
    largest maxima, so that only these groups, and ids without a group, are sorted.
    """
    rows, size = logits.shape
    num_groups = size // _GROUP
    if count == 1 or num_groups <= count:
        return [likeliest(row, count) if count > 1 else row.argmax(keepdims=True) for row in logits]
    grouped = num_groups * _GROUP
    # group i has the ids i, i + num_groups, i + 2 num_groups, …
    maxima = logits[:, :grouped].reshape(rows, _GROUP, num_groups).max(1)
    members = np.arange(0, grouped, num_groups)[:, None]
    rest = np.arange(grouped, size)
    best = []
    for row, row_maxima in zip(logits, maxima, strict=True):
        lowest = np.partition(row_maxima, num_groups - count)[num_groups - count]
        if np.isnan(lowest):
            best.append(likeliest(row, count))
            continue
        ids = np.concatenate([(members + np.flatnonzero(row_maxima >= lowest)).ravel(), rest])
        best.append(ids[np.lexsort((ids, -row[ids]))[:count]])
    return best


def initial_draft_token(prompt: Sequence[int], position: int) -> int:
    """Return an arbitrary token of the prompt as the first draft token for ``position``.

    For drafters that refine any initial guess, such as Jacobi decoding, where the target has no
    output for the position yet.
    """
    # 7919 is a large prime, so neighbouring positions get distant tokens of the prompt.
    return prompt[position * 7919 % len(prompt)]
