"""The options that ``benchmarks/serving.py`` passes to GuideLLM (here a fake script), and the table
of results.
"""

import json
import runpy
import sys
from argparse import Namespace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

PATH = str(Path(__file__).parents[2] / "benchmarks" / "serving.py")
serving = runpy.run_path(PATH)
FAKE = f"""#!{sys.executable}
import json, sys
words = sys.argv[3:]  # run --disable-console
asked = {{name: json.loads(value) for name, value in zip(words[::2], words[1::2])}}
prompts = open(asked["--data"]["path"]).read() if "path" in asked["--data"] else None
metrics = {{"asked": asked, "prompts": prompts}}
json.dump({{"benchmarks": [{{"metrics": metrics}}]}}, open(asked["--output"]["path"], "w"))
"""


def metrics(speed: float, failed: int = 0) -> dict[str, Any]:
    """Return the fields of a guidellm 0.8.1 report that the table reads."""
    return {
        "request_totals": {
            "successful": 4 - failed,
            "errored": failed,
            "incomplete": 0,
            "total": 4,
        },
        "output_tokens_per_second": {"successful": {"mean": speed}},
        "time_to_first_token_ms": {"successful": {"median": 250.0}},
        "inter_token_latency_ms": {"successful": {"median": 7.25}},
    }


def test_table() -> None:
    rounds = [
        {"plain": metrics(10.0), "speculative": metrics(20.0), "other": metrics(0.0, failed=4)},
        {
            "plain": metrics(20.0),
            "speculative": metrics(30.0, failed=1),
            "other": metrics(0.0, failed=4),
        },
    ]
    assert serving["row"]("edit, 4", rounds) == (
        "| edit, 4 | 15.0, 1.00, 250 ms, 7.2 ms | 25.0, 1.75, 250 ms, 7.2 ms, 1 of 8 failed | –, 8 "
        "of 8 failed |"
    )
    assert (
        serving["header"](["plain"])
        == "| prompts, clients | plain: tok/s, × plain, TTFT, ITL |\n|---|---|"
    )


def test_options_of_guidellm(tmp_path: Path) -> None:
    fake = tmp_path / "guidellm"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    options = Namespace(model=tmp_path, guidellm=str(fake), requests=3, tokens=16, prompt_tokens=99)
    load = serving["EngineLoad"]
    url = "http://127.0.0.1:1"
    found = [
        serving["measure"](options, load(kind, 2, 1), tmp_path, url, {"drafter": "x"})
        for kind in ("random", "edit")
    ]
    asked = found[0]["asked"]
    assert asked["--backend"]["target"] == url
    assert asked["--backend"]["extras"] == {"body": {"temperature": 0.0, "drafter": "x"}}
    assert (
        asked["--profile"]["streams"],
        asked["--constraint"]["count"],
        asked["--seed"]["value"],
    ) == (2, 8, 1002)
    assert asked["--data"] == {"kind": "synthetic_text", "prompt_tokens": 99, "output_tokens": 16}
    rows = [json.loads(line) for line in found[1]["prompts"].splitlines()]
    assert len({row["prompt"] for row in rows}) == 8
    assert {row["output_tokens_count"] for row in rows} == {16}
    fake.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('no such option')\n")
    with pytest.raises(
        SystemExit, match="expected a report of guidellm, found exit code 1:\nno such option"
    ):
        serving["measure"](options, load("edit", 2, 1), tmp_path, url, {})


class FineHandler(BaseHTTPRequestHandler):
    """Answers every request with 200 and no body."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def test_delays_of_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(PATH).parent))
    server = ThreadingHTTPServer(("127.0.0.1", 0), FineHandler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        lines = serving["health_table"](server.server_address[1]).splitlines()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert len(lines) == 2 + 16
    assert all(" ms |" in line and "| 200 |" in line for line in lines[2:])


def test_without_guidellm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        sys, "argv", ["serving.py", "--model", str(tmp_path), "--guidellm", "no-such-command"]
    )
    with pytest.raises(
        SystemExit, match="expected the command no-such-command, found none; pip install guidellm"
    ):
        serving["main"]()
