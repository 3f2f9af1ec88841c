"""``pronk quantize``: a checkpoint with weights of 8 or 4 bits, for pronk and for other engines.

typer wants the real types of the options: no postponed annotations here. torch is imported when the command runs.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pronk.cli.progress import command_line, status_bar

if TYPE_CHECKING:
    from pronk.quantization.quantize.checkpoint import QuantizedCheckpoint

__all__ = ["quantize"]

_INTERRUPTED = 130


def quantize(
    model: Annotated[
        str, typer.Argument(help="Folder with a checkpoint, or its id on the Hub.", metavar="MODEL", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write, new or empty.", show_default=False)],
    *,
    bits: Annotated[int, typer.Option(help="Of a weight: 4 or 8.")] = 4,
    group: Annotated[
        int | None,
        typer.Option(
            help="Weights beside each other that share a scale: a multiple of 8, or 0 for whole rows.",
            show_default="32 for 4 bits, 128 for 8, or what fits",
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="Text like what the model will read: a file, a folder, or JSON lines with a text. Weights are rounded "
            "in several ways that look at it, and the one that predicts a held-out part best is kept.",
            metavar="TEXT",
            show_default="round to the nearest",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Most tokens of TEXT to calibrate with.", min=128)] = 32_768,
    threads: Annotated[int | None, typer.Option(help="Threads to compute with.", min=1)] = None,
) -> None:
    """Write a checkpoint with weights of 4 or 8 bits.

    Its format is that of compressed-tensors, which transformers and vLLM read, too. Llama, Mistral, Qwen2 and Qwen3
    can be quantized. The model card says what it costs: perplexity before and after, on the held-out part of TEXT or on
    a text that comes with pronk.

    [bold]Examples[/]

    pronk quantize Qwen/Qwen3-0.6B qwen-4bit

    pronk quantize ./checkpoint small --bits 8 --group 64

    pronk quantize ./checkpoint small --calibrate src/ --tokens 65536
    """
    screen = Console(highlight=False, soft_wrap=True, stderr=True)
    try:
        with status_bar(screen) as status:
            import torch

            from pronk.models.loader import resolve_model
            from pronk.quantization.quantize.checkpoint import quantize as work
            from pronk.quantization.quantize.texts import read_texts

            if threads is not None:
                torch.set_num_threads(threads)
            folder = resolve_model(model)
            name = folder.resolve().name if Path(model).expanduser().is_dir() else model
            words = {"calibrate": calibrate.resolve().name, "tokens": tokens} if calibrate else {}
            made = work(
                folder,
                out,
                bits,
                group,
                lambda: read_texts(folder, calibrate, tokens),
                name=name,
                command=command_line("quantize", name, out.name, bits=bits, group=group, **words),
                text=f"a held-out part of {calibrate.resolve().name}"
                if calibrate
                else "the text that comes with pronk",
                status=status,
            )
    except KeyboardInterrupt:
        screen.print("interrupted; nothing half written was kept", style="yellow")
        raise typer.Exit(_INTERRUPTED) from None
    screen.print(f"{out}: {_summary(made)}", markup=False)


def _summary(made: "QuantizedCheckpoint") -> str:
    rule, change = made.rule, made.after / made.before - 1
    others = [f"{name} {value:.3f}" for name, value in made.tried.items() if name != made.method]
    return (
        f"{rule.bits} bits in {f'groups of {rule.group}' if rule.group else 'whole rows'}, method {made.method}; "
        f"{made.num_bytes / 1e6:,.1f} MB instead of {made.source_bytes / 1e6:,.1f}; perplexity {made.after:.3f} "
        f"instead of {made.before:.3f} ({change:+.2%}){'; tried: ' * bool(others)}{', '.join(others)}"
    )
