"""The option ``prompt_cache``: restarts, what blocks depend on, errors, full disks and killed
processes.
"""

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_models
from checkpoint.gguf.test_models import MIXED, SHAPE
from checkpoints import MakeCheckpoint
from covering import covering
from gguf_files import convert
from pronk import LLM, AsyncLLM, OptionError, SamplingParams
from pronk.cache.block_store import BlockStore
from pronk.cache.prompt_cache import PromptCache
from pronk.engine.outputs import Completion
from pronk.models.prompt_cache import _content_digest
from waiting import HUNG

PROMPT = [7 + 11 * index % 200 for index in range(150)]
PARAMS = SamplingParams(max_tokens=30, seed=3, temperature=0.8, logprobs=2, ignore_eos=True)


@pytest.fixture(autouse=True)
def always_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read whatever is on disk; with models as small as these, computing is faster."""
    monkeypatch.setattr(PromptCache, "_pays", lambda *_: True)


def answer(model: Path | str, folder: Path | None, **options: Any) -> Completion:
    """Load the model, continue the prompt, and close the model."""
    llm = LLM(model, prompt_cache=folder, threads=1, **options)
    done = llm.generate(PROMPT, PARAMS)
    llm.close()
    return done


def assert_hit(model: Path | str, folder: Path, **options: Any) -> None:
    """Check that a second process finds the blocks of the first one, and that both give the tokens
    of no cache.
    """
    plain = answer(model, None, **options)
    found = [answer(model, folder, **options) for _ in range(2)]
    for done in found:
        assert (done.token_ids, done.logprobs) == (plain.token_ids, plain.logprobs)
    assert [done.stats.disk_tokens for done in found] == [0, 128]
    assert [done.stats.cached_tokens for done in found] == [0, 128]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "options"),
    covering(
        ["llama", "mistral", "qwen2", "qwen3", "gpt2"],
        [{}, {"dtype": "bfloat16", "kv_dtype": "int8"}, {"weights": "int4", "kv_dtype": "int4"}],
        strength=1,
    ),
    ids=str,
)
def test_a_restart(
    family: str, options: dict[str, Any], checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    overrides = {"sliding_window": 70} if family == "mistral" else {}
    assert_hit(checkpoint(family, **overrides), tmp_path, **options)


@pytest.mark.parametrize("kinds", ["Q8_0", "Q4_1", MIXED], ids=str)
def test_a_restart_with_a_gguf_file(kinds: Any, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    path = convert(checkpoint("qwen2", **SHAPE), tmp_path / "model.gguf", kinds)
    assert_hit(path, tmp_path / "cache")


def test_blocks_of_another_context_are_used(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    model = checkpoint("llama")
    first = answer(model, tmp_path)
    second = answer(model, tmp_path, context=200)
    assert (second.token_ids, second.stats.disk_tokens) == (first.token_ids, 128)


def test_dynamic_rotations_are_computed(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Keys depend on the length of the whole prompt."""
    scaling = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}
    model = checkpoint("llama", rope_scaling=scaling)
    found = [answer(model, tmp_path), answer(model, tmp_path), answer(model, None)]
    assert found[0].token_ids == found[1].token_ids == found[2].token_ids
    assert [done.stats.cached_tokens for done in found] == [0, 0, 0]


