"""Interface of the quantization formats, and helpers to parse them.

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
    "EXPRESSION_ERRORS",
    "FLOATS",
    "MATCHES_NOTHING",
    "STATIC_NOTE",
    "LinearModule",
    "Scheme",
    "StoredTensor",
    "StoredWeight",
    "check_bits",
    "check_zeros",
    "matches_components",
    "read_names",
    "refuse",
]

# Float types by their names in safetensors.
FLOATS = ("F32", "F16", "BF16")

MATCHES_NOTHING = re.compile(r"(?!)")

# Errors that re.compile raises for invalid expressions, huge repetition counts and deep nesting, in this order.
EXPRESSION_ERRORS = (re.error, OverflowError, RecursionError)

STATIC_NOTE = "static scales of activations are not used: activations are quantized dynamically, or not at all"


class LinearModule(NamedTuple):
    """Linear module of a model."""

    name: str  # name in the checkpoint, such as ``model.layers.0.mlp.up_proj``
    outputs: int  # number of output features
    inputs: int  # number of input features
    head: bool = False  # whether the module is the LM head
    transposed: bool = False  # whether an unquantized weight is stored ``[inputs, outputs]``, as in GPT-2


@dataclass(frozen=True)
class StoredTensor:
    """Requirements that a tensor of a checkpoint must fulfil."""

    shapes: tuple[tuple[int, ...], ...] | None  # allowed shapes; ``None`` allows any shape
    dtypes: tuple[str, ...] = FLOATS  # allowed types by their names in safetensors
    required: bool = True  # whether the tensor must exist


class StoredWeight(Protocol):
    """Quantized weight of a linear module, as stored in a checkpoint."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Expected tensors of the module in the checkpoint, by their names without the module's: ``qweight``."""
        ...

    def read(self, tensors: Mapping[str, Tensor], codes: Tensor) -> QuantizedMatrix | Tensor:
        """Return the weight as a quantized matrix, or dequantized to bfloat16 ``[outputs, inputs]``.

        Args:
            tensors: the module's tensors by the same names; they fulfil the requirements of :attr:`tensors`.
            codes: uint8 ``[outputs, inputs]``, where the codes of a quantized matrix are written; may be a view.

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
        """Lines to show to the user, each about a setting in ``config.json`` that pronk does not follow."""
        ...

    @property
    def ignored(self) -> re.Pattern[str]:
        """Pattern for the names, without the model family's prefix, of tensors to ignore in the checkpoint."""
        ...

    def weight(self, module: LinearModule) -> StoredWeight | None:
        """Describe how the checkpoint stores the module's weight; ``None`` if the weight is not quantized."""
        ...


def refuse(what: str, found: object, remedy: str) -> NoReturn:
    """Raise a :class:`ConfigError`: ``quantization_config: expected WHAT, found FOUND; REMEDY``."""
    msg = f"quantization_config: expected {what}, found {found!r:.80}; {remedy}"
    raise ConfigError(msg)


def check_bits(name: str, found: object, allowed: Sequence[int], remedy: str) -> Bits:
    """Return ``found`` if it is an int in ``allowed``, not a bool or float; else raise a ConfigError."""
    if isinstance(found, bool) or not isinstance(found, int) or found not in allowed:
        refuse(f"{name} of {' or '.join(map(str, allowed))}", found, remedy)
    return cast(Bits, found)


def read_names(config: Mapping[str, Any], key: str) -> list[str]:
    """Return the list of names ``config[key]``, or an empty list; raise a ConfigError for other types."""
    found = config.get(key)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        refuse(f"a list of names as {key}", found, "restore config.json from its source")
    return found


def matches_components(module: str, pattern: str) -> bool:
    """Return whether ``pattern``, text or a regular expression, matches whole components of a name.

    Both ``mlp.up_proj`` and ``layers.[01]`` match ``layers.0.mlp.up_proj``, but ``mlp.up`` does not.
    """
    if f".{pattern.strip('.')}." in f".{module}.":
        return True
    try:
        return re.match(rf"(?:{pattern})(?=\.|$)", module) is not None
    except EXPRESSION_ERRORS:
        return False


def check_zeros(name: str, tensors: Mapping[str, Tensor], why: str) -> None:
    """Raise a CheckpointError if tensor ``name`` exists and is not all zeros; ``why`` says why it must be."""
    if name in tensors and bool(tensors[name].count_nonzero()):
        msg = f"{name}: expected zeros, {why}, found other numbers; check that config.json and the weights match"
        raise CheckpointError(msg)
