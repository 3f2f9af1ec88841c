"""The KV cache that a drafter with a model of its own has for one request.

A :class:`DraftCache` holds the keys and values of a request's text, in blocks of the drafter's own
pool. Rows that it lacks are computed again; a new cache may begin in the middle of a long text, and
proposals can then differ, but not the text. ::

    text      a b c d e f g      f and g are new since the last proposal
    start         2              the drafter skipped a and b
    tokens        c d e          rows that are cached
    tree                f ┬ x    draft rows of the last proposal; f became text, so its row stays
                          └ y

After an accepted draft token, its row is already there. Rows of rejected draft tokens are dropped
at the next proposal, when the cache is aligned with the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from pronk.base.arrays import DType
from pronk.base.interrupts import uninterrupted
from pronk.cache.blocks import BlockTable
from pronk.cache.paged import PagedCache
from pronk.checkpoint.config import ModelConfig
from pronk.drafting.shared.common_prefix import common_prefix_length
from pronk.drafting.shared.vocabulary.reencoder import Reencoder
from pronk.drafting.target import Target
from pronk.sampling.tree import TokenTree


@dataclass(eq=False)
class DraftCache:
    """Keys and values of one request's text in a drafter's own KV pool.

    A proposal of a drafter that runs its passes itself, without a
    :class:`~pronk.drafting.shared.draft_runner.DraftRunner`:

    1. :meth:`align` drops the rows that are not those of ``context.tokens``.
    2. ``pool.prepare(block_table, length)`` allocates KV slots for the text and the draft tokens to
       come; it raises ``CacheFullError`` if the pool is full.
    3. :meth:`ModelRunner.forward` runs a ``BatchEntry(block_table, tree)`` with the tokens of the
       text after the cached ``tokens``, at least one, and then with each draft token.
    4. :meth:`append` commits the rows of each pass before the next one.

    :meth:`release` frees the blocks in ``Proposer.stop`` and ``Proposer.on_preempt``.

    Attributes:
        pool: the drafter's KV pool, which owns the blocks.
        reencoder: gives the text in the drafter's vocabulary; ``None`` if the ids are the target's.
        block_table: KV slots of ``tokens``; those of ``tree`` follow.
        tokens: cached tokens, ids of the drafter's vocabulary.
        start: index in the text of the first of ``tokens``; the text before it is not read.
        tree: cached draft rows, for drafters of trees. The root is the text's token after
            ``tokens``. ``None`` if no tree is cached.
        num_committed: number of committed tokens of the text at the last proposal.
        num_final: number of leading ``tokens`` that cannot change, and may enter the prefix cache.
        salt: hashed into the keys of the prefix cache, as in ``DraftContext.salt``.
    """

    pool: PagedCache
    reencoder: Reencoder | None = None
    block_table: BlockTable = field(default_factory=BlockTable)
    tokens: list[int] = field(default_factory=list)
    start: int = 0
    tree: TokenTree | None = None
    num_committed: int = 0
    num_final: int = 0
    salt: bytes = b""

    @property
    def num_read(self) -> int:
        """Number of tokens of the text, from its beginning, that need no further forward pass."""
        return self.start + len(self.tokens) + len(self.tree or ())

    def match_prefix(self, text: Sequence[int], salt: bytes) -> None:
        """Fill an empty cache with the longest prefix of ``text`` in the pool's prefix cache.

        Args:
            text: token ids of the draft model.
            salt: hashed into the keys of the prefix cache; blocks of requests with another salt are
                not found. This cache registers its own blocks with this salt, too.
        """
        self.salt = salt
        if self.block_table.blocks or self.tokens:
            return
        cached = self.pool.match_prefix(text, salt)
        if cached is not None:
            self.block_table = cached
            self.tokens = list(text[: cached.length])

    def register_prefix(self) -> None:
        """Add the blocks of final tokens to the pool's prefix cache."""
        self.pool.cache_blocks(self.block_table, self.tokens, self.salt, self.num_final)

    def append(self, new: Sequence[int]) -> None:
        """Commit the rows of tokens whose keys and values a forward pass has just written.

        ``new`` are all rows of the pass, a chain, in order. Their KV slots become those of
        ``tokens``, and the next pass runs behind them. Without this call, the next pass overwrites
        them.
        """
        with uninterrupted():
            self.pool.commit_slots(self.block_table, range(len(new)))
            self.tokens += new

    def rollback(self, length: int) -> None:
        """Drop the cached tokens after the first ``length``; keep their blocks."""
        is_unchanged = length == len(self.tokens) == self.block_table.length
        if is_unchanged and self.pool.states is None:
            return
        with uninterrupted():
            del self.tokens[length:]
            num_left = self.pool.rollback(self.block_table, len(self.tokens))
            del self.tokens[num_left:]

    def keep_common_prefix(self, text: Sequence[int], first: int, most: int) -> None:
        """Drop the cached tokens after the first ``most``, and those that are not the text's.

        Unlike :meth:`align`, this method can keep the row of the last token. It is for caches
        without ``tree``, whose first token is ``text[first]``.
        """
        num_kept = common_prefix_length(self.tokens, text, self.num_committed, first)
        self.rollback(min(num_kept, most))

    def skip_to(self, position: int, text: Sequence[int], first: int) -> None:
        """Count the first ``position`` tokens of ``text[first:]`` as cached; release their blocks.

        The drafter cannot run the tokens that the cache lacks. No later row attends to released
        rows, so positions do not change. ``position`` must be at least ``len(tokens)``.
        """
        self.tokens += text[first + len(self.tokens) : first + position]
        self.rollback(position)
        self.pool.release_before(self.block_table, position)
        if not self.block_table.blocks:
            self.block_table.num_released = position // self.pool.block_size

    def begin_at(self, start: int) -> None:
        """Drop all rows, and let the cache begin at the text's token ``start``.

        Earlier tokens are not read.
        """
        self.rollback(0)
        self.tree = None
        self.start = start

    def align(self, text: Sequence[int], num_unchanged: int = 0) -> None:
        """Drop all rows but those of a prefix of ``text``; rows of accepted draft tokens stay.

        The first step of a proposal. Afterwards, ``text[start + len(tokens):]`` has to be run.

        The row of the last token of ``text`` is dropped, too: its logits are needed again. The
        first ``num_unchanged`` tokens of ``text`` are known to be those of the last call.
        """
        start = self.start
        num_kept = common_prefix_length(self.tokens, text, num_unchanged - start, start)
        num_wanted = len(text) - 1 - start
        if self.tree is not None and num_kept == len(self.tokens) < num_wanted:
            path = _matching_path(self.tree, text[start + num_kept : -1])
            self.pool.commit_slots(self.block_table, path)
            self.tokens += text[start + num_kept : start + num_kept + len(path)]
        else:
            self.rollback(max(0, min(num_kept, num_wanted)))
        self.tree = None

    def release(self) -> None:
        """Free the blocks and clear the cache, for a request that ends or is preempted."""
        with uninterrupted():
            self.register_prefix()
            self.pool.release(self.block_table)
            self.tokens.clear()
            self.tree = None
            self.start = 0


