"""Backend of torch, for :class:`~pronk.models.backend.Backend`, and the memory of its devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pronk import OptionError
from pronk.backends import (
    AnyMatrix,
    Bits,
    CodedRows,
    LowRank,
    ModelConfig,
    PagedCache,
    Program,
    QuantizedMatrix,
    num_threads,
)
from pronk.base.arrays import Array, DType
from pronk.base.checks import close_choices
from pronk.torch.cache import TorchCache
from pronk.torch.convert import to_array, to_tensor, torch_dtype
from pronk.torch.program import TorchProgram


@dataclass(frozen=True, eq=False)
class TorchMatrix:
    """A weight matrix on torch's device."""

    weight: Tensor  # ``[outputs, inputs]``; the outputs of a gate, if ``gated``, come first
    bias: Tensor | None
    gated: bool

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        """Number of bytes in memory, without the bias."""
        return self.weight.nbytes

    @property
    def format(self) -> str:
        """Data type of the weights."""
        return str(self.weight.dtype).removeprefix("torch.")

    def take_outputs(self, rows: Array) -> TorchMatrix:
        indices = torch.from_numpy(rows).to(self.weight.device)
        bias = None if self.bias is None else self.bias[indices]
        return TorchMatrix(self.weight[indices], bias, self.gated)

    def unpack(self) -> Array:
        return to_array(self.weight.float())


class TorchBackend:
    """Backend that computes with torch on ``device``, with weights in ``dtype``.

    Quantized weights are dequantized when they are loaded.

    Raises:
        OptionError: torch has no such device on this machine.
    """

    name = "torch"
    exact = False
    bits: Literal["fast"] = "fast"
    digest = None
    kernels = None
    keeps_quantized = False
    drafts_chains = False

    def __init__(self, device: str, dtype: DType) -> None:
        self.device = device
        self.dtype = dtype
        try:
            torch.empty(1, device=device).item()
        except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
            near = close_choices(str(device), ("cpu", "cuda", "mps", "xpu"))
            remedy = f"did you mean {near}?" if near else "use cpu"
            msg = (
                f'device: expected "cpu" or an accelerator that torch has here, found {device!r}; '
                f"{remedy}"
            )
            raise OptionError(msg) from error
        torch.set_num_threads(num_threads())

    def __str__(self) -> str:
        return f"torch on {self.device}"

    @property
    def memory(self) -> int | None:
        """Number of free bytes of a CUDA device; ``None`` for other devices."""
        device = torch.device(self.device)
        return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None

    def compute_dtype(self, dtype: DType) -> DType:
        return dtype

    def for_model(self, config: ModelConfig, dtype: DType) -> TorchBackend:
        """Return a backend on the same device for weights in ``dtype``.

        Raises:
            OptionError: the model has recurrent layers or latent attention.
        """
        missing = {"recurrent layers": config.recurrent, "latent attention": config.latent}
        for kind, found in missing.items():
            if found is not None:
                msg = (
                    f"kernels: expected pronk's kernels for the {kind} of {config.family}, "
                    f"found {self}; use kernels='auto', device='cpu'"
                )
                raise OptionError(msg)
        return TorchBackend(self.device, dtype)

    def quantize(self, weight: Array, bits: Bits, release: Callable[[], None]) -> CodedRows:
        raise NotImplementedError

    def memory_reader(self, num_bytes: int) -> Callable[[], None]:
        buffer = torch.zeros(num_bytes // 4, dtype=torch.float32, device=self.device)

        def read() -> None:
            buffer.sum()
            if self.device != "cpu":
                torch.accelerator.synchronize(self.device)

        return read

    def pack(
        self, weight: AnyMatrix, bias: Array | None = None, *, gated: bool = False, **layout: Any
    ) -> TorchMatrix:
        """Copy a matrix and its bias to the device; only the kernels use ``layout``."""
        del layout
        values = weight.dequantize() if isinstance(weight, QuantizedMatrix) else weight
        assert isinstance(values, np.ndarray), (
            "expected weights that torch can read, found blocks of a file"
        )
        tensors = [
            to_tensor(array).to(self.device, torch_dtype(self.dtype))
            for array in (values, bias)
            if array is not None
        ]
        return TorchMatrix(tensors[0], tensors[1] if len(tensors) > 1 else None, gated)

    def pack_adapter(
        self, matrix: TorchMatrix, parts: Sequence[LowRank]
    ) -> list[tuple[int, Tensor, Tensor]]:
        """Copy an adapter's parts of a matrix to the device, in float32."""
        del matrix
        return [
            (start, to_tensor(down).to(self.device), to_tensor(up).to(self.device))
            for start, down, up in parts
        ]

    def program(
        self,
        hidden: int,
        dtype: DType,
        cache: PagedCache | None = None,
        other_caches: Sequence[PagedCache] = (),
    ) -> Program:
        return TorchProgram(self.device, hidden, dtype, cache, other_caches)

    def make_cache(self, config: ModelConfig, **options: Any) -> PagedCache:
        return TorchCache(config, device=self.device, **options)


def reset_peak_memory(device: str) -> None:
    """Begin a new measurement of :func:`peak_memory` on a CUDA device."""
    torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: str) -> int:
    """Return the peak memory of tensors on a CUDA device since the last reset, in bytes."""
    return torch.cuda.max_memory_allocated(device)


def product_name(device: str) -> str:
    """Return the name of a CUDA device, such as ``NVIDIA H100``."""
    return torch.cuda.get_device_name(device)
