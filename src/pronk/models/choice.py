"""Choice of the backend that computes a model, pronk's kernels or a guest's, and of its bits."""

from __future__ import annotations

import warnings

from pronk.base.arrays import BFLOAT16, DType
from pronk.base.checks import check_choice
from pronk.base.errors import OptionError, refuse
from pronk.base.guests import load_guest
from pronk.checkpoint.config import ModelConfig
from pronk.kernels.library import CHOICES, KernelsError, RoundingBits
from pronk.models.backend import Backend
from pronk.models.kernel_backend import KernelBackend
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


def choose_backend(
    kernels: str, device: str, config: ModelConfig, dtype: DType, bits: RoundingBits
) -> Backend:
    """Return the backend for a model.

    This is torch for ``kernels="torch"`` and for other devices than the CPU. If no kernels fit this
    processor and model, it is torch as well, with a warning that gives the reason. Torch computes
    in ``dtype``, that of the model's weights; ``bits`` are those of the kernels. Raises
    ``OptionError`` if an argument is unknown, the processor lacks the instruction set, or torch is
    needed and missing.
    """
    check_choice("kernels", kernels, CHOICES)
    if kernels == "torch" or (kernels == "auto" and device != "cpu"):
        found = f"kernels={kernels!r}, device={device!r}"
        _check_torch(config, found)
        return open_torch(device, dtype, found)
    reason = f"no kernels for {device}"
    if device == "cpu":
        try:
            loaded = load_kernels(kernels, bits=bits)
        except KernelsError as error:
            reason = str(error)
        else:
            backend = KernelBackend(loaded).for_model(config, dtype)
            if backend is not None:
                return backend
            sizes = ", ".join(map(str, sorted(config.head_dims)))
            reason = f"no kernels for heads of {sizes}"
    _check_torch(config, reason)
    by_torch = open_torch(device, dtype, reason)
    # The frames are this function, the constructor of LLM, its keywords, their check, and the
    # caller.
    text = f"{reason}; torch computes instead, slower and without the promise of equal bits"
    warnings.warn(text, stacklevel=5)
    return by_torch


def _check_torch(config: ModelConfig, found: str) -> None:
    """Raise an OptionError for a model that torch cannot compute."""
    missing = {"recurrent layers": config.recurrent, "latent attention": config.latent}
    kinds = [kind for kind, found in missing.items() if found is not None]
    if kinds:
        expected = f"expected pronk's kernels for the {kinds[0]} of {config.family}"
        refuse(
            "kernels", f"{expected}, found {found}; use kernels='auto', device='cpu'", OptionError
        )


def open_torch(device: str, dtype: DType, reason: str) -> Backend:
    """Return the torch backend; ``reason``: why torch is needed, for the error if it is missing."""
    backend: Backend = load_guest("pronk.backends", "torch", reason)(device, dtype)
    return backend
