"""Quantization of all layers with one of the methods ``nearest``, ``scaled`` and ``gptq``.

Layers are quantized from the first to the last. The calibration inputs of a layer are the outputs of the quantized
layers before it, so that the layer compensates for some of their errors.
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
from pronk.quantization.quantize.layers import LINEARS, LayerStream, collect_hessians
from pronk.quantization.quantize.packing import pack_codes
from pronk.quantization.quantize.rounding import RoundingRule
from pronk.quantization.quantize.scaling import scale_layer
from pronk.quantization.quantize.source import SourceCheckpoint

__all__ = ["CALIBRATED", "NEAREST", "CalibrationTexts", "layer_file", "measure_perplexity", "quantize_layers"]

NEAREST = "nearest"
CALIBRATED = ("scaled", "gptq")  # methods that need a calibration text

Tick = Callable[[], None]  # progress callback, which is called after each layer


@dataclass(frozen=True)
class CalibrationTexts:
    """Token ids ``[sequences, length]`` of the evaluation text (for perplexity) and the calibration text."""

    evaluation: Tensor
    calibration: Tensor | None = None

    @property
    def methods(self) -> Sequence[str]:
        """Quantization methods that are possible with these texts."""
        return (NEAREST,) if self.calibration is None else (NEAREST, *CALIBRATED)


@torch.no_grad()
def measure_perplexity(source: SourceCheckpoint, texts: CalibrationTexts, tick: Tick) -> float:
    """Return the perplexity of the unquantized model in float32; raise a CheckpointError if not finite."""
    stream = LayerStream(source.load_without_layers(), texts.evaluation)
    _check_finite(stream.rows, f"{source.folder}: embedding")
    for index in range(source.config.num_layers):
        stream.run_layer(source.load_layer(index), index)
        _check_finite(stream.rows, f"{source.folder}: layer {index}")
        tick()
    perplexity = stream.perplexity()
    _check_finite(torch.tensor(perplexity), f"{source.folder}: last norm or head")
    return perplexity


@torch.no_grad()
def quantize_layers(
    source: SourceCheckpoint, method: str, rule: RoundingRule, texts: CalibrationTexts, folder: Path, tick: Tick
) -> float:
    """Quantize all layers, write each to its :func:`layer_file`, and return the perplexity of the result.

    The perplexity is computed in float32 with the dequantized weights. It is NaN or infinity after an overflow.
    """
    outer = source.load_without_layers()
    evaluation = LayerStream(outer, texts.evaluation)
    calibration = None
    if method != NEAREST:
        assert texts.calibration is not None
        calibration = LayerStream(outer, texts.calibration)
    for index in range(source.config.num_layers):
        layer = source.load_layer(index)
        layer_hessians: Mapping[str, Tensor] = {}
        if calibration is not None:
            with collect_hessians(layer) as layer_hessians:
                calibration.run_layer(layer, index, keep=False)
        matrices = _quantize_layer(layer, method, rule, layer_hessians, f"{source.folder}: layer {index}")
        for stream in (evaluation, calibration):
            if stream is not None:
                stream.run_layer(layer, index)
        _write_layer(source, index, layer, matrices, rule, folder)
        tick()
    return evaluation.perplexity()


def layer_file(folder: Path, index: int) -> Path:
    """Return the path of the temporary file with the tensors of a quantized layer."""
    return folder / f"layer-{index}.safetensors"


def _check_finite(outputs: Tensor, name: str) -> None:
    """Raise a CheckpointError, with the module's ``name``, if ``outputs`` of the module are not finite."""
    if not bool(outputs.isfinite().all()):
        msg = f"{name}: expected finite numbers in its output, found NaN or inf; restore the weights from their source"
        raise CheckpointError(msg)


def _quantize_layer(
    layer: Layer, method: str, rule: RoundingRule, layer_hessians: Mapping[str, Tensor], where: str
) -> dict[str, QuantizedMatrix]:
    """Quantize the matrices of a layer and return them; the layer's weights become the dequantized ones."""
    quantized: dict[str, QuantizedMatrix] = {}
    try:
        if method == "scaled":
            scale_layer(layer, layer_hessians, rule)
        for name in LINEARS:
            linear = layer.get_submodule(name)
            assert isinstance(linear, PlainLinear)
            weight = linear.weight.data
            quantized[name] = gptq(weight, layer_hessians[name], rule) if method == "gptq" else rule.nearest(weight)
            linear.weight.data = quantized[name].dequantize()
    except ValueError as error:  # weights or Hessians are not finite, or a Hessian is not positive definite
        msg = f"{where}: {error}"
        raise CheckpointError(msg) from error
    return quantized


def _write_layer(
    source: SourceCheckpoint,
    index: int,
    layer: Layer,
    matrices: Mapping[str, QuantizedMatrix],
    rule: RoundingRule,
    folder: Path,
) -> None:
    tensors: dict[str, Tensor] = {}
    for name, value in source.layer_tensors(index, layer, matrices):
        if isinstance(value, QuantizedMatrix):
            tensors |= pack_codes(name.removesuffix("weight"), value, rule.dtype)
        else:
            tensors[name] = value.contiguous()
    save_file(tensors, layer_file(folder, index))