def open_pool(
    target: Target,
    config: ModelConfig,
    dtype: DType | None = None,
    pool: Callable[..., PagedCache] | None = None,
) -> PagedCache:
    """Return a new KV pool for a drafter; it shares the memory budget of the target's pool.

    Args:
        target: the target model.
        config: the drafter's model.
        dtype: dtype of the model, by default that of the target.
        pool: class of the pool, or a function with its arguments; ``None``: :class:`PagedCache`.
    """
    target_cache = target.cache
    make_pool = partial(pool or PagedCache, kernels=target.decoder.kernels)
    dtype = dtype or target_cache.dtype
    share_prefixes = target_cache.prefix_cache is not None
    if target.budget is not None:
        with target.lock:  # the other KV pools shrink, so no step may run meanwhile
            return target.budget.add(config, dtype, make_pool, share_prefixes=share_prefixes)
    return make_pool(
        config,
        num_blocks=target_cache.allocator.num_blocks,
        block_size=target_cache.block_size,
        dtype=dtype,
        poison=target_cache.poison,
        share_prefixes=share_prefixes,
    )


def _matching_path(tree: TokenTree, text: Sequence[int]) -> list[int]:
    """Return the longest path of nodes from the root whose tokens are the first of ``text``."""
    path: list[int] = []
    node: int | None = 0 if text and tree.tokens[0] == text[0] else None
    while node is not None:
        path.append(node)
        node = tree.child(node, text[len(path)]) if len(path) < len(text) else None
    return path
