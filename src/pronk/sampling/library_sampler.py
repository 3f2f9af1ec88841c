"""Sampling of one request's tokens by calls of the kernels' library.

The library chooses tokens by the coupled rule with penalties, temperature, top-k, top-p and min-p.
Other logits processors, such as guides, need Python between two tokens. The target's tokens have
the bits of :meth:`pronk.sampling.sampler.Sampler.choose`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from pronk.base.arrays import Array
from pronk.kernels.exact_math import log
from pronk.kernels.library import Kernels
from pronk.kernels.structures import CSampling
from pronk.sampling.draft_token import DraftIds, DraftLogits, DraftToken
from pronk.sampling.logits_processors import LogitsProcessor, Penalties
from pronk.sampling.noise import seed_key
from pronk.sampling.params import SamplingParams
from pronk.sampling.stateless import StatelessSampler
from pronk.sampling.tree import TokenTree
from pronk.sampling.verify import VerifiedPath


class LibrarySampler:
    """Samples one request's tokens in the library: those of the target, and draft tokens.

    Attributes:
        options: the request's options, as the kernels read them. With penalties they point to the
            counts of the tokens of the text, which :class:`Penalties` keeps.
    """

    def __init__(
        self,
        kernels: Kernels,
        params: SamplingParams,
        sampler: StatelessSampler,
        penalties: Penalties | None,
    ) -> None:
        """Create a sampler.

        Args:
            kernels: the kernels' library.
            params: options of the request.
            sampler: temperature and seed of the request.
            penalties: the request's penalties, which count the tokens of its text.
        """
        self._kernels = kernels
        self._penalties = penalties  # keeps the arrays alive that ``options`` points to
        self.options = CSampling(
            key=seed_key(sampler.seed),
            temperature=sampler.temperature,
            log_min_p=float(log(params.min_p)) if params.min_p > 0.0 else -math.inf,
            top_k=min(params.top_k, 2**31),
            top_p=params.top_p,
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
        )
        if penalties is not None:
            self.options.counts = penalties.counts.ctypes.data
            self.options.in_prompt = penalties.in_prompt.ctypes.data

    def verify(self, tree: TokenTree, logits: Array, position: int) -> VerifiedPath | None:
        """Return the result of :func:`pronk.sampling.verify.verify_tree`.

        Args:
            tree: draft tokens.
            logits: the target's logits after each node, float32 ``[nodes, vocab]``.
            position: index in the text of the token after the root.

        Returns:
            The accepted path; ``None`` if logits on the path are not finite.
        """
        rows = np.ascontiguousarray(logits)
        parents = tree.acceptable_parents
        found = self._kernels.verify(self.options, rows, position, tree.tokens, parents)
        return None if found is None else VerifiedPath.of_nodes(tree.tokens, *found)

    def draft(self, logits: Array, position: int, ids: DraftIds | None = None) -> DraftToken | None:
        """Return the token that a draft model proposes after the current text.

        Args:
            logits: ``[draft vocab]`` float32, logits of the draft model; ``-inf`` bans a token.
            position: index of the token in the text.
            ids: the target's token id of each logit; ``None`` for 0, 1, ….

        Returns:
            The draft token; ``None`` if all tokens are banned, or a logit is NaN or ``inf``.
        """
        assert self.counts_all(len(logits), ids), "expected logits of the target's vocabulary"
        token, confidence, scores = self._kernels.draft_token(
            self.options, np.ascontiguousarray(logits), position, ids
        )
        return None if token < 0 else DraftToken(token, confidence, scores, ids)

    def draft_scores(
        self, logits: Sequence[float], position: int, ids: Sequence[int]
    ) -> list[float] | None:
        """Return scores of a few tokens at a position, by which :meth:`draft` chooses among them.

        ``logits`` are those of the tokens ``ids``. At temperatures above 0 a score is the logit by
        the request's options, divided by the temperature, plus noise. Truncation (top-k, top-p,
        min-p) applies to these tokens alone. ``None`` if :meth:`draft` would return ``None``.
        """
        token_ids = np.array(ids, np.int32)
        chosen, _, scores = self._kernels.draft_token(
            self.options, np.array(logits, np.float32), position, token_ids
        )
        return None if chosen < 0 else scores.tolist()

    def counts_all(self, vocab_size: int, ids: DraftIds | None) -> bool:
        """Return whether penalties count all tokens of a draft model.

        Its logits are those of the tokens ``ids``; ``None`` for 0 .. ``vocab_size - 1``.
        """
        penalties = self._penalties
        return penalties is None or ids is not None or vocab_size <= len(penalties.counts)

    def draft_history(
        self, logits: Sequence[DraftLogits], text: Sequence[int], first: int
    ) -> Iterator[DraftToken | None]:
        """Yield the tokens that a draft model would have proposed for successive tokens of a text.

        Each is the result of :meth:`draft` for the text before it. Until the iterator ends or is
        closed, penalties do not count the tokens after that.

        Args:
            logits: logits of the draft model for each token.
            text: token ids of the request's text.
            first: index in the text of the token for ``logits[0]``, a token of the output.
        """
        penalties = self._penalties
        if penalties is None:
            for position, row in enumerate(logits, first):
                yield self.draft(row.values, position, row.ids)
            return
        penalties.forget(text[first:])
        num_counted = first
        try:
            for position, row in enumerate(logits, first):
                yield self.draft(row.values, position, row.ids)
                penalties.advance(text[position])
                num_counted = position + 1
        finally:
            for token in text[num_counted:]:
                penalties.advance(token)


def make_library_sampler(
    kernels: Kernels | None,
    params: SamplingParams,
    sampler: StatelessSampler,
    processors: Sequence[LogitsProcessor],
) -> LibrarySampler | None:
    """Return the library's sampler of a request; ``None`` if it cannot compute its options.

    ``processors`` are all logits processors of the request; the other arguments are those of
    :class:`LibrarySampler`.
    """
    if kernels is None or params.rejects:
        return None
    if not processors:
        return LibrarySampler(kernels, params, sampler, None)
    first = processors[0]
    if len(processors) == 1 and type(first) is Penalties:
        return LibrarySampler(kernels, params, sampler, first)
    return None
