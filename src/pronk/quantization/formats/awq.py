"""AWQ checkpoints in the version ``gemm``, as AutoAWQ writes them (Lin et al. 2024).

One int32 word packs the 4-bit codes (``qweight`` ``[inputs, outputs / 8]``) or the 4-bit zero points (``qzeros``
``[groups, outputs / 8]``) of eight consecutive outputs. From the lowest bits up, the word holds the outputs 0 2 4 6 1 3
5 7. A weight is ``scales[g] * (code - zero[g])``, where ``g = input // group`` is its group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from pronk.arrays import Array
from pronk.checks import check_integer
from pronk.errors import CheckpointError, ConfigError
from pronk.quantization.formats.matrix import QuantizedMatrix
from pronk.quantization.formats.packing import SLICE_OUTPUTS, group_size, to_quantized_matrix, unpack
from pronk.quantization.formats.scheme import (
    MATCHES_NOTHING,
    LinearModule,
    StoredTensor,
    check_bits,
    read_names,
    refuse,
)

__all__ = ["AWQ"]

_REMEDY = "use an AWQ checkpoint of 4 bits in the version gemm, or the model's 16-bit weights"
# Entry i is the position of output i in a word: the inverse of the permutation 0 2 4 6 1 3 5 7.
_POSITIONS = [0, 4, 1, 5, 2, 6, 3, 7]


@dataclass(frozen=True)
class AWQ:
    """Scheme of an AWQ checkpoint."""

    group: int  # number of inputs per group; -1 means all inputs
    unquantized: tuple[str, ...] = ()  # parts of module names; a module whose name has one is not quantized

    name = "AWQ"
    notes = ()
    ignored = MATCHES_NOTHING

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> AWQ:
        """Parse a ``quantization_config``, or the ``quant_config.json`` of older checkpoints."""
        check_bits("bits", config.get("bits", config.get("w_bit", 4)), (4,), _REMEDY)
        version = config.get("checkpoint_format") or config.get("format") or config.get("version") or "gemm"
        if str(version).lower() != "gemm":
            refuse("the version gemm", version, _REMEDY)
        if config.get("backend", "autoawq") == "llm-awq":  # its words pack consecutive inputs, not outputs
            refuse("the backend autoawq", "llm-awq", _REMEDY)
        if config.get("zero_point", True) is not True:
            refuse("zero_point true", config["zero_point"], _REMEDY)
        size = config.get("group_size", config.get("q_group_size", 128))
        if size != -1 and check_integer("quantization_config: group_size", size, 8, error=ConfigError) % 8:
            refuse("a group_size of a multiple of 8, or -1", size, _REMEDY)
        return cls(size, tuple(read_names(config, "modules_to_not_convert")))

    def weight(self, module: LinearModule) -> _Weight | None:
        """Implement :meth:`Scheme.weight <pronk.quantization.formats.scheme.Scheme.weight>`."""
        if module.head or module.transposed or any(text in module.name for text in self.unquantized):
            return None
        if module.outputs % 8:
            msg = f"{module.name}: expected a multiple of 8 outputs, found {module.outputs}; {_REMEDY}"
            raise CheckpointError(msg)
        return _Weight(module, group_size(self.group, module.inputs))


@dataclass(frozen=True)
class _Weight:
    module: LinearModule
    group: int

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        _, outputs, inputs, *_ = self.module
        num_groups = ceil(inputs / self.group)
        return {
            "qweight": StoredTensor(((inputs, outputs // 8),), ("I32",)),
            "qzeros": StoredTensor(((num_groups, outputs // 8),), ("I32",)),
            "scales": StoredTensor(((num_groups, outputs),)),
        }

    def read(self, tensors: Mapping[str, Array], codes: Array) -> QuantizedMatrix:
        outputs, packed = self.module.outputs, tensors["qweight"]
        for start in range(0, outputs, SLICE_OUTPUTS):
            stop = min(start + SLICE_OUTPUTS, outputs)
            codes[start:stop] = _unpack(packed[:, start // 8 : stop // 8], stop - start).T
        return to_quantized_matrix(codes, _unpack(tensors["qzeros"], outputs).T, tensors["scales"].T, 4, self.group)


def _unpack(packed: Array, outputs: int) -> Array:
    """Unpack int32 ``[rows, outputs / 8]`` to uint8 ``[rows, outputs]``, in the order of the outputs."""
    return unpack(packed, 4, outputs).reshape(len(packed), -1, 8)[..., _POSITIONS].reshape(len(packed), outputs)
