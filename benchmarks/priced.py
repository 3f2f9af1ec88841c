"""A clock for comparisons on a noisy machine: a forward pass takes the time in a table.

Models compute for real, so that tokens, proposals and acceptance are those of a normal run. Each
forward pass, however, advances the clock by the median duration of passes with the same numbers of
rows and cached tokens, measured once in the same process. The remaining time (Python, and the
drafters' own work) is processor time of the calling thread, which other processes disturb little.
Therefore the ratio of two configurations depends on the configurations, and hardly on the machine.
With one thread, the durations in the table are processor time, too, and can be measured on a busy
machine.
"""

from __future__ import annotations

import json
import math
import statistics
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any, NamedTuple

from pronk import LLM
from pronk.base.files.results import save_result
from pronk.cache.blocks import BlockTable
from pronk.kernels.threads import num_threads
from pronk.models.decoder import forward_weights
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.layer_executor import ChainJob, LayerExecutor
from pronk.models.model_runner import ModelRunner
from pronk.sampling.tree import TokenTree

__all__ = ["PricedClock", "Prices", "measure"]

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
CONTEXTS = (100, 1500)


class Prices(NamedTuple):
    """Seconds of a model's forward passes.

    Attributes:
        seconds: for each number of ``ROWS``, seconds of a pass with ``CONTEXTS[0]`` cached tokens.
        per_token: seconds per further cached token.
    """

    seconds: tuple[float, ...]
    per_token: float

    def at(self, rows: int, context: int) -> float:
        """Return the seconds of a pass, by linear interpolation of the measured numbers of rows."""
        high = min(max(1, bisect_left(ROWS, rows)), len(ROWS) - 1)
        low = high - 1
        slope = (self.seconds[high] - self.seconds[low]) / (ROWS[high] - ROWS[low])
        short = self.seconds[low] + slope * (rows - ROWS[low])
        return short + self.per_token * (context - CONTEXTS[0])

    def with_products(self, speed: float) -> Prices:
        """Return an estimate for a processor that multiplies ``speed`` times as fast.

        Its memory, and all that is neither reading weights nor multiplying, are as fast as here. A
        pass over one row is taken to read weights, and the difference of the two largest passes up
        to 32 rows to multiply.
        """
        low, high = ROWS.index(16), ROWS.index(32)
        row = (self.seconds[high] - self.seconds[low]) / (ROWS[high] - ROWS[low])
        read = self.seconds[0]
        found = list[float]()
        for rows, seconds in zip(ROWS, self.seconds, strict=True):
            rest = max(0.0, seconds - max(read, row * rows))
            found.append(max(read, row * rows / speed) + rest)
        return Prices(tuple(accumulate(found, max)), self.per_token)


def measure(runner: ModelRunner, rounds: int = 25) -> Prices:
    """Measure a model's forward passes in turn; return the medians over rounds."""
    tables = {context: _cached(runner, context) for context in CONTEXTS}
    works = [(CONTEXTS[0], rows) for rows in ROWS] + [(CONTEXTS[1], 1)]
    took: dict[tuple[int, int], list[float]] = {work: [] for work in works}
    timer = thread_time if num_threads() == 1 else perf_counter
    for _ in range(rounds):
        for context, rows in works:
            entry = BatchEntry(tables[context], TokenTree.chain([7] * rows), range(rows), context)
            began = timer()
            runner.forward(ForwardBatch([entry]))
            took[context, rows].append(timer() - began)
    for table in tables.values():
        runner.cache.release(table)
    seconds = {work: statistics.median(each) for work, each in took.items()}
    # A pass over more rows cannot take less time, so that smaller medians are raised.
    medians = [seconds[CONTEXTS[0], rows] for rows in ROWS]
    rising = [*accumulate(medians, max)]
    longer = max(0.0, seconds[CONTEXTS[1], 1] - seconds[CONTEXTS[0], 1])
    return Prices(tuple(rising), longer / (CONTEXTS[1] - CONTEXTS[0]))


