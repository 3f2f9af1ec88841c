"""What a drafter may ask of the model that it guesses for."""

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

from pronk.execution.model_runner import ModelRunner
from pronk.kv_cache.budget import KVBudget
from pronk.kv_cache.paged import PagedCache
from pronk.models.decoder import Decoder
from pronk.models.fingerprint import Fingerprint
from pronk.quantization.gguf.checkpoint import is_gguf
from pronk.speculation.acceptance_stats import AcceptanceStats
from pronk.speculation.cost_model import CostModel
from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["Target"]

Model = TypeVar("Model")


@dataclass(frozen=True)
class Target:
    """The model that a drafter guesses for; given once, when both are brought together.

    A drafter that reads outputs of layers for the whole text asks for them to be kept (:meth:`keep_hidden`).

    Attributes:
        decoder: the model.
        cache: its keys and values.
        tokenizer: its tokenizer, or ``None`` where nobody knows what the ids mean.
        budget: the memory for keys and values, which draft models share, or ``None`` where nobody counts it.
        folder: its checkpoint, or ``None``.
        lock: held while its cache is changed, which is in use while requests are decoded.
        drafts: the draft models and trained drafters at work beside it, by folder and kind; see :meth:`share`.
        written: where each of these is from, and when that was written.
        times: what its passes have taken.
        acceptance_stats: how often guesses were right, where requests may know of others'.
        runner: makes its passes, for drafters that run its first layers; ``None`` is one of their own.
        clock: gives seconds.
    """

    decoder: Decoder
    cache: PagedCache
    tokenizer: Tokenizer | None = None
    budget: KVBudget | None = None
    folder: Path | None = None
    lock: AbstractContextManager[Any] = field(default_factory=RLock, repr=False, compare=False)
    drafts: WeakValueDictionary[tuple[str, ...], Any] = field(
        default_factory=WeakValueDictionary, repr=False, compare=False
    )
    written: WeakKeyDictionary[Any, tuple[Path, int]] = field(
        default_factory=WeakKeyDictionary, repr=False, compare=False
    )

    times: CostModel = field(default_factory=CostModel, repr=False, compare=False)
    acceptance_stats: AcceptanceStats | None = field(default=None, repr=False, compare=False)
    runner: ModelRunner | None = field(default=None, repr=False, compare=False)
    clock: Callable[[], float] = field(default=perf_counter, repr=False, compare=False)

    @property
    def vocabulary(self) -> str | None:
        """Fingerprint of the tokenizer, by which files of token ids are told apart, or ``None``."""
        return None if self.tokenizer is None else self.tokenizer.fingerprint

    @property
    def split(self) -> bool:
        """Whether the cache here has some of its heads alone, and other processes the rest."""
        return self.cache.config.num_kv_heads != self.decoder.config.num_kv_heads

    @cached_property
    def fingerprint(self) -> Fingerprint | None:
        """What tells the model from others, or ``None`` where nobody knows its files."""
        return None if self.folder is None else Fingerprint.of(self.folder)

    def may_be(self, model: Fingerprint) -> bool:
        """Whether this may be ``model``, which a drafter was trained on.

        Quantizing a model changes all that its weights could be told by, and a drafter that knows the plain one still
        guesses well: there the architecture decides.
        """
        own = self.fingerprint
        if own is None or own == model:
            return True
        assert self.folder is not None
        quantized = self.decoder.config.quantization is not None or is_gguf(self.folder)
        return quantized and own.architecture == model.architecture

    def share(self, folder: Path, *kind: str, make: Callable[[], Model]) -> Model:
        """What is at work beside the target from this folder: made once, for all drafters that name it.

        ``kind`` tells apart what can be made of one folder. A folder that was written again is another one. Nothing is
        held here: it is gone when all of them are (see :class:`~pronk.drafters.proposer_cache.ProposerCache`).
        """
        stamp = _stamp(folder)
        key = (f"{folder}@{stamp}", *kind)
        found: Model | None = self.drafts.get(key)
        if found is None:
            found = self.drafts[key] = make()
            self.written[found] = folder, stamp
        return found

    def current(self, model: object) -> bool:
        """Whether :meth:`share` would give this again; where its folder is gone, there is nothing newer."""
        folder, stamp = self.written.get(model, (None, 0))
        return folder is None or _stamp(folder) in {0, stamp}

    def keep_hidden(self, layer: int, owner: object) -> None:
        """Let ``cache`` keep the output of layer number ``layer`` (1 is the first) for every token from now on.

        It may be forgotten when ``owner``, who reads it, is gone.

        Raises:
            OptionError: there is no memory for it, or requests are being decoded that would have to give some up.
        """
        with self.lock:
            if self.budget is None:
                self.cache.keep_hidden(layer, owner)
            else:
                self.budget.keep_hidden(self.cache, layer, owner)


def _stamp(folder: Path) -> int:
    """When weights were last written there, in a folder or in one file; 0 if there are none."""
    files = [folder] if folder.is_file() else folder.glob("*.safetensors")
    return max((file.stat().st_mtime_ns for file in files), default=0)
