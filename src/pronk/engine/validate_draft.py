"""What a guesser proposes, held to what a tree has to be."""

from __future__ import annotations

import math
from dataclasses import replace
from operator import index
from typing import Any

from torch import Tensor

from pronk.errors import OptionError
from pronk.sampling.grammar_pruning import prune
from pronk.speculation.proposer import DraftContext
from pronk.speculation.tree import TokenTree

__all__ = ["validate_draft"]

# How far the sum of a distribution may be from 1.
_SLACK = 1e-3


def validate_draft(name: str, context: DraftContext[Any], tree: TokenTree, vocab_size: int) -> TokenTree:
    """The proposal within the limits, less guesses that the target has no token for, or that its guide forbids.

    Args:
        name: the drafter's, for errors.
        context: that it was asked with.
        tree: what it gave.
        vocab_size: of the target.

    Raises:
        OptionError, TypeError, ValueError: it is no tree for this request.
    """
    if tree.num_draft_tokens:
        tree = _plain(tree)
    if tree.tokens[0] != context.tokens[-1]:
        msg = f"drafter {name}: expected a tree below token {context.tokens[-1]}, found {tree.tokens[0]}"
        raise OptionError(msg)
    if not tree.num_draft_tokens:
        return tree
    if any(q is not None and len(q) != vocab_size for q in tree.probs or ()):
        # Drawn from other tokens than the target's, some of which are left out: what is left has another law. And
        # it must not depend on the draw how a guess is tried, so all are point masses, which any guess may be.
        tree = replace(tree, probs=None)
    if not all(q is None or _is_distribution(q) for q in tree.probs or ()):
        msg = f"drafter {name}: expected distributions [vocab] of a float type in probs, found others"
        raise OptionError(msg)
    if min(tree.tokens) < 0 or max(tree.tokens) >= vocab_size:
        tree = tree.keep(node for node, token in enumerate(tree.tokens) if 0 <= token < vocab_size)
    guide = context.sampler.guide
    # A guess that its own token could cost its place has another law than its ``probs``.
    if guide is not None and not (context.params.rejects and tree.probs is not None):
        tree = prune(tree, guide)
    return tree.limit(context.max_depth, context.max_nodes)


def _plain(tree: TokenTree) -> TokenTree:
    """The tree in Python's own numbers: those of other libraries would get into reports, and fail there.

    Raises:
        TypeError, ValueError: tokens or parents are not whole, or gains not finite, or origins no pairs of name and
            number.
    """
    gain, origin, verify = tree.gain, tree.origin, tree.verify
    if gain is not None and not math.isfinite(sum(gain)):
        msg = f"expected finite gains, found {gain}"
        raise ValueError(msg)
    is_plain = (
        type(tree.tokens) is type(tree.parents) is tuple
        and set(map(type, (*tree.tokens, *tree.parents))) == {int}
        and (gain is None or set(map(type, gain)) == {float})
        and (verify is None or set(map(type, verify)) == {bool})
        and (origin is None or {(type(name), type(way)) for name, way in origin} == {(str, int)})
    )
    if is_plain:
        return tree
    return TokenTree(
        tuple(int(index(token)) for token in tree.tokens),
        tuple(int(index(parent)) for parent in tree.parents),
        None if verify is None else tuple(map(bool, verify)),
        tree.probs,
        None if gain is None else tuple(map(float, gain)),
        None if origin is None else tuple((str(name), int(index(way))) for name, way in origin),
    )


def _is_distribution(q: Tensor) -> bool:
    return q.ndim == 1 and q.is_floating_point() and bool(q.min() >= 0.0) and abs(float(q.sum()) - 1.0) < _SLACK
