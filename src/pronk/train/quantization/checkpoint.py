"""Quantization of a checkpoint to 8-bit or 4-bit weights in the format compressed-tensors.

The matrices of the layers are quantized; the embedding, LM head, norms and biases are not. With a
calibration text, all methods are tried, and the weights with the lowest perplexity on the
evaluation text are kept; without a calibration text, weights are rounded to the nearest. Memory
holds the LM head, one layer, and the hidden states of the texts.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import NamedTuple

from pronk import OptionError
from pronk.backends import KernelsError, choose_kernels, load_kernels
from pronk.base import (
    ShardEntry,
    check_output_folder,
    convert_write_errors,
    copy_companions,
    locate_error,
    new_folder,
    refuse,
    render_card,
    write_json,
    write_text,
    write_weights,
)
from pronk.base.arrays import Array
from pronk.checkpoint import Checkpoint, CheckpointTensor
from pronk.train.quantization import rounding
from pronk.train.quantization.methods import (
    CalibrationTexts,
    Tick,
    layer_folder,
    measure_perplexity,
    quantize_layers,
)
from pronk.train.quantization.rounding import WHOLE_ROW, RoundingRule
from pronk.train.quantization.source import SourceCheckpoint

# Progress callback with the name of the current step, the amount done, and the total amount. The
# amounts are bytes in the step "writing", and layers in all other steps.
Status = Callable[[str, int, int], None]


class QuantizedCheckpoint(NamedTuple):
    """Result of :func:`quantize`: rounding, sizes and perplexities, for the model card."""

    rule: RoundingRule  # how the matrices were rounded
    method: str  # method of quantization whose weights were written
    # perplexity after quantization, by method, of all methods that were tried
    perplexities: Mapping[str, float]
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
        group: number of inputs per scale; see
            :func:`~pronk.train.quantization.rounding.choose_group`.
        read_texts: function that returns the evaluation and calibration texts. It is called only
            if the options are valid, because it may take long.
        name: name of the original model in the model card; by default, the name of ``folder``.
        command: command line for the model card.
        text: description of the evaluation text for the model card.
        status: progress callback.
        shard_bytes: maximum size in bytes of a file of weights, unless the file has only one
            tensor.

    Raises:
        OptionError: ``bits``, ``group``, ``out`` or a text is invalid, the disk is too full, or
            there are no kernels.
        CheckpointError: the source is unreadable, already quantized, of an unsupported family or
            not finite; or ``out`` cannot be written.
    """
    source = SourceCheckpoint(folder)
    checked_bits, size = rounding.choose_group(rounding.matrix_inputs(source.config), bits, group)
    problem = "expected pronk's kernels to round weights, found none"
    remedy = "; install pronk with a C++ compiler"
    with locate_error(problem, KernelsError, OptionError, remedy=remedy):
        rule = RoundingRule(load_kernels(), checked_bits, size, source.dtype)
    entries = list(_entries(source, rule))
    num_bytes = sum(entry.num_bytes for entry in entries)
    check_output_folder(out, num_bytes)
    texts = read_texts()
    # The disk holds the quantized layers of every method until the best method is known.
    check_output_folder(out, num_bytes * (1 + len(texts.methods)))
    with convert_write_errors(out, "the checkpoint"), new_folder(out) as partial:
        source_perplexity, perplexities = _quantize_with_all_methods(
            source, rule, texts, partial, status
        )
        method = _best_method(perplexities, folder)
        result = QuantizedCheckpoint(
            rule=rule,
            method=method,
            perplexities=perplexities,
            source_perplexity=source_perplexity,
            # the first token of a sequence is not predicted
            num_tokens=texts.evaluation[:, 1:].size,
            num_bytes=num_bytes,
            source_bytes=sum(map(source.inventory.nbytes, source.parts)),
        )

        def write_status(done: int, total: int) -> None:
            status("writing", done, total)

        read = _output_reader(source, partial / method)
        write_weights(partial, entries, read, shard_bytes, write_status)
        del read  # unmaps the files that are removed now
        for tried_method in texts.methods:
            shutil.rmtree(partial / tried_method)
        copy_companions(folder, partial)
        card = quantized_card(result, out.name, name or folder.resolve().name, command, text)
        write_text(partial / "README.md", card)
        document = dict(source.document)
        document["quantization_config"] = rounding.quantization_config(rule, (source.names.head,))
        write_json(partial / "config.json", document, indent=2)
    return result


