"""The target's choice at one node: the request's processors, then the coupled choice of :mod:`pronk.sampling.noise`.

Or, by the request's rule, the trial of guesses (:func:`pronk.sampling.verify.rejection_sample`, :func:`pronk.sampling.verify.block`).

LayerOrder: processors (:mod:`pronk.sampling.logits_processors`: repetition, frequency and presence penalties; bias; bad words; ends
before ``min_tokens``; the guide's mask); temperature; top-k; top-p; min-p; noise; argmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pronk.errors import GuideError, OptionError
from pronk.interrupts import uninterrupted
from pronk.kernels.library import Kernels
from pronk.kernels.structures import CDraftChain
from pronk.sampling.logits_processors import GuideProcessor, LogitsProcessor, make_processors
from pronk.sampling.noise import (
    block_uniform,
    draft_noise,
    gumbel_noise,
    noise_key,
    rejection_noise,
    rejection_uniform,
    seed_key,
    trial_seed,
)
from pronk.sampling.params import SamplingParams
from pronk.sampling.stateless import StatelessSampler
from pronk.sampling.token_context import TokenContext
from pronk.sampling.truncation import truncate
from pronk.sampling.verify import block, rejection_sample
from pronk.speculation.tree import DraftSample

__all__ = ["DraftToken", "NotFiniteError", "Sampler", "is_finite", "token_logprobs"]

_COLDEST = 1e-30  # below it logits divided by the temperature would leave float32; it is as greedy as can be


class NotFiniteError(ArithmeticError):
    """Logits to choose from are infinite or no numbers."""


@dataclass(frozen=True)
class DraftToken:
    """What a draft model chooses in the target's place.

    Attributes:
        token: the choice.
        confidence: how likely the likeliest token is the target's choice, by the draft alone: its share of
            ``exp(scores)``. It is ``token``, or, where guesses are drawn, the one that most often is.
        scores: ``[vocab]``: log-probabilities up to a constant, with the target's noise where the choice has it; the
            likelier a token is the target's choice, the higher. ``-inf`` is none.
        q: ``[vocab]`` float64 distribution that ``token`` was drawn from, where the rule for accepting it asks for it.
    """

    token: int
    confidence: float
    scores: NDArray[np.floating[Any]]
    q: Tensor | None = None

    def ranked(self, count: int) -> list[tuple[int, float]]:
        """The ``count`` tokens of highest score in falling order, each with its share of ``exp(score)``."""
        left, best = self.scores.copy(), list[tuple[int, float]]()
        # One argmax after the other: up to a dozen are faster than a partition.
        for _ in range(min(count, len(left))):
            token = int(left.argmax())
            if left[token] == -math.inf:
                break
            best.append((token, float(left[token])))
            left[token] = -math.inf
        shares = [self.confidence * math.exp(score - best[0][1]) for _, score in best]
        return [(token, share) for (token, _), share in zip(best, shares, strict=True) if share > 0.0]


class Sampler:
    """Chooses one request's tokens, in the context of the certain ones and of those it was told about.

    The walk advances it along the target's own choices, and drafters along their guesses, which they take back, so that
    processors always see the true context.

    Attributes:
        params: the request's options.
        seed: of its noise.
        context: the tokens that the next choice follows.
        guide: what says which texts there may be, if anything does; the last of the processors.
        processors: what its options do to the logits, in order.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        text: Sequence[int],
        vocab_size: int,
        *,
        num_prompt: int | None = None,
        stop_token_ids: Sequence[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
        kernels: Kernels | None = None,
        processors: Sequence[LogitsProcessor] = (),
        guide: GuideProcessor | None = None,
    ) -> None:
        """Stand behind ``text``, the request's own list of certain tokens: the request appends, the chooser reads.

        The first ``num_prompt`` of these tokens are the prompt, all by default.
        ``stop_token_ids`` are the token ids that end the text; ``bad_words`` are token sequences never to complete.
        ``processors`` come after those of the options, and after them ``guide``, which stands behind ``text`` already.
        ``kernels`` make the choice where it is one of logits and noise alone.
        """
        self.params = params
        self.seed = seed
        self.context = TokenContext(text, num_prompt)
        own = make_processors(params, self.context, vocab_size, stop_token_ids=stop_token_ids, bad_words=bad_words)
        self.guide = guide
        self.processors: tuple[LogitsProcessor, ...] = (*own, *processors, *([] if guide is None else [guide]))
        self.kernels = None if self.processors or params.truncates else kernels
        self._alone = StatelessSampler(0.0 if params.greedy else max(params.temperature, _COLDEST), seed)
        self.trial_seed = trial_seed(seed, text[: self.context.num_prompt]) if params.rejects else seed
        self._failure: Exception | None = None

    def advance(self, token: int) -> None:
        """``token`` is tried after the context."""
        if not self.processors:
            self.context.ahead.append(token)
            return
        with uninterrupted():
            self.context.ahead.append(token)
            self._tell(lambda processor: processor.advance(token))

    def rollback(self, count: int) -> None:
        """Take the last ``count`` tokens back that were tried."""
        if not count or not self.processors:
            del self.context.ahead[len(self.context.ahead) - count :]
            return
        with uninterrupted():
            try:
                self._tell(lambda processor: processor.rollback(count))
            finally:
                del self.context.ahead[-count:]

    @contextmanager
    def after(self, tokens: Sequence[int] = ()) -> Iterator[None]:
        """Lend the chooser: ``tokens`` are tried, and they and what is tried within are taken back at the end."""
        begun = len(self.context.ahead)
        try:
            for token in tokens:
                self.advance(token)
            yield
        finally:
            self.rollback(len(self.context.ahead) - begun)

    def commit(self, count: int) -> None:
        """The first ``count`` tokens that were tried are certain now, and in the text; the others are taken back."""
        self.rollback(len(self.context.ahead) - count)
        self.context.ahead.clear()

    def recover(self) -> None:
        """Stand after the certain tokens again, whatever a borrower has left; failures show with the next choice."""
        with suppress(Exception):
            self.rollback(len(self.context.ahead))

    def _tell(self, what: Callable[[LogitsProcessor], None]) -> None:
        """Tell every processor. If one raises, none is asked again: some have been told of a token, and others not."""
        if self._failure is None:
            try:
                for processor in self.processors:
                    what(processor)
            except Exception as error:
                self._failure = error
                raise

    def choose(self, logits: Tensor) -> int:
        """The target's token after the context by the coupled rule.

        ``logits`` ``[vocab]``, any float dtype, are left as they are.

        Raises:
            NotFiniteError: one of them is not finite.
            OptionError: every token is banned.
        """
        logits = logits.float()
        if self.kernels is not None:
            token = self._alone.choose(self.kernels, logits, len(self.context))
            if token < 0:
                raise NotFiniteError
            return token
        if not is_finite(logits):
            raise NotFiniteError
        if self.params.greedy:
            # NumPy's argmax is several times as fast as torch's, and takes the first of equals as well.
            return int(self._shape(logits).numpy().argmax())
        scores, ids = self._noisy(logits)
        return int(ids[scores.argmax()])

    def scores(self, logits: Tensor) -> Tensor:
        """``[vocab]`` float64: what :meth:`choose` takes the largest of; ``-inf`` is a token that is left out."""
        if self.params.greedy:
            return self._shape(logits.float()).double()
        scores, ids = self._noisy(logits.float())
        return torch.full((len(logits),), -math.inf, dtype=torch.float64).index_copy_(0, ids, scores)

    def _noisy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Scores with the coupled noise, float64, of the tokens that are left, and their ids."""
        scores, ids = truncate(self._shape(logits) / self._alone.temperature, self.params)
        return scores.double() + gumbel_noise(self.seed, len(self.context), ids), ids

    @property
    def stateless_sampler(self) -> StatelessSampler | None:
        """How it chooses, if that takes logits, seed and position alone, so that others can do it."""
        return None if self.kernels is None or self.params.rejects else self._alone

    @property
    def drafts_statelessly(self) -> bool:
        """Whether its guesses depend on logits, seed and position alone, so that the kernels can make a whole chain."""
        return self.kernels is not None and not self.params.rejects

    def growth(self, steps: int, scores: NDArray[np.float32]) -> CDraftChain:
        """How the kernels :meth:`guess` the tokens after the context; ``scores`` are ``[steps, vocab]``."""
        return CDraftChain(
            key=seed_key(self.seed),
            position=len(self.context),
            steps=steps,
            temperature=self._alone.temperature,
            scores=scores.ctypes.data,
        )

    def rejection_sample(self, p: Tensor, draft_tokens: Sequence[DraftSample]) -> int:
        """The token after the context, whose law is ``p``, where ``draft_tokens`` were made; never greedy."""
        position = len(self.context)

        def accepts(trial: int, chance: float) -> bool:
            return rejection_uniform(self.trial_seed, position, trial) < chance

        def draw(p: Tensor) -> int:
            ids = p.nonzero().flatten()
            return int(ids[(p[ids].log() + rejection_noise(self.trial_seed, position, ids)).argmax()])

        return rejection_sample(p, draft_tokens, accepts, draw)

    def block(self, p: Callable[[int], Tensor], chain: Sequence[DraftSample]) -> tuple[int, Tensor]:
        """How many guesses of a chain below the context are accepted, and the law of the token after them.

        ``p(i)`` is the law of the token after ``i`` of them.
        """
        position = len(self.context)
        return block(p, chain, lambda i, chance: block_uniform(self.trial_seed, position, i) < chance)

    def guess(self, logits: Tensor, root: int, *, draw: bool = True) -> DraftToken | None:
        """What a draft model with these logits chooses after the context, in the target's place.

        Under the coupled rule it is :meth:`choose`, with the target's own noise: where draft and target agree on the
        distribution they agree on the token. Under the others it is a draw with noise of its own, new for each step:
        what was accepted of the one before may have depended on all of its guesses.

        Args:
            logits: ``[vocab]``, any float dtype, left as they are; ``-inf`` is a token that the draft does not have.
            root: position of the last token that is not a guess, which tells the steps apart.
            draw: under the other rules; or else the guess is the likeliest token, a point mass.

        Returns:
            The guess; ``None`` if all tokens are banned, the numbers overflow, or the guide takes too much work.
        """
        with suppress(GuideError):  # whether a whole proposal fails must not depend on what was drawn
            return self._attempt(logits.float(), root, draw=draw)
        return None

    def _attempt(self, logits: Tensor, root: int, *, draw: bool) -> DraftToken | None:
        if self.kernels is not None and not self.params.rejects:
            key = None if self.params.greedy else noise_key(self.seed, len(self.context))
            guessed, confidence, made = self.kernels.guess(logits.contiguous(), self._alone.temperature, key)
            return None if guessed < 0 else DraftToken(guessed, confidence, made)
        shaped = self._shape(logits, allow_none=True)
        if not math.isfinite(float(shaped.max())):
            return None
        if self.params.greedy:
            return _guess(shaped.numpy())
        kept, ids = truncate(shaped / self._alone.temperature, self.params)
        kept, position = kept.double(), len(self.context)
        if not self.params.rejects:
            kept = kept + gumbel_noise(self.seed, position, ids)
        scores = torch.full((len(logits),), -math.inf, dtype=torch.float64).index_copy_(0, ids, kept)
        likeliest = _guess(scores.numpy())
        if not self.params.rejects or not draw:
            return likeliest
        token = int(ids[(kept + draft_noise(self.trial_seed, root, position, ids)).argmax()])
        return replace(likeliest, token=token, q=scores.softmax(0))

    def distribution(self, logits: Tensor) -> Tensor:
        """``[vocab]`` float64: the law of the token after the context, for a temperature above 0."""
        scores, ids = truncate(self._shape(logits.float()) / self._alone.temperature, self.params)
        return torch.zeros(len(logits), dtype=torch.float64).index_copy_(0, ids, scores.double().softmax(0))

    def _shape(self, logits: Tensor, *, allow_none: bool = False) -> Tensor:
        """The logits as the processors want them."""
        if self._failure is not None:
            raise self._failure
        if not self.processors:
            return logits
        for processor in self.processors:
            logits = processor.mask(logits)
        if not allow_none and logits.max() == -math.inf:
            beside = "" if self.guide is None else ", beside the guide,"
            msg = f"min_tokens, stop_token_ids and bad_words{beside} ban every token; expected one to be left"
            raise OptionError(msg)
        return logits


def is_finite(logits: Tensor) -> bool:
    """Whether no number has overflowed: a sum over one that has is none either."""
    return math.isfinite(np.add.reduce(logits.float().numpy(), axis=None))


def _guess(scores: NDArray[np.floating[Any]]) -> DraftToken:
    token = int(scores.argmax())
    return DraftToken(token, float(1.0 / np.exp(scores - scores[token]).sum()), scores)


def token_logprobs(
    logits: Tensor, tokens: Sequence[int], top: int, wanted: Sequence[int] = ()
) -> list[dict[int, float]]:
    """Log-probabilities before any processor.

    Args:
        logits: ``[rows, vocab]``.
        tokens: the token to report for each row.
        top: how many of the likeliest to report beside it.
        wanted: ids of more tokens to report.

    Returns:
        One ``{token id: log-probability}`` per row, the chosen token first.
    """
    logprobs = logits.float().log_softmax(-1)
    values, ids = logprobs.topk(min(top, logits.shape[-1]), dim=-1)
    reports = []
    for row, token in enumerate(tokens):
        report = {token: float(logprobs[row, token])}
        report.update(zip(ids[row].tolist(), values[row].tolist(), strict=True))
        report.update((other, float(logprobs[row, other])) for other in wanted)
        reports.append(report)
    return reports
