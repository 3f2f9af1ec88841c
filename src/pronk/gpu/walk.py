"""Verification of token trees on the device: the walk along the target's tokens.

A row is on the accepted path of its tree if each node from the root down to it has the target's
token after its parent (:func:`pronk.sampling.verify.verify_tree`). Each row climbs to the root of
its tree by itself, so one launch verifies the trees of all requests::

    tree     0 ─ 1 ─ 2      tokens   5 8 9 7      chosen   7 4 4 3      walked   7 -1 -1 3
             └── 3

A row on the path receives the target's token after it. Parents precede their children, so the rows
of a path are in order, and the token of the last one is the bonus token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pronk.backends import BatchEntry, ForwardBatch, VerifiedPath
from pronk.gpu.launch import OPTIONS, ceil_div
from pronk.gpu.layout import RowLayout, is_walked

# Values of a walk that are no tokens: of rows that are not on a path, and of rows on a path whose
# logits are not finite.
OFF_PATH = -1
NOT_FINITE = -2
_BLOCK = 128  # rows of a program


def walk(chosen: Tensor, layout: RowLayout) -> Tensor:
    """Return the target's token after each row on an accepted path, int32 ``[rows]``.

    Args:
        chosen: int32 ``[rows]``: the target's token after each row; -1: its logits are not finite.
        layout: the rows and their parents.
    """
    walked = torch.empty_like(chosen)
    rows = len(chosen)
    _walk[(ceil_div(rows, _BLOCK),)](
        chosen, layout.tokens, layout.parents, walked, rows, BLOCK=_BLOCK, **OPTIONS
    )
    return walked


@triton.jit
def _walk(
    chosen: tl.tensor,
    tokens: tl.tensor,
    parents: tl.tensor,
    walked: tl.tensor,
    num_rows: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Climb from each row to its root, and compare the tokens on the way with the target's."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = row < num_rows
    # a root's parent is -1, that of a row without a walk -2 (pronk.gpu.layout)
    parent = tl.load(parents + row, mask=is_inside, other=-2)
    token = tl.load(tokens + row, mask=is_inside, other=0)
    own = tl.load(chosen + row, mask=is_inside, other=0)
    is_on_path = parent >= -1
    while tl.max(parent, axis=0) >= 0:
        is_below = parent >= 0
        choice = tl.load(chosen + parent, mask=is_below, other=0)
        is_on_path = is_on_path & ((choice == token) | (parent < 0))
        token = tl.load(tokens + parent, mask=is_below, other=0)
        parent = tl.load(parents + parent, mask=is_below, other=-1)
    # -1 and -2 are OFF_PATH and NOT_FINITE; a kernel reads no Python globals.
    result = tl.where(own < 0, -2, own)
    tl.store(walked + row, tl.where(is_on_path, result, -1), mask=is_inside)


def verified_paths(batch: ForwardBatch, walked: Sequence[int]) -> list[VerifiedPath | None]:
    """Return the accepted path of each entry.

    ``None`` for entries that the device does not verify, and for paths with logits that are not
    finite, which the host reads and refuses.

    Args:
        batch: the entries.
        walked: result of :func:`walk` for the rows of the batch; further rows are ignored.
    """
    paths = list[VerifiedPath | None]()
    first = 0
    for entry, count in zip(batch.entries, batch.row_counts, strict=True):
        own = walked[first : first + count]
        first += count
        paths.append(_verified_path(entry, own) if is_walked(entry) else None)
    return paths


def _verified_path(entry: BatchEntry, walked: Sequence[int]) -> VerifiedPath | None:
    if NOT_FINITE in walked:
        return None
    root = entry.logits_nodes.start
    nodes = [node for node, token in enumerate(walked) if token != OFF_PATH]
    tokens = tuple([walked[node] for node in nodes])
    return VerifiedPath(tuple([node - root for node in nodes[1:]]), tokens)
