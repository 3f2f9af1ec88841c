"""The target model as drafters see it.

What a drafter may need of the target, as its ``Capabilities`` declare, and where it finds it:

- outputs of layers: in ``Outcome.hidden`` for the rows of a step; for all tokens of a text in the
  target's KV cache, after :meth:`Target.save_feature`
- logits: in ``Outcome.logits``
- rows through the first layers: ``Target.runner.run_first_layers``
- keys and values of layers: ``Target.cache``

Drafters never change the target's weights or the text's rows in its KV cache.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import Any

from pronk.base.errors import OptionError
from pronk.cache.budget import KVBudget
from pronk.cache.paged import PagedCache, SavedFeature
from pronk.checkpoint.gguf.checkpoint import is_gguf
from pronk.drafting.loaded_models import LoadedModels
from pronk.models.cost_model import CostModel
from pronk.models.decoder import Decoder
from pronk.models.loader import Fingerprint
from pronk.models.model_runner import ModelRunner
from pronk.sampling.tree_size import DEFAULT_MAX_TREE
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
        max_tree: maximum number of rows of a request in a forward pass.
        lock: the engine's lock, which it holds during a step. A drafter that allocates a KV pool or
            a feature outside of a step takes the lock, because the arrays of ``cache`` may move.
        loaded_models: draft models and trained drafters of this target's drafters, each of them
            once.
    """

    runner: ModelRunner = field(repr=False)
    tokenizer: Tokenizer | None = None
    budget: KVBudget | None = None
    folder: Path | None = None
    max_tree: int = DEFAULT_MAX_TREE
    lock: AbstractContextManager[Any] = field(default_factory=RLock, repr=False)
    loaded_models: LoadedModels = field(default_factory=LoadedModels, repr=False)

    def check_rows(self, option: str, rows: int) -> None:
        """Raise an OptionError if a drafter asks for more rows than a request may have.

        Args:
            option: the drafter's option, such as ``suffix: num_nodes``.
            rows: its number of draft tokens, or of rows if it always takes all of them.
        """
        # An engine with a lower limit than usual cuts the trees of usual drafters.
        limit = max(self.max_tree, DEFAULT_MAX_TREE)
        if rows > limit:
            msg = f"{option}: expected at most {limit}, the limit max_tree, found {rows}; "
            raise OptionError(msg + f"set max_tree to {rows}")

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
    def tokenizer_fingerprint(self) -> str | None:
        """Fingerprint that drafters store in files of token ids; ``None`` without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.fingerprint

    @property
    def cost_model(self) -> CostModel:
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

    @property
    def is_quantized(self) -> bool:
        """Whether the checkpoint has quantized weights."""
        is_gguf_file = self.folder is not None and is_gguf(self.folder)
        return is_gguf_file or self.decoder.config.quantization is not None

    def matches(self, trained_on: Fingerprint) -> bool:
        """Return whether a drafter that was trained on the model ``trained_on`` fits this target.

        A quantized target has other weights than the original model, but the original's drafter
        still fits. Therefore only the architecture of a quantized target is compared, and nothing
        if the target's fingerprint is unknown.
        """
        fingerprint = self.fingerprint
        if fingerprint is None or fingerprint == trained_on:
            return True
        return self.is_quantized and fingerprint.architecture == trained_on.architecture

    def save_feature(self, feature: SavedFeature, owner: object) -> None:
        """Save a feature of every token beside its keys and values, while ``owner`` exists.

        ``owner`` is the drafter, or the object of the drafter, that reads the feature.

        Raises:
            OptionError: the memory budget is too small, or running requests occupy memory that must
                be freed.
        """
        with self.lock:
            if self.budget is None:
                self.cache.save_feature(feature, owner)
            else:
                self.budget.save_feature(self.cache, feature, owner)
