"""The engine's own backend, which computes with pronk's CPU kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pronk import BITS
from pronk.base.arrays import FLOAT16, FLOAT32, UINT8, Array, DType, mapped_zeros
from pronk.cache.paged import PagedCache
from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.formats.matrix import Bits, QuantizedMatrix, ScaleFormat
from pronk.kernels.adapters import LowRank, pack_adapter
from pronk.kernels.library import Kernels, RoundingBits, arithmetic_digest
from pronk.kernels.rounding import round_weights
from pronk.kernels.weights import CodedRows, pack
from pronk.models.backend import AnyMatrix, Matrix
from pronk.models.kernel_program import KernelProgram
from pronk.models.program import Program


@dataclass(frozen=True)
class KernelBackend:
    """Backend of pronk's kernels, with which the bits of a row do not depend on other rows."""

    kernels: Kernels
    exact = True
    device = "cpu"
    memory = None
    keeps_quantized = True
    drafts_chains = True

    def __str__(self) -> str:
        return f"the kernels {self.name}"

    @property
    def name(self) -> str:
        return self.kernels.name

    @property
    def bits(self) -> RoundingBits:
        return self.kernels.bits

    @property
    def digest(self) -> str:
        """Implement :attr:`Backend.digest`; portable bits do not depend on the processor."""
        if self.bits == "portable":
            return f"portable bits of version {BITS}"
        return arithmetic_digest(self.kernels)

    def compute_dtype(self, dtype: DType) -> DType:
        """Return float32 for float16, which the kernels store and do not compute with."""
        return FLOAT32 if dtype == FLOAT16 else dtype

    def for_model(self, config: ModelConfig, dtype: DType) -> KernelBackend | None:
        """Return this backend if the kernels have the model's sizes of heads."""
        del dtype
        return self if all(map(self.kernels.supports_head_dim, config.head_dims)) else None

    def quantize(self, weight: Array, bits: Bits, release: Callable[[], None]) -> CodedRows:
        return _LazyCodedRows(self.kernels, weight, bits, release)

    def memory_reader(self, num_bytes: int) -> Callable[[], None]:
        buffer = mapped_zeros((num_bytes,), UINT8)
        # the system maps all unwritten pages to one page, which would stay in the processor's cache
        buffer.fill(0)
        return partial(self.kernels.read, buffer)

    def pack(self, weight: AnyMatrix, bias: Array | None = None, **layout: Any) -> Matrix:
        return pack(self.kernels, weight, bias, **layout)

    def pack_adapter(self, matrix: Any, parts: Sequence[LowRank]) -> Any:
        return pack_adapter(matrix, parts)

    def program(
        self,
        hidden: int,
        dtype: DType,
        cache: PagedCache | None = None,
        other_caches: Sequence[PagedCache] = (),
    ) -> Program:
        return KernelProgram(self.kernels, hidden, dtype, cache, other_caches)

    def make_cache(
        self, config: ModelConfig, *, cache_class: type[PagedCache] = PagedCache, **options: Any
    ) -> PagedCache:
        """Implement :meth:`Backend.make_cache`.

        ``cache_class`` is a subclass that several processes need.
        """
        return cache_class(config, kernels=self.kernels, **options)


@dataclass(frozen=True)
class _LazyCodedRows:
    """An unquantized matrix that is quantized slice by slice while :func:`pack` reads it.

    So the quantized codes of the whole matrix are never in memory at once.
    """

    kernels: Kernels
    weight: Array
    bits: Bits
    release: Callable[[], None]

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def scale_format(self) -> ScaleFormat:
        return ScaleFormat(FLOAT32, zeros=False)

    def slice_outputs(self, start: int, stop: int) -> QuantizedMatrix:
        quantized = round_weights(self.kernels, self.weight[start:stop], self.bits)
        self.release()
        return quantized
