"""A cache of the proposers of one target model, keyed by drafter (a class and its options)."""

from __future__ import annotations

from functools import lru_cache
from threading import RLock
from typing import Any

from pronk.base.errors import OptionError
from pronk.drafting.proposer import Drafter, Proposer, bind_proposer
from pronk.drafting.registry import make_drafter
from pronk.drafting.target import Target

_MAX_WITHOUT_MODEL = 64  # maximum number of cached proposers without a draft model
# maximum number of cached proposers with a draft model, which takes memory from the KV cache
_MAX_WITH_MODEL = 4

# Key of a cached proposer: the drafter, and the adapter of its requests. ``None`` in place of an
# adapter: the proposer serves all requests.
_Key = tuple[Drafter, str | None]


class ProposerCache:
    """An LRU cache of proposers: equal drafters share one proposer and its learned state.

    A draft model is freed with its last proposer:
    :class:`~pronk.drafting.loaded_models.LoadedModels` and :class:`~pronk.cache.budget.KVBudget`
    hold only weak references. Its KV memory is divided
    among the other KV caches when the next draft model is loaded.

    The cache is thread-safe. Binding a drafter may read files for seconds, so it holds a lock of
    its own, and other threads can look up cached proposers meanwhile.

    Attributes:
        default: proposer of requests that select neither a drafter nor an adapter; never evicted or
            reloaded.
    """

    def __init__(self, target: Target, drafter: Drafter) -> None:
        """Bind the default ``drafter``; the errors are those of :meth:`get_proposer`."""
        self._target = target
        self._cache_lock = RLock()  # held while ``_cached`` is read or changed
        self._bind_lock = RLock()  # held while a drafter is bound
        self._drafter = drafter
        # in order of use, the least recently used first
        self._cached: dict[_Key, Proposer[Any]] = {}
        if isinstance(drafter, Proposer):  # a drafter that is its own proposer is not cached
            self.default = bind_proposer(drafter, target)
        else:
            _check_hashable(drafter)
            self.default = self._cached[drafter, None] = bind_proposer(drafter, target)

    def get_proposer(self, spec: str | Drafter | None, adapter: str | None = None) -> Proposer[Any]:
        """Return the cached proposer of a drafter, or bind and cache a new one.

        ``spec`` may be text, such as ``"suffix(num_nodes=8)"``; ``None`` is the default. A drafter
        that keeps texts of other requests has a proposer for each ``adapter``
        (:meth:`Drafter.for_adapter`). A proposer whose draft model was rewritten on disk is
        replaced by one that loads the new files. If ``spec`` is itself a proposer, it is bound to
        the target and not cached. Raises ``OptionError`` if the drafter or option is unknown, or
        the drafter does not fit the target, ``CheckpointError`` if the draft model cannot be
        loaded.
        """
        drafter = self._drafter if spec is None else spec
        drafter = (
            _make_drafter_cached(drafter) if isinstance(drafter, str) else make_drafter(drafter)
        )
        own = None if adapter is None else drafter.for_adapter()
        if own is None and spec is None:
            return self.default
        if isinstance(drafter, Proposer):
            return bind_proposer(drafter, self._target)
        _check_hashable(drafter)
        key = (drafter, None) if own is None else (own, adapter)
        proposer = self._get_current(key)
        if proposer is None:
            with self._bind_lock:
                # another thread may have bound the drafter since the first lookup
                proposer = self._get_current(key)
                if proposer is None:
                    proposer = bind_proposer(key[0], self._target)
                    self._insert(key, proposer)
        return proposer

    def _get_current(self, key: _Key) -> Proposer[Any] | None:
        """Return the cached proposer or ``None``.

        Drop a proposer whose draft model has changed on disk.
        """
        with self._cache_lock:
            proposer = self._cached.pop(key, None)
            is_current = self._target.loaded_models.is_current
            if proposer is None or not all(map(is_current, proposer.models)):
                return None
            self._cached[key] = proposer  # moved to the end, as the most recently used
            return proposer

    def _insert(self, key: _Key, proposer: Proposer[Any]) -> None:
        with self._cache_lock:
            self._cached[key] = proposer
            evictable = [
                (key, cached) for key, cached in self._cached.items() if cached is not self.default
            ]
            with_models = [key for key, cached in evictable if cached.models]
            without_models = [key for key, cached in evictable if not cached.models]
            for old in (*with_models[:-_MAX_WITH_MODEL], *without_models[:-_MAX_WITHOUT_MODEL]):
                del self._cached[old]


# Cached: each request of a server names a drafter, and a few names with options cover most
# requests.
_make_drafter_cached = lru_cache(256)(make_drafter)


def _check_hashable(drafter: Drafter) -> None:
    try:
        hash(drafter)
    except TypeError as error:
        name = getattr(drafter, "name", type(drafter).__name__)
        msg = (
            f"drafter {name}: expected hashable options, found an {error}; use a frozen dataclass "
            "of hashable values"
        )
        raise OptionError(msg) from error
