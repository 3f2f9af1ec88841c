"""Interface of the quantization formats: a scheme per checkpoint, a stored weight per linear module.

A :class:`Scheme` is parsed from ``config.json`` and returns a :class:`StoredWeight` for each linear module. The stored
weight lists the expected tensors, so that unexpected keys are found, and converts them into a weight.
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

# Float dtypes, by their names in safetensors.
FLOATS = ("F32", "F16", "BF16")

# Pattern that matches no name.
NOTHING = re.compile(r"(?!)")

# Exceptions of ``re`` for invalid, too large or too deeply nested regular expressions.
NO_EXPRESSION = (re.error, OverflowError, RecursionError)

STATIC_NOTE = "static activation scales are not used: activations are quantized by their own range, or not at all"


class LinearModule(NamedTuple):
    """A linear module of a model.

    Attributes:
        name: name in the checkpoint, such as ``model.layers.0.mlp.up_proj``.
        outputs: number of outputs.
        inputs: number of inputs.
        head: whether the module is the LM head.
        transposed: whether a plain weight is stored as ``[inputs, outputs]``, as in GPT-2.
    """

    name: str
    outputs: int
    inputs: int
    head: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class StoredTensor:
    """Expected tensor of a checkpoint.

    Attributes:
        shapes: allowed shapes; ``None`` allows any.
        dtypes: allowed dtypes, by their names in safetensors.
        required: whether the tensor must be present.
    """

    shapes: tuple[tuple[int, ...], ...] | None
    dtypes: tuple[str, ...] = FLOATS
    required: bool = True


class StoredWeight(Protocol):
    """Weight that is stored in several tensors, such as codes and scales."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Expected tensors, by their names within the module (``qweight``)."""
        ...

    def read(self, tensors: Mapping[str, Tensor], codes: Tensor) -> QuantizedMatrix | Tensor:
        """Return the weight ``[outputs, inputs]``: quantized, or dequantized to bfloat16.

        Args:
            tensors: tensors of the file, checked against :attr:`tensors`.
            codes: output buffer for the codes, uint8 ``[outputs, inputs]``; possibly rows of a larger matrix.

        Raises:
            CheckpointError: a value is invalid; the message is one line without the name of the module.
        """
        ...


class Scheme(Protocol):
    """Quantization scheme of one checkpoint."""

    @property
    def name(self) -> str:
        """Name of the format for messages."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Deviations from the checkpoint's settings, one line each."""
        ...

    @property
    def ignored(self) -> re.Pattern[str]:
        """Pattern of the names, without the family's prefix, of tensors that are not used."""
        ...

    def weight(self, module: LinearModule) -> StoredWeight | None:
        """Return the stored form of the module's weight; ``None`` if it is not quantized."""
        ...


def refuse(what: str, found: object, instead: str) -> NoReturn:
    """Raise :class:`ConfigError`: ``quantization_config`` must have ``what``; ``instead`` is the advice."""
    msg = f"quantization_config: expected {what}, found {found!r:.80}; {instead}"
    raise ConfigError(msg)


def check_bits(name: str, found: object, known: Sequence[int], instead: str) -> Bits:
    """Return the bits per code; raise :class:`ConfigError` unless they are an integer in ``known``."""
    if isinstance(found, bool) or not isinstance(found, int) or found not in known:
        refuse(f"{name} of {' or '.join(map(str, known))}", found, instead)
    return cast(Bits, found)


def listed(config: Mapping[str, Any], key: str) -> list[str]:
    """Return the list of names at a key; empty if missing. Any other value raises :class:`ConfigError`."""
    found = config.get(key)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        refuse(f"a list of names as {key}", found, "restore config.json from its source")
    return found


def names(module: str, pattern: str) -> bool:
    """Whether ``pattern`` is a run of name components (``mlp.up_proj``) or a regex of the first ones."""
    if f".{pattern.strip('.')}." in f".{module}.":
        return True
    try:
        return re.match(rf"(?:{pattern})(?=\.|$)", module) is not None
    except NO_EXPRESSION:
        return False


def check_zeros(name: str, tensors: Mapping[str, Tensor], why: str) -> None:
    """Raise :class:`CheckpointError` if the tensor ``name`` exists and is not all zeros."""
    if name in tensors and bool(tensors[name].count_nonzero()):
        msg = f"{name}: expected zeros, {why}, found others; check that config.json and the weights belong together"
        raise CheckpointError(msg)
