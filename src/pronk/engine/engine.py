"""The decode loop: schedule, propose, forward, verify, commit, update.

Where the kernels compute, the logits at *any* node of a tree are bit-equal to those of plain decoding, because the
order of every sum is that of the text (``kernels/README.md``). So every choice is final: the accepted rows are moved
into place, and the next step begins after them. In torch the last bit may differ, and :attr:`Engine.exact` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from time import perf_counter
from traceback import clear_frames
from typing import Any

import torch
from torch import Tensor

from pronk.engine.output_processor import OutputProcessor
from pronk.engine.request import Request, Token
from pronk.engine.request_step import RequestStep, Verified, plan_step, verify
from pronk.engine.scheduler import Scheduler
from pronk.errors import CacheFullError, PronkError
from pronk.execution.attention import Segment
from pronk.execution.forward_job import ForwardJob
from pronk.execution.model_runner import ForwardResult, JobResult, ModelRunner
from pronk.interrupts import interruptible, uninterrupted
from pronk.kernels.threads import lend_threads, return_threads
from pronk.kv_cache.blocks import BlockTable
from pronk.kv_cache.budget import KVBudget
from pronk.kv_cache.paged import PagedCache
from pronk.models.decoder import Decoder
from pronk.sampling.sampler import NotFiniteError
from pronk.sampling.stateless import Logits
from pronk.speculation.acceptance_stats import AcceptanceStats
from pronk.speculation.proposer import Outcome
from pronk.speculation.speculator import Speculator
from pronk.speculation.target import Target
from pronk.speculation.tree import TokenTree
from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["Engine"]


class Engine:
    """Advances any number of requests, one pass at a time; any number of threads may use it."""

    def __init__(  # noqa: PLR0913 - every one an option of its own
        self,
        decoder: Decoder,
        cache: PagedCache,
        *,
        max_batch: int = 16,
        prefill_chunk: int = 512,
        max_tree: int = 128,
        budget: bool = False,
        tokenizer: Tokenizer | None = None,
        kv_budget: KVBudget | None = None,
        folder: Path | None = None,
        acceptance_stats: AcceptanceStats | None = None,
        runner: ModelRunner | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Bring a model and its cache together.

        Args:
            decoder: the model.
            cache: for its keys and values.
            max_batch: most requests in a pass.
            prefill_chunk: most prompt tokens in a pass.
            max_tree: most rows of a request in a pass that decodes.
            budget: drop guesses that do not pay for their rows (see :mod:`pronk.speculation.node_selection`).
            tokenizer: of the model, for drafters to which it matters what ids mean.
            kv_budget: what ``cache`` belongs to, for drafters that need a cache of their own.
            folder: of the checkpoint, for drafters that were trained on it.
            acceptance_stats: how often guesses were right, where requests may know of others'.
            runner: makes its passes, if not one of this process alone.
            clock: gives seconds, which what is guessed follows from; deadlines are by ``perf_counter`` all the same.
        """
        self.runner = runner or ModelRunner(decoder, cache, clock=clock)
        self.cache = cache
        self.scheduler = Scheduler(cache, decoder.config.window, max_batch, prefill_chunk, max_tree)
        self.speculator = Speculator(self.runner, budget=budget)
        self.output_processor = OutputProcessor(cache, clock)
        self.lock = RLock()
        times = self.runner.times
        self.target = Target(
            decoder,
            cache,
            tokenizer,
            kv_budget,
            folder,
            self.lock,
            times=times,
            acceptance_stats=acceptance_stats,
            runner=self.runner,
            clock=clock,
        )
        self._stepping = False

    @property
    def exact(self) -> bool:
        """Whether a row's logits depend on its own text alone, to the bit."""
        return self.runner.exact

    def add(self, request: Request) -> None:
        """Take a request in.

        Raises:
            CacheFullError: the cache is too small for it even when empty.
        """
        with self.lock:
            request.began = self.runner.clock()
            self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """Stop a request and free what it holds; harmless if it has left.

        It may strike in the middle of a step, as a stream that the garbage collector closes does: the step has planned
        with the request, which leaves at the end of it.
        """
        with self.lock:
            request.aborted = True
            if not self._stepping:
                self._leave(request)

    def step(self) -> None:
        """One pass for every request that takes part.

        What fails for one request ends that one, with its :attr:`~pronk.engine.request.Request.error`. What is raised
        here is of all of them.

        Raises:
            PronkError: it is called from within a step, by a drafter or a logits processor.
        """
        with self._exclusive():
            self._step()

    def tree_logits(self, prompt: Sequence[int], trees: Sequence[TokenTree]) -> list[Tensor]:
        """Return the logits ``[nodes, vocab]`` of token trees below a prompt, computed without a request.

        Requests that hold the KV cache go on step by step until there is room.

        Args:
            prompt: tokens before the trees' roots, at least one.
            trees: each of at most ``max_tree`` nodes.

        Raises:
            CacheFullError: the cache is too small for the prompt and the largest tree even when it is empty.
        """
        blocks = self.scheduler.blocks_needed(len(prompt) + max(map(len, trees)))
        with self.lock:
            while blocks > self.cache.allocator.num_free:
                if not (self.scheduler.running or self.scheduler.waiting):
                    msg = "choose: the cache has no room for the alternatives behind the prompt; give it more kv_memory"
                    raise CacheFullError(msg)
                self.step()
            with self._exclusive():
                return self._tree_logits(prompt, trees)

    def run(self, requests: Sequence[Request], progress: Callable[[int], None] | None = None) -> None:
        """Run requests to their end, beside those that run already.

        Args:
            requests: new ones.
            progress: called before every step with the number of those that have ended.

        Raises:
            Exception: what ended one of them; the others are stopped.
        """
        with uninterrupted():  # but for what takes long
            try:
                for request in requests:
                    self.add(request)
                while (ended := sum(request.ended for request in requests)) < len(requests):
                    with interruptible():
                        if progress is not None:
                            progress(ended)
                    self.step()
                    _raise_errors(requests)
                _raise_errors(requests)  # another thread's step may have ended one
            finally:
                self._abort(requests)

    def stream(self, requests: Sequence[Request]) -> Generator[tuple[int, Token, bool]]:
        """Run requests, and give out their tokens as they come: the request's index, the token, whether it is its last.

        Closing the iterator stops the requests; errors are those of :meth:`run`.
        """
        try:
            for request in requests:
                self.add(request)
            # Another thread may have made the step meanwhile, so look for tokens before making more.
            while any(not request.ended or request.pieces for request in requests):
                if not any(request.pieces for request in requests):
                    self.step()
                _raise_errors(requests)
                with self.lock:
                    tokens = [
                        (index, token, request.finish_reason is not None and place == len(request.pieces))
                        for index, request in enumerate(requests)
                        for place, token in enumerate(request.pieces, 1)
                    ]
                    for request in requests:
                        request.pieces.clear()
                yield from tokens
            _raise_errors(requests)  # another caller's step may have ended one
        finally:
            self._abort(requests)

    @contextmanager
    def _exclusive(self) -> Generator[None]:
        """Hold the engine for a step, with the kernels' threads; requests leave when it is over."""
        with self.lock, uninterrupted():
            if self._stepping:
                msg = "step() is not re-entrant; use a separate LLM inside a drafter or logits processor"
                raise PronkError(msg)
            try:
                self._stepping = True
                if self.exact:
                    lend_threads()
                yield
            finally:
                self._stepping = False
                if self.exact:
                    return_threads()
                self._dismiss()

    def _tree_logits(self, prompt: Sequence[int], trees: Sequence[TokenTree]) -> list[Tensor]:
        block_table = self.cache.match([*prompt, trees[0].tokens[0]], b"", []) or BlockTable()

        def forward(tree: TokenTree, wanted: range) -> Logits:
            self.scheduler.reserve(block_table, block_table.length + len(tree))
            with interruptible():
                return self.runner.forward([ForwardJob(Segment(block_table, tree), wanted, len(prompt))]).logits[0]

        try:
            while block_table.length < len(prompt):
                chunk = prompt[block_table.length : block_table.length + self.scheduler.prefill_chunk]
                forward(TokenTree.chain(chunk), range(0))
                self.cache.commit(block_table, range(len(chunk)))
                self.cache.learn(block_table, prompt, b"")
                self.scheduler.leave_window(block_table)
            return [forward(tree, range(len(tree)))[:].clone() for tree in trees]
        finally:
            self.cache.release(block_table)

    def _step(self) -> None:
        began = self.runner.clock()
        self.scheduler.expire()
        self._dismiss()  # so that waiting requests can take their places
        batch = self.scheduler.schedule()
        self.speculator.begin(batch, self.scheduler.preempted)
        if not batch:
            return
        drafts = self.speculator.propose(batch)
        steps = [plan_step(scheduled, drafts.get(scheduled.request), self.runner) for scheduled in batch]
        result = self._forward(steps)
        verified = [self._verify(step, result.of(number)) for number, step in enumerate(steps)]
        outcomes = self._commit(verified)
        self.speculator.update(steps, outcomes, result.context, began)

    def _forward(self, steps: Sequence[RequestStep]) -> ForwardResult:
        layers = frozenset(layer for step in steps for layer in step.request.capabilities.hidden)
        with interruptible():
            result = self.runner.forward([step.job for step in steps], layers)
        for step in steps:
            step.request.stats.target_seconds += result.seconds
        return result

    def _verify(self, step: RequestStep, result: JobResult) -> Verified | None:
        with self._failing_alone(step.request):
            return verify(step, result)
        return None

    def _commit(self, verified: Sequence[Verified | None]) -> dict[Request, Outcome[Any]]:
        """Commit what was verified; return the reports for drafters, of requests that decode."""
        outcomes = {}
        for each in verified:
            if each is None:
                continue  # its request has failed
            with self._failing_alone(each.step.request):
                outcome = self.output_processor.commit(each)
                if outcome is not None:
                    outcomes[each.step.request] = outcome
        return outcomes

    @contextmanager
    def _failing_alone(self, request: Request) -> Generator[None]:
        """End one request with whatever is raised within; the other requests of the step go on."""
        try:
            yield
        except NotFiniteError:
            request.fail(PronkError(_not_finite(self.cache.dtype)))
        except Exception as error:  # noqa: BLE001 - logits processors and guides are users' code
            request.fail(error)

    def _dismiss(self) -> None:
        """Let requests leave that have ended, or were aborted."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            if request.ended or request.aborted:
                self._leave(request)

    def _leave(self, request: Request) -> None:
        if self.scheduler.remove(request):
            request.stats.total_seconds = self.runner.clock() - request.began
            self.speculator.stop(request)
            _forget_frames(request.error)

    def _abort(self, requests: Sequence[Request]) -> None:
        with uninterrupted():
            for request in requests:
                self.abort(request)


def _raise_errors(requests: Sequence[Request]) -> None:
    for request in requests:
        if request.error is not None:
            raise request.error


def _forget_frames(error: BaseException | None) -> None:
    """An error outlives its pass; the tensors in the frames that it came through need not."""
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__context__


def _not_finite(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    cause = "its weights are damaged"
    if dtype != torch.float32:
        cause = f'they overflow, or {cause}; try dtype="float32"'
    return f"expected finite logits, found others in {name}: {cause}"
