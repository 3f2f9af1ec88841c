"""``pronk inflate``: a checkpoint of any size that computes what a small one computes.

typer wants the real types of the options: no postponed annotations here. torch is imported when the command runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from pronk.cli.progress import command_line

__all__ = ["inflate"]

_INTERRUPTED = 130
_SIZES = {"hidden": 2048, "layers": 22, "intermediate": 5632}


def _shape(help: str, default: str) -> Any:  # noqa: A002 - typer's word
    return typer.Option(help=help, rich_help_panel="Shape", min=1, show_default=default)


def inflate(
    out: Annotated[
        Path,
        typer.Argument(help="Folder to write, new or empty; or, with --drafter, an inflated one.", show_default=False),
    ],
    *,
    source: Annotated[
        str | None,
        typer.Option(
            help="Folder with a checkpoint, or its id on the Hub. Default in a clone: pronk-tiny.",
            metavar="MODEL",
            show_default=False,
        ),
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="A drafter that was trained on the source, to go with it into OUT/drafters: a folder, or in a clone "
            "the name of one in models/. Can be given several times.",
            metavar="FOLDER",
            show_default=False,
        ),
    ] = None,
    hidden: Annotated[
        int | None, _shape("Hidden size; four or sixteen times the source's loses nothing by rounding.", "2048")
    ] = None,
    layers: Annotated[int | None, _shape("Layers.", "22")] = None,
    intermediate: Annotated[int | None, _shape("Width of the gated MLP.", "5632")] = None,
    heads: Annotated[int | None, _shape("Attention heads.", "hidden size / head size")] = None,
    kv_heads: Annotated[int | None, _shape("Key/value heads.", "about an eighth of the heads")] = None,
    dtype: Annotated[str, typer.Option(help="auto (the source's own), float32, bfloat16 or float16.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of the weights that are added.")] = 0,
) -> None:
    """Write a large checkpoint that computes what a small one computes.

    Its text and acceptance are the small model's, its cost per pass is the large one's: real text to measure speed
    with, at a simulated size. Llama, Mistral, Qwen2 and Qwen3 can be inflated; any engine loads the result.

    Drafters that were trained on the small model (multi_token, medusa, kangaroo, glide, vanilla) can be made ones of
    the large model, with the same guesses. If OUT is an inflated checkpoint of the source they are added to it.

    [bold]Examples[/]

    pronk inflate pronk-1b

    pronk inflate pronk-120m --hidden 1280 --layers 12 --intermediate 1536

    pronk inflate pronk-1b --drafter pronk-tiny-kangaroo --drafter runs/medusa/export

    pronk inflate big --source Qwen/Qwen3-0.6B --hidden 4096 --layers 36 --intermediate 12288 --dtype bfloat16
    """
    screen = Console(highlight=False, soft_wrap=True, stderr=True)
    sizes = {"hidden": hidden, "layers": layers, "intermediate": intermediate, "heads": heads, "kv-heads": kv_heads}
    try:
        made = None
        with _progress(screen) as progress:
            from pronk.inflate import checkpoint as work

            folder, name = _source(source)
            shared = {
                "source": None if source is None else name,
                "drafter": [Path(each).name for each in drafter or ()],
            }
            numbers = {"dtype": dtype, "seed": seed}
            options: dict[str, Any] = {"drafters": [_drafter(each) for each in drafter or ()], "name": name, **numbers}
            if drafter and work.is_inflated(out):
                options["command"] = command_line("inflate", out.name, **shared, **sizes, **numbers)
                drafters = work.add_drafters(folder, out, shape=work.Shape(*sizes.values()), **options)
            else:
                sizes |= {key: size for key, size in _SIZES.items() if sizes[key] is None}
                options["command"] = command_line("inflate", out.name, **shared, **sizes, **numbers)
                made = work.inflate(folder, out, work.Shape(*sizes.values()), progress=progress, **options)
                drafters = made.drafters
    except KeyboardInterrupt:
        screen.print("interrupted; nothing half written was kept", style="yellow")
        raise typer.Exit(_INTERRUPTED) from None
    if made is not None:
        screen.print(
            f"{out}: {made.parameters / 1e6:,.1f} M parameters, {made.num_bytes / 1e9:.2f} GB. Its size is simulated: "
            f"it computes what {name} does, which has {made.source_parameters / 1e6:,.2f} M.",
            markup=False,
        )
    for each in drafters:
        screen.print(
            f"{out / 'drafters' / each.name}: {each.parameters / 1e6:,.1f} M parameters; it guesses what the original "
            f"does, which has {each.source_parameters / 1e6:,.2f} M.",
            markup=False,
        )


def _source(source: str | None) -> tuple[Path, str]:
    """Return the folder of the source and its name for messages and the model card."""
    from pronk.models.clone_models import default_model
    from pronk.models.loader import resolve_model

    folder = default_model("--source") if source is None else resolve_model(source)
    # A downloaded model's folder is called by its commit.
    return folder, folder.resolve().name if source is None or Path(source).expanduser().is_dir() else source


def _drafter(name: str) -> Path:
    """Return the folder of a drafter; an existing folder comes before a drafter of the clone."""
    from pronk.models.clone_models import clone_model

    folder = Path(name).expanduser()
    return folder if folder.exists() else clone_model(name) or folder


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
