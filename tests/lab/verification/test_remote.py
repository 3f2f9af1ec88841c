"""``pronk verify --url``: planted faults are found by their rows alone; correct servers pass."""

import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from lab.verification.fake_servers import FakeEngine, fake_server
from pronk.base.errors import OptionError
from pronk.lab.cli.verify import verify
from pronk.lab.verification.remote import (
    TEXTS,
    RemoteReport,
    RemoteServer,
    RemoteSettings,
    verify_server_steps,
)
from pronk.lab.verification.remote.checks import CHECKS, _RouteVerifier
from pronk.lab.verification.remote.client import ROUTES, Answer, RemoteToken, ServerUnreachableError
from pronk.lab.verification.remote.report import compare
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from server.serving import KEY, running
from waiting import eventually

SETTINGS = RemoteSettings(max_tokens=16, rounds=2)


def report_of(
    engine: FakeEngine, settings: RemoteSettings = SETTINGS, **options: Any
) -> RemoteReport:
    with fake_server(engine) as url, RemoteServer(url, **options) as server:
        *_, report = verify_server_steps(server, TEXTS, settings)
    return report


def rows(report: RemoteReport, status: str) -> set[str]:
    """Return the checks with a status, which must be that of both routes."""
    found = [
        {each.check for each in report.results if (each.status, each.route) == (status, r)}
        for r in ROUTES
    ]
    assert found[0] == found[1]
    return found[0]


def test_correct_server_passes() -> None:
    engine = FakeEngine()
    report = report_of(engine)
    assert report.passed
    assert rows(report, "passed") == set(CHECKS)
    assert engine.most >= 4, "no batch was tested"
    for name in CHECKS:
        result = report.get(name, "chat")
        assert result is not None
        assert result.comparisons > 0
    batch = report.get("batch", "chat")
    cache = report.get("cache", "completions")
    assert batch is not None
    assert cache is not None
    assert batch.note.startswith("up to ")
    assert cache.note == "up to 7 cached tokens"
    assert (report.model, report.software.split("/")[0]) == ("fake", "fake")


# For each fault the checks that find it, and those that mean nothing without them.
FAULTS = {
    "batch": ({"batch"}, {"seed_batch", "logprobs_batch"}),
    "batch logprobs": ({"logprobs_batch"}, set()),
    "cache": ({"cache"}, set()),
    "constant seed": ({"seeds"}, set()),
    "random seed": ({"seed"}, {"seeds", "seed_batch"}),
    "stream": ({"stream"}, set()),
    "max_tokens": ({"max_tokens"}, set()),
    "n": ({"n"}, set()),
    "random": ({"repeat"}, set(CHECKS) - {"repeat"}),
    "empty": ({"repeat"}, set(CHECKS) - {"repeat"}),
    "logprobs": ({"logprobs"}, {"logprobs_batch"}),
    "text of logprobs": ({"logprobs"}, {"logprobs_batch"}),
    "not greedy": ({"likeliest"}, set()),
    "sum": ({"likeliest"}, set()),
    "error in a batch": ({"batch"}, {"seed_batch", "logprobs_batch"}),
}


# Faults that the same check finds as another one.
LIKE_OTHERS = ("empty", "text of logprobs", "batch logprobs", "sum")


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=pytest.mark.slow if f in LIKE_OTHERS else ()) for f in FAULTS]
)
def test_planted_fault_is_found_by_its_row_alone(fault: str) -> None:
    failed, skipped = FAULTS[fault]
    report = report_of(FakeEngine(fault))
    assert not report.passed
    assert rows(report, "failed") == failed
    assert rows(report, "skipped") == skipped
    assert rows(report, "passed") == set(CHECKS) - failed - skipped
    kinds = {each.kind for each in report.failed}
    if fault in ("logprobs", "batch logprobs"):
        assert kinds == {"log-probabilities"}
        assert all(0.001 < (each.max_logprob_difference or 0) < 0.011 for each in report.failed)
    elif fault in ("constant seed", "not greedy", "sum", "empty", "error in a batch"):
        assert kinds == {None}
        assert all(each.note for each in report.failed)
    else:
        assert kinds == {"text"}
    for each in report.failed:
        if each.first is not None:
            assert each.first.expected != each.first.found
            assert 0 < each.differences <= each.comparisons


def test_log_probabilities_within_the_tolerance_are_equal() -> None:
    report = report_of(FakeEngine("batch logprobs"), RemoteSettings(max_tokens=16, tolerance=0.02))
    assert report.passed
    result = report.get("logprobs_batch", "chat")
    assert result is not None
    assert 0.001 < (result.max_logprob_difference or 0.0) < 0.011


