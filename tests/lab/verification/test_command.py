"""The command ``pronk verify``: exit codes, output streams, and the partial report after an
interrupt.
"""

import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import pronk.lab.verification
import pronk.llm
from lab.verification.cases import NO_PROPOSALS
from pronk.base.errors import OptionError
from pronk.lab.cli import verify as cli_verify
from pronk.lab.cli.verify import verify
from pronk.lab.verification import VerifyReport
from pronk.llm import LLM
from pronk.reproducibility import PARAMS, model_hash

SMALL = ("--limit", "2", "--samples", "0", "--max-tokens", "8")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(
    pronk_tiny: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Return a function that runs the command and returns exit code, standard output and error."""
    monkeypatch.setattr(pronk.llm, "LLM", lambda *_, **__: pronk_tiny)

    def call(*args: str) -> tuple[int, str, str]:
        app = typer.Typer()
        app.command()(verify)
        code = app(list(args), standalone_mode=False)
        return (code or 0, *capsys.readouterr())

    return call


def test_it_needs_no_torch_for_its_help() -> None:
    code = "import sys, pronk.lab.cli.verify; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_verified(run: Run) -> None:
    code, out, err = run(*SMALL, "--drafter", "prompt_lookup(min_ngram=1)")
    assert (code, err) == (0, "")
    assert "Verified: " in out
    [row] = [
        line for line in out.splitlines() if line.strip().startswith("prompt_lookup(min_ngram=1) ")
    ]
    assert "16/16" in row


def test_rows_are_printed_to_a_pipe_when_they_are_complete(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[str] = []
    screens: list[str] = []
    real = pronk.lab.verification.verify_steps

    def steps(*args: Any, **options: Any) -> Iterator[VerifyReport]:
        for report in real(*args, **options):
            yield report
            printed.append(sys.stdout.getvalue() if isinstance(sys.stdout, io.StringIO) else "")
            screens.append(report.drafters[-1].drafter)

    monkeypatch.setattr(pronk.lab.verification, "verify_steps", steps)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    run(*SMALL, "--drafter", "prompt_lookup(min_ngram=1)")
    first = screens.index("prompt_lookup(min_ngram=1)")
    assert "promises" in printed[0]
    # plain decoding's row, before the checks of the next drafter
    assert "verified" in printed[first]
    assert "prompt_lookup" not in printed[first]


def test_rejection(run: Run) -> None:
    code, out, _ = run(*SMALL, "--drafter", "prompt_lookup(min_ngram=1)", "--rule", "rejection")
    assert code == 0
    assert "4/4" in out
    assert "the distribution of sampled texts was not tested" in " ".join(out.split())


def test_json_is_one_object(run: Run) -> None:
    code, out, err = run(*SMALL, "--json", "-", "--max-tokens", "24", "--drafter", "prompt_lookup")
    report = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert (report["passed"], report["complete"], report["prompts"]) == (True, True, 2)
    assert "prompt_lookup" in {each["drafter"] for each in report["drafters"]}


def test_nothing_accepted_is_not_verified(run: Run) -> None:
    code, out, _ = run(*SMALL, "--drafter", NO_PROPOSALS)
    assert code == 1
    assert "NOT verified" in out


def test_mistakes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(pronk.llm, "LLM", lambda *given, **_: loaded.append(given))
    for args in (
        ("--drafter", "nonsense"),
        ("--samples", "7"),
        ("--rule", "luck"),
        ("--seed", str(2**64)),
        ("--prompts", "/none.jsonl"),
    ):
        with pytest.raises(OptionError):
            run(*args)
    with pytest.raises(typer.TyperException):
        run("--limit", "0")
    assert not loaded


def test_prompts_from_a_file_spread_over_their_tasks(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    rows = [
        {"id": f"{task}{n}", "task": task, "prompt": f"def {task}{n}(x):\n"}
        for task in "ab"
        for n in range(3)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    given = [prompt.id for prompt in cli_verify._select(path, 3)]
    assert given == ["a0", "b0", "a1"]
    assert len(cli_verify._select(path, None)) == 6
    assert len(cli_verify._select(None, None)) == 8
    assert len({prompt.task for prompt in cli_verify._select(None, None)}) > 1
    arguments = (
        "--prompts",
        str(path),
        "--samples",
        "0",
        "--max-tokens",
        "4",
        "--drafter",
        "autoregressive",
    )
    assert json.loads(run(*arguments, "--json", "-")[1])["prompts"] == 6


def test_interrupt_shows_what_was_verified(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    original = pronk.lab.verification.verify_steps

    def interrupted(*args: Any, **options: Any) -> Iterator[VerifyReport]:
        steps = original(*args, **options)
        yield next(steps)
        raise KeyboardInterrupt

    monkeypatch.setattr(pronk.lab.verification, "verify_steps", interrupted)
    code, out, _ = run(*SMALL)
    assert code == 130
    assert "Interrupted: the checks above were verified." in out
    code, out, _ = run(*SMALL, "--json", "-")
    assert code == 130
    assert (json.loads(out)["complete"], json.loads(out)["passed"]) == (False, False)


def test_interrupt_before_anything_was_verified(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Iterator[VerifyReport]:
        raise KeyboardInterrupt

    monkeypatch.setattr(pronk.lab.verification, "verify_steps", interrupted)
    code, out, err = run(*SMALL)
    assert (code, out) == (130, "")
    assert err == "interrupted before anything was verified\n"


def test_bar_on_a_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    code, _, err = run(*SMALL, "--drafter", "autoregressive")
    assert code == 0
    assert "greedy" in err


@pytest.fixture
def portable(run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """Let the command load a model with portable bits."""
    del run
    llm = LLM(threads=1, bits="portable", calibration=False)
    monkeypatch.setattr(pronk.llm, "LLM", lambda *_, **__: llm)
    yield llm
    llm.close()


def test_published_digests_are_compared(
    run: Run, portable: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code, out, err) = run("--published")
    assert code == 2
    assert err == (
        "published: expected digests of this model, found none; add this line to "
        "src/pronk/checkpoint/hub/digests.json and open a pull request\n"
    )
    (head, line) = out.splitlines()
    sha256 = model_hash(portable.path)
    assert f"SHA-256 {sha256}, pronk.BITS {pronk.BITS}" in head
    row = json.loads(f"{{{line}}}")[sha256]
    history = row["digests"]

    monkeypatch.setattr("pronk.reproducibility.published_digests", lambda _: history)
    (code, out, err) = run("--published")
    assert (code, err) == (0, "")
    assert out.splitlines()[1:] == [f"{name}: equal" for name in ("text", *PARAMS)]

    right = history[str(pronk.BITS)]["noise"]
    history[str(pronk.BITS)]["noise"] = "0" * 16
    (code, out, err) = run("--published")
    assert (code, err) == (1, "")
    assert f"noise: expected {'0' * 16}, found {right}" in out.splitlines()
    assert out.count(": equal") == len(PARAMS)


def test_published_digests_take_no_other_options(run: Run) -> None:
    for arguments in (("--limit", "3"), ("--weights", "int8")):
        with pytest.raises(OptionError, match=f"published: expected only .*{arguments[0]}"):
            run("--published", *arguments)
