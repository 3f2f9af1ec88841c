"""Checkpoints: copies of the states of recurrent layers after prefixes of texts.

Keys and values of any prefix can be shared. A state is that of one prefix only, so a prompt goes
on from the longest cached prefix that has a checkpoint, and reads the tokens after it again. Where
checkpoints are written decides how many these are: at the ends of the blocks before the places
where the next prompt of a conversation may part from this text (``StateTable.wanted``), at the end
of the last block of the text so far, and behind it at ends that are multiples of 2, 4, 8, … blocks.
"""

from __future__ import annotations

from collections.abc import Sequence


class Checkpoints:
    """Slots of the checkpoints of a :class:`~pronk.cache.states.StatePool`, by digest.

    The digest of a checkpoint is that of the last KV block of its prefix, as in
    :class:`~pronk.cache.prefix.PrefixCache`. The least recently used checkpoint comes first.
    """

    def __init__(self) -> None:
        self._slots: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def slots(self) -> list[int]:
        """Return the slots of all checkpoints."""
        return list(self._slots.values())

    def slot_of(self, digest: bytes) -> int | None:
        """Return the state slot of a checkpoint; ``None`` if there is none.

        ``digest`` is that of the last KV block of the checkpoint's prefix. The order of use does
        not change.
        """
        return self._slots.get(digest)

    def find(self, digests: Sequence[bytes]) -> tuple[int, int] | None:
        """Return number of blocks and state slot of the longest prefix with a checkpoint.

        ``digests`` are those of the text's cached blocks, from the first on. The checkpoint becomes
        the most recently used. ``None``: no prefix has a checkpoint.
        """
        for number in range(len(digests), 0, -1):
            digest = digests[number - 1]
            slot = self._slots.pop(digest, None)
            if slot is not None:
                self._slots[digest] = slot
                return number, slot
        return None

    def add(self, digest: bytes, slot: int) -> bool:
        """Add the checkpoint in a state slot as the most recently used one.

        Return False if there is one of this digest already; then ``slot`` is not used.
        """
        known = self._slots.pop(digest, None)
        if known is not None:
            self._slots[digest] = known
            return False
        self._slots[digest] = slot
        return True

    def remove(self, digest: bytes) -> int | None:
        """Remove the checkpoint of a digest; return its state slot, or ``None`` without one."""
        return self._slots.pop(digest, None)

    def remove_oldest(self) -> int | None:
        """Remove the least recently used checkpoint; return its state slot.

        ``None``: there are no checkpoints.
        """
        digest = next(iter(self._slots), None)
        return None if digest is None else self._slots.pop(digest)

    def clear(self) -> list[int]:
        """Remove all checkpoints; return their slots."""
        slots = list(self._slots.values())
        self._slots.clear()
        return slots
