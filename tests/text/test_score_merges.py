"""Merges from scores, compared with a plain loop over all splits of all tokens."""

from __future__ import annotations

import numpy as np
import pytest

from pronk.text import score_merges
from pronk.text.score_merges import TooManyPairsError, merges_from_scores


def plain_merges(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    vocabulary = {token for token in tokens if token}
    pairs = [
        (score, token[:length], token[length:])
        for token, score in zip(tokens, scores, strict=True)
        for length in range(1, len(token))
        if token[:length] in vocabulary and token[length:] in vocabulary
    ]
    pairs.sort(key=lambda pair: (pair[0], len(pair[1]), len(pair[2])), reverse=True)
    return [(first, second) for _, first, second in pairs]


def random_tokens(seed: int, count: int) -> list[str]:
    """Return different texts of few characters, some empty, of one to four bytes in UTF-8."""
    rng = np.random.default_rng(seed)
    alphabet = np.array(["a", "b", "\0", "\x01", "é", "▁", "中", "🙂"])
    sizes = rng.integers(1, 7, count)
    texts = dict.fromkeys("".join(rng.choice(alphabet, size)) for size in sizes)
    tokens = list(texts)
    for place in rng.integers(0, len(tokens), 20):
        tokens.insert(int(place), "")
    return tokens


@pytest.mark.parametrize(
    ("chunk", "table_bits"),
    [(score_merges._CHUNK, score_merges._TABLE_BITS), (1, 22), (7, 1), (64, 8)],
    ids=["default", "single tokens", "shared entries", "some shared entries"],
)
def test_merges_are_those_of_a_plain_loop(
    chunk: int, table_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score_merges, "_CHUNK", chunk)
    monkeypatch.setattr(score_merges, "_TABLE_BITS", table_bits)
    tokens = random_tokens(1, 1500)
    # few different scores, so that the lengths decide, and then the places of the tokens
    scores = [float(score) for score in np.random.default_rng(2).integers(-3, 3, len(tokens))]
    scores[:2] = [0.0, -0.0]
    expected = plain_merges(tokens, scores)
    assert merges_from_scores(tokens, scores, len(expected)) == expected
    assert len(expected) > 1000, "expected merges to compare"
    with pytest.raises(TooManyPairsError):
        merges_from_scores(tokens, scores, len(expected) - 1)


@pytest.mark.parametrize(
    "tokens", [[], [""], ["a"], ["\0"], ["\0", ""], ["", "\0\0", "\0"]], ids=repr
)
def test_small_vocabularies(tokens: list[str]) -> None:
    scores = [0.0] * len(tokens)
    assert merges_from_scores(tokens, scores, 10) == plain_merges(tokens, scores)


def test_hashes_of_short_texts_differ_in_their_leading_bits() -> None:
    """If not, all tokens of one character would share an entry of the table."""
    hashes = score_merges._hashes([chr(code) for code in range(33, 4096)])
    slots = hashes >> np.uint64(64 - score_merges._TABLE_BITS)
    assert len(np.unique(slots)) > 0.99 * len(slots)
