"""What the runner of dealt trees knows of its workers: what they hold, what they cost, and what is sent to them."""

from collections.abc import Sequence
from contextlib import suppress

import pytest
import torch

from engine.cases import PROMPTS, ask, assert_same, drafter, params, plain
from parallel.dealt import deal_by_chance, dealt
from pronk import SamplingParams
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.execution.attention import Segment
from pronk.execution.forward_job import ForwardJob
from pronk.kv_cache.blocks import BlockTable
from pronk.parallel import runner, worker_handle
from pronk.parallel.runner import TreeRunner
from pronk.parallel.work_request import WorkRequest
from pronk.parallel.worker_handle import WorkerHandle
from pronk.speculation.tree import TokenTree
from tiny_models import run, samples, tiny_decoder

KIND = torch.float32


class Owner:
    """Of a layer's outputs that are kept."""


def made_by(engine: Engine) -> TreeRunner:
    found = engine.runner
    assert isinstance(found, TreeRunner)
    return found


def asked(want: Sequence[Request]) -> list[Request]:
    """Texts of which guesses are right and wrong, off the main chain as well: half of them take many steps."""
    names = ("adversarial", "random")
    return [ask(p, params("temperature", i, 30), drafter(names[i % 2], want)) for i, p in enumerate(PROMPTS)]


def added(engine: Engine, requests: list[Request]) -> list[Request]:
    for request in requests:
        engine.add(request)
    return requests


