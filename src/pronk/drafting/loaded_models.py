"""Draft models and trained drafters that a target's drafters have loaded, each of them once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

Model = TypeVar("Model")


class LoadedModels:
    """The models that one target's drafters have loaded, held by weak references only.

    :class:`~pronk.drafting.proposer_cache.ProposerCache` keeps models alive, so that their memory
    is free after the last proposer that uses them. Iteration yields the models that are alive.
    """

    def __init__(self) -> None:
        # Keys: the folder with the modification time of its weights, then the ``kind``.
        self._models: WeakValueDictionary[tuple[str, ...], Any] = WeakValueDictionary()
        # Folder of each model, and the latest modification time (ns) of the weight files when they
        # were loaded.
        self._files: WeakKeyDictionary[Any, tuple[Path, int]] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._models)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._models.values())

    def get_or_load(self, folder: Path, *kind: str, load: Callable[[], Model]) -> Model:
        """Return the model of a folder, loaded on first use and if its weight files have changed.

        Args:
            folder: a checkpoint folder or a file.
            kind: how the model is loaded, such as the name of its drafter and its dtype. Models of
                one folder with different kinds are different models.
            load: loads the model; called if no model of this folder and kind is alive.
        """
        modified = _modified_ns(folder)
        key = (f"{folder}@{modified}", *kind)
        model: Model | None = self._models.get(key)
        if model is None:
            model = load()
            self._models[key] = model
            self._files[model] = folder, modified
        return model

    def is_current(self, model: object) -> bool:
        """Return False if weight files of ``model`` were rewritten since loading.

        True if the files were merely deleted.
        """
        folder, modified = self._files.get(model, (None, 0))
        return folder is None or _modified_ns(folder) in {0, modified}


def _modified_ns(path: Path) -> int:
    """Return the latest modification time (ns) of a file or of a folder's weight files.

    0 if none exist.
    """
    # Each request asks this: os.scandir takes a fifth of the time of Path.glob.
    try:
        with os.scandir(path) as files:
            weights = [file for file in files if file.name.endswith(".safetensors")]
            return max([file.stat().st_mtime_ns for file in weights], default=0)
    except NotADirectoryError:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
