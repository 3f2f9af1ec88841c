"""Sampling of one request's tokens, for the target model and for draft models.

The steps from logits to a token are, in this order:

1. logits processors (:mod:`pronk.sampling.logits_processors`): penalties, logit bias, bad words,
   ``min_tokens``, custom processors, the guide's mask
2. temperature
3. top-k, top-p, min-p
4. Gumbel noise, argmax

This is the *coupled* rule (:mod:`pronk.sampling.noise`). The *rejection* and *block* rules replace
step 4 by random trials of the draft tokens (:mod:`pronk.sampling.verify`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress

import numpy as np
from numpy.typing import NDArray

from pronk.base.arrays import Array, is_finite
from pronk.base.errors import GuideError, OptionError
from pronk.base.interrupts import uninterrupted
from pronk.kernels.exact_math import exp, log, total
from pronk.kernels.library import Kernels
from pronk.sampling.draft_token import DraftIds, DraftToken, argmax_token
from pronk.sampling.library_sampler import make_library_sampler
from pronk.sampling.logits_processors import (
    NOTHING_BANNED,
    BannedTokens,
    GuideProcessor,
    LogitsProcessor,
    TokenContext,
    make_processors,
)
from pronk.sampling.noise import (
    block_uniform,
    draft_noise,
    gumbel_noise,
    rejection_noise,
    rejection_uniform,
    trial_seed,
)
from pronk.sampling.params import SamplingParams
from pronk.sampling.stateless import StatelessSampler
from pronk.sampling.thinking import ThinkingBudget
from pronk.sampling.tree import DraftSample
from pronk.sampling.truncation import Ids, truncate
from pronk.sampling.verify import block_verify, rejection_sample

# Lowest temperature above 0 that is used; lower ones are raised to it, because dividing logits by
# them would overflow float32.
_MIN_TEMPERATURE = 1e-30


class NotFiniteError(ArithmeticError):
    """Logits contain an infinity or NaN."""


class Sampler:
    """Sampler of one request's next token.

    The token follows the context: the committed tokens, then tentative tokens. Verification
    advances the sampler along the target's tokens. Drafters advance the sampler along their draft
    tokens and roll it back. Logits processors therefore always have the true context of a node.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        context: TokenContext,
        vocab_size: int,
        *,
        banned: BannedTokens = NOTHING_BANNED,
        kernels: Kernels | None = None,
        processors: Sequence[LogitsProcessor] = (),
        guide: GuideProcessor | None = None,
    ) -> None:
        """Create a sampler for the token after the committed tokens of ``context``.

        Args:
            params: options of the request.
            seed: seed of the request.
            context: tokens of the request.
            vocab_size: number of logits of the target.
            banned: token ids that the options ban.
            kernels: kernel library. ``library_sampler`` uses it for most options, and
                :meth:`choose` if no processor and no truncation applies; otherwise, and for
                ``None``, numpy samples.
            processors: custom logits processors; applied after those of ``params`` and ``banned``.
            guide: processor of the guide, which is applied last, and which has already consumed the
                committed tokens.
        """
        self.params = params
        self.seed = seed
        self._vocab_size = vocab_size
        self.context = context
        made = make_processors(params, context, vocab_size, banned)
        guides = () if guide is None else (guide,)
        self.guide = guide
        self.processors: tuple[LogitsProcessor, ...] = (*made, *processors, *guides)
        self.kernels = None if self.processors or params.truncates else kernels
        temperature = 0.0 if params.greedy else max(params.temperature, _MIN_TEMPERATURE)
        self._stateless = StatelessSampler(temperature, seed)
        # A sampler that gives the same tokens from logits, seed and position alone; ``None`` if the
        # request's options need more than these.
        self.stateless_sampler = None if self.kernels is None or params.rejects else self._stateless
        # Verifies token trees and samples draft tokens in the library; ``None`` if the options need
        # Python for each token.
        self.library_sampler = make_library_sampler(
            kernels, params, self._stateless, self.processors
        )
        self.trial_seed = seed
        if params.rejects:
            self.trial_seed = trial_seed(seed, context.committed[: context.num_prompt])
        self._failure: Exception | None = None

    def advance(self, token: int) -> None:
        """Append a tentative token, which may be rolled back, to the context."""
        if not self.processors:
            self.context.tentative.append(token)
            return
        with uninterrupted():
            self.context.tentative.append(token)
            self._update_processors(lambda processor: processor.advance(token))

    def rollback(self, count: int) -> None:
        """Remove the last ``count`` tentative tokens from the context."""
        if not count or not self.processors:
            del self.context.tentative[len(self.context.tentative) - count :]
            return
        with uninterrupted():
            try:
                self._update_processors(lambda processor: processor.rollback(count))
            finally:
                del self.context.tentative[-count:]

    def after(self, tokens: Sequence[int] = ()) -> AbstractContextManager[None]:
        """Append tentative ``tokens`` to the context until the end of the ``with`` block.

        At its end, tokens that the block has appended are removed as well.
        """
        return _After(self, tokens)

    def commit_tokens(self, count: int) -> None:
        """Drop all tentative tokens, of which the request has committed the first ``count``.

        Logits processors keep the committed tokens and are rolled back over the others.
        """
        num_dropped = len(self.context.tentative) - count
        if num_dropped:
            self.rollback(num_dropped)
        self.context.tentative.clear()

    def recover(self) -> None:
        """Roll back all tentative tokens after an exception.

        If a logits processor fails during the rollback, the next attempt to sample raises its
        error.
        """
        if self.context.tentative:
            with suppress(Exception):
                self.rollback(len(self.context.tentative))

    def _update_processors(self, update: Callable[[LogitsProcessor], None]) -> None:
        """Call ``update`` with each logits processor.

        After an error of a processor, every later attempt to sample raises this error, as the
        contexts of the processors may differ.
        """
        if self._failure is None:
            try:
                for processor in self.processors:
                    update(processor)
            except Exception as error:
                self._failure = error
                raise

    def choose(self, logits: Array) -> int:
        """Return the target's next token: the argmax of processed logits plus the seed's noise.

        Args:
            logits: ``[vocab]``, the target's logits, of any float dtype.

        Raises:
            NotFiniteError: a logit is not finite.
            OptionError: every token is banned.
        """
        logits = np.asarray(logits, np.float32)
        if self.kernels is not None:
            token = self._stateless.choose(self.kernels, logits, len(self.context))
            if token < 0:
                raise NotFiniteError
            return token
        if not is_finite(logits):
            raise NotFiniteError
        if self.params.greedy:
            return int(self._process(logits).argmax())
        scores, ids = self._kept_scores(logits)
        return int(ids[scores.argmax()])

    def scores(self, logits: Array) -> NDArray[np.float64]:
        """Return float64 scores ``[vocab]`` whose argmax is the token of :meth:`choose`.

        Excluded tokens have the score ``-inf``.
        """
        logits = np.asarray(logits, np.float32)
        if self.params.greedy:
            return self._process(logits).astype(np.float64)
        scores, ids = self._kept_scores(logits)
        return _scatter(scores, ids, len(logits), -math.inf)

    def _kept_scores(self, logits: Array) -> tuple[NDArray[np.float64], Ids]:
        """Return scores and ids of the tokens that top-k, top-p and min-p keep, by ascending id.

        The scores are float64 and include the Gumbel noise.
        """
        kept, ids = truncate(self._process(logits) / self._stateless.temperature, self.params)
        scores = gumbel_noise(self.seed, len(self.context), ids)
        scores += kept
        return scores, ids

    def distribution(self, logits: Array) -> NDArray[np.float64]:
        """Return the distribution of the next token, ``[vocab]`` float64.

        The temperature must be above 0.
        """
        processed = self._process(np.asarray(logits, np.float32))
        scores, ids = truncate(processed / self._stateless.temperature, self.params)
        return _scatter(_softmax(scores.astype(np.float64)), ids, len(logits), 0.0)

    def rejection_sample(self, p: Array, draft_tokens: Sequence[DraftSample]) -> int:
        """Return the next token by the rejection rule.

        The arguments are those of :func:`pronk.sampling.verify.rejection_sample`; the trials use
        the request's own random numbers.
        """
        seed = self.trial_seed
        position = len(self.context)

        def accepts(index: int, chance: float) -> bool:
            return rejection_uniform(seed, position, index) < chance

        def draw(p: Array) -> int:
            ids = np.flatnonzero(p)
            scores = log(p[ids]) + rejection_noise(seed, position, ids)
            return int(ids[scores.argmax()])

        return rejection_sample(p, draft_tokens, accepts, draw)

    def block_verify(
        self, p: Callable[[int], Array], chain: Sequence[DraftSample]
    ) -> tuple[int, Array]:
        """Return the number of accepted tokens of a chain, and the distribution of the next token.

        The arguments are those of :func:`pronk.sampling.verify.block_verify`; the trials use the
        request's own random numbers.
        """
        seed = self.trial_seed
        position = len(self.context)

        def accepts(index: int, chance: float) -> bool:
            return block_uniform(seed, position, index) < chance

        return block_verify(p, chain, accepts)

    def draft_token(
        self, logits: Array, root: int, *, draw: bool = True, ids: DraftIds | None = None
    ) -> DraftToken | None:
        """Return the draft token that a draft model with these logits proposes after the context.

        Under the coupled rule, the draft token is the result of :meth:`choose` for the draft
        model's logits, with the target's own noise: if draft model and target have the same
        distribution, they pick the same token. Under the other rules, the draft token is drawn with
        separate noise. Each step has new noise, because the accepted tokens may depend on all draft
        tokens of their step.

        Args:
            logits: ``[draft vocab]``, any float dtype, not modified; ``-inf`` marks a token that
                may not be proposed.
            root: position of the last committed token; selects the noise of this step.
            draw: under the rejection and block rules, whether to draw the token at random instead
                of the argmax.
            ids: the target's token id of each logit; ``None`` for 0, 1, ….

        Returns:
            The draft token; ``None`` if all tokens are banned, logits overflow, or the guide
            exceeds its work limit.
        """
        logits = np.asarray(logits, np.float32)
        position = len(self.context)
        if self.library_sampler is not None:
            return self.library_sampler.draft(logits, position, ids)
        processed = self._process_draft_logits(logits, ids)
        if processed is None:
            return None
        if self.params.greedy:
            return argmax_token(processed)
        kept, kept_ids = truncate(processed / self._stateless.temperature, self.params)
        scores = kept.astype(np.float64)
        if not self.params.rejects:
            scores += gumbel_noise(self.seed, position, kept_ids)
        probs = _softmax(scores)
        best = scores.argmax()
        confidence = float(probs[best])
        all_scores = _scatter(scores, kept_ids, len(processed), -math.inf)
        if not self.params.rejects or not draw:
            return DraftToken(int(kept_ids[best]), confidence, all_scores)
        noise = draft_noise(self.trial_seed, root, position, kept_ids)
        drawn = (scores + noise).argmax()
        q = _scatter(probs, kept_ids, len(processed), 0.0)
        return DraftToken(int(kept_ids[drawn]), confidence, all_scores, q=q)

    def _process_draft_logits(
        self, logits: NDArray[np.float32], ids: DraftIds | None
    ) -> NDArray[np.float32] | None:
        """Return the processed logits ``[vocab]`` of a draft model, by the target's token ids.

        The arguments are those of :meth:`draft_token`. ``None`` if no token may be proposed.
        """
        # logits processors, and distributions of draft tokens, need the whole vocabulary
        if ids is not None:
            draft_logits = logits
            logits = np.full(self._vocab_size, -math.inf, np.float32)
            logits[ids] = draft_logits
        try:
            processed = self._process(logits, allow_none=True)
        except GuideError:
            # Propose nothing after this context. An exception would discard the whole proposal, and
            # whether a proposal is discarded must not depend on randomly drawn tokens.
            return None
        return processed if math.isfinite(float(processed.max())) else None

    def _process(self, logits: Array, *, allow_none: bool = False) -> NDArray[np.float32]:
        """Return the logits ``[vocab]`` after all processors; the input is not modified.

        If all tokens are banned, raise an OptionError unless ``allow_none``.
        """
        if self._failure is not None:
            raise self._failure
        if not self.processors:
            return logits
        for processor in self.processors:
            logits = np.asarray(processor.mask(logits), np.float32)
        if not allow_none and logits.max() == -math.inf:
            raise self._all_banned_error()
        return logits

    def _all_banned_error(self) -> OptionError:
        """Return the error for a context in which the options of the request allow no token."""
        by = "min_tokens, stop_token_ids or bad_words"
        if self.guide is not None:
            by += " together with the guide"
        for processor in self.processors:
            token = processor.forced_token if isinstance(processor, ThinkingBudget) else None
            if token is not None:
                expected = (
                    "expected the end marker of thoughts to be allowed when the budget is used up"
                )
                advice = "allow the token, or leave thinking_budget out"
                return OptionError(
                    f"thinking_budget: {expected}, found its token {token} banned by {by}; {advice}"
                )
        return OptionError(
            f"expected an allowed token, found every token banned by {by}; allow a token"
        )


class _After:
    """Block in which a sampler has tentative tokens (:meth:`Sampler.after`)."""

    def __init__(self, sampler: Sampler, tokens: Sequence[int]) -> None:
        self._sampler = sampler
        self._tokens = tokens
        self._start = len(sampler.context.tentative)

    def __enter__(self) -> None:
        try:
            for token in self._tokens:
                self._sampler.advance(token)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self._sampler.rollback(len(self._sampler.context.tentative) - self._start)


def _softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = exp(scores - scores.max())
    weights /= total(weights)
    return weights


def _scatter(
    values: NDArray[np.float64], ids: Ids, size: int, others: float
) -> NDArray[np.float64]:
    """Return ``size`` numbers: ``values`` at the indices ``ids``, and ``others`` elsewhere."""
    scattered = np.full(size, others)
    scattered[ids] = values
    return scattered
