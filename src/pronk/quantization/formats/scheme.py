"""Base of the quantization formats: the quantized weights of a checkpoint and the tensors that they are stored in.

``config.json`` is read into a :class:`Scheme`. For each linear module of the model, the scheme returns a
:class:`StoredWeight`: the tensors of the file, so that every key is accounted for, and their conversion to a weight.
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

# Types of elements, as safetensors calls them.
FLOATS = ("F32", "F16", "BF16")

# Matches no name.
NOTHING = re.compile(r"(?!)")

# Raised for texts that are no regular expressions, or that repeat or nest without measure.
NO_EXPRESSION = (re.error, OverflowError, RecursionError)

STATIC_NOTE = "static scales of activations are not used: activations are rounded by their own range, or not at all"


class LinearModule(NamedTuple):
    """A linear module of a model.

    Attributes:
        name: as the checkpoint calls it, ``model.layers.0.mlp.up_proj``.
        outputs: of its weight.
        inputs: of its weight.
        head: whether its outputs are the logits.
        transposed: whether a plain weight would be stored ``[inputs, outputs]``, as GPT-2's are.
    """

    name: str
    outputs: int
    inputs: int
    head: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, as it has to be there.

    Attributes:
        shapes: those that it may have; ``None`` is any.
        dtypes: those that it may have, as safetensors calls them.
        required: whether it has to be there.
    """

    shapes: tuple[tuple[int, ...], ...] | None
    dtypes: tuple[str, ...] = FLOATS
    required: bool = True


class StoredWeight(Protocol):
    """A weight that consists of more than one plain tensor."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """By their names within the module: ``qweight``."""
        ...

    def read(self, tensors: Mapping[str, Tensor], codes: Tensor) -> QuantizedMatrix | Tensor:
        """The weight ``[outputs, inputs]``: quantized, or dequantized to bfloat16.

        Args:
            tensors: those of :attr:`tensors` that the file has, of the shapes and types that they say.
            codes: where the codes of a quantized one go, uint8 ``[outputs, inputs]``: rows of a larger matrix, maybe.

        Raises:
            CheckpointError: numbers that cannot be; one line, without the name of the module.
        """
        ...


class Scheme(Protocol):
    """What one ``config.json`` says of quantization."""

    @property
    def name(self) -> str:
        """The format, as people call it."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What is done otherwise than the checkpoint says; one line each."""
        ...

    @property
    def ignored(self) -> re.Pattern[str]:
        """Matches the names, without the family's prefix, of tensors beside the weights that are not used."""
        ...

    def weight(self, module: LinearModule) -> StoredWeight | None:
        """How the module's weight is stored; ``None``: plainly."""
        ...


def refuse(what: str, found: object, instead: str) -> NoReturn:
    """Raise a :class:`ConfigError`: ``what`` is expected of ``quantization_config``, and ``instead`` would do."""
    msg = f"quantization_config: expected {what}, found {found!r:.80}; {instead}"
    raise ConfigError(msg)


def check_bits(name: str, found: object, known: Sequence[int], instead: str) -> Bits:
    """The bits of a code: an integer of ``known``, and no other number that equals it."""
    if isinstance(found, bool) or not isinstance(found, int) or found not in known:
        refuse(f"{name} of {' or '.join(map(str, known))}", found, instead)
    return cast(Bits, found)


def listed(config: Mapping[str, Any], key: str) -> list[str]:
    """A list of names in a config; empty where there is none.

    Raises:
        ConfigError: something else.
    """
    found = config.get(key)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        refuse(f"a list of names as {key}", found, "restore config.json from its source")
    return found


def names(module: str, pattern: str) -> bool:
    """Whether ``pattern`` is whole components of a module's name (``mlp.up_proj``), or an expression for the first."""
    if f".{pattern.strip('.')}." in f".{module}.":
        return True
    try:
        return re.match(rf"(?:{pattern})(?=\.|$)", module) is not None
    except NO_EXPRESSION:
        return False


def check_zeros(name: str, tensors: Mapping[str, Tensor], why: str) -> None:
    """Raise a :class:`CheckpointError` if there is a tensor ``name`` and it holds anything but zeros."""
    if name in tensors and bool(tensors[name].count_nonzero()):
        msg = f"{name}: expected zeros, {why}, found others; check that config.json and the weights belong together"
        raise CheckpointError(msg)
