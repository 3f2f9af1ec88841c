"""Integers that are packed into words of 32 bits, and what all integer formats make of them."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from pronk.errors import CheckpointError
from pronk.quantization.formats.matrix import Bits, QuantizedMatrix

__all__ = ["OUTPUTS", "affine", "group_size", "order_of", "unpack", "unpack_into"]

# Outputs whose codes are worked on at a time, so that what is made on the way is small.
OUTPUTS = 512


def group_size(size: int, inputs: int) -> int:
    """Inputs of a group in the one form, whose groups are multiples of 8; ``-1`` is the whole row."""
    whole = ceil(inputs / 8) * 8
    return whole if size == -1 else min(size, whole)


def unpack(packed: Tensor, bits: Bits, count: int) -> Tensor:
    """The integers of each row, those in the low bits first.

    Args:
        packed: int32 ``[rows, ceil(count * bits / 32)]``.
        bits: of an integer.
        count: integers of a row.

    Returns:
        uint8 ``[rows, count]``.
    """
    integers = packed.contiguous().view(torch.uint8)
    if bits == 4:
        pairs = torch.empty(*integers.shape, 2, dtype=torch.uint8)
        torch.bitwise_and(integers, 15, out=pairs[..., 0])
        torch.bitwise_right_shift(integers, 4, out=pairs[..., 1])
        integers = pairs.flatten(1)
    return integers[:, :count]


def unpack_into(codes: Tensor, packed: Tensor, bits: Bits) -> None:
    """Write integers into ``codes``, uint8 ``[outputs, inputs]``; see :func:`unpack`."""
    for start in range(0, len(codes), OUTPUTS):
        codes[start : start + OUTPUTS] = unpack(packed[start : start + OUTPUTS], bits, codes.shape[1])


def affine(
    codes: Tensor, zeros: Tensor | None, scale: Tensor, bits: Bits, group: int, order: Tensor | None = None
) -> QuantizedMatrix:
    """Weights ``scale * (code - zero)`` in the one form.

    A zero point becomes a minimum of ``-scale * zero``. In float32 that is exact, and so are ``scale * code`` and the
    sum of both: mantissas of 16-bit scales have at most 11 bits, codes and zeros at most 8. Scales in float32, which
    are rare, cost roundings of float32 instead.

    Args:
        codes: uint8 ``[outputs, inputs]``, in the order of the inputs; they are put into ``order`` in place.
        zeros: integers ``[outputs, groups]`` in 0 .. 2**bits - 1; ``None`` is ``2**(bits - 1)`` everywhere.
        scale: any float type, ``[outputs, groups]``.
        bits: of a code.
        group: inputs of a group, a multiple of 8.
        order: see :class:`~pronk.quantization.formats.matrix.QuantizedMatrix`.

    Raises:
        CheckpointError: a scale that is not finite.
    """
    wide = scale.float().contiguous()
    minimum = None
    if zeros is not None and bool((zeros != 1 << (bits - 1)).any()):
        minimum = -wide * zeros
    for start in range(0, len(codes) if order is not None else 0, OUTPUTS):
        codes[start : start + OUTPUTS] = codes[start : start + OUTPUTS, order]
    try:
        return QuantizedMatrix(codes, wide, minimum, bits, group, order)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def order_of(name: str, index: Tensor, group: int, *, ordered: bool = False) -> Tensor | None:
    """The order of inputs in which those of a group are beside each other; ``None``: the one that they have.

    Args:
        name: of the tensor, for errors.
        index: integers ``[inputs]``, the group of each input.
        group: inputs of a group.
        ordered: whether the file is said to have an order of its own, so that the index has to be there.

    Returns:
        int64 ``[inputs]``.

    Raises:
        CheckpointError: groups of other sizes than ``group``, or that are not there.
    """
    inputs = len(index)
    plain = torch.arange(inputs) // group
    # Where the order is the plain one, some writers leave the tensor as it was made: all 0, or all -1.
    unset = not bool((index != 0).any()) or not bool((index != -1).any())
    if torch.equal(index.long(), plain) or (unset and not (ordered and len(plain) > group)):
        return None
    if unset:
        msg = (
            f"{name}: expected the group of each input, 0..{int(plain[-1])}, as desc_act says that they are ordered, "
            f"found {int(index[0])} for all; use a checkpoint whose {name} was written"
        )
        raise CheckpointError(msg)
    order = index.long().argsort(stable=True)
    if not torch.equal(index.long()[order], plain):
        low, high = int(index.min()), int(index.max())
        msg = (
            f"{name}: expected {group} inputs in each of the groups 0..{int(plain[-1])}, found groups {low}..{high} of "
            "other sizes; check that the files are complete and belong together"
        )
        raise CheckpointError(msg)
    return order
