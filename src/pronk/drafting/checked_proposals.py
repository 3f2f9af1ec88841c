"""Checks of proposed trees, made once per proposal because a drafter may be a plug-in."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from pronk.base.errors import OptionError
from pronk.drafting.proposer import DraftContext, Proposer
from pronk.sampling.tree import TokenTree


def call_propose(
    proposer: Proposer[Any], contexts: Sequence[DraftContext[Any]]
) -> Sequence[TokenTree]:
    """Return the trees of ``proposer.propose(contexts)`` after checking them.

    Composite drafters call their parts by this function, too.

    Raises:
        OptionError: there is not one tree per context, or the root of a tree is not the last token
            of its context.
        TypeError: a field of a tree has another type.
        ValueError: a tree is invalid.
    """
    trees: object = proposer.propose(contexts)
    expected = f"drafter {proposer.name}: expected propose() to return a list of TokenTrees"
    if not isinstance(trees, (list, tuple, Sequence)):  # the first two are tested fastest
        msg = f"{expected}, found {type(trees).__name__}; return one tree per context"
        raise OptionError(msg)
    if len(trees) != len(contexts):
        msg = f"{expected}, one for each of {len(contexts)} contexts, found {len(trees)}"
        raise OptionError(msg)
    checked = list[TokenTree]()
    for context, tree in zip(contexts, trees, strict=True):
        if not isinstance(tree, TokenTree):
            found = f"one with {type(tree).__name__}"
            msg = f"{expected}, found {found}; TokenTree.chain([last token, …]) makes one"
            raise OptionError(msg)
        plain = check_tree(tree)
        if plain.tokens[0] != context.tokens[-1]:
            msg = (
                f"drafter {proposer.name}: expected a tree with root token {context.tokens[-1]}, "
                f"found {plain.tokens[0]}; TokenTree.chain([last token, …]) makes one"
            )
            raise OptionError(msg)
        checked.append(plain)
    return checked


def check_tree(tree: TokenTree) -> TokenTree:
    """Return a valid tree of Python's own numbers and tuples, which no drafter can change any more.

    Raise ``TypeError`` or ``ValueError`` if the tree is invalid. The arrays in ``probs`` are not
    copied.
    """
    return tree if tree.is_plain else _to_plain_types(tree)


def _to_plain_types(tree: TokenTree) -> TokenTree:
    """Convert numbers of other libraries to Python's own, lists to tuples, ``probs`` to arrays.

    Python's own numbers are JSON values. A list that the drafter keeps could change later.

    Raises ``TypeError`` or ``ValueError`` if a token or parent is no integer, or an origin has not
    two entries.
    """
    gain = tree.gain
    origin = tree.origin
    verify = tree.verify
    probs = tree.probs
    return TokenTree(
        tuple(int(index(token)) for token in tree.tokens),
        tuple(int(index(parent)) for parent in tree.parents),
        None if verify is None else tuple(map(bool, verify)),
        None if probs is None else tuple(None if q is None else np.asarray(q) for q in probs),
        None if gain is None else tuple(map(float, gain)),
        None if origin is None else tuple((str(name), int(index(kind))) for name, kind in origin),
    )
