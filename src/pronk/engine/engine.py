"""The decode loop: schedule requests, propose drafts, run the forward pass, verify and commit.

With pronk's own kernels the logits of *any* node of a token tree are bit-equal to those of plain
decoding, because each sum has the same order (``kernels/README.md``). Accepted tokens are therefore
final: their KV rows are moved to consecutive slots, and the next step starts after them. On another
device the last bit may differ; see :attr:`Engine.exact`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from traceback import clear_frames
from typing import Any, Literal

from pronk.base.arrays import FLOAT32, Array, DType
from pronk.base.checks import check_integer
from pronk.base.errors import CacheFullError, OptionError, PronkError
from pronk.base.interrupts import interruptible, uninterrupted
from pronk.cache.blocks import BlockTable
from pronk.checkpoint.config import ModelConfig
from pronk.drafting.acceptance_stats import AcceptanceStats
from pronk.drafting.proposer import Outcome
from pronk.drafting.target import Target
from pronk.engine.options import BatchOptions
from pronk.engine.request import Request, Token
from pronk.engine.request_step import OutputProcessor, plan_step
from pronk.engine.scheduler import Scheduler
from pronk.engine.speculator import Speculator
from pronk.models.adapters import Adapter, cache_salt
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.sampling.sampler import NotFiniteError
from pronk.sampling.stateless import Logits
from pronk.sampling.tree import TokenTree


class Engine:
    """Decodes many requests together, one forward pass per step; thread-safe."""

    def __init__(
        self,
        target: Target,
        batch: BatchOptions,
        *,
        budget: bool = False,
        acceptance_stats: AcceptanceStats | None = None,
    ) -> None:
        """Build an engine around a loaded model and its KV cache.

        Args:
            target: target model. Its clock gives the time in seconds, for statistics, measured
                costs, the scheduler's turns of tenants, and deadlines.
            batch: limits of a forward pass; ``prefill_chunk`` must be a number
                (:func:`prefill_size`).
            budget: whether to draft only where that is expected to save time
                (:mod:`pronk.drafting.planner`).
            acceptance_stats: acceptance rates shared by all requests; ``None`` keeps them per
                request.
        """
        assert isinstance(batch.prefill_chunk, int), (
            "expected the number of tokens, see prefill_size()"
        )
        self.target = target
        self.runner = target.runner
        self.cache = target.cache
        # Whether the logits of a row are bit-equal for every batch and every token tree around the
        # row.
        self.exact = self.runner.exact
        self.scheduler = Scheduler(
            self.cache,
            target.decoder.config.window,
            min(batch.max_batch, self.cache.max_requests or batch.max_batch),
            batch.prefill_chunk,
            target.max_tree,
            self.runner.cost_model,
            max_wait=batch.max_wait,
            clock=target.clock,
        )
        self.speculator = Speculator(self.runner, budget=budget, stats=acceptance_stats)
        self.output_processor = OutputProcessor(self.cache, target.clock)
        self.lock = target.lock
        self._stepping = False

    def add(self, request: Request) -> None:
        """Queue a request.

        Raise ``CacheFullError`` if the request does not fit into the empty KV cache.
        """
        with self.lock:
            request.start_time = self.runner.clock()
            self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """Stop a request and free its KV blocks; without effect on a removed request.

        If a step is running, the request is removed at the end of the step, for example when the
        garbage collector closes a stream during a step.
        """
        with self.lock:
            request.aborted = True
            if not self._stepping:
                self._remove(request)

    def step(self) -> None:
        """Run one step: one forward pass over all scheduled requests.

        A failure of a single request is stored in its
        :attr:`~pronk.engine.request.RequestResult.error` and ends it. An exception raised here
        concerns all requests. Raises ``PronkError`` if called during a step.
        """
        with self.lock, uninterrupted():
            self._begin_exclusive()
            try:
                # This is a separate method because failed requests are removed after it:
                # ``_clear_frames`` can clear the local variables only of a method that has
                # returned.
                self._step()
            finally:
                self._end_exclusive()

    def tree_logits(
        self, prompt: Sequence[int], trees: Sequence[TokenTree], adapter: Adapter | None = None
    ) -> list[Array]:
        """Return the logits ``[nodes, vocab]`` of token trees below a prompt.

        No request is created. The prompt does not include the roots. A tree has at most
        :attr:`max_tree_nodes` nodes. Running requests are stepped until enough KV blocks, and a
        state and updates of recurrent layers, are free. Raises ``CacheFullError`` if the prompt and
        the largest tree do not fit into the empty KV cache.
        """
        num_nodes = max(map(len, trees))
        num_blocks = self.scheduler.blocks.max_blocks_for(len(prompt) + num_nodes)
        with self.lock:
            while num_blocks > self.cache.allocator.num_free or not self._has_free_state(num_nodes):
                if not (self.scheduler.running or self.scheduler.waiting):
                    msg = (
                        f"choose: expected {num_blocks} free blocks in the KV cache, found fewer; "
                        "raise kv_memory"
                    )
                    raise CacheFullError(msg)
                self.step()
            with uninterrupted():
                self._begin_exclusive()
                try:
                    return self._tree_logits(prompt, trees, adapter)
                finally:
                    self._end_exclusive()

    @property
    def max_tree_nodes(self) -> int:
        """Maximum number of nodes of a tree in :meth:`tree_logits`, with the root.

        In recurrent layers, each node takes an update slot.
        """
        states = self.cache.states
        most = self.scheduler.max_tree
        return most if states is None else min(most, states.num_updates)

    def _has_free_state(self, num_nodes: int) -> bool:
        """Return whether recurrent layers have a state and ``num_nodes`` updates left."""
        num_free = self.cache.num_free_updates
        return self.cache.has_free_state and (num_free is None or num_free >= num_nodes)

    def run(
        self, requests: Sequence[Request], progress: Callable[[int], None] | None = None
    ) -> None:
        """Run new requests to completion, batched with requests that are already running.

        ``progress`` is called before each step with the number of completed requests. If one of the
        requests fails, its error is raised, and the others are aborted.
        """
        with uninterrupted():  # so Ctrl-C takes effect only in ``progress`` and in forward passes
            try:
                for request in requests:
                    self.add(request)
                while not all(request.ended for request in requests):
                    with interruptible():
                        if progress is not None:
                            progress(sum(request.ended for request in requests))
                    self.step()
                    _raise_errors(requests)
                _raise_errors(requests)  # errors of a step that another thread has run since
            finally:
                for request in requests:
                    self.abort(request)

    def stream(self, requests: Sequence[Request]) -> Generator[tuple[int, Token, bool]]:
        """Run requests; yield their tokens after each step.

        A token comes as ``(request index, token, whether it is the last)``. Closing the iterator
        aborts the requests. Raises the same errors as :meth:`run`.
        """
        try:
            for request in requests:
                self.add(request)
            # Another thread may have run a step of these requests: yield its tokens before the next
            # step.
            while any(not request.ended or request.result.undelivered for request in requests):
                if not any(request.result.undelivered for request in requests):
                    self.step()
                _raise_errors(requests)
                with self.lock:
                    tokens = [*_take_tokens(requests)]
                yield from tokens
            _raise_errors(requests)  # errors of a step that another thread has run since
        finally:
            with uninterrupted():
                for request in requests:
                    self.abort(request)

    def _begin_exclusive(self) -> None:
        """Begin a step of the locked engine.

        Raises ``PronkError`` if a step is running in this thread, which a drafter or logits
        processor may have called.
        """
        if self._stepping:
            msg = (
                "step() is not re-entrant; use a separate LLM inside a drafter or logits processor"
            )
            raise PronkError(msg)
        self._stepping = True

    def _end_exclusive(self) -> None:
        """End a step, and remove ended requests."""
        self._stepping = False
        self._remove_finished()

    def _tree_logits(
        self, prompt: Sequence[int], trees: Sequence[TokenTree], adapter: Adapter | None
    ) -> list[Array]:
        text = [*prompt, trees[0].tokens[0]]
        digests = list[bytes]()
        salt = cache_salt(adapter)
        block_table = self.cache.match_prefix(text, salt, digests) or BlockTable()
        block_table.adapter = -1 if adapter is None else adapter.number
        for _ in self.scheduler.disk_reads.load(block_table, text, salt, digests):
            pass
        self.cache.release_outside_window(block_table)

        def forward(tree: TokenTree, logits_nodes: range) -> Logits:
            self.cache.prepare(block_table, block_table.length + len(tree))
            entry = BatchEntry(block_table, tree, logits_nodes, len(prompt), num_final=len(prompt))
            with interruptible():
                return self.runner.forward(ForwardBatch([entry])).logits[0]

        try:
            while block_table.length < len(prompt):
                chunk = prompt[
                    block_table.length : block_table.length + self.scheduler.prefill_chunk
                ]
                forward(TokenTree.chain(chunk), range(0))
                self.cache.commit_slots(block_table, range(len(chunk)))
                self.cache.cache_blocks(block_table, prompt, salt)
                self.cache.release_outside_window(block_table)
            return [forward(tree, range(len(tree)))[:].copy() for tree in trees]
        finally:
            self.cache.release(block_table)

    def _step(self) -> None:
        start_time = self.runner.clock()
        if self.scheduler.expire():
            self._remove_finished()  # so that waiting requests can use their KV blocks
        scheduled = self.scheduler.schedule()
        self.speculator.begin(scheduled, self.scheduler.preempted)
        if not scheduled:
            return
        drafts = self.speculator.propose(scheduled)
        steps = [plan_step(each, drafts.get(each.request)) for each in scheduled]
        batch = ForwardBatch([step.entry for step in steps])
        layers: frozenset[int] = frozenset()
        for step in steps:
            layers = layers.union(step.request.hidden_layers)
        with interruptible():
            result = self.runner.forward(batch, layers)
        for step in steps:
            step.request.stats.target_seconds += result.seconds
        outcomes: dict[Request, Outcome[Any]] = {}
        for index, step in enumerate(steps):
            try:
                outcome = self.output_processor.process(step, result, index)
            except NotFiniteError:
                step.request.result.fail(PronkError(_not_finite_message(self.cache.dtype)))
            except Exception as error:  # noqa: BLE001 - logits processors, guides and stop strings are those of a request
                step.request.result.fail(error)
            else:
                if outcome is not None:
                    outcomes[step.request] = outcome
        self.speculator.update(steps, outcomes, batch, start_time, experts_read=result.experts_read)

    def _remove_finished(self) -> None:
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            if request.ended or request.aborted:
                self._remove(request)

    def _remove(self, request: Request) -> None:
        if self.scheduler.remove(request):
            request.stats.total_seconds = self.runner.clock() - request.start_time
            self.speculator.stop(request)
            _clear_frames(request.result.error)


def prefill_size(prefill_chunk: int | Literal["window"], config: ModelConfig) -> int:
    """Return the maximum number of prompt tokens per pass.

    ``prefill_chunk`` is this number, or ``"window"`` for the size of the largest sliding window.

    Raises ``OptionError`` if the number is not in 16..8192, or no layer has a sliding window. With
    chunks of one window (Jiang et al. 2023, figure 3) a chunk sees itself and the chunk before it.
    """
    if prefill_chunk != "window":
        return check_integer("prefill_chunk", prefill_chunk, 16, 8192)
    windows = [size for size in config.windows if size is not None]
    if not windows:
        msg = (
            "prefill_chunk: expected a model with a sliding window, found none; "
            "give a number in 16..8192"
        )
        raise OptionError(msg)
    return min(max(16, *windows), 8192)


def _take_tokens(requests: Sequence[Request]) -> Iterator[tuple[int, Token, bool]]:
    """Yield the tokens that the caller has not received yet, and drop them from the requests.

    The items are those of :meth:`Engine.stream`.
    """
    for index, request in enumerate(requests):
        undelivered = request.result.undelivered
        while undelivered:
            token = undelivered.popleft()
            yield index, token, request.result.finish_reason is not None and not undelivered


def _raise_errors(requests: Sequence[Request]) -> None:
    for request in requests:
        if request.result.error is not None:
            raise request.result.error


def _clear_frames(error: BaseException | None) -> None:
    """Clear the local variables in an error's tracebacks, which would keep arrays alive."""
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__context__


def _not_finite_message(dtype: DType) -> str:
    cause = "the weights of the model are damaged"
    if dtype != FLOAT32:
        cause = f'{dtype} overflows, or {cause}; try dtype="float32"'
    return f"expected finite logits, found infinity or NaN in {dtype}: {cause}"
