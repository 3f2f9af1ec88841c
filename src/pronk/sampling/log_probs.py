"""Log-probabilities of tokens, which requests report beside their text.

They are those of the model: no logits processor, temperature or truncation has changed the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pronk.base.arrays import Array
from pronk.kernels.exact_math import exp_total, log
from pronk.sampling.truncation import likeliest


def log_probs(logits: Array, tokens: list[int]) -> list[float]:
    """Return the log-probabilities of some tokens, rounded to float32.

    ``logits`` is ``[vocab]`` float32: the model's logits before logits processors.
    """
    largest = float(logits.max())
    total = largest + float(log(exp_total(logits, largest)))
    rounded: list[float] = (logits[tokens].astype(np.float64) - total).astype(np.float32).tolist()
    return rounded


def token_logprobs(
    logits: Array, tokens: Sequence[int], top: int, extra_ids: Sequence[int] = ()
) -> list[dict[int, float]]:
    """Return ``{token id: log-probability}`` for each row of logits.

    The dictionary of row ``i`` has ``tokens[i]`` first, then the ``top`` likeliest tokens, then the
    ids in ``extra_ids``. Of equally likely tokens, the smallest ids come first. A row's
    log-probabilities do not depend on other rows. Rows after the last token are left out.

    ``logits`` is ``[rows, vocab]`` float32: the model's logits before logits processors.
    """
    reports = []
    for row, token in zip(logits, tokens, strict=False):
        ids = [token, *likeliest(row, top).tolist(), *extra_ids]
        reports.append(dict(zip(ids, log_probs(row, ids), strict=True)))
    return reports
