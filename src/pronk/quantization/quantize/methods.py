"""Quantization of all layers with one of the methods ``nearest``, ``scaled`` and ``gptq``.

Layers are quantized from the first to the last. The inputs of a layer are computed with the quantized layers before it,
so that calibration compensates for some of their errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from pronk.errors import CheckpointError
from pronk.models.decoder import Layer
from pronk.models.linear import PlainLinear
from pronk.quantization.formats.matrix import QuantizedMatrix
from pronk.quantization.quantize.gptq import gptq
from pronk.quantization.quantize.layers import LINEARS, LayerStream, hessians
from pronk.quantization.quantize.packing import packed
from pronk.quantization.quantize.rounding import RoundingRule
from pronk.quantization.quantize.scaling import scale_layer
from pronk.quantization.quantize.source import SourceCheckpoint

__all__ = ["CALIBRATED", "NEAREST", "CalibrationTexts", "layer_file", "measure", "run"]

NEAREST = "nearest"
CALIBRATED = ("scaled", "gptq")  # methods that need a calibration text

Tick = Callable[[], None]  # called after each layer


@dataclass(frozen=True)
class CalibrationTexts:
    """Evaluation text for perplexity and optional calibration text, as token ids ``[sequences, length]``."""

    evaluation: Tensor
    calibration: Tensor | None = None

    @property
    def methods(self) -> Sequence[str]:
        """Methods that are possible with these texts."""
        return (NEAREST,) if self.calibration is None else (NEAREST, *CALIBRATED)


@torch.no_grad()
def measure(source: SourceCheckpoint, texts: CalibrationTexts, tick: Tick) -> float:
    """Return the perplexity of the original model in float32; refuse hidden states that are not finite."""
    stream = LayerStream(source.frame(), texts.evaluation)
    _check_finite(stream.rows, f"{source.folder}: embedding")
    for index in range(source.config.num_layers):
        stream.through(source.layer(index), index)
        _check_finite(stream.rows, f"{source.folder}: layer {index}")
        tick()
    found = stream.perplexity()
    _check_finite(torch.tensor(found), f"{source.folder}: last norm or head")
    return found


@torch.no_grad()
def run(
    source: SourceCheckpoint, method: str, rule: RoundingRule, texts: CalibrationTexts, folder: Path, tick: Tick
) -> float:
    """Quantize every layer, write its tensors to its :func:`layer_file` in ``folder``, and measure.

    Returns:
        Perplexity with the quantized weights, computed in float32; NaN or infinity after an overflow.
    """
    frame = source.frame()
    evaluation = LayerStream(frame, texts.evaluation)
    calibration = None
    if method != NEAREST:
        assert texts.calibration is not None
        calibration = LayerStream(frame, texts.calibration)
    for index in range(source.config.num_layers):
        layer = source.layer(index)
        seen: Mapping[str, Tensor] = {}
        if calibration is not None:
            with hessians(layer) as seen:
                calibration.through(layer, index, keep=False)
        matrices = _quantize(layer, method, rule, seen, f"{source.folder}: layer {index}")
        for stream in (evaluation, calibration):
            if stream is not None:
                stream.through(layer, index)
        _write(source, index, layer, matrices, rule, folder)
        tick()
    return evaluation.perplexity()


def layer_file(folder: Path, index: int) -> Path:
    """Return the temporary file of a quantized layer."""
    return folder / f"layer-{index}.safetensors"


def _check_finite(states: Tensor, where: str) -> None:
    if not bool(states.isfinite().all()):
        msg = f"{where}: expected finite numbers in its output, found NaN or inf; restore the weights from their source"
        raise CheckpointError(msg)


def _quantize(
    layer: Layer, method: str, rule: RoundingRule, seen: Mapping[str, Tensor], where: str
) -> dict[str, QuantizedMatrix]:
    """Quantize the matrices of a layer, and replace its weights by the dequantized ones."""
    made: dict[str, QuantizedMatrix] = {}
    try:
        if method == "scaled":
            scale_layer(layer, seen, rule)
        for name in LINEARS:
            linear = layer.get_submodule(name)
            assert isinstance(linear, PlainLinear)
            weight = linear.weight.data
            made[name] = gptq(weight, seen[name], rule) if method == "gptq" else rule.nearest(weight)
            linear.weight.data = made[name].dequantize()
    except ValueError as error:  # weights or products of inputs that are not finite
        msg = f"{where}: {error}"
        raise CheckpointError(msg) from error
    return made


def _write(
    source: SourceCheckpoint,
    index: int,
    layer: Layer,
    matrices: Mapping[str, QuantizedMatrix],
    rule: RoundingRule,
    folder: Path,
) -> None:
    tensors: dict[str, Tensor] = {}
    for name, value in source.tensors(index, layer, matrices):
        if isinstance(value, QuantizedMatrix):
            tensors |= packed(name.removesuffix("weight"), value, rule.dtype)
        else:
            tensors[name] = value.contiguous()
    save_file(tensors, layer_file(folder, index))
