"""The synchronous API: load a model; generate, stream, chat, compare given texts, rank, embed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, cast, overload

from pronk.base.arrays import KV_DTYPES, Array
from pronk.base.keywords import known_keywords
from pronk.base.options import takes
from pronk.cache.budget import KVBudget, parse_memory
from pronk.checkpoint.gguf.checkpoint import GgufCheckpoint, is_gguf
from pronk.checkpoint.hub.recommendations import add_known_sampling
from pronk.drafting import Drafter, Proposer, make_drafter
from pronk.drafting.acceptance_file import AcceptanceFile
from pronk.drafting.proposer_cache import ProposerCache
from pronk.drafting.target import Target
from pronk.engine.engine import Engine, prefill_size
from pronk.engine.options import LLMOptions
from pronk.engine.outputs import Choice, Completion, Piece
from pronk.engine.pooling import EmbeddingOptions, Pooling
from pronk.engine.request import Request
from pronk.engine.request_factory import RequestFactory, params_per_prompt
from pronk.engine.scoring import score
from pronk.engine.workers import is_launched, start_workers
from pronk.kernels.threads import set_threads
from pronk.kernels.weight_cache import WeightCache
from pronk.models.adapters import Adapters
from pronk.models.choice import choose_bits, choose_kernels, compute_dtype
from pronk.models.loader import (
    has_quantized_weights,
    load_decoder,
    parse_dtype,
    read_config,
)
from pronk.models.prompt_cache import open_prompt_cache
from pronk.models.resolve import resolve_model
from pronk.sampling.defaults import recommended_params
from pronk.sampling.params import SamplingParams
from pronk.text.chat.messages import Messages, TemplateOptions, Tools
from pronk.text.guide import check_texts
from pronk.text.infill import ContextFile
from pronk.text.tokenizer import Tokenizer

Prompt = str | list[int]


@known_keywords
class LLM:
    """A loaded language model.

    ::

        llm = LLM("path-or-hub-id", drafter="suffix")
        llm.generate("def fibonacci(n):", SamplingParams(max_tokens=64)).text

    Attributes:
        path: folder or GGUF file of the model.
        config: architecture and sizes of the model.
        dtype: data type of the weights, as a NumPy dtype.
        workers: number of processes that compute the model.
        adapters: the adapters, by name.
        calibration: measured acceptance rates of drafters; ``calibration.save()`` writes them to a
            file.
        exact: whether equal seeds give equal texts with any drafter and in any batch, under the
            acceptance rule ``coupled``.
        device: device that computes the model.
        kernels: instruction set of pronk's kernels in use.
        bits: ``"portable"`` if logits have the same bits on every processor, otherwise ``"fast"``.
        target: the model as the target of drafters; ``Suffix().bind(llm.target)`` creates a new
            :class:`Proposer`.
    """

    @takes(LLMOptions)
    def __init__(self, options: LLMOptions) -> None:
        """Load a model.

        Raises:
            CheckpointError: the model cannot be loaded.
            OptionError: an option is out of range.
        """
        workers = options.workers
        set_threads(options.threads, workers, divide=not is_launched(workers))
        self.drafter = make_drafter(options.drafter)
        self.path = resolve_model(options.model, progress=options.progress)
        # One open file serves config, tokenizer and weights.
        opened = GgufCheckpoint(self.path) if is_gguf(self.path) else None
        config = add_known_sampling(read_config(self.path, opened, options.context))
        options = replace(options, prefill_chunk=prefill_size(options.prefill_chunk, config))
        self.adapters = Adapters(options.adapters, config, workers)
        self.tokenizer = Tokenizer.load(self.path, config.vocab_size, opened)
        self.config = self.tokenizer.add_end_tokens(config)
        self.calibration = AcceptanceFile.open(options.calibration, self.path)
        self.dtype = parse_dtype(options.dtype, self.config)
        self.workers = workers
        bits = choose_bits(
            options.bits,
            self.dtype,
            quantized=options.weights != "plain" or has_quantized_weights(config, opened),
        )
        kernels = choose_kernels(options.kernels, bits)
        self.device = options.device
        self.kernels = kernels.name
        self.bits = kernels.bits
        share_prefixes = options.prefix_cache or options.prompt_cache is not None
        self.request_factory = RequestFactory(
            self.config, self.tokenizer, kernels, share_prefixes=share_prefixes
        )
        if options.check is not None:
            options.check(self.request_factory)
        is_split = options.parallel == "tensor" and workers > 1
        source = self.path if opened is None else opened
        cacheable = None if opened is None or is_split else opened.identity
        cache_size = options.weight_cache_size
        if cache_size is not None:
            cache_size = parse_memory(cache_size, "weight_cache_size")
        weight_file = WeightCache.open(options.weight_cache, cacheable, cache_size)
        self._prompt_cache = open_prompt_cache(
            options, source, self.config, kernels, split=is_split, weights=options.weights
        )
        self._team = start_workers(options, self.path, self.dtype, self.config, kernels)
        with ExitStack() as on_error:
            on_error.callback(self._team.end)
            memory = self._team.memory
            kv_budget = KVBudget(
                options.kv_memory, options.max_batch, workers, memory, options.max_tree
            )
            decoder = load_decoder(
                source,
                self.config,
                dtype=self.dtype,
                kernels=kernels,
                weights=options.weights,
                split=self._team.split,
                cache=weight_file,
                on_progress=options.progress,
            )
            self.adapters.attach(decoder)
            cache = kv_budget.add(
                self._team.shard_config,
                compute_dtype(self.dtype),
                partial(self._team.pool, kernels=kernels),
                KV_DTYPES[options.kv_dtype],
                share_prefixes=share_prefixes,
            )
            if self._prompt_cache is not None:
                self._prompt_cache.attach(cache)
            runner = self._team.make_runner(decoder, cache)
            target = Target(
                runner,
                tokenizer=self.tokenizer,
                budget=kv_budget,
                folder=self.path,
                max_tree=options.max_tree,
            )
            self.engine = Engine(
                target,
                options,
                budget=options.budget == "auto",
                acceptance_stats=self.calibration.stats,
            )
            self.target = self.engine.target
            self.exact = self.engine.exact
            self._proposers = ProposerCache(self.target, self.drafter)
            on_error.pop_all()  # loading has succeeded: the workers keep running

    def close(self) -> None:
        """Stop the worker processes, and finish writing the prompt cache to disk.

        The model can still decode in this process afterwards, unless worker processes had parts of
        the weights (``parallel="tensor"``).
        """
        self._team.end()
        if self._prompt_cache is not None:
            self._prompt_cache.store.close()

    @overload
    def generate(
        self,
        prompts: str | list[int],
        params: SamplingParams | None = None,
        *,
        drafter: str | Drafter | None = None,
        adapter: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        drafter: str | Drafter | None = None,
        adapter: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Completion]: ...
    def generate(
        self,
        prompts: str | list[int] | list[str] | list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        drafter: str | Drafter | None = None,
        adapter: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Completion | list[Completion]:
        """Continue one prompt or a batch of prompts.

        Args:
            prompts: a prompt (text or token ids), or a list of prompts to decode as a batch.
            params: sampling parameters for all prompts, or a list with one per prompt.
            drafter: drafter of this call; by default, that of the model.
            adapter: name of the adapter that computes the texts; by default, the model without an
                adapter.
            progress: called with the number of finished requests and the number of all requests.

        Returns:
            A :class:`Completion`, or for a list of prompts a list of completions.

        Raises:
            PromptError: a prompt is empty, too long, or not made of the model's tokens.
            OptionError: an option does not fit the model.
            CacheFullError: a request does not fit into the KV cache.
            PronkError: a request failed; the other requests of this call are aborted.
        """
        is_list = isinstance(prompts, (list, tuple))
        single = not is_list or (len(prompts) > 0 and isinstance(prompts[0], (int, float)))
        batch = cast(list[Prompt], [prompts] if single else prompts)
        groups = self._create_requests(batch, params, drafter, adapter)
        requests = [request for group in groups for request in group]
        report = None if progress is None else lambda finished: progress(finished, len(requests))
        self.engine.run(requests, report)
        completions = [_complete(samples) for samples in groups]
        return completions[0] if single else completions

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        drafter: str | Drafter | None = None,
        adapter: str | None = None,
    ) -> Generator[Piece]:
        """Continue one prompt and yield the new tokens.

        Closing the iterator aborts the request. Arguments and errors are those of :meth:`generate`.
        """
        (requests,) = self._create_requests([prompt], params, drafter, adapter)
        return Piece.stream(self.engine.stream(requests), requests)

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        drafter: str | Drafter | None = None,
        adapter: str | None = None,
        template_options: TemplateOptions | None = None,
    ) -> Completion:
        """Answer a conversation, rendered with the model's chat template.

        Args:
            messages: conversation in OpenAI's format (:mod:`pronk.text.chat.messages`), such as
                ``[{"role": "user", "content": "…"}]``.
            params: sampling parameters; by default, those of :meth:`get_default_sampling_params`.
            drafter: drafter of this call; by default, that of the model.
            adapter: name of the adapter that computes the answer; by default, the model without an
                adapter.
            template_options: variables of the template, such as ``{"enable_thinking": False}``.

        Raises:
            PromptError: messages are malformed, or the template refuses them, times out or renders
                nothing.
            TokenizerError: the chat template is missing or damaged.
            PronkError: see :meth:`generate`.
        """
        requests = self._create_chat(messages, params, drafter, adapter, template_options)
        self.engine.run(requests)
        return _complete(requests)

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        drafter: str | Drafter | None = None,
        adapter: str | None = None,
        template_options: TemplateOptions | None = None,
    ) -> Generator[Piece]:
        """Answer a conversation and yield the new tokens.

        Closing the iterator aborts the request. Arguments and errors are those of :meth:`chat`.
        """
        requests = self._create_chat(messages, params, drafter, adapter, template_options)
        return Piece.stream(self.engine.stream(requests), requests)

    def infill(
        self,
        prefix: str,
        suffix: str,
        params: SamplingParams | None = None,
        *,
        context: Sequence[ContextFile] = (),
        drafter: str | Drafter | None = None,
        adapter: str | None = None,
    ) -> Completion:
        r"""Write the text between a prefix and a suffix, with a model for code.

        ::

            llm.infill("def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n").text

        The text also ends at the model's tokens that begin another part or file.

        Args:
            prefix: text before the place to fill.
            suffix: text after the place to fill.
            params: sampling parameters.
            context: files that the model reads first.
            drafter: drafter of this call; by default, that of the model.
            adapter: name of the adapter that computes the text; by default, the model without an
                adapter.

        Raises:
            OptionError: the model has no tokens for filling in the middle.
            PronkError: see :meth:`generate`.
        """
        requests = self._create_infill(prefix, suffix, params, context, drafter, adapter)
        self.engine.run(requests)
        return _complete(requests)

    def stream_infill(
        self,
        prefix: str,
        suffix: str,
        params: SamplingParams | None = None,
        *,
        context: Sequence[ContextFile] = (),
        drafter: str | Drafter | None = None,
        adapter: str | None = None,
    ) -> Generator[Piece]:
        """Write the text between a prefix and a suffix, and yield the new tokens.

        Closing the iterator aborts the request. Arguments and errors are those of :meth:`infill`.
        """
        requests = self._create_infill(prefix, suffix, params, context, drafter, adapter)
        return Piece.stream(self.engine.stream(requests), requests)

    def get_default_sampling_params(self, **options: Any) -> SamplingParams:
        """Return the default sampling parameters of :meth:`chat`: those that the model recommends.

        The value of an option is that of ``options``, or else that of the model's
        ``generation_config.json`` or GGUF file, or else that which pronk has for a model with a
        short name (``pronk pull``), or else the default of ``SamplingParams``.
        """
        return recommended_params(self.config, **options)

    def choose(
        self, prompt: Prompt, options: Sequence[str], *, adapter: str | None = None
    ) -> Choice:
        """Return the log-probabilities of given continuations of a prompt, from one token tree.

        ::

            llm.choose("It broke on day one. A review that is", [" good", " bad"]).best

        An option is tokenized with the prompt, or alone if its first characters would merge with
        the prompt's last token. The end of the text is not scored. Therefore an option is at least
        as likely as a longer option that begins with it.

        Args:
            prompt: text or token ids, at least two tokens.
            options: 1..1024 distinct, non-empty texts.
            adapter: name of the adapter that computes the log-probabilities; by default, the model
                without an adapter.

        Raises:
            OptionError: an option is empty, repeated or has no tokens.
            PronkError: see :meth:`generate`.
        """
        texts = check_texts("options", options)
        ids = self.request_factory.encode_prompt(prompt)
        continuations = self.request_factory.encode_continuations(prompt, ids, texts)
        found = score(self.engine, ids, continuations, self.adapters.find(adapter))
        return Choice(texts, tuple(found))

    def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        adapter: str | None = None,
    ) -> list[float]:
        """Return the relevance of documents to a query, from 0 to 1, one number per document.

        The number is the probability of the answer "yes" against "no" to the question of
        Qwen3-Reranker, in the model's chat template (:mod:`pronk.engine.ranking`). Models that were
        trained on this question rank well, others as well as they understand it. ::

            llm.score("capital of France", ["Paris is the capital.", "Bread is baked."])

        Args:
            query: text to which the documents may be relevant.
            documents: texts; each is a prompt of its own.
            instruction: what relevance means; by default, that a passage answers a web search.
            adapter: name of the adapter that computes the answers; by default, the model without an
                adapter.

        Raises:
            TokenizerError: the model has no chat template, or no tokens for the two answers.
            PronkError: see :meth:`generate`.
        """
        encode = self.request_factory.encode_relevance
        prompts = [encode(query, document, instruction) for document in documents]
        question = self.request_factory.relevance
        completions = self.generate(prompts, question.params, adapter=adapter)
        scores = list[float]()
        for completion in completions:
            assert completion.logprobs is not None, "expected log-probabilities, found none"
            scores.append(question.score(completion.logprobs[0]))
        return scores

    def embed(
        self,
        texts: Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        adapter: str | None = None,
    ) -> Array:
        """Return the embeddings of texts, ``[texts, dimensions]`` float32.

        Args:
            texts: texts or lists of token ids.
            pooling: how a text's embedding is computed from the outputs of its tokens
                (:class:`~pronk.engine.pooling.EmbeddingOptions`); by default as the model's files
                say, or else the mean.
            dimensions: number of first dimensions to keep; by default, all.
            normalize: whether to scale each embedding to length 1; by default as the model's files
                say, or else True.
            adapter: name of the adapter that computes the embeddings; by default, the model without
                an adapter.

        Raises:
            PronkError: see :meth:`generate`.
        """
        defaults = self.config.embedding
        options = EmbeddingOptions.for_model(defaults, pooling, dimensions, normalize)
        found = self.adapters.find(adapter)
        requests = self.request_factory.create_embeddings(texts, options, self.engine.runner, found)
        self.engine.run(requests)
        return options.embeddings([request.pooler for request in requests], self.config.hidden_size)

    def chat_ids(
        self,
        messages: Messages,
        tools: Tools | None = None,
        template_options: TemplateOptions | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, rendered with the chat template.

        Args:
            messages: conversation in OpenAI's format.
            tools: tools in OpenAI's format that the template describes to the model.
            template_options: variables of the template.

        Raises:
            PronkError: see :meth:`chat`.
        """
        return self.tokenizer.chat_ids(messages, tools=tools, options=template_options)

    def get_proposer(
        self, spec: str | Drafter | None = None, adapter: str | None = None
    ) -> Proposer[Any]:
        """Return the proposer of a drafter: the drafter bound to this model.

        A call before :meth:`generate` loads the draft model and reports errors early. Equal
        drafters share one proposer until the files of their model change. Besides the default
        proposer, the 64 most recently used ones without a draft model are kept, and the 4 most
        recently used ones with a draft model. A drafter that proposes from texts of earlier
        requests, such as ``suffix``, has a proposer for each adapter, because adapters write
        different texts.

        Args:
            spec: drafter, or its name with options; by default, the drafter of the model.
            adapter: name of the adapter of the requests.

        Raises:
            OptionError: the drafter is unknown, or does not fit the model.
            CheckpointError: the draft model cannot be loaded.
        """
        return self._proposers.get_proposer(spec, adapter)

    def _create_chat(
        self,
        messages: Messages,
        params: SamplingParams | None,
        drafter: str | Drafter | None,
        adapter: str | None,
        template_options: TemplateOptions | None,
    ) -> list[Request]:
        """Return the samples of a conversation; the arguments are those of :meth:`chat`."""
        prompt = self.request_factory.encode_chat(messages, options=template_options)
        params = self.get_default_sampling_params() if params is None else params
        branches = [prompt.branch_positions]
        (requests,) = self._create_requests([prompt.token_ids], params, drafter, adapter, branches)
        return requests

    def _create_infill(
        self,
        prefix: str,
        suffix: str,
        params: SamplingParams | None,
        context: Sequence[ContextFile],
        drafter: str | Drafter | None,
        adapter: str | None,
    ) -> list[Request]:
        """Return the samples of a text to fill; the arguments are those of :meth:`infill`."""
        ids = self.request_factory.encode_infill(prefix, suffix, context)
        ended = self.request_factory.end_infill(SamplingParams() if params is None else params)
        (requests,) = self._create_requests([ids], ended, drafter, adapter)
        return requests

    def _create_requests(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        drafter: str | Drafter | None,
        adapter: str | None,
        branch_positions: Sequence[Sequence[int]] = (),
    ) -> list[list[Request]]:
        """Return the samples of each prompt; the arguments are those of :meth:`generate`."""
        options = params_per_prompt(params, len(prompts))
        found = self.adapters.find(adapter)
        proposer = self.get_proposer(drafter, adapter)
        create = self.request_factory.create_batch
        return create(prompts, options, proposer, found, branch_positions)


def _complete(samples: Sequence[Request]) -> Completion:
    """Return the completion of a prompt's first sample, with those of its other samples."""
    first, *others = samples
    return Completion.of(first, tuple(map(Completion.of, others)))
