"""The synchronous API: load a model, generate, stream, chat, choose."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Literal, cast, overload

import torch

from pronk.checks import check_choice, check_integer
from pronk.drafters import Drafter, Proposer, Target, make_drafter
from pronk.drafters.proposer_cache import ProposerCache
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.engine.request_factory import RequestFactory
from pronk.engine.scoring import score
from pronk.errors import OptionError
from pronk.kernels.threads import set_threads
from pronk.kv_cache.budget import KVBudget
from pronk.models.kernels import choose_kernels, open_device
from pronk.models.loader import compute_dtype, load_decoder, parse_dtype, read_config, resolve_model
from pronk.outputs import Choice, Completion, Piece
from pronk.parallel.worker_group import is_launched, start_workers
from pronk.sampling.guide import check_texts
from pronk.sampling.params import SamplingParams
from pronk.speculation.acceptance_file import AcceptanceFile
from pronk.tokenization.chat.messages import Messages, Tools
from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["LLM", "Prompt"]

Prompt = str | list[int]


class LLM:
    """A loaded language model.

    ::

        llm = LLM("path-or-hub-id", drafter="suffix")
        llm.generate("def fibonacci(n):", SamplingParams(max_tokens=64)).text

    Attributes:
        path: folder or file of the model.
        config: shape of the model.
        dtype: data type of the weights.
        workers: number of processes that compute the model.
        calibration: measured acceptance rates; ``save()`` writes them to a file.
    """

    def __init__(  # noqa: PLR0913 - independent options
        self,
        model: str | Path | None = None,
        *,
        drafter: str | Drafter = "auto",
        device: str = "cpu",
        dtype: str = "auto",
        weights: str = "plain",
        kv_memory: str | int | None = None,
        kv_dtype: str = "auto",
        prefix_cache: bool = False,
        max_batch: int = 16,
        prefill_chunk: int = 512,
        threads: int | None = None,
        workers: int = 1,
        parallel: str = "tree",
        kernels: str = "auto",
        budget: Literal["auto", "all"] = "auto",
        calibration: bool | str | Path = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Load a model.

        Args:
            model: folder in the Hugging Face layout, GGUF file, or model id on the Hub; ``None`` is ``pronk-tiny``,
                which is part of the repository.
            drafter: name, name with options, or object (see :mod:`pronk.drafters`). The default keeps no text across
                requests.
            device: ``"cpu"`` or a torch device.
            dtype: ``"float32"``, ``"bfloat16"``, ``"float16"``, or ``"auto"`` for that of the checkpoint.
            weights: ``"plain"`` keeps the matrices of the checkpoint; ``"int8"`` and ``"int4"`` quantize them when
                loading (the LM head always to 8 bits), which is faster and changes the output.
            kv_memory: size of the KV cache in bytes or as text (``"2GiB"``). The default fits ``max_batch`` full
                contexts, up to a quarter of the memory.
            kv_dtype: ``"auto"`` is the compute type; ``"int8"`` quantizes keys and values with a scale per head and
                token, which at least halves the memory and changes the output. Draft models are unaffected.
            prefix_cache: keep KV blocks of finished texts for later prompts with the same beginning, while memory
                suffices. Changes no token. Ignored for dynamic RoPE, where the keys depend on the prompt's length.
            max_batch: maximum number of requests per forward pass, 1..1024.
            prefill_chunk: maximum number of prompt tokens per forward pass, 16..8192.
            threads: number of CPU threads of the process; ``None`` keeps torch's setting.
            workers: number of processes that compute the model, 1..64. They share the cores of this machine and end
                with :meth:`close` or this object. Under ``torchrun`` its processes are used; all but the first serve
                as workers in this constructor and then exit.
            parallel: ``"tree"`` replicates the model and distributes the branches of token trees, if faster; changes no
                token. ``"tensor"`` splits attention heads and MLP columns; tokens depend on the number of workers, and
                not on the drafter.
            kernels: ``"auto"`` is the widest instruction set of the CPU, the name of another one restricts it, and
                ``"torch"`` uses torch's kernels, without bit-exactness.
            budget: ``"auto"`` drops draft tokens whose measured cost exceeds their expected gain, and limits the time
                that speculation may cost each request. ``"all"`` verifies every draft token, so that the number of
                forward passes does not depend on measured times. Under the coupled rule neither changes the text.
            calibration: whether new requests start from the acceptance rates of earlier ones; no text is kept. A path
                is a file to load the rates from, if it exists, and to save them in.
            progress: callback with the bytes loaded so far and the total.

        Raises:
            CheckpointError: the model cannot be loaded.
            OptionError: an option is out of range, or ``model`` is missing outside a clone of the repository.
        """
        check_integer("max_batch", max_batch, 1, 1024)
        check_integer("prefill_chunk", prefill_chunk, 16, 8192)
        set_threads(threads, workers, divide=not is_launched(workers))
        check_choice("budget", budget, ("auto", "all"))
        check_choice("kv_dtype", kv_dtype, ("auto", "int8"))
        self.drafter = make_drafter(drafter)
        self.path = resolve_model(model)
        self.config = read_config(self.path)
        self.tokenizer = Tokenizer.load(self.path, self.config.vocab_size)
        self.calibration = AcceptanceFile.open(calibration, self.path)
        target, kind = open_device(device), parse_dtype(dtype, self.config)
        chosen = choose_kernels(kernels, target, self.config)
        self.dtype, self.workers = kind, workers
        setting = {"model": self.path, "dtype": kind, "weights": weights, "kv_dtype": kv_dtype}
        memory = KVBudget(kv_memory, max_batch, target, workers)
        self._team = team = start_workers(workers, parallel, self.config, chosen, **setting)
        with ExitStack() as failed:
            failed.callback(team.end)
            decoder = load_decoder(
                self.path,
                self.config,
                dtype=kind,
                device=target,
                kernels=chosen,
                weights=weights,
                split=team.split,
                on_progress=progress,
            )
            computed, kept = compute_dtype(kind, chosen), torch.int8 if kv_dtype == "int8" else None
            cache = memory.add(team.shard_config, computed, chosen, kept, share_prefixes=prefix_cache, kind=team.pool)
            self.engine = Engine(
                decoder,
                cache,
                max_batch=max_batch,
                prefill_chunk=prefill_chunk,
                budget=budget == "auto",
                tokenizer=self.tokenizer,
                kv_budget=memory,
                folder=self.path,
                acceptance_stats=self.calibration.acceptance_stats,
                runner=team.runner(decoder, cache),
            )
            self.request_factory = RequestFactory(self.config, self.tokenizer, decoder.kernels)
            self._proposers = ProposerCache(self.engine.target, self.drafter)
            failed.pop_all()

    def close(self) -> None:
        """Stop the worker processes; decoding remains possible except with ``parallel="tensor"``."""
        self._team.end()

    @property
    def exact(self) -> bool:
        """Whether a seed gives the same text for every drafter and every batch, to the bit."""
        return self.engine.exact

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.engine.runner.device

    @property
    def target(self) -> Target:
        """Target for binding a drafter explicitly: ``Suffix().bind(llm.target)`` gives it separate memory."""
        return self.engine.target

    @property
    def kernels(self) -> str:
        """Instruction set of pronk's kernels in use, or ``"torch"``."""
        used = self.engine.runner.decoder.kernels
        return "torch" if used is None else used.name

    @overload
    def generate(
        self,
        prompts: str | list[int],
        params: SamplingParams | None = None,
        *,
        drafter: str | Drafter | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        drafter: str | Drafter | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Completion]: ...
    def generate(
        self,
        prompts: str | list[int] | list[str] | list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        drafter: str | Drafter | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Completion | list[Completion]:
        """Continue one prompt or a batch of prompts.

        Args:
            prompts: a prompt (text or token ids), or a list of prompts to decode as a batch.
            params: options for all prompts, or one per prompt.
            drafter: drafter of this call instead of the default.
            progress: callback with the number of finished requests and the total.

        Returns:
            A :class:`Completion`, or a list of them for a list.

        Raises:
            PromptError: a prompt is empty, too long, or has ids outside the vocabulary.
            OptionError: an option does not fit the model.
            CacheFullError: a request does not fit into the KV cache.
            PronkError: a request failed; the other requests of this call are aborted.
        """
        single = not isinstance(prompts, (list, tuple)) or (len(prompts) > 0 and isinstance(prompts[0], (int, float)))
        batch = cast(list[Prompt], [prompts] if single else prompts)
        options = self._options(params, len(batch))
        chosen = self.get_proposer(drafter)
        groups = [
            self.request_factory.create_samples(self.request_factory.encode_prompt(p), o, chosen)
            for p, o in zip(batch, options, strict=True)
        ]
        requests = [request for group in groups for request in group]
        self.engine.run(requests, None if progress is None else lambda ended: progress(ended, len(requests)))
        completions = [Completion.of(first, tuple(map(Completion.of, others))) for first, *others in groups]
        return completions[0] if single else completions

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, drafter: str | Drafter | None = None
    ) -> Generator[Piece]:
        """Continue one prompt and yield its tokens; arguments are checked immediately.

        Closing the iterator aborts the request.
        """
        (options,) = self._options(params, 1)
        ids, proposer = self.request_factory.encode_prompt(prompt), self.get_proposer(drafter)
        return self._pieces(self.request_factory.create_samples(ids, options, proposer))

    def chat(
        self, messages: Messages, params: SamplingParams | None = None, *, drafter: str | Drafter | None = None
    ) -> Completion:
        """Answer a conversation, rendered with the model's chat template.

        Messages are ``{"role": "user", "content": "…"}``; the content is text or a list of parts of type ``text`` (see
        :mod:`pronk.tokenization.chat.messages`).

        Raises:
            PromptError: messages are malformed, the template refuses them, times out or renders nothing; or see
                :meth:`generate`.
            TokenizerError: the chat template is missing or damaged.
        """
        return self.generate(self.chat_ids(messages), params, drafter=drafter)

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, *, drafter: str | Drafter | None = None
    ) -> Generator[Piece]:
        """Answer a conversation and yield the tokens; see :meth:`chat`."""
        return self.stream(self.chat_ids(messages), params, drafter=drafter)

    def choose(self, prompt: Prompt, options: Sequence[str]) -> Choice:
        """Return the log-probability of each option as the continuation of a prompt, from one token tree.

        ::

            llm.choose("It broke on day one. A review that is", [" good", " bad"]).best

        An option is tokenized together with the prompt, or alone if its first characters would merge with the prompt's
        last token. The end of the text is not scored, so a prefix of another option is at least as likely as that one.

        Args:
            prompt: text or token ids, at least two tokens.
            options: 1..1024 distinct, non-empty texts.

        Raises:
            OptionError: an option is empty, repeated or has no tokens.
            PromptError: prompt and option exceed the context; or see :meth:`generate`.
            CacheFullError: prompt and options do not fit into the KV cache.
        """
        texts, ids = check_texts("options", options), self.request_factory.encode_prompt(prompt)
        return Choice(
            texts, tuple(score(self.engine, ids, self.request_factory.encode_continuations(prompt, ids, texts)))
        )

    def chat_ids(self, messages: Messages, tools: Tools | None = None) -> list[int]:
        """Return the prompt token ids of a conversation; errors are those of :meth:`chat`.

        ``tools`` are tool definitions in OpenAI's format for the chat template.
        """
        return self.tokenizer.chat_ids(messages, tools=tools)

    def _pieces(self, requests: Sequence[Request]) -> Generator[Piece]:
        with closing(self.engine.stream(requests)) as tokens:
            for index, token, last in tokens:
                yield Piece.of(token, index, requests[index], last=last)

    def _options(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * count
        if not isinstance(params, (list, tuple)) or not all(isinstance(each, SamplingParams) for each in params):
            msg = f"params: expected SamplingParams or a list of them, found {params!r}"
            raise OptionError(msg)
        if len(params) != count:
            msg = f"params: expected one for all prompts or one per prompt ({count}), found {len(params)}"
            raise OptionError(msg)
        return list(params)

    def get_proposer(self, spec: str | Drafter | None = None) -> Proposer[Any]:
        """Return the proposer for a drafter; ``None`` is the default drafter.

        Calling this before :meth:`generate` loads the draft model and reports errors early. Equal drafters share one
        proposer until the folder of a draft model is rewritten. Apart from the default, the 64 most recently used
        proposers are kept, and 4 of those with models.

        Raises:
            OptionError: the drafter or an option is unknown or does not fit this model.
            CheckpointError: the draft model cannot be loaded.
        """
        return self._proposers.default if spec is None else self._proposers.get_proposer(spec)
