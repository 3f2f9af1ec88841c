"""Acceptance of a drafter, measured in the decoding engine as when it is served."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path

import numpy as np

from pronk import LLM
from pronk.drafting import Counts, make_drafter
from pronk.lab import ctar_curve
from pronk.serving import Stats
from pronk.train.clock import limit_time
from pronk.train.corpus.encoder import token_dtype
from pronk.train.own_text import continuation_params

SERVED_TOKENS = 96  # maximum number of tokens that are generated after each held-out prompt

_TEMPERATURE = 0.8
# Beginnings of the names of figures, one for each decoding: "greedy alpha", "T=0.8 alpha".
_DECODINGS = ("greedy", f"T={_TEMPERATURE}")
# number of prompts per batch with a time limit; without one, all prompts are one batch
_TIMED_BATCH = 4
# Range of the number of tokens that `beginnings` takes from a document as a prompt.
_MIN_PROMPT = 8
_MAX_PROMPT = 64
_NUM_PROMPTS = 24  # maximum number of prompts of `beginnings`, from all files


def measure(
    llm: LLM, spec: str, prompts: Sequence[list[int]], max_tokens: int, seconds: float = inf
) -> dict[str, float]:
    """Return acceptance rate, CTAR and S of a drafter, measured in the engine.

    The figures have names such as "greedy alpha", "greedy CTAR(1)" and "T=0.8 S", for greedy and
    for sampled decoding. CTAR is that of :func:`~pronk.lab.bench.metrics.ctar_curve`; S is the
    number of tokens per forward pass.

    Args:
        llm: the target, which must verify every draft token (``budget="all"``).
        spec: the drafter, as for :func:`~pronk.drafting.make_drafter`.
        prompts: token ids of at least one prompt, each shorter than the context.
        max_tokens: maximum number of tokens that follow a prompt.
        seconds: time after which no further batch of prompts is continued.

    Raises PronkError if the drafter cannot be loaded, or has raised an exception.
    """
    # Bind a new proposer, because the files of the drafter have just been rewritten.
    proposer = make_drafter(spec).bind(llm.target)
    figures: dict[str, float] = {}
    for name, temperature in zip(_DECODINGS, (0.0, _TEMPERATURE), strict=True):
        params = [
            continuation_params(llm, prompt, max_tokens, temperature, 0, number)
            for number, prompt in enumerate(prompts)
        ]
        size = len(prompts) if seconds == inf else _TIMED_BATCH
        total = Stats()
        for start in limit_time(seconds / len(_DECODINGS), range(0, len(prompts), size)):
            batch = slice(start, start + size)
            for completion in llm.generate(list(prompts[batch]), params[batch], drafter=proposer):
                completion.stats.check_proposer()
                total.generated_tokens += completion.stats.generated_tokens
                total.steps += completion.stats.steps
        shares = total.acceptance
        accepted = [step.accepted for step in total.steps]
        figures[f"{name} alpha"] = shares[0] if shares else 0.0
        for w, share in enumerate(ctar_curve(accepted, max(1, len(shares))), 1):
            figures[f"{name} CTAR({w})"] = share
        figures[f"{name} S"] = total.step_compression
    return figures


def take_acceptance(llm: LLM, spec: str) -> Counts:
    """Return the acceptance counts of a drafter that :func:`measure` has measured, and forget them.

    Empty if the model keeps no counts (``calibration=False``).
    """
    stats = llm.calibration.stats
    return {} if stats is None else stats.take(make_drafter(spec).bind(llm.target).label)


def is_served(name: str) -> bool:
    """Return whether a figure of this name is one of :func:`measure`, not one on held-out text."""
    decoding, _, what = name.partition(" ")
    return decoding in _DECODINGS and (what in {"alpha", "S"} or what.startswith("CTAR("))


def beginnings(data: Path, vocab_size: int, end: int, context: int) -> list[list[int]]:
    """Return beginnings of held-out documents, as prompts.

    A prompt has at most half the tokens of its document, and at most half of ``context`` tokens.
    The documents are in the files ``valid-*.bin`` of the folder ``data``; ``end`` is the id of the
    token that follows each document.
    """
    files = sorted(data.glob("valid-*.bin"))
    prompts: list[list[int]] = []
    for file in files:
        tokens = np.fromfile(file, dtype=token_dtype(vocab_size))
        documents = np.split(tokens, np.flatnonzero(tokens == end) + 1)
        longest = min(_MAX_PROMPT, context // 2)
        starts = [document[: min(longest, len(document) // 2)].tolist() for document in documents]
        long_enough = [start for start in starts if len(start) >= _MIN_PROMPT]
        prompts += long_enough[: max(1, _NUM_PROMPTS // len(files))]
    return prompts
