"""The facade: load a model, generate, stream, chat."""

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
from pronk.models.loader import computed_in, load_decoder, parse_dtype, read_config, resolve_model
from pronk.outputs import Choice, Completion, Piece
from pronk.parallel.worker_group import gather, is_launched
from pronk.sampling.guide import check_texts
from pronk.sampling.params import SamplingParams
from pronk.speculation.acceptance_file import AcceptanceFile
from pronk.tokenization.chat.messages import Messages, Tools
from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["LLM", "Prompt"]

Prompt = str | list[int]


class LLM:
    """A language model, ready to generate.

    ::

        llm = LLM("path-or-hub-id", drafter="suffix")
        llm.generate("def fibonacci(n):", SamplingParams(max_tokens=64)).text

    Attributes:
        path: the model's folder or file.
        config: its shape.
        dtype: of its weights.
        workers: processes that compute it.
        tokenizer: its own.
        engine: which decodes.
        request_factory: which makes its requests.
        calibration: what guesses have shown, and its ``save()``.
    """

    def __init__(  # noqa: PLR0913 - every one an option of its own
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
            model: a folder in the Hugging Face layout, a GGUF file, or the id of a model on the Hub; ``None`` is
                ``pronk-tiny``, which only a clone of the repository has.
            drafter: who guesses: a name, a name with options, or an object (see :mod:`pronk.drafters`). The default
                remembers no text of one request for the next.
            device: ``"cpu"`` or an accelerator as torch names it.
            dtype: ``"float32"``, ``"bfloat16"``, ``"float16"``, or ``"auto"`` for the checkpoint's.
            weights: ``"plain"`` leaves the matrices as the checkpoint has them; ``"int8"`` and ``"int4"`` round them to
                8 or 4 bits as they are loaded (the head to 8), which changes what the model says, and makes its passes
                faster. Guessing changes nothing, whichever it is.
            kv_memory: size of the KV cache in bytes or as text (``"2GiB"``); by default what ``max_batch`` full
                contexts need, and at most a quarter of the memory.
            kv_dtype: ``"auto"`` keeps keys and values as they are computed; ``"int8"`` rounds them to 8 bits, with a
                scale for each head of each token: half the memory or less, and another model. Guessing changes
                nothing there either. The caches of draft models stay as they are.
            prefix_cache: keep what the cache holds of texts that have ended, as long as there is room, for texts that
                begin alike: a chat's next turn, prompts with the same instructions. It changes no token. Models with
                dynamic RoPE go without: there the keys of a prompt depend on its length.
            max_batch: most requests in one pass, 1..1024.
            prefill_chunk: most prompt tokens in one pass, 16..8192.
            threads: CPU threads, for the whole process; ``None`` leaves torch's choice.
            workers: processes that compute the model together, 1..64. They are started here, share this machine's
                cores, and end with this object, or with :meth:`close`; or they are those that ``torchrun`` has started,
                of which all but the first compute for it and end in here.
            parallel: what workers are for. ``"tree"``: each has the whole model, and the branches of the guesses are
                dealt to them, where that is faster; it changes no token. ``"tensor"``: each has some of the heads and
                of the MLP's columns, a part of the memory and of what a pass reads; whoever guesses, the tokens are
                the same for the same number of workers, and close to those of one.
            kernels: ``"auto"`` is the widest instruction set of this processor; a lower one's name restricts it, and
                ``"torch"`` does without kernels of our own, and without the promise of equal bits.
            budget: how much to guess: ``"auto"`` drops the guesses that do not pay for their rows, at the acceptance so
                far and the cost of passes, as those that were made have shown it, and keeps an account of what guessing
                has cost and saved each request, by which it stops where it does not pay; ``"all"`` computes all that
                the drafter has, so that the number of passes does not depend on measured times. Under the coupled
                rule the text never does.
            calibration: whether requests begin with what earlier ones have shown of guesses: how often those of each
                kind were right, and no text. A path is of a file to begin with, if it is there, and to save in.
            progress: called with the bytes loaded so far and in all.

        Raises:
            CheckpointError: the model cannot be loaded.
            OptionError: an option out of its range, or no model outside a clone.
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
        self._team = gather(workers, parallel, self.config, chosen, **setting)
        with ExitStack() as failed:
            failed.callback(self._team.end)
            decoder = load_decoder(
                self.path,
                self.config,
                dtype=kind,
                device=target,
                kernels=chosen,
                weights=weights,
                split=self._team.split,
                on_progress=progress,
            )
            computed, kept = computed_in(kind, chosen), torch.int8 if kv_dtype == "int8" else None
            team = self._team
            cache = memory.add(team.share, computed, chosen, kept, share_prefixes=prefix_cache, kind=team.pool)
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
                runner=self._team.runner(decoder, cache),
            )
            self.request_factory = RequestFactory(self.config, self.tokenizer, decoder.kernels)
            self._proposers = ProposerCache(self.engine.target, self.drafter)
            failed.pop_all()

    def close(self) -> None:
        """End its workers, if any were started here: with ``"tree"`` it goes on alone, split it does no more."""
        self._team.end()

    @property
    def exact(self) -> bool:
        """Whether bits are promised: the same seed gives the same text, whoever guesses and whatever the batch."""
        return self.engine.exact

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.engine.runner.device

    @property
    def target(self) -> Target:
        """What a drafter binds to, for a guesser with a memory of its own: ``Suffix().bind(llm.target)``."""
        return self.engine.target

    @property
    def kernels(self) -> str:
        """What computes: the name of an instruction set of pronk's kernels, or ``"torch"``."""
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
        """Continue one prompt or a list of them.

        A prompt is a text or a list of token ids. All prompts of a list share the passes.

        Args:
            prompts: one prompt, or a list of prompts of any lengths.
            params: options for all prompts, or one for each.
            drafter: who guesses, if not the one given at loading.
            progress: called with the requests finished so far and in all.

        Returns:
            One :class:`Completion` for one prompt, a list for a list: an empty one for no prompts.

        Raises:
            PromptError: a prompt that is empty, too long, or has ids outside the vocabulary.
            OptionError: an option that does not fit the model.
            CacheFullError: a request that the KV cache cannot hold.
        """
        single = not isinstance(prompts, (list, tuple)) or (len(prompts) > 0 and isinstance(prompts[0], (int, float)))
        batch = cast(list[Prompt], [prompts] if single else prompts)
        options = self._options(params, len(batch))
        chosen = self.get_proposer(drafter)
        groups = [
            self.request_factory.samples(self.request_factory.ids(p), o, chosen)
            for p, o in zip(batch, options, strict=True)
        ]
        requests = [request for group in groups for request in group]
        self.engine.run(requests, None if progress is None else lambda ended: progress(ended, len(requests)))
        completions = [_completion(group) for group in groups]
        return completions[0] if single else completions

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, drafter: str | Drafter | None = None
    ) -> Generator[Piece]:
        """Continue one prompt, token by token; the arguments are checked at once.

        Closing the iterator, or an exception in whoever reads it, ends the request and frees its memory.
        """
        (options,) = self._options(params, 1)
        return self._pieces(
            self.request_factory.samples(self.request_factory.ids(prompt), options, self.get_proposer(drafter))
        )

    def chat(
        self, messages: Messages, params: SamplingParams | None = None, *, drafter: str | Drafter | None = None
    ) -> Completion:
        """Answer a conversation: ``[{"role": "user", "content": "…"}, …]``, rendered with the model's chat template.

        Args:
            messages: each with a ``role``, and a ``content`` that is a text or a list of parts of the type ``text``
                (see :mod:`pronk.tokenization.chat.messages`).
            params: options; by default those of :class:`SamplingParams`.
            drafter: who guesses, if not the one given at loading.

        Raises:
            PromptError: malformed messages, parts other than text, or a conversation that the template refuses, is not
                through with in time, or makes nothing of; or see :meth:`generate`.
            TokenizerError: the model has no chat template, or a damaged one.
        """
        return self.generate(self.chat_ids(messages), params, drafter=drafter)

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, *, drafter: str | Drafter | None = None
    ) -> Generator[Piece]:
        """Answer a conversation, token by token; see :meth:`chat`."""
        return self.stream(self.chat_ids(messages), params, drafter=drafter)

    def choose(self, prompt: Prompt, options: Sequence[str]) -> Choice:
        """How likely the model finds each of some texts after a prompt: all of them in one pass, as one tree.

        ::

            llm.choose("It broke on day one. A review that is", [" good", " bad"]).best

        The probability of a text is that of its tokens, one after the other: as the tokenizer writes it behind the
        prompt, or, where its first characters would join the prompt's last token, by itself. What would come after it
        does not count, so a text that another one begins with is at least as likely as that one.

        Args:
            prompt: a text or token ids, at least two tokens.
            options: 1..1024 texts, none of them empty, no two alike.

        Raises:
            OptionError: texts that cannot be chosen from.
            PromptError: see :meth:`generate`; or there is no room for the texts behind the prompt.
            CacheFullError: the KV cache has no room for them.
        """
        texts, ids = check_texts("options", options), self.request_factory.ids(prompt)
        return Choice(texts, tuple(score(self.engine, ids, self.request_factory.spelled(prompt, ids, texts))))

    def chat_ids(self, messages: Messages, tools: Tools | None = None) -> list[int]:
        """Token ids of a conversation up to the point where the model answers; see :meth:`chat` for the errors.

        ``tools`` are what the template tells the model of, as OpenAI's interface has them.
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
            msg = f"params: expected one for all prompts or one for each of {count}, found {len(params)}"
            raise OptionError(msg)
        return list(params)

    def get_proposer(self, spec: str | Drafter | None = None) -> Proposer[Any]:
        """The guesser of this model by a drafter's options: its own model loaded, if it has one.

        :meth:`generate` and its like do this by themselves; it is for those who ask a drafter directly, or want to hear
        early of a mistake in its options. ``None`` is the drafter given at loading, whose guesser stays for as long as
        the model. Equal drafters have one guesser and one memory, until the folder of a model of theirs is written
        again; of more than 64 others, or 4 with models, those asked for longest ago are forgotten.

        Raises:
            OptionError: no such drafter or option, or it does not go with this model.
            CheckpointError: its own model cannot be loaded.
        """
        return self._proposers.own if spec is None else self._proposers.of(spec)


def _completion(group: Sequence[Request]) -> Completion:
    return Completion.of(group[0], tuple(Completion.of(request) for request in group[1:]))
