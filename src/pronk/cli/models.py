"""``pronk pull``, ``pronk list`` and ``pronk rm``: the models on this machine."""

import json
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from pronk.base.errors import PronkError
from pronk.base.quantities import size_texts
from pronk.cli.panels import option
from pronk.cli.progress import interruptible

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from pronk.checkpoint.hub.names import HubModel
    from pronk.cli.console import TerminalOutput
    from pronk.models.resolve import Pair

MODEL_NAME = typer.Argument(
    help="smollm2, owner/name, owner/name:Q4_K_M, owner/name/file.gguf", show_default=False
)


def pull(
    name: Annotated[str, MODEL_NAME],
    *,
    revision: Annotated[
        str | None,
        option("Branch, tag or commit on the Hub.", show_default="main", metavar="REVISION"),
    ] = None,
    drafter: Annotated[
        bool, option("Also download drafters listed for this model.", "--drafter", metavar="")
    ] = False,
) -> None:
    """Download a model from the Hugging Face Hub, or update it; print its path.

    An interrupted download is resumed. The files are in huggingface_hub's cache, and their hashes
    are checked. Private and gated models need `hf auth login`.

    [bold]Examples[/]

    pronk pull smollm2

    pronk pull Qwen/Qwen3-4B-GGUF:Q4_K_M
    """
    from pronk.cli.console import TerminalOutput

    screen = TerminalOutput()
    with interruptible("interrupted; the same command resumes the download"):
        path = _download(screen, name, revision)
        typer.echo(path)
        if drafter:
            from pronk.models.loader import read_config
            from pronk.models.resolve import find_pairs

            pairs = find_pairs(path, read_config(path))
            for pair in pairs:
                typer.echo(_download(screen, pair.source))
            if not pairs:
                screen.note(
                    f"no trained drafter or draft model is listed for {name}; "
                    "auto drafts without one"
                )


def download_missing(screen: "TerminalOutput", name: str) -> None:
    """Download a model of the Hub that is not on this machine.

    A path, or a name that is none of the Hub's, is left to the loading of the model.
    """
    from pathlib import Path

    from pronk.checkpoint.hub.cache import find_cached
    from pronk.checkpoint.hub.names import parse_name

    model = None if Path(name).exists() else parse_name(name, None)
    if model is not None and not find_cached(model):
        _download(screen, name)


def _download(screen: "TerminalOutput", name: str, revision: str | None = None) -> "Path":
    from pronk.checkpoint.hub.names import require_name
    from pronk.models.resolve import pull_model

    require_name(name, revision)  # an error comes before the first line of the progress
    with screen.transfer(name) as progress:
        return pull_model(name, revision=revision, progress=progress)


def list_models(
    *,
    known: Annotated[bool, option("List the short names instead.", "--known", metavar="")] = False,
    as_json: Annotated[bool, option("Print one JSON document.", "--json", metavar="")] = False,
) -> None:
    """List the models on this machine, and their drafters; --json also has the paths.

    [bold]Examples[/]

    pronk list

    pronk list --known
    """
    from pronk.cli.console import TerminalOutput

    screen = TerminalOutput()
    rows = _known_rows() if known else _cached_rows()
    if as_json:
        typer.echo(json.dumps(rows, ensure_ascii=False))
    elif rows:
        table = _table(rows, "path", "source")
        if not screen.fits(table):
            table = _table(rows, "path", "source", "repository")
        screen.result(table, one_line_rows=True)
    else:
        screen.note(
            "no model on this machine; pronk pull smollm2 downloads one, "
            "pronk list --known has more"
        )


def _known_rows() -> "list[dict[str, str]]":
    """Return a row of columns for each short name."""
    from pronk.checkpoint.hub.cache import find_cached
    from pronk.checkpoint.hub.names import known_models

    rows = []
    for known in known_models().values():
        model = known.model
        rows.append(
            {
                "name": known.name,
                "parameters": known.parameters,
                "weights": _quantization(model),
                "size": size_texts(known.num_bytes)[0] if known.num_bytes else "",
                "license": known.license,
                "here": "yes" if find_cached(model) else "",
                "source": str(model),
                "repository": model.repo,
            }
        )
    return rows


def _quantization(model: "HubModel") -> str:
    """Return the quantization that a model's name on the Hub states, such as ``Q4_K_M``."""
    return model.quantization or re.split(r"[.-]", model.file)[-2]


def _cached_rows() -> "list[dict[str, str]]":
    """Return a row of columns for each model on this machine."""
    from pronk.checkpoint.hub.cache import cached_models, model_label
    from pronk.models.loader import read_config
    from pronk.models.resolve import all_pairs, find_pairs

    rows = []
    for cached in cached_models():
        pairs: list[Pair] = []
        with suppress(PronkError):  # raised for a model that pronk does not support
            pairs = find_pairs(cached.path, read_config(cached.path)) if all_pairs() else []
        drafters = [f"{pair.drafter}: {pair.source}" for pair in pairs]
        rows.append(
            {
                "name": model_label(cached.path),
                "size": size_texts(cached.num_bytes)[0],
                "path": str(cached.path),
                "drafters": ", ".join(drafters),
            }
        )
    return rows


def _table(rows: "list[dict[str, str]]", *omitted: str) -> "Table":
    """Return a table of rows, without the ``omitted`` columns and columns without any value."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for key in rows[0]:
        if key not in omitted and any(row[key] for row in rows):
            table.add_column(
                key,
                no_wrap=key == "name",
                overflow="fold",
                justify="right" if key == "size" else "left",
            )
    for row in rows:
        shown = row | {"size": row["size"] or "–"}
        table.add_row(*(shown[str(column.header)] for column in table.columns))
    return table


def remove(name: Annotated[str, MODEL_NAME]) -> None:
    """Remove a model from this machine.

    Its packed weights (--weight-cache on) are removed, too.

    [bold]Examples[/]

    pronk rm Qwen/Qwen3-4B-GGUF:Q4_K_M
    """
    from pronk.checkpoint.hub.cache import remove_cached
    from pronk.checkpoint.hub.names import require_name
    from pronk.cli.console import TerminalOutput
    from pronk.kernels.weight_cache import default_folder, remove_orphans

    freed = remove_cached(require_name(name))
    with suppress(RuntimeError):  # there is no home folder
        freed += remove_orphans(default_folder())
    TerminalOutput().say(f"removed {name}, {size_texts(freed)[0]}")
