"""The target model as seen by drafters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import RLock
from time import perf_counter
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from pronk.cache.budget import KVBudget
from pronk.cache.paged import PagedCache, SavedFeature
from pronk.checkpoint.gguf.checkpoint import is_gguf
from pronk.models.cost_model import CostModel
from pronk.models.decoder import Decoder
from pronk.models.loader import Fingerprint
from pronk.models.model_runner import ModelRunner
from pronk.text.tokenizer import Tokenizer

Model = TypeVar("Model")


@dataclass(frozen=True, eq=False)
class Target:
    """Target model with its cache, tokenizer and loaded draft models.

    Argument of :meth:`Drafter.bind`.

    Attributes:
        budget: memory budget shared by all KV caches; ``None`` is unlimited.
        folder: checkpoint folder or GGUF file of the target; ``None`` if unknown.
        lock: engine lock; hold it while changing the layout of ``cache``.
        shared_models: draft models and trained drafters loaded by :meth:`load_shared`.
        model_files: for each loaded model, its folder and the latest modification time (ns) of the
            weight files.
        runner: runs forward passes, for drafters that run rows through the target's first layers.
        clock: returns the time in seconds, for the durations of drafters.
    """

    decoder: Decoder
    cache: PagedCache
    tokenizer: Tokenizer | None = None
    budget: KVBudget | None = None
    folder: Path | None = None
    lock: AbstractContextManager[Any] = field(default_factory=RLock, repr=False)
    shared_models: WeakValueDictionary[tuple[str, ...], Any] = field(
        default_factory=WeakValueDictionary, repr=False
    )
    model_files: WeakKeyDictionary[Any, tuple[Path, int]] = field(
        default_factory=WeakKeyDictionary, repr=False
    )
    runner: ModelRunner | None = field(default=None, repr=False)
    clock: Callable[[], float] = field(default=perf_counter, repr=False)

    @property
    def vocabulary(self) -> str | None:
        """Fingerprint of the tokenizer, stored in files of token ids.

        ``None`` without a tokenizer.
        """
        return None if self.tokenizer is None else self.tokenizer.fingerprint

    @property
    def costs(self) -> CostModel:
        """Measured costs of the target's forward passes.

        Without measurements if there is no runner.
        """
        return CostModel() if self.runner is None else self.runner.cost_model

    @property
    def is_split(self) -> bool:
        """Whether the attention heads are split among several processes (tensor parallelism)."""
        return self.cache.config.num_kv_heads != self.decoder.config.num_kv_heads

    @cached_property
    def fingerprint(self) -> Fingerprint | None:
        """Fingerprint of the checkpoint; ``None`` without ``folder``."""
        return None if self.folder is None else Fingerprint.of(self.folder)

    def matches(self, model: Fingerprint) -> bool:
        """Return whether a drafter that was trained on ``model`` works with this target.

        A quantized target has other weights than the original model, but the original's drafter
        still works. Therefore only the architecture of a quantized target is compared, and nothing
        if the fingerprint is unknown.
        """
        fingerprint = self.fingerprint
        if fingerprint is None or fingerprint == model:
            return True
        assert self.folder is not None
        quantized = self.decoder.config.quantization is not None or is_gguf(self.folder)
        return quantized and fingerprint.architecture == model.architecture

    def load_shared(self, folder: Path, *kind: str, load: Callable[[], Model]) -> Model:
        """Return the draft model of ``folder``, loaded once and shared by all drafters that use it.

        Models loaded from one folder in different ways, for example with two dtypes, have different
        ``kind`` strings. If the weight files of the folder have changed, the model is loaded again.
        The target keeps weak references; :class:`~pronk.drafting.proposer_cache.ProposerCache`
        keeps models alive.
        """
        modified = _modified_ns(folder)
        key = (f"{folder}@{modified}", *kind)
        model: Model | None = self.shared_models.get(key)
        if model is None:
            model = self.shared_models[key] = load()
            self.model_files[model] = folder, modified
        return model

    def is_current(self, model: object) -> bool:
        """Return False if weight files of ``model`` were rewritten since loading.

        True if merely deleted.
        """
        folder, modified = self.model_files.get(model, (None, 0))
        return folder is None or _modified_ns(folder) in {0, modified}

    def save_feature(self, feature: SavedFeature, owner: object) -> None:
        """Save a feature of every token beside its keys and values, while ``owner`` exists.

        Raises ``OptionError`` if the memory budget is too small, or running requests occupy memory
        that must be freed.
        """
        with self.lock:
            if self.budget is None:
                self.cache.save_feature(feature, owner)
            else:
                self.budget.save_feature(self.cache, feature, owner)


def _modified_ns(folder: Path) -> int:
    """Return the latest modification time (ns) of a file or of a folder's weight files.

    0 if none exist.
    """
    files = [folder] if folder.is_file() else folder.glob("*.safetensors")
    return max((file.stat().st_mtime_ns for file in files), default=0)
