"""Files of requests through replicas: what one model answers, and what is there already is left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pronk import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]  # Ray takes half a minute to begin and to end


def request(number: int, **body: Any) -> dict[str, Any]:
    own = {"prompt": f"def f{number}(", "max_tokens": 8, "temperature": 0.8, "seed": number, **body}
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": own}


def test_answers_of_replicas(tmp_path: Path) -> None:
    lines = [request(number) for number in range(20)] + [request(20, max_tokens=10**6)]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = {"id": "batch_req_x", "custom_id": "r3", "response": {"status_code": 200, "body": "kept"}, "error": None}
    target.write_text(json.dumps(done) + "\n")
    command = [sys.executable, "-m", "pronk", "batch", "--replicas", "2", "--threads", "1", str(source), str(target)]
    room = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        pytest.skip("there is a core for each replica")
    ran = subprocess.run(command, capture_output=True, text=True, timeout=180, env=room, check=False)
    assert ran.returncode == 0, ran.stderr
    assert f"20 answers in {target}, 1 of them refusals" in ran.stderr
    found = {row["custom_id"]: row["response"] for row in map(json.loads, target.read_text().splitlines())}
    assert len(found) == 21
    assert found["r3"]["body"] == "kept"
    assert found["r20"]["status_code"] == 400
    llm = LLM(threads=1)
    for number in (0, 7, 19):
        want = llm.generate(f"def f{number}(", SamplingParams(max_tokens=8, temperature=0.8, seed=number))
        assert found[f"r{number}"]["body"]["choices"][0]["text"] == want.text
    again = subprocess.run(command, capture_output=True, text=True, timeout=60, env=room, check=False)
    assert "nothing to do" in again.stdout + again.stderr
