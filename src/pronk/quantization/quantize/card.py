"""Model card of a quantized checkpoint: its source, method and perplexity."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from pronk.quantization.quantize.rounding import WHOLE_ROW
from pronk.train.card import render

if TYPE_CHECKING:
    from pronk.quantization.quantize.checkpoint import QuantizedCheckpoint

__all__ = ["METHODS", "quantized_card"]

# Descriptions of the methods for the card.
METHODS = {
    "nearest": "nearest code of each weight, with the clipping of each group that has the smallest squared error",
    "scaled": "inputs scaled by powers of their RMS before rounding, folded into the previous norm or matrix (AWQ)",
    "gptq": "column by column, later columns compensating for the errors of earlier ones (GPTQ)",
}


def quantized_card(made: QuantizedCheckpoint, name: str, source: str, command: str, text: str) -> str:
    """Render ``README.md`` from the result, model names, command line and name of the evaluation text."""
    return render(
        "quantized",
        "pronk.quantization.quantize",
        made=made,
        name=name,
        source=source,
        command=command,
        text=text,
        methods=METHODS,
        dtype=str(made.rule.dtype).removeprefix("torch."),
        groups="whole rows" if made.rule.group == WHOLE_ROW else f"groups of {made.rule.group} inputs",
        versions=", ".join(f"{package} {version(package)}" for package in ("torch", "safetensors", "numpy")),
    )
