"""``benchmarks/prompt_cache.py`` on pronk-tiny."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pronk.checkpoint.hub.clone_models import tiny_model
from waiting import HUNG

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "prompt_cache.py"


@pytest.mark.slow  # runs a whole benchmark
def test_a_small_conversation() -> None:
    sizes = {
        "--tokens": "300",
        "--turns": "3",
        "--max-tokens": "8",
        "--rounds": "1",
        "--threads": "1",
    }
    command = [
        sys.executable,
        str(SCRIPT),
        str(tiny_model()),
        *(each for pair in sizes.items() for each in pair),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HUNG, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    (restart,) = document["restarts"]
    assert restart["tokens"] == document["plain"]["tokens"]
    assert len(restart["tokens"]) == 8
    assert restart["from disk"] == restart["cached"] > 300
    assert document["plain"]["cached"] == 0
    assert document["ratio"] == restart["ttft"] / document["plain"]["ttft"]
