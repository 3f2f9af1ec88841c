"""AWQ checkpoints, whose codes are packed into int32 words along the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

from pronk.base.arrays import Array
from pronk.base.errors import refuse
from pronk.checkpoint.formats import matrix, scheme
from pronk.checkpoint.formats.matrix import QuantizedMatrix, to_quantized_matrix
from pronk.checkpoint.formats.scheme import LinearModule, Scheme, StoredTensor

_REMEDY = "use an AWQ checkpoint of 4 bits in the version gemm, or the model's 16-bit weights"
# Where eight consecutive outputs are in a word: the inverse of the permutation 0 2 4 6 1 3 5 7.
_POSITIONS = [0, 4, 1, 5, 2, 6, 3, 7]


@dataclass(frozen=True)
class AWQ(Scheme):
    """Quantization of an AWQ checkpoint (Lin et al. 2024) in the version ``gemm`` of AutoAWQ.

    A word of int32 packs the 4-bit codes, or the 4-bit zero points, of eight consecutive outputs.
    From the lowest bits up, the word holds the outputs 0 2 4 6 1 3 5 7::

        qweight    [inputs, outputs / 8]
        qzeros     [groups, outputs / 8]

    A weight is ``scales[g] * (code - zero[g])``, where ``g = input // group`` is its group.

    Attributes:
        group: number of inputs per group; -1: all inputs.
        unquantized: parts of module names; a module whose name contains one is not quantized.
    """

    group: int
    unquantized: tuple[str, ...] = ()

    name = "AWQ"

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> AWQ:
        """Return the scheme that a ``quantization_config`` describes.

        Older checkpoints have the same keys in ``quant_config.json``.
        """
        scheme.check_bits("bits", config.get("bits", config.get("w_bit", 4)), (4,), _REMEDY)
        keys = ("checkpoint_format", "format", "version")
        version = next((config[key] for key in keys if config.get(key)), "gemm")
        if str(version).lower() != "gemm":
            scheme.refuse("the version gemm", version, _REMEDY)
        # The format of the backend llm-awq differs: a word packs consecutive inputs, not outputs.
        if config.get("backend", "autoawq") == "llm-awq":
            scheme.refuse("the backend autoawq", "llm-awq", _REMEDY)
        if config.get("zero_point", True) is not True:
            scheme.refuse("zero_point true", config["zero_point"], _REMEDY)
        size = config.get("group_size", config.get("q_group_size", 128))
        group = scheme.parse_group_size(size, _REMEDY)
        return cls(group, tuple(scheme.read_names(config, "modules_to_not_convert")))

    def weight(self, module: LinearModule) -> _Weight | None:
        if module.head or module.transposed:
            return None
        if any(text in module.name for text in self.unquantized):
            return None
        if module.outputs % 8:
            problem = f"expected a multiple of 8 outputs, found {module.outputs}"
            refuse(module.name, f"{problem}; {_REMEDY}")
        return _Weight(module, matrix.group_size(self.group, module.inputs))


class _Weight(NamedTuple):
    """Weight of a linear module in an AWQ checkpoint, with ``group`` inputs per group."""

    module: LinearModule
    group: int

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        outputs = self.module.outputs
        inputs = self.module.inputs
        num_groups = ceil(inputs / self.group)
        return {
            "qweight": StoredTensor(((inputs, outputs // 8),), ("I32",)),
            "qzeros": StoredTensor(((num_groups, outputs // 8),), ("I32",)),
            "scales": StoredTensor(((num_groups, outputs),)),
        }

    def read(self, tensors: Mapping[str, Array], codes: Array) -> QuantizedMatrix:
        outputs = self.module.outputs
        packed = tensors["qweight"]
        for start in range(0, outputs, matrix.SLICE_OUTPUTS):
            stop = min(start + matrix.SLICE_OUTPUTS, outputs)
            codes[start:stop] = _unpack(packed[:, start // 8 : stop // 8], stop - start).T
        zeros = _unpack(tensors["qzeros"], outputs).T
        return to_quantized_matrix(codes, zeros, tensors["scales"].T, 4, self.group)


def _unpack(packed: Array, outputs: int) -> Array:
    """Unpack the words of AWQ, int32 ``[rows, outputs / 8]``, to uint8 ``[rows, outputs]``."""
    words = matrix.unpack(packed, 4, outputs).reshape(len(packed), -1, 8)
    return words[..., _POSITIONS].reshape(len(packed), outputs)