OTHERS: list[dict[str, Any]] = [
    {"dtype": "bfloat16"},
    {"weights": "int8"},
    {"weights": "int4"},
    {"kv_dtype": "int8"},
    {"kv_dtype": "int4"},
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_blocks_of_other_options_are_not_used(
    other: dict[str, Any], checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    model = checkpoint("llama")
    answer(model, tmp_path)
    assert answer(model, tmp_path, **other).stats.disk_tokens == 0
    assert (
        answer(model, tmp_path, prefill_chunk=16, max_batch=3, drafter="suffix").stats.disk_tokens
        == 128
    )


def test_blocks_belong_to_the_bits_and_not_to_the_instruction_set(
    checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    model = checkpoint("llama", save_dtype=torch.bfloat16)
    answer(model, tmp_path, bits="portable")
    on_portable = answer(model, tmp_path, bits="portable", kernels="portable")
    assert on_portable.stats.disk_tokens == 128
    fast = answer(model, tmp_path, bits="fast")
    if tiny_models.kernels().bits == "fast":
        assert fast.stats.disk_tokens == 0


def test_blocks_belong_to_the_contents_of_the_model(
    checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """A copy of the files finds the blocks; files with one other bit do not."""
    model = checkpoint("llama")
    copy = tmp_path / "copy"
    other = tmp_path / "other"
    for folder in (copy, other):
        shutil.copytree(model, folder)
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1
    weights.write_bytes(data)
    answer(model, tmp_path / "cache")
    assert answer(copy, tmp_path / "cache").stats.disk_tokens == 128
    assert answer(other, tmp_path / "cache").stats.disk_tokens == 0
    shutil.copy(weights, copy / "model.safetensors")
    assert answer(copy, tmp_path / "cache").stats.disk_tokens == 128, (
        "the blocks of the other model"
    )
    answer(copy, None)


def test_a_replaced_model_with_the_old_time_is_another_model(
    checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """``rsync --times --inplace`` or an image with fixed times keeps inode, size and time of
    modification.
    """
    model = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), model)
    weights = model / "model.safetensors"
    answer(model, tmp_path / "cache")
    state = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert (weights.stat().st_ino, weights.stat().st_mtime_ns) == (state.st_ino, state.st_mtime_ns)
    assert answer(model, tmp_path / "cache").stats.disk_tokens == 0


def test_the_model_is_read_once_for_its_digest(
    checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint("llama")
    store = BlockStore(tmp_path, 1 << 30)
    digest = _content_digest(store, model)
    monkeypatch.setattr(Path, "open", None)
    assert _content_digest(store, model) == digest
    store.close()
    monkeypatch.undo()
    assert _content_digest(store, model) == digest, (
        "without the database, the digest is computed again"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_cache": 3}, "prompt_cache: expected a folder, found 3"),
        ({"prompt_cache": ""}, "prompt_cache: expected a folder, found ''"),
        (
            {"prompt_cache": __file__},
            "prompt_cache: expected a writable folder, found .*: not a folder",
        ),
        (
            {"prompt_cache": "DIR", "prompt_cache_size": "much"},
            "prompt_cache_size: expected a positive number of bytes",
        ),
        (
            {"prompt_cache_size": "1GiB"},
            "prompt_cache_size: expected prompt_cache with it, found '1GiB' alone",
        ),
        (
            {"prompt_cache": "DIR", "workers": 2, "parallel": "tensor"},
            "prompt_cache: .*found tensor parallelism",
        ),
    ],
)
def test_wrong_options_are_refused_before_the_weights_are_read(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pronk.llm.load_decoder", None)
    if options.get("prompt_cache") == "DIR":
        options = options | {"prompt_cache": tmp_path}
    with pytest.raises(OptionError, match=f"^{message}"):
        LLM(**options)


def test_async_and_counts(tmp_path: Path) -> None:
    async def ask() -> tuple[Completion, Any]:
        llm = LLM(prompt_cache=tmp_path, threads=1)
        async with AsyncLLM(llm) as engine:
            done = await engine.generate(PROMPT, PARAMS, salt=b"salt")
            llm.engine.cache.prompt_cache.store.flush()  # type: ignore[union-attr]
            load = engine.load
        llm.close()
        return done, load

    (one, first), (other, second) = (asyncio.run(ask()) for _ in range(2))
    assert one.token_ids == other.token_ids
    assert (first.disk_hits, first.disk_blocks_read, first.disk_blocks_written) == (0, 0, 5)
    assert (second.disk_hits, second.disk_blocks_read, second.disk_blocks_written) == (1, 4, 0)
    assert first.disk_bytes_written * 4 == second.disk_bytes_read * 5 > 0
    assert other.stats.to_dict()["disk_tokens"] == 128


CHILD = """
import sys
from pathlib import Path
from pronk import LLM, SamplingParams
import random
if sys.argv[3] == "full":
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
llm = LLM("pronk-tiny", prompt_cache=sys.argv[1], prompt_cache_size=20_000_000, threads=1, kernels=sys.argv[2])
print("ready", flush=True)
for seed in range(*map(int, sys.argv[4:6])):
    prompt = random.Random(seed % 7).choices(range(300), k=100 + 30 * (seed % 7))
    done = llm.generate(prompt, SamplingParams(max_tokens=50, seed=seed % 7, temperature=0.8, ignore_eos=True))
    print(seed % 7, done.token_ids, flush=True)
"""


def child(folder: Path, mode: str, start: int, stop: int) -> list[str]:
    return [
        sys.executable,
        "-c",
        CHILD,
        str(folder),
        tiny_models.kernels().name,
        mode,
        str(start),
        str(stop),
    ]


@pytest.fixture(scope="module")
def expected() -> Iterator[dict[int, list[int]]]:
    """Return the tokens of the prompts of ``CHILD`` without a prompt cache."""
    llm = LLM("pronk-tiny", threads=1)
    found = {}
    for seed in range(7):
        prompt = random.Random(seed).choices(range(300), k=100 + 30 * seed)
        params = SamplingParams(max_tokens=50, seed=seed, temperature=0.8, ignore_eos=True)
        found[seed] = llm.generate(prompt, params).token_ids
    yield found
    llm.close()


def test_a_full_disk(tmp_path: Path, expected: dict[int, list[int]]) -> None:
    # Without coverage, which lacks the room for its own file.
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    command = child(tmp_path, "full", 0, 14)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=HUNG, check=False, env=env
    )
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"prompt cache {tmp_path}: ")
    assert done.stdout.splitlines() == [
        "ready",
        *(f"{seed % 7} {expected[seed % 7]}" for seed in range(14)),
    ]


@pytest.mark.long
@pytest.mark.slow  # cache/test_block_store.py kills processes, too
@pytest.mark.parametrize("count", [2, 200])
def test_killed_processes(count: int, tmp_path: Path, expected: dict[int, list[int]]) -> None:
    """Two processes at a time are killed at random moments; the next ones, and this one, read the
    right tokens.

    Each process has printed an answer before the kill, which comes at a random moment of a later
    one.
    """
    dice = random.Random(count)
    found = 0
    for number in range(count):
        writers = [
            subprocess.Popen(
                child(tmp_path, "", dice.randrange(7), 10**6), stdout=subprocess.PIPE, text=True
            )
            for _ in range(2)
        ]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        first_lines = [
            [writer.stdout.readline() for _ in range(dice.randrange(1, 5))] for writer in writers
        ]
        time.sleep(dice.uniform(0.0, 0.1))  # the kill does not always follow an answer
        for writer in writers:
            os.kill(writer.pid, signal.SIGKILL)
        for writer, first in zip(writers, first_lines, strict=True):
            assert all(line.endswith("\n") for line in first)
            last = writer.communicate()[0].splitlines(keepends=True)
            assert writer.returncode == -signal.SIGKILL
            for line in (*first, *last):
                assert not line.endswith("\n") or line == f"{line[0]} {expected[int(line[0])]}\n"
        if number % 5 < 3:
            llm = LLM("pronk-tiny", prompt_cache=tmp_path, prompt_cache_size=20_000_000, threads=1)
            for seed in range(7):
                prompt = random.Random(seed).choices(range(300), k=100 + 30 * seed)
                params = SamplingParams(max_tokens=50, seed=seed, temperature=0.8, ignore_eos=True)
                done = llm.generate(prompt, params)
                assert done.token_ids == expected[seed]
                found += done.stats.disk_tokens
            llm.close()
            assert llm.engine.cache.prompt_cache.store.counts.blocks_damaged == 0  # type: ignore[union-attr]
    assert found > 100 * count
