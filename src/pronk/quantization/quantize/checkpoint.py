"""Quantization of a checkpoint to 8-bit or 4-bit weights in the format compressed-tensors.

The matrices of the layers are quantized; the embedding, LM head, norms and biases are not. With a calibration text all
methods are tried, without one only rounding to the nearest; the weights with the lowest perplexity on the evaluation
text are kept. Memory holds the LM head, one layer, and the hidden states of the texts.
"""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from importlib.resources import as_file, files
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pronk.arrays import FLOAT32, Array
from pronk.backends import choose_backend
from pronk.checks import require_extra
from pronk.corpus.collection import collect, pack
from pronk.corpus.encoder import Encoder
from pronk.corpus.sources import SourceSpec, read_source, spec_of
from pronk.errors import OptionError, locate_error, refuse
from pronk.files.atomic import convert_write_errors, new_folder, write_json
from pronk.files.cards import render_card
from pronk.files.shards import ShardEntry, check_output_folder, copy_companions, write_weights
from pronk.kernels.library import KernelsError
from pronk.models.checkpoint import Checkpoint
from pronk.models.kernels import load_kernels
from pronk.models.loader import read_config
from pronk.models.tensor_plan import CheckpointTensor
from pronk.quantization.quantize import rounding
from pronk.quantization.quantize.methods import (
    CalibrationTexts,
    SourceCheckpoint,
    Tick,
    layer_folder,
    measure_perplexity,
    quantize_layers,
)
from pronk.quantization.quantize.rounding import WHOLE_ROW, RoundingRule
from pronk.tokenization.tokenizer import Tokenizer

# Progress callback (name of the current step, amount done, total amount); unit: bytes in "writing", else layers.
Status = Callable[[str, int, int], None]


class QuantizedCheckpoint(NamedTuple):
    """Result of :func:`quantize`: the quantized checkpoint and its measurements, for the model card."""

    rule: RoundingRule  # rounding rule of the matrices
    method: str  # quantization method of the weights that were written
    perplexities: Mapping[str, float]  # perplexity after quantization, by method
    source_perplexity: float  # perplexity of the original model
    num_tokens: int  # number of tokens on which perplexity was measured
    num_bytes: int  # size of the written weights in bytes
    source_bytes: int  # size of the original weights in bytes

    @property
    def perplexity(self) -> float:
        """Perplexity of the written checkpoint."""
        return self.perplexities[self.method]


def quantize(
    folder: Path,
    out: Path,
    bits: int,
    group: int | None,
    read_texts: Callable[[], CalibrationTexts],
    *,
    name: str | None = None,
    command: str = "",
    text: str = "",
    status: Status = lambda *_: None,
    shard_bytes: int = 10**9,
) -> QuantizedCheckpoint:
    """Write a quantized checkpoint to the folder ``out``, which appears when it is complete.

    Args:
        folder: folder of an unquantized checkpoint.
        out: folder that does not exist or is empty.
        bits: number of bits per weight, 8 or 4.
        group: number of inputs per scale; see :func:`~pronk.quantization.quantize.rounding.choose_group`.
        read_texts: function that returns the evaluation and calibration texts; called after the options are checked.
        name: name of the source for the model card; by default, the name of ``folder``.
        command: command line for the model card.
        text: description of the evaluation text for the model card.
        status: progress callback.
        shard_bytes: maximum size in bytes of a file of weights, unless the file has only one tensor.

    Raises:
        OptionError: ``bits``, ``group``, ``out`` or a text is invalid, the disk is too full, or there are no kernels.
        CheckpointError: the source is unreadable, already quantized, of an unsupported family or not finite; or
            ``out`` cannot be written.
    """
    source = SourceCheckpoint(folder)
    checked_bits, size = rounding.choose_group(rounding.matrix_inputs(source.config), bits, group)
    problem, remedy = "expected pronk's kernels to round weights, found none", "; install pronk with a C++ compiler"
    with locate_error(problem, KernelsError, OptionError, remedy=remedy):
        rule = RoundingRule(load_kernels(), checked_bits, size, source.dtype)
    entries = list(_entries(source, rule))
    num_bytes = sum(entry.num_bytes for entry in entries)
    check_output_folder(out, num_bytes)
    texts = read_texts()
    # Besides the checkpoint, the disk must hold the quantized layers of every method until the best one is known.
    check_output_folder(out, num_bytes * (1 + len(texts.methods)))
    with convert_write_errors(out, "the checkpoint"), new_folder(out) as partial:
        source_perplexity, perplexities = _quantize_with_all_methods(source, rule, texts, partial, status)
        method = _best_method(perplexities, folder)
        num_tokens = texts.evaluation[:, 1:].size  # the first token of a sequence is not predicted
        source_bytes = sum(map(source.inventory.nbytes, source.parts))
        result = QuantizedCheckpoint(rule, method, perplexities, source_perplexity, num_tokens, num_bytes, source_bytes)
        read = _output_reader(source, partial / method)
        write_weights(partial, entries, read, shard_bytes, lambda done, total: status("writing", done, total))
        del read  # unmaps the files that are removed now
        for tried_method in texts.methods:
            shutil.rmtree(partial / tried_method)
        copy_companions(folder, partial)
        card = quantized_card(result, out.name, name or folder.resolve().name, command, text)
        (partial / "README.md").write_text(card, encoding="utf-8")
        document = {**source.document, "quantization_config": rounding.quantization_config(rule, (source.names.head,))}
        write_json(partial / "config.json", document, indent=2)
    return result


