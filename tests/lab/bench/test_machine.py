"""Facts about the machine: memory bandwidth, peak memory, hardware, versions."""

import re
from mmap import PAGESIZE, mmap
from pathlib import Path

import numpy as np
import pytest

from pronk.lab.bench.machine import PeakMemory, describe_hardware, versions

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
