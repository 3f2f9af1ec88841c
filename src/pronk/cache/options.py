"""Options of the KV cache."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pronk.base.options import Option, documented

# Keys of :data:`pronk.base.arrays.KV_DTYPES`. It is not imported: --help does not wait for NumPy.
KV_DTYPE_NAMES = ("auto", "int8", "int4")


@documented
@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Options of the KV cache of a model."""

    kv_memory: Annotated[
        str | int | None,
        Option(
            "Memory for the KV cache, for example 512MiB.",
            absent="fitted to the model",
            details=(
                "In bytes, or as text. By default ``max_batch`` full contexts fit, in at most a "
                "quarter of the machine's memory."
            ),
        ),
    ] = None
    kv_dtype: Annotated[
        str,
        Option(
            "Data type of the KV cache. auto: that of the model. int8, int4: quantized, half and "
            "about a quarter of the memory of 16 bits.",
            choices=KV_DTYPE_NAMES,
            details=(
                '``"int8"`` has a scale per head and token of the target\'s keys and values. '
                '``"int4"`` rotates them first, and has a scale per 32 numbers. Both change the '
                "output."
            ),
        ),
    ] = "auto"
    prefix_cache: Annotated[
        bool,
        Option(
            "Reuse the KV cache of earlier requests for prompts with the same prefix.",
            details=(
                "The text is the same. Ignored with dynamic RoPE: keys depend on the prompt's "
                "length."
            ),
        ),
    ] = False
    prompt_cache: Annotated[
        str | Path | None,
        Option(
            "Keep the KV cache of prompts in this folder, for later starts: a known prompt is not "
            "computed again.",
            absent="off",
            details="It includes ``prefix_cache``.",
        ),
    ] = None
    prompt_cache_size: Annotated[
        str | int | None,
        Option(
            "Maximum size of the prompt cache; beyond, the least recently used prompts are "
            "deleted.",
            absent="4GiB",
        ),
    ] = None
