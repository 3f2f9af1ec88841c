from itertools import combinations, product
from pathlib import Path

import pytest

from covering import covering, covering_array, mark_further_cases, spread_cases


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


def test_few_cases_have_all_values() -> None:
    cases = [*product(range(4), range(3))]
    chosen = spread_cases(cases, 4)
    assert len(chosen) == 4
    for place, size in enumerate((4, 3)):
        assert {cases[number][place] for number in chosen} == {*range(size)}


def test_few_cases_of_one_parameter_are_evenly_spaced() -> None:
    cases = [[number] for number in range(9)]
    assert spread_cases(cases, 3) == {0, 4, 8}
    assert spread_cases(cases, 1) == {0}
    assert spread_cases(cases, 20) == {*range(9)}


CASES = """
import pytest

@pytest.mark.few(2)
@pytest.mark.parametrize("x", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("y", "abc")
def test_few(x, y):
    pass

@pytest.mark.parametrize("x", [1, 2])
def test_other(x):
    pass
"""


def test_the_marker_makes_slow_tests_of_the_other_cases(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    file = tmp_path / "test_cases.py"
    file.write_text(CASES)
    items = [*pytest.Module.from_parent(request.session, path=file).collect()]
    assert len(items) == 11
    mark_further_cases(items)
    always = [item.name for item in items if item.get_closest_marker("slow") is None]
    assert always == ["test_few[a-1]", "test_few[c-2]", "test_other[1]", "test_other[2]"]
