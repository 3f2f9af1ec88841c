"""The target's choice at one node: the request's processors, then the coupled choice of :mod:`pronk.choosing.params`.

Or, by the request's rule, the trial of guesses (:func:`pronk.choosing.walk.reject`, :func:`pronk.choosing.walk.block`).

Order: repetition, frequency and presence penalties; bias; bans (bad words, ends before ``min_tokens``);
temperature; top-k; top-p; min-p; noise; argmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pronk.choosing.params import (
    SamplingParams,
    block_uniform,
    draft_noise,
    gumbel_noise,
    lots,
    noise_key,
    rejection_noise,
    rejection_uniform,
    seed_key,
)
from pronk.choosing.walk import block, reject
from pronk.errors import OptionError
from pronk.kernels.library import Growth, Kernels
from pronk.tree import Drawn

__all__ = ["Chooser", "Guess", "is_finite", "token_logprobs"]

# Tokens that are sorted before the whole vocabulary is.
_HEAD = 512

# Below it logits divided by the temperature would leave float32; it is as greedy as can be.
_COLDEST = 1e-30


@dataclass(frozen=True)
class Guess:
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


class Chooser:
    """Chooses one request's tokens, in the context of the tokens it was told about.

    The walk advances it along the target's own choices, and takes back what was not committed, so that penalties and
    bans always see the true context.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt: Sequence[int],
        vocab_size: int,
        *,
        ends: Sequence[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
        kernels: Kernels | None = None,
    ) -> None:
        """``ends`` are the token ids that end the text; ``bad_words`` are token sequences never to complete.

        ``kernels`` make the choice where it is one of logits and noise alone.
        """
        self.params = params
        self.kernels = None if params.shapes_logits or params.truncates else kernels
        self.seed = seed
        self.lots = lots(seed, prompt) if params.rejects else seed
        self.context = list(prompt)
        self.num_prompt = len(prompt)
        self.ends = torch.tensor(list(ends), dtype=torch.int64)
        self.bad_words = [list(word) for word in bad_words]
        bias = params.logit_bias or {}
        self.bias_ids = torch.tensor(list(bias.keys()), dtype=torch.int64)
        self.bias = torch.tensor(list(bias.values()), dtype=torch.float32)
        penalized = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0)
        self.counts = torch.zeros(vocab_size, dtype=torch.int32) if penalized else None
        self.in_prompt = torch.zeros(vocab_size if penalized else 0, dtype=torch.bool)
        if penalized:
            self.in_prompt[torch.tensor(self.context)] = True

    @property
    def num_chosen(self) -> int:
        """Output tokens so far."""
        return len(self.context) - self.num_prompt

    def advance(self, token: int) -> None:
        """``token`` follows the context."""
        self.context.append(token)
        if self.counts is not None:
            self.counts[token] += 1

    def rollback(self, count: int) -> None:
        """Take the last ``count`` tokens back."""
        for _ in range(count):
            token = self.context.pop()
            if self.counts is not None:
                self.counts[token] -= 1

    def recover(self, tokens: Sequence[int]) -> None:
        """Begin again after ``tokens``, whatever an interruption has left half done."""
        self.context = list(tokens)
        if self.counts is not None:
            self.counts.zero_()
            for token in tokens[self.num_prompt :]:
                self.counts[token] += 1

    def follow(self, certain: int, then: Sequence[int] = ()) -> None:
        """Go back to the first ``certain`` tokens of the context, and on along ``then``."""
        self.rollback(len(self.context) - certain)
        for token in then:
            self.advance(token)

    def choose(self, logits: Tensor) -> int:
        """The target's token after the context by the coupled rule.

        ``logits`` ``[vocab]``, any float dtype, are left as they are.

        Raises:
            OverflowError: one of them is not finite.
        """
        logits = logits.float()
        if self.kernels is not None:
            token = self.kernels.choose(logits.contiguous(), self._temperature, self._key())
            if token < 0:
                raise OverflowError
            return token
        if not is_finite(logits):
            raise OverflowError
        if self.params.shapes_logits:
            logits = self._shape(logits)
        if self.params.greedy:
            # NumPy's argmax is several times as fast as torch's, and takes the first of equals as well.
            return int(logits.numpy().argmax())
        scores, ids = self._truncate(logits / self._temperature)
        noise = gumbel_noise(self.seed, len(self.context), ids)
        return int(ids[(scores.double() + noise).argmax()])

    @property
    def guesses_alone(self) -> bool:
        """Whether its guesses depend on logits, seed and position alone, so that the kernels can make a whole chain."""
        return self.kernels is not None and not self.params.rejects

    def growth(self, steps: int, scores: NDArray[np.float32]) -> Growth:
        """How the kernels :meth:`guess` the tokens after the context; ``scores`` are ``[steps, vocab]``."""
        return Growth(
            key=seed_key(self.seed),
            position=len(self.context),
            steps=steps,
            temperature=self._temperature,
            scores=scores.ctypes.data,
        )

    @property
    def _temperature(self) -> float:
        return 0.0 if self.params.greedy else max(self.params.temperature, _COLDEST)

    def _key(self) -> int:
        return 0 if self.params.greedy else noise_key(self.seed, len(self.context))

    def reject(self, p: Tensor, guesses: Sequence[Drawn]) -> int:
        """The token after the context, whose law is ``p``, where ``guesses`` were made; never greedy."""
        position = len(self.context)

        def accepts(trial: int, chance: float) -> bool:
            return rejection_uniform(self.lots, position, trial) < chance

        def draw(p: Tensor) -> int:
            ids = p.nonzero().flatten()
            return int(ids[(p[ids].log() + rejection_noise(self.lots, position, ids)).argmax()])

        return reject(p, guesses, accepts, draw)

    def block(self, p: Callable[[int], Tensor], chain: Sequence[Drawn]) -> tuple[int, Tensor]:
        """How many guesses of a chain below the context are accepted, and the law of the token after them.

        ``p(i)`` is the law of the token after ``i`` of them.
        """
        position = len(self.context)
        return block(p, chain, lambda i, chance: block_uniform(self.lots, position, i) < chance)

    def guess(self, logits: Tensor, root: int, *, draw: bool = True) -> Guess | None:
        """What a draft model with these logits chooses after the context, in the target's place.

        Under the coupled rule it is :meth:`choose`, with the target's own noise: where draft and target agree on the
        distribution they agree on the token. Under the others it is a draw with noise of its own, a new one for each
        step, because what was accepted of the step before may have depended on all of that step's guesses.

        Args:
            logits: ``[vocab]``, any float dtype, left as they are; ``-inf`` is a token that the draft does not have.
            root: position of the last token that is not a guess, which tells the steps apart.
            draw: under the other rules, draw the guess; or else take the likeliest token, as a point mass.

        Returns:
            The guess; ``None`` if there is none, because all tokens are banned or the numbers overflow.
        """
        logits = logits.float()
        if self.kernels is not None and not self.params.rejects:
            key = None if self.params.greedy else self._key()
            guessed, confidence, made = self.kernels.guess(logits.contiguous(), self._temperature, key)
            return None if guessed < 0 else Guess(guessed, confidence, made)
        shaped = self._shape(logits, allow_none=True) if self.params.shapes_logits else logits
        if not math.isfinite(float(shaped.max())):
            return None
        if self.params.greedy:
            return _guess(shaped.numpy())
        kept, ids = self._truncate(shaped / self._temperature)
        kept, position = kept.double(), len(self.context)
        if not self.params.rejects:
            kept = kept + gumbel_noise(self.seed, position, ids)
        scores = torch.full((len(logits),), -math.inf, dtype=torch.float64).index_copy_(0, ids, kept)
        likeliest = _guess(scores.numpy())
        if not self.params.rejects or not draw:
            return likeliest
        token = int(ids[(kept + draft_noise(self.lots, root, position, ids)).argmax()])
        return replace(likeliest, token=token, q=scores.softmax(0))

    def distribution(self, logits: Tensor) -> Tensor:
        """``[vocab]`` float64: the law of the token after the context, for a temperature above 0."""
        shaped = self._shape(logits.float()) if self.params.shapes_logits else logits.float()
        scores, ids = self._truncate(shaped / self._temperature)
        return torch.zeros(len(logits), dtype=torch.float64).index_copy_(0, ids, scores.double().softmax(0))

    def _shape(self, logits: Tensor, *, allow_none: bool = False) -> Tensor:
        p = self.params
        if self.counts is not None:
            counts = self.counts
            if p.repetition_penalty != 1.0:
                penalized = torch.where(logits > 0, logits / p.repetition_penalty, logits * p.repetition_penalty)
                logits = torch.where(self.in_prompt | (counts > 0), penalized, logits)
            logits = logits - p.frequency_penalty * counts - p.presence_penalty * (counts > 0)
        if len(self.bias):
            logits = logits.index_add(0, self.bias_ids, self.bias)
        banned = self._banned()
        if not len(banned):
            return logits
        logits = logits.index_fill(0, banned, -math.inf)
        if not allow_none and logits.max() == -math.inf:
            msg = "min_tokens, stop_token_ids and bad_words ban every token; expected at least one to be left"
            raise OptionError(msg)
        return logits

    def _banned(self) -> Tensor:
        banned = [word[-1] for word in self.bad_words if len(word) == 1 or self.context[-len(word) + 1 :] == word[:-1]]
        ids = torch.tensor(banned, dtype=torch.int64)
        return torch.cat((ids, self.ends)) if self.num_chosen < self.params.min_tokens else ids

    def _truncate(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens that top-k, top-p and min-p leave: their scores and ids."""
        p = self.params
        if 0 < p.top_k < len(scores):
            scores, ids = scores.topk(p.top_k)
        elif p.top_p < 1.0:
            return self._nucleus(*_head(scores, p.top_p))
        else:
            ids = torch.arange(len(scores))
        return self._nucleus(scores, ids, scores.softmax(0)) if p.top_p < 1.0 else self._above_min_p(scores, ids)

    def _nucleus(self, scores: Tensor, ids: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Top-p of tokens in falling order; the one that crosses the threshold is kept, so at least one stays."""
        keep = probs.cumsum(0) - probs < self.params.top_p
        keep[0] = True  # also where top_p is 0 in float32
        return self._above_min_p(scores[keep], ids[keep])

    def _above_min_p(self, scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        if self.params.min_p == 0.0:
            return scores, ids
        keep = scores >= scores.max() + math.log(self.params.min_p)
        return scores[keep], ids[keep]


def is_finite(logits: Tensor) -> bool:
    """Whether no number has overflowed: a sum over one that has is none either."""
    return math.isfinite(np.add.reduce(logits.float().numpy(), axis=None))


def _guess(scores: NDArray[np.floating[Any]]) -> Guess:
    token = int(scores.argmax())
    return Guess(token, float(1.0 / np.exp(scores - scores[token]).sum()), scores)


def _head(scores: Tensor, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest tokens in falling order, at least as many as reach ``share``: scores, ids, probabilities.

    Sorting a large vocabulary costs milliseconds; nearly always a few tokens are enough.
    """
    total = scores.logsumexp(0)
    count = min(_HEAD, len(scores))
    top, ids = scores.topk(count)
    probs = (top - total).exp()
    if count < len(scores) and probs.sum() <= share:
        top, ids = scores.sort(descending=True, stable=True)
        probs = (top - total).exp()
    return top, ids, probs


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[dict[int, float]]:
    """Log-probabilities before any processor.

    Args:
        logits: ``[rows, vocab]``.
        tokens: the token to report for each row.
        top: how many of the likeliest to report beside it.

    Returns:
        One ``{token id: log-probability}`` per row, the chosen token first.
    """
    logprobs = logits.float().log_softmax(-1)
    values, ids = logprobs.topk(min(top, logits.shape[-1]), dim=-1)
    reports = []
    for row, token in enumerate(tokens):
        report = {token: float(logprobs[row, token])}
        report.update(zip(ids[row].tolist(), values[row].tolist(), strict=True))
        reports.append(report)
    return reports
