"""The most frequent tokens of a vocabulary, for drafters that propose only these.

A language model with 250,000 tokens uses few of them in most texts. A draft head with the rows of
the frequent ones is several times smaller, and the target's other tokens are merely not drafted
(Zhao et al. 2025, *FR-Spec: Accelerating Large-Vocabulary Language Models via Frequency-Ranked
Speculative Sampling*).

Without texts to count, the numbers of the tokens say which are frequent. Byte-pair encoding begins
with characters or bytes and numbers merged tokens in the order in which they were the most frequent
pair of the tokenizer's training text, so that a smaller number is a more frequent token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from pronk.base.errors import OptionError, refuse
from pronk.base.files.text import read_text
from pronk.sampling.draft_token import DraftIds
from pronk.text.tokenizer import Tokenizer

_PATTERN = "*.txt"  # names of the files that are read of a folder
_LINES = 1024  # number of lines that are encoded at a time


def most_frequent(
    tokens: DraftIds, count: int, always: Iterable[int], counts: Counter[int]
) -> DraftIds:
    """Return the ``count`` most frequent of ``tokens``, ascending.

    Tokens of ``always`` come first, then the others by their ``counts``, and tokens of equal counts
    by their ids.

    Args:
        tokens: token ids, different from each other.
        count: number of tokens of the result, at most that of ``tokens``.
        always: ids of tokens that are frequent in every text, such as the end of a text.
        counts: number of times that tokens occur in the user's own texts.
    """
    is_first = np.isin(tokens, [*always])
    number = np.array([counts[token] for token in tokens.tolist()])
    ranked = tokens[np.lexsort((tokens, -number, ~is_first))]
    return np.sort(ranked[:count])


def count_tokens(path: Path, tokenizer: Tokenizer, where: str) -> Counter[int]:
    """Return the number of times that each token occurs in a text file.

    Of a folder, all files ``*.txt`` count.

    Raises:
        OptionError: there is no such file, or it has no text in UTF-8; the message begins with
            ``where``, the name of an option.
    """
    files = sorted(path.glob(_PATTERN)) if path.is_dir() else [path]
    if not files:
        expected = f"expected a text file or a folder with {_PATTERN}"
        refuse(where, f"{expected}, found none in {path}", OptionError)
    counts: Counter[int] = Counter()
    for file in files:
        lines = read_text(file, where).splitlines(keepends=True)
        for start in range(0, len(lines), _LINES):
            encoded = tokenizer.encode_batch(
                lines[start : start + _LINES], add_special_tokens=False
            )
            for ids in encoded:
                counts.update(ids)
    return counts
