"""Description of a machine: its kernels, their bits, and the speed that memory allows.

``pronk doctor`` prints it, for reports of faults and for the choice of a model.
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from pronk.base.arrays import UINT8, mapped_zeros
from pronk.cache.budget import machine_memory
from pronk.checkpoint.gguf.checkpoint import GgufCheckpoint
from pronk.checkpoint.hub.digests import model_hash, published_digests
from pronk.checkpoint.tensors import open_checkpoint
from pronk.kernels.library import Kernels, KernelsError, candidates
from pronk.kernels.threads import num_threads
from pronk.llm import LLM
from pronk.models.decoder import count_parameters
from pronk.models.kernels import self_check
from pronk.models.loader import read_config
from pronk.models.tensor_groups import OTHER, tensor_groups
from pronk.reproducibility import current, digests
from pronk.testing import tiny_checkpoint

__all__ = [
    "BandwidthMeter",
    "Measured",
    "Work",
    "check_bits",
    "check_kernels",
    "decoding_work",
    "describe_machine",
    "machine_load",
    "measure",
    "usable_kernels",
]

_BUFFER_BYTES = 2**30  # larger than the caches of today's processors
_MULTIPLY_SECONDS = 0.2  # shortest duration of a measurement of products
_REPEATS = 3  # measurements of each speed; the best counts


@dataclass(frozen=True)
class Measured:
    """Speeds of a machine, with all threads.

    Attributes:
        bandwidth: bytes of memory read per second.
        products: products of 8-bit codes in registers per second.
    """

    bandwidth: float
    products: float


@dataclass(frozen=True)
class Work:
    """Work of plain decoding for one token, without its context.

    Attributes:
        num_bytes: bytes of weights that a forward pass over one row reads.
        products: products of a weight and an activation for one row of a prompt.
    """

    num_bytes: int
    products: int

    def limits(self, speeds: Measured) -> tuple[float, float]:
        """Return the largest tokens/s of plain decoding, and about those of reading a prompt."""
        return speeds.bandwidth / self.num_bytes, speeds.products / self.products


class BandwidthMeter:
    """Measures the bandwidth of reading memory, with all threads, on a buffer beyond the caches.

    ``nbytes`` is the size of the buffer.
    """

    def __init__(self, kernels: Kernels) -> None:
        self.nbytes = _BUFFER_BYTES
        self._kernels = kernels
        self._buffer = mapped_zeros((_BUFFER_BYTES,), UINT8)
        # The system maps unwritten pages to one page, which would stay in the processor's cache.
        self._buffer.fill(0)

    def measure(self) -> float:
        """Return the read bandwidth in bytes per second, the best of three runs."""
        best = 0.0
        for _ in range(_REPEATS):
            started = perf_counter()
            self._kernels.read(self._buffer)
            best = max(best, self.nbytes / (perf_counter() - started))
        return best


def describe_machine() -> dict[str, Any]:
    """Return the properties of the machine by name; sizes are in bytes."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count(),
        "memory": machine_memory(),
        "system": platform.platform(),
        "threads": num_threads(),
    }


def machine_load() -> float | None:
    """Return the mean number of running threads of all programs in the last minute.

    ``None`` means that the system does not report it.
    """
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _processor() -> str:
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def usable_kernels() -> Kernels | str:
    """Return the kernels of the best instruction set, or why none can be used."""
    try:
        return candidates()[0]
    except KernelsError as error:
        return str(error)


def check_kernels() -> Iterator[tuple[str, str | None]]:
    """Yield each instruction set of this processor, and what fails in its self-check."""
    for kernels in candidates():
        yield kernels.name, self_check(kernels)


def check_bits(name: str) -> str | None:
    """Compare the outputs of a small random model with those recorded for every processor.

    Args:
        name: instruction set.

    Returns:
        What differs, or ``None`` if all digests are equal.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_checkpoint(Path(folder) / "model")
        expected = current(published_digests(model_hash(path)))
        llm = LLM(path, dtype="float32", kv_memory="16MiB", kernels=name, bits="portable")
        with closing(llm):
            found = digests(llm)
    if not expected:
        return "no digests are recorded for the model that this NumPy draws"
    wrong = [text for text, digest in found.items() if digest != expected[text]]
    return f"other digests of {', '.join(wrong)}" if wrong else None


def measure(kernels: Kernels) -> Measured:
    """Measure the speed of a machine in one to two seconds.

    Args:
        kernels: kernels of the instruction set to measure.
    """
    return Measured(BandwidthMeter(kernels).measure(), _measure_products(kernels))


def _measure_products(kernels: Kernels) -> float:
    """Return products of 8-bit codes per second, the best of several measurements."""
    rounds = 1024
    best = 0.0
    repeats = 0
    while repeats < _REPEATS:
        started = perf_counter()
        products = kernels.multiply(rounds)
        seconds = perf_counter() - started
        if seconds < _MULTIPLY_SECONDS:
            rounds *= 2
            continue
        best = max(best, products / seconds)
        repeats += 1
    return best


def decoding_work(path: Path) -> Work:
    """Return what a forward pass over one row takes, from the headers of a model's files.

    Of a mixture, the experts of one row count. Of an embedding that is not the output's matrix, a
    row is read, which does not count.

    Raises:
        CheckpointError: the files are damaged, or of a model that pronk does not support.
    """
    checkpoint = open_checkpoint(path)
    config = read_config(path, checkpoint if isinstance(checkpoint, GgufCheckpoint) else None)
    mixture = config.mixture
    chosen = 1.0 if mixture is None else mixture.per_row / mixture.experts
    skipped = {OTHER} if config.tied else {OTHER, "embedding"}
    num_bytes = 0.0
    for name, group in tensor_groups(checkpoint, config):
        if group not in skipped:
            share = chosen if group == "experts" and _is_expert(name) else 1.0
            num_bytes += share * checkpoint.nbytes(name)
    # An embedding is not multiplied, and the output's matrix only for the last row of a prompt.
    tables = 1 if config.tied else 2
    products = count_parameters(config) - tables * config.vocab_size * config.hidden_size
    if mixture is not None:
        # an expert has three matrices: gate, up and down
        weights = 3 * config.hidden_size * mixture.width
        products -= weights * (mixture.experts - mixture.per_row) * sum(mixture.layers)
    return Work(round(num_bytes), products)


def _is_expert(name: str) -> bool:
    """Return whether a tensor has weights of experts, each of which serves some rows only.

    The other tensors of a mixture are those of its router and of the expert that serves all rows.
    """
    return "exp" in name and "shared" not in name and "shexp" not in name
