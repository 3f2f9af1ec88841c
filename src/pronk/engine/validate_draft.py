"""Validation of a proposed tree against the limits, vocabulary and guide of its request."""

from __future__ import annotations

from dataclasses import replace
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
    """Check a tree against its request, and drop nodes that the target need not compute.

    These are nodes beyond the limits or the vocabulary, and nodes that the guide forbids. The tree
    itself has been checked by :mod:`pronk.drafting.checked_proposals`; later steps rely on both.

    Raises ``OptionError`` if ``probs`` are no distributions.
    """
    if len(tree.tokens) == 1:
        return tree
    if tree.probs is not None:
        tree = _validate_probs(name, tree, vocab_size)
    if min(tree.tokens) < 0 or max(tree.tokens) >= vocab_size:
        tree = tree.keep(node for node, token in enumerate(tree.tokens) if 0 <= token < vocab_size)
    guide = context.sampler.guide
    # Rejection sampling needs all tokens sampled from ``probs``, so tokens that the guide forbids
    # are not removed.
    if guide is not None and not (context.params.rejects and tree.probs is not None):
        tree = prune(tree, guide)
    return tree.limit(context.max_depth, context.max_nodes)


def _validate_probs(name: str, tree: TokenTree, vocab_size: int) -> TokenTree:
    """Check the distributions of a tree; drop them if they are over another vocabulary."""
    assert tree.probs is not None
    if any(q is not None and len(q) != vocab_size for q in tree.probs):
        # ``probs`` are distributions over another vocabulary. Tokens outside the target's
        # vocabulary are dropped below, and then the other tokens are no longer distributed as
        # ``probs``. So verify the tokens without ``probs``, as if each had been proposed with
        # certainty.
        return replace(tree, probs=None)
    if not all(q is None or _is_distribution(q) for q in tree.probs):
        msg = (
            f"drafter {name}: expected float arrays [vocab] that sum to 1 in probs, found others; "
            "normalize them"
        )
        raise OptionError(msg)
    return tree


def _is_distribution(q: Array) -> bool:
    if q.ndim != 1 or not (q.dtype.kind == "f" or q.dtype == BFLOAT16):
        return False
    numbers = q.astype(np.float64)
    return bool(numbers.min() >= 0.0) and abs(float(numbers.sum()) - 1.0) < _TOLERANCE
