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
    """State slots by the digest of the text's last block, least recently used first."""

    def __init__(self) -> None:
        self._slots: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def slots(self) -> list[int]:
        """Return the slots of all checkpoints."""
        return list(self._slots.values())

    def slot_of(self, digest: bytes) -> int | None:
        """Return the slot of the checkpoint of a digest; ``None`` if there is none."""
        return self._slots.get(digest)

    def find(self, digests: Sequence[bytes]) -> tuple[int, int] | None:
        """Return number of blocks and slot of the longest prefix with a checkpoint.

        ``digests`` are those of the text's cached blocks, from the first on. The checkpoint becomes
        the most recently used.
        """
        for number in range(len(digests), 0, -1):
            digest = digests[number - 1]
            slot = self._slots.pop(digest, None)
            if slot is not None:
                self._slots[digest] = slot
                return number, slot
        return None

    def add(self, digest: bytes, slot: int) -> bool:
        """Add a checkpoint; return False if there is one of this digest already."""
        known = self._slots.pop(digest, None)
        if known is not None:
            self._slots[digest] = known
            return False
        self._slots[digest] = slot
        return True

    def remove(self, digest: bytes) -> int | None:
        """Remove a checkpoint; return its slot, or ``None`` if there is none of this digest."""
        return self._slots.pop(digest, None)

    def remove_oldest(self) -> int | None:
        """Remove the least recently used checkpoint; return its slot, or ``None``."""
        digest = next(iter(self._slots), None)
        return None if digest is None else self._slots.pop(digest)

    def clear(self) -> list[int]:
        """Remove all checkpoints; return their slots."""
        slots = list(self._slots.values())
        self._slots.clear()
        return slots
