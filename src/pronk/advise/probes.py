"""What passes cost on this machine: by their rows, by threads, and with weights of fewer bits."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from pronk.advise.facts import Passes, Rounded, ratios
from pronk.bench.machine import BandwidthMeter
from pronk.bench.passes import pass_times
from pronk.bench.records import PLAIN
from pronk.errors import PronkError
from pronk.llm import LLM
from pronk.models.weights import pass_weights
from pronk.sampling.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["free_memory", "measure_passes", "plain_step", "round_weights"]

# Rows of the passes that are measured, and how often.
ROWS, _ROUNDS, _STEPS = (1, 2, 4, 8, 16, 32), 2, 4

# Tokens that a layer learns from, to tell how fast training is; of the texts that a rounded model is tried on.
_LEARNED, _JUDGED, _JUDGED_TEXTS = 128, 320, 4

# Steps by which plain decoding is timed, and rounds of them.
_TIMED, _TIMED_ROUNDS = 6, 4


def measure_passes(llm: LLM, prompt: list[int]) -> Passes:
    """All of it, below a prompt of at least one token."""
    seconds: dict[int, list[float]] = defaultdict(list)
    for each in pass_times(llm, prompt, ROWS, rounds=_ROUNDS, steps=_STEPS):
        seconds[each.rows].append(each.seconds)
    bandwidth = BandwidthMeter(llm.device).measure()
    return Passes(
        {rows: median(found) for rows, found in sorted(seconds.items())},
        pass_weights(llm.engine.runner.decoder).nbytes / bandwidth,
        *_paces(llm),
        _threads(llm, prompt),
        torch.get_num_threads(),
    )


def round_weights(
    llm: LLM, path: str | None, weights: str, texts: Sequence[tuple[list[int], list[int]]]
) -> Rounded | str:
    """The model with weights of fewer bits against the model as it is; or why there is no such thing.

    Args:
        llm: the model as it is.
        path: where it is.
        weights: ``int8`` or ``int4``.
        texts: prompts and what it has written behind them, at least one.
    """
    if weights in pass_weights(llm.engine.runner.decoder).kinds:
        return "the weights are that already"
    free, needed = free_memory(), 1.5 * pass_weights(llm.engine.runner.decoder).nbytes
    if llm.device.type == "cpu" and free < needed:
        return f"{needed / 1e9:.1f} GB were needed beside the model, and {free / 1e9:.1f} are free"
    try:
        return _against(llm, path, weights, texts)
    except PronkError as error:
        return str(error)


def _against(llm: LLM, path: str | None, weights: str, texts: Sequence[tuple[list[int], list[int]]]) -> Rounded:
    """Steps of both by turns, and what they think of the texts."""
    other = LLM(
        path,
        drafter=PLAIN,
        weights=weights,
        device=str(llm.device),
        dtype=str(llm.dtype).removeprefix("torch."),
        kv_dtype="int8" if llm.engine.cache.kv_dtype == torch.int8 else "auto",
        kernels=_same_kernels(llm),
        max_batch=1,
    )
    prompt = texts[0][0]
    mine, others = list[float](), list[float]()
    for _ in range(_TIMED_ROUNDS):
        others.append(plain_step(llm, prompt))
        mine.append(plain_step(other, prompt))
    judged = [[*prompt, *text][-min(_JUDGED, llm.config.context - 1) :] for prompt, text in texts[:_JUDGED_TEXTS]]
    lost = [_surprise(other, text) - _surprise(llm, text) for text in judged]
    return Rounded(
        weights,
        ratios(mine, others),
        math.exp(sum(lost) / len(lost)),
        pass_weights(other.engine.runner.decoder).nbytes,
    )


def free_memory() -> int:
    """Bytes that new data can take, what the system would give back for it included."""
    pages = "SC_AVPHYS_PAGES"
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123 - no file of a disk
            found = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
            return 1024 * found[0]
    except (OSError, IndexError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf(pages) if pages in os.sysconf_names else 2**63


def _same_kernels(llm: LLM) -> str:
    return llm.kernels if llm.device.type == "cpu" else "auto"


def plain_step(llm: LLM, prompt: list[int]) -> float:
    """Seconds of a plain step."""
    params = SamplingParams(max_tokens=_TIMED + 1, ignore_eos=True)
    steps = llm.generate(prompt, params, drafter=PLAIN).stats.steps
    return median(after.clock - before.clock for before, after in pairwise(steps))


def _paces(llm: LLM) -> tuple[float, float]:
    """Arithmetic of training: what a target computes in a second, and what learns; multiplications and additions."""
    width = llm.config.hidden_size
    layer = torch.nn.Linear(width, 4 * width, bias=False, dtype=torch.bfloat16, device=llm.device)
    tokens = torch.randn(_LEARNED, width, dtype=torch.bfloat16, device=llm.device, requires_grad=True)
    work = 2 * _LEARNED * layer.weight.numel()

    def teach() -> None:
        with torch.no_grad():
            layer(tokens).float().sum().item()

    return work / _quickest(teach), 3 * work / _quickest(lambda: layer(tokens).float().sum().backward())


def _quickest(work: Callable[[], None]) -> float:
    """Seconds, of a few times but for the first."""
    seconds = []
    for _ in range(_TIMED_ROUNDS):
        began = perf_counter()
        work()
        seconds.append(perf_counter() - began)
    return min(seconds[1:])


def _threads(llm: LLM, prompt: list[int]) -> dict[int, float]:
    """Seconds of a plain step by the number of threads: powers of two, and all cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    counts = sorted({2**power for power in range(cores.bit_length())} | {cores, torch.get_num_threads()})
    found: dict[int, list[float]] = defaultdict(list)
    if llm.device.type != "cpu":
        counts = [torch.get_num_threads()]
    with _restored():
        for _ in range(_TIMED_ROUNDS):
            for count in counts:
                torch.set_num_threads(count)
                found[count].append(plain_step(llm, prompt))
    return {count: median(seconds) for count, seconds in found.items()}


@contextmanager
def _restored() -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _surprise(llm: LLM, text: list[int]) -> float:
    """Nats per token."""
    out = llm.generate(text, SamplingParams(max_tokens=1, prompt_logprobs=0), drafter=PLAIN)
    found = [each[token] for token, each in zip(text, out.prompt_logprobs or [], strict=True) if each is not None]
    return -sum(found) / len(found)
