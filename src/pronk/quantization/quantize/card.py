"""Model card of a quantized checkpoint: its source, method, and perplexity before and after."""

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
    "nearest": "each weight rounded to the nearest code, with the clipping of each group that has the smallest error",
    "scaled": "inputs scaled by a power of their RMS before rounding, folded into the preceding operation (AWQ)",
    "gptq": "columns rounded in order, later columns compensating the errors of earlier ones (GPTQ)",
}


def quantized_card(made: QuantizedCheckpoint, name: str, source: str, command: str, text: str) -> str:
    """Return the text of ``README.md``.

    Args:
        made: quantized checkpoint.
        name: name of the model.
        source: name of the model that was quantized.
        command: command line that wrote the checkpoint.
        text: description of the text that perplexity was measured on.
    """
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
