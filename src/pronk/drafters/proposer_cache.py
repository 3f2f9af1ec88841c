"""A cache of one target's proposers, by the options of their drafters."""

from __future__ import annotations

from functools import lru_cache
from threading import RLock
from typing import Any

from pronk.drafters.registry import make_drafter
from pronk.errors import OptionError
from pronk.speculation.proposer import Drafter, Proposer, bind_proposer
from pronk.speculation.target import Target

__all__ = ["ProposerCache"]

# Maximum numbers of cached proposers. Those with draft models take memory from the target's KV cache.
_MAX_WITHOUT_MODELS, _MAX_WITH_MODELS = 64, 4


class ProposerCache:
    """An LRU cache of proposers: equal drafters share one proposer and its learned state.

    Freeing a draft model: its weights, keys and values belong to its proposers alone, since
    :meth:`~pronk.speculation.target.Target.load_shared` and :class:`~pronk.kv_cache.budget.KVBudget` hold weak
    references. A proposer is held by its running requests, by callers, and by this cache, which keeps at most 4 with
    :attr:`~pronk.speculation.proposer.Proposer.models` beside the target's own. The memory is freed with the last
    holder; the pool's share of the KV memory is divided again when the next draft model joins.

    The cache is thread-safe. Binding a drafter, which may read files, holds a lock of its own: decoding and lookups of
    cached proposers do not wait for it.

    Attributes:
        default: proposer of the target's own drafter; never evicted or reloaded.
    """

    def __init__(self, target: Target, drafter: Drafter) -> None:
        """Bind the target's own drafter; raises as :meth:`get_proposer` does."""
        self._target = target
        self._cache_lock, self._bind_lock = RLock(), RLock()
        self._cached: dict[Drafter, Proposer[Any]] = {}  # least recently used first
        if isinstance(drafter, Proposer):
            self.default = bind_proposer(drafter, target)
        else:
            _check_hashable(drafter)
            self.default = self._cached[drafter] = bind_proposer(drafter, target)

    def get_proposer(self, spec: str | Drafter) -> Proposer[Any]:
        """Return the proposer of a drafter or of its name; a proposer is bound to the target and returned.

        If the checkpoint of its draft model was rewritten on disk, a new proposer loads the new one.

        Raises:
            OptionError: the drafter or option is unknown, or the drafter does not fit the target.
            CheckpointError: the draft model cannot be loaded.
        """
        drafter = _parse(spec) if isinstance(spec, str) else make_drafter(spec)
        if isinstance(drafter, Proposer):
            return bind_proposer(drafter, self._target)
        _check_hashable(drafter)
        found = self._find(drafter)
        return self._bind(drafter) if found is None else found

    def _bind(self, drafter: Drafter) -> Proposer[Any]:
        with self._bind_lock:
            found = self._find(drafter)  # another thread may have bound it meanwhile
            if found is None:
                found = bind_proposer(drafter, self._target)
                self._store(drafter, found)
            return found

    def _find(self, drafter: Drafter) -> Proposer[Any] | None:
        """Return the cached proposer, or ``None`` if none is cached or its draft model's files have changed."""
        with self._cache_lock:
            found = self._cached.pop(drafter, None)
            if found is None or not all(map(self._target.is_current, found.models)):
                return None
            self._cached[drafter] = found  # most recently used
            return found

    def _store(self, drafter: Drafter, proposer: Proposer[Any]) -> None:
        with self._cache_lock:
            self._cached[drafter] = proposer
            others = [(each, bool(found.models)) for each, found in self._cached.items() if found is not self.default]
            with_models = [each for each, has in others if has]
            without = [each for each, has in others if not has]
            for each in (*with_models[:-_MAX_WITH_MODELS], *without[:-_MAX_WITHOUT_MODELS]):
                del self._cached[each]


_parse = lru_cache(256)(make_drafter)


def _check_hashable(drafter: Drafter) -> None:
    try:
        hash(drafter)
    except TypeError as error:
        name = getattr(drafter, "name", type(drafter).__name__)
        msg = f"drafter {name}: expected hashable options, found an {error}; use a frozen dataclass of hashable values"
        raise OptionError(msg) from error
