"""Table of the quantization formats, by ``quant_method``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pronk.errors import ConfigError
from pronk.quantization.formats.awq import AWQ
from pronk.quantization.formats.compressed_tensors import CompressedTensors
from pronk.quantization.formats.fp8 import FP8
from pronk.quantization.formats.gptq import GPTQ
from pronk.quantization.formats.scheme import Scheme

__all__ = ["parse_scheme"]

_FORMATS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "compressed-tensors": CompressedTensors.parse,
    "gptq": GPTQ.parse,
    "awq": AWQ.parse,
    "fp8": FP8.parse,
    "fbgemm_fp8": FP8.parse,
}


def parse_scheme(config: Mapping[str, Any]) -> Scheme:
    """Parse a ``quantization_config``; raise a ConfigError if it is invalid or not supported."""
    method = config.get("quant_method")
    if method is None and "config_groups" in config:
        method = "compressed-tensors"
    if not isinstance(method, str) or method not in _FORMATS:
        msg = (
            f"quantization_config: expected the quant_method {', '.join(_FORMATS)}, found {method!r:.80}; "
            "use a checkpoint in one of these formats, or the model's 16-bit weights"
        )
        raise ConfigError(msg)
    return _FORMATS[method](config)
