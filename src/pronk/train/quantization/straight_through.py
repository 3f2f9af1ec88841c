"""Quantization-aware training: passes use rounded weights, the optimizer updates unrounded ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pronk import PronkError
from pronk.backends import load_kernels
from pronk.base.arrays import BFLOAT16
from pronk.base.convert import to_array, to_tensor
from pronk.train.quantization.rounding import RoundingRule, choose_group


class StraightThrough:
    """Rounds the matrices of a module for its passes.

    The gradient at the rounded weights updates the unrounded ones, as if rounding had the
    derivative 1: the straight-through estimator (Bengio et al. 2013, arXiv 1308.3432). The rounding
    is that of ``pronk quantize`` for ``bits`` bits, 8 or 4. Raises OptionError for other bits.
    """

    def __init__(self, module: nn.Module, bits: int) -> None:
        self._matrices = [each for each in module.parameters() if each.ndim == 2]
        inputs = sorted({each.shape[1] for each in self._matrices})
        self._rule = RoundingRule(load_kernels(), *choose_group(inputs, bits, None), BFLOAT16)

    @contextmanager
    def rounded(self) -> Iterator[None]:
        """Round the matrices in the block; at its end, they have their unrounded values again."""
        unrounded = [each.detach().clone() for each in self._matrices]
        self._set([self._round(each) for each in unrounded])
        try:
            yield
        finally:
            self._set(unrounded)

    def _round(self, weight: Tensor) -> Tensor:
        """Return the rounded values of a matrix, in its dtype and on its device."""
        if not weight.isfinite().all():
            msg = "expected finite weights, found others after a step of training; lower --lr"
            raise PronkError(msg)
        exported = to_array(weight.bfloat16().float())  # ``pronk quantize`` rounds what is exported
        values = self._rule.nearest(exported).dequantize()
        return to_tensor(values).to(weight)

    @torch.no_grad()
    def _set(self, values: Sequence[Tensor]) -> None:
        for matrix, value in zip(self._matrices, values, strict=True):
            matrix.copy_(value)
