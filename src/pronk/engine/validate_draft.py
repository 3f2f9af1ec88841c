"""Validation of the trees that drafters propose."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from operator import index
from typing import Any

import numpy as np

from pronk.base.arrays import BFLOAT16, Array
from pronk.base.errors import OptionError
from pronk.drafting.proposer import DraftContext
from pronk.sampling.grammar_pruning import prune
from pronk.sampling.tree import TokenTree

# allowed difference between 1 and the sum of a distribution, for float32 rounding
_TOLERANCE = 1e-3


def validate_draft(
    name: str, context: DraftContext[Any], tree: TokenTree, vocab_size: int
) -> TokenTree:
    """Check a proposed tree, and drop nodes that the target need not compute.

    These are nodes beyond the limits or the vocabulary, and nodes that the guide forbids. This is
    the only place where a proposal is checked: later steps rely on it.

    Raises ``OptionError``, ``TypeError`` or ``ValueError`` if the tree is invalid, or its root is
    not the last token.
    """
    tree.check()
    if tree.num_draft_tokens:
        tree = _to_plain_types(tree)
    if tree.tokens[0] != context.tokens[-1]:
        msg = (
            f"drafter {name}: expected a tree with root token {context.tokens[-1]}, found "
            f"{tree.tokens[0]}"
        )
        raise OptionError(msg)
    if not tree.num_draft_tokens:
        return tree
    if any(q is not None and len(q) != vocab_size for q in tree.probs or ()):
        # ``probs`` are over another vocabulary. Tokens outside the target's vocabulary are dropped
        # below, after which the remaining tokens are no sample of ``probs``. Verify all as point
        # masses, even if no token is dropped.
        tree = replace(tree, probs=None)
    if not all(q is None or _is_distribution(q) for q in tree.probs or ()):
        msg = (
            f"drafter {name}: expected float arrays [vocab] that sum to 1 in probs, found others; "
            "normalize them"
        )
        raise OptionError(msg)
    if min(tree.tokens) < 0 or max(tree.tokens) >= vocab_size:
        tree = tree.keep(node for node, token in enumerate(tree.tokens) if 0 <= token < vocab_size)
    guide = context.sampler.guide
    # Rejection sampling needs all tokens sampled from ``probs``, so tokens that the guide forbids
    # are not removed.
    if guide is not None and not (context.params.rejects and tree.probs is not None):
        tree = prune(tree, guide)
    return tree.limit(context.max_depth, context.max_nodes)


def _to_plain_types(tree: TokenTree) -> TokenTree:
    """Convert numbers of other libraries to Python's own, and ``probs`` to arrays.

    Python's own numbers are JSON values.

    Raises ``TypeError`` or ``ValueError`` if a token or parent is no integer, a gain is not finite,
    or an origin has not two entries.
    """
    gain = tree.gain
    origin = tree.origin
    verify = tree.verify
    probs = tree.probs
    if gain is not None and not math.isfinite(sum(gain)):
        msg = f"expected finite numbers in gain, found {gain}; check the drafter"
        raise ValueError(msg)
    unchanged = (
        type(tree.tokens) is type(tree.parents) is tuple
        and _types(tree.tokens) == _types(tree.parents) == {int}
        and (gain is None or _types(gain) == {float})
        and (verify is None or _types(verify) == {bool})
        and (origin is None or {(type(name), type(kind)) for name, kind in origin} == {(str, int)})
        and all(q is None or type(q) is np.ndarray for q in probs or ())
    )
    if unchanged:
        return tree
    return TokenTree(
        tuple(int(index(token)) for token in tree.tokens),
        tuple(int(index(parent)) for parent in tree.parents),
        None if verify is None else tuple(map(bool, verify)),
        None if probs is None else tuple(None if q is None else np.asarray(q) for q in probs),
        None if gain is None else tuple(map(float, gain)),
        None if origin is None else tuple((str(name), int(index(kind))) for name, kind in origin),
    )


def _types(values: Iterable[object]) -> set[type]:
    return {type(value) for value in values}


def _is_distribution(q: Array) -> bool:
    if q.ndim != 1 or not (q.dtype.kind == "f" or q.dtype == BFLOAT16):
        return False
    numbers = q.astype(np.float64)
    return bool(numbers.min() >= 0.0) and abs(float(numbers.sum()) - 1.0) < _TOLERANCE
