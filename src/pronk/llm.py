"""The facade: load a model, generate, stream, chat."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, cast, overload
from weakref import WeakValueDictionary, finalize, ref

import torch

from pronk.cache.budget import KVBudget
from pronk.choosing.chooser import Chooser
from pronk.choosing.params import SamplingParams, derive_seed, fresh_seed
from pronk.drafters import Drafter, make_drafter
from pronk.engine.engine import Engine
from pronk.engine.request import Request, end_ids
from pronk.errors import OptionError, PromptError
from pronk.interrupts import interruptible
from pronk.model.kernels import choose_kernels
from pronk.model.loader import computed_in, load_decoder, parse_dtype, read_config, resolve_model
from pronk.outputs import Completion, Piece
from pronk.text.chat.messages import Messages
from pronk.text.stream import TextStream
from pronk.text.tokenizer import Tokenizer

__all__ = ["LLM"]

Prompt = str | list[int]


class LLM:
    """A language model, ready to generate.

    ::

        llm = LLM("path-or-hub-id", drafter="suffix")
        llm.generate("def fibonacci(n):", SamplingParams(max_tokens=64)).text

    Attributes:
        path: the model's folder.
        config: its shape.
        dtype: of its weights.
        tokenizer: its own.
        engine: which decodes.
    """

    def __init__(  # noqa: PLR0913 - every one an option of its own
        self,
        model: str | Path | None = None,
        *,
        drafter: str | Drafter[Any] = "suffix(store_tokens=0)",
        device: str = "cpu",
        dtype: str = "auto",
        kv_memory: str | int | None = None,
        max_batch: int = 16,
        prefill_chunk: int = 512,
        threads: int | None = None,
        kernels: str = "auto",
        budget: Literal["auto", "all"] = "auto",
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Load a model.

        Args:
            model: a folder in the Hugging Face layout, or the id of such a model on the Hub; ``None`` is the
                bundled one.
            drafter: who guesses: a name, a name with options, or an object (see :mod:`pronk.drafters`). The default
                remembers nothing from one request to the next.
            device: ``"cpu"`` or an accelerator as torch names it.
            dtype: ``"float32"``, ``"bfloat16"``, ``"float16"``, or ``"auto"`` for the checkpoint's.
            kv_memory: size of the KV cache in bytes or as text (``"2GiB"``); by default what ``max_batch`` full
                contexts need, and at most a quarter of the memory.
            max_batch: most requests in one pass, 1..1024.
            prefill_chunk: most prompt tokens in one pass, 16..8192.
            threads: CPU threads, for the whole process; ``None`` leaves torch's choice.
            kernels: ``"auto"`` is the widest instruction set of this processor; a lower one's name restricts it, and
                ``"torch"`` does without kernels of our own, and without the promise of equal bits.
            budget: how much to guess: ``"auto"`` drops the guesses that do not pay for their rows, at the acceptance so
                far and the cost of passes, which is measured with the first request; ``"all"`` computes all that the
                drafter has, so that the number of passes does not depend on measured times. Under the coupled rule
                the text never does.
            progress: called with the bytes loaded so far and in all.

        Raises:
            CheckpointError: the model cannot be loaded.
            OptionError: an option out of its range.
        """
        _check_range("max_batch", max_batch, 1, 1024)
        _check_range("prefill_chunk", prefill_chunk, 16, 8192)
        if threads is not None:
            _check_range("threads", threads, 1, 4096)
            torch.set_num_threads(threads)
        _check_choice("budget", budget, ("auto", "all"))
        self.drafter = make_drafter(drafter)
        self.path = resolve_model(_bundled() if model is None else model)
        self.config = read_config(self.path)
        self.tokenizer = Tokenizer.load(self.path, self.config.vocab_size)
        target, kind = _device(device), parse_dtype(dtype, self.config)
        chosen = choose_kernels(kernels, target, self.config)
        self.dtype = kind
        decoder = load_decoder(self.path, self.config, dtype=kind, device=target, kernels=chosen, on_progress=progress)
        memory = KVBudget(kv_memory, max_batch, target)
        self.engine = Engine(
            decoder,
            memory.add(self.config, computed_in(kind, chosen), chosen),
            max_batch=max_batch,
            prefill_chunk=prefill_chunk,
            budget=budget == "auto",
            tokenizer=self.tokenizer,
            kv_budget=memory,
            folder=self.path,
        )
        self._named: dict[str, Drafter[Any]] = {}
        self._met: WeakValueDictionary[int, Drafter[Any]] = WeakValueDictionary()
        self._copies: dict[int, Drafter[Any]] = {}
        self.meet(self.drafter)

    @property
    def exact(self) -> bool:
        """Whether bits are promised: the same seed gives the same text, whoever guesses and whatever the batch."""
        return self.engine.exact

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
        drafter: str | Drafter[Any] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        drafter: str | Drafter[Any] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Completion]: ...
    def generate(
        self,
        prompts: str | list[int] | list[str] | list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        drafter: str | Drafter[Any] | None = None,
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
        chosen = self.meet(drafter)
        groups = [self._requests(self._ids(p), o, chosen) for p, o in zip(batch, options, strict=True)]
        self._run([request for group in groups for request in group], progress)
        completions = [_completion(group) for group in groups]
        return completions[0] if single else completions

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, drafter: str | Drafter[Any] | None = None
    ) -> Generator[Piece]:
        """Continue one prompt, token by token; the arguments are checked at once.

        Closing the iterator, or an exception in whoever reads it, ends the request and frees its memory.
        """
        (options,) = self._options(params, 1)
        return self._stream(self._requests(self._ids(prompt), options, self.meet(drafter)))

    def chat(
        self, messages: Messages, params: SamplingParams | None = None, *, drafter: str | Drafter[Any] | None = None
    ) -> Completion:
        """Answer a conversation: ``[{"role": "user", "content": "…"}, …]``, rendered with the model's chat template.

        Args:
            messages: each with a ``role``, and a ``content`` that is a text or a list of parts of the type ``text``
                (see :mod:`pronk.text.chat.messages`).
            params: options; by default those of :class:`SamplingParams`.
            drafter: who guesses, if not the one given at loading.

        Raises:
            PromptError: malformed messages, parts other than text, or a conversation that the template refuses, does
                not get through with, or makes nothing of; or see :meth:`generate`.
            TokenizerError: the model has no chat template, or a damaged one.
        """
        return self.generate(self.chat_ids(messages), params, drafter=drafter)

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, *, drafter: str | Drafter[Any] | None = None
    ) -> Generator[Piece]:
        """Answer a conversation, token by token; see :meth:`chat`."""
        return self.stream(self.chat_ids(messages), params, drafter=drafter)

    def chat_ids(self, messages: Messages) -> list[int]:
        """Token ids of a conversation up to the point where the model answers; see :meth:`chat` for the errors."""
        return self.tokenizer.chat_ids(messages)

    def _run(self, requests: Sequence[Request], progress: Callable[[int, int], None] | None) -> None:
        try:
            with interruptible():
                self._finish(requests, progress)
        finally:
            self._abort(requests)

    def _finish(self, requests: Sequence[Request], progress: Callable[[int, int], None] | None) -> None:
        for request in requests:
            self.engine.add(request)
        while unfinished := sum(not request.ended for request in requests):
            if progress is not None:
                progress(len(requests) - unfinished, len(requests))
            self.engine.step()
            _raise_errors(requests)

    def _stream(self, requests: Sequence[Request]) -> Generator[Piece]:
        try:
            for request in requests:
                self.engine.add(request)
            # Another call may have stepped the engine meanwhile, so look for tokens before making more.
            while any(not request.ended or request.pieces for request in requests):
                if not any(request.pieces for request in requests):
                    self.engine.step()
                _raise_errors(requests)
                for index, request in enumerate(requests):
                    yield from _drain(request, index)
        finally:
            self._abort(requests)

    def _abort(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.engine.abort(request)

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

    def meet(self, spec: str | Drafter[Any] | None = None) -> Drafter[Any]:
        """The drafter as it guesses for this model: bound to it, its own model loaded if it has one.

        :meth:`generate` and its like do this by themselves; it is for those who ask a drafter directly, or want to hear
        early of a mistake in its options. ``None`` is the drafter given at loading.

        Raises:
            OptionError: no such drafter or option, or it does not go with this model.
            CheckpointError: its own model cannot be loaded.
        """
        drafter = self.drafter if spec is None else spec
        if isinstance(drafter, str):
            if drafter not in self._named:
                self._named[drafter] = make_drafter(drafter)
            drafter = self._named[drafter]
        if id(drafter) not in self._met:
            bound = drafter.bind(self.engine.target)
            self._met[id(drafter)] = drafter
            if bound is not drafter:
                # Kept as long as both this model and the drafter it is a copy of, which only its user holds.
                self._copies[id(drafter)] = bound
                finalize(drafter, _forget, ref(self), id(drafter))
        return self._copies.get(id(drafter), drafter)

    def _ids(self, prompt: Prompt) -> list[int]:
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
            raise PromptError(msg)
        return ids

    def _requests(self, prompt: list[int], params: SamplingParams, drafter: Drafter[Any]) -> list[Request]:
        """The ``n`` samples of one prompt; the later ones start from the first one's cache."""
        self._check(prompt, params)
        seed = fresh_seed() if params.seed is None else params.seed
        ends = end_ids(params, self.config.eos_ids)
        encode = self.tokenizer.encode
        bad = [encode(lead + word, add_special_tokens=False) for word in params.bad_words for lead in ("", " ")]
        if not all(bad):
            msg = f"bad_words: expected texts that the tokenizer has tokens for, found {list(params.bad_words)!r}"
            raise OptionError(msg)
        requests: list[Request] = []
        for sample in range(params.n):
            own = derive_seed(seed, sample)
            chooser = Chooser(
                params,
                own,
                prompt,
                self.config.vocab_size,
                ends=sorted(ends),
                bad_words=bad,
                kernels=self.engine.runner.decoder.kernels,
            )
            text = TextStream(self.tokenizer, prompt, params.stops, params.min_tokens)
            parent = requests[0] if requests else None
            requests.append(Request(prompt, params, own, drafter, chooser, text, ends, parent))
        return requests

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        vocab, context = self.config.vocab_size, self.config.context
        if len(prompt) + params.max_tokens > context:
            msg = (
                f"max_tokens: {params.max_tokens} after a prompt of {len(prompt)} tokens exceed the model's context of "
                f"{context}; expected at most {context - len(prompt)}"
            )
            raise OptionError(msg)
        for name, ids in (("logit_bias", params.logit_bias or ()), ("stop_token_ids", params.stop_token_ids)):
            for token in ids:
                if token >= vocab:
                    msg = f"{name}: expected token ids in 0..{vocab - 1}, found {token}"
                    raise OptionError(msg)


def _forget(model: ref[LLM], drafter: int) -> None:
    if (alive := model()) is not None:
        alive._copies.pop(drafter, None)  # noqa: SLF001 - a method would keep the model alive


def _bundled() -> Path:
    return Path(str(files("pronk") / "bundled" / "pronk-tiny"))


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        msg = f'device: expected "cpu" or an accelerator that torch has here, found {name!r}'
        raise OptionError(msg) from error
    return device


def _check_choice(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        msg = f"{name}: expected {', '.join(known)}; found {value!r}"
        raise OptionError(msg)


def _check_range(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        msg = f"{name}: expected an integer in {low}..{high}, found {value!r}"
        raise OptionError(msg)


def _raise_errors(requests: Sequence[Request]) -> None:
    for request in requests:
        if request.error is not None:
            raise request.error


def _completion(group: Sequence[Request]) -> Completion:
    return Completion.of(group[0], tuple(Completion.of(request) for request in group[1:]))


def _drain(request: Request, index: int) -> Iterator[Piece]:
    while request.pieces:
        token = request.pieces.popleft()
        last = not request.pieces and request.finish_reason is not None
        done = Completion.of(request) if last else None
        yield Piece(token.token_id, token.text, token.guessed, index, done)
