"""States of recurrent layers on disk: texts that go on from them equal those of no cache."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.cases import assert_same, drafter, text
from engine.recurrent import RECURRENT, pool_of
from engine.test_prompt_cache import Server, servers
from pronk.base.arrays import FLOAT32
from pronk.cache import block_store
from pronk.cache.states import StateCounts
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.sampling.params import SamplingParams
from tiny_models import make_request, run, run_alone, tiny_decoder

FIRST = text(3, 100)
BRANCH = 70  # the next prompt of the conversation parts from the first text after this token
OPTIONS = SamplingParams(max_tokens=24, seed=1, temperature=0.7, logprobs=2)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    yield from servers(tmp_path, monkeypatch)


def start(server: Server, counts: StateCounts | None = None) -> Engine:
    return server.start(
        tiny_decoder(FLOAT32, **RECURRENT), state_counts=counts, max_batch=3, prefill_chunk=40
    )


def ask(engine: Engine, prompt: list[int], *, branch: bool = True) -> Request:
    """Run a request; compare it with one without caches."""
    want = run_alone(tiny_decoder(FLOAT32, **RECURRENT), prompt, OPTIONS)
    proposer = drafter("oracle", [want]).bind(engine.target)
    request = make_request(prompt, OPTIONS, proposer)
    request.branch_positions = (BRANCH,) if branch else ()
    run(engine, [request])
    assert_same([request], [want])
    return request


def edit(server: Server, statement: str, *, size: int) -> int:
    """Change the records on disk that have ``size`` bytes; return their number."""
    server.close()
    server.stores.clear()
    with sqlite3.connect(server.folder / "blocks.sqlite3") as database:
        query = "SELECT id FROM contents WHERE length(bytes) = ?"
        found = database.execute(query, (size,)).fetchall()
        database.executemany(f"{statement} WHERE id = ?", found)
    return len(found)


def delete(server: Server, *, size: int) -> int:
    """Delete the records of ``size`` bytes; return their number."""
    edit(server, "DELETE FROM blocks", size=size)
    return edit(server, "DELETE FROM contents", size=size)


def test_restart_at_each_place(server: Server) -> None:
    """The last state of the first text and that of the branch are on disk, with all blocks."""
    first = ask(start(server), FIRST)
    hits = dict[int, int]()
    for end in range(16, len(first.tokens) + 1, 16):
        engine = start(server)
        prompt = [*first.tokens[: end + 1], 5]
        request = ask(engine, prompt)
        hits[end] = request.stats.disk_tokens
        assert request.stats.cached_tokens == request.stats.disk_tokens
    assert hits[64] == 64
    assert hits[112] >= 96
    assert {*hits.values()} > {0, 64}


def test_a_second_prompt_after_a_restart(server: Server) -> None:
    """In memory, blocks that were read from disk go on from a checkpoint, too."""
    first = ask(start(server), FIRST)
    engine = start(server)
    prompt = [*first.tokens[:66], 5, 9]
    assert ask(engine, prompt).stats.disk_tokens == 64
    again = ask(engine, prompt)
    assert again.stats.cached_tokens == 64
    assert again.stats.disk_tokens == 0


def test_a_prefix_in_memory_and_a_longer_one_on_disk(server: Server) -> None:
    """Also with a single state, which the request already has."""
    first = ask(start(server), FIRST)
    engine = start(server, StateCounts(1, 4, 24))
    ask(engine, first.tokens[:40], branch=False)
    request = ask(engine, first.tokens[:90])
    assert request.stats.cached_tokens == 64
    assert request.stats.disk_tokens == 64 - 32


@pytest.mark.parametrize("damaged", [False, True])
def test_state_records_that_are_lost(damaged: bool, server: Server) -> None:
    """The text is read again, and the state is stored again."""
    first = ask(start(server), FIRST)
    size = pool_of(start(server).cache).state_bytes
    if damaged:
        assert edit(server, "UPDATE blocks SET checksum = x'00'", size=size) >= 2
    else:
        assert delete(server, size=size) >= 2
    prompt = [*first.tokens[:80], 5]
    assert ask(start(server), prompt).stats.disk_tokens == 0
    assert ask(start(server), prompt).stats.disk_tokens >= 64


@pytest.mark.parametrize("damaged", [False, True])
def test_blocks_that_are_lost(damaged: bool, server: Server) -> None:
    """A state without the blocks before it is of no use."""
    first = ask(start(server), FIRST)
    cache = start(server).cache
    size = cache.block_size * cache.bytes_per_token
    if damaged:
        assert edit(server, "UPDATE blocks SET checksum = x'00'", size=size) >= 6
    else:
        assert delete(server, size=size) >= 6
    prompt = [*first.tokens[:80], 5]
    assert ask(start(server), prompt).stats.disk_tokens == 0
    ask(start(server), prompt)  # finds another damaged block, after those that were damaged before
    assert ask(start(server), prompt).stats.disk_tokens >= 64


def test_states_of_another_size(server: Server) -> None:
    """As of another model with the same identity."""
    first = ask(start(server), FIRST)
    size = pool_of(start(server).cache).state_bytes
    assert edit(server, "UPDATE contents SET bytes = x'0102'", size=size) >= 2
    assert ask(start(server), [*first.tokens[:80], 5]).stats.disk_tokens == 0


def test_without_a_queue_for_states(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_store, "_MAX_QUEUE_BYTES", 100)
    first = ask(start(server), FIRST)
    assert ask(start(server), [*first.tokens[:80], 5]).stats.disk_tokens == 0


def test_preempted_requests_store_their_states(server: Server) -> None:
    """A request that is not in memory any more goes on from disk."""
    engine = start(server, StateCounts(1, 1, 24))
    engine.scheduler.max_batch = 1
    want = run_alone(tiny_decoder(FLOAT32, **RECURRENT), FIRST, OPTIONS)
    slow = make_request(FIRST, OPTIONS)
    engine.add(slow)
    while slow.num_generated < 10:
        engine.step()
    server.stores[-1].flush()
    for number in range(2):
        urgent = make_request([number] * 40, OPTIONS)
        urgent.priority = 1
        engine.add(urgent)
    while not slow.ended:
        engine.step()
    assert_same([slow], [want])
    assert slow.stats.preemptions == 1
    assert slow.stats.disk_tokens >= 80


def test_states_that_are_used_are_evicted_last(server: Server) -> None:
    """One text is used again and again; the others lose their states, and are read again."""
    used, *others = [text(seed, 60) for seed in range(20, 30)]
    num_evicted = 0
    hits = list[int]()
    for prompt in (used, *others, *others):
        for each in (prompt, used):
            engine = server.start(
                tiny_decoder(FLOAT32, **RECURRENT), max_bytes=400_000, prefill_chunk=40
            )
            request = ask(engine, each, branch=False)
            server.stores[-1].flush()
            num_evicted += server.stores[-1].counts.blocks_evicted
            if each is not used:
                hits.append(request.stats.disk_tokens)
        assert request.stats.disk_tokens == 48
    assert num_evicted > 20
    assert 0 in hits[len(others) :]
