"""Options that commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from pronk.cli.options import shares

baked: list[tuple[int, str, int, int]] = []


def bread(*, flour: str = "rye", grams: int = 500) -> tuple[str, int]:
    return flour, grams


def oven(
    place: str = "kitchen", *, degrees: int = 220, flour: str = "none"
) -> tuple[str, int, str]:
    return place, degrees, flour


@shares(dough=bread, heat=oven, without=("grams",))
def bake(
    loaves: int,
    dough: Callable[[], tuple[str, int]],
    heat: Callable[[], tuple[str, int, str]],
    *,
    degrees: int = 250,
    grams: int = 1,
) -> None:
    flour, weight = dough()
    place, heated, spread = heat()
    # options of one name have one value
    assert (place, heated, spread) == ("kitchen", degrees, flour)
    baked.append((loaves, flour, weight, grams))


def test_signature() -> None:
    """The first definition of an option gives its default, the last one its position."""
    assert str(inspect.signature(bake)) == (
        "(loaves: 'int', *, grams: 'int' = 1, degrees: 'int' = 250, flour: 'str' = 'rye') -> 'None'"
    )


@pytest.mark.parametrize(("flour", "grams"), [("rye", 1), ("oat", 2)])
def test_builders_receive_their_own_options(flour: str, grams: int) -> None:
    bake(loaves=3, grams=grams, degrees=200, flour=flour)
    assert baked.pop() == (3, flour, 500, grams)  # ``without`` keeps bread's default of 500 grams
