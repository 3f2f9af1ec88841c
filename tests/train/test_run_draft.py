"""``pronk train draft`` from end to end."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pronk import LLM, SamplingParams
from pronk.base.errors import OptionError
from pronk.cli.main import main
from pronk.train.clock import Clock
from pronk.train.options import DataOptions, OnPolicyOptions
from pronk.train.run import Run, train_student
from pronk.train.students import DraftStudent
from pronk.train.teacher import Teacher
from train.tiny import (
    OWN,
    TINY_DRAFT,
    InterruptingConsole,
    draft_command,
    link,
    run_command,
    same_weights,
    shown,
)

OPTIONS = replace(TINY_DRAFT, num_tokens=2)
ASKED = "as long as the 400 tokens of --on-policy take"

pytestmark = pytest.mark.usefixtures("short_evaluation")


def run(
    data: DataOptions,
    teacher: Teacher,
    folder: Path,
    console: Console,
    own: OnPolicyOptions = OWN,
    **changes: Any,
) -> bool:
    options = replace(OPTIONS, **changes)
    place = Run(folder, "small", "pronk train draft", console, Clock(options.minutes))
    return train_student(place, DraftStudent, data, own, options, teacher)


def test_interrupted_run_ends_like_an_uninterrupted_one(
    tmp_path: Path, data_options: DataOptions, teacher: Teacher, quiet: Console
) -> None:
    assert run(data_options, teacher, tmp_path / "whole", quiet)
    parts = tmp_path / "parts"
    assert not run(data_options, teacher, parts, InterruptingConsole(quiet, "written"))
    assert not (parts / "checkpoint.pt").exists()
    assert not run(data_options, teacher, parts, InterruptingConsole(quiet, "step 9 "))
    assert (parts / "latest" / "model.safetensors").exists()
    assert not (parts / "export").exists()
    assert run(data_options, teacher, parts, quiet)
    assert same_weights(tmp_path / "whole", parts)
    text = shown(quiet)
    assert "saved what the target has written; the same command continues" in text
    assert "saved at step 9; the same command continues" in text
    assert re.search(
        r"step 9 +\d+\.\d% +loss \d\.\d+ +same 0\.\d\d +lr .* tokens/s +\d+ s left\n", text
    )
    assert re.search(r"\n  valid on-policy  KL \d\.\d{3}  same \d\.\d{3}\n", text)
    assert re.search(
        r"\n  valid greedy  alpha \d\.\d{3}  CTAR\(1\) \d\.\d{3}  CTAR\(2\) \d\.\d{3}  S "
        r"\d\.\d{3}\n",
        text,
    )


def test_command_makes_a_draft_that_serves(tmp_path: Path, corpus: Path, teacher: Teacher) -> None:
    more = "--steps 6 --evaluate-every 6 --num-tokens 2 --name small"
    command = draft_command(teacher, corpus, tmp_path / "run", more)
    run_command(command)
    export = tmp_path / "run" / "export"
    facts = json.loads((export / "draft.json").read_text())
    assert facts["target"] == {"name": "little", **teacher.fingerprints}
    assert facts["target"]["tokenizer"] == teacher.llm.tokenizer.fingerprint
    card = (export / "README.md").read_text()
    for fact in (
        "A draft model for little",
        teacher.fingerprints["weights"],
        "| on-policy |",
        "| greedy | {greedy alpha:.3f} | {greedy CTAR(1):.3f}, "
        "{greedy CTAR(2):.3f} | {greedy S:.2f} |".format_map(facts["figures"]),
        "| stories | owner/name@abc | MIT | 360 |",
        "pronk train draft --source stories.jsonl=1 --on-policy 200 --out run --target little",
    ):
        assert fact in card
    assert str(tmp_path) not in card
    assert str(teacher.folder.parent) not in card
    assert LLM(export).config.context == 64
    served = LLM(
        teacher.folder, drafter=f"draft_model(model={str(export)!r}, num_tokens=2)", budget="all"
    )
    params = SamplingParams(max_tokens=20)
    out = served.generate("The cat", params)
    assert out.token_ids == teacher.llm.generate("The cat", params).token_ids
    assert out.stats.drafted > 0
    assert "step" not in run_command(command)


def test_mistakes_end_with_one_line(
    tmp_path: Path, corpus: Path, teacher: Teacher, capsys: pytest.CaptureFixture[str]
) -> None:
    source = f"--source {corpus / 'stories.jsonl'}=1"
    common = (
        f"train draft --target {teacher.folder} --out {tmp_path / 'run'} --on-policy 20 --layers 1 "
        "--hidden 16 "
        "--mlp 16 --heads 2 --kv-heads 1 --steps 2 --batch 128 --micro 64 --length 32 "
        "--final-length 64 --num-tokens 0"
    )
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "short.txt").write_text("The cat sees the dog.")
    (tmp_path / "file").write_text("")
    for words, message in (
        ("--source nowhere.jsonl=1", "expected a file or folder at nowhere.jsonl, found nothing"),
        (
            f"--source {tmp_path / 'empty.jsonl'}=1",
            "source 'empty': expected text to train on, found",
        ),
        (
            f"--source {tmp_path / 'short.txt'}=1",
            "text: expected at least 65 tokens, for one sequence",
        ),
        (f"{source} --out {tmp_path / 'file'}", "Not a directory; choose a writable folder"),
        (f"{source} --patience 0", "patience: expected an integer of at least 1, found 0"),
        (f"{source} --target nowhere", "no such folder: 'nowhere'"),
        (f"{source} --share 0.999", "expected at least 33 tokens for sequences of 32, found"),
    ):
        with pytest.raises(SystemExit) as end:
            main(f"{common} {words}".split())
        assert end.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith("pronk: error: ")
        assert message in error
        assert error.count("\n") == 1


def test_target_need_not_write(
    tmp_path: Path, data_options: DataOptions, teacher: Teacher, quiet: Console
) -> None:
    assert run(data_options, teacher, tmp_path, quiet, replace(OWN, tokens=0), share=0.0)
    assert (tmp_path / "data" / "on-policy.bin").stat().st_size == 0
    card = (tmp_path / "export" / "README.md").read_text()
    assert "that the target wrote itself" not in card
    assert "| greedy |" in card


def test_text_of_another_tokenizer_is_refused(
    tmp_path: Path, prepared: Path, data_options: DataOptions, teacher: Teacher, quiet: Console
) -> None:
    folder = link(prepared, tmp_path / "run")
    with pytest.raises(
        OptionError, match=r"expected tokenizer = None as before, found '[0-9a-f]{32}'"
    ):
        run(data_options, teacher, folder, quiet)


def test_run_that_gets_no_better_says_so_and_is_exported(
    tmp_path: Path,
    data_options: DataOptions,
    teacher: Teacher,
    quiet: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DraftStudent, "judge", lambda self, figures: 0.5)
    for _ in range(2):  # the second call exports again
        assert run(data_options, teacher, tmp_path / "run", quiet, evaluate_every=2, patience=2)
        text = shown(quiet)
        line = (
            "stopped early: no validation after that of step 2 (0.5000) is better, with a patience "
            "of 2\nfinished: "
        )
        assert line in text
        assert "step 6 " in text
        assert "step 7 " not in text
        shutil.rmtree(tmp_path / "run" / "export")
    assert text.count(line) == 2


def test_latest_is_what_is_exported_in_the_end(
    tmp_path: Path, data_options: DataOptions, teacher: Teacher, quiet: Console
) -> None:
    assert run(data_options, teacher, tmp_path, quiet)
    latest, export = (
        {each.name: each.read_bytes() for each in (tmp_path / name).iterdir()}
        for name in ("latest", "export")
    )
    assert latest == export
    assert latest["README.md"].startswith(b"---\nlibrary_name: transformers\n")
    last = shown(quiet).split("export, on sequences of 64 tokens\n")[1]
    names = ["code", "extra", "on-policy", "stories", "greedy", "T=0.8"]
    assert [line.split()[1] for line in last.splitlines()] == names


@pytest.mark.parametrize(
    ("at_most", "plan"),
    [
        (True, "minutes left of 60: 20.0 for text, 34.0 for training, 6.0 for evaluating\n"),
        (
            False,
            (
                f"minutes left of 60: {ASKED}, what that leaves of 54.0 for training, 6.0 for "
                "evaluating\n"
            ),
        ),
    ],
)
def test_time_is_shared_out_and_said(
    tmp_path: Path,
    data_options: DataOptions,
    teacher: Teacher,
    quiet: Console,
    at_most: bool,
    plan: str,
) -> None:
    own = replace(OWN, at_most=at_most)
    for console, done in ((InterruptingConsole(quiet, "step 9 "), False), (quiet, True)):
        assert run(data_options, teacher, tmp_path, console, own, minutes=60.0) == done
    text = shown(quiet)
    assert text.startswith(plan)
    resumed = re.search(
        r"at step 9; the same command continues\n(minutes left of 60: 0.0 for text, .*)\n", text
    )
    assert resumed is not None
    assert re.fullmatch(
        r"minutes left .* text, 5\d\.\d for training, 6.0 for evaluating", resumed[1]
    )
    assert (tmp_path / "export" / "model.safetensors").exists()


def test_without_time_left_the_minimum_of_text_is_made(
    tmp_path: Path,
    data_options: DataOptions,
    teacher: Teacher,
    quiet: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After 40 of 60 minutes, no time is left for text: the target generates the minimum, one
    sequence.
    """
    monkeypatch.setattr("pronk.train.corpus.collection._CHUNK", 2)
    clock = Clock(60.0)
    (tmp_path / "data").mkdir()
    clock.earlier = 2400.0
    clock.save(tmp_path / "data")
    assert run(data_options, teacher, tmp_path, quiet, replace(OWN, at_most=True), minutes=60.0)
    assert "minutes left of 60: 0.0 for text, 14.0 for training, 6.0 for evaluating\n" in shown(
        quiet
    )
    written = json.loads((tmp_path / "data" / "on-policy.json").read_text())["tokens"]
    assert OPTIONS.longest < written < OWN.tokens
    tokenized = (tmp_path / "data" / "train.bin").stat().st_size // 2
    assert OPTIONS.min_text_tokens <= tokenized < OPTIONS.steps * OPTIONS.batch // 2
