"""Tree parallelism: any partition of the trees, and the loss of a worker, change no bit of the
output.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from checkpoints import MakeCheckpoint
from engine.cases import PROMPTS as TEXTS
from engine.cases import ask, drafter, plain
from engine.cases import params as cased
from parallel.dealt import partition_randomly, tree_parallel_engine
from pronk import LLM, AsyncLLM, OptionError, PronkError, SamplingParams
from pronk.base.arrays import FLOAT32
from pronk.engine.outputs import Completion
from pronk.models.loader import read_config
from pronk.models.model_runner import ModelRunner
from pronk.parallel import connection, processes, runner
from pronk.parallel.processes import WorkerProcesses
from pronk.parallel.runner import TreeRunner
from pronk.parallel.wire_format import WorkRequest
from pronk.parallel.worker import WorkerLoop, WorkerSettings
from sockets import sockets
from tiny_models import run, tiny_decoder
from waiting import HUNG

# ``test_lost_driver.py`` starts workers as new interpreters.
pytestmark = pytest.mark.usefixtures("forked_workers")

LISTED = Path("/proc/net/tcp").exists()
PROMPTS = [
    "def add(a, b):\n    return a + b\n\n\nclass Stack:\n",
    "for i in range(10):\n    print(i)\n\ndef",
    "x",
]

# The first four read of the target, in this order: nothing, all logits, its KV cache, and outputs
# of layers. All drafters run with threads as workers in ``engine/test_equality.py``.
DRAFTERS = [
    "suffix",
    "lookahead(window=10, ngram=5)",
    "glide",
    "multi_token",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "autoregressive",
            "jacobi",
            "recycling",
            "cape(draft_model)",
            "kangaroo",
            "medusa",
            "auto",
        )
    ),
]


@pytest.fixture(autouse=True)
def random_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partition all trees at random."""
    partition_randomly(monkeypatch)


@pytest.fixture(scope="module")
def alone() -> LLM:
    return LLM(threads=1, budget="all")


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3])
def several(request: pytest.FixtureRequest) -> Iterator[LLM]:
    llm = LLM(workers=request.param, threads=1, budget="all", prefix_cache=True)
    yield llm
    close(llm)


def close(llm: LLM) -> None:
    made = passes(llm)
    for worker in [*made.workers]:
        made._drop_worker(worker, RuntimeError("the test is over"))


def passes(llm: LLM) -> TreeRunner:
    found = llm.engine.runner
    assert isinstance(found, TreeRunner)
    return found


def tokens_and_logprobs(found: list[Completion]) -> list[Any]:
    return [(each.token_ids, each.logprobs) for whole in found for each in (whole, *whole.others)]


@pytest.mark.few(1)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_and_logprobs_are_those_of_one(alone: LLM, several: LLM, drafter: str) -> None:
    made = passes(several)
    shared = 0
    for temperature, samples in ((0.0, 1), (0.8, 2)):
        params = SamplingParams(
            max_tokens=20, temperature=temperature, seed=3, n=samples, logprobs=2, ignore_eos=True
        )
        before = made.num_shared_passes
        want, found = (llm.generate(PROMPTS, params, drafter=drafter) for llm in (alone, several))
        assert tokens_and_logprobs(found) == tokens_and_logprobs(want)
        shared += made.num_shared_passes - before
    assert shared > 10
    assert made.workers


def test_prompts_and_penalties_and_rejection(alone: LLM, several: LLM) -> None:
    for options in (
        {"prompt_logprobs": 2},
        {"repetition_penalty": 1.3, "temperature": 0.7},
        {"top_p": 0.8, "temperature": 1.0},
        {"temperature": 0.9, "rule": "rejection"},
    ):
        params = SamplingParams(max_tokens=24, seed=5, ignore_eos=True, logprobs=1, **options)  # type: ignore[arg-type]
        want, found = (llm.generate(PROMPTS, params, drafter="suffix") for llm in (alone, several))
        assert tokens_and_logprobs(found) == tokens_and_logprobs(want)
        assert [each.prompt_logprobs for each in found] == [each.prompt_logprobs for each in want]