@pytest.mark.parametrize("first", [2, 5, 9])
def test_layers_that_are_kept_from_the_middle_of_a_text_on(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers lack their rows from then on, and may compute the whole text once more: from the tokens that it has."""
    deal_by_chance(monkeypatch)
    want, owners, rides = plain(KIND, "temperature", PROMPTS, 30), list[Owner](), list[int]()
    work = TreeRunner._make_request

    def watched(*given: object) -> tuple[WorkRequest, list[int]]:
        share, ridden = work(*given)  # type: ignore[arg-type]
        rides.extend(ridden)
        return share, ridden

    monkeypatch.setattr(TreeRunner, "_make_request", watched)
    with dealt(tiny_decoder(), 3) as engine:
        found, steps = added(engine, asked(want)), 0
        while not all(request.ended for request in found):
            engine.step()
            steps += 1
            if steps in (first, first + 6):
                owners.append(Owner())
                if len(owners) == 1:
                    rides.clear()
                engine.cache.keep_hidden(len(owners), owners[-1])
        assert max(rides) > 10
    assert_same(found, want)


def test_what_was_never_sent_is_not_taken_for_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that dies of its own share leaves the others of the engine as they are."""
    deal_by_chance(monkeypatch)
    want, numbers, failures = plain(KIND, "temperature", PROMPTS, 30), WorkRequest.serialize, 0

    def failing(share: WorkRequest) -> torch.Tensor:
        nonlocal failures
        if failing_now and (share.moves or share.kv_rows is not None):
            failures += 1
            raise MemoryError
        return numbers(share)

    monkeypatch.setattr(WorkRequest, "serialize", failing)
    with dealt(tiny_decoder(), 3) as engine:
        found, steps = added(engine, asked(want)), 0
        while not all(request.ended for request in found):
            failing_now = steps % 3 == 2
            with suppress(MemoryError):
                engine.step()
            steps += 1
            assert steps < 1000
        assert len(made_by(engine).workers) == 2
    assert failures > 3
    assert_same(found, want)


def test_blocks_that_samples_share_are_copied_when_they_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """What workers hold of a block is not what they hold of its copy, nor of what the copy's place had before."""
    deal_by_chance(monkeypatch)
    own = SamplingParams(max_tokens=30, temperature=0.9, seed=3, n=4, logprobs=1)
    prompts = [p[: 16 * (len(p) // 16) + 7] for p in PROMPTS if len(p) > 30][:3]
    assert prompts
    with dealt(tiny_decoder(), 1) as alone:
        want = [each for p in prompts for each in samples(p, own)]
        run(alone, want)
    # Pools in which blocks are used again at once.
    with dealt(tiny_decoder(), 3, num_blocks=40, share_prefixes=True) as engine:
        for _ in range(3):
            found = [each for p in prompts for each in samples(p, own, drafter("recycling", ()).bind(engine.target))]
            run(engine, found)
            assert_same(found, want)
        assert made_by(engine).num_shared_passes > 30


def star(rows: int) -> TokenTree:
    return TokenTree(tuple(range(rows)), (-1, *[0] * (rows - 1)))


def job(engine: Engine, rows: int, length: int) -> ForwardJob:
    """Below a text of so many tokens, which this process has read."""
    block_table, made = BlockTable(), made_by(engine)
    engine.cache.prepare(block_table, length + rows)
    made.forward([ForwardJob(Segment(block_table, TokenTree.chain([5] * length)), range(0), length)])
    engine.cache.commit(block_table, range(length))
    engine.cache.prepare(block_table, length + rows)
    return ForwardJob(Segment(block_table, star(rows)), range(rows), length)


def teach(made: TreeRunner, own: float, theirs: float) -> None:
    """Passes of 1 to 64 rows take so many seconds for each row, here and elsewhere."""
    for times, row in ((made.driver_costs, own), *((worker.cost_model, theirs) for worker in made.workers)):
        for rows in (1, 2, 4, 8, 16, 32, 64):
            for _ in range(9):
                times.learn(rows, 0, 1.0 + row * rows)


@pytest.mark.parametrize(("theirs", "least", "most"), [(1.0, 25, 39), (3.0, 8, 24)])
def test_a_slower_worker_gets_fewer_rows(theirs: float, least: int, most: int) -> None:
    with dealt(tiny_decoder(), 2) as engine:
        made = made_by(engine)
        task = job(engine, 64, 3)
        teach(made, 1.0, theirs)
        (worker,) = made.workers
        worker.exchange_times.append(0.0)
        here, there = made._partition([task])
        assert least <= there.rows <= most
        assert here.rows + there.rows >= 64


def test_exchanges_that_cost_more_than_they_save_are_not_made() -> None:
    with dealt(tiny_decoder(), 2) as engine:
        made, task = made_by(engine), job(engine, 32, 3)
        teach(made, 1.0, 1.0)
        (worker,) = made.workers
        worker.exchange_times.append(100.0)
        assert [share.rows for share in made._partition([task])] == [32, 0]
        # What was measured long ago is doubted, so that it is measured again.
        worker.idle_steps = 6 * worker_handle.IDLE_HALF_LIFE
        assert made._partition([task])[1].rows > 0


def test_bytes_that_are_dear_keep_a_text_here() -> None:
    with dealt(tiny_decoder(), 2) as engine:
        made, task = made_by(engine), job(engine, 32, 300)
        teach(made, 1.0, 1.0)
        (worker,) = made.workers
        worker.exchange_times.append(0.0)
        assert made._partition([task])[1].rows > 0
        worker.byte_times.append(1.0)
        assert [share.rows for share in made._partition([task])] == [32, 0]
        worker.copy.valid[:] = True  # nothing has to be sent
        assert made._partition([task])[1].rows > 0


@pytest.mark.parametrize(("byte", "sent"), [(0.0, True), (1.0, False)])
def test_what_a_worker_lacks_is_sent_or_computed_again_as_is_cheaper(
    byte: float, sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerHandle, "seconds_per_byte", byte)
    with dealt(tiny_decoder(), 2) as engine:
        made, task = made_by(engine), job(engine, 9, 40)
        teach(made, 1e-3, 1e-3)
        (worker,) = made.workers
        worker.copy.valid[:] = False
        share = runner.partition_trees([task.segment.tree], [lambda rows: rows] * 2)[1]
        work, rides = made._make_request(worker, [task], share, frozenset())
        assert work.slots is not None
        assert (len(work.slots), rides) == ((40, [0]) if sent else (0, [40]))


def test_costs_that_nobody_knows_send() -> None:
    with dealt(tiny_decoder(), 2) as engine:
        made, task = made_by(engine), job(engine, 9, 40)
        made.driver_costs, (worker,) = type(made.driver_costs)(), made.workers
        for times in (made.driver_costs, worker.cost_model):
            times.learn(1, 0, 1.0)  # and of more rows nothing
        share = runner.partition_trees([task.segment.tree], [lambda rows: rows] * 2)[1]
        work, rides = made._make_request(worker, [task], share, frozenset())
        assert work.slots is not None
        assert len(work.slots) + sum(rides) == 40


def test_cold_exchanges_do_not_count_and_small_messages_do_not_price_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    deal_by_chance(monkeypatch)
    want = plain(KIND, "temperature", PROMPTS, 30)
    with dealt(tiny_decoder(), 2) as engine:
        made = made_by(engine)
        (worker,) = made.workers
        assert worker.has_new_pool
        found = asked(want)
        run(engine, found)
        assert made.num_shared_passes > worker_handle.NUM_TIMINGS
        assert not worker.has_new_pool
        assert worker.idle_steps >= 0
        assert len(worker.exchange_times) == worker_handle.NUM_TIMINGS
        assert made.communication_seconds > 0.0
        assert not worker.byte_times  # texts of this model are small
        monkeypatch.setattr(worker_handle, "MIN_TIMED_BYTES", 1)
        found = asked(want)
        run(engine, found)
        assert worker.byte_times
        engine.cache.resize(engine.cache.allocator.num_blocks)
        assert not worker.copy.pool_sent
