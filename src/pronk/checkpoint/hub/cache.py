"""Models in the Hub's cache on this machine: find, list and remove them.

The layout is that of huggingface_hub, so that its tools and other programs share the files. A
repository has the folder ``models--OWNER--NAME``::

    refs/main               the commit that the branch main had at the last download
    snapshots/COMMIT/       the repository's files at a commit, as links to the blobs
    blobs/HASH              a file's content
    blobs/HASH.incomplete   a partial download, which can be resumed
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
from pronk.checkpoint.hub.names import HubModel, gguf_models, is_weights, known_models
from pronk.checkpoint.tensors import read_json


class CachedModel(NamedTuple):
    """A model in the cache, with all its files.

    Attributes:
        path: folder of the snapshot, or first GGUF file.
        files: all files of the model.
    """

    path: Path
    files: tuple[Path, ...]

    @property
    def num_bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(file.stat().st_size for file in self.files)


def cache_folder() -> Path:
    """Return the folder of the Hub's cache.

    It is ``~/.cache/huggingface/hub`` unless huggingface_hub is configured otherwise.
    """
    from huggingface_hub import constants  # noqa: PLC0415 - the import takes 0.05 s

    return Path(constants.HF_HUB_CACHE)


def repo_folder(repo: str) -> Path:
    """Return the folder of a repository in the cache."""
    return cache_folder() / f"models--{repo.replace('/', '--')}"


def find_cached(model: HubModel) -> Path | None:
    """Return the folder or GGUF file of a model in the cache; ``None`` if a file is missing.

    Nothing is downloaded.
    """
    for snapshot in _snapshots(model):
        files = _model_files(model, snapshot)
        if files and files[0].suffix.lower() == ".gguf":
            return files[0]
        if files and _is_complete(snapshot):
            return snapshot
    return None


def model_label(path: Path) -> str:
    """Return the name of a model for the user.

    It is the short name, else the name on the Hub, else the name of the folder or file.
    """
    for known in known_models().values():
        snapshots = f"models--{known.model.repo.replace('/', '--')}/snapshots"
        if path.match(f"{snapshots}/*/*") and find_cached(known.model) == path:
            return known.name
    folder = _snapshots_folder(path)
    if folder is None:
        return path.name
    _, *file = path.relative_to(folder).parts  # without the folder of the commit
    return "/".join([_repo(folder.parent), *file])


def repository_of(path: Path) -> str | None:
    """Return the repository, ``owner/name``, of a folder or file in the cache.

    ``None`` if the path does not belong to the cache.
    """
    folder = _snapshots_folder(path)
    return None if folder is None else _repo(folder.parent)


def _snapshots_folder(path: Path) -> Path | None:
    """Return the folder ``snapshots`` of the repository in the cache that has this path."""
    for folder in path.parents:
        if folder.name == "snapshots" and folder.parent.name.startswith("models--"):
            return folder
    return None


def _repo(folder: Path) -> str:
    """Return the repository, ``owner/name``, of a folder of the cache."""
    return folder.name.removeprefix("models--").replace("--", "/", 1)


def _snapshots(model: HubModel) -> Iterator[Path]:
    """Yield the folders of snapshots in which a model is searched.

    If the model has a revision, this is its snapshot. Otherwise the snapshot of the branch main
    comes first, then all others, the newest first.
    """
    folder = repo_folder(model.repo)
    snapshots = folder / "snapshots"
    reference = folder / "refs" / (model.revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else model.revision
    newest_first = sorted(snapshots.glob("*"), key=lambda path: -path.stat().st_mtime)
    if commit is not None and (snapshots / commit).is_dir():
        yield snapshots / commit
    if model.revision is None:
        yield from (path for path in newest_first if path.name != commit)


def _model_files(model: HubModel, snapshot: Path) -> list[Path]:
    """Return the files of a model in a snapshot; an empty list if one is missing.

    The GGUF file to open comes first.
    """
    try:
        chosen = model.choose_files(_names(snapshot))
    except CheckpointError:
        return []
    return [snapshot / name for name in chosen]


def _remove_files(model: HubModel, snapshot: Path) -> None:
    """Remove the files of a model from a snapshot, except MTP heads that another model has, too."""
    files = _model_files(model, snapshot)
    others = [HubModel(model.repo, first) for first in gguf_models(_names(snapshot))]
    kept = set[Path]()
    for other in others:
        its_files = _model_files(other, snapshot)
        if its_files[:1] != files[:1]:
            kept.update(its_files)
    for file in files:
        if file == files[0] or file not in kept:
            file.unlink()


def _names(snapshot: Path) -> list[str]:
    """Return the paths of all files of a snapshot in its repository, sorted."""
    return [path.relative_to(snapshot).as_posix() for path in _files(snapshot)]


def _files(folder: Path) -> list[Path]:
    """Return all files below a folder, without links to missing blobs."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _is_complete(folder: Path) -> bool:
    """Return whether a snapshot has all files of a model or of a trained drafter.

    Those of a model are its config, its tokenizer and all its weights. A head has no tokenizer.
    """
    names = {path.name for path in folder.iterdir()}
    if not {"config.json", "tokenizer.json"} <= names and not _is_head(folder):
        return (folder / "drafter.json").is_file() and (folder / "model.safetensors").is_file()
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return is_weights(path.name for path in _files(folder))
    try:
        shards = list(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
    return all(isinstance(name, str) and is_file(folder / name) for name in shards)


def _is_head(folder: Path) -> bool:
    """Return whether a folder has the config of a head, which uses the tokenizer of its target.

    Heads of speculators have ``speculators_model_type``. Other heads of EAGLE-3 have the word in
    ``architectures``, and an assistant of Gemma 4 has its own ``model_type``.
    """
    try:
        config = read_json(folder / "config.json")
    except CheckpointError:
        return False
    kinds = f"{config.get('model_type')} {config.get('architectures')}".lower()
    return "speculators_model_type" in config or "eagle3" in kinds or "gemma4_assistant" in kinds


def cached_models() -> list[CachedModel]:
    """Return all complete models in the cache, sorted by the repository's name."""
    found: dict[Path, CachedModel] = {}
    for folder in sorted(cache_folder().glob("models--*--*")):
        repo = _repo(folder)
        for snapshot in sorted((folder / "snapshots").glob("*")):
            names = ["", *gguf_models(_names(snapshot))]
            for name in names:
                model = HubModel(repo, name, revision=snapshot.name)
                cached = find_cached(model)
                if cached is not None and cached not in found:
                    files = tuple(_model_files(model, snapshot))
                    found[cached] = CachedModel(cached, files)
    return list(found.values())


def remove_cached(model: HubModel) -> int:
    """Remove a model from the cache; return the number of bytes freed.

    If no other model of the repository is left, the repository's folder is removed with its partial
    downloads.

    Raises:
        CheckpointError: the cache has no part of the model, or a file cannot be removed.
    """
    folder = repo_folder(model.repo)
    is_whole = not model.file and not model.quantization
    absent = f"found no such model in {folder.parent}; pronk list shows what is there"
    if not folder.is_dir():
        refuse(model, absent)
    try:
        before = _size(folder)
        if not is_whole:
            for snapshot in list(_snapshots(model)):
                _remove_files(model, snapshot)
        used = {path.resolve() for path in _files(folder / "snapshots")}
        if is_whole or not used:
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
    """Return the number of bytes of all files below a folder; a link counts 0."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return sum(path.stat().st_size for path in files)


def check_hash(file: Path, expected: str, name: str) -> None:
    """Check the SHA-256 of a downloaded file.

    If it is not ``expected``, delete the file and raise a CheckpointError that names it ``name``.
    """
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        file.resolve().unlink()
        file.unlink(missing_ok=True)
        problem = f"expected the SHA-256 {expected[:16]}…, found {found[:16]}…"
        refuse(name, f"{problem}; download it again")
