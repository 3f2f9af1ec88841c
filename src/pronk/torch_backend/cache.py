"""KV cache of the torch backend: keys and values as rows of tensors on torch's device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pronk.architecture.config import ModelConfig
from pronk.arrays import Array
from pronk.errors import OptionError
from pronk.kv_cache.blocks import BlockTable
from pronk.kv_cache.kept import Kept, Projection
from pronk.kv_cache.paged import PagedCache
from pronk.torch_backend.convert import to_array, to_tensor, torch_dtype

__all__ = ["TorchCache"]


class TorchCache(PagedCache):
    """A cache of tensors: ``[kv_heads, slots, head_dim]``, and ``[1, slots, hidden]`` for kept outputs.

    Raises:
        OptionError: ``kv_dtype`` is int8, which only the kernels support.
    """

    def __init__(self, config: ModelConfig, *, device: str, **options: Any) -> None:
        self.device = torch.device(device)
        if options.get("kv_dtype") not in (None, options["dtype"]):
            msg = f"kv_dtype: expected auto with torch, found {options['kv_dtype']}, which needs pronk's kernels"
            raise OptionError(msg)
        super().__init__(config, kernels=None, **options)

    def _new_pool(self, heads: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        del shape  # the kernels' layout
        return torch.zeros(heads, self.num_slots, self.config.head_dim, dtype=torch_dtype(dtype), device=self.device)

    def _new_hidden_pool(self, width: int) -> Any:
        shape = (1, self.num_slots, width)
        return torch.zeros(shape, dtype=torch_dtype(self.dtype), device=self.device)

    def tensors(self, layer: int) -> tuple[Any, Any]:
        """Return keys and values of a layer, tensors ``[kv_heads, slots, head_dim]``."""
        return self.keys[layer], self.values[layer]

    def to_index(self, slots: NDArray[np.int64]) -> Tensor:
        """Return slots as a tensor on the device."""
        return torch.from_numpy(slots).to(self.device)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store keys and values ``[rows, kv_heads, head_dim]`` of a forward pass at ``slots`` ``[rows]``.

        Infinities and NaN are stored as 0: torch multiplies masked values by 0, and 0 times infinity would be NaN in
        the rows of other requests. The request itself fails, as its logits are not finite.
        """
        for pool, rows in ((self.keys[layer], k), (self.values[layer], v)):
            pool[:, slots] = rows.nan_to_num(0.0, 0.0, 0.0).transpose(0, 1)

    def write_hidden(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """Store outputs ``[rows, hidden]`` of ``layer`` (from 1) at ``slots`` ``[rows]``."""
        self.hidden[layer][:, slots] = rows.nan_to_num(0.0, 0.0, 0.0)[None]

    def read_hidden(self, kept: Kept, block_table: BlockTable, start: int, stop: int) -> Array:
        """Return what is kept as an array; see :meth:`PagedCache.read_hidden`."""
        return to_array(self.hidden[kept][0, self.to_index(self.slots(block_table, start, stop))])

    def write_projection(self, projection: Projection, slots: NDArray[np.int64], values: Array) -> None:
        """Store an array; see :meth:`PagedCache.write_projection`."""
        rows = to_tensor(values).to(self.device).nan_to_num(0.0, 0.0, 0.0)
        self.hidden[projection][0, self.to_index(slots)] = rows

    def move(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Copy the slots ``source`` to ``target``; a slot in both is read before it is overwritten."""
        source_index, target_index = self.to_index(source), self.to_index(target)
        for pool in self._pools:
            pool[:, target_index] = pool[:, source_index]

    def _poison_blocks(self, blocks: Sequence[int]) -> None:
        for block in blocks if self.poison is not None else ():
            for pool in self._pools:
                pool[:, self._block_range(pool, block)] = self.poison
