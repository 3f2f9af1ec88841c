"""Load of many clients on a KV cache that is far too small; most of them disconnect.

Each client may generate only two letters of its own (by ``logit_bias``), so that a letter of
another client shows mixed-up requests. A finished answer must also equal the answer without other
requests.
"""

import asyncio
import gc
import random
import resource
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from string import ascii_letters

import pytest

from checkpoints import MakeCheckpoint
from pronk.async_llm import AsyncLLM
from pronk.base.errors import DeadlineError
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams

BLOCKS = 9
CLIENTS = 26
DRAFTERS = (
    "suffix(store_tokens=0)",
    "suffix",
    "recycling",
    "lookahead",
    "prompt_lookup",
    "autoregressive",
)


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


@pytest.fixture(scope="module")
def llm(checkpoint: MakeCheckpoint) -> LLM:
    made = LLM(checkpoint("llama"), prefix_cache=True, max_batch=6, kv_memory=BLOCKS * 12288)
    assert made.engine.cache.allocator.num_blocks == BLOCKS
    return made


def canary(client: int) -> str:
    return ascii_letters[2 * client : 2 * client + 2]


def prompt(client: int) -> str:
    return canary(client) * (3 + 2 * client)


def options(llm: LLM, client: int) -> SamplingParams:
    letters = {token: 100.0 for letter in canary(client) for token in llm.tokenizer.encode(letter)}
    return SamplingParams(
        max_tokens=20 + client, temperature=5.0, seed=client, logit_bias=letters, ignore_eos=True
    )


async def visit(engine: AsyncLLM, client: int, number: int, want: Mapping[int, str]) -> str:
    """Send one request; most requests are aborted before the first token or after a few."""
    luck = random.Random(number)
    leaves = luck.choice([None, 0, 1, 2, 5, 9])
    deadline = 0.002 if luck.random() < 0.05 else None
    own = options(engine.llm, client)
    said = ""
    stream = engine.stream(
        prompt(client),
        own,
        drafter=luck.choice(DRAFTERS),
        priority=luck.choice([0, 0, 0, 1]),
        salt=canary(client).encode(),
        deadline=deadline,
    )
    task = asyncio.current_task()
    assert task is not None
    if leaves == 0:
        asyncio.get_running_loop().call_later(luck.random() / 100, task.cancel)
    async with aclosing(stream):
        async for piece in stream:
            said += piece.text
            assert set(said) <= set(canary(client)), (
                f"expected letters of {canary(client)}, found {said}"
            )
            if leaves is not None and len(said) >= leaves > 0:
                return "left"
    assert said == want[client]
    return "done"


async def load(llm: LLM, count: int, want: Mapping[int, str], first: int = 0) -> dict[str, int]:
    found: dict[str, int] = {"done": 0, "left": 0, "late": 0}
    slots = asyncio.Semaphore(48)

    async def one(engine: AsyncLLM, number: int) -> None:
        async with slots:
            try:
                found[await asyncio.create_task(visit(engine, number % CLIENTS, number, want))] += 1
            except asyncio.CancelledError:
                found["left"] += 1
            except DeadlineError:
                found["late"] += 1

    async with AsyncLLM(llm) as engine:
        await asyncio.gather(*(one(engine, number) for number in range(first, first + count)))
        assert engine.num_requests == 0
    engine_ = llm.engine
    assert not engine_.scheduler.running
    assert not engine_.scheduler.waiting
    assert engine_.cache.allocator.num_free == BLOCKS
    assert not any(engine_.cache.allocator.references)
    return found


def alone(llm: LLM) -> dict[int, str]:
    return {
        client: llm.generate(prompt(client), options(llm, client), drafter="autoregressive").text
        for client in range(CLIENTS)
    }


def preempted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that collects the arrival numbers of preempted requests from now on."""
    found = list[int]()
    scheduler = llm.engine.scheduler
    preempt = scheduler._preempt
    monkeypatch.setattr(
        scheduler,
        "_preempt",
        lambda request: (found.append(request.queueing.arrival), preempt(request)),
    )
    return found


def test_concurrent_requests_get_their_own_text_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = preempted(llm, monkeypatch)
    found = asyncio.run(load(llm, 300, alone(llm)))
    assert sum(found.values()) == 300
    assert min(found["done"], found["left"]) > 30
    assert counted


@pytest.mark.slow
def test_fifty_thousand_requests_leak_no_memory(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = preempted(llm, monkeypatch)
    want = alone(llm)
    memory = list[int]()
    for first in range(0, 50_000, 2000):
        found = asyncio.run(load(llm, 2000, want, first))
        assert sum(found.values()) == 2000
        gc.collect()
        memory.append(resident())
    assert len(counted) > 100
    # Drafters' stores and caches grow up to their limits during the first third.
    settled = memory[len(memory) // 3]
    assert memory[-1] - settled < 16 * 2**20, memory
