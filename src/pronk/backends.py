"""Choice of the backend that computes a model: pronk's kernels or torch."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from pronk.architecture.config import ModelConfig
from pronk.arrays import DType
from pronk.checks import check_choice, install_extra, require_extra
from pronk.errors import OptionError, describe_error
from pronk.kernels.library import CHOICES, KernelsError
from pronk.models.backend import Backend, KernelBackend
from pronk.models.kernels import load_kernels

if TYPE_CHECKING:
    from pronk.torch_backend.backend import TorchBackend


def choose_backend(kernels: str, device: str, config: ModelConfig, dtype: DType) -> Backend:
    """Return the backend for a model.

    This is torch for ``kernels="torch"`` and for other devices than the CPU. If no kernels fit this processor and
    model, it is torch as well, with a warning that gives the reason. Torch computes in ``dtype``, that of the model's
    weights. Raises ``OptionError`` if an argument is unknown, the processor lacks the instruction set, or torch is
    needed and missing.
    """
    check_choice("kernels", kernels, CHOICES)
    if kernels == "torch" or (kernels == "auto" and device != "cpu"):
        return open_torch(device, dtype, f"kernels={kernels!r}, device={device!r}")
    reason = f"no kernels for {device}"
    if device == "cpu":
        try:
            found = load_kernels(kernels)
        except KernelsError as error:
            reason = str(error)
        else:
            if found.supports_head_dim(config.head_dim):
                return KernelBackend(found)
            reason = f"no kernels for heads of {config.head_dim}"
    backend = open_torch(device, dtype, reason)
    # The frames are this function, the constructor of LLM, the check of its keywords, and the caller.
    warnings.warn(f"{reason}; torch computes instead, slower and without the promise of equal bits", stacklevel=4)
    return backend


def open_torch(device: str, dtype: DType, reason: str) -> TorchBackend:
    """Return the torch backend; ``reason``: why torch is needed, for the error if it is missing."""
    require_extra(reason, "torch", "torch")
    try:
        from pronk.torch_backend.backend import TorchBackend  # noqa: PLC0415 - torch is optional
    except ImportError as error:
        found = describe_error(error)[:80]
        msg = f"{reason}: expected torch that can be imported, found {found!r}; {install_extra('torch')}"
        raise OptionError(msg) from error
    return TorchBackend(device, dtype)
