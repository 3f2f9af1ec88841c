"""Token recycling (Luo et al. 2024): propose successors of each token from earlier logits.

A table keeps the ``top_k`` likeliest successors of each token, by the target's latest logits after
that token, at all nodes of earlier trees, rejected nodes included. The next tree grows from the
table, largest gain first. A node's gain is the product of the measured acceptance rates of the
ranks on its path; the likeliest successor has rank 0.

At temperatures above 0 the target's token is the argmax of its logits divided by the temperature
plus noise that is known before (:mod:`pronk.sampling.noise`). The table therefore keeps the
successors' logits, too, and ranks by this sum: rank 0 is the token that the earlier logits would
give at this position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from pronk.base.checks import check_flag, check_integer, check_path
from pronk.base.errors import OptionError, describe_error
from pronk.base.files.atomic import replace_file
from pronk.base.files.regular import check_regular
from pronk.base.keywords import known_keywords
from pronk.drafting.proposer import Capabilities, DraftContext, Drafter, Outcome, Proposer
from pronk.drafting.shared.likeliest import top_logits
from pronk.drafting.target import Target
from pronk.drafting.trie import Frontier, Trie
from pronk.sampling.tree import TokenTree
from pronk.sampling.tree_size import MAX_TREE

_FORMAT = "pronk-successors/1"

# Acceptance rates by rank before any measurement: 0.45 for rank 0, and for each further rank 0.35
# times the one before.
_PRIORS = {rank: 0.45 * 0.35**rank for rank in range(32)}


@dataclass
class Successors:
    """A table with one row per token: the likeliest successors of that token."""

    top_k: int  # maximum number of successors in a row
    # maximum number of rows; a full table evicts the row that was updated longest ago
    max_tokens: int
    # Maps a token id to its successors' ids, likeliest first. Rows are in order of their last
    # update, the oldest first.
    rows: dict[int, tuple[int, ...]] = field(default_factory=dict)
    # Logits of the successors in ``rows``, for rows that have them.
    logits: dict[int, tuple[float, ...]] = field(default_factory=dict)

    def get(self, token: int) -> tuple[int, ...]:
        """Return the successors of ``token``, likeliest first; empty for a token without a row."""
        return self.rows.get(token, ())

    def put(
        self, token: int, successors: Sequence[int], logits: Sequence[float] | None = None
    ) -> None:
        """Replace the row of ``token`` by the first ``top_k`` of ``successors``.

        ``logits`` are those of the successors; ``None`` if they are not known. A full table drops
        the row that was updated longest ago.
        """
        self.rows.pop(token, None)
        self.logits.pop(token, None)
        self.rows[token] = tuple(successors[: self.top_k])
        if logits is not None:
            self.logits[token] = tuple(logits[: self.top_k])
        if len(self.rows) > self.max_tokens:
            oldest = next(iter(self.rows))
            del self.rows[oldest]
            self.logits.pop(oldest, None)

    def put_first(self, token: int, successor: int) -> None:
        """Make ``successor`` the likeliest one of ``token``; the others keep their order.

        Its logit becomes that of the likeliest one so far.
        """
        old = self.rows.get(token, ())
        logits = self.logits.get(token)
        others = [number for number, other in enumerate(old) if other != successor]
        self.put(
            token,
            (successor, *[old[number] for number in others]),
            None if logits is None else (logits[0], *[logits[number] for number in others]),
        )


@dataclass
class RecyclingState:
    """State of token recycling for one request."""

    # the request's own table, or with the option ``shared`` the table of all requests
    successors: Successors
    # number of leading tokens of the text that :meth:`read_text` need not read again
    num_read: int = 0

    def read_text(self, text: Sequence[int], num_committed: int) -> None:
        """Make each unread token the likeliest successor of the token before it.

        Tokens from ``num_committed`` on are draft tokens, which do not count.
        """
        for token, successor in pairwise(text[max(0, self.num_read - 1) : num_committed]):
            self.successors.put_first(token, successor)
        self.num_read = num_committed


@known_keywords
@dataclass(frozen=True)
class Recycling(Drafter):
    """Options of token recycling.

    Attributes:
        num_nodes: maximum number of draft tokens per step, 1..1023.
        top_k: maximum number of successors per token, 1..32.
        max_tokens: maximum number of rows of a table, 16..1048576; the row updated longest ago is
            evicted first.
        shared: whether all requests share one table.
        table: file written by :meth:`RecyclingProposer.save` with the initial rows of each table,
            or ``None``.
    """

    name = "recycling"
    row_options = ("num_nodes",)

    num_nodes: int = 15
    top_k: int = 4
    max_tokens: int = 16384
    shared: bool = False
    table: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(f"{self.name}: num_nodes", self.num_nodes, 1, MAX_TREE - 1)
        check_integer(f"{self.name}: top_k", self.top_k, 1, 32)
        check_integer(f"{self.name}: max_tokens", self.max_tokens, 16, 1048576)
        check_flag(f"{self.name}: shared", self.shared)
        check_path(f"{self.name}: table", self.table)

    def bind(self, target: Target) -> RecyclingProposer:
        table = Successors(self.top_k, self.max_tokens)
        if self.table is not None:
            load_successors(Path(self.table), table, target.tokenizer_fingerprint)
        return RecyclingProposer(self, table, target)

    def for_adapter(self) -> Recycling | None:
        return self if self.shared else None


class RecyclingProposer(Proposer[RecyclingState]):
    """Proposer of token recycling, for all requests of a target."""

    name = Recycling.name
    capabilities = Capabilities(logits=True, observes_all_steps=False)

    def __init__(self, options: Recycling, table: Successors, target: Target) -> None:
        self.options = options
        self.target = target
        self._table = table

    def save(self, path: str | Path) -> None:
        """Write the shared table to a safetensors file.

        Raises ``OptionError`` if the table is not shared, or the file cannot be written.
        """
        if not self.options.shared:
            msg = (
                f"{self.name}: expected shared=True to save a table, found one for each request; "
                "set shared=True"
            )
            raise OptionError(msg)
        target = self.target
        fingerprint = None if target is None else target.tokenizer_fingerprint
        save_successors(Path(path), self._table, fingerprint)

    def start(self, prompt: Sequence[int]) -> RecyclingState:  # noqa: ARG002 - contexts hold the text
        table = self._table
        return RecyclingState(
            table
            if self.options.shared
            else replace(table, rows=dict(table.rows), logits=dict(table.logits))
        )

    def propose(self, contexts: Sequence[DraftContext[RecyclingState]]) -> list[TokenTree]:
        return list(map(self._build_tree, contexts))

    def observe(self, outcome: Outcome[RecyclingState]) -> None:
        state = outcome.state
        if outcome.logits is None or (self.options.shared and outcome.params.rejects):
            return
        # The logits below give the rows of the committed tokens, so ``read_text`` need not enter
        # their pairs of successive tokens. Of several nodes with the same token, the last one gives
        # the row.
        if state.num_read == outcome.position + 1:
            state.num_read += len(outcome.committed)
        successors = state.successors
        likeliest, logits = top_logits(outcome, self.options.top_k)
        for token, ids, values in zip(outcome.tree.tokens, likeliest, logits, strict=True):
            successors.put(token, ids, values)

    def _build_tree(self, context: DraftContext[RecyclingState]) -> TokenTree:
        if not (self.options.shared and context.params.rejects):
            context.state.read_text(context.tokens, context.root + 1)
        successors = context.state.successors
        max_nodes = min(self.options.num_nodes, context.max_nodes)
        measured = context.ledger.acceptance.rates(self.name, _PRIORS)
        root = context.tokens[-1]
        if not context.plan.wants(measured.rate(0, 1), 0):  # not even the first successor
            return TokenTree((root,), (-1,), gain=(1.0,), origin=(("", 0),))
        rates = [measured.rate(rank, 1) for rank in range(self.options.top_k)]
        # A child enters the queue after its likelier sibling, so rates must not rise with rank:
        # take running minima.
        rates = [min(rates[: rank + 1]) for rank in range(self.options.top_k)]
        trie = Trie(root)
        ranked = list[Sequence[int]]()  # for each node of the trie, its successors by rank
        candidates = Frontier[tuple[int, int]]()  # (parent node, rank of the candidate)

        def push_candidate(parent: int, rank: int) -> None:
            if trie.depths[parent] < context.max_depth and rank < len(ranked[parent]):
                candidates.push(trie.gains[parent] * rates[rank], (parent, rank))

        ranked.append(_rank(context, successors, trie.tokens[0], 0))
        push_candidate(0, 0)
        while candidates and len(trie) <= max_nodes:
            gain, (parent, rank) = candidates.pop()
            if not context.plan.wants(gain, len(trie) - 1):
                break
            node = trie.add(parent, ranked[parent][rank], gain, (self.name, rank))
            ranked.append(_rank(context, successors, trie.tokens[node], trie.depths[node]))
            push_candidate(node, 0)
            push_candidate(parent, rank + 1)
        return trie.tree(max_nodes)


def _rank(
    context: DraftContext[RecyclingState], successors: Successors, token: int, depth: int
) -> Sequence[int]:
    """Return the successors of a token at a depth of the tree, the likeliest first.

    At temperatures above 0 the target's token is the argmax of its logits divided by the
    temperature plus noise, which depends on the seed, the position and the token alone. Successors
    with logits are ranked by this sum, with the logits of the pass that gave them.
    """
    ids = successors.get(token)
    logits = successors.logits.get(token)
    sampler = context.sampler.library_sampler
    if logits is None or len(ids) < 2 or sampler is None or not sampler.options.temperature:
        return ids
    scores = sampler.draft_scores(logits, len(context.tokens) + depth, ids)
    if scores is None:
        return ids
    order = sorted(range(len(ids)), key=lambda rank: -scores[rank])
    return [ids[rank] for rank in order]


def save_successors(path: Path, table: Successors, vocabulary: str | None) -> None:
    """Write a table of successors to a safetensors file.

    Its tensor is ``successors``, int32 ``[rows, 1 + top_k]``. A row is a token id and the ids of
    its successors, padded with -1. The metadata are ``format`` and ``vocabulary``. Raises
    ``OptionError`` if the file cannot be written.
    """
    rows = [[token, *ids, *[-1] * (table.top_k - len(ids))] for token, ids in table.rows.items()]
    tensor = np.array(rows, np.int32).reshape(len(rows), 1 + table.top_k)
    content = save({"successors": tensor}, {"format": _FORMAT, "vocabulary": vocabulary or ""})
    try:
        with replace_file(path) as file:
            file.write(content)
    except OSError as error:
        msg = (
            f"{path}: expected a writable path for the table, found: {describe_error(error)}; "
            "choose another path"
        )
        raise OptionError(msg) from error


def load_successors(path: Path, table: Successors, vocabulary: str | None) -> None:
    """Load the rows that :meth:`RecyclingProposer.save` has written into an empty table.

    If the file has more than ``table.max_tokens`` rows, the last ones are kept. ``vocabulary`` is
    the fingerprint of the target's tokenizer; ``None``: the target has no tokenizer.

    Raises:
        OptionError: the file is missing, damaged, or of another vocabulary; the table stays empty.
    """
    try:
        check_regular(path)
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            tensor = file.get_tensor("successors")
    except (OSError, SafetensorError) as error:
        found = describe_error(error)
        msg = (
            f"{path}: expected a table saved by RecyclingProposer.save, found: {found}; choose "
            "another table"
        )
        raise OptionError(msg) from error
    if (
        metadata.get("format") != _FORMAT
        or tensor.ndim != 2
        or tensor.dtype != np.int32
        or tensor.shape[1] < 1
    ):
        found = f"{metadata.get('format')!r}, {tensor.shape}"
        msg = f"{path}: expected a table of format {_FORMAT}, found {found}; save it again"
        raise OptionError(msg)
    if metadata.get("vocabulary") != (vocabulary or ""):
        msg = (
            f"{path}: expected a table of this model's tokenizer, found one of another; save one "
            "with this model"
        )
        raise OptionError(msg)
    for token, *successors in tensor.tolist():
        table.put(token, [successor for successor in successors if successor >= 0])
