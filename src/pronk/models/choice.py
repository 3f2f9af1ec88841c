"""Choice of the kernels that compute a model, and of their bits."""

from __future__ import annotations

from pronk.base.arrays import BFLOAT16, FLOAT16, FLOAT32, DType
from pronk.base.checks import check_choice
from pronk.base.errors import OptionError
from pronk.kernels.library import Kernels, KernelsError, RoundingBits
from pronk.models.kernels import load_kernels
from pronk.models.options import BITS_CHOICES


def choose_bits(bits: str, dtype: DType, *, quantized: bool) -> RoundingBits:
    """Return the bits for a model.

    Args:
        bits: the option ``bits``.
        dtype: data type of the weights that are not quantized.
        quantized: whether any weights are quantized, by the checkpoint or while loading.

    Raises:
        OptionError: ``bits`` is unknown.
    """
    check_choice("bits", bits, BITS_CHOICES)
    if bits == "auto":
        return "fast" if dtype == BFLOAT16 and not quantized else "portable"
    return "fast" if bits == "fast" else "portable"


def choose_kernels(choice: str, bits: RoundingBits) -> Kernels:
    """Return the kernels for the options ``kernels`` and ``bits``.

    Raises:
        OptionError: ``choice`` is unknown, the processor lacks this instruction set, or there are
            no kernels that pass their self-check.
    """
    try:
        return load_kernels(choice, bits=bits)
    except KernelsError as error:
        msg = f"kernels: {error}"
        raise OptionError(msg) from error


def compute_dtype(dtype: DType) -> DType:
    """Return the data type of activations for weights in ``dtype``.

    It is float32 for float16, which the kernels store and do not compute with.
    """
    return FLOAT32 if dtype == FLOAT16 else dtype
