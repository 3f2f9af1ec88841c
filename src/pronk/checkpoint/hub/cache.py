"""Models in the Hub's cache on this machine: find, list and remove them.

The layout is that of huggingface_hub, so that its tools and other programs share the files::

    models--owner--name/refs/main            the commit that the branch had at the last download
    models--owner--name/snapshots/COMMIT/    the repository's files at a commit, as links to the blobs
    models--owner--name/blobs/HASH           a file's content; HASH.incomplete is a download that can be resumed
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pronk.base.errors import CheckpointError, refuse
from pronk.base.files.regular import is_file
from pronk.checkpoint.hub.names import HubModel, is_weights, known_models


class CachedModel(NamedTuple):
    """A complete model in the cache."""

    path: Path  # folder of the snapshot, or first GGUF file
    files: tuple[Path, ...]  # all its files

    @property
    def num_bytes(self) -> int:
        """Size of its files."""
        return sum(file.stat().st_size for file in self.files)


def cache_folder() -> Path:
    """Return the Hub's cache: ``~/.cache/huggingface/hub``, unless its settings name another folder."""
    from huggingface_hub import constants  # noqa: PLC0415 - the import takes 0.05 s

    return Path(constants.HF_HUB_CACHE)


def repo_folder(repo: str) -> Path:
    """Return the folder of a repository in the cache."""
    return cache_folder() / f"models--{repo.replace('/', '--')}"


def find_cached(model: HubModel) -> Path | None:
    """Return the folder or GGUF file of a model if the cache has all its files.

    Download nothing.
    """
    for snapshot in _snapshots(model):
        files = _model_files(model, snapshot)
        if files and files[0].suffix.lower() == ".gguf":
            return files[0]
        if files and _is_complete(snapshot):
            return snapshot
    return None


def model_label(path: Path) -> str:
    """Return the name to show: the short name, else the name on the Hub, else that of folder or file."""
    for known in known_models().values():
        snapshots = f"models--{known.model.repo.replace('/', '--')}/snapshots"
        if path.match(f"{snapshots}/*/*") and find_cached(known.model) == path:
            return known.name
    for folder in path.parents:
        if folder.name == "snapshots" and folder.parent.name.startswith("models--"):
            return _repo(folder.parent) + "/".join(["", *path.relative_to(folder).parts[1:]])
    return path.name


def _repo(folder: Path) -> str:
    return folder.name.removeprefix("models--").replace("--", "/", 1)


def _snapshots(model: HubModel) -> Iterator[Path]:
    """Yield the snapshot of the revision.

    Without a revision main's, then the others, newest first.
    """
    folder = repo_folder(model.repo)
    reference = folder / "refs" / (model.revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else model.revision
    others = sorted((folder / "snapshots").glob("*"), key=lambda path: -path.stat().st_mtime)
    if commit is not None and (folder / "snapshots" / commit).is_dir():
        yield folder / "snapshots" / commit
    if model.revision is None:
        yield from (path for path in others if path.name != commit)


def _model_files(model: HubModel, snapshot: Path) -> list[Path]:
    """Return the files of a model in a snapshot, the GGUF file to open first.

    Empty unless all are there.
    """
    try:
        chosen = model.choose_files(
            path.relative_to(snapshot).as_posix() for path in _files(snapshot)
        )
    except CheckpointError:
        return []
    return [snapshot / name for name in chosen]


def _files(folder: Path) -> list[Path]:
    # a link to a missing blob is no file
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _is_complete(folder: Path) -> bool:
    """Return whether a folder has config, tokenizer and all weights, or the files of a trained drafter."""
    if not {"config.json", "tokenizer.json"} <= {path.name for path in folder.iterdir()}:
        return (folder / "drafter.json").is_file() and (folder / "model.safetensors").is_file()
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return is_weights(path.name for path in _files(folder))
    try:
        names = list(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
    return all(isinstance(name, str) and is_file(folder / name) for name in names)


def cached_models() -> list[CachedModel]:
    """Return all complete models in the cache, by name."""
    found: dict[Path, CachedModel] = {}
    for folder in sorted(cache_folder().glob("models--*--*")):
        repo = _repo(folder)
        for snapshot in sorted((folder / "snapshots").glob("*")):
            files = [path.relative_to(snapshot).as_posix() for path in _files(snapshot)]
            ggufs = [
                HubModel(repo, name, revision=snapshot.name)
                for name in files
                if name.lower().endswith(".gguf")
            ]
            for model in [HubModel(repo, revision=snapshot.name), *ggufs]:
                if (path := find_cached(model)) is not None and path not in found:
                    found[path] = CachedModel(path, tuple(_model_files(model, snapshot)))
    return [*found.values()]


def remove_cached(model: HubModel) -> int:
    """Remove a model from the cache; return the number of bytes freed.

    The repository's folder is removed if no file is left, with partial downloads. If the cache has
    no part of the model, a CheckpointError is raised.
    """
    folder = repo_folder(model.repo)
    whole = not model.file and not model.quantization
    absent = f"found no such model in {folder.parent}; pronk list shows what is there"
    if not folder.is_dir():
        refuse(model, absent)
    try:
        before = _size(folder)
        for snapshot in () if whole else [*_snapshots(model)]:
            for file in _model_files(model, snapshot):
                file.unlink()
        used = {path.resolve() for path in _files(folder / "snapshots")}
        if whole or not used:
            shutil.rmtree(folder)
            return before
        for blob in (folder / "blobs").glob("*"):
            if blob.resolve() not in used and blob.suffix != ".incomplete":
                blob.unlink()
        after = _size(folder)
    except OSError as error:
        msg = (
            f"{model}: expected to remove files of {folder}, found: {error.strerror}; end programs "
            "that use them"
        )
        raise CheckpointError(msg) from error
    if before == after:
        refuse(model, absent)
    return before - after


def _size(folder: Path) -> int:
    return sum(
        path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    )


def check_hash(file: Path, expected: str, name: str) -> None:
    """Raise CheckpointError and delete the file, called ``name``, if its SHA-256 is not ``expected``."""
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        file.resolve().unlink()
        file.unlink(missing_ok=True)
        refuse(
            name, f"expected the SHA-256 {expected[:16]}…, found {found[:16]}…; download it again"
        )
