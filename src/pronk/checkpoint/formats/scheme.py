"""Interface and table of the quantization formats, and helpers to parse them.

The ``quantization_config`` of a checkpoint is parsed into a :class:`Scheme`. For each linear module
of the model, the scheme returns a :class:`StoredWeight`: the tensors that the checkpoint must have,
and their conversion to a weight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, NoReturn, Protocol, cast

import numpy as np

from pronk.base import errors
from pronk.base.arrays import Array
from pronk.base.errors import ConfigError
from pronk.checkpoint.formats.matrix import Bits, QuantizedMatrix

FLOATS = ("F32", "F16", "BF16")  # names of float dtypes in safetensors
MATCHES_NOTHING = re.compile(r"(?!)")  # value of ``Scheme.ignored`` if no tensor is ignored
# Errors of re.compile, in this order: for invalid expressions, huge repetition counts and deep
# nesting.
EXPRESSION_ERRORS = (re.error, OverflowError, RecursionError)

STATIC_NOTE = (
    "static scales of activations are not used: activations are quantized dynamically, "
    "or not at all"
)


class LinearModule(NamedTuple):
    """Linear module of a model."""

    name: str  # name in the checkpoint, such as ``model.layers.0.mlp.up_proj``
    outputs: int  # number of output features
    inputs: int  # number of input features
    head: bool = False  # whether the module is the LM head
    # whether an unquantized weight is stored ``[inputs, outputs]``, as in GPT-2
    transposed: bool = False
    # Number of experts whose matrices are in one tensor, whose name is then ``name``; 0: a tensor
    # has one matrix
    experts: int = 0


class StoredTensor(NamedTuple):
    """Requirements that a tensor of a checkpoint must fulfil."""

    shapes: tuple[tuple[int, ...], ...] | None  # allowed shapes; ``None`` allows any shape
    dtypes: tuple[str, ...] = FLOATS  # allowed dtypes, by their names in safetensors
    required: bool = True  # whether the tensor must exist


class StoredWeight(Protocol):
    """Description of how a checkpoint stores a quantized weight of a linear module."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Expected tensors in the checkpoint, by name without the module's name, such as ``qweight``."""

    def read(self, tensors: Mapping[str, Array], codes: Array) -> QuantizedMatrix | Array:
        """Return the weight as a quantized matrix, or dequantized to bfloat16 ``[outputs, inputs]``.

        ``tensors`` are the module's, by the names of :attr:`tensors`, whose requirements they
        fulfil. ``codes``, uint8 ``[outputs, inputs]``, receives the codes if the result is a
        quantized matrix. Invalid values raise a CheckpointError of one line that does not name the
        module.
        """


class Scheme(Protocol):
    """Quantization of a checkpoint, parsed from its ``quantization_config``."""

    @property
    def name(self) -> str:
        """Name of the format, for messages."""

    @property
    def notes(self) -> Sequence[str]:
        """Messages for the user, each on a property of the checkpoint that pronk ignores or converts."""
        return ()

    @property
    def ignored(self) -> re.Pattern[str]:
        """Pattern of names of tensors to ignore.

        The names lack the model family's prefix (``model.``).
        """
        return MATCHES_NOTHING

    def weight(self, module: LinearModule) -> StoredWeight | None:
        """Return how the checkpoint stores the weight of ``module``.

        ``None`` if the weight is not quantized.
        """


def refuse(
    expected: str, found: object, remedy: str = "restore config.json from its source"
) -> NoReturn:
    """Raise a :class:`ConfigError`: ``quantization_config: expected EXPECTED, found FOUND; REMEDY``."""
    errors.refuse(
        "quantization_config", f"expected {expected}, found {found!r:.80}; {remedy}", ConfigError
    )


def check_bits(name: str, bits: object, allowed: Sequence[int], remedy: str) -> Bits:
    """Return ``bits`` if it is an int in ``allowed``, not a bool or float.

    Else raise a ConfigError.
    """
    if isinstance(bits, bool) or not isinstance(bits, int) or bits not in allowed:
        refuse(f"{name} of {' or '.join(map(str, allowed))}", bits, remedy)
    return cast("Bits", bits)


def read_names(config: Mapping[str, Any], key: str) -> list[str]:
    """Return the list of names ``config[key]``, or an empty list.

    Raise a ConfigError for other types.
    """
    names = [] if config.get(key) is None else config[key]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        refuse(f"a list of names as {key}", names)
    return names


def matches_components(module: str, pattern: str) -> bool:
    """Return whether ``pattern``, text or a regular expression, matches whole components of ``module``.

    Both ``mlp.up_proj`` and ``layers.[01]`` match ``layers.0.mlp.up_proj``, but ``mlp.up`` does
    not.
    """
    if f".{pattern.strip('.')}." in f".{module}.":
        return True
    try:
        return re.match(rf"(?:{pattern})(?=\.|$)", module) is not None
    except EXPRESSION_ERRORS:
        return False


def check_zeros(name: str, tensors: Mapping[str, Array], reason: str) -> None:
    """Raise a CheckpointError, with ``reason``, if the tensor ``name`` exists and is not all zeros."""
    if name in tensors and np.count_nonzero(tensors[name]):
        problem = f"expected zeros, {reason}, found other numbers"
        errors.refuse(name, f"{problem}; check that config.json and the weights match")


# Module and class of each format; the module is imported when a checkpoint has the format.
_FORMATS = {
    "compressed-tensors": ("compressed_tensors", "CompressedTensors"),
    "gptq": ("gptq", "GPTQ"),
    "awq": ("gptq", "AWQ"),
    "mxfp4": ("floats", "MXFP4"),
    "fp8": ("floats", "FP8"),
    "fbgemm_fp8": ("floats", "FP8"),
}


def parse_scheme(config: Mapping[str, Any]) -> Scheme:
    """Parse a ``quantization_config``; raise a ConfigError if it is invalid or not supported."""
    method = config.get("quant_method")
    if method is None and "config_groups" in config:
        method = "compressed-tensors"
    if not isinstance(method, str) or method not in _FORMATS:
        remedy = "use a checkpoint in one of these formats, or the model's 16-bit weights"
        refuse(f"the quant_method {', '.join(_FORMATS)}", method, remedy)
    module, name = _FORMATS[method]
    return getattr(import_module(f"pronk.checkpoint.formats.{module}"), name).parse(config)
