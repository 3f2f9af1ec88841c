"""Measurement of a drafter in the decoding engine."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path

import numpy as np

from pronk.bench.metrics import ctar_curve
from pronk.drafters import make_drafter
from pronk.engine.stats import Stats
from pronk.llm import LLM
from pronk.sampling.noise import derive_seed
from pronk.sampling.params import SamplingParams
from pronk.train.batches import token_dtype
from pronk.train.clock import within

__all__ = ["SERVED_TOKENS", "beginnings", "is_served", "measure"]

SERVED_TOKENS = 96  # maximum tokens after each held-out prompt

_TEMPERATURE = 0.8
_NAMES = ("greedy", f"T={_TEMPERATURE}")
_TIMED_BATCH = 4  # prompts per batch under a time limit
_MIN_PROMPT, _MAX_PROMPT, _NUM_PROMPTS = 8, 64, 24  # tokens of a beginning; number of beginnings


def measure(
    llm: LLM, spec: str, prompts: Sequence[list[int]], max_tokens: int, seconds: float = inf
) -> dict[str, float]:
    """Return acceptance rate alpha, CTAR(1), CTAR(2) … and tokens per forward pass S, greedy and sampled.

    Args:
        llm: the target; it must verify every draft token (``budget="all"``).
        spec: the drafter and its options, as for :func:`~pronk.drafters.make_drafter`.
        prompts: at least one; each is shorter than the context.
        max_tokens: maximum tokens after each prompt.
        seconds: time limit; the first batch of prompts is continued in any case.

    Raises:
        PronkError: the drafter cannot be loaded, or has raised.
    """
    drafter = make_drafter(spec).bind(llm.target)  # loads its files, which may have changed
    figures: dict[str, float] = {}
    for name, temperature in zip(_NAMES, (0.0, _TEMPERATURE), strict=True):
        params = [
            SamplingParams(
                max_tokens=min(max_tokens, llm.config.context - len(prompt)),
                temperature=temperature,
                seed=derive_seed(0, number),
            )
            for number, prompt in enumerate(prompts)
        ]
        size = len(prompts) if seconds == inf else _TIMED_BATCH
        stats = [
            each.stats
            for start in within(seconds / len(_NAMES), range(0, len(prompts), size))
            for each in llm.generate(list(prompts[start : start + size]), params[start : start + size], drafter=drafter)
        ]
        for each in stats:
            each.check_proposer()
        all_ = Stats(
            generated_tokens=sum(each.generated_tokens for each in stats),
            steps=[step for each in stats for step in each.steps],
        )
        shares, accepted = all_.acceptance, [step.accepted for step in all_.steps]
        figures[f"{name} alpha"] = shares[0] if shares else 0.0
        for w, share in enumerate(ctar_curve(accepted, max(1, len(shares))), 1):
            figures[f"{name} CTAR({w})"] = share
        figures[f"{name} S"] = all_.step_compression
    return figures


def is_served(name: str) -> bool:
    """Return whether a figure has a name that :func:`measure` gives."""
    decoding, _, what = name.partition(" ")
    return decoding in _NAMES and (what in {"alpha", "S"} or what.startswith("CTAR("))


def beginnings(data: Path, vocab_size: int, end: int, context: int) -> list[list[int]]:
    """Return beginnings of held-out documents as prompts, up to half of the document and of the context.

    Folder ``data`` has the documents in files ``valid-*.bin``, each followed by the token ``end``.
    """
    files = sorted(data.glob("valid-*.bin"))
    found: list[list[int]] = []
    for file in files:
        tokens = np.fromfile(file, dtype=token_dtype(vocab_size))
        documents = np.split(tokens, np.flatnonzero(tokens == end) + 1)
        parts = [each[: min(_MAX_PROMPT, context // 2, len(each) // 2)].tolist() for each in documents]
        found += [part for part in parts if len(part) >= _MIN_PROMPT][: max(1, _NUM_PROMPTS // len(files))]
    return found
