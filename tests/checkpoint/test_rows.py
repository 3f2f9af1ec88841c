"""Rows that a weight takes of a stored tensor, by head."""

import numpy as np
import pytest

from pronk.checkpoint.rows import HeadRows


def test_pairs_are_separated() -> None:
    stored = np.array([0, 3, 1, 4, 2, 5])  # the rows of one head of size 6
    rows = HeadRows(2, pairs=True)
    assert rows.count(12) == 12
    assert [*np.concatenate([stored, stored + 6])[rows.order(12)]] == [*range(12)]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (HeadRows(3), [*range(12)]),
        (HeadRows(3, stop=2), [0, 1, 4, 5, 8, 9]),
        (HeadRows(3, start=3), [3, 7, 11]),
        (HeadRows(2, start=1, stop=4), [1, 2, 3, 7, 8, 9]),
    ],
)
def test_order_count_and_runs_agree(rows: HeadRows, expected: list[int]) -> None:
    assert [*rows.order(12)] == expected
    assert rows.count(12) == len(expected)
    assert [*np.concatenate([np.arange(12)[run] for run in rows.runs(12)])] == expected
