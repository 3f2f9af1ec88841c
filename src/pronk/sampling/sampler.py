"""Sample one request's tokens, for the target model and for draft models.

The steps from logits to token are, in this order: logits processors
(:mod:`pronk.sampling.logits_processors`: penalties; logit bias; bad words; ``min_tokens``; custom
processors; the guide's mask), temperature, top-k, top-p, min-p, Gumbel noise, argmax. This is the
*coupled* rule (:mod:`pronk.sampling.noise`). The *rejection* and *block* rules replace the last two
steps by random trials of the draft tokens (:mod:`pronk.sampling.verify`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np
from numpy.typing import NDArray

from pronk.base.arrays import Array, is_finite
from pronk.base.errors import GuideError, OptionError
from pronk.base.interrupts import uninterrupted
from pronk.kernels.library import Kernels
from pronk.sampling.draft_token import DraftIds, DraftToken, argmax_token
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
from pronk.sampling.truncation import Ids, likeliest, truncate
from pronk.sampling.verify import block_verify, rejection_sample

# Lowest temperature above 0 that is applied: logits divided by less would overflow float32.
_MIN_TEMPERATURE = 1e-30


class NotFiniteError(ArithmeticError):
    """Logits contain an infinity or NaN."""


class Sampler:
    """Sample one request's next token after the context: the committed tokens, then tentative tokens.

    Verification advances the sampler along the target's tokens. Drafters advance it along their
    draft tokens and roll it back. Logits processors therefore always see the true context of a
    node.
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

        Logits processors apply in this order: those made from ``params`` and ``banned``,
        ``processors``, ``guide``. ``guide`` has already consumed the committed tokens. If no
        processor or truncation applies, ``kernels`` sample the tokens.
        """
        self.params = params
        self.seed = seed
        self._vocab_size = vocab_size
        self.context = context
        made = make_processors(params, context, vocab_size, banned)
        self.guide = guide
        self.processors: tuple[LogitsProcessor, ...] = (
            *made,
            *processors,
            *([] if guide is None else [guide]),
        )
        self.kernels = None if self.processors or params.truncates else kernels
        self._stateless = StatelessSampler(
            0.0 if params.greedy else max(params.temperature, _MIN_TEMPERATURE), seed
        )
        # The equivalent stateless sampler; ``None`` if sampling needs more than logits, seed and
        # position.
        self.stateless_sampler = None if self.kernels is None or params.rejects else self._stateless
        self.trial_seed = (
            trial_seed(seed, context.committed[: context.num_prompt]) if params.rejects else seed
        )
        self._failure: Exception | None = None

    def advance(self, token: int) -> None:
        """Append a tentative token to the context."""
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

    @contextmanager
    def after(self, tokens: Sequence[int] = ()) -> Iterator[None]:
        """Append ``tokens`` to the context.

        At the end of the ``with`` block, restore the present context.
        """
        start = len(self.context.tentative)
        try:
            for token in tokens:
                self.advance(token)
            yield
        finally:
            self.rollback(len(self.context.tentative) - start)

    def commit_tokens(self, count: int) -> None:
        """Roll back all tentative tokens but the first ``count``, which the request has committed."""
        self.rollback(len(self.context.tentative) - count)
        self.context.tentative.clear()

    def recover(self) -> None:
        """Roll back all tentative tokens after an exception.

        Later sampling raises an error of a processor.
        """
        if self.context.tentative:
            with suppress(Exception):
                self.rollback(len(self.context.tentative))

    def _update_processors(self, update: Callable[[LogitsProcessor], None]) -> None:
        """Call ``update`` with each processor.

        After an error, all later sampling raises this error.
        """
        if self._failure is None:
            try:
                for processor in self.processors:
                    update(processor)
            except Exception as error:
                self._failure = error  # the contexts of the processors may differ now
                raise

    def choose(self, logits: Array) -> int:
        """Return the target's next token: argmax of processed ``logits`` ``[vocab]`` plus the seed's noise.

        Raises ``NotFiniteError`` if a logit is not finite, ``OptionError`` if every token is
        banned.
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
        """Return float64 scores ``[vocab]`` whose argmax :meth:`choose` returns.

        ``-inf`` excludes a token.
        """
        logits = np.asarray(logits, np.float32)
        if self.params.greedy:
            return self._process(logits).astype(np.float64)
        scores, ids = self._kept_scores(logits)
        return _scatter(scores, ids, len(logits), -math.inf)

    def _kept_scores(self, logits: Array) -> tuple[NDArray[np.float64], Ids]:
        """Return the noisy float64 scores and the ids of the tokens that truncation keeps."""
        kept, ids = truncate(self._process(logits) / self._stateless.temperature, self.params)
        scores = gumbel_noise(self.seed, len(self.context), ids)
        scores += kept
        return scores, ids

    def draft_token_at(
        self, logits: Array, position: int, ids: DraftIds | None = None
    ) -> DraftToken | None:
        """Return :meth:`draft_token` for another index of the text, if draft tokens are drawn statelessly."""
        assert self.kernels is not None, "expected a sampler that drafts statelessly"
        return self._stateless.draft(self.kernels, np.asarray(logits, np.float32), position, ids)

    def rejection_sample(self, p: Array, draft_tokens: Sequence[DraftSample]) -> int:
        """Return the next token by the rejection rule.

        See :func:`pronk.sampling.verify.rejection_sample`.
        """
        seed = self.trial_seed
        position = len(self.context)

        def draw(p: Array) -> int:
            ids = np.flatnonzero(p)
            return int(ids[(np.log(p[ids]) + rejection_noise(seed, position, ids)).argmax()])

        return rejection_sample(
            p, draft_tokens, lambda i, chance: rejection_uniform(seed, position, i) < chance, draw
        )

    def block_verify(
        self, p: Callable[[int], Array], chain: Sequence[DraftSample]
    ) -> tuple[int, Array]:
        """Return the number of accepted draft tokens of ``chain`` and the distribution of the next token.

        ``p(i)`` is the target's distribution after ``i`` draft tokens; see
        :func:`pronk.sampling.verify.block_verify`.
        """
        position = len(self.context)
        return block_verify(
            p, chain, lambda i, chance: block_uniform(self.trial_seed, position, i) < chance
        )

    def draft_token(
        self, logits: Array, root: int, *, draw: bool = True, ids: DraftIds | None = None
    ) -> DraftToken | None:
        """Return the draft token that a draft model with these logits proposes after the context.

        Under the coupled rule this is :meth:`choose` on the draft's logits, with the target's own
        noise: if draft and target have the same distribution, they pick the same token. Under the
        other rules it is a draw with separate noise. Each step has new noise, because the accepted
        tokens may depend on all draft tokens of their step.

        Args:
            logits: ``[draft vocab]``, any float dtype, not modified; ``-inf`` marks a token that
                may not be proposed.
            root: position of the last committed token; selects the noise of this step.
            draw: under the rejection and block rules, whether to draw the token at random instead
                of the argmax.
            ids: the target's token of each logit; ``None``: 0, 1, ….

        ``None`` is returned if all tokens are banned, logits overflow, or the guide exceeds its
        work limit.
        """
        logits = np.asarray(logits, np.float32)
        position = len(self.context)
        if self.kernels is not None and not self.params.rejects:
            return self._stateless.draft(self.kernels, logits, position, ids)
        if ids is not None:  # processors and distributions are those of the whole vocabulary
            logits, known = np.full(self._vocab_size, -math.inf, np.float32), logits
            logits[ids] = known
        try:
            processed = self._process(logits, allow_none=True)
        except GuideError:
            # An exception would discard the whole proposal, but whether a proposal is discarded
            # must not depend on randomly drawn tokens.
            return None
        if not math.isfinite(float(processed.max())):
            return None
        if self.params.greedy:
            return argmax_token(processed)
        kept, kept_ids = truncate(processed / self._stateless.temperature, self.params)
        noisy = kept.astype(np.float64)
        if not self.params.rejects:
            noisy += gumbel_noise(self.seed, position, kept_ids)
        probs = _softmax(noisy)
        best = noisy.argmax()
        token = int(kept_ids[best])
        q = None
        if self.params.rejects and draw:
            token = int(
                kept_ids[(noisy + draft_noise(self.trial_seed, root, position, kept_ids)).argmax()]
            )
            q = _scatter(probs, kept_ids, len(logits), 0.0)
        return DraftToken(
            token, float(probs[best]), _scatter(noisy, kept_ids, len(logits), -math.inf), q=q
        )

    def distribution(self, logits: Array) -> NDArray[np.float64]:
        """Return the float64 distribution ``[vocab]`` of the next token, for a temperature above 0."""
        processed = self._process(np.asarray(logits, np.float32))
        scores, ids = truncate(processed / self._stateless.temperature, self.params)
        return _scatter(_softmax(scores.astype(np.float64)), ids, len(logits), 0.0)

    def _process(self, logits: Array, *, allow_none: bool = False) -> NDArray[np.float32]:
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
        """Return the error for a context in which the options of the request leave no token to choose."""
        by = "min_tokens, stop_token_ids or bad_words" + (
            "" if self.guide is None else " together with the guide"
        )
        for processor in self.processors:
            if (
                isinstance(processor, ThinkingBudget)
                and (token := processor.forced_token) is not None
            ):
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


