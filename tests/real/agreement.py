"""Logits of a loaded model after a prompt, and distances between distributions."""

from typing import Any

import numpy as np

from pronk.cache.blocks import BlockTable
from pronk.llm import LLM
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.sampling.tree import TokenTree

Array = np.ndarray[Any, np.dtype[np.float64]]


def last_logits(llm: LLM, ids: list[int]) -> Array:
    """Return the logits of the token after ``ids``, ``[vocab]``."""
    block_table = BlockTable()
    llm.engine.cache.prepare(block_table, len(ids))
    entry = BatchEntry(block_table, TokenTree.chain(ids), range(len(ids) - 1, len(ids)), len(ids))
    logits = llm.engine.runner.forward(ForwardBatch([entry])).logits[0][-1]
    llm.engine.cache.release(block_table)
    return np.asarray(logits, dtype=np.float64)


def log_softmax(logits: Array) -> Array:
    """Return log-probabilities."""
    shifted = logits - logits.max()
    result: Array = shifted - np.log(np.exp(shifted).sum())
    return result


def kl(p: Array, q: Array) -> float:
    """Return KL(p ‖ q) in nats of log-probabilities of some tokens; all others count as one further
    token.
    """
    rest = [np.log(max(1e-12, 1 - np.exp(x).sum())) for x in (p, q)]
    a = np.append(p, rest[0])
    b = np.append(q, rest[1])
    return float((np.exp(a) * (a - b)).sum())
