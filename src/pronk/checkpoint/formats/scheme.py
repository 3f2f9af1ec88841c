"""Quantization formats of checkpoints: their interface, and helpers to parse them.

The ``quantization_config`` of a checkpoint is parsed into a :class:`Scheme`. For each linear module
of the model, the scheme returns a :class:`StoredWeight`, which names the tensors that the
checkpoint must have, and converts them to a weight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, NoReturn, Protocol, cast

import numpy as np

from pronk.base import errors
from pronk.base.arrays import Array
from pronk.base.checks import check_integer
from pronk.base.errors import ConfigError
from pronk.checkpoint.formats.matrix import Bits, QuantizedMatrix

FLOATS = ("F32", "F16", "BF16")  # names of float dtypes in safetensors
MATCHES_NOTHING = re.compile(r"(?!)")  # value of ``Scheme.ignored`` if all tensors are loaded
# Errors of ``re.compile``: for an invalid expression, a huge repetition count, and deep nesting.
EXPRESSION_ERRORS = (re.error, OverflowError, RecursionError)

STATIC_NOTE = (
    "static scales of activations are not used: activations are quantized dynamically, "
    "or not at all"
)
CACHE_NOTE = "scales of a quantized KV cache are not used"


class LinearModule(NamedTuple):
    """Linear module of a model.

    Attributes:
        name: name in the checkpoint, such as ``model.layers.0.mlp.up_proj``.
        outputs: number of output features.
        inputs: number of input features.
        head: whether the module is the LM head.
        transposed: whether an unquantized weight is stored as ``[inputs, outputs]``, as in GPT-2.
        experts: number of experts whose matrices are in one tensor, which ``name`` names; 0 if a
            tensor has one matrix.
    """

    name: str
    outputs: int
    inputs: int
    head: bool = False
    transposed: bool = False
    experts: int = 0


class StoredTensor(NamedTuple):
    """Requirements on a tensor of a checkpoint.

    Attributes:
        shapes: allowed shapes; ``None``: any shape.
        dtypes: allowed data types, by their names in safetensors.
        required: whether the tensor must exist.
    """

    shapes: tuple[tuple[int, ...], ...] | None
    dtypes: tuple[str, ...] = FLOATS
    required: bool = True


class StoredWeight(Protocol):
    """Quantized weight of a linear module, as a checkpoint stores it in several tensors."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Expected tensors of the module, by the last part of their names, such as ``qweight``."""

    def read(self, tensors: Mapping[str, Array], codes: Array) -> QuantizedMatrix | Array:
        """Return the weight: a quantized matrix, or dequantized to bfloat16 ``[outputs, inputs]``.

        Args:
            tensors: the module's tensors, with the names and requirements of :attr:`tensors`.
            codes: uint8 ``[outputs, inputs]``, which receives the codes of a quantized matrix.

        Raises:
            CheckpointError: a value is invalid. The message is one line, and does not name the
                module.
        """


class Scheme(Protocol):
    """Quantization of a checkpoint: which modules are quantized, and how their weights are stored.

    It is parsed from the checkpoint's ``quantization_config``.
    """

    @property
    def name(self) -> str:
        """Name of the format, for messages."""

    @property
    def notes(self) -> Sequence[str]:
        """Warnings for the user: properties of the checkpoint that pronk ignores or converts."""
        return ()

    @property
    def ignored(self) -> re.Pattern[str]:
        """Names of tensors that are not loaded, without the model family's prefix (``model.``)."""
        return MATCHES_NOTHING

    def weight(self, module: LinearModule) -> StoredWeight | None:
        """Return how the checkpoint stores a module's weight; ``None`` if it is not quantized."""


def refuse(
    expected: str, found: object, remedy: str = "restore config.json from its source"
) -> NoReturn:
    """Raise a ConfigError about a wrong value in ``quantization_config``.

    The message is ``quantization_config: expected EXPECTED, found FOUND; REMEDY``.
    """
    problem = f"expected {expected}, found {found!r:.80}; {remedy}"
    errors.refuse("quantization_config", problem, ConfigError)


def check_bits(name: str, bits: object, allowed: Sequence[int], remedy: str) -> Bits:
    """Return ``bits`` if it is an int in ``allowed``; otherwise raise a ConfigError.

    ``name`` and ``remedy`` are parts of the error message.
    """
    if isinstance(bits, bool) or not isinstance(bits, int) or bits not in allowed:
        refuse(f"{name} of {' or '.join(map(str, allowed))}", bits, remedy)
    return cast("Bits", bits)


def parse_group_size(size: object, remedy: str) -> int:
    """Return ``group_size`` of a config: -1, or a multiple of 8.

    Any other value raises a ConfigError whose message ends with ``remedy``.
    """
    if size == -1 and not isinstance(size, bool):
        return -1
    group = check_integer("quantization_config: group_size", size, 8, error=ConfigError)
    if group % 8:
        refuse("a group_size of a multiple of 8, or -1", size, remedy)
    return group


def read_names(config: Mapping[str, Any], key: str) -> list[str]:
    """Return the list of names ``config[key]``; an empty list if the key is missing or null.

    Raises:
        ConfigError: the value is no list of texts.
    """
    names = [] if config.get(key) is None else config[key]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        refuse(f"a list of names as {key}", names)
    return names


def matches_components(module: str, pattern: str) -> bool:
    """Return whether a pattern matches whole components of a module's name.

    The pattern is text or a regular expression. Both ``mlp.up_proj`` and ``layers.[01]`` match
    ``layers.0.mlp.up_proj``, but ``mlp.up`` does not.
    """
    if f".{pattern.strip('.')}." in f".{module}.":
        return True
    try:
        return re.match(rf"(?:{pattern})(?=\.|$)", module) is not None
    except EXPRESSION_ERRORS:
        return False


def check_zeros(name: str, tensors: Mapping[str, Array], reason: str) -> None:
    """Raise a CheckpointError if the tensor ``name`` exists and has a number other than 0.

    The message is ``NAME: expected zeros, REASON, found other numbers; …``.
    """
    if name in tensors and np.count_nonzero(tensors[name]):
        problem = f"expected zeros, {reason}, found other numbers"
        errors.refuse(name, f"{problem}; check that config.json and the weights match")


# Module and class for each format. The module is imported only for a checkpoint of the format.
_FORMATS = {
    "compressed-tensors": ("compressed_tensors", "CompressedTensors"),
    "gptq": ("gptq", "GPTQ"),
    "awq": ("awq", "AWQ"),
    "mxfp4": ("floats", "MXFP4"),
    "fp8": ("floats", "FP8"),
    "fbgemm_fp8": ("floats", "FP8"),
    "modelopt": ("modelopt", "ModelOpt"),
    "modelopt_fp4": ("modelopt", "ModelOpt"),
}


def parse_scheme(config: Mapping[str, Any]) -> Scheme:
    """Return the scheme that a ``quantization_config`` describes.

    Raises:
        ConfigError: the format or a value is not supported, or a value is invalid.
    """
    method = config.get("quant_method")
    if method is None and "config_groups" in config:
        method = "compressed-tensors"
    if not isinstance(method, str) or method not in _FORMATS:
        remedy = "use a checkpoint in one of these formats, or the model's 16-bit weights"
        refuse(f"the quant_method {', '.join(_FORMATS)}", method, remedy)
    module_name, class_name = _FORMATS[method]
    module = import_module(f"pronk.checkpoint.formats.{module_name}")
    return getattr(module, class_name).parse(config)
