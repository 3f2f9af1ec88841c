"""The KV cache that a draft model has for one request, and what is in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from pronk.drafters.shared.vocabulary.translation import Reencoder
from pronk.kv_cache.blocks import BlockTable
from pronk.speculation.tree import TokenTree

__all__ = ["DraftLane"]


@dataclass
class DraftLane:
    """The KV cache that a draft model has for one request, and the cached tokens."""

    block_table: BlockTable = field(default_factory=BlockTable)  # KV slots of ``tokens``, then of the nodes of ``tree``
    tokens: list[int] = field(default_factory=list)  # cached tokens, as ids of the draft model: text, then draft tokens
    start: int = 0  # index in the text of the first one of ``tokens``; what is before it is not read
    # For drafters that propose trees: the cached nodes of the last proposal, as ids of the draft model. The root is the
    # text's token after ``tokens``. ``None`` if no tree is cached.
    tree: TokenTree | None = None
    num_target_committed: int = 0  # number of committed tokens at the last proposal, counted in the target's tokens
    num_committed: int = 0  # number of leading ``tokens`` that cannot change; only these may enter the prefix cache
    salt: bytes = b""  # the request's salt for prefix caching
    reencoder: Reencoder | None = None  # re-encodes the text for the draft model; ``None`` if the ids are equal
