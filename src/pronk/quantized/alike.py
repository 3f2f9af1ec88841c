"""Matrices that share their inputs, quantized each in its own way, as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, gcd

import torch
from torch import Tensor

from pronk.quantized.form import Quantized

__all__ = ["stack_alike"]


def stack_alike(parts: Sequence[Quantized], codes: Tensor) -> Quantized | None:
    """Matrices on top of each other, without any loss; ``None`` if they order their inputs differently.

    A code of 4 bits is one of 8 with the same scale, a group can be cut into smaller ones with the same scale, and a
    zero point is a minimum: so those that differ in bits, groups or minima take the form that can express all of them.

    Args:
        parts: whose codes are the rows of ``codes``, in order; may be changed.
        codes: uint8 ``[outputs of all, inputs]``.
    """
    order = parts[0].order
    for other in (part.order for part in parts[1:]):
        if order is None or other is None:
            if order is not other:
                return None
        elif not torch.equal(order, other):
            return None
    group, bits = gcd(*(part.group for part in parts)), max(part.bits for part in parts)
    lowest = any(part.minimum is not None for part in parts)
    alike = [_finer(_wider(part, bits), group, lowest=lowest) for part in parts]
    minima = [part.minimum for part in alike if part.minimum is not None]
    scale = torch.cat([part.scale for part in alike])
    return Quantized(codes, scale, torch.cat(minima) if minima else None, alike[0].bits, group, order)


def _wider(part: Quantized, bits: int) -> Quantized:
    if part.bits == bits:
        return part
    if part.minimum is None:
        part.codes.add_((1 << (bits - 1)) - part.zero)
    return replace(part, bits=8)


def _finer(part: Quantized, group: int, *, lowest: bool) -> Quantized:
    scale, minimum = part.scale, part.minimum
    if lowest and minimum is None:
        minimum = -scale * part.zero
    if part.group != group:
        groups, times = ceil(part.shape[1] / group), part.group // group
        scale = scale.repeat_interleave(times, 1)[:, :groups]
        minimum = None if minimum is None else minimum.repeat_interleave(times, 1)[:, :groups]
    return replace(part, scale=scale, minimum=minimum, group=group)
