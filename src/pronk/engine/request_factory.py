"""Creation of requests from prompts and sampling options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from pronk.base.errors import ContextError, OptionError, PromptError
from pronk.base.quantities import count_text
from pronk.checkpoint.config import ModelConfig
from pronk.drafting.autoregressive import Autoregressive
from pronk.drafting.proposer import Proposer
from pronk.engine.pooling import EmbeddingOptions, HiddenPooler
from pronk.engine.ranking import RelevanceQuestion
from pronk.engine.request import Request, RequestResult, Speculation
from pronk.kernels.library import Kernels
from pronk.models.adapters import Adapter
from pronk.models.model_runner import ModelRunner
from pronk.sampling.logits_processors import BannedTokens, LogitsProcessor, TokenContext
from pronk.sampling.noise import derive_seed, random_seed
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.sampling.thinking import ThinkingBudget
from pronk.text.chat.answers import AnswerCalls, AnswerFormat, RepeatedCalls
from pronk.text.chat.branches import ChatPrompt
from pronk.text.chat.messages import Messages, TemplateOptions, Tools
from pronk.text.guarded import TimeLimit, shared_time
from pronk.text.infill import ContextFile, InfillFormat
from pronk.text.stream import TextStream
from pronk.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pronk.drafting.combined.grammar import GrammarProposer
    from pronk.sampling.grammars import Grammars


class RequestFactory:
    """Checks prompts and options against one model and creates requests."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        kernels: Kernels | None,
        *,
        share_prefixes: bool = False,
    ) -> None:
        """Create a factory of requests for a model.

        ``share_prefixes``: whether the KV cache of the requests has a prefix cache.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.kernels = kernels
        self.share_prefixes = share_prefixes
        self._grammar_proposers: WeakValueDictionary[int, GrammarProposer] = WeakValueDictionary()

    @cached_property
    def grammars(self) -> Grammars:
        """Grammars of guided decoding, compiled for this model's vocabulary and cached."""
        from pronk.sampling.grammars import Grammars  # noqa: PLC0415 - most requests have no guide

        return Grammars(self.tokenizer, self.config.vocab_size, self.config.eos_ids)

    @cached_property
    def answer_format(self) -> AnswerFormat:
        """Format of the model's thoughts and tool calls."""
        return AnswerFormat(self.tokenizer)

    @cached_property
    def infill_format(self) -> InfillFormat:
        """Form of the model's prompts for filling in the middle.

        Raises ``OptionError`` if the model has no tokens for them.
        """
        return InfillFormat.of(self.tokenizer)

    def encode_infill(
        self, prefix: str | Sequence[int], suffix: str, context: Iterable[ContextFile] = ()
    ) -> list[int]:
        """Return the token ids of a prompt for the text between ``prefix`` and ``suffix``.

        The ids are checked as by :meth:`encode_prompt`. Arguments and further errors are those of
        :meth:`~pronk.text.infill.InfillFormat.encode` and :attr:`infill_format`.
        """
        with shared_time():
            return self.encode_prompt(self.infill_format.encode(prefix, suffix, context))

    def end_infill(self, params: SamplingParams) -> SamplingParams:
        """Return sampling parameters whose text also ends at the tokens of another part or file."""
        stop_ids = dict.fromkeys([*params.stop_token_ids, *self.infill_format.stop_ids])
        return replace(params, stop_token_ids=tuple(stop_ids))

    def encode_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the token ids of a prompt; raise PromptError if it is empty or has unknown ids.

        Raises ``ContextError`` if the prompt is too long.
        """
        vocab = self.config.vocab_size
        context = self.config.context
        if not isinstance(prompt, (str, list, tuple)):
            msg = f"expected a prompt as text or as a list of token ids, found {prompt!r}"
            raise PromptError(msg)
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            msg = "prompt: expected at least one token, found none; give a text or token ids"
            raise PromptError(msg)
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                msg = f"prompt: expected token ids in 0..{vocab - 1}, found {token!r}"
                raise PromptError(msg)
        if len(ids) >= context:
            most = count_text(context - 1, "token")
            msg = (
                f"prompt: expected at most {most} (context {context}), found {len(ids)}; shorten it"
            )
            raise ContextError(msg)
        return ids

    def encode_prompts(
        self, prompts: Sequence[str | Sequence[int]], limit: TimeLimit | None = None
    ) -> list[list[int]]:
        """Return the token ids of each prompt, as :meth:`encode_prompt`.

        If the tokenizer runs in a child process, one time limit covers all prompts. ``limit`` is
        the limit under which earlier prompts of the same request were encoded.
        """
        with shared_time(limit):
            return [self.encode_prompt(prompt) for prompt in prompts]

    def encode_chat(
        self,
        messages: Messages,
        *,
        trusted: bool = True,
        tools: Tools | None = None,
        options: TemplateOptions | None = None,
    ) -> ChatPrompt:
        """Return the token ids of a conversation, checked as by :meth:`encode_prompt`.

        Branch positions take further renderings. Only models with recurrent layers and a prefix
        cache get them: the KV cache of other models can be cut at any position. Arguments and
        further errors are those of :meth:`~pronk.text.tokenizer.Tokenizer.chat_ids`.
        """
        if self.config.recurrent is None or not self.share_prefixes:
            encode = self.tokenizer.chat_ids
            prompt = ChatPrompt(encode(messages, trusted=trusted, tools=tools, options=options))
        else:
            prompt = self.tokenizer.chat_prompt(
                messages, trusted=trusted, tools=tools, options=options
            )
        return prompt._replace(token_ids=self.encode_prompt(prompt.token_ids))

    @cached_property
    def relevance(self) -> RelevanceQuestion:
        """Question whether a document answers a query, for this model's tokenizer."""
        return RelevanceQuestion(self.tokenizer)

    def encode_relevance(
        self, query: str, document: str, instruction: str | None = None
    ) -> list[int]:
        """Return the token ids of the question whether a document answers a query.

        Special tokens in the texts are read as plain text. Arguments are those of
        :meth:`~pronk.engine.ranking.RelevanceQuestion.messages`, errors those of
        :meth:`encode_chat`.
        """
        messages = self.relevance.messages(query, document, instruction)
        prompt = self.encode_chat(messages, trusted=False, options=self.relevance.options)
        return prompt.token_ids

    def check(self, prompt: str | None, params: SamplingParams, suffix: str | None = None) -> None:
        """Check a request before the weights are loaded: its prompt, token ids and guide.

        Raises the errors of :meth:`create_request`. A ``prompt`` of ``None`` is not checked. With a
        ``suffix``, the request is for the text between ``prompt`` and ``suffix``.
        """
        if prompt is not None and suffix is not None:
            self.encode_infill(prompt, suffix)
        elif prompt is not None:
            self.encode_prompt(prompt)
        self._check_ids(params)
        if params.guide is not None:
            self.grammars.compile(params.guide)

    def create_batch(
        self,
        prompts: Sequence[str | list[int]],
        params: Sequence[SamplingParams],
        proposer: Proposer[Any],
        adapter: Adapter | None,
        branch_positions: Sequence[Sequence[int]] = (),
    ) -> list[list[Request]]:
        """Create the samples of several prompts, with parameters from :func:`params_per_prompt`.

        ``branch_positions`` has, for each prompt, :attr:`Request.branch_positions`; it is empty if
        no prompt is a conversation.
        """
        positions = branch_positions or [()] * len(prompts)
        encoded = self.encode_prompts(prompts)
        groups = list[list[Request]]()
        for ids, each, branches in zip(encoded, params, positions, strict=True):
            samples = self.create_samples(ids, each, proposer, adapter=adapter)
            for request in samples:
                request.branch_positions = tuple(branches)
            groups.append(samples)
        return groups

    def create_samples(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        proposer: Proposer[Any],
        *,
        adapter: Adapter | None = None,
        processors: Callable[[], Sequence[LogitsProcessor]] = tuple,
    ) -> list[Request]:
        """Create the ``params.n`` samples of one prompt.

        Later samples share the prompt's KV blocks.

        ``adapter`` is an adapter of the model; ``None``: the model alone. ``processors`` returns
        new logits processors for each sample, because they have state per text (see
        :meth:`create_request`). Raises ``OptionError`` if an option does not fit the model or the
        prompt.
        """
        seed = random_seed() if params.seed is None else params.seed
        create = partial(self.create_request, prompt, params, proposer)
        samples = list[Request]()
        for number in range(params.n):
            parent = samples[0] if samples else None
            samples.append(
                create(seed=derive_seed(seed, number), parent=parent, processors=processors())
            )
            samples[-1].adapter = adapter
        return samples

    def create_embeddings(
        self,
        texts: Sequence[str | Sequence[int]],
        options: EmbeddingOptions,
        runner: ModelRunner,
        adapter: Adapter | None = None,
    ) -> list[Request]:
        """Create one request per text, which computes an embedding and generates no tokens.

        Raises ``OptionError`` if an option does not fit the model; ``PromptError`` as
        :meth:`encode_prompt`.
        """
        options.check(self.config.hidden_size)
        if isinstance(texts, str):
            msg = (
                f"expected a list of texts or of lists of token ids, found the text {texts!r:.40}; "
                "put it into a list"
            )
            raise PromptError(msg)
        # The scheduler reserves one slot for a token that is never generated, so max_tokens is 1.
        params = SamplingParams(max_tokens=1)
        proposer = Autoregressive()
        requests = list[Request]()
        for prompt in self.encode_prompts(texts):
            requests.append(self.create_request(prompt, params, proposer))
            pooler = HiddenPooler(options, len(prompt), self.config.num_layers, runner.final_norm)
            requests[-1].pooler = pooler
            requests[-1].adapter = adapter
        return requests

    def watch_calls(self, requests: Iterable[Request], calls: AnswerCalls) -> None:
        """End the text of each new request at the first tool call that repeats an earlier one."""
        for request in requests:
            opened = self.answer_format.opened_by(request.prompt)
            reader = self.answer_format.reader(
                calls.schemas, opened=opened, has_form=calls.has_form
            )
            request.result.calls = RepeatedCalls(reader)

    def encode_continuations(
        self, prompt: str | list[int], ids: Sequence[int], texts: Sequence[str]
    ) -> list[list[int]]:
        """Return the token ids of each text after ``prompt``, whose token ids are ``ids``.

        A text is encoded together with the prompt; alone if ``prompt`` is a list of token ids, or
        if its first characters would merge with the prompt's last token. Raises ``OptionError`` if
        the tokenizer has no tokens for a text.
        """
        with shared_time():
            return [self._encode_continuation(prompt, ids, text) for text in texts]

    def _encode_continuation(
        self, prompt: str | list[int], ids: Sequence[int], text: str
    ) -> list[int]:
        joint_ids = self.tokenizer.encode(prompt + text) if isinstance(prompt, str) else []
        own_ids = joint_ids[len(ids) :]
        is_merged = joint_ids[: len(ids)] != list(ids)
        if is_merged or not own_ids:
            own_ids = self.tokenizer.encode(text, add_special_tokens=False)
        if not own_ids:
            msg = (
                f"options: expected texts of at least one token, found {text!r:.60}; "
                "change the text"
            )
            raise OptionError(msg)
        return own_ids

    def create_request(
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
        """Create one request; raise OptionError if an option does not fit the model or the prompt.

        The request continues after the token ids of ``prompt``, at least one, and of ``output``,
        which were generated before and count for ``max_tokens``. ``parent`` is the first sample of
        the same prompt, if this is a later one; its KV blocks may be shared. ``processors`` apply
        after those of the options; each receives the tokens after ``prompt`` and ``output``.
        """
        context = self.config.context
        if isinstance(params.prediction, str):
            token_ids = self.tokenizer.encode_plain(params.prediction)
            params = replace(params, prediction=token_ids)
        if len(prompt) + params.max_tokens > context:
            msg = (
                f"max_tokens: expected at most {context - len(prompt)} after a prompt of "
                f"{len(prompt)} tokens "
                f"(context {context}), found {params.max_tokens}; lower max_tokens or shorten the "
                "prompt"
            )
            raise OptionError(msg)
        self._check_ids(params)
        stop_token_ids = stop_ids_with_eos(params, self.config.eos_ids)
        tokens = [*prompt, *output]
        grammar = None if params.guide is None else self.grammars.compile(params.guide)
        thinking = list[LogitsProcessor]()
        if params.thinking_budget is not None:
            markers = self.answer_format.thinking_markers
            if markers is not None:
                message = self.tokenizer.encode_plain(params.thinking_message)
                budget = ThinkingBudget(params.thinking_budget, markers, prompt, output, message)
                thinking.append(budget)
        request_sampler = sampler(
            params,
            seed,
            TokenContext(tokens, len(prompt)),
            self.config.vocab_size,
            banned=BannedTokens(sorted(stop_token_ids), self._bad_words(params)),
            kernels=self.kernels,
            processors=[*thinking, *processors],
            guide=None
            if grammar is None
            else grammar.new_processor(output, one_end=params.guide_mode == "jump"),
        )
        detokenizer = TextStream(self.tokenizer, prompt, params.stops, params.min_tokens)
        if grammar is not None and params.guide_mode == "forced":
            proposer = self._add_grammar_drafter(proposer)
        request = Request(
            prompt,
            tokens,
            params,
            seed,
            request_sampler,
            Speculation(proposer),
            RequestResult(detokenizer),
            stop_token_ids,
            parent,
        )
        request.stats.compile_seconds = 0.0 if grammar is None else grammar.seconds
        return request

    def _add_grammar_drafter(self, proposer: Proposer[Any]) -> Proposer[Any]:
        """Return a wrapper that proposes the guide's forced tokens before those of ``proposer``.

        Requests with the same proposer share one wrapper, which exists as long as one of them uses
        it.
        """
        from pronk.drafting.combined.grammar import GrammarProposer  # noqa: PLC0415 - most requests have no guide

        if isinstance(proposer, GrammarProposer):
            return proposer
        # the wrapper keeps ``proposer`` alive, so no other object can have the same id
        wrapper = self._grammar_proposers.get(id(proposer))
        if wrapper is None:
            wrapper = self._grammar_proposers[id(proposer)] = GrammarProposer(proposer)
        return wrapper

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        encode = self.tokenizer.encode
        words = [
            encode(prefix + word, add_special_tokens=False)
            for word in params.bad_words
            for prefix in ("", " ")
        ]
        if not all(words):
            msg = (
                "bad_words: expected texts of at least one token, found "
                f"{list(params.bad_words)!r}; change the text"
            )
            raise OptionError(msg)
        return words

    def _check_ids(self, params: SamplingParams) -> None:
        if params.thinking_budget is not None and self.answer_format.reasoning is None:
            msg = (
                "thinking_budget: expected a model that thinks, found a chat template without "
                "thoughts; leave it out"
            )
            raise OptionError(msg)
        vocab = self.config.vocab_size
        id_options = ["logit_bias", "stop_token_ids", "logprob_token_ids"]
        if not isinstance(params.prediction, str):
            id_options.append("prediction")
        for name in id_options:
            for token in getattr(params, name) or ():
                if token >= vocab:
                    msg = f"{name}: expected token ids in 0..{vocab - 1}, found {token}"
                    raise OptionError(msg)


def stop_ids_with_eos(params: SamplingParams, eos_ids: Sequence[int]) -> frozenset[int]:
    """Return the token ids that end a text: ``stop_token_ids``, and ``eos_ids`` unless ignored."""
    if params.ignore_eos:
        return frozenset(params.stop_token_ids)
    return frozenset((*params.stop_token_ids, *eos_ids))


def params_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    """Return one ``SamplingParams`` per prompt, from one for all prompts or a list.

    Called before a drafter is loaded, which may take long, so that errors are found at once.

    Raises ``OptionError`` if ``params`` is of another type or length.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, (list, tuple)) or not all(
        isinstance(item, SamplingParams) for item in params
    ):
        remedy = "write SamplingParams(max_tokens=64)"
        msg = f"params: expected SamplingParams or a list of them, found {params!r:.60}; {remedy}"
        raise OptionError(msg)
    if len(params) != count:
        msg = (
            f"params: expected one for all prompts or one per prompt ({count}), found {len(params)}"
        )
        raise OptionError(msg)
    return params