def _quantize_with_all_methods(
    source: SourceCheckpoint, rule: RoundingRule, texts: CalibrationTexts, partial: Path, status: Status
) -> tuple[float, dict[str, float]]:
    """Quantize to ``partial/METHOD`` by each method; return perplexities of the source and by method."""
    total = source.config.num_layers * (1 + len(texts.methods))

    def start_step(step: str, done: int) -> Tick:
        """Report a new step; return a function to call after each of its layers."""
        status(step, done, total)
        following = count(done + 1)
        return lambda: status(step, next(following), total)

    backend = choose_backend("auto", "cpu", source.config, FLOAT32)
    source_perplexity = measure_perplexity(source, backend, texts, start_step("measuring", 0))
    perplexities = {}
    for number, method in enumerate(texts.methods, 1):
        (partial / method).mkdir()
        tick = start_step(f"quantizing, {method}", number * source.config.num_layers)
        perplexities[method] = quantize_layers(source, backend, method, rule, texts, partial / method, tick=tick)
    return source_perplexity, perplexities


def _best_method(perplexities: Mapping[str, float], folder: Path) -> str:
    """Return the method with the lowest perplexity; raise a CheckpointError if none is finite."""
    finite = {method: perplexity for method, perplexity in perplexities.items() if math.isfinite(perplexity)}
    if not finite:
        found = ", ".join(f"{perplexity} by {method}" for method, perplexity in perplexities.items())
        refuse(folder, f"expected a finite perplexity after quantization, found {found}; use more bits, smaller groups")
    return min(finite, key=lambda method: finite[method])


def _entries(source: SourceCheckpoint, rule: RoundingRule) -> Iterator[ShardEntry]:
    for part in source.parts:
        matrices = part.weight if part.kind == "linear" and part.target != "head" else ()
        for matrix in matrices:
            outputs, inputs = matrix.shape
            packed = rounding.packed_shapes(matrix.name.removesuffix("weight"), (outputs, inputs), rule)
            for name, (shape, dtype) in packed.items():
                yield ShardEntry(CheckpointTensor(name, shape), source.stored_name(name), dtype)
        for tensor in part.tensors:
            if tensor not in matrices:
                yield ShardEntry(tensor, source.stored_name(tensor.name), source.inventory.tensor(tensor).dtype)


def _output_reader(source: SourceCheckpoint, folder: Path) -> Callable[[CheckpointTensor], Array]:
    """Return a reader of the new tensors: quantized layers from ``folder``, others from the source."""
    layers = [Checkpoint(layer_folder(folder, index)) for index in range(source.config.num_layers)]
    quantized = {name: layer for layer in layers for name in layer}

    def read(tensor: CheckpointTensor) -> Array:
        layer = quantized.get(tensor.name)
        (layer or source.checkpoint).release()
        return source.inventory.tensor(tensor) if layer is None else layer.tensor(tensor.name)

    return read


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


LENGTH = 512  # number of tokens per sequence; fewer if the model's context is shorter
_MAX_EVALUATION_TOKENS = 8192  # number of tokens after which the evaluation text is cut
_MIN_TOKENS = 128  # a text with fewer tokens is refused
# Calibration texts are cut into chunks of this size and shuffled, so that all parts of a long text can be used.
_CHUNK_CHARACTERS = 4096


def read_texts(folder: Path, text: Path | None = None, tokens: int = 32_768) -> CalibrationTexts:
    """Read the texts to calibrate a model with and to measure its perplexity on.

    Args:
        folder: folder of the model.
        text: file or folder with the calibration text, in the formats of ``pronk train``. One document in 100, or the
            end of the longest document, is held out to measure perplexity on. ``None`` means no calibration, and the
            evaluation text of this package: solved Python problems and arithmetic word problems.
        tokens: maximum number of tokens to calibrate with.

    Raises:
        OptionError: the text is missing, unreadable or too short, or torch, with which to calibrate, is missing.
        CheckpointError: the model's configuration or tokenizer cannot be read.
    """
    if text is not None:
        require_extra("calibrate", "train", "torch")
    config = read_config(folder)
    encoder = Encoder.of_target(Tokenizer.load(folder, config.vocab_size), config)
    length = min(LENGTH, config.context)
    if text is None:
        with as_file(files("pronk.quantization.quantize") / "evaluation.jsonl") as path:
            documents = [document.text for document in read_source(SourceSpec("evaluation", "jsonl", path, 1.0))]
        return CalibrationTexts(_tokenize(encoder, documents, _MAX_EVALUATION_TOKENS, length, "evaluation text"))
    (pool, *_) = collect([spec_of(text, "calibrate")]).pools
    return CalibrationTexts(
        _tokenize(encoder, pool.held_out, _MAX_EVALUATION_TOKENS, length, f"calibrate: held-out part of {text}"),
        _tokenize(encoder, _shuffled(pool.documents), tokens, length, f"calibrate: rest of {text}"),
    )


def _shuffled(documents: Iterable[str]) -> Iterator[str]:
    """Yield chunks of the documents in random order, which is the same in every run."""
    chunks = [text[i : i + _CHUNK_CHARACTERS] for text in documents for i in range(0, len(text), _CHUNK_CHARACTERS)]
    yield from random.Random(0).sample(chunks, len(chunks))  # noqa: S311 - not for secrets


def _tokenize(encoder: Encoder, texts: Iterable[str], max_tokens: int, length: int, text_name: str) -> Array:
    """Return token ids ``[sequences, length]``; a text of fewer tokens is one sequence of its own length."""
    ids = pack(encoder, iter(texts), max_tokens).astype(np.int64)
    if len(ids) < min(_MIN_TOKENS, length):
        msg = f"{text_name}: expected at least {min(_MIN_TOKENS, length)} tokens, found {len(ids)}; give more text"
        raise OptionError(msg)
    length = min(length, len(ids))
    return ids[: len(ids) // length * length].reshape(-1, length)