def _softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    return weights


def _scatter(
    values: NDArray[np.float64], ids: Ids, size: int, others: float
) -> NDArray[np.float64]:
    """Return ``size`` numbers: ``values`` at the indices ``ids``, and ``others`` elsewhere."""
    scattered = np.full(size, others)
    scattered[ids] = values
    return scattered


def log_probs(logits: Array, tokens: list[int]) -> list[float]:
    """Return log-probabilities of some tokens by unprocessed ``logits`` ``[vocab]``, rounded to float32."""
    largest = logits.max()
    total = float(largest) + math.log(np.exp(logits - largest).sum(dtype=np.float64))
    rounded: list[float] = (logits[tokens].astype(np.float64) - total).astype(np.float32).tolist()
    return rounded


def token_logprobs(
    logits: Array, tokens: Sequence[int], top: int, extra_ids: Sequence[int] = ()
) -> list[dict[int, float]]:
    """Return one ``{token id: log-probability}`` per row of unprocessed ``logits`` ``[rows, vocab]``.

    The dict of row ``i`` has ``tokens[i]`` first, then the ``top`` likeliest tokens, then the ids
    in ``extra_ids``. Of equally likely tokens, the smallest ids come first. A row's
    log-probabilities do not depend on other rows.
    """
    reports = []
    for row, token in zip(logits, tokens, strict=False):  # rows without a token have no report
        ids = [token, *likeliest(row, top).tolist(), *extra_ids]
        reports.append(dict(zip(ids, log_probs(row, ids), strict=True)))
    return reports
