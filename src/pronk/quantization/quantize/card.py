"""Model card of a quantized checkpoint: its source, method and perplexity."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from pronk.files.cards import render_card
from pronk.quantization.quantize.rounding import WHOLE_ROW

if TYPE_CHECKING:
    from pronk.quantization.quantize.checkpoint import QuantizedCheckpoint

__all__ = ["METHODS", "quantized_card"]

METHODS = {  # description of each quantization method in the model card
    "nearest": "nearest code of each weight, with the clipping of each group that has the smallest squared error",
    "scaled": "inputs scaled by powers of their RMS before rounding, folded into the previous norm or matrix (AWQ)",
    "gptq": "column by column, later columns compensating for the errors of earlier ones (GPTQ)",
}


def quantized_card(result: QuantizedCheckpoint, name: str, source: str, command: str, evaluation_text: str) -> str:
    """Return the model card of the quantized model ``name``, made from model ``source`` by ``command``."""
    packages = [*(["torch"] if result.perplexities.keys() - {"nearest"} else []), "safetensors", "numpy"]
    return render_card(
        "pronk.quantization.quantize",
        "quantized",
        made=result,
        name=name,
        source=source,
        command=command,
        text=evaluation_text,
        methods=METHODS,
        dtype=result.rule.dtype,
        groups="whole rows" if result.rule.group == WHOLE_ROW else f"groups of {result.rule.group} inputs",
        versions=", ".join(f"{package} {version(package)}" for package in packages),
    )
