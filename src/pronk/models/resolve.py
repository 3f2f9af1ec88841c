"""Finds a model's folder or GGUF file by its name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pronk.base.errors import OptionError, refuse
from pronk.checkpoint.gguf.checkpoint import is_gguf
from pronk.checkpoint.hub.cache import find_cached
from pronk.checkpoint.hub.clone_models import clone_model, clone_names
from pronk.checkpoint.hub.names import (
    MTP_FILES,
    close_names,
    known_models,
    parse_name,
    require_name,
)

if TYPE_CHECKING:
    from pronk.checkpoint.hub.download import Progress

DEFAULT_MODEL = "smollm2"


def resolve_model(
    name: str | Path | None, *, progress: Progress | None = None, may_download: bool = True
) -> Path:
    """Return the folder or GGUF file of a model, downloaded if it is not on this machine.

    ``name`` is a folder, a GGUF file, or a name as in :mod:`pronk.checkpoint.hub.names`; in a clone
    of the repository, also a folder in its ``models/``. ``None`` means ``smollm2``, which is
    not downloaded by this call. ``progress`` is called with the number of bytes downloaded so far
    and the total.

    Raises:
        CheckpointError: there is no such folder, file or model, or the download fails, or
            ``may_download`` is false and the model is not on this machine.
        OptionError: ``name`` is of another type, or ``None`` and ``smollm2`` is not on this
            machine.
    """
    if not isinstance(name, str | Path | None) or name == "":
        refuse(
            "model", f"expected a folder, a GGUF file or a name, found {name!r:.60}", OptionError
        )
    text = DEFAULT_MODEL if name is None else str(name)
    # a folder ./smollm2 is not the default model; it is used only if ``name`` is given
    local = clone_model(text) if name is None else _local_model(name)
    if local is not None:
        return local
    model = None if isinstance(name, Path) else parse_name(text)
    if model is None:
        _refuse_name(text)
    found = find_cached(model)
    if found is None and name is None:
        msg = (
            f"model: found no {text} on this machine; run `pronk pull {text}` (98 MB), "
            "or name another"
        )
        raise OptionError(msg)
    if found is not None:
        return found
    if not may_download:
        refuse(
            "model",
            f"expected a model on this machine, found no {text}; `pronk pull {text}` downloads it",
        )
    return pull_model(text, progress=progress)


def pull_model(name: str, *, revision: str | None = None, progress: Progress | None = None) -> Path:
    """Download a model of the Hub, or update it; return its folder or GGUF file.

    Args:
        name: name as in :mod:`pronk.checkpoint.hub.names`. A path of this machine is none.
        revision: branch, tag or commit; by default that of the name.
        progress: called with the number of bytes downloaded so far and the total.

    Raises:
        CheckpointError: ``name`` has another form, or the download fails.
    """
    from pronk.checkpoint.hub.download import download  # noqa: PLC0415 - most models are on this machine

    known = known_models().get(name) if revision is None else None
    return download(require_name(name, revision), known, progress)


def _local_model(name: str | Path) -> Path | None:
    """Return a folder or file of this machine; ``None`` if there is none of this name.

    Of a folder with GGUF files instead of a checkpoint, the only one is returned; files with an MTP
    head alone do not count. Raises CheckpointError if the folder or file holds no model.
    """
    text = str(name)
    try:
        path = Path(name).expanduser()
        if is_gguf(path):
            return path
        if path.is_dir():
            ggufs = sorted({*path.glob("*.gguf")} - {*path.glob(MTP_FILES)})
            if not ggufs or (path / "config.json").is_file():
                return path
            if len(ggufs) > 1:
                names = ", ".join(each.name for each in ggufs)
                refuse(path, f"expected config.json or one GGUF file, found {names}; name one")
            return ggufs[0]
    except (RuntimeError, OSError, ValueError) as error:
        _refuse_name(text, error)
    if path.exists():
        expected = "expected a folder with config.json, *.safetensors and tokenizer.json, or *.gguf"
        refuse("model", f"{expected}, found the file {text}")
    model = None if isinstance(name, Path) else parse_name(text)
    if path.suffix.lower() == ".gguf" and (model is None or not model.file):
        refuse(
            "model",
            f"expected a GGUF file, or a model folder, found no such file: {text!r}; "
            "check the path",
        )
    return clone_model(text)


def _refuse_name(name: str, cause: Exception | None = None) -> NoReturn:
    """Raise CheckpointError for a name that is neither a local folder nor one on the Hub."""
    expected = (
        "expected a model folder, a GGUF file, or owner/name of a model on the Hugging Face Hub"
    )
    near = close_names(name, *clone_names())
    refuse("model", f"{expected}, found no such folder: {name[:80]!r}{near}", cause=cause)
