"""The guessers of one model, by the drafters that they come from."""

from __future__ import annotations

from functools import lru_cache
from threading import RLock
from typing import Any

from pronk.drafters.registry import make_drafter
from pronk.errors import OptionError
from pronk.speculation.proposer import Drafter, Proposer, bind_proposer
from pronk.speculation.target import Target

__all__ = ["ProposerCache"]

# Those with models take memory from the target's keys and values; the others take next to none.
_MOST, _MOST_WITH_MODELS = 64, 4


class ProposerCache:
    """Equal drafters have one guesser, and with it one memory; those asked for longest ago are forgotten.

    Freeing a draft model: its weights, keys and values belong to its proposers alone, since
    :meth:`~pronk.speculation.target.Target.share` and :class:`~pronk.kv_cache.budget.KVBudget` hold weak references.
    A proposer is held by its running requests, by callers, and by this cache, which keeps at most 4 with
    :attr:`~pronk.speculation.proposer.Proposer.models` beside the target's own. The memory is freed with the last
    holder; the pool's share of the KV memory is divided again when the next draft model joins.

    Any number of threads may ask. A drafter is bound by one of them, under a lock of its own: those who decode, or ask
    for what is there already, do not wait for files to be read.

    Attributes:
        own: the guesser of the drafter that the target was given; it stays as it was loaded.
    """

    def __init__(self, target: Target, drafter: Drafter) -> None:
        """Bind the target's own drafter; errors are those of :meth:`of`."""
        self._target = target
        self._table, self._binding = RLock(), RLock()
        self._kept: dict[Drafter, Proposer[Any]] = {}  # in the order in which they were asked for
        if isinstance(drafter, Proposer):
            self.own = bind_proposer(drafter, target)
        else:
            _check_hashable(drafter)
            self.own = self._kept[drafter] = bind_proposer(drafter, target)

    def of(self, spec: str | Drafter) -> Proposer[Any]:
        """The guesser of a drafter, or of its name; a guesser is its own.

        If the folder of its model was written again, it is another one, with the new model.

        Raises:
            OptionError: no such drafter or option, or it does not go with this target.
            CheckpointError: its own model cannot be loaded.
        """
        drafter = _parse(spec) if isinstance(spec, str) else make_drafter(spec)
        if isinstance(drafter, Proposer):
            return bind_proposer(drafter, self._target)
        _check_hashable(drafter)
        found = self._find(drafter)
        return self._bind(drafter) if found is None else found

    def _bind(self, drafter: Drafter) -> Proposer[Any]:
        with self._binding:
            found = self._find(drafter)  # another thread may have been first
            if found is None:
                found = bind_proposer(drafter, self._target)
                self._keep(drafter, found)
            return found

    def _find(self, drafter: Drafter) -> Proposer[Any] | None:
        """What is kept of a drafter, unless its files are others by now."""
        with self._table:
            found = self._kept.pop(drafter, None)
            if found is None or not all(map(self._target.current, found.models)):
                return None
            self._kept[drafter] = found  # the latest now
            return found

    def _keep(self, drafter: Drafter, proposer: Proposer[Any]) -> None:
        with self._table:
            self._kept[drafter] = proposer
            others = [(each, bool(found.models)) for each, found in self._kept.items() if found is not self.own]
            with_models = [each for each, has in others if has]
            without = [each for each, has in others if not has]
            for each in (*with_models[:-_MOST_WITH_MODELS], *without[:-_MOST]):
                del self._kept[each]


_parse = lru_cache(256)(make_drafter)


def _check_hashable(drafter: Drafter) -> None:
    try:
        hash(drafter)
    except TypeError as error:
        name = getattr(drafter, "name", type(drafter).__name__)
        msg = (
            f"drafter {name}: expected what can be hashed, found an {error}; make it a frozen dataclass of such values"
        )
        raise OptionError(msg) from error
