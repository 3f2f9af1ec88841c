"""From what a user asks to requests that the engine can run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

from pronk.architecture.config import ModelConfig
from pronk.drafters.combined.grammar import GrammarProposer
from pronk.engine.request import Request
from pronk.errors import ContextError, OptionError, PromptError
from pronk.kernels.library import Kernels
from pronk.sampling.logits_processors import LogitsProcessor
from pronk.sampling.noise import derive_seed, fresh_seed
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.speculation.proposer import Proposer
from pronk.structured.grammars import Grammars
from pronk.tokenization.stream import TextStream
from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["RequestFactory", "end_ids"]


class RequestFactory:
    """Checks prompts and options against one model, and makes requests of them.

    The facade, the benchmark and whoever serves the model ask it alike.

    Attributes:
        config: the model's shape.
        tokenizer: its tokenizer.
        kernels: what makes its choices, or ``None``.
        grammars: what compiles guides for it.
    """

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer, kernels: Kernels | None) -> None:
        self.config, self.tokenizer, self.kernels = config, tokenizer, kernels
        self.grammars = Grammars(tokenizer, config.vocab_size, config.eos_ids)
        self._forcing: WeakValueDictionary[int, GrammarProposer] = WeakValueDictionary()

    def ids(self, prompt: str | Sequence[int]) -> list[int]:
        """The token ids of a prompt.

        Raises:
            PromptError: it is empty, has ids outside the vocabulary, or (``ContextError``) is too long.
        """
        vocab, context = self.config.vocab_size, self.config.context
        if not isinstance(prompt, (str, list, tuple)):
            msg = f"expected a prompt as text or as a list of token ids, found {prompt!r}"
            raise PromptError(msg)
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            msg = "the prompt is empty; expected at least one token"
            raise PromptError(msg)
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                msg = f"the prompt has token id {token!r}; expected integers in 0..{vocab - 1}"
                raise PromptError(msg)
        if len(ids) >= context:
            msg = f"the prompt has {len(ids)} tokens; the model's context is {context}, so at most {context - 1} fit"
            raise ContextError(msg)
        return ids

    def samples(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        proposer: Proposer[Any],
        *,
        processors: Callable[[], Sequence[LogitsProcessor]] = tuple,
    ) -> list[Request]:
        """The ``params.n`` samples of one prompt; the later ones start from the first one's cache.

        ``processors`` makes those of one sample (see :meth:`request`), as each follows its own text.

        Raises:
            OptionError: an option that does not fit the model or the prompt.
        """
        seed = fresh_seed() if params.seed is None else params.seed
        first = self.request(prompt, params, proposer, seed=seed, processors=processors())
        rest = [
            self.request(
                prompt, params, proposer, seed=derive_seed(seed, sample), parent=first, processors=processors()
            )
            for sample in range(1, params.n)
        ]
        return [first, *rest]

    def spelled(self, prompt: str | list[int], ids: Sequence[int], texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each of some texts behind a prompt, whose own are ``ids``.

        As the tokenizer writes it there, or, where its first characters would join the prompt's last token, by itself.

        Raises:
            OptionError: there are no tokens for one.
        """
        spelled: list[list[int]] = []
        for text in texts:
            whole = self.tokenizer.encode(prompt + text) if isinstance(prompt, str) else []
            joined = whole[: len(ids)] != list(ids) or len(whole) == len(ids)
            spelled.append(self.tokenizer.encode(text, add_special_tokens=False) if joined else whole[len(ids) :])
            if not spelled[-1]:
                msg = f"options: expected texts that the tokenizer has tokens for, found {text!r:.60}"
                raise OptionError(msg)
        return spelled

    def request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        proposer: Proposer[Any],
        *,
        seed: int = 0,
        output: Sequence[int] = (),
        parent: Request | None = None,
        sampler: type[Sampler] = Sampler,
        processors: Sequence[LogitsProcessor] = (),
    ) -> Request:
        """One request.

        Args:
            prompt: at least one token id (see :meth:`ids`).
            params: the options; ``max_tokens`` counts ``output`` as well.
            proposer: who guesses.
            seed: of its choices.
            output: tokens after the prompt that are certain already.
            parent: a request of the same prompt, whose cache this one may start from while it runs.
            sampler: who chooses.
            processors: what changes the logits after the options have; of this request alone, and told of the tokens
                after ``prompt`` and ``output``.

        Raises:
            OptionError: an option that does not fit the model or the prompt.
        """
        self._check(prompt, params)
        stop_token_ids, tokens = end_ids(params, self.config.eos_ids), [*prompt, *output]
        grammar = None if params.guide is None else self.grammars.compile(params.guide)
        own = sampler(
            params,
            seed,
            tokens,
            self.config.vocab_size,
            num_prompt=len(prompt),
            stop_token_ids=sorted(stop_token_ids),
            bad_words=self._bad_words(params),
            kernels=self.kernels,
            processors=processors,
            guide=None if grammar is None else grammar.follower(output),
        )
        text = TextStream(self.tokenizer, prompt, params.stops, params.min_tokens)
        if grammar is not None and params.guide_mode == "forced":
            proposer = self._with_forced(proposer)
        request = Request(prompt, tokens, params, seed, proposer, own, text, stop_token_ids, parent)
        request.stats.compile_seconds = 0.0 if grammar is None else grammar.seconds
        return request

    def _with_forced(self, proposer: Proposer[Any]) -> Proposer[Any]:
        """The guesser, and what guides force before it: one for each, so that requests are asked for together."""
        if isinstance(proposer, GrammarProposer):
            return proposer
        found = self._forcing.get(id(proposer))  # which it holds, so that its id is no other's
        if found is None:
            found = self._forcing[id(proposer)] = GrammarProposer(proposer)
        return found

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        encode = self.tokenizer.encode
        words = [encode(lead + word, add_special_tokens=False) for word in params.bad_words for lead in ("", " ")]
        if not all(words):
            msg = f"bad_words: expected texts that the tokenizer has tokens for, found {list(params.bad_words)!r}"
            raise OptionError(msg)
        return words

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        vocab, context = self.config.vocab_size, self.config.context
        if len(prompt) + params.max_tokens > context:
            msg = (
                f"max_tokens: {params.max_tokens} after a prompt of {len(prompt)} tokens exceed the model's context of "
                f"{context}; expected at most {context - len(prompt)}"
            )
            raise OptionError(msg)
        for name in ("logit_bias", "stop_token_ids", "logprob_token_ids"):
            for token in getattr(params, name) or ():
                if token >= vocab:
                    msg = f"{name}: expected token ids in 0..{vocab - 1}, found {token}"
                    raise OptionError(msg)


def end_ids(params: SamplingParams, eos_ids: Sequence[int]) -> frozenset[int]:
    """The token ids that end a request."""
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
