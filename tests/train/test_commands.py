"""Options of the commands: their defaults, and errors before any text is read."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pronk import LLM, SamplingParams
from pronk.lab.drafters.modules.heads import HeadsShape
from pronk.lab.drafters.modules.kangaroo import ADAPTERS
from pronk.train.cli.kinds import KINDS
from pronk.train.cli.main import app
from pronk.train.clock import Clock
from pronk.train.options import OnPolicyOptions
from pronk.train.run import Run
from pronk.train.teacher import Teacher
from train.tiny import refusal, run_command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("glide --cache-layer 3", "cache-layer: expected 1 to 2 for a target of 2 layers, found 3"),
        ("glide --layers 3", "layers: expected 1 to 2 for a target of 2 layers, found 3"),
        ("glide --vanilla --block 3", "block: expected none with --vanilla, found 3; leave it out"),
        (
            "glide --vanilla --cache-layer 1",
            "cache-layer: expected none with --vanilla, found 1; leave it out",
        ),
        ("glide --num-tokens 65", "num-tokens: expected an integer in 0..64, found 65"),
        ("heads --num-tokens 4", "num-tokens: expected 0 to 3, the heads, found 4"),
        ("heads --heads 0", "heads: expected an integer in 1..63, found 0"),
        ("heads --heads 32 --length 32", "length: expected at least 33 for 32 heads, found 32"),
        ("medusa --heads 2 --num-tokens 3", "num-tokens: expected 0 to 2, the heads, found 3"),
        (
            "medusa --unembeddings own",
            "unembeddings: expected one of shared, replicated, found 'own'",
        ),
        ("heads --layer 3", "layer: expected 1 to 2, the target's layers, found 3"),
        ("heads --order up", "order: expected one of parallel, causal, anticausal, found 'up'"),
        ("kangaroo --exit-layer 0", "exit-layer: expected an integer of at least 1, found 0"),
        (
            "kangaroo --exit-layer 2",
            "exit-layer: expected 1 to 1 for a target of 2 layers, found 2",
        ),
        (
            "kangaroo --exit-layer 9",
            "exit-layer: expected 1 to 1 for a target of 2 layers, found 9",
        ),
        (
            "kangaroo --adapter linear",
            "adapter: expected one of attention, head, transformer, mlp, found 'linear'",
        ),
        (
            "kangaroo --adapter mlp --heads 2",
            (
                "heads: expected none with --adapter mlp, which has no attention, found 2; "
                "leave it out"
            ),
        ),
        (
            "kangaroo --mlp 8",
            (
                "mlp: expected none with --adapter attention; it is for --adapter transformer, "
                "found "
                "8; leave it out"
            ),
        ),
        (
            "draft --positions 128 --final-length 128",
            "final-length: expected an integer in 1..64, found 128",
        ),
        ("draft --positions 32 --length 64", "length: expected an integer in 1..32, found 64"),
        ("draft --positions 0", "positions: expected an integer of at least 1, found 0"),
    ],
)
def test_mistakes_about_the_target_come_before_its_text(
    words: str, message: str, tmp_path: Path, corpus: Path, teacher: Teacher
) -> None:
    common = (
        f"--target {teacher.folder} --source {corpus / 'stories.jsonl'}=1 --out {tmp_path / 'run'}"
    )
    assert refusal(f"{words} {common}") == message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--bytes --vocab 300", "vocab: expected none with --bytes, found 300; leave it out"),
        (
            "--head-order causal",
            "head-order: expected none without --future-tokens, found 'causal'; leave it out",
        ),
        ("--head-mlp 8", "head-mlp: expected none without --future-tokens, found 8; leave it out"),
        ("--future-tokens 3 --head-mlp 0", "head-mlp: expected an integer of at least 1, found 0"),
        (
            "--future-tokens 3 --head-kind round",
            "head-kind: expected one of transformer, linear, found 'round'",
        ),
        (
            "--future-tokens 3 --head-order up",
            "head-order: expected one of parallel, causal, anticausal, found 'up'",
        ),
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
def test_mistakes_about_heads_come_before_the_text(
    words: str, message: str, tmp_path: Path
) -> None:
    assert refusal(f"lm {words} --source {tmp_path}=1 --out {tmp_path / 'run'}") == message
    assert not (tmp_path / "run").exists()


def test_heads_are_not_compiled(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, f"heads --compile --source {tmp_path}=1 --out {tmp_path / 'run'}".split()
    )
    assert result.exit_code == 2
    assert "No such option" in result.output


SMALL = "--hidden 16 --layers 2 --heads 2 --kv-heads 1 --mlp 16"


SLOW = pytest.mark.slow


@pytest.mark.few(2)
@pytest.mark.usefixtures("short_evaluation")
@pytest.mark.parametrize(
    ("words", "kind", "shape", "card"),
    [
        (f"glide {SMALL} --num-tokens 0", "glide", {"cross": True}, "into the target's cache"),
        (f"glide {SMALL} --num-tokens 0 --vanilla", "vanilla", {"cross": False}, "small"),
        (
            "heads --heads 2 --num-tokens 0",
            "multi_token",
            vars(HeadsShape(2, 2, 38)),
            (
                "2 heads for the tokens 2 to 3 places ahead, parallel, "
                "over the output of the target's layer 2"
            ),
        ),
        (
            "medusa --blocks 1 --heads 2 --tree-size 5",
            "medusa",
            {"num_heads": 2, "accuracies": 2, "tree": 5},
            "residual blocks of size 32",
        ),
        (
            "medusa --blocks 1 --unembeddings replicated --num-tokens 0",
            "medusa",
            {"num_heads": 4, "accuracies": 4, "tree": 15},
            "residual blocks of size 32",
        ),
        *(
            pytest.param(
                f"kangaroo {words} --num-tokens 2",
                "kangaroo",
                {"exit_layer": 1, "adapter": adapter, "heads": 4, "mlp": 48},
                "Exit after layer 1 of 2",
                marks=marks,
            )
            for adapter, words, marks in [
                ("attention", "", ()),
                *((each, f"--exit-layer 1 --adapter {each}", SLOW) for each in ADAPTERS[1:-1]),
                (ADAPTERS[-1], f"--exit-layer 1 --adapter {ADAPTERS[-1]}", ()),
            ]
        ),
    ],
)
def test_command_makes_a_drafter_that_serves(
    words: str,
    kind: str,
    shape: dict[str, Any],
    card: str,
    tmp_path: Path,
    corpus: Path,
    teacher: Teacher,
) -> None:
    """A drafter of two steps is lossless, too; ``test_run_draft.py`` has draft models."""
    common = (
        f" --target {teacher.folder} --source {corpus / 'stories.jsonl'}=1 --out "
        f"{tmp_path / 'run'} --on-policy 200 "
        "--steps 2 --batch 128 --micro 64 --length 32 --final-share 0 --threads 1 --evaluate-every "
        "2 --name small"
    )
    run_command(words + common)
    export = tmp_path / "run" / "export"
    facts = json.loads((export / "drafter.json").read_text())
    assert facts["kind"] == kind
    assert facts["target"] == {"name": "little", **vars(teacher.fingerprint)}
    counted = {
        name: len(value) if isinstance(value, list) else value
        for name, value in facts["shape"].items()
    }
    assert counted.items() >= shape.items()
    assert ("greedy S" in facts["figures"]) == ("--num-tokens 0" not in words)
    text = (export / "README.md").read_text()
    assert card in text
    assert ("into the target's cache" in text) == (kind == "glide")
    assert f'drafter="{kind}(model=' in text
    llm = LLM(teacher.folder, threads=1, budget="all")
    params = [
        SamplingParams(max_tokens=20, temperature=temperature, seed=1) for temperature in (0.0, 0.8)
    ]
    spec = f"{kind}(model={str(export)!r}{', eta=0' if kind == 'kangaroo' else ''})"
    guessed, plain = (
        llm.generate(["The cat", "The dog"], params, drafter=each)
        for each in (spec, "autoregressive")
    )
    assert [each.token_ids for each in guessed] == [each.token_ids for each in plain]
    assert sum(each.stats.drafted for each in guessed) > 0


@pytest.mark.parametrize("name", ["lm", *KINDS])
def test_training_needs_torch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = refusal(f"{name} --source {tmp_path}=1 --out {tmp_path / 'run'}")
    assert (
        found == "train: expected torch, found none; run pip install '.[train]' in a clone of pronk"
    )
    assert "Usage" in run_command(f"{name} --help")


@pytest.mark.parametrize("name", ["lm", "draft", "heads"])
def test_help_shows_examples(name: str) -> None:
    assert f"pronk train {name} --source python=0.6" in run_command(f"{name} --help")
    assert "multi_token" in run_command("--help")


@pytest.mark.parametrize(
    "words", ["draft --layers 1 --hidden 16 --heads 2 --mlp 16", "glide --hidden 24 --heads 2"]
)
def test_lengths_follow_a_target_of_a_short_context(
    words: str, tmp_path: Path, corpus: Path, teacher: Teacher
) -> None:
    common = (
        f" --target {teacher.folder} --source {corpus / 'stories.jsonl'}=1 --out "
        f"{tmp_path / 'run'} --on-policy 100 "
        "--kv-heads 1 --steps 4 --num-tokens 0 --threads 1 --batch 256"
    )
    run_command(words + common)
    card = (tmp_path / "run" / "export" / "README.md").read_text()
    assert "- sequences of 64 tokens, in the last 20% of the run of 64" in card


@pytest.mark.parametrize(
    ("words", "tokens", "at_most"), [("", 1_000_000, True), ("--on-policy 700", 700, False)]
)
def test_default_text_of_the_target_may_shrink(
    words: str,
    tokens: int,
    at_most: bool,
    tmp_path: Path,
    teacher: Teacher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[tuple[OnPolicyOptions, Clock]] = []

    def remember(run: Run, kind: object, data: object, own: OnPolicyOptions, *_: object) -> bool:
        given.append((own, run.clock))
        return True

    monkeypatch.setattr("pronk.train.run.train_student", remember)
    common = f"--target {teacher.folder} --source {tmp_path}=1 --out {tmp_path / 'run'} --minutes 7"
    run_command(f"kangaroo {common} {words}")
    ((own, clock),) = given
    assert (own.tokens, own.at_most, clock.limit) == (tokens, at_most, 420)
    assert clock.seconds > 0
