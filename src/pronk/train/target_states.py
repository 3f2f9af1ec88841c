"""Forward passes of the deployed target over given texts, for features and distributions.

The engine's own runner computes them, with the weights as they are served: a quantized target is not dequantized.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pronk.execution.forward_job import ForwardJob
from pronk.execution.segment import Segment
from pronk.kv_cache.blocks import BlockTable
from pronk.speculation.target import Target
from pronk.speculation.tree import TokenTree
from pronk.torch_backend.convert import to_tensor

__all__ = ["TargetStates", "target_states"]

_CHUNK = 512  # tokens of a forward pass


class TargetStates(NamedTuple):
    """Results of the target for a text of ``n`` tokens."""

    hidden: Tensor  # ``[n, layers * size]``, float32: outputs of the layers, one after the other
    logits: Tensor  # ``[n - first, vocab]``, float32: logits after the tokens from ``first`` on


def target_states(target: Target, ids: Sequence[int], layers: Sequence[int], first: int) -> TargetStates:
    """Compute the outputs of ``layers`` (from 1) for all tokens, and the logits from token ``first`` on.

    Raises:
        CacheFullError: the text does not fit into the target's KV cache.
    """
    assert target.runner is not None
    cache, table = target.cache, BlockTable()
    hidden, logits = list[Tensor](), list[Tensor]()
    try:
        for start in range(0, len(ids), _CHUNK):
            chunk = ids[start : start + _CHUNK]
            cache.prepare(table, start + len(chunk))
            nodes = range(min(len(chunk), max(0, first - start)), len(chunk))
            job = ForwardJob(Segment(table, TokenTree.chain(chunk)), nodes, len(ids))
            result = target.runner.forward([job], frozenset(layers))
            cache.commit(table, range(len(chunk)))
            hidden.append(torch.cat([to_tensor(result.hidden[layer][0]).float() for layer in layers], dim=-1))
            if nodes:
                logits.append(to_tensor(result.logits[0][:]))
    finally:
        cache.release(table)
    return TargetStates(torch.cat(hidden), torch.cat(logits))