def test_a_pool_that_is_too_small_for_all(alone: LLM) -> None:
    """Requests are preempted and recomputed, and other requests get their blocks."""
    small = LLM(workers=2, threads=1, budget="all", kv_memory="400KB")
    params = SamplingParams(max_tokens=60, temperature=0.8, seed=1, ignore_eos=True, logprobs=1)
    prompts = [PROMPTS[number % 3] + "a" * number for number in range(6)]
    want, found = (llm.generate(prompts, params, drafter="recycling") for llm in (alone, small))
    assert tokens_and_logprobs(found) == tokens_and_logprobs(want)
    assert passes(small).num_shared_passes > 10
    assert sum(each.stats.preemptions for each in found) > 0
    close(small)


def test_windows(checkpoint: MakeCheckpoint) -> None:
    """Blocks before the sliding window are released in the driver and in the worker."""
    folder = checkpoint("mistral", sliding_window=24)
    options: dict[str, Any] = {"threads": 1, "budget": "all"}
    one = LLM(folder, **options)
    two = LLM(folder, workers=2, **options)
    params = SamplingParams(max_tokens=120, temperature=0.8, seed=2, logprobs=1, ignore_eos=True)
    prompts = ["the quick brown fox " * 4, "x"]
    want, found = (llm.generate(prompts, params, drafter="recycling") for llm in (one, two))
    assert tokens_and_logprobs(found) == tokens_and_logprobs(want)
    assert passes(two).num_shared_passes > 10
    close(two)


