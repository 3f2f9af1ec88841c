"""Interface of the quantization formats.

The ``quantization_config`` of a checkpoint is parsed into a :class:`Scheme`. For each linear module of the model, the
scheme returns a :class:`StoredWeight`: the tensors that the file must have, and their conversion to a weight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol, cast

from torch import Tensor

from pronk.errors import CheckpointError, ConfigError
from pronk.quantization.formats.matrix import Bits, QuantizedMatrix

__all__ = [
    "FLOATS",
    "NOTHING",
    "NO_EXPRESSION",
    "STATIC_NOTE",
    "LinearModule",
    "Scheme",
    "StoredTensor",
    "StoredWeight",
    "check_bits",
    "check_zeros",
    "listed",
    "names",
    "refuse",
]

# Float types by their names in safetensors.
FLOATS = ("F32", "F16", "BF16")

NOTHING = re.compile(r"(?!)")  # matches no name

# Raised by re.compile for invalid expressions, huge repetition counts and deep nesting.
NO_EXPRESSION = (re.error, OverflowError, RecursionError)

STATIC_NOTE = "static scales of activations are not used: activations are quantized dynamically, or not at all"


class LinearModule(NamedTuple):
    """Linear module of a model.

    Attributes:
        name: name in the checkpoint, such as ``model.layers.0.mlp.up_proj``.
        outputs: number of output features.
        inputs: number of input features.
        head: whether the module is the LM head.
        transposed: whether an unquantized weight is stored ``[inputs, outputs]``, as in GPT-2.
    """

    name: str
    outputs: int
    inputs: int
    head: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class StoredTensor:
    """Requirements on a tensor of a checkpoint.

    Attributes:
        shapes: allowed shapes; ``None`` is any.
        dtypes: allowed types by their names in safetensors.
        required: whether the tensor must exist.
    """

    shapes: tuple[tuple[int, ...], ...] | None
    dtypes: tuple[str, ...] = FLOATS
    required: bool = True


class StoredWeight(Protocol):
    """Quantized weight of a linear module in a file."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Tensors of the file, by their names within the module (``qweight``)."""
        ...

    def read(self, tensors: Mapping[str, Tensor], codes: Tensor) -> QuantizedMatrix | Tensor:
        """Convert to a quantized matrix, or dequantize to bfloat16 ``[outputs, inputs]``.

        Args:
            tensors: the tensors of :attr:`tensors` that the file has, with shapes and types checked.
            codes: destination of the codes of a quantized matrix, uint8 ``[outputs, inputs]``; may be a view.

        Raises:
            CheckpointError: the values are invalid; the message is one line without the name of the module.
        """
        ...


class Scheme(Protocol):
    """Quantization of a checkpoint, parsed from its ``quantization_config``."""

    @property
    def name(self) -> str:
        """Name of the format, for messages."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Deviations of the engine from ``config.json``, one line each."""
        ...

    @property
    def ignored(self) -> re.Pattern[str]:
        """Pattern of the names, without the family's prefix, of unused tensors."""
        ...

    def weight(self, module: LinearModule) -> StoredWeight | None:
        """Return the stored form of the module's weight; ``None`` if the weight is not quantized."""
        ...


def refuse(what: str, found: object, instead: str) -> NoReturn:
    """Raise a :class:`ConfigError` with the expected value, the found value and the remedy."""
    msg = f"quantization_config: expected {what}, found {found!r:.80}; {instead}"
    raise ConfigError(msg)


def check_bits(name: str, found: object, known: Sequence[int], instead: str) -> Bits:
    """Return ``found`` if it is an integer of ``known``; refuse a bool or a float of the same value."""
    if isinstance(found, bool) or not isinstance(found, int) or found not in known:
        refuse(f"{name} of {' or '.join(map(str, known))}", found, instead)
    return cast(Bits, found)


def listed(config: Mapping[str, Any], key: str) -> list[str]:
    """Return a list of names in a config, empty without the key; refuse another value."""
    found = config.get(key)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        refuse(f"a list of names as {key}", found, "restore config.json from its source")
    return found


def names(module: str, pattern: str) -> bool:
    """Return whether ``pattern`` matches whole components of a module's name.

    A pattern is a part of the name (``mlp.up_proj``) or a regular expression for its beginning.
    """
    if f".{pattern.strip('.')}." in f".{module}.":
        return True
    try:
        return re.match(rf"(?:{pattern})(?=\.|$)", module) is not None
    except NO_EXPRESSION:
        return False


def check_zeros(name: str, tensors: Mapping[str, Tensor], why: str) -> None:
    """Raise a :class:`CheckpointError` if the tensor ``name`` exists and is not all zeros."""
    if name in tensors and bool(tensors[name].count_nonzero()):
        msg = f"{name}: expected zeros, {why}, found other numbers; check that config.json and the weights match"
        raise CheckpointError(msg)
