"""``benchmarks/attack.py``: one request of each kind against a server of its own, and the table of
results.
"""

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "attack.py"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    out = tmp_path_factory.mktemp("attack") / "report"
    attack = runpy.run_path(str(SCRIPT))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["attack.py", "--quick", "--threads", "1", "--out", str(out)])
        attack["main"]()
    found = json.loads(out.with_suffix(".json").read_text())
    assert out.with_suffix(".md").read_text().endswith(f"{attack['to_markdown'](found)}\n")
    return dict(found)


@pytest.mark.long
def test_the_server_survives_one_request_of_each_kind(report: dict[str, object]) -> None:
    attack = runpy.run_path(str(SCRIPT))
    rows = report["rows"]
    assert isinstance(rows, list)
    kinds = {each.kind for each in attack["bad_requests"]()}
    assert kinds < {row["attack"] for row in rows}
    for row in rows:
        assert row["health_max"] < 60.0  # infinite if it was not answered
        assert not {name for name in row["answers"] if name.startswith("5")}, row
        assert row["other_events"] > 0
    assert report["answers_after"]


def test_there_are_sixty_bad_requests_and_sixteen_bodies_within_the_limit() -> None:
    attack = runpy.run_path(str(SCRIPT))
    assert len(attack["bad_requests"]()) == 60
    bodies = attack["worst_bodies"]()
    assert len(bodies) == attack["NUM_BODIES"] == 16
    for _, body in bodies:
        assert json.loads(body)
        assert len(body) <= 4 * 2**20


@pytest.mark.parametrize("host", ["0.0.0.0", "example.org", "192.168.0.1", "localhost"])
def test_other_hosts_are_refused(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["attack.py", "--host", host])
    with pytest.raises(SystemExit, match=r"host: expected 127\.0\.0\.1, found"):
        runpy.run_path(str(SCRIPT))["main"]()