def _quantize_with_all_methods(
    source: SourceCheckpoint,
    rule: RoundingRule,
    texts: CalibrationTexts,
    partial: Path,
    status: Status,
) -> tuple[float, dict[str, float]]:
    """Quantize all layers by each method, and write the layers to ``partial/METHOD``.

    Returns the perplexity of the original model, and the perplexities after quantization, by
    method.
    """
    total = source.config.num_layers * (1 + len(texts.methods))

    def start_step(step: str, done: int) -> Tick:
        """Report the beginning of a step, of which ``done`` layers are done already.

        Returns a function to call after each further layer of the step.
        """
        status(step, done, total)
        following = count(done + 1)
        return lambda: status(step, next(following), total)

    kernels = choose_kernels("auto", "portable")
    source_perplexity = measure_perplexity(source, kernels, texts, start_step("measuring", 0))
    perplexities = {}
    for number, method in enumerate(texts.methods, 1):
        (partial / method).mkdir()
        tick = start_step(f"quantizing, {method}", number * source.config.num_layers)
        target = partial / method
        perplexities[method] = quantize_layers(
            source, kernels, method, rule, texts, target, tick=tick
        )
    return source_perplexity, perplexities


def _best_method(perplexities: Mapping[str, float], folder: Path) -> str:
    """Return the method whose perplexity is lowest.

    Raise a CheckpointError about ``folder``, the original model, if no perplexity is finite.
    """
    finite = [method for method, value in perplexities.items() if math.isfinite(value)]
    if not finite:
        found = ", ".join(f"{value} by {method}" for method, value in perplexities.items())
        refuse(
            folder,
            f"expected a finite perplexity after quantization, found {found}; use more bits, "
            "smaller groups",
        )
    return min(finite, key=lambda method: perplexities[method])


def _entries(source: SourceCheckpoint, rule: RoundingRule) -> Iterator[ShardEntry]:
    """Yield descriptions of the tensors of the new checkpoint, for dividing them among files.

    They are the packed tensors of the matrices, and all other tensors unchanged.
    """
    for part in source.parts:
        matrices = part.weight if part.kind == "linear" and part.target != "head" else ()
        for matrix in matrices:
            outputs, inputs = matrix.shape
            prefix = matrix.name.removesuffix("weight")
            packed = rounding.packed_shapes(prefix, (outputs, inputs), rule)
            for name, (shape, dtype) in packed.items():
                yield ShardEntry(CheckpointTensor(name, shape), source.stored_name(name), dtype)
        for tensor in part.tensors:
            if tensor not in matrices:
                dtype = source.inventory.tensor(tensor).dtype
                yield ShardEntry(tensor, source.stored_name(tensor.name), dtype)


def _output_reader(source: SourceCheckpoint, folder: Path) -> Callable[[CheckpointTensor], Array]:
    """Return a function that reads a tensor of the new checkpoint.

    It reads tensors of layers from ``folder``, where they were quantized, and all others from the
    original checkpoint.
    """
    layers = [Checkpoint(layer_folder(folder, index)) for index in range(source.config.num_layers)]
    quantized = {name: layer for layer in layers for name in layer}

    def read(tensor: CheckpointTensor) -> Array:
        layer = quantized.get(tensor.name)
        (layer or source.checkpoint).release()
        return source.inventory.tensor(tensor) if layer is None else layer.tensor(tensor.name)

    return read


METHODS = {  # for the model card: a description of each method of quantization
    "nearest": (
        "nearest code of each weight, with the clipping of each group that has the smallest "
        "squared error"
    ),
    "scaled": (
        "inputs scaled by powers of their RMS before rounding, folded into the previous norm or "
        "matrix (AWQ)"
    ),
    "gptq": "column by column, later columns compensating for the errors of earlier ones (GPTQ)",
}


def quantized_card(
    result: QuantizedCheckpoint, name: str, source: str, command: str, evaluation_text: str
) -> str:
    """Return the model card of the quantized model ``name``, made from the model ``source``."""
    packages = ["safetensors", "numpy"]
    # these methods need torch, so the card names its version
    if result.perplexities.keys() - {"nearest"}:
        packages.insert(0, "torch")
    group = result.rule.group
    return render_card(
        "pronk.train.quantization",
        "quantized",
        made=result,
        name=name,
        source=source,
        command=command,
        text=evaluation_text,
        methods=METHODS,
        dtype=result.rule.dtype,
        groups="whole rows" if group == WHOLE_ROW else f"groups of {group} inputs",
        versions=", ".join(f"{package} {version(package)}" for package in packages),
    )
