"""The most frequent tokens: ranks by added tokens, counts and ids."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pronk.base.errors import OptionError
from pronk.drafting.shared.vocabulary.frequent import count_tokens, most_frequent
from pronk.text.tokenizer import Tokenizer

TOKENS = np.arange(3, 13, dtype=np.int32)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, [12]),  # frequent in every text
        (2, [7, 12]),  # the largest count
        (4, [5, 6, 7, 12]),  # equal counts: the smaller id first
        (6, [3, 4, 5, 6, 7, 12]),  # no count
        (10, TOKENS.tolist()),
    ],
)
def test_ranks(count: int, expected: list[int]) -> None:
    counts = Counter({7: 9, 5: 2, 6: 2, 99: 50})  # token 99 is not among the tokens
    found = most_frequent(TOKENS, count, [12, 98], counts)
    assert found.dtype == np.int32
    assert found.tolist() == expected


def test_tokens_of_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    texts = ["one line\n" * 3000, "another"]
    for name, text in zip("ab", texts, strict=True):
        (tmp_path / f"{name}.txt").write_text(text)
    (tmp_path / "c.md").write_text("not read")
    lines = [line for text in texts for line in text.splitlines(keepends=True)]
    expected = Counter(
        token for ids in tokenizer.encode_batch(lines, add_special_tokens=False) for token in ids
    )
    assert count_tokens(tmp_path, tokenizer, "option") == expected
    alone = count_tokens(tmp_path / "b.txt", tokenizer, "option")
    assert alone == Counter(tokenizer.encode("another", add_special_tokens=False))


def test_a_file_that_is_no_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match=r"option: .*a.txt: expected text in UTF-8, found"):
        count_tokens(tmp_path, tokenizer, "option")
