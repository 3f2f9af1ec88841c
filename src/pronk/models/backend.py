"""Backends, which compute models: pronk's kernels on a CPU, or torch (:mod:`pronk.torch_backend`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pronk.architecture.config import ModelConfig
from pronk.arrays import Array, DType
from pronk.kernels.adapters import LowRank, pack_adapter
from pronk.kernels.library import Kernels
from pronk.kernels.weight_cache import WeightCache
from pronk.kernels.weights import CodedRows, pack
from pronk.kv_cache.paged import PagedCache
from pronk.models.kernel_program import KernelProgram
from pronk.models.program import CrossAttentionSource, Program
from pronk.quantization.formats.matrix import QuantizedMatrix
from pronk.quantization.gguf.blocks import BlockMatrix

AnyMatrix = Array | QuantizedMatrix | CodedRows | BlockMatrix  # weights ``[outputs, inputs]`` to pack


class Matrix(Protocol):
    """A weight matrix ``[outputs, inputs]`` in the form that a backend computes with."""

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs; a gated matrix has the outputs of gate and up projection."""

    @property
    def nbytes(self) -> int:
        """Size in memory, in bytes, without a bias."""

    @property
    def format(self) -> str:
        """Format of the numbers in words, such as ``bfloat16`` or ``int4 in groups of 32``."""

    def unpack(self) -> Array:
        """Return the weights, float32 ``[outputs, inputs]``."""


class Backend(Protocol):
    """Implementation of the operations of a model; its arguments and results are NumPy arrays."""

    @property
    def name(self) -> str:
        """Instruction set of the kernels, or ``"torch"``."""

    @property
    def kernels(self) -> Kernels | None:
        """The kernels; ``None`` for torch, with which a row's bits may depend on the other rows of the batch."""

    @property
    def device(self) -> str:
        """``"cpu"``, or the name of torch's device."""

    @property
    def memory(self) -> int | None:
        """Free bytes of the device's own memory; ``None`` if it uses the machine's."""

    def pack(
        self,
        weight: AnyMatrix,
        bias: Array | None = None,
        *,
        unit: int | None = None,
        gated: bool = False,
        cache: WeightCache | None = None,
    ) -> Matrix:
        """Convert a matrix to this backend's form; see :func:`pronk.kernels.weights.pack`."""

    def pack_adapter(self, matrix: Any, parts: Sequence[LowRank]) -> Any:
        """Convert an adapter of a matrix of this backend; ``parts`` have disjoint outputs."""

    def program(
        self, hidden: int, dtype: DType, cache: PagedCache | None = None, source: CrossAttentionSource | None = None
    ) -> Program:
        """Return an empty program; the arguments are those of :class:`~pronk.models.program.Program`."""

    def make_cache(self, config: ModelConfig, **options: Any) -> PagedCache:
        """Return a KV cache for programs of this backend; ``options`` are those of :class:`PagedCache`."""


@dataclass(frozen=True)
class KernelBackend:
    """Backend of pronk's kernels, with which the bits of a row do not depend on other rows."""

    kernels: Kernels
    device = "cpu"
    memory = None

    def __str__(self) -> str:
        return f"the kernels {self.name}"

    @property
    def name(self) -> str:
        return self.kernels.name

    def pack(self, weight: AnyMatrix, bias: Array | None = None, **layout: Any) -> Matrix:
        return pack(self.kernels, weight, bias, **layout)

    def pack_adapter(self, matrix: Any, parts: Sequence[LowRank]) -> Any:
        return pack_adapter(matrix, parts)

    def program(
        self, hidden: int, dtype: DType, cache: PagedCache | None = None, source: CrossAttentionSource | None = None
    ) -> Program:
        return KernelProgram(self.kernels, hidden, dtype, cache, source)

    def make_cache(
        self, config: ModelConfig, *, cache_class: type[PagedCache] = PagedCache, **options: Any
    ) -> PagedCache:
        """Implement :meth:`Backend.make_cache`; ``cache_class`` is a subclass that several processes need."""
        return cache_class(config, kernels=self.kernels, **options)
