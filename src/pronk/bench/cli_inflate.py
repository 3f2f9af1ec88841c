"""``pronk inflate``: a checkpoint of any size that computes what a small one computes.

typer wants the real types of the options: no postponed annotations here. torch is imported when the command runs.
"""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

__all__ = ["inflate"]

_INTERRUPTED = 130


def _shape(help: str, **more: Any) -> Any:  # noqa: A002 - typer's word
    return typer.Option(help=help, rich_help_panel="Shape", min=1, **more)


def inflate(
    out: Annotated[Path, typer.Argument(help="Folder to write, new or empty.", show_default=False)],
    *,
    source: Annotated[
        str | None,
        typer.Option(
            help="Folder with a checkpoint, or its id on the Hub. Default: the bundled model.",
            metavar="MODEL",
            show_default=False,
        ),
    ] = None,
    hidden: Annotated[int, _shape("Hidden size; four or sixteen times the source's loses nothing by rounding.")] = 2048,
    layers: Annotated[int, _shape("Layers.")] = 22,
    intermediate: Annotated[int, _shape("Width of the gated MLP.")] = 5632,
    heads: Annotated[int | None, _shape("Attention heads.", show_default="hidden size / head size")] = None,
    kv_heads: Annotated[int | None, _shape("Key/value heads.", show_default="about an eighth of the heads")] = None,
    dtype: Annotated[str, typer.Option(help="auto (the source's own), float32, bfloat16 or float16.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of the weights that are added.")] = 0,
) -> None:
    """Write a large checkpoint that computes what a small one computes.

    Its text and acceptance are the small model's, its cost per pass is the large one's: real text to measure speed
    with, at a simulated size. Llama, Mistral, Qwen2 and Qwen3 can be inflated; any engine loads the result.

    [bold]Examples[/]

    pronk inflate pronk-1b

    pronk inflate pronk-120m --hidden 1280 --layers 12 --intermediate 1536

    pronk inflate big --source Qwen/Qwen3-0.6B --hidden 4096 --layers 36 --intermediate 12288 --dtype bfloat16
    """
    screen = Console(highlight=False, soft_wrap=True, stderr=True)
    sizes = {"hidden": hidden, "layers": layers, "intermediate": intermediate, "heads": heads, "kv-heads": kv_heads}
    try:
        with _progress(screen) as progress:
            from pronk.bench.inflate import Shape
            from pronk.bench.inflate import inflate as write
            from pronk.model.loader import resolve_model

            folder = resolve_model(Path(str(files("pronk"))) / "bundled" / "pronk-tiny" if source is None else source)
            # A downloaded model's folder is called by its commit.
            name = folder.resolve().name if source is None or Path(source).expanduser().is_dir() else source
            options = {"source": None if source is None else name, **sizes, "dtype": dtype, "seed": seed}
            command = _command(out, options)
            shape = Shape(hidden, layers, intermediate, heads, kv_heads)
            made = write(folder, out, shape, name=name, dtype=dtype, seed=seed, command=command, progress=progress)
    except KeyboardInterrupt:
        screen.print("interrupted; nothing was kept", style="yellow")
        raise typer.Exit(_INTERRUPTED) from None
    screen.print(
        f"{out}: {made.parameters / 1e6:,.1f} M parameters, {made.num_bytes / 1e9:.2f} GB. Its size is simulated: "
        f"it computes what {name} does, which has {made.source_parameters / 1e6:,.2f} M.",
        markup=False,
    )


def _command(out: Path, options: dict[str, Any]) -> str:
    """The command that makes this folder, defaults spelled out, without folders of the machine."""
    words = ["pronk", "inflate", out.name]
    for option, value in options.items():
        words += [] if value is None else [f"--{option}", str(value)]
    return shlex.join(words)


@contextmanager
def _progress(screen: Console) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal; ``None`` where nobody looks."""
    if not screen.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("writing"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task("writing", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
