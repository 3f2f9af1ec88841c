"""Table of the quantization formats, by ``quant_method``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from pronk.errors import ConfigError
from pronk.quantization.formats.scheme import Scheme

__all__ = ["parse_scheme"]

# Module and class of each format; the module is imported when a checkpoint has the format.
_FORMATS = {
    "compressed-tensors": ("compressed_tensors", "CompressedTensors"),
    "gptq": ("gptq", "GPTQ"),
    "awq": ("awq", "AWQ"),
    "mxfp4": ("mxfp4", "MXFP4"),
    "fp8": ("fp8", "FP8"),
    "fbgemm_fp8": ("fp8", "FP8"),
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
    module, name = _FORMATS[method]
    scheme: Scheme = getattr(import_module(f"pronk.quantization.formats.{module}"), name).parse(config)
    return scheme
