"""Checkpoints of NVIDIA's Model Optimizer (ModelOpt) with weights in NVFP4."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from pronk.checkpoint.formats import scheme
from pronk.checkpoint.formats.floats import NVFP4_GROUP, NVFP4Weight
from pronk.checkpoint.formats.scheme import LinearModule, Scheme

_REMEDY = "use a ModelOpt checkpoint in NVFP4, or the model's 16-bit weights"
# Names of algorithms whose weights are NVFP4. The second leaves the inputs unquantized.
_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
# Names of scales for a quantized KV cache, such as ``layers.0.self_attn.k_proj.k_scale``.
_CACHE_SCALES = re.compile(r"layers\.\d+\..*\.[kv]_proj\.[kv]_scale")


@dataclass(frozen=True)
class ModelOpt(Scheme):
    """Quantization of a ModelOpt checkpoint in NVFP4.

    A module has ``weight`` (two 4-bit floats per byte), ``weight_scale`` (e4m3, one per 16 inputs),
    ``weight_scale_2`` (float32) and perhaps ``input_scale``. A weight is
    ``float * (weight_scale * weight_scale_2)``.

    Attributes:
        unquantized: names of modules that are not quantized; ``*`` stands for any characters.
        notes: warnings about properties of the checkpoint that are ignored or converted.
    """

    unquantized: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    name = "ModelOpt"
    ignored = _CACHE_SCALES

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> ModelOpt:
        """Return the scheme that a ``quantization_config`` of ModelOpt describes.

        Older checkpoints have it in ``hf_quant_config.json``, as the object ``quantization`` and
        with other names of some keys.
        """
        nested = config.get("quantization", config)
        if not isinstance(nested, dict):
            scheme.refuse("an object as quantization", nested)
        algorithm = nested.get("quant_algo")
        if algorithm not in _ALGORITHMS:
            scheme.refuse(f"the quant_algo {' or '.join(_ALGORITHMS)}", algorithm, _REMEDY)
        group = nested.get("group_size", NVFP4_GROUP)
        if group != NVFP4_GROUP:
            scheme.refuse(f"a group_size of {NVFP4_GROUP}", group, _REMEDY)
        unquantized = scheme.read_names(nested, "exclude_modules")
        unquantized += scheme.read_names(nested, "ignore")
        notes = []
        if algorithm == "NVFP4":
            notes.append(scheme.STATIC_NOTE)
        if nested.get("kv_cache_scheme") or nested.get("kv_cache_quant_algo"):
            notes.append(scheme.CACHE_NOTE)
        return cls(tuple(unquantized), tuple(notes))

    def weight(self, module: LinearModule) -> NVFP4Weight | None:
        if module.transposed:
            return None
        if any(fnmatchcase(module.name, pattern) for pattern in self.unquantized):
            return None
        return NVFP4Weight(module, "weight", "weight_scale_2", "input_scale", divides=False)
