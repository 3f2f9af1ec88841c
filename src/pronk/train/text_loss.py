"""The cross-entropy of a text, a chunk of rows at a time, so that no more logits than those of a chunk exist.

With logits ``z`` and the text's token ``y`` of a row ::

    loss = -log softmax(z)[y]            the mean over the rows
    dloss/dz = softmax(z) - onehot(y)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pronk.train.distill import chunk_rows

__all__ = ["text_loss"]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # its gradient is known in closed form
def text_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """Mean loss in nats per row, and the likeliest token of each row.

    Args:
        hidden: ``[rows, size]``, after the last norm.
        weight: ``[vocab, size]`` of the unembedding.
        labels: ``[rows]``, the text's tokens.
        dtype: of the products; the rest is float32.
    """
    if not torch.is_grad_enabled():  # inside, autograd asks only what the tensors want
        hidden, weight = hidden.detach(), weight.detach()
    return _TextLoss.apply(hidden, weight, labels, dtype)  # type: ignore[no-untyped-call]


class _TextLoss(torch.autograd.Function):
    """Loss and gradients in one go over the chunks; without gradients, the loss alone."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rows, step, w = len(hidden), chunk_rows(len(weight)), weight.to(dtype)
        wanted = any(ctx.needs_input_grad)
        d_hidden = torch.empty_like(hidden) if wanted else None
        d_weight = torch.zeros_like(weight) if wanted else None
        total, likeliest = hidden.new_zeros((), dtype=torch.float64), torch.empty_like(labels)
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            x, y = hidden[part].to(dtype), labels[part, None]
            log_q = (x @ w.T).float().log_softmax(-1)
            total -= log_q.gather(1, y).sum()
            likeliest[part] = log_q.argmax(-1)
            if d_hidden is not None and d_weight is not None:
                d = log_q.exp_().scatter_add_(1, y, log_q.new_full(y.shape, -1.0)).div_(rows).to(dtype)
                d_hidden[part] = d @ w
                d_weight += d.T @ x
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.mark_non_differentiable(likeliest)
        return (total / rows).float(), likeliest

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * grad, d_weight * grad, None, None
