"""KV pool on a GPU.

Keys and values of a layer are tensors ``[kv_heads, slots, head_dim]`` on the device, and features
that drafters read are tensors ``[1, slots, width]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pronk import OptionError
from pronk.backends import (
    ROWS,
    BlockTable,
    Kernels,
    ModelConfig,
    PagedCache,
    PoolLayout,
    SavedFeature,
)
from pronk.base.arrays import Array, DType
from pronk.base.convert import to_array, torch_dtype


class GpuPool(PagedCache):
    """A KV cache whose keys and values are tensors on a device.

    Raises:
        OptionError: ``kv_dtype`` is not that of the model.
    """

    is_in_memory = False

    def __init__(
        self, config: ModelConfig, *, device: torch.device, kernels: Kernels, **options: Any
    ) -> None:
        self.device = device
        if options.get("kv_dtype") not in (None, options["dtype"]):
            msg = (
                f"kv_dtype: expected auto with device={str(device)!r}, found "
                f"{options['kv_dtype']}; leave the option out, or use device='cpu'"
            )
            raise OptionError(msg)
        super().__init__(config, kernels=kernels, **options)

    def _choose_layouts(self) -> tuple[PoolLayout, PoolLayout]:
        return ROWS, ROWS

    def _new_pool(self, heads: int, shape: tuple[int, ...], dtype: DType) -> Any:
        return torch.zeros(heads, *shape, dtype=torch_dtype(dtype), device=self.device)

    @property
    def free_slot(self) -> int:
        """A slot that is never allocated; unused rows of a pass write it."""
        return self.num_slots - 1

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the pools of keys and values of a layer (from 0)."""
        keys: Any = self.keys[layer]
        values: Any = self.values[layer]
        return keys, values

    def features_on_device(self) -> Iterator[tuple[SavedFeature, Tensor]]:
        """Yield the saved features with their pools ``[1, slots, width]``."""
        for feature, pool in self.features.items():
            on_device: Any = pool
            yield feature, on_device

    def feature_tensor(self, feature: SavedFeature) -> Tensor:
        """Return the values of a feature, ``[slots, width]``."""
        pool: Any = self.features[feature]
        values: Tensor = pool[0]
        return values

    def read_feature(
        self, feature: SavedFeature, block_table: BlockTable, start: int, stop: int
    ) -> Array:
        slots = torch.from_numpy(self.slots(block_table, start, stop)).to(self.device)
        return to_array(self.feature_tensor(feature)[slots])

    def move(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        from_slots = torch.from_numpy(source).to(self.device)
        to_slots = torch.from_numpy(target).to(self.device)
        for layer in range(self.config.num_layers):
            for pool in self.layer(layer):
                pool[:, to_slots] = pool[:, from_slots]
        for _, pool in self.features_on_device():
            pool[:, to_slots] = pool[:, from_slots]
