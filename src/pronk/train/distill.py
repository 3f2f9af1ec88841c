"""The loss of distillation: how far a student's next-token distribution is from its teacher's.

With logits ``z`` of the student and ``q = softmax(z)``, the teacher's distribution ``p``, the text's next token ``y``
and the weight ``h`` of the text::

    loss = (1 - h) * KL(p || q) + h * (-log q[y])        per row, then the mean over the rows
    dloss/dz = q - ((1 - h) * p + h * onehot(y))

The gradient is known in closed form, so the rows go through the vocabulary a chunk at a time, and the largest thing in
memory is the logits of one chunk: with 150,000 tokens and 4,096 rows whole logits would take 2.5 GB each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Comparison", "chunk_rows", "compare", "distillation_loss"]

_CHUNK = 1 << 21  # logits in a chunk
_ROWS = 128  # at least: the gradient of the head is written once per chunk

TeacherLogits = Callable[[slice], Tensor]


def chunk_rows(vocab_size: int) -> int:
    """How many rows go through the vocabulary together."""
    return max(_ROWS, _CHUNK // vocab_size)


def distillation_loss(  # noqa: PLR0917 - autograd passes them by position
    hidden: Tensor,
    weight: Tensor,
    teacher: TeacherLogits,
    labels: Tensor,
    hard: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
    into: Comparison | None = None,
) -> Tensor:
    """Mean loss in nats per row.

    Args:
        hidden: ``[rows, size]``, the student's after its final norm.
        weight: ``[vocab, size]`` of the student's head.
        teacher: from a slice of the rows to the teacher's logits ``[rows of the slice, vocab]``.
        labels: ``[rows]``, the next tokens of the text.
        hard: weight of the text, 0 to 1.
        dtype: of the products; the rest is float32 or better.
        into: counts the rows, if given.
    """
    if not torch.is_grad_enabled():  # inside, autograd asks only what the tensors want
        hidden, weight = hidden.detach(), weight.detach()
    return _Distillation.apply(hidden, weight, teacher, labels, hard, dtype, into)  # type: ignore[no-untyped-call]


class _Distillation(torch.autograd.Function):
    """Loss and gradients in one go over the chunks, so that nothing of the vocabulary's size is kept."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes them by position
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher: TeacherLogits,
        labels: Tensor,
        hard: float,
        dtype: torch.dtype,
        into: Comparison | None,
    ) -> Tensor:
        rows, step = len(hidden), chunk_rows(len(weight))
        w = weight.to(dtype)
        d_hidden = torch.empty_like(hidden) if any(ctx.needs_input_grad) else None
        # A frozen head needs no gradient, a third of the work.
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        total = hidden.new_zeros((), dtype=torch.float64)
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            x, y = hidden[part].to(dtype), labels[part, None]
            log_q = _log_softmax(x @ w.T)
            log_p = _log_softmax(teacher(part))
            p = log_p.exp()
            divergence = _divergence(p, log_p, log_q)
            if into is not None:
                into.add(log_q, log_p, divergence)
            total += (1 - hard) * divergence - hard * log_q.gather(1, y).sum()
            if d_hidden is None:
                continue
            d_logits = log_q.exp_().sub_(p, alpha=1 - hard)
            if hard:
                d_logits.scatter_add_(1, y, d_logits.new_full(y.shape, -hard))
            d = d_logits.div_(rows).to(dtype)
            d_hidden[part] = d @ w
            if d_weight is not None:
                d_weight += d.T @ x
        ctx.save_for_backward(d_hidden, d_weight)
        return (total / rows).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * grad, None if d_weight is None else d_weight * grad, None, None, None, None, None


def _log_softmax(logits: Tensor) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide.log_softmax(-1)


def _divergence(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """In nats, float64, summed over rows ``[rows, vocab]``."""
    return torch.linalg.vecdot(p, log_p - log_q).sum(dtype=torch.float64)


class Comparison:
    """Sums over rows: divergence in nats, and rows whose likeliest tokens are the same."""

    def __init__(self) -> None:
        self.rows = 0
        self.divergence = 0.0
        self.same = 0

    def add(self, log_q: Tensor, log_p: Tensor, divergence: Tensor) -> None:
        """Add the divergence of rows of log-probabilities ``[rows, vocab]``, the student's from the teacher's."""
        self.rows += len(log_q)
        self.divergence += float(divergence)
        self.same += int((log_q.argmax(-1) == log_p.argmax(-1)).sum())


@torch.no_grad()
def compare(
    hidden: Tensor, weight: Tensor, teacher: TeacherLogits, into: Comparison, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Add rows to ``into``; the arguments are those of :func:`distillation_loss`."""
    step, w = chunk_rows(len(weight)), weight.to(dtype)
    for start in range(0, len(hidden), step):
        part = slice(start, min(start + step, len(hidden)))
        log_q, log_p = _log_softmax(hidden[part].to(dtype) @ w.T), _log_softmax(teacher(part))
        into.add(log_q, log_p, _divergence(log_p.exp(), log_p, log_q))
