"""Verification of a token tree by one call of the kernels' library.

The library chooses the target's tokens by the coupled rule with penalties, temperature, top-k,
top-p and min-p. Other logits processors, such as guides, need Python between two tokens. The bits
are those of :meth:`pronk.sampling.sampler.Sampler.choose`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pronk.base.arrays import Array
from pronk.kernels.exact_math import log
from pronk.kernels.library import Kernels
from pronk.kernels.structures import CSampling
from pronk.sampling.logits_processors import LogitsProcessor, Penalties
from pronk.sampling.noise import seed_key
from pronk.sampling.params import SamplingParams
from pronk.sampling.stateless import StatelessSampler
from pronk.sampling.tree import TokenTree
from pronk.sampling.verify import VerifiedPath


class TreeVerifier:
    """Chooses one request's tokens along a token tree, in the library."""

    def __init__(
        self,
        kernels: Kernels,
        params: SamplingParams,
        sampler: StatelessSampler,
        penalties: Penalties | None,
    ) -> None:
        """Create a verifier.

        Args:
            kernels: the kernels' library.
            params: options of the request.
            sampler: temperature and seed of the request.
            penalties: the request's penalties, which count the tokens of its text.
        """
        self._kernels = kernels
        self._penalties = penalties
        self._options = CSampling(
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
            self._options.counts = penalties.counts.ctypes.data
            self._options.in_prompt = penalties.in_prompt.ctypes.data

    def verify(self, tree: TokenTree, logits: Array, position: int) -> VerifiedPath | None:
        """Return the result of :func:`pronk.sampling.verify.verify_tree`.

        Args:
            tree: draft tokens.
            logits: the target's logits after each node, float32 ``[nodes, vocab]``.
            position: index in the text of the token after the root.

        Returns:
            The accepted path; ``None`` if logits on the path are not finite.
        """
        parents: Sequence[int] = tree.parents
        if tree.verify is not None:
            pairs = zip(parents, tree.acceptable, strict=True)
            parents = [parent if acceptable else -1 for parent, acceptable in pairs]
        rows = np.ascontiguousarray(logits)
        found = self._kernels.verify(self._options, rows, position, tree.tokens, parents)
        if found is None:
            return None
        path, last = found
        return VerifiedPath(tuple(path), (*[tree.tokens[node] for node in path], last))


def make_verifier(
    kernels: Kernels | None,
    params: SamplingParams,
    sampler: StatelessSampler,
    processors: Sequence[LogitsProcessor],
) -> TreeVerifier | None:
    """Return a verifier for a request, or ``None`` if the library cannot compute its options.

    ``processors`` are all logits processors of the request; the other arguments are those of
    :class:`TreeVerifier`.
    """
    if kernels is None or params.rejects:
        return None
    if not processors:
        return TreeVerifier(kernels, params, sampler, None)
    first = processors[0]
    if len(processors) == 1 and type(first) is Penalties:
        return TreeVerifier(kernels, params, sampler, first)
    return None
