"""``TreeRunner``: its record of workers' KV pools and costs, and the rows that it sends to
workers.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest

from engine.cases import PROMPTS, ask, assert_same, drafter, params, plain
from parallel.dealt import partition_randomly, tree_parallel_engine
from pronk import SamplingParams
from pronk.base.arrays import FLOAT32
from pronk.cache.blocks import BlockTable
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.parallel import runner
from pronk.parallel.runner import TreeRunner, WorkerHandle
from pronk.parallel.tree_partition import count_rows
from pronk.parallel.wire_format import WorkRequest
from pronk.sampling.tree import TokenTree
from tiny_models import run, samples, tiny_decoder

KIND = FLOAT32


class Owner:
    """An object that makes the KV cache keep a layer's outputs."""


def runner_of(engine: Engine) -> TreeRunner:
    found = engine.runner
    assert isinstance(found, TreeRunner)
    return found


def asked(want: Sequence[Request]) -> list[Request]:
    """Return a request for each prompt; adversarial and random draft tokens in turn."""
    names = ("adversarial", "random")
    return [
        ask(p, params("temperature", i, 30), drafter(names[i % 2], want))
        for i, p in enumerate(PROMPTS)
    ]


def added(engine: Engine, requests: list[Request]) -> list[Request]:
    for request in requests:
        engine.add(request)
    return requests


