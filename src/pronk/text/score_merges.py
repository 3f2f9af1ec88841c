"""Merges of a SentencePiece BPE, which are computed from the tokens and their scores.

A merge is a pair of tokens that together are a token. A token of ``n`` characters has ``n - 1``
splits into two texts, so the vocabulary of Gemma 3 has 1.6 million splits, of which half a million
are merges. NumPy looks up the texts of many splits at once, by their hashes. With ``c`` the
characters of several tokens, one after the other, as code points plus 1, and all numbers modulo
2⁶⁴, the hash of the text from ``start`` to ``stop`` is ::

    (G[stop] - G[start]) · B^-start        where G[i] = Σ c[j] · B^(j + 1) over j < i

(Karp and Rabin, "Efficient randomized pattern-matching algorithms", 1987).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pronk.base.arrays import Array

# B of the hash: odd, so that it has an inverse modulo 2⁶⁴.
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)
# Number of tokens whose splits are looked up at a time. Their arrays fit the processor's cache.
_CHUNK = 1 << 13
# Number of leading bits of a hash that index a table of 16 MiB. Of 262,144 tokens, 6 % share their
# entry with another one.
_TABLE_BITS = 22
# Numbers of bits of a token's length, at most 1,024 characters, in a sort key.
_LENGTH_BITS = 11


class TooManyPairsError(ValueError):
    """More pairs of tokens are a token together than the caller allows."""


class _TextHashes:
    """Hashes of texts and of parts of them.

    Attributes:
        starts: int64 ``[texts]``: place of each text in all texts, one after the other.
        stops: int64 ``[texts]``: end of each text.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        self.stops = np.cumsum(lengths)
        self.starts = self.stops - lengths
        joined = "".join(texts).encode("utf-32-le", "surrogatepass")
        codes = np.frombuffer(joined, np.uint32) + np.uint64(1)
        self._sums = np.zeros(len(codes) + 1, np.uint64)
        np.cumsum(codes * _powers(_BASE, len(codes) + 1)[1:], out=self._sums[1:])
        self._inverses = _powers(_INVERSE, len(codes) + 1)

    def of(self, start: Array, stop: Array) -> Array:
        """Return the hashes of the characters ``start .. stop - 1`` of all texts, uint64."""
        return (self._sums[stop] - self._sums[start]) * self._inverses[start]


class _TokenIndex:
    """Finds tokens by the hashes of their texts.

    A table has an entry for each value of a hash's leading bits. Tokens that share an entry are
    found by binary search, so that hashes which a file provokes to be alike cost little.

    Args:
        hashes: uint64 ``[tokens]``: hash of each token.
    """

    _SHARED = -1  # entry of several tokens

    def __init__(self, hashes: Array) -> None:
        self._hashes = hashes
        slots = self._slots(hashes)
        numbers = np.arange(len(hashes), dtype=np.int32)
        # An empty entry is 0, like that of the first token, whose hash then differs.
        self._table = np.zeros(1 << _TABLE_BITS, np.int32)
        self._table[slots] = numbers
        self._table[slots[self._table[slots] != numbers]] = self._SHARED
        sharing = numbers[self._table[slots] == self._SHARED]
        self._sharing = sharing[np.argsort(hashes[sharing])]

    def find(self, hashes: Array) -> Array:
        """Return the number of the token with each hash, int32; -1 if there is none."""
        numbers = self._table[self._slots(hashes)]
        is_shared = numbers == self._SHARED
        if is_shared.any():
            places = np.searchsorted(self._hashes[self._sharing], hashes[is_shared])
            numbers[is_shared] = self._sharing.take(places, mode="clip")
        numbers[self._hashes[numbers] != hashes] = -1
        return numbers

    @staticmethod
    def _slots(hashes: Array) -> Array:
        return hashes >> np.uint64(64 - _TABLE_BITS)


def merges_from_scores(
    tokens: Sequence[str], scores: Sequence[float], max_pairs: int
) -> list[tuple[str, str]]:
    """Return all pairs of tokens that together are a token.

    The pairs are sorted by the score of the joined token, highest first; then by the lengths of the
    first and of the second token, longest first; then by the place of the joined token in
    ``tokens``. This is the order of ``generate_merges`` in transformers, which has written the
    ``tokenizer.json`` of these models.

    Args:
        tokens: different texts, of at most 1,024 characters each. Empty texts are left out, and
            may occur several times.
        scores: score of each token, a number or infinity.
        max_pairs: maximum number of pairs.

    Raises:
        TooManyPairsError: there are more pairs.
    """
    if not tokens:
        return []
    found = list(_find_pairs(tokens, max_pairs))
    joined, first, second = (np.concatenate(parts) for parts in zip(*found, strict=True))
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    # Equal scores have equal ranks; the best score has rank 0.
    _, ranks = np.unique(-np.asarray(scores, np.float64), return_inverse=True)
    longest = (1 << _LENGTH_BITS) - 1
    keys = ranks[joined] << (2 * _LENGTH_BITS)
    keys |= (longest - lengths[first]) << _LENGTH_BITS
    keys |= longest - lengths[second]
    order = np.argsort(keys, kind="stable")
    texts = np.array(tokens, object)
    pairs = zip(texts[first[order]].tolist(), texts[second[order]].tolist(), strict=True)
    return list(pairs)


def _find_pairs(tokens: Sequence[str], max_pairs: int) -> Iterator[tuple[Array, Array, Array]]:
    """Yield the pairs of tokens that are a token together, in the order of the joined tokens.

    Each result has three arrays of token numbers, ``[pairs]``: the joined tokens, the first and the
    second tokens.
    """
    begins = range(0, len(tokens), _CHUNK)
    chunks = [tokens[begin : begin + _CHUNK] for begin in begins]
    hashes = [_hashes(chunk) for chunk in chunks]
    index = _TokenIndex(np.concatenate(hashes))
    num_pairs = 0
    for begin, chunk in zip(begins, chunks, strict=True):
        texts = _TextHashes(chunk)
        # Each place inside a token, behind its first character, is a split.
        owners = np.repeat(np.arange(len(chunk)), texts.stops - texts.starts)
        places = np.flatnonzero(np.arange(len(owners)) > texts.starts[owners])
        joined = owners[places]
        first = index.find(texts.of(texts.starts[joined], places))
        second = index.find(texts.of(places, texts.stops[joined]))
        is_pair = (first >= 0) & (second >= 0)
        num_pairs += int(np.count_nonzero(is_pair))
        if num_pairs > max_pairs:
            raise TooManyPairsError
        yield begin + joined[is_pair], first[is_pair], second[is_pair]


def _hashes(texts: Sequence[str]) -> Array:
    """Return the hash of each text, uint64 ``[texts]``."""
    hashes = _TextHashes(texts)
    return hashes.of(hashes.starts, hashes.stops)


def _powers(base: int, count: int) -> Array:
    """Return ``base ** i`` modulo 2⁶⁴ for i from 0 to ``count - 1``, uint64."""
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    return np.cumprod(powers, out=powers)
