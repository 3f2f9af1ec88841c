"""Numbers in messages: two different ones never look the same."""

from __future__ import annotations

import re

import pytest

from pronk.base.quantities import number_texts, size_texts

SIZES = [
    0,
    1,
    999,
    1000,
    1001,
    1023,
    1024,
    10**6 - 1,
    10**6,
    12_345_678,
    12_345_679,
    10**9,
    10**9 + 1,
    123 * 10**12,
]


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("other", SIZES)
def test_different_sizes_have_different_texts(size: int, other: int, binary: bool) -> None:
    one, two = size_texts(size, other, binary=binary)
    assert (one == two) is (size == other)
    assert all(re.fullmatch(r"[\d.]+ (bytes?|[kMGK]i?B)", text) for text in (one, two))


@pytest.mark.parametrize(
    ("sizes", "texts"),
    [
        ((12_000_000, 13_000_000), ["12 MB", "13 MB"]),
        ((12_345_678, 12_345_679), ["12.345678 MB", "12.345679 MB"]),
        ((12_345_678,), ["12.3 MB"]),
        ((1_500, 999), ["1.5 kB", "999 bytes"]),
        ((0, 1, 2), ["0 bytes", "1 byte", "2 bytes"]),
        ((2_345_678_901_234,), ["2346 GB"]),
    ],
)
def test_sizes_have_few_digits(sizes: tuple[int, ...], texts: list[str]) -> None:
    assert size_texts(*sizes) == texts


@pytest.mark.parametrize(
    ("numbers", "texts"),
    [
        ((0.1, 0.5), ["0.1", "0.5"]),
        ((0.10001, 0.10002), ["0.10001", "0.10002"]),
        ((10, 10), ["10", "10"]),
    ],
)
def test_different_numbers_have_different_texts(
    numbers: tuple[float, ...], texts: list[str]
) -> None:
    assert number_texts(*numbers) == texts
