"""Interface of a backend: the code that computes a model, on CPU kernels or by torch.

The engine's own is :mod:`pronk.models.kernel_backend`. All differences between backends are behind
this interface; the engine never tests which backend it has. Other backends are guests: packages
that register a class by an entry point (:mod:`pronk.backends`), such as :mod:`pronk.torch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pronk.base.arrays import Array, DType
from pronk.cache.paged import PagedCache
from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.formats.matrix import Bits, QuantizedMatrix
from pronk.checkpoint.gguf.blocks import BlockMatrix
from pronk.kernels.adapters import LowRank
from pronk.kernels.library import Kernels, RoundingBits
from pronk.kernels.weight_cache import WeightCache
from pronk.kernels.weights import CodedRows
from pronk.models.program import Program

# types of a matrix ``[outputs, inputs]`` that a backend can pack
AnyMatrix = Array | QuantizedMatrix | CodedRows | BlockMatrix


class Matrix(Protocol):
    """A weight matrix ``[outputs, inputs]`` in the form that a backend computes with."""

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs.

        A gated matrix has the outputs of gate and up projection.
        """

    @property
    def nbytes(self) -> int:
        """Size in memory, in bytes, without a bias."""

    @property
    def format(self) -> str:
        """Format of the numbers in words, such as ``bfloat16`` or ``int4 in groups of 32``."""

    def take_outputs(self, rows: Array) -> Matrix:
        """Return a matrix of the outputs ``rows``, int ``[outputs]``, with the same bits.

        The matrix must have no gate and no padding between attention heads.
        """

    def unpack(self) -> Array:
        """Return the weights, float32 ``[outputs, inputs]``."""


class Backend(Protocol):
    """Implementation of the operations of a model; its arguments and results are NumPy arrays."""

    @property
    def name(self) -> str:
        """Instruction set of the kernels, or ``"torch"``."""

    @property
    def exact(self) -> bool:
        """Whether the bits of a row depend on its own text alone, not on the rest of its batch.

        Only then are packed weights, keys and values kept for later processes.
        """

    @property
    def bits(self) -> RoundingBits:
        """``"portable"`` if results have the same bits on every processor, otherwise ``"fast"``."""

    @property
    def digest(self) -> str | None:
        """Digest of what determines the bits of results besides the model, such as the processor.

        Stored keys and values are reused only under the same digest. ``None`` unless ``exact``.
        """

    @property
    def kernels(self) -> Kernels | None:
        """Kernels that sample tokens from logits; ``None``: NumPy does, which is slower."""

    @property
    def device(self) -> str:
        """Name of the device, such as ``"cpu"``."""

    @property
    def memory(self) -> int | None:
        """Free bytes of the device's own memory; ``None`` if it uses the machine's."""

    @property
    def keeps_quantized(self) -> bool:
        """Whether :meth:`pack` takes quantized matrices as they are.

        Otherwise they are dequantized before.
        """

    @property
    def drafts_chains(self) -> bool:
        """Whether programs have ``draft_chain``, which drafts a chain of tokens in one call."""

    def compute_dtype(self, dtype: DType) -> DType:
        """Return the dtype of activations for weights in ``dtype``."""

    def for_model(self, config: ModelConfig, dtype: DType) -> Backend | None:
        """Return the backend for another model on the same device.

        ``None`` if it cannot compute that model.
        """

    def quantize(self, weight: Array, bits: Bits, release: Callable[[], None]) -> CodedRows:
        """Return a matrix whose weights are rounded to ``bits`` while it is packed.

        Only for a backend that ``keeps_quantized``.

        ``release`` is called after each slice, to free pages of the mapped checkpoint.
        """

    def memory_reader(self, num_bytes: int) -> Callable[[], None]:
        """Return a function that reads the same ``num_bytes`` of the device's memory each time."""

    def pack(
        self,
        weight: AnyMatrix,
        bias: Array | None = None,
        *,
        unit: int | None = None,
        gated: bool = False,
        cache: WeightCache | None = None,
    ) -> Matrix:
        """Convert a matrix to this backend's form.

        Arguments and errors are those of :func:`pronk.kernels.weights.pack`.
        """

    def pack_adapter(self, matrix: Any, parts: Sequence[LowRank]) -> Any:
        """Convert an adapter of a matrix of this backend; ``parts`` have disjoint outputs."""

    def program(
        self,
        hidden: int,
        dtype: DType,
        cache: PagedCache | None = None,
        other_caches: Sequence[PagedCache] = (),
    ) -> Program:
        """Return an empty program.

        The arguments are those of :class:`~pronk.models.program.Program`.
        """

    def make_cache(self, config: ModelConfig, **options: Any) -> PagedCache:
        """Return a KV cache for programs of this backend.

        ``options`` are those of :class:`PagedCache`.
        """
