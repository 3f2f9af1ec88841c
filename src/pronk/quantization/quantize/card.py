"""The model card of a quantized checkpoint: what it was made of, how, and what that costs."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from pronk.quantization.quantize.rounding import WHOLE_ROW
from pronk.train.card import render

if TYPE_CHECKING:
    from pronk.quantization.quantize.checkpoint import QuantizedCheckpoint

__all__ = ["METHODS", "quantized_card"]

# By their names, in words.
METHODS = {
    "nearest": "each weight to the nearest code, groups clipped where that errs least",
    "scaled": "inputs scaled by powers of their size before rounding, folded into what makes them (after AWQ)",
    "gptq": "column by column, later ones making up for the errors of earlier ones (GPTQ)",
}


def quantized_card(made: QuantizedCheckpoint, name: str, source: str, command: str, text: str) -> str:
    """The text of ``README.md``.

    Args:
        made: what was written.
        name: of the model.
        source: what it was made of.
        command: the one that made it.
        text: what perplexity was measured on.
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
