"""Proposals that arrive from drafters: checked, and copied where a drafter could change them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pronk.drafting.checked_proposals import check_tree
from pronk.sampling.tree import TokenTree


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("field", ["tokens", "parents", "verify", "probs", "gain", "origin"])
def test_a_list_that_the_drafter_keeps_is_copied(field: str, size: int) -> None:
    """Also in a tree of the root alone."""
    kept: dict[str, list[Any]] = {
        "tokens": [*range(size)],
        "parents": [*range(-1, size - 1)],
        "verify": [True] * size,
        "probs": [None] * size,
        "gain": [1.0] * size,
        "origin": [("x", 0)] * size,
    }
    given: dict[str, Any] = {name: tuple(values) for name, values in kept.items()}
    tree = check_tree(TokenTree(**(given | {field: kept[field]})))
    kept[field].clear()
    assert getattr(tree, field) == given[field]


def test_an_origin_that_the_drafter_keeps_is_copied() -> None:
    kept = ["x", 0]
    origin: Any = (("", 0), kept)
    tree = check_tree(TokenTree((1, 2), (-1, 0), origin=origin))
    kept[0] = "y"
    assert tree.origin == (("", 0), ("x", 0))


def test_a_tree_of_plain_types_is_not_copied() -> None:
    probs = (None, np.ones(3) / 3)
    tree = TokenTree((1, 2), (-1, 0), probs=probs, gain=(1.0, 0.5), origin=(("", 0), ("x", 1)))
    assert check_tree(tree) is tree


@pytest.mark.parametrize("gain", [(2.0,), (1.0, float("nan")), (1.0, -0.5)])
def test_gains_are_probabilities(gain: tuple[float, ...]) -> None:
    size = len(gain)
    tree = TokenTree(tuple(range(size)), tuple(range(-1, size - 1)), gain=gain)
    with pytest.raises(ValueError, match=r"expected probabilities, 0\.\.1, in gain"):
        check_tree(tree)
