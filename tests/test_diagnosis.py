"""Bits of every instruction set, bandwidth of memory, limits of a model's speed."""

import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from checkpoints import make_checkpoint
from pronk import diagnosis
from pronk.diagnosis import BandwidthMeter, Measured, Work, check_bits, decoding_work
from pronk.kernels.library import Kernels, candidates
from pronk.testing import tiny_checkpoint
from tiny_models import kernels
from waiting import HUNG

MIB = 2**20
TESTS = Path(__file__).parent


def resident() -> int:
    """Return the bytes of this process in memory."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.few(2)
@pytest.mark.parametrize("each", candidates(), ids=lambda each: each.name)
def test_every_instruction_set_has_the_recorded_bits(each: Kernels) -> None:
    assert check_bits(each.name) is None


def test_work_of_a_dense_model(tmp_path: Path) -> None:
    # A row of the embedding is read, the output's matrix is read whole.
    matrices = 2 * (4 * 64 * 64 - 2 * 32 * 64 + 3 * 128 * 64) + 300 * 64
    norms = 5 * 64
    work = decoding_work(tiny_checkpoint(tmp_path / "tiny"))
    assert work.num_bytes == 4 * (matrices + norms)
    assert work.products == matrices - 300 * 64 + norms


def test_work_of_a_mixture_counts_the_chosen_experts(tmp_path: Path) -> None:
    sizes = {
        "num_local_experts": 8,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
    }
    two, eight = (
        decoding_work(
            make_checkpoint(tmp_path / str(chosen), "mixtral", num_experts_per_tok=chosen, **sizes)
        )
        for chosen in (2, 8)
    )
    layers = 2
    weights = layers * 6 * 3 * 64 * 96
    assert eight.products - two.products == weights
    assert eight.num_bytes - two.num_bytes == 4 * weights


def test_limits() -> None:
    assert Work(100, 50).limits(Measured(1000.0, 2000.0)) == (10.0, 40.0)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell")
def test_the_bandwidth_buffer_is_resident() -> None:
    """The system maps all unwritten pages to one page of zeros, which stays in the processor's
    cache.

    The test uses a new process, because the buffer could reuse memory of earlier tests.
    """
    code = """
        from test_diagnosis import MIB, BandwidthMeter, diagnosis, kernels, resident
        diagnosis._BUFFER_BYTES = 64 * MIB
        before = resident()
        meter = BandwidthMeter(kernels())
        print(resident() - before, meter.nbytes, meter.measure())
    """
    command = [sys.executable, "-c", dedent(code)]
    output = subprocess.run(
        command, cwd=TESTS, check=True, capture_output=True, text=True, timeout=HUNG
    ).stdout
    grown, nbytes, speed = map(float, output.split())
    assert grown > 60 * MIB
    assert nbytes == 64 * MIB
    assert speed > 0


def test_bandwidth_is_the_best_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "_BUFFER_BYTES", 1000)
    clock = iter([0.0, 4.0, 10.0, 12.0, 20.0, 25.0])
    monkeypatch.setattr(diagnosis, "perf_counter", lambda: next(clock))
    assert BandwidthMeter(kernels()).measure() == 500.0
