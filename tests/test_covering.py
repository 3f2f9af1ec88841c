from itertools import combinations, product

import pytest

from covering import covering, covering_array


@pytest.mark.parametrize("strength", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 3, 4), (5, 2, 3, 2), (2, 2, 2, 2, 2)], ids=str)
def test_every_combination_is_covered_by_few_cases(sizes: tuple[int, ...], strength: int) -> None:
    chosen = covering_array(sizes, strength)
    for places in combinations(range(len(sizes)), strength):
        expected = {*product(*(range(sizes[place]) for place in places))}
        assert {tuple(case[place] for place in places) for case in chosen} == expected
    assert len(chosen) == len({*chosen})
    largest = sorted(sizes)[-strength:]
    fewest = 1
    for size in largest:
        fewest *= size
    assert fewest <= len(chosen) <= 2 * fewest


def test_values_take_turns() -> None:
    assert covering_array([4, 2], 1) == [(0, 0), (1, 1), (2, 0), (3, 1)]


def test_the_other_cases_are_slow_tests() -> None:
    cases = covering("abc", [1, 2], strength=1)
    assert [case.values for case in cases] == [*product("abc", [1, 2])]
    assert [case.values for case in cases if not case.marks] == [("a", 1), ("b", 2), ("c", 1)]
    assert all(mark.name == "slow" for case in cases for mark in case.marks)
