"""Losses of text and of distillation, without the logits of all rows in memory at once.

With logits ``z`` of the student and ``q = softmax(z)``, the teacher's distribution ``p``, the
text's next token ``y`` and the weight ``h`` of the text::

    loss = (1 - h) * KL(p || q) + h * (-log q[y])        per row, then the mean over the rows
    dloss/dz = q - ((1 - h) * p + h * onehot(y))

Without a teacher, ``h`` is 1. The gradient is known in closed form, so the rows go through the
vocabulary in chunks, and the largest tensor is one chunk of logits: all logits of 4,096 rows and
150,000 tokens would take 2.5 GB.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

# Sizes of the matrix products that are timed to find the faster dtype. They take 0.3 s where
# bfloat16 is emulated.
_ROWS = 128
_SIZE = 512
# Maximum number of logits (rows times vocabulary) of a chunk, unless _MIN_ROWS rows have more.
_MAX_LOGITS = 1 << 21
# Minimum number of rows of a chunk. Each chunk reads and writes the whole gradient of the LM head's
# weight, so small chunks would be slow.
_MIN_ROWS = 128

# Function that returns the teacher's logits ``[rows of the slice, vocab]`` for a slice of the rows.
TeacherLogits = Callable[[slice], Tensor]


@cache
def product_dtype(device: torch.device) -> torch.dtype:
    """Return the faster dtype of matrix products: bfloat16, or float32 if bfloat16 is emulated.

    On AVX2, a product of 256 × 576 by 576 × 49,152 takes 20.9 s in bfloat16 and 0.21 s in float32.
    """
    if device.type != "cpu":
        return torch.bfloat16
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(_ROWS, _SIZE, dtype=dtype)
        b = torch.ones(_SIZE, _SIZE, dtype=dtype)
        # The shortest of three durations, because the first product also prepares the library.
        seconds[dtype] = min(timeit.repeat(partial(torch.matmul, a, b), repeat=3, number=1))
    return min(seconds, key=seconds.__getitem__)


def autocast(device: torch.device) -> torch.autocast:
    """Return the context in which modules compute matrix products in :func:`product_dtype`."""
    dtype = product_dtype(device)
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)


class Comparison:
    """Sums by which student and teacher are compared, over all rows added."""

    def __init__(self) -> None:
        self.rows = 0  # number of rows compared
        self.divergence = 0.0  # sum of the divergences KL(p || q) in nats
        self.same = 0  # number of rows in which student and teacher have the same most likely token

    def add(self, log_p: Tensor, log_q: Tensor, divergence: Tensor) -> None:
        """Add rows to the comparison.

        ``log_p`` and ``log_q`` are the log-probabilities ``[rows, vocab]`` of teacher and student,
        ``divergence`` ``[rows]`` their divergences in nats.
        """
        self.rows += len(log_q)
        self.divergence += float(divergence.sum(dtype=torch.float64))
        self.same += int((log_q.argmax(-1) == log_p.argmax(-1)).sum())


def chunks(rows: int, vocab_size: int) -> list[slice]:
    """Return slices that divide ``rows`` rows into chunks of a limited number of logits."""
    step = max(_MIN_ROWS, _MAX_LOGITS // vocab_size)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher: TeacherLogits,
    labels: Tensor,
    hard: float = 0.0,
    *,
    into: Comparison | None = None,
    row_weights: Tensor | None = None,
) -> Tensor:
    """Return the mean loss in nats per row, by the formula at the top of this module.

    Args:
        hidden: ``[rows, size]``, the student's states after its final norm.
        weight: ``[vocab, size]``, weight of the student's LM head.
        teacher: computes the teacher's logits of a slice of the rows.
        labels: ``[rows]``, the next tokens of the text.
        hard: weight of the text in the loss, 0..1; the rest is that of the teacher.
        into: comparison of student and teacher to which the rows are added, if any.
        row_weights: ``[rows]``, factors of the rows' losses, by default 1.
    """
    return _loss(hidden, weight, labels, hard, teacher, into, None, row_weights)


def text_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy in nats per row, and the most likely token of each row.

    ``hidden`` is ``[rows, size]``, the states after the final norm; ``weight`` is ``[vocab,
    size]``, that of the LM head; ``labels`` are the next tokens, ``[rows]``.
    """
    likeliest = torch.empty_like(labels)
    return _loss(hidden, weight, labels, 1.0, None, None, likeliest, None), likeliest


def _loss(hidden: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    # needs_input_grad is True even under no_grad, and the gradients would be computed in vain.
    if not torch.is_grad_enabled():
        hidden = hidden.detach()
        weight = weight.detach()
    return _ChunkedLoss.apply(hidden, weight, *rest)  # type: ignore[no-untyped-call]


class _ChunkedLoss(torch.autograd.Function):
    """Autograd function of the loss: one loop over chunks of rows computes loss and gradients."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes arguments by position
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        hard: float,
        teacher: TeacherLogits | None,
        into: Comparison | None,
        likeliest: Tensor | None,
        row_weights: Tensor | None,
    ) -> Tensor:
        # Matrix products have the faster dtype; everything else is float32 or wider.
        dtype = product_dtype(hidden.device)
        rows = len(hidden)
        head = weight.to(dtype)
        p = None
        d_hidden = torch.empty_like(hidden) if any(ctx.needs_input_grad) else None
        # The head of a frozen target needs no gradient, which saves one of three matrix products.
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        total = hidden.new_zeros((), dtype=torch.float64)
        for chunk in chunks(rows, len(weight)):
            x = hidden[chunk].to(dtype)
            y = labels[chunk, None]
            log_q = _log_softmax(x @ head.T)
            losses = -hard * log_q.gather(1, y)[:, 0]
            if likeliest is not None:
                likeliest[chunk] = log_q.argmax(-1)
            if teacher is not None:
                log_p = _log_softmax(teacher(chunk))
                p = log_p.exp()
                divergence = torch.linalg.vecdot(p, log_p - log_q)
                losses = (1 - hard) * divergence + losses
                if into is not None:
                    into.add(log_p, log_q, divergence)
            factors = None if row_weights is None else row_weights[chunk]
            total += (losses if factors is None else losses * factors).sum(dtype=torch.float64)
            if d_hidden is None:
                continue
            d_logits = log_q.exp_()
            if p is not None:
                d_logits.sub_(p, alpha=1 - hard)
            if hard:
                d_logits.scatter_add_(1, y, d_logits.new_full(y.shape, -hard))
            if factors is not None:
                d_logits.mul_(factors[:, None])
            d = d_logits.div_(rows).to(dtype)
            d_hidden[chunk] = d @ head
            if d_weight is not None:
                d_weight += d.T @ x
        ctx.save_for_backward(d_hidden, d_weight)
        return (total / rows).to(torch.promote_types(hidden.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * grad, None if d_weight is None else d_weight * grad, *(None,) * 6


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
