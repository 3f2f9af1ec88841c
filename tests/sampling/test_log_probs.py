"""Reported log-probabilities, against a softmax of float64."""

import numpy as np
import pytest

from pronk.sampling.log_probs import token_logprobs
from softmax import log_softmax

VOCAB = 40


def test_logprobs() -> None:
    logits = np.random.default_rng(6).standard_normal((3, VOCAB), np.float32)
    exact = log_softmax(logits)
    for top in (0, 1, 4, VOCAB, VOCAB + 5):
        for row, (token, report) in enumerate(
            zip((5, 6, 7), token_logprobs(logits, (5, 6, 7), top), strict=True)
        ):
            best = np.argsort(-logits[row], kind="stable")[:top].tolist()
            assert next(iter(report)) == token
            assert set(report) == {token, *best}
            assert report == pytest.approx({t: float(exact[row, t]) for t in report}, abs=1e-6)
            assert [t for t in report if t != token] == [t for t in best if t != token]
    assert token_logprobs(logits[:0], (), 3) == []
    (wanted,) = token_logprobs(logits[:1], (5,), 1, (9, 5))
    assert wanted == token_logprobs(logits[:1], (5,), 1)[0] | {
        9: pytest.approx(float(exact[0, 9]), abs=1e-6)
    }


def test_logprobs_of_a_row_do_not_depend_on_other_rows() -> None:
    logits = 4 * np.random.default_rng(7).standard_normal((5, 1003), np.float32)
    reports = token_logprobs(logits, (1, 2, 3, 4, 5), 4)
    for row, report in enumerate(reports):
        assert token_logprobs(logits[row : row + 1], (row + 1,), 4) == [report]
    for step in (2, 3):  # rows that are not next to each other in memory
        assert token_logprobs(logits[::step], range(1, 6, step), 4) == reports[::step]
    assert token_logprobs(np.asfortranarray(logits), (1, 2, 3, 4, 5), 4) == reports