@pytest.mark.parametrize(
    "way", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_losing_a_worker_changes_no_token(
    alone: LLM,
    way: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After the loss of one worker, in the middle of a text, the driver and the other worker
    continue.

    Only a stopped worker is recognized by its silence; the other ones have all the time that they
    need.
    """
    monkeypatch.setattr(runner, "_TIMEOUT", HUNG)
    receive = connection.PeerConnection.receive

    def receive_soon(
        peer: connection.PeerConnection, timeout: float | None = None
    ) -> connection.PeerMessage:
        return receive(peer, 1.0 if peer.rank == 2 and way == signal.SIGSTOP else timeout)

    monkeypatch.setattr(connection.PeerConnection, "receive", receive_soon)
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=1)
    want = alone.generate(PROMPTS, params, drafter="recycling")
    llm = LLM(workers=3, threads=1, budget="all")
    made = passes(llm)
    steps = [0]
    worker_group: Any = made._on_lost.__self__  # type: ignore[attr-defined]
    assert isinstance(worker_group, WorkerProcesses)
    victim = worker_group.processes[1]
    forward: Callable[..., Any] = made.forward

    def striking(*args: Any) -> Any:
        steps[0] += 1
        if steps[0] == 7:
            os.kill(victim.pid, way)
        return forward(*args)

    monkeypatch.setattr(made, "forward", striking)
    found = llm.generate(PROMPTS, params, drafter="recycling")
    assert tokens_and_logprobs(found) == tokens_and_logprobs(want)
    assert [worker.peer.rank for worker in made.workers] == [1]
    assert "worker 2 is gone" in caplog.text
    assert victim.poll() is not None
    before = made.num_shared_passes
    assert tokens_and_logprobs(
        llm.generate(PROMPTS, params, drafter="recycling")
    ) == tokens_and_logprobs(want)
    assert made.num_shared_passes > before
    close(llm)
    assert all(process.poll() is not None for process in worker_group.processes)


def test_a_worker_that_fails_says_why(
    alone: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM(workers=2, threads=1, budget="all")
    made = passes(llm)
    numbers = WorkRequest.serialize
    monkeypatch.setattr(WorkRequest, "serialize", lambda work: numbers(work)[:-1])
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    want, found = (each.generate(PROMPTS, params, drafter="suffix") for each in (alone, llm))
    assert tokens_and_logprobs(found) == tokens_and_logprobs(want)
    assert (
        "worker 1 has failed: ValueError: expected a share of a forward pass, "
        "found a malformed one: " in caplog.text
    )
    assert not made.workers


def test_answers_to_failed_passes_are_dropped(
    alone: LLM, several: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers' answers to a forward pass that failed in the driver do not count for the next
    one.
    """
    made = passes(several)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    workers = [*made.workers]
    forward = ModelRunner.forward
    failures = [0]

    def failing(own: ModelRunner, *given: Any) -> Any:
        if own is made and made._unanswered and not failures[0]:
            failures[0] += 1
            raise MemoryError
        return forward(own, *given)

    monkeypatch.setattr(ModelRunner, "forward", failing)
    with pytest.raises(MemoryError):
        several.generate(PROMPTS, params, drafter="recycling")
    assert failures[0]
    found, want = (each.generate(PROMPTS, params, drafter="recycling") for each in (several, alone))
    assert tokens_and_logprobs(found) == tokens_and_logprobs(want)
    assert made.workers == workers


def test_a_slow_worker_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow worker is not taken for lost; ``test_runner.py`` tests that it gets fewer rows."""
    work = WorkerLoop._run_request
    slowly = list[float]()

    def slow(serving: WorkerLoop, given: WorkRequest) -> None:
        if threading.current_thread().name.endswith("_0"):
            slowly.append(0.4 if len(slowly) == 2 else 0.0)
            sleep(slowly[-1])
        work(serving, given)

    monkeypatch.setattr(WorkerLoop, "_run_request", slow)
    want = plain(FLOAT32, "temperature", TEXTS, 30)
    with tree_parallel_engine(tiny_decoder(), 3) as engine:
        found = [
            ask(p, cased("temperature", i, 30), drafter("oracle", want))
            for i, p in enumerate(TEXTS)
        ]
        run(engine, found)
        made = engine.runner
        assert isinstance(made, TreeRunner)
        assert len(made.workers) == 2
    assert [request.output for request in found] == [request.output for request in want]
    assert max(slowly) > 0.3


def test_streams(alone: LLM, several: LLM) -> None:
    """Simultaneous streams of an AsyncLLM, whose engine runs in another thread."""
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=3, logprobs=1, ignore_eos=True)
    want = [
        [(piece.token_id, piece.logprobs) for piece in alone.stream(prompt, params)]
        for prompt in PROMPTS
    ]

    async def texts() -> list[Any]:
        served = AsyncLLM(several)
        try:
            return await asyncio.gather(*(one(served, prompt) for prompt in PROMPTS))
        finally:
            await served.close()

    async def one(served: AsyncLLM, prompt: str) -> Any:
        return [
            (piece.token_id, piece.logprobs)
            async for piece in served.stream(prompt, params, drafter="recycling")
        ]

    before = passes(several).num_shared_passes
    assert asyncio.run(texts()) == want
    assert passes(several).num_shared_passes > before


@pytest.mark.slow  # test_lost_driver.py starts torchrun, too
@pytest.mark.parametrize("parallel", ["tree", "tensor"])
def test_processes_that_torchrun_has_started(alone: LLM, parallel: str) -> None:
    """Only one process prints the text, and both end without an error."""
    options = [
        "--model",
        "pronk-tiny",
        "--workers",
        "2",
        "--parallel",
        parallel,
        "--max-tokens",
        "20",
        "--temperature",
        "0",
        "def fib(n):",
    ]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "pronk",
        "generate",
    ]
    found = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=HUNG, check=False
    )
    assert found.returncode == 0, found.stderr
    want = alone.generate("def fib(n):", SamplingParams(max_tokens=20, temperature=0.0)).text
    assert found.stdout.rstrip("\n") == want.rstrip("\n")
    assert "Traceback" not in found.stderr


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Return a list that collects the worker processes started from now on."""
    found = list[subprocess.Popen[bytes]]()
    begin = processes._spawn

    def starting(*given: Any) -> subprocess.Popen[bytes]:
        found.append(begin(*given))
        return found[-1]

    monkeypatch.setattr(processes, "_spawn", starting)
    return found


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit(3)", "workers: worker 1 ended before it had loaded the model"),
        ("import signal; signal.pause()", None),
    ],
)
def test_a_worker_that_does_not_start(
    program: str,
    message: str | None,
    started: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that ends early raises, loading can be interrupted, and no worker process
    remains.
    """
    monkeypatch.setattr(processes, "_PROGRAM", program)
    if message is None:
        # while it waits
        monkeypatch.setattr(processes, "sleep", lambda _: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            LLM(workers=2, threads=1)
    else:
        with pytest.raises(OptionError, match=message):
            LLM(workers=2, threads=1)
    (process,) = started
    assert process.poll() is not None


PROPERTIES = ("version", "model", "config", "weights", "kernels", "dtype")


@pytest.mark.parametrize(
    ("what", "parallel"),
    [
        pytest.param(
            *case,
            marks=() if case in {("version", "tree"), ("dtype", "tensor")} else pytest.mark.slow,
        )
        for case in product(PROPERTIES, ("tree", "tensor"))
    ],
)
def test_a_worker_of_another_kind_is_refused(
    what: str,
    parallel: str,
    started: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One loop compares all properties, so most of them, each with a process that loads a model,
    are slow tests.
    """
    own = processes.model_properties

    def changed(*given: Any) -> dict[str, str]:
        found = own(*given)
        assert {*PROPERTIES} <= {*found}
        return found | {what: "another"}

    monkeypatch.setattr(processes, "model_properties", changed)
    message = f"workers: expected the same {what} in all, another; found .* in worker 1"
    with pytest.raises(OptionError, match=message) as caught:
        LLM(workers=2, threads=1, parallel=parallel)
    assert "\n" not in str(caught.value)
    (process,) = started
    assert process.poll() is not None


def test_workers_end_with_their_model_and_with_close(
    alone: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    own = {*sockets([os.getpid()])} if LISTED else set()
    llm = LLM(workers=3, threads=1, budget="all")
    lost: Any = passes(llm)._on_lost
    processes = lost.__self__.processes
    del lost
    if LISTED:
        listening = {*sockets([os.getpid(), *(process.pid for process in processes)])} - own
        assert len(listening) >= 3
        assert all(address.is_loopback for _, address, _ in listening)
    assert all(process.poll() is None for process in processes)
    want = llm.generate(PROMPTS, params, drafter="recycling")
    llm.close()
    assert all(process.poll() is not None for process in processes)
    assert tokens_and_logprobs(
        llm.generate(PROMPTS, params, drafter="recycling")
    ) == tokens_and_logprobs(want)
    llm.close()
    assert "gone" not in caplog.text  # close() ends the workers without a warning
    llm = LLM(workers=2, threads=1)
    (process,) = (passes(llm)._on_lost.__self__).processes  # type: ignore[attr-defined]
    del llm
    assert process.poll() is not None
    del alone


def test_an_error_after_the_start_of_workers_ends_them(
    started: list[subprocess.Popen[bytes]],
) -> None:
    with pytest.raises(PronkError) as held:
        LLM(workers=2, threads=1, drafter="draft_model(model='/nonexistent')")
    assert held.value is not None
    (process,) = started
    assert process.poll() is not None


def test_no_workers_are_refused() -> None:
    with pytest.raises(OptionError, match=r"workers: expected an integer in 1\.\.64, found 0"):
        LLM(workers=0)


def test_workers_open_the_model_for_the_same_context(checkpoint: MakeCheckpoint) -> None:
    """The context selects the rotations of longrope."""
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    folder = checkpoint("phi3", original_max_position_embeddings=32, rope_parameters=factors)
    configs = [
        WorkerSettings(model=str(folder), context=context).read_config() for context in (32, None)
    ]
    assert configs == [read_config(folder, context=32), read_config(folder)]
    assert [config.rope and config.rope.divisors[0] for config in configs] == [1.0, 2.0]
