"""The target model as seen by drafters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import Any

from pronk.cache.budget import KVBudget
from pronk.cache.paged import PagedCache, SavedFeature
from pronk.checkpoint.gguf.checkpoint import is_gguf
from pronk.drafting.loaded_models import LoadedModels
from pronk.models.cost_model import CostModel
from pronk.models.decoder import Decoder
from pronk.models.loader import Fingerprint
from pronk.models.model_runner import ModelRunner
from pronk.text.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Target:
    """Target model as drafters see it: its forward passes, KV cache, tokenizer and files.

    Argument of :meth:`Drafter.bind`.

    Attributes:
        runner: runs the target's forward passes and measures their durations.
        tokenizer: the target's tokenizer; ``None`` in tests without text.
        budget: memory budget shared by all KV caches; ``None`` is unlimited.
        folder: checkpoint folder or GGUF file of the target; ``None`` if unknown.
        lock: the engine's lock, held during a step; hold it while changing the layout of ``cache``.
        loaded_models: draft models and trained drafters of this target's drafters.
    """

    runner: ModelRunner = field(repr=False)
    tokenizer: Tokenizer | None = None
    budget: KVBudget | None = None
    folder: Path | None = None
    lock: AbstractContextManager[Any] = field(default_factory=RLock, repr=False)
    loaded_models: LoadedModels = field(default_factory=LoadedModels, repr=False)

    @property
    def decoder(self) -> Decoder:
        """The target's layers, embedding and LM head; read-only."""
        return self.runner.decoder

    @property
    def cache(self) -> PagedCache:
        """The target's KV cache; drafters read it, and save features in it."""
        return self.runner.cache

    @property
    def clock(self) -> Callable[[], float]:
        """Function that returns the time in seconds, to measure how long drafters take."""
        return self.runner.clock

    @property
    def vocabulary(self) -> str | None:
        """Fingerprint of the tokenizer, stored in files of token ids.

        ``None`` without a tokenizer.
        """
        return None if self.tokenizer is None else self.tokenizer.fingerprint

    @property
    def costs(self) -> CostModel:
        """Measured costs of the target's forward passes."""
        return self.runner.cost_model

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
