"""The tokens that a choice follows."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["TokenContext"]


class TokenContext:
    """A request's certain tokens, and behind them those that are tried out.

    The certain tokens are the request's own list: nothing is copied, and what it appends is here at once.

    Attributes:
        certain: the prompt and the output so far; the request's, not to be changed here.
        ahead: tokens after them, of a walk that is under way or of a drafter's guesses.
        num_prompt: how many of the certain tokens are the prompt.
    """

    def __init__(self, certain: Sequence[int], num_prompt: int | None = None) -> None:
        """``num_prompt`` is all of ``certain`` by default."""
        self.certain = certain
        self.ahead: list[int] = []
        self.num_prompt = len(certain) if num_prompt is None else num_prompt

    def __len__(self) -> int:
        return len(self.certain) + len(self.ahead)

    @property
    def num_chosen(self) -> int:
        """Tokens after the prompt."""
        return len(self) - self.num_prompt

    def last(self, count: int) -> list[int]:
        """The last ``count`` tokens, all if there are fewer; ``count`` is at least 1."""
        certain = max(0, count - len(self.ahead))
        return [*self.certain[max(0, len(self.certain) - certain) :], *self.ahead[-count:]]
