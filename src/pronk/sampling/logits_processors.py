"""What a request's options do to the target's logits before a token is chosen from them.

A processor stands where the context stands: it is told of every token that is tried ahead, and takes those back that
come to nothing, so that at every node of a tree it sees the true context of that node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pronk.sampling.params import SamplingParams
from pronk.sampling.token_context import TokenContext

__all__ = ["GuideProcessor", "LogitsProcessor", "make_processors"]


class LogitsProcessor(Protocol):
    """Changes logits by the tokens before them."""

    def mask(self, logits: Tensor) -> Tensor:
        """The logits, ``[vocab]`` float32, as the processor wants them after the present context; ``-inf`` is a ban.

        What is given is left as it is.
        """
        ...

    def advance(self, token: int) -> None:
        """``token`` follows the context: any of the vocabulary, as drafters try tokens that no mask has seen.

        The walk goes on behind a token that ends the text if the tree does, so a mask leaves something there too.
        """
        ...

    def rollback(self, count: int) -> None:
        """The last ``count`` tokens of the context are about to be taken back; they are tokens tried ahead."""
        ...


class GuideProcessor(LogitsProcessor, Protocol):
    """A processor that knows which texts there may be, and so what must come (:mod:`pronk.structured`)."""

    def legal(self, token: int) -> bool:
        """Whether its mask would leave ``token`` after the present context."""
        ...

    def forced(self) -> list[int]:
        """The text that must come after the present context, in the tokenizer's own tokens; none, if there is none.

        They are guesses, that the mask confirms or not.
        """
        ...


class _ContextProcessor:
    """A processor that looks the tokens up where they are."""

    def __init__(self, context: TokenContext) -> None:
        self.context = context

    def advance(self, token: int) -> None:
        """Nothing: the context has it."""

    def rollback(self, count: int) -> None:
        """Nothing: the context will lack them."""


class Penalties(_ContextProcessor):
    """Repetition, presence and frequency penalties (Keskar et al. 2019, section 4.1, and as OpenAI defines the others).

    The first counts prompt and output, the others the output alone.
    """

    def __init__(self, params: SamplingParams, context: TokenContext, vocab_size: int) -> None:
        super().__init__(context)
        self.params = params
        self.counts = torch.zeros(vocab_size, dtype=torch.int32)
        self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool)
        self.in_prompt[torch.tensor(context.certain[: context.num_prompt], dtype=torch.int64)] = True
        for token in context.certain[context.num_prompt :]:
            self.counts[token] += 1

    def mask(self, logits: Tensor) -> Tensor:
        """Logits less the penalties of the tokens so far."""
        p, counts = self.params, self.counts
        if p.repetition_penalty != 1.0:
            penalized = torch.where(logits > 0, logits / p.repetition_penalty, logits * p.repetition_penalty)
            logits = torch.where(self.in_prompt | (counts > 0), penalized, logits)
        return logits - p.frequency_penalty * counts - p.presence_penalty * (counts > 0)

    def advance(self, token: int) -> None:
        """Count it."""
        self.counts[token] += 1

    def rollback(self, count: int) -> None:
        """Count them no more."""
        for token in self.context.ahead[-count:] if count else ():
            self.counts[token] -= 1


class LogitBias(_ContextProcessor):
    """A value for some tokens, whatever came before."""

    def __init__(self, bias: dict[int, float], context: TokenContext) -> None:
        super().__init__(context)
        self.ids = torch.tensor(list(bias.keys()), dtype=torch.int64)
        self.values = torch.tensor(list(bias.values()), dtype=torch.float32)

    def mask(self, logits: Tensor) -> Tensor:
        """Logits plus the bias."""
        return logits.index_add(0, self.ids, self.values)


class BadWords(_ContextProcessor):
    """Token sequences that are never completed."""

    def __init__(self, words: Sequence[Sequence[int]], context: TokenContext) -> None:
        super().__init__(context)
        self.words = [list(word) for word in words]
        self.longest = max(map(len, self.words))

    def mask(self, logits: Tensor) -> Tensor:
        """Logits without the tokens that would complete a bad word."""
        last = self.context.last(self.longest)
        banned = [word[-1] for word in self.words if len(word) == 1 or last[1 - len(word) :] == word[:-1]]
        return logits.index_fill(0, torch.tensor(banned, dtype=torch.int64), -math.inf) if banned else logits


class MinTokens(_ContextProcessor):
    """No token that ends the text before there are ``least`` of them."""

    def __init__(self, least: int, stop_token_ids: Sequence[int], context: TokenContext) -> None:
        super().__init__(context)
        self.least = least
        self.stop_token_ids = torch.tensor(list(stop_token_ids), dtype=torch.int64)

    def mask(self, logits: Tensor) -> Tensor:
        """Logits without the ends, while there are too few tokens."""
        return logits.index_fill(0, self.stop_token_ids, -math.inf) if self.context.num_chosen < self.least else logits


def make_processors(
    params: SamplingParams,
    context: TokenContext,
    vocab_size: int,
    *,
    stop_token_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> list[LogitsProcessor]:
    """The processors that a request's options ask for, in their order.

    Args:
        params: the options.
        context: what the choices follow.
        vocab_size: ids that logits are for.
        stop_token_ids: token ids that end the text.
        bad_words: token sequences never to complete.
    """
    made: list[LogitsProcessor] = []
    if (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0):
        made.append(Penalties(params, context, vocab_size))
    if params.logit_bias:
        made.append(LogitBias(dict(params.logit_bias), context))
    if bad_words:
        made.append(BadWords(bad_words, context))
    if params.min_tokens and stop_token_ids:
        made.append(MinTokens(params.min_tokens, stop_token_ids, context))
    return made
