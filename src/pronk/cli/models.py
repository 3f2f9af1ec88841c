"""``pronk pull``, ``pronk list`` and ``pronk rm``: the models on this machine."""

import json
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pronk.base.errors import OptionError, PronkError
from pronk.base.quantities import size_texts
from pronk.cli.panels import option
from pronk.cli.progress import interruptible

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from pronk.checkpoint.hub.names import HubModel
    from pronk.cli.console import TerminalOutput
    from pronk.drafting.known_drafters import KnownDrafter

_NOT_HERE = "not here"  # of a drafter that can be downloaded, in a table
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
        bool, option("Also download a head or draft model for it.", "--drafter", metavar="")
    ] = False,
) -> None:
    """Download a model from the Hugging Face Hub, or update it; print its path.

    An interrupted download is resumed. The files are in huggingface_hub's cache, and their hashes
    are checked. Private and gated models need `hf auth login`.

    [bold]Examples[/]

    pronk pull smollm2

    pronk pull qwen3-8b --drafter
    """
    from pronk.cli.console import TerminalOutput

    screen = TerminalOutput()
    with interruptible("interrupted; the same command resumes the download"):
        path = _download(screen, name, revision)
        typer.echo(path)
        _pull_drafter(screen, name, path, download=drafter)


def _pull_drafter(screen: "TerminalOutput", name: str, path: "Path", *, download: bool) -> None:
    """Download the first drafter that is known for a model, or say how to, unless it is here.

    Args:
        screen: where the notes appear.
        name: name of the model, as the user typed it.
        path: folder or GGUF file of the model.
        download: whether to download; otherwise a note has the command.
    """
    from pronk.drafting.known_drafters import list_drafters
    from pronk.models.loader import read_config

    drafters: list[KnownDrafter] = []
    with suppress(PronkError):  # raised for a head, and for a model that pronk does not support
        drafters = list_drafters(path, read_config(path))
    if not drafters:
        if download:
            text = f"no trained drafter or draft model is listed for {name}"
            screen.note(f"{text}; auto drafts without one")
        return
    best = drafters[0]
    if best.here:
        if download:
            screen.say(f"{best.label} is here already; auto uses it")
    elif download:
        typer.echo(_download(screen, best.source))
    else:
        text = f"{best.label} is published for this model"
        screen.note(f"{text}; pronk pull {name} --drafter downloads it")


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
    drafters: Annotated[
        bool, option("List heads and draft models of targets.", "--drafters", metavar="")
    ] = False,
    as_json: Annotated[bool, option("Print one JSON document.", "--json", metavar="")] = False,
) -> None:
    """List the models on this machine, and their drafters; --json also has the paths.

    [bold]Examples[/]

    pronk list

    pronk list --known

    pronk list --drafters
    """
    from pronk.cli.console import TerminalOutput

    screen = TerminalOutput()
    if drafters and known:
        msg = "list: expected --known or --drafters, found both; give one of them"
        raise OptionError(msg)
    if drafters:
        rows = _drafter_rows()
        hidden, wide = ["confirmed"], ["license"]
    elif known:
        rows = _known_rows()
        hidden, wide = ["source"], ["repository"]
    else:
        rows = _cached_rows()
        hidden, wide = ["path"], []
    if as_json:
        typer.echo(json.dumps(rows, ensure_ascii=False))
        return
    if not rows:
        screen.note(
            "no model on this machine; pronk pull smollm2 downloads one, "
            "pronk list --known has more"
        )
        return
    table = _table(rows, *hidden)
    if not screen.fits(table):
        table = _table(rows, *hidden, *wide)
    screen.result(table, one_line_rows=True)
    if any(_NOT_HERE in _cell("drafters", row.get("drafters", "")) for row in rows):
        screen.say("pronk pull NAME --drafter downloads a drafter that is not here")


def _known_rows() -> "list[dict[str, Any]]":
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


def _cached_rows() -> "list[dict[str, Any]]":
    """Return a row of columns for each model on this machine.

    A head is a row, too, with its target. Drafters of a model are found by its name: its files are
    not read.
    """
    from pronk.checkpoint.hub.cache import cached_models, model_label, repository_of
    from pronk.checkpoint.hub.model_identity import place_name
    from pronk.drafting.known_drafters import list_drafters_by_name
    from pronk.models.pairs import targets_of

    rows = []
    for cached in cached_models():
        drafters = list_drafters_by_name(place_name(cached.path))
        rows.append(
            {
                "name": model_label(cached.path),
                "size": size_texts(cached.num_bytes)[0],
                "path": str(cached.path),
                "drafters": [each._asdict() for each in drafters],
                "target": ", ".join(targets_of(repository_of(cached.path))),
            }
        )
    return rows


def _drafter_rows() -> "list[dict[str, Any]]":
    """Return a row of columns for each head or draft model that is known to fit a target."""
    from pronk.checkpoint.hub.model_identity import simplify_name
    from pronk.drafting.from_target.eagle3 import Eagle3, packaged_heads
    from pronk.models.pairs import all_pairs

    rows = []
    for head in packaged_heads():
        name = simplify_name(head.target)
        row = {"target": name, "drafter": Eagle3.name, "source": f"pronk: {head.folder.name}"}
        rows.append(row | {"here": "yes", "license": "", "confirmed": ""})
    for pair in all_pairs():
        row = {"target": pair.target, "drafter": pair.drafter, "source": pair.source}
        here = "yes" if pair.is_here else ""
        rows.append(row | {"here": here, "license": pair.license, "confirmed": pair.confirmed})
    return rows


def _table(rows: "list[dict[str, Any]]", *omitted: str) -> "Table":
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
    columns = [str(column.header) for column in table.columns]
    for row in rows:
        table.add_row(*(_cell(key, row[key]) for key in columns))
    return table


def _cell(key: str, value: str | list[dict[str, Any]]) -> str:
    """Return the text of a table's cell in the column ``key``.

    Of several drafters it is the one that ``auto`` tries first: one on this machine before others.
    """
    if isinstance(value, str):
        return value or ("–" if key == "size" else "")
    for each in value:
        if each["here"]:
            return str(each["drafter"])
    return f"{value[0]['drafter']}, {_NOT_HERE}" if value else ""


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