@pytest.mark.parametrize(("tolerance", "failed"), [(0.02, set[str]()), (0.0, {"logprobs"})])
def test_tolerance_applies_to_log_probabilities_that_were_not_asked_for(
    tolerance: float, failed: set[str]
) -> None:
    report = report_of(
        FakeEngine("logprobs unasked"), RemoteSettings(max_tokens=16, tolerance=tolerance)
    )
    assert rows(report, "failed") == failed


@pytest.mark.parametrize(
    ("refused", "rest"),
    [
        (("logprobs",), set(CHECKS) - {"logprobs", "logprobs_batch", "likeliest"}),
        (("n",), set(CHECKS) - {"n"}),
        (("seed",), set(CHECKS) - {"seed", "seeds", "seed_batch"}),
        (("stream",), set(CHECKS) - {"stream"}),
    ],
)
def test_what_the_server_refuses_is_not_supported(refused: tuple[str, ...], rest: set[str]) -> None:
    report = report_of(FakeEngine(refused=refused))
    assert report.passed
    assert rows(report, "passed") == rest
    assert rows(report, "not supported") == set(CHECKS) - rest
    answers = {each.note for each in report.results if each.note.startswith("HTTP 400")}
    assert answers == {f'HTTP 400: {{"error": {{"message": "no {refused[0]} here"}}}}'}


def test_one_route_alone() -> None:
    report = report_of(FakeEngine(refused=("chat",)))
    assert report.passed
    assert {each.status for each in report.results if each.route == "chat"} == {"not supported"}
    assert {each.status for each in report.results if each.route == "completions"} == {"passed"}


def test_no_route_is_not_passed() -> None:
    report = report_of(FakeEngine(refused=("chat", "completions")))
    assert (report.complete, report.tested, report.passed) == (True, False, False)


def test_servers_that_cannot_be_tested() -> None:
    with pytest.raises(
        ServerUnreachableError, match=r"url: expected a server at http://127.0.0.1:9, found none"
    ):
        RemoteServer("http://127.0.0.1:9").connect()
    with pytest.raises(
        ServerUnreachableError, match=r"url: expected an address such as .*, found 'nonsense'"
    ):
        RemoteServer("nonsense")
    with pytest.raises(ServerUnreachableError, match="model: expected a list of models"):
        report_of(FakeEngine(refused=("models",)))
    with pytest.raises(ServerUnreachableError, match="api-key-file: expected an API key"):
        report_of(FakeEngine(refused=("key",)))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(
            ServerUnreachableError, match=r"timeout: expected an answer of .* within 0.1 s"
        ):
            RemoteServer(url, timeout=0.1).connect()
    assert report_of(FakeEngine(refused=("key",)), key="the-right-key").passed


def test_first_difference() -> None:
    assert compare(Answer("abc"), Answer("abc"), "p", "w") is None
    shorter = compare(Answer("abc"), Answer("ab"), "p", "w")
    assert shorter is not None
    assert (shorter.kind, shorter.position) == ("text", 2)
    tokens = [(RemoteToken("a", -1.0, ()), RemoteToken("b", value, ())) for value in (-2.0, -2.5)]
    other = compare(Answer("ab", tokens[0]), Answer("ab", tokens[1]), "p", "w", 0.1)
    assert other is not None
    assert (other.kind, other.position, other.expected, other.found) == (
        "log-probabilities", 1, "-2.000000", "-2.500000",
    )  # fmt: skip
    assert (
        str(other) == "only log-probabilities differ: w, prompt p, token 1: -2.000000 / -2.500000"
    )
    assert compare(Answer("ab", tokens[0]), Answer("ab", tokens[1]), "p", "w", 0.6) is None


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "100")

    def call(*args: str) -> tuple[int, str, str]:
        app = typer.Typer()
        app.command()(verify)
        return (app(list(args), standalone_mode=False) or 0, *capsys.readouterr())

    return call


