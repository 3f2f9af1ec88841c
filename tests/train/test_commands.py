"""Options of the commands: what they are by default, and which are refused before any text is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pronk.cli.train.main import app
from pronk.errors import OptionError
from pronk.train.clock import Clock
from pronk.train.options import OnPolicyOptions
from pronk.train.teacher import Teacher


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("glide --cache-layer 3", "cache-layer: expected 1 to 2 for a target of 2 layers, found 3"),
        ("glide --layers 3", "layers: expected 1 to 2 for a target of 2 layers, found 3"),
        ("glide --vanilla --block 3", "block: expected none with --vanilla, found 3; leave it out"),
        ("glide --vanilla --cache-layer 1", "cache-layer: expected none with --vanilla, found 1; leave it out"),
        ("glide --num-tokens 65", "num-tokens: expected an integer in 0..64, found 65"),
        ("heads --num-tokens 4", "num-tokens: expected 0 to 3, the heads, found 4"),
        ("heads --heads 0", "heads: expected an integer in 1..63, found 0"),
        ("heads --heads 32 --length 32", "length: expected at least 33 for 32 heads, found 32"),
        ("medusa --heads 2 --num-tokens 3", "num-tokens: expected 0 to 2, the heads, found 3"),
        ("medusa --unembeddings own", "unembeddings: expected one of shared, replicated, found 'own'"),
        ("kangaroo --exit-layer 2", "exit-layer: expected 1 to 1 for a target of 2 layers, found 2"),
        (
            "kangaroo --exit-layer 1 --adapter mlp --heads 2",
            "heads: expected none with --adapter mlp, which has no attention, found 2; leave it out",
        ),
        (
            "kangaroo --exit-layer 1 --mlp 8",
            "mlp: expected none with --adapter attention; it is for --adapter transformer, found 8; leave it out",
        ),
        ("draft --positions 128 --final-length 128", "final-length: expected an integer in 1..64, found 128"),
        ("draft --positions 32 --length 64", "length: expected an integer in 1..32, found 64"),
        ("draft --positions 0", "positions: expected an integer of at least 1, found 0"),
    ],
)
def test_mistakes_about_the_target_come_before_its_text(
    words: str, message: str, tmp_path: Path, corpus: Path, teacher: Teacher
) -> None:
    common = f" --target {teacher.folder} --source {corpus / 'stories.jsonl'}=1 --out {tmp_path / 'run'}"
    result = CliRunner().invoke(app, (words + common).split())
    assert isinstance(result.exception, OptionError), result.output
    assert str(result.exception) == message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--bytes --vocab 300", "vocab: expected none with --bytes, found 300; leave it out"),
        ("--head-order causal", "head-order: expected none without --future-tokens, found 'causal'; leave it out"),
        ("--head-mlp 8", "head-mlp: expected none without --future-tokens, found 8; leave it out"),
        ("--future-tokens 3 --head-mlp 0", "head-mlp: expected an integer of at least 1, found 0"),
        ("--future-tokens 3 --head-kind round", "head-kind: expected one of transformer, linear, found 'round'"),
        ("--future-tokens 3 --head-order up", "head-order: expected one of parallel, causal, anticausal, found 'up'"),
        (
            "--future-tokens 3 --head-order anticausal --head-kind linear",
            "head-order: expected parallel or causal for linear heads, found anticausal",
        ),
        (
            "--future-tokens 3 --head-order anticausal --head-mlp 8",
            "head-mlp: expected 832 for anticausal heads, the last layers of the model, found 8",
        ),
        ("--future-tokens 40 --length 32", "length: expected at least 40 for 39 heads, found 32"),
    ],
)
def test_mistakes_about_heads_come_before_the_text(words: str, message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, f"lm {words} --source {tmp_path}=1 --out {tmp_path / 'run'}".split())
    assert isinstance(result.exception, OptionError), result.output
    assert str(result.exception) == message
    assert not (tmp_path / "run").exists()


def test_heads_are_not_compiled(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, f"heads --compile --source {tmp_path}=1 --out {tmp_path / 'run'}".split())
    assert result.exit_code == 2
    assert "No such option" in result.output


@pytest.mark.parametrize("words", ["draft --layers 1 --hidden 16 --heads 2 --mlp 16", "glide --hidden 24 --heads 2"])
def test_lengths_follow_a_target_of_a_short_context(words: str, tmp_path: Path, corpus: Path, teacher: Teacher) -> None:
    common = (
        f" --target {teacher.folder} --source {corpus / 'stories.jsonl'}=1 --out {tmp_path / 'run'} --on-policy 100 "
        "--kv-heads 1 --steps 4 --num-tokens 0 --threads 1 --batch 256"
    )
    result = CliRunner().invoke(app, (words + common).split())
    assert result.exit_code == 0, result.output
    assert (
        "- sequences of 64 tokens, in the last 20% of the run of 64"
        in (tmp_path / "run" / "export" / "README.md").read_text()
    )


def test_list_of_commands_says_whose_heads_they_are() -> None:
    assert "multi_token" in CliRunner().invoke(app, ["--help"]).output


@pytest.mark.parametrize(("words", "tokens", "at_most"), [("", 1_000_000, True), ("--on-policy 700", 700, False)])
def test_default_text_of_the_target_may_shrink(
    words: str, tokens: int, at_most: bool, tmp_path: Path, teacher: Teacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[OnPolicyOptions, Clock]] = []

    def remember(kind: object, data: object, own: OnPolicyOptions, *rest: Any) -> bool:
        given.append((own, rest[-1]))
        return True

    monkeypatch.setattr("pronk.train.run.run_student", remember)
    command = f"kangaroo --target {teacher.folder} --source {tmp_path}=1 --out {tmp_path / 'run'} --minutes 7 {words}"
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.output
    ((own, clock),) = given
    assert (own.tokens, own.at_most, clock.limit) == (tokens, at_most, 420)
    assert clock.seconds > 0
