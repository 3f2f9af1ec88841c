"""Quantization of all layers by ``nearest``, ``scaled`` or ``gptq``, and the texts for it.

Layers are quantized from the first to the last. The calibration inputs of a layer are the outputs
of the quantized layers before it, so that the layer compensates for some of their errors.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pronk import OptionError
from pronk.backends import Kernels
from pronk.base import ShardEntry, locate_error, refuse, write_weights
from pronk.base.arrays import Array, DType, is_finite
from pronk.base.checks import require_extra
from pronk.checkpoint import CheckpointTensor, QuantizedMatrix, read_config
from pronk.text import Tokenizer
from pronk.train.corpus.collection import collect, pack
from pronk.train.corpus.encoder import Encoder
from pronk.train.corpus.sources import SourceSpec, read_source, spec_of
from pronk.train.quantization.rounding import LINEARS, RoundingRule, pack_codes
from pronk.train.quantization.source import LayerStream, SourceCheckpoint, build_layer

NEAREST = "nearest"

Tick = Callable[[], None]  # progress callback, called after each layer

LENGTH = 512  # number of tokens per sequence; fewer if the model's context is shorter
_MAX_EVALUATION_TOKENS = 8192  # maximum number of tokens of the evaluation text
_MIN_TOKENS = 128  # minimum number of tokens; a shorter text is refused
# Calibration texts are cut into chunks of this size, which are shuffled, so that the chosen tokens
# come from all parts of a long text.
_CHUNK_CHARACTERS = 4096


class CalibrationTexts(NamedTuple):
    """Token ids ``[sequences, length]`` of the texts of a quantization."""

    evaluation: Array  # text on which perplexity is measured
    calibration: Array | None = None  # text to calibrate with; ``None``: round to the nearest

    @property
    def methods(self) -> Sequence[str]:
        """Methods to try with these texts: all if there is a calibration text, else ``nearest``."""
        return (NEAREST,) if self.calibration is None else (NEAREST, "scaled", "gptq")


def measure_perplexity(
    source: SourceCheckpoint, kernels: Kernels, texts: CalibrationTexts, tick: Tick
) -> float:
    """Return the perplexity of the source in float32, on the evaluation text.

    Raises CheckpointError if the embedding, the output of a layer, or the perplexity is not finite.
    """
    stream = LayerStream(source, kernels, texts.evaluation)
    _check_finite(f"{source.folder}: embedding", finite=is_finite(stream.rows))
    for index in range(source.config.num_layers):
        stream.run_layer(build_layer(source, kernels, source.load_layer(index), index))
        _check_finite(f"{source.folder}: layer {index}", finite=is_finite(stream.rows))
        tick()
    perplexity = stream.perplexity()
    _check_finite(f"{source.folder}: last norm or head", finite=math.isfinite(perplexity))
    return perplexity


def quantize_layers(
    source: SourceCheckpoint,
    kernels: Kernels,
    method: str,
    rule: RoundingRule,
    texts: CalibrationTexts,
    folder: Path,
    *,
    tick: Tick,
) -> float:
    """Quantize all layers, write each to its :func:`layer_folder`, and return the perplexity.

    The perplexity is computed in float32 with the dequantized weights. It is NaN or infinity after
    an overflow.
    """
    evaluation = LayerStream(source, kernels, texts.evaluation)
    calibration = None
    if method != NEAREST:
        assert texts.calibration is not None
        calibration = LayerStream(source, kernels, texts.calibration)
    for index in range(source.config.num_layers):
        weights = source.load_layer(index)
        # A ValueError means that weights or Hessians are not finite, or that a Hessian is far from
        # positive definite. Name the layer in the error.
        with locate_error(f"{source.folder}: layer {index}", ValueError):
            if calibration is None:
                matrices = {name: rule.nearest(weights[f"{name}.weight"]) for name in LINEARS}
            else:
                from pronk.train.quantization.calibration import quantize_calibrated  # noqa: PLC0415 - needs torch

                window = source.config.windows[index]
                rows = calibration.rows
                length = calibration.length
                # This changes norms and biases in ``weights``, if the method scales.
                matrices = quantize_calibrated(
                    source.config, window, weights, rows, length, method=method, rule=rule
                )
        tensors = source.layer_tensors(index, weights, matrices)
        _write_layer(layer_folder(folder, index), tensors, rule.dtype)
        weights |= {f"{name}.weight": matrix.dequantize() for name, matrix in matrices.items()}
        layer = build_layer(source, kernels, weights, index)
        for stream in (evaluation, calibration):
            if stream is not None:
                stream.run_layer(layer)
        tick()
    return evaluation.perplexity()


def layer_folder(folder: Path, index: int) -> Path:
    """Return the path of the temporary folder for the tensors of quantized layer ``index``."""
    return folder / f"layer-{index}"


def _check_finite(name: str, *, finite: bool) -> None:
    if not finite:
        refuse(
            name,
            "expected finite numbers in its output, found NaN or inf; restore the weights from "
            "their source",
        )


def _write_layer(
    path: Path, tensors: Iterable[tuple[str, Array | QuantizedMatrix]], dtype: DType
) -> None:
    """Write the tensors of a quantized layer to the new folder ``path``.

    ``dtype`` is that of the scales.
    """
    arrays: dict[str, Array] = {}
    for name, value in tensors:
        if isinstance(value, QuantizedMatrix):
            arrays |= pack_codes(name.removesuffix("weight"), value, dtype)
        else:
            arrays[name] = value
    path.mkdir()
    entries = [
        ShardEntry(CheckpointTensor(name, array.shape), name, array.dtype)
        for name, array in arrays.items()
    ]
    write_weights(path, entries, lambda tensor: arrays[tensor.name], sys.maxsize, lambda *_: None)


def read_texts(folder: Path, text: Path | None = None, tokens: int = 32_768) -> CalibrationTexts:
    """Read the texts to calibrate a model with and to measure its perplexity on.

    Args:
        folder: folder of the model.
        text: file or folder with the calibration text, in the formats of ``pronk train``. One
            document in 100, or the end of the longest document, is held out to measure perplexity
            on. ``None`` means no calibration, and the evaluation text of this package: solved
            Python problems and arithmetic word problems.
        tokens: maximum number of tokens to calibrate with.

    Raises:
        OptionError: the text is missing, unreadable or too short, or torch, with which to
            calibrate, is missing.
        CheckpointError: the model's configuration or tokenizer cannot be read.
    """
    if text is not None:
        require_extra("calibrate", "train", "torch")
    config = read_config(folder)
    encoder = Encoder.of_target(Tokenizer.load(folder, config.vocab_size), config)
    length = min(LENGTH, config.context)
    most = _MAX_EVALUATION_TOKENS
    if text is None:
        with as_file(files("pronk.train.quantization") / "evaluation.jsonl") as path:
            source = SourceSpec("evaluation", "jsonl", path, 1.0)
            documents = [document.text for document in read_source(source)]
        return CalibrationTexts(_tokenize(encoder, documents, most, length, "evaluation text"))
    (pool, *_) = collect([spec_of(text, "calibrate")]).pools
    name = f"calibrate: held-out part of {text}"
    evaluation = _tokenize(encoder, pool.held_out, most, length, name)
    rest = _shuffled(pool.documents)
    calibration = _tokenize(encoder, rest, tokens, length, f"calibrate: rest of {text}")
    return CalibrationTexts(evaluation, calibration)


def _shuffled(documents: Iterable[str]) -> Iterator[str]:
    """Yield chunks of the documents in a random order that is the same in every run."""
    chunks: list[str] = []
    for text in documents:
        starts = range(0, len(text), _CHUNK_CHARACTERS)
        chunks += [text[start : start + _CHUNK_CHARACTERS] for start in starts]
    yield from random.Random(0).sample(chunks, len(chunks))  # noqa: S311 - not for secrets


def _tokenize(
    encoder: Encoder, texts: Iterable[str], max_tokens: int, length: int, text_name: str
) -> Array:
    """Return the token ids of ``texts``, int64 ``[sequences, length]``.

    At most ``max_tokens`` are used. If the texts have fewer tokens than ``length``, the result is
    one shorter sequence. Raises OptionError, which names the texts by ``text_name``, if they have
    too few tokens.
    """
    ids = pack(encoder, iter(texts), max_tokens).astype(np.int64)
    if len(ids) < min(_MIN_TOKENS, length):
        msg = (
            f"{text_name}: expected at least {min(_MIN_TOKENS, length)} tokens, found {len(ids)}; "
            "give more text"
        )
        raise OptionError(msg)
    length = min(length, len(ids))
    return ids[: len(ids) // length * length].reshape(-1, length)
