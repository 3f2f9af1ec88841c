"""The two optimizers: AdamW for everything, or Muon for the matrices inside the layers and AdamW for the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

__all__ = ["Optimizers", "clip_gradients"]

_BETAS = (0.9, 0.95)


class Optimizers:
    """One or two optimizers that step together at one learning rate.

    Muon (Jordan et al. 2024) orthogonalizes the update of a matrix; its updates are rescaled to the size of AdamW's
    (Liu et al. 2025), which is why one learning rate fits both. Embeddings and norms get no weight decay; frozen
    parameters, and those without a gradient in a step, are left as they are. ``kind`` is one of
    :data:`~pronk.train.options.OPTIMIZERS`.
    """

    def __init__(self, model: nn.Module, kind: str, weight_decay: float) -> None:
        learning = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        matrices = [p for name, p in learning if p.ndim == 2 and ".layers." in f".{name}"]
        chosen = {id(p) for p in matrices}
        rest = [p for _, p in learning if id(p) not in chosen]
        groups: list[dict[str, Any]] = [{"params": rest, "weight_decay": 0.0}]
        self._members: list[Optimizer] = []
        if kind == "muon" and matrices:
            self._members.append(Muon(matrices, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))
        elif matrices:
            groups.append({"params": matrices, "weight_decay": weight_decay})
        self._members.append(AdamW(groups, betas=_BETAS, fused=True))

    def step(self, rate: float) -> None:
        """Apply the gradients with learning rate ``rate`` and clear them."""
        for member in self._members:
            for group in member.param_groups:
                group["lr"] = rate
            member.step()
            member.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """State of all members, for a checkpoint."""
        return [member.state_dict() for member in self._members]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Restore what :meth:`state_dict` gave."""
        for member, state in zip(self._members, states, strict=True):
            member.load_state_dict(state)


def clip_gradients(model: nn.Module, limit: float) -> float:
    """Scale the gradients to a norm of at most ``limit``; returns the norm before."""
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit))
