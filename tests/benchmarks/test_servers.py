"""``benchmarks/servers.py`` prints reports of ``pronk verify --url`` as a table."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from lab.verification.fake_servers import FakeEngine, fake_server
from pronk.lab.verification.remote import TEXTS, RemoteServer, RemoteSettings, verify_server_steps
from pronk.lab.verification.remote.checks import CHECKS

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


def test_table_of_two_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    words = ["servers.py", "--note", "Processor: none."]
    for name, engine in (("good", FakeEngine()), ("bad", FakeEngine("batch", refused=("n",)))):
        with fake_server(engine) as url, RemoteServer(url) as server:
            *_, report = verify_server_steps(server, TEXTS, RemoteSettings(max_tokens=8))
        (tmp_path / name).write_text(json.dumps(report.to_dict()))
        words.append(f"{name} 1.0={tmp_path / name}")
    monkeypatch.setattr(sys, "argv", words)
    importlib.import_module("servers").main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].count("|") == 6
    assert len([line for line in lines if line.startswith("| ")]) == len(CHECKS) + 1
    (row,) = [line for line in lines if line.startswith("| same text alone and in a batch")]
    assert row.count(" passed ") == row.count("**text differs**, ") == 2
    beginning = "- bad 1.0, chat, same text of two greedy samples: not supported"
    assert sum(line.startswith(beginning) for line in lines) == 1
    assert "Processor: none." in " ".join(lines)
