"""Quantization of all layers with one of the methods ``nearest``, ``scaled`` and ``gptq``.

Layers are quantized from the first to the last. The calibration inputs of a layer are the outputs of the quantized
layers before it, so that the layer compensates for some of their errors.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pronk.arrays import Array, is_finite
from pronk.errors import CheckpointError
from pronk.files.shards import ShardEntry, write_weights
from pronk.models.backend import Backend
from pronk.models.tensor_plan import CheckpointTensor
from pronk.quantization.formats.matrix import QuantizedMatrix
from pronk.quantization.quantize.packing import pack_codes
from pronk.quantization.quantize.rounding import LINEARS, RoundingRule
from pronk.quantization.quantize.source import LayerWeights, SourceCheckpoint
from pronk.quantization.quantize.stream import LayerStream, build_layer

__all__ = ["CALIBRATED", "NEAREST", "CalibrationTexts", "layer_folder", "measure_perplexity", "quantize_layers"]

NEAREST = "nearest"
CALIBRATED = ("scaled", "gptq")  # methods that need a calibration text, and torch

Tick = Callable[[], None]  # progress callback, which is called after each layer


@dataclass(frozen=True)
class CalibrationTexts:
    """Token ids ``[sequences, length]`` of the evaluation text (for perplexity) and the calibration text."""

    evaluation: Array
    calibration: Array | None = None

    @property
    def methods(self) -> Sequence[str]:
        """Quantization methods that are possible with these texts."""
        return (NEAREST,) if self.calibration is None else (NEAREST, *CALIBRATED)


def measure_perplexity(source: SourceCheckpoint, backend: Backend, texts: CalibrationTexts, tick: Tick) -> float:
    """Return the perplexity of the unquantized model in float32; raise a CheckpointError if not finite."""
    stream = LayerStream(source, backend, texts.evaluation)
    _check_finite(f"{source.folder}: embedding", finite=is_finite(stream.rows))
    for index in range(source.config.num_layers):
        stream.run_layer(build_layer(source, backend, source.load_layer(index), index))
        _check_finite(f"{source.folder}: layer {index}", finite=is_finite(stream.rows))
        tick()
    perplexity = stream.perplexity()
    _check_finite(f"{source.folder}: last norm or head", finite=math.isfinite(perplexity))
    return perplexity


def quantize_layers(
    source: SourceCheckpoint,
    backend: Backend,
    method: str,
    rule: RoundingRule,
    texts: CalibrationTexts,
    folder: Path,
    *,
    tick: Tick,
) -> float:
    """Quantize all layers, write each to its :func:`layer_folder`, and return the perplexity.

    The perplexity is computed in float32 with the dequantized weights. It is NaN or infinity after an overflow.
    """
    evaluation = LayerStream(source, backend, texts.evaluation)
    calibration = None
    if method != NEAREST:
        assert texts.calibration is not None
        calibration = LayerStream(source, backend, texts.calibration)
    for index in range(source.config.num_layers):
        weights = source.load_layer(index)
        try:
            matrices = _quantize_layer(source, weights, index, method, rule, calibration)
        except ValueError as error:  # weights or Hessians are not finite, or a Hessian is not positive definite
            msg = f"{source.folder}: layer {index}: {error}"
            raise CheckpointError(msg) from error
        _write_layer(source, index, weights, matrices, rule, folder)
        weights |= {f"{name}.weight": matrix.dequantize() for name, matrix in matrices.items()}
        layer = build_layer(source, backend, weights, index)
        for stream in (evaluation, calibration):
            if stream is not None:
                stream.run_layer(layer)
        tick()
    return evaluation.perplexity()


def layer_folder(folder: Path, index: int) -> Path:
    """Return the path of the temporary folder with the tensors of a quantized layer."""
    return folder / f"layer-{index}"


def _check_finite(name: str, *, finite: bool) -> None:
    """Raise a CheckpointError, with the ``name`` of a module, unless its outputs are finite."""
    if not finite:
        msg = f"{name}: expected finite numbers in its output, found NaN or inf; restore the weights from their source"
        raise CheckpointError(msg)


def _quantize_layer(
    source: SourceCheckpoint,
    weights: LayerWeights,
    index: int,
    method: str,
    rule: RoundingRule,
    calibration: LayerStream | None,
) -> dict[str, QuantizedMatrix]:
    """Return the quantized matrices of a layer; norms and biases may be scaled in place."""
    if calibration is None:
        return {name: rule.nearest(weights[f"{name}.weight"]) for name in LINEARS}
    from pronk.train.quantize.calibrated import quantize_calibrated  # noqa: PLC0415 - needs torch

    window = source.config.windows[index]
    rows, length = calibration.rows, calibration.length
    return quantize_calibrated(source.config, window, weights, rows, length, method=method, rule=rule)


def _write_layer(
    source: SourceCheckpoint,
    index: int,
    weights: LayerWeights,
    matrices: Mapping[str, QuantizedMatrix],
    rule: RoundingRule,
    folder: Path,
) -> None:
    arrays: dict[str, Array] = {}
    for name, value in source.layer_tensors(index, weights, matrices):
        if isinstance(value, QuantizedMatrix):
            arrays |= pack_codes(name.removesuffix("weight"), value, rule.dtype)
        else:
            arrays[name] = value
    path = layer_folder(folder, index)
    path.mkdir()
    entries = [ShardEntry(CheckpointTensor(name, array.shape), name, array.dtype) for name, array in arrays.items()]
    write_weights(path, entries, lambda tensor: arrays[tensor.name], sys.maxsize, lambda *_: None)
