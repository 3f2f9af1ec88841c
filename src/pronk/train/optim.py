"""Optimizers and the schedule of their learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from pronk.train.options import LoopOptions


class Optimizers:
    """AdamW for all parameters, or Muon for the layers' matrices and AdamW for the others.

    Muon (Jordan et al. 2024) orthogonalizes the update of a matrix. The updates are rescaled to the
    root mean square of AdamW's updates (Liu et al. 2025), so both optimizers can use one learning
    rate; that of AdamW is ``adamw_share`` times that of Muon. Weight decay applies to the matrices
    of layers only. Parameters that are frozen, or have no gradient in a step, do not change.
    """

    def __init__(
        self, model: nn.Module, kind: str, weight_decay: float, adamw_share: float = 1.0
    ) -> None:
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        matrices = [p for name, p in trainable if p.ndim == 2 and ".layers." in f".{name}"]
        matrix_ids = {id(p) for p in matrices}
        other_params = [p for _, p in trainable if id(p) not in matrix_ids]
        groups: list[dict[str, Any]] = [{"params": other_params, "weight_decay": 0.0}]
        self._optimizers: list[Optimizer] = []
        self._adamw_share = 1.0
        if kind == "muon" and matrices:
            self._adamw_share = adamw_share
            muon = Muon(matrices, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            self._optimizers.append(muon)
        elif matrices:
            groups.append({"params": matrices, "weight_decay": weight_decay})
        self._optimizers.append(AdamW(groups, betas=(0.9, 0.95), fused=True))

    def step(self, rate: float) -> None:
        """Update the parameters with learning rate ``rate``, then clear their gradients."""
        for optimizer in self._optimizers:
            share = self._adamw_share if isinstance(optimizer, AdamW) else 1.0
            for group in optimizer.param_groups:
                group["lr"] = share * rate
            optimizer.step()
        self.clear()

    def clear(self) -> None:
        """Remove the gradients of all parameters, without an update."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for optimizer, state in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict(state)


@dataclass(frozen=True)
class Schedule:
    """Progress and learning rate of a run, given the number of steps and the time."""

    options: LoopOptions  # has ``steps``, the number of steps after which the run ends
    minutes: float | None  # time limit: the run ends after it, if that is earlier

    def progress(self, step: int, seconds: float) -> float:
        """Return the fraction of the run that is done, 0..1, after ``step`` steps and ``seconds``.

        It is the larger of ``step / steps`` and ``seconds / (60 * minutes)``, at most 1.
        """
        by_time = 0.0 if self.minutes is None else seconds / (60 * self.minutes)
        return min(1.0, max(step / self.options.steps, by_time))

    def rate(self, step: int, progress: float) -> float:
        """Return the learning rate of a step (from 0), given the progress 0..1.

        It is a linear warm-up times a cosine that falls from ``rate`` to ``floor * rate``.
        """
        o = self.options
        warmup = min(1.0, (step + 1) / (o.warmup + 1))
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return o.rate * warmup * (o.floor + (1 - o.floor) * cosine)
