"""``pronk quantize``: write a checkpoint with 4-bit or 8-bit weights, for pronk and others."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from pronk import OptionError
from pronk.commands import announce, interruptible, option, status_bar

if TYPE_CHECKING:
    from pronk.train.quantization.checkpoint import QuantizedCheckpoint

_PLAIN_BITS = 16  # with this value of --bits, a quantized head is written as bfloat16


def quantize(
    model: Annotated[
        str,
        typer.Argument(
            help="Folder with a checkpoint, or its id on the Hub.",
            metavar="MODEL",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write, new or empty.", show_default=False)],
    *,
    bits: Annotated[int, option("Bits per weight: 4 or 8; 16 exports a quantized head.")] = 4,
    group: Annotated[
        int | None,
        option(
            "Adjacent weights that share a scale: a multiple of 8, or 0 for whole rows.",
            show_default="32 for 4 bits, 128 for 8; less if the matrices require it",
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        option(
            "Text similar to the model's later input: a file, a folder, or JSON lines with a text. "
            "Several rounding methods are tried on it, and the one with the lowest perplexity on a "
            "held-out part is kept.",
            metavar="TEXT",
            show_default="round to the nearest",
        ),
    ] = None,
    tokens: Annotated[
        int, option("Maximum number of tokens of TEXT to calibrate with.", min=128)
    ] = 32_768,
    threads: Annotated[int | None, option("Number of threads to compute with.", min=1)] = None,
) -> None:
    """Write a checkpoint with 4-bit or 8-bit weights.

    The format is compressed-tensors, which transformers and vLLM read as well. Supported models are
    Llama, Mistral, Qwen2 and Qwen3. The model card gives the perplexity before and after, on the
    held-out part of TEXT or on a text that comes with pronk. Heads for the drafters eagle3 and mtp
    are rounded to the nearest, LM head included.

    [bold]Examples[/]

    pronk quantize Qwen/Qwen3-0.6B qwen-4bit

    pronk quantize ./checkpoint small --bits 8 --group 64

    pronk quantize ./checkpoint small --calibrate src/ --tokens 65536

    pronk quantize run/export head-4bit --bits 4

    pronk quantize head-4bit head-bfloat16 --bits 16
    """
    screen = Console(highlight=False, soft_wrap=True, stderr=True)
    with interruptible("interrupted; no partial checkpoint was kept"), status_bar(screen) as status:
        from pronk.backends import set_threads
        from pronk.checkpoint import resolve_model
        from pronk.train.quantization.checkpoint import quantize as write_checkpoint
        from pronk.train.quantization.heads import find_head_kind
        from pronk.train.quantization.methods import read_texts

        set_threads(threads, workers=1)
        folder = resolve_model(model)
        name = folder.resolve().name if Path(model).expanduser().is_dir() else model
        if find_head_kind(folder) is not None:
            if calibrate is not None:
                msg = (
                    "calibrate: expected no text for a head, which is rounded to the nearest; "
                    "leave the option out"
                )
                raise OptionError(msg)
            command = _command_line(name, out.name, bits=bits, group=group)
            screen.print(f"{out}: {_write_head(folder, out, bits, group, command)}", markup=False)
            return
        calibration = {}
        text = "the text that comes with pronk"
        if calibrate:
            calibration = {"calibrate": calibrate.resolve().name, "tokens": tokens}
            text = f"a held-out part of {calibration['calibrate']}"
        shorter = "--tokens 4096, or no --calibrate" if calibrate else "a smaller model"
        result = write_checkpoint(
            folder,
            out,
            bits,
            group,
            lambda: read_texts(folder, calibrate, tokens),
            name=name,
            command=_command_line(name, out.name, bits=bits, group=group, **calibration),
            text=text,
            status=announce(screen, status, f"the layers of {name}", shorter),
        )
    screen.print(f"{out}: {_summary(result)}", markup=False)


def _command_line(name: str, out: str, **options: Any) -> str:
    """Return the command for the model card; an option with the value ``None`` is left out."""
    words = ["pronk", "quantize", name, out]
    for option_, value in options.items():
        if value is not None:
            words += [f"--{option_}", str(value)]
    return shlex.join(words)


def _write_head(folder: Path, out: Path, bits: int, group: int | None, command: str) -> str:
    """Quantize an EAGLE-3 or MTP head, or write a quantized one as bfloat16; return a summary.

    ``bits`` is 16 for bfloat16.
    """
    from pronk.train.quantization.heads import dequantize_head, quantize_head

    if bits == _PLAIN_BITS:
        return f"bfloat16, {dequantize_head(folder, out, command) / 1e6:,.1f} MB"
    result = quantize_head(folder, out, bits, group, command)
    rule = result.rule
    blocks = f"groups of {rule.group}" if rule.group else "whole rows"
    return (
        f"{rule.bits} bits in {blocks}; {result.num_bytes / 1e6:,.1f} MB instead of "
        f"{result.source_bytes / 1e6:,.1f}; error of the weights {result.error:.2%}"
    )


def _summary(result: "QuantizedCheckpoint") -> str:
    rule = result.rule
    blocks = f"groups of {rule.group}" if rule.group else "whole rows"
    change = result.perplexity / result.source_perplexity - 1
    summary = (
        f"{rule.bits} bits in {blocks}, method {result.method}; "
        f"{result.num_bytes / 1e6:,.1f} MB instead of {result.source_bytes / 1e6:,.1f}; perplexity "
        f"{result.perplexity:.3f} instead of {result.source_perplexity:.3f} ({change:+.2%})"
    )
    tried = dict(result.perplexities)
    tried.pop(result.method, None)
    if not tried:
        return summary
    others = ", ".join(f"{name} {value:.3f}" for name, value in tried.items())
    return f"{summary}; tried: {others}"
