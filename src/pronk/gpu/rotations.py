"""Tables of the rotations of a model's layers on a device."""

from __future__ import annotations

from pronk.base.convert import to_tensor
from pronk.checkpoint import RopeConfig
from pronk.gpu.pool import GpuPool
from pronk.gpu.rows import Rotation


class LayerRotations:
    """The rotation of each layer whose keys a pool stores; tables grow with the texts.

    Attributes:
        version: number that increases when tables are replaced by longer ones. Graphs that were
            recorded before have the addresses of the old tables.
    """

    def __init__(self, pool: GpuPool) -> None:
        self.version = 0
        self._pool = pool
        self._of_layers: list[Rotation | None] = []

    def reserve(self, count: int) -> None:
        """Make rotations of at least ``count`` positions ready."""
        first = next((each for each in self._of_layers if each is not None), None)
        if self._of_layers and (first is None or len(first.table) >= count):
            return
        tables = dict[RopeConfig, Rotation]()
        self._of_layers = []
        for layer in range(self._pool.config.num_layers):
            rope = self._pool.config.rope_of(layer)
            if rope is None:
                self._of_layers.append(None)
                continue
            if rope not in tables:
                entries = self._pool.rope_table(rope).up_to(count)
                tables[rope] = Rotation(to_tensor(entries).to(self._pool.device), rope.dim)
            self._of_layers.append(tables[rope])
        self.version += 1

    def of(self, layer: int) -> Rotation | None:
        """Return the rotation of a layer (from 0); ``None`` if it has none."""
        return self._of_layers[layer]
