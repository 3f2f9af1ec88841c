"""Matrices that share their inputs, quantized each in its own way, as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, gcd

import torch

from pronk.quantized.form import Quantized

__all__ = ["stack_alike"]


def stack_alike(parts: Sequence[Quantized]) -> Quantized | None:
    """Matrices on top of each other, without any loss; ``None`` if they order their inputs differently.

    A code of 4 bits is one of 8 with the same scale, a group can be cut into smaller ones with the same scale, and a
    zero point is a minimum: so those that differ in bits, groups or minima take the form that can express all of them.
    """
    first = parts[0].order
    for order in (part.order for part in parts[1:]):
        if (first is None) != (order is None) or (first is not None and not torch.equal(first, order)):  # type: ignore[arg-type]
            return None
    group = gcd(*(part.group for part in parts))
    bits = max(part.bits for part in parts)
    lowest = any(part.minimum is not None for part in parts)
    return Quantized.stack([_finer(_wider(part, bits), group, lowest=lowest) for part in parts])


def _wider(part: Quantized, bits: int) -> Quantized:
    if part.bits == bits:
        return part
    shift = 0 if part.minimum is not None else (1 << (bits - 1)) - part.zero
    return replace(part, codes=part.codes + shift, bits=8)


def _finer(part: Quantized, group: int, *, lowest: bool) -> Quantized:
    scale, minimum = part.scale, part.minimum
    if lowest and minimum is None:
        minimum = -scale * part.zero
    if part.group != group:
        groups, times = ceil(part.shape[1] / group), part.group // group
        scale = scale.repeat_interleave(times, 1)[:, :groups]
        minimum = None if minimum is None else minimum.repeat_interleave(times, 1)[:, :groups]
    return replace(part, scale=scale, minimum=minimum, group=group)
