"""Loading of quantized checkpoints with the numbers of their weights, as an oracle of the loader."""

from collections.abc import Sequence

import numpy as np

from pronk.base.arrays import UINT8, Array
from pronk.checkpoint.formats.matrix import QuantizedMatrix
from pronk.checkpoint.gguf.blocks import BlockMatrix
from pronk.models.linear import WeightLayout
from pronk.models.placer import WeightPlacer
from pronk.models.tensor_plan import CheckpointTensor


class DequantizingPlacer(WeightPlacer):
    """Places all weights as floats; the kernels then round no inputs."""

    def _blocks(
        self, sources: Sequence[CheckpointTensor], layout: WeightLayout
    ) -> list[BlockMatrix] | None:
        del sources, layout

    def _table(self, source: CheckpointTensor) -> Array:
        if not self.inventory.is_quantized(source):
            return super()._table(source)
        return self._stack([self._read(source, np.empty(source.shape, UINT8))])

    def _fuse(
        self, weights: Sequence[Array | QuantizedMatrix], codes: Array, *, transposed: bool
    ) -> Array:
        del codes
        return self._stack(weights, transposed=transposed)