@pytest.mark.parametrize("first", [2, 5, 9])
def test_layer_outputs_kept_from_the_middle_of_a_text_on(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers lack these outputs of all earlier tokens, and get them or recompute the whole
    text.
    """
    partition_randomly(monkeypatch)
    want = plain(KIND, "temperature", PROMPTS, 30)
    owners = list[Owner]()
    recomputed = list[int]()
    make_request = TreeRunner._make_request

    def watched(*given: object) -> tuple[WorkRequest, list[int]]:
        request, counts = make_request(*given)  # type: ignore[arg-type]
        recomputed.extend(counts)
        return request, counts

    monkeypatch.setattr(TreeRunner, "_make_request", watched)
    with tree_parallel_engine(tiny_decoder(), 3) as engine:
        found = added(engine, asked(want))
        steps = 0
        while not all(request.ended for request in found):
            engine.step()
            steps += 1
            if steps in (first, first + 6):
                owners.append(Owner())
                if len(owners) == 1:
                    recomputed.clear()
                engine.cache.save_feature(len(owners), owners[-1])
        assert max(recomputed) > 10
    assert_same(found, want)


def test_rows_of_a_failed_request_are_not_recorded_as_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a request to a worker cannot be serialized, the step fails, and the workers stay in
    use.
    """
    partition_randomly(monkeypatch)
    want = plain(KIND, "temperature", PROMPTS, 30)
    serialize = WorkRequest.serialize
    failures = 0

    def failing(request: WorkRequest) -> list[Any]:
        nonlocal failures
        if failing_now and (request.moves or request.kv_rows is not None):
            failures += 1
            raise MemoryError
        return serialize(request)

    monkeypatch.setattr(WorkRequest, "serialize", failing)
    with tree_parallel_engine(tiny_decoder(), 3) as engine:
        found = added(engine, asked(want))
        steps = 0
        while not all(request.ended for request in found):
            failing_now = steps % 3 == 2
            with suppress(MemoryError):
                engine.step()
            steps += 1
            assert steps < 1000
        assert len(runner_of(engine).workers) == 2
    assert failures > 3
    assert_same(found, want)


def test_copies_of_blocks_that_samples_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of a worker's rows distinguishes a block, its copy, and the block that the copy
    replaces.
    """
    partition_randomly(monkeypatch)
    own = SamplingParams(max_tokens=30, temperature=0.9, seed=3, n=4, logprobs=1)
    prompts = [p[: 16 * (len(p) // 16) + 7] for p in PROMPTS if len(p) > 30][:3]
    assert prompts
    with tree_parallel_engine(tiny_decoder(), 1) as alone:
        want = [each for p in prompts for each in samples(p, own)]
        run(alone, want)
    # The pool is so small that released blocks are used again at once.
    with tree_parallel_engine(tiny_decoder(), 3, num_blocks=40, share_prefixes=True) as engine:
        for _ in range(3):
            found = [
                each
                for p in prompts
                for each in samples(p, own, drafter("recycling", ()).bind(engine.target))
            ]
            run(engine, found)
            assert_same(found, want)
        assert runner_of(engine).num_shared_passes > 30


def star(rows: int) -> TokenTree:
    return TokenTree(tuple(range(rows)), (-1, *[0] * (rows - 1)))


def entry(engine: Engine, rows: int, length: int) -> BatchEntry:
    """Return the entry of a star of ``rows`` nodes after ``length`` tokens that the driver has
    computed.
    """
    block_table = BlockTable()
    made = runner_of(engine)
    engine.cache.prepare(block_table, length + rows)
    text = BatchEntry(block_table, TokenTree.chain([5] * length), range(0), length)
    made.forward(ForwardBatch([text]))
    engine.cache.commit_slots(block_table, range(length))
    engine.cache.prepare(block_table, length + rows)
    return BatchEntry(block_table, star(rows), range(rows), length)


def teach(made: TreeRunner, own: float, theirs: float) -> None:
    """Set the cost of ``n`` rows to ``1 + own * n`` seconds in the driver, ``1 + theirs * n`` in
    workers.
    """
    for cost_model, row in (
        (made.driver_costs, own),
        *((worker.cost_model, theirs) for worker in made.workers),
    ):
        for rows in (1, 2, 4, 8, 16, 32, 64):
            for _ in range(9):
                cost_model.learn(rows, 0, 1.0 + row * rows)


@pytest.mark.parametrize(("theirs", "least", "most"), [(1.0, 25, 39), (3.0, 8, 24)])
def test_a_slower_worker_gets_fewer_rows(theirs: float, least: int, most: int) -> None:
    with tree_parallel_engine(tiny_decoder(), 2) as engine:
        made = runner_of(engine)
        task = entry(engine, 64, 3)
        teach(made, 1.0, theirs)
        (worker,) = made.workers
        worker.exchange_times.append(0.0)
        here, there = made._partition(ForwardBatch([task]))
        assert least <= count_rows(there) <= most
        assert count_rows(here) + count_rows(there) >= 64


def test_exchanges_that_cost_more_than_they_save_are_not_made() -> None:
    with tree_parallel_engine(tiny_decoder(), 2) as engine:
        made = runner_of(engine)
        task = entry(engine, 32, 3)
        teach(made, 1.0, 1.0)
        (worker,) = made.workers
        worker.exchange_times.append(100.0)
        assert [count_rows(share) for share in made._partition(ForwardBatch([task]))] == [32, 0]
        # The estimate is halved in each of 6 half-lives without an exchange, so that it is measured
        # again.
        worker.idle_steps = 6 * runner.IDLE_HALF_LIFE
        assert count_rows(made._partition(ForwardBatch([task]))[1]) > 0


def test_expensive_bytes_keep_a_text_in_the_driver() -> None:
    with tree_parallel_engine(tiny_decoder(), 2) as engine:
        made = runner_of(engine)
        task = entry(engine, 32, 300)
        teach(made, 1.0, 1.0)
        (worker,) = made.workers
        worker.exchange_times.append(0.0)
        assert count_rows(made._partition(ForwardBatch([task]))[1]) > 0
        worker.byte_times.append(1.0)
        assert [count_rows(share) for share in made._partition(ForwardBatch([task]))] == [32, 0]
        worker.pool.valid[:] = True  # the worker has all KV rows
        assert count_rows(made._partition(ForwardBatch([task]))[1]) > 0


@pytest.mark.parametrize(("byte", "sent"), [(0.0, True), (1.0, False)])
def test_missing_rows_are_sent_or_recomputed_whichever_is_cheaper(
    byte: float, sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerHandle, "seconds_per_byte", byte)
    with tree_parallel_engine(tiny_decoder(), 2) as engine:
        made = runner_of(engine)
        task = entry(engine, 9, 40)
        teach(made, 1e-3, 1e-3)
        (worker,) = made.workers
        worker.pool.valid[:] = False
        share = runner.partition_trees([task.tree], [lambda rows: rows] * 2)[1]
        work, recomputed = made._make_request(worker, [task], share, frozenset())
        assert work.slots is not None
        assert (len(work.slots), recomputed) == ((40, [0]) if sent else (0, [40]))


def test_rows_of_unknown_cost_are_sent_or_recomputed_once() -> None:
    with tree_parallel_engine(tiny_decoder(), 2) as engine:
        made = runner_of(engine)
        task = entry(engine, 9, 40)
        made.driver_costs = type(made.driver_costs)()
        (worker,) = made.workers
        for cost_model in (made.driver_costs, worker.cost_model):
            cost_model.learn(1, 0, 1.0)  # the cost of more rows stays unknown
        share = runner.partition_trees([task.tree], [lambda rows: rows] * 2)[1]
        work, recomputed = made._make_request(worker, [task], share, frozenset())
        assert work.slots is not None
        assert len(work.slots) + sum(recomputed) == 40


def test_cold_exchanges_do_not_count_and_small_messages_do_not_price_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    partition_randomly(monkeypatch)
    want = plain(KIND, "temperature", PROMPTS, 30)
    with tree_parallel_engine(tiny_decoder(), 2) as engine:
        made = runner_of(engine)
        (worker,) = made.workers
        assert worker.has_new_pool
        found = asked(want)
        run(engine, found)
        assert made.num_shared_passes > runner.NUM_TIMINGS
        assert not worker.has_new_pool
        assert worker.idle_steps >= 0
        assert len(worker.exchange_times) == runner.NUM_TIMINGS
        assert made.communication_seconds > 0.0
        assert not worker.byte_times  # all messages are shorter than MIN_TIMED_BYTES
        monkeypatch.setattr(runner, "MIN_TIMED_BYTES", 1)
        found = asked(want)
        run(engine, found)
        assert worker.byte_times
        engine.cache.resize(engine.cache.allocator.num_blocks)
        assert not worker.pool.pool_sent