def test_command(run: Run, tmp_path: Path) -> None:
    """Exit codes, table and JSON document; prompts from a file."""
    prompts = tmp_path / "prompts.jsonl"
    keys = tmp_path / "keys"
    target = tmp_path / "report.json"
    prompts.write_text(
        '{"id": "mine", "prompt": "def f(x):"}\n{"id": "yours", "turns": ["Say hello."]}\n'
    )
    keys.write_text("# a comment\nthe-right-key\n")
    small = ("--max-tokens", "8", "--prompts", str(prompts))
    with fake_server(FakeEngine(refused=("key",))) as url:
        with pytest.raises(ServerUnreachableError, match="api-key-file"):
            run("--url", url, *small)
        code, out, err = run(
            "--url", url, "--api-key-file", str(keys), "--json", str(target), *small
        )
    assert (code, err) == (0, "")
    assert "Deterministic: 24 of 24 checks passed, none failed." in out
    document = json.loads(target.read_text())
    assert (document["passed"], document["complete"], document["model"]) == (True, True, "fake")
    assert document["prompts"] == {"mine": "def f(x):", "yours": "Say hello."}
    assert len(document["checks"]) == 24
    assert document["requests"] > 50
    assert {"date", "server", "pronk", "client", "settings", "seconds"} <= document.keys()
    with fake_server(FakeEngine("batch")) as url:
        code, out, _ = run("--url", f"{url}/v1/", *small)
        assert code == 1
        assert out.count("FAILED 2/2") == 2
        assert "NOT deterministic: 2 checks failed, 2 in texts." in out
        assert "text differs: in a batch, prompt mine, character " in out
        code, out, _ = run("--url", url, "--max-tokens", "8", "--limit", "1", "--json", "-")
        assert [*json.loads(out)["prompts"]] == ["sentence"]
        code, out, _ = run("--url", url, "--json", "-", *small)
        assert (code, json.loads(out)["passed"], out.count("\n")) == (1, False, 1)
    with fake_server(FakeEngine("batch logprobs")) as url:
        code, out, _ = run("--url", url, *small)
        assert code == 1
        assert "(only log-probs)" in " ".join(out.split())
        assert "2 checks failed, 2 in log-probabilities only" in out
    with fake_server(FakeEngine(refused=("chat", "completions"))) as url:
        code, out, _ = run("--url", url, *small)
        assert code == 2
        assert "NOT tested: the server supports no check." in out


def test_interrupt_shows_the_checks_so_far(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_RouteVerifier, "check_stream", interrupted)
    with fake_server(FakeEngine()) as url:
        code, out, _ = run("--url", url, "--max-tokens", "8")
    assert code == 130
    assert "Interrupted: only the checks above were carried out." in out


def test_options_that_do_not_apply(run: Run) -> None:
    with pytest.raises(
        OptionError, match="url: expected only options for servers, found --drafter; leave it out"
    ):
        run("--url", "http://127.0.0.1:9", "--drafter", "suffix")
    with pytest.raises(OptionError, match="rounds: expected --url beside it, found none"):
        run("--rounds", "3")
    with pytest.raises(OptionError, match=r"max_tokens: expected an integer in 8..4096, found 2"):
        run("--url", "http://127.0.0.1:9", "--max-tokens", "2")


def test_pronk_serve_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts to the bit, also with drafters and a prefix cache."""
    llm = LLM(prefix_cache=True, max_batch=8, threads=1)
    num_expected = 0  # number of requests of a batch that still arrive
    most_running = 0
    step = llm.engine.step
    together = RemoteServer.together

    def step_when_the_batch_has_arrived() -> None:
        nonlocal num_expected, most_running
        service = served.server.models.models[0].service
        assert service is not None
        assert eventually(lambda: service.engine.num_requests >= num_expected)
        num_expected = 0
        step()
        most_running = max(most_running, len(llm.engine.scheduler.running))

    def announced(server: RemoteServer, calls: Sequence[Callable[[], Answer]]) -> list[Answer]:
        nonlocal num_expected
        num_expected = len(calls)
        return together(server, calls)

    monkeypatch.setattr(llm.engine, "step", step_when_the_batch_has_arrived)
    monkeypatch.setattr(RemoteServer, "together", announced)
    with running(llm) as served, RemoteServer(served.url, key=KEY) as server:
        *_, report = verify_server_steps(
            server, TEXTS, RemoteSettings(max_tokens=16, tolerance=0.0)
        )
    failed = [str(each.first or each.note) for each in report.failed]
    assert not failed
    assert report.passed
    assert {each.status for each in report.results} == {"passed"}
    assert all(each.max_logprob_difference in (None, 0.0) for each in report.results)
    batch = report.get("batch", "chat")
    assert batch is not None
    assert most_running == llm.engine.scheduler.max_batch
    cache = report.get("cache", "chat")
    assert cache is not None
    assert "cached tokens" in cache.note


@pytest.mark.parametrize("name", [None, "tiny"])
def test_defaults_of_the_server_are_turned_off(name: str | None) -> None:
    """A penalty that the server recommends would make other tokens the greedy ones than the
    likeliest.
    """
    llm = LLM(threads=1)
    plain = llm.generate("def add(a, b):", SamplingParams(max_tokens=20)).text
    llm.config = replace(llm.config, sampling={"temperature": 0.9, "repetition_penalty": 1.9})
    with running(llm, keys=()) as made, RemoteServer(made.url, model=name) as server:
        assert server.connect() == "tiny"
        assert server.neutral_options["repetition_penalty"] == 1.0
        assert server.ask("completions", "def add(a, b):", 20)[0].text == plain
        assert (
            server.ask("completions", "def add(a, b):", 20, repetition_penalty=1.9)[0].text != plain
        )
