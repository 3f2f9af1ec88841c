"""Facts about the machine: memory bandwidth, peak memory, hardware, versions."""

import re
import subprocess
import sys
from mmap import PAGESIZE, mmap
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from pronk.lab.bench import machine
from pronk.lab.bench.machine import BandwidthMeter, PeakMemory, describe_hardware, versions
from tiny_models import kernels
from waiting import HUNG

CPU = "cpu"
MIB = 2**20
TESTS = Path(__file__).parents[2]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell")
def test_peak_memory_includes_freed_memory() -> None:
    peak = PeakMemory(CPU)
    peak.reset()
    before = peak.read()
    assert before is not None
    if before > machine_resident() + 8 * MIB:
        pytest.skip("the system does not forget earlier peaks")
    with mmap(-1, 64 * MIB) as held:  # new pages; a tensor could reuse memory of earlier tests
        for page in range(0, len(held), PAGESIZE):
            held[page] = 1
    after = peak.read()
    assert after is not None
    assert 60 * MIB < after - before < 80 * MIB
    peak.reset()
    again = peak.read()
    assert again is not None
    assert again < after - 40 * MIB
    assert PeakMemory(CPU, excluded_bytes=MIB).read() == pytest.approx(again - MIB, abs=MIB // 2)


def machine_resident() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def test_unknown_peak_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(Path, "write_text", refuse)
    peak = PeakMemory(CPU)
    peak.reset()
    assert peak.read() is None


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell")
def test_the_bandwidth_buffer_is_resident() -> None:
    """The system maps all unwritten pages to one page of zeros, which stays in the processor's
    cache.

    The test uses a new process, because the buffer could reuse memory of earlier tests.
    """
    code = """
        from lab.bench.test_machine import MIB, BandwidthMeter, kernels, machine, machine_resident
        machine._BUFFER_BYTES = 64 * MIB
        before = machine_resident()
        meter = BandwidthMeter(kernels())
        print(machine_resident() - before, meter.nbytes, meter.measure())
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
    monkeypatch.setattr(machine, "_BUFFER_BYTES", 1000)
    clock = iter([0.0, 4.0, 10.0, 12.0, 20.0, 25.0])
    monkeypatch.setattr(machine, "perf_counter", lambda: next(clock))
    assert BandwidthMeter(kernels()).measure() == 500.0


def test_fields_of_the_hardware() -> None:
    found = describe_hardware(CPU)
    keys = {"processor", "cores", "threads", "memory", "capability", "system", "device"}
    assert set(found) == keys
    assert all(found.values())
    assert (found["threads"], found["device"]) == (1, "cpu")
    assert found["memory"] > 2**28
    assert isinstance(found["cores"], int)


def test_versions_of_packages() -> None:
    found = versions()
    assert set(found) == {"python", "pronk", "torch", "tokenizers", "safetensors", "numpy"}
    assert found["numpy"] == np.__version__
    assert all(re.match(r"\d+\.\d+", version) for version in found.values())
