"""Logits processors: changes that a request's options make to the target's logits before sampling.

A processor follows the context: the sampler advances the processor over every tentative token and
rolls it back over rejected tokens. At each node of a draft tree, the processor's state is therefore
that of the text up to the node.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from pronk.base.arrays import Array
from pronk.sampling.params import SamplingParams

# Largest absolute value of a logit after penalties. It is small enough that a division by the
# lowest temperature does not overflow float32.
_MAX_LOGIT = 1e8


class BannedTokens(NamedTuple):
    """Token ids that a request's options ban.

    Attributes:
        stop_token_ids: tokens that end the text; banned until the output has ``min_tokens`` tokens.
        bad_words: token sequences of which none is ever completed.
    """

    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()


NOTHING_BANNED = BannedTokens()


class TokenContext:
    """A request's committed tokens, followed by tentative tokens.

    Attributes:
        committed: the request's own list, not a copy, so that tokens that the request appends are
            visible at once. The context does not modify the list.
        tentative: tokens appended during verification or drafting.
        num_prompt: number of committed tokens that are the prompt; by default, all.
    """

    def __init__(self, committed: Sequence[int], num_prompt: int | None = None) -> None:
        self.committed = committed
        self.tentative: list[int] = []
        self.num_prompt = len(committed) if num_prompt is None else num_prompt

    def __len__(self) -> int:
        """Return the number of all tokens: the position of the next token."""
        return len(self.committed) + len(self.tentative)

    @property
    def num_generated(self) -> int:
        """Number of tokens after the prompt, tentative draft tokens included."""
        return len(self) - self.num_prompt

    def last_tokens(self, count: int) -> list[int]:
        """Return the last ``count`` tokens (at least 1), or all tokens if there are fewer."""
        num_committed = max(0, count - len(self.tentative))
        start = max(0, len(self.committed) - num_committed)
        return [*self.committed[start:], *self.tentative[-count:]]


class LogitsProcessor(Protocol):
    """Change of the logits of the next token that depends on the tokens so far.

    A subclass that reads the tokens from the sampler's context overrides neither ``advance`` nor
    ``rollback``.
    """

    def mask(self, logits: Array) -> Array:
        """Return new logits ``[vocab]`` float32 for the current context; ``-inf`` bans a token."""

    def advance(self, token: int) -> None:  # noqa: ARG002 - for overrides
        """Append ``token`` to the context.

        The mask may ban ``token``, because drafters need not apply the mask. Draft tokens may also
        follow a stop token, so the mask must allow at least one token after a stop token.
        """
        return

    def rollback(self, count: int) -> None:  # noqa: ARG002 - for overrides
        """Remove the last ``count`` tentative tokens from the processor's state.

        During the call, the sampler's ``context`` still has these tokens.
        """
        return


class GuideProcessor(LogitsProcessor, Protocol):
    """Logits processor of a guide, with queries for drafters.

    :class:`pronk.sampling.grammar_processor.GrammarProcessor` implements this protocol.
    """

    def allows(self, token: int) -> bool:
        """Return whether the guide allows ``token`` after the current context."""

    def forced(self) -> list[int]:
        """Return the tokens that must come next, up to the first position with a choice.

        The list is empty if the guide allows several tokens next.
        """


class Penalties(LogitsProcessor):
    """Repetition, presence and frequency penalties of a request.

    The repetition penalty (Keskar et al. 2019, section 4.1) applies to tokens of the prompt and the
    output. Presence and frequency penalty (OpenAI's API) apply to tokens of the output.
    """

    def __init__(self, params: SamplingParams, context: TokenContext, vocab_size: int) -> None:
        self.context = context
        self.params = params
        self.counts = np.zeros(vocab_size, np.int32)
        self.in_prompt = np.zeros(vocab_size, np.bool_)
        self.in_prompt[np.array(context.committed[: context.num_prompt], np.intp)] = True
        np.add.at(self.counts, np.array(context.committed[context.num_prompt :], np.intp), 1)

    def mask(self, logits: Array) -> Array:
        params = self.params
        logits = logits.copy()
        in_output = self.counts > 0
        if params.repetition_penalty != 1.0:
            ids = np.flatnonzero(self.in_prompt | in_output)
            x = logits[ids]
            # The division by a tiny penalty may overflow to infinity, which the next line clips.
            with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                x = np.where(x > 0, x / params.repetition_penalty, x * params.repetition_penalty)
            logits[ids] = np.clip(x, -_MAX_LOGIT, _MAX_LOGIT)
        ids = np.flatnonzero(in_output)
        logits[ids] -= params.frequency_penalty * self.counts[ids].astype(np.float32)
        logits[ids] -= params.presence_penalty
        return logits

    def advance(self, token: int) -> None:
        self.counts[token] += 1

    def rollback(self, count: int) -> None:
        if count:
            self.forget(self.context.tentative[-count:])

    def forget(self, tokens: Iterable[int]) -> None:
        """Subtract tokens of the output from the counts."""
        for token in tokens:
            self.counts[token] -= 1


class LogitBias(LogitsProcessor):
    """Add a fixed value to the logit of each of some tokens, as the option ``logit_bias`` says."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self.ids = np.array(list(bias.keys()), np.intp)
        self.values = np.array(list(bias.values()), np.float32)

    def mask(self, logits: Array) -> Array:
        logits = logits.copy()
        logits[self.ids] += self.values
        return logits


class BadWords(LogitsProcessor):
    """Ban tokens that would complete one of the token sequences ``words``."""

    def __init__(self, words: Sequence[Sequence[int]], context: TokenContext) -> None:
        self.context = context
        self.words = [list(word) for word in words]
        self.max_length = max(map(len, self.words))

    def mask(self, logits: Array) -> Array:
        last = self.context.last_tokens(self.max_length)
        banned = [
            word[-1] for word in self.words if len(word) == 1 or last[1 - len(word) :] == word[:-1]
        ]
        return _ban(logits, banned)


class MinTokens(LogitsProcessor):
    """Ban stop tokens until the output has ``min_tokens`` tokens."""

    def __init__(
        self, min_tokens: int, stop_token_ids: Sequence[int], context: TokenContext
    ) -> None:
        self.context = context
        self.min_tokens = min_tokens
        self.stop_token_ids = list(stop_token_ids)

    def mask(self, logits: Array) -> Array:
        too_short = self.context.num_generated < self.min_tokens
        return _ban(logits, self.stop_token_ids if too_short else [])


def _ban(logits: Array, tokens: list[int]) -> Array:
    if not tokens:
        return logits
    logits = logits.copy()
    logits[tokens] = -math.inf
    return logits


def make_processors(
    params: SamplingParams,
    context: TokenContext,
    vocab_size: int,
    banned: BannedTokens = NOTHING_BANNED,
) -> list[LogitsProcessor]:
    """Return the logits processors for a request's options, in order of application."""
    processors: list[LogitsProcessor] = []
    adds_penalties = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
    if params.repetition_penalty != 1.0 or adds_penalties:
        processors.append(Penalties(params, context, vocab_size))
    if params.logit_bias:
        processors.append(LogitBias(params.logit_bias))
    if banned.bad_words:
        processors.append(BadWords(banned.bad_words, context))
    if params.min_tokens and banned.stop_token_ids:
        processors.append(MinTokens(params.min_tokens, banned.stop_token_ids, context))
    return processors
