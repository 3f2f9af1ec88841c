"""``pronk batch --replicas``: same answers as a single model, and existing answers are kept."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
import pytest

from pronk import LLM, SamplingParams
from pronk.base.errors import ConnectionLostError
from waiting import HUNG, eventually

# Ray takes half a minute to start and stop
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]


OPTIONS = ["--model", "pronk-tiny", "--replicas", "2", "--threads", "1"]


def request(number: int, **body: Any) -> dict[str, Any]:
    own = {"prompt": f"def f{number}(", "max_tokens": 8, "temperature": 0.8, "seed": number, **body}
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": own}


def test_answers_equal_those_of_one_model(tmp_path: Path) -> None:
    lines = [request(number) for number in range(20)] + [request(20, max_tokens=10**6)]
    source = tmp_path / "in.jsonl"
    target = tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = {
        "id": "batch_req_x",
        "custom_id": "r3",
        "response": {"status_code": 200, "body": "kept"},
        "error": None,
    }
    target.write_text(json.dumps(done) + "\n")
    command = [sys.executable, "-m", "pronk", "batch", *OPTIONS, str(source), str(target)]
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        pytest.skip("needs a core for each replica")
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=HUNG, env=env, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert f"20 answers in {target}, 1 of them refusals" in ran.stderr
    found = {
        row["custom_id"]: row["response"]
        for row in map(json.loads, target.read_text().splitlines())
    }
    assert len(found) == 21
    assert found["r3"]["body"] == "kept"
    assert found["r20"]["status_code"] == 400
    llm = LLM(threads=1)
    for number in (0, 7, 19):
        want = llm.generate(
            f"def f{number}(", SamplingParams(max_tokens=8, temperature=0.8, seed=number)
        )
        assert found[f"r{number}"]["body"]["choices"][0]["text"] == want.text
    again = subprocess.run(
        command, capture_output=True, text=True, timeout=HUNG, env=env, check=False
    )
    assert "nothing to do" in again.stdout + again.stderr


def test_killed_replica_loses_no_answer(tmp_path: Path) -> None:
    lines = [request(number, max_tokens=200, ignore_eos=True) for number in range(120)]
    source = tmp_path / "in.jsonl"
    target = tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "pronk", "batch", *OPTIONS, str(source), str(target)]
    mark = token_hex(8)
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PRONK_TEST": mark}
    ) as ran:
        assert eventually(lambda: target.exists() and target.stat().st_size > 0)
        victims = [process for process in marked(mark) if b"MapBatches" in command_of(process)]
        assert victims
        os.kill(victims[0], signal.SIGKILL)
        _, stderr = ran.communicate(timeout=HUNG)
    assert ran.returncode == 0, stderr
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert sorted(row["custom_id"] for row in found) == sorted(line["custom_id"] for line in lines)
    assert all(row["response"]["status_code"] == 200 for row in found)


def marked(mark: str) -> list[int]:
    """Return the ids of processes with the text ``mark`` in their environment."""
    found = list[int]()
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (place / "environ").read_bytes():
                found.append(int(place.name))
    return found


def command_of(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def test_lost_worker_ends_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray starts another replica, which answers the same requests."""
    from pronk.server.replicas import batch

    async def lost(*_: Any) -> Any:
        raise ConnectionLostError("worker 1 is gone")

    def end(code: int) -> None:
        raise SystemExit(code)

    replica = batch.BatchReplica({"threads": 1}, "tiny", str(Path.cwd()))
    monkeypatch.setattr(batch, "answer_line", lost)
    monkeypatch.setattr(os, "_exit", end)
    rows = {"id": ["a"], "url": ["/v1/completions"], "body": [json.dumps({"prompt": "x"})]}
    with pytest.raises(SystemExit):
        replica({name: np.array(values, object) for name, values in rows.items()})
