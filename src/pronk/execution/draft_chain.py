"""Chains of draft tokens in one call of the kernels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pronk.arrays import FLOAT32, Array
from pronk.kernels.structures import OnToken
from pronk.models.kernel_program import KernelProgram
from pronk.models.program import Program
from pronk.models.program_rows import ProgramRows
from pronk.sampling.draft_token import DraftIds, DraftToken
from pronk.sampling.sampler import Sampler


def draft_chain(
    program: Program,
    rows: ProgramRows,
    stream: Array,
    sampler: Sampler,
    *,
    vocab_size: int,
    max_tokens: int,
    on_token: Callable[[DraftToken], bool],
    ids: DraftIds | None = None,
) -> int:
    """Draft a chain for one request: run a program, sample a token, run the program for it, and so on.

    Returns the number of forward passes, as :meth:`~pronk.execution.model_runner.ModelRunner.draft_chain`.

    Args:
        program: program of the kernels that ends with an LM head. It begins with an embedding, or reads features from
            the stream and leaves there the features of the next run.
        rows: rows of the first run, one of them with logits. Each later run has one row, the draft token before.
        stream: ``[rows, hidden]``; overwritten.
        sampler: sampler of the draft tokens, with :attr:`~pronk.sampling.sampler.Sampler.drafts_statelessly`.
        vocab_size: number of logits of the LM head.
        max_tokens: maximum number of draft tokens, at least 1.
        on_token: called with each draft token; returns whether to continue. Its exceptions end the chain.
        ids: the target's token of each logit; ``None``: 0, 1, ….
    """
    scores, logits = np.empty((max_tokens, vocab_size), FLOAT32), np.empty((1, vocab_size), FLOAT32)
    next_scores, errors = iter(scores), list[BaseException]()

    def callback(token: int, confidence: float) -> int:
        try:
            return int(on_token(DraftToken(token, confidence, next(next_scores), ids)))
        except BaseException as error:  # noqa: BLE001 - exceptions cannot cross the kernels
            errors.append(error)
            return 0

    params = sampler.draft_chain_params(max_tokens, scores, ids)
    params.on_token = OnToken(callback)
    assert isinstance(program, KernelProgram), "expected a program of the kernels, found another"
    num_passes = program.draft_chain(rows, stream, logits, params)
    if errors:
        raise errors[0]
    return num_passes
