"""The kernels as the compiler makes them for a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import HUNG

SHARED_MEMORY = 227 * 1024  # bytes of a multiprocessor of an H100 or H200 that a program may take


@pytest.mark.long
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """Products use the tensor cores, and load ahead; the noise has no fused multiply-adds."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=HUNG,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    for name, kernel in found.items():
        assert kernel["shared"] <= SHARED_MEMORY, name
    for name in ("product", "product of Q4_K"):
        assert found[name]["wgmma"] > 0
        assert found[name]["cp.async"] > 20
    assert found["attention"]["mma.sync"] > 0
    for name in ("choice", "scores"):
        assert found[name]["fma.rn.f64"] == 0
        assert found[name]["div.rn.f32"] > 0
