"""Context of a sampler: the tokens before the next one."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["TokenContext"]


class TokenContext:
    """A request's committed tokens, followed by tentative tokens.

    ``committed`` is the request's own list, not a copy, so tokens that the request appends are visible here at once.
    The first ``num_prompt`` committed tokens are the prompt, by default all.
    """

    def __init__(self, committed: Sequence[int], num_prompt: int | None = None) -> None:
        self.committed = committed  # owned by the request and not modified here
        self.tentative: list[int] = []  # tokens appended during verification or drafting
        self.num_prompt = len(committed) if num_prompt is None else num_prompt

    def __len__(self) -> int:
        return len(self.committed) + len(self.tentative)

    @property
    def num_generated(self) -> int:
        """Number of tokens after the prompt, draft tokens included."""
        return len(self) - self.num_prompt

    def last_tokens(self, count: int) -> list[int]:
        """Return the last ``count`` tokens, or all if there are fewer; ``count`` is at least 1."""
        num_committed = max(0, count - len(self.tentative))
        return [*self.committed[max(0, len(self.committed) - num_committed) :], *self.tentative[-count:]]