def _cached(runner: ModelRunner, tokens: int) -> BlockTable:
    """Return a block table with cached tokens, and with slots for the largest pass after them."""
    table = BlockTable()
    runner.cache.prepare(table, tokens + ROWS[-1])
    for start in range(0, tokens, 500):
        count = min(500, tokens - start)
        runner.forward(
            ForwardBatch([BatchEntry(table, TokenTree.chain([5] * count), range(0), tokens)])
        )
        runner.cache.commit_slots(table, range(count))
    return table


class PricedClock:
    """A clock for one :class:`~pronk.llm.LLM`; each model is measured before its first pass.

    Attributes:
        slow_from: time from which forward passes take twice as long, as beside a busy process.
    """

    def __init__(self, table: Path | None = None, products: float = 1.0) -> None:
        """Create a clock.

        Args:
            table: file that keeps measured prices for later runs.
            products: how many times as fast as here products are (:meth:`Prices.with_products`).
        """
        self._products = products
        self.slow_from = math.inf
        self._table = table
        self._shift = 0.0
        self._prices: dict[int, Prices | None] = {}  # prices by ``id`` of the model

    def __call__(self) -> float:
        """Return the time in seconds."""
        return thread_time() + self._shift

    def attach(self, llm: LLM) -> None:
        """Make this the clock of an LLM, before a drafter that reads the clock is bound."""
        llm.engine.runner.clock = self
        llm.engine.output_processor.clock = self

    @contextmanager
    def installed(self, *, only: bool = True) -> Iterator[None]:
        """Let each forward pass in the ``with`` block take its price, if ``only``."""
        if not only:
            yield
            return
        run = LayerExecutor.run
        draft_chains = LayerExecutor.draft_chains

        def priced_run(
            executor: LayerExecutor, batch: ForwardBatch, num_layers: int, *more: Any
        ) -> Any:
            began = thread_time()
            prices = self._prices_of(executor)
            result = run(executor, batch, num_layers, *more)
            if prices is not None:
                share = num_layers / len(executor.decoder.layers)
                price = share * prices.at(batch.num_rows, batch.num_committed)
                self._shift += self._factor * price - (thread_time() - began)
            return result

        def priced_chains(executor: LayerExecutor, jobs: Sequence[ChainJob]) -> list[int]:
            began = thread_time()
            prices = self._prices_of(executor)
            (entry,) = [job.entry for job in jobs]
            rows = entry.num_rows
            context = entry.block_table.length
            passes = draft_chains(executor, jobs)
            if prices is not None:
                more = (passes[0] - 1) * prices.at(1, context + rows)
                price = prices.at(rows, context) + more
                self._shift += self._factor * price - (thread_time() - began)
            return passes

        LayerExecutor.run = priced_run  # type: ignore[method-assign, assignment]
        LayerExecutor.draft_chains = priced_chains  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            LayerExecutor.run = run  # type: ignore[method-assign]
            LayerExecutor.draft_chains = draft_chains  # type: ignore[method-assign]

    @property
    def _factor(self) -> float:
        return 1.0 if self() < self.slow_from else 2.0

    def _prices_of(self, executor: LayerExecutor) -> Prices | None:
        """Return the prices of a model, measured now if they are unknown.

        Returns ``None`` for a model whose passes take their own processor time.
        """
        key = id(executor.decoder)
        if key not in self._prices:
            self._prices[key] = None
            # The passes of GLIDE's draft model cannot be measured, because it does not run alone.
            if not executor.other_caches:
                self._prices[key] = self._stored(executor)
        return self._prices[key]

    def _stored(self, executor: LayerExecutor) -> Prices:
        """Return a model's prices from the table, or measure them and add them to the table."""
        decoder = executor.decoder
        kept = dict[str, Any]()
        name = f"{decoder.config}, {forward_weights(decoder).nbytes} bytes, {decoder.kernels.name}"
        if num_threads() == 1:
            name += ", one thread"
        if self._table is not None and self._table.exists():
            kept = json.loads(self._table.read_text())
        if name not in kept:
            kept[name] = measure(ModelRunner(executor.decoder, executor.cache))
            if self._table is not None:
                save_result("table", self._table, json.dumps(kept))
        seconds, per_token = kept[name]
        return Prices(tuple(seconds), per_token).with_products(self._products)
