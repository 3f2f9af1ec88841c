"""``pronk verify`` finds no difference on SmolLM2."""

import json
from pathlib import Path

import pytest

from pronk.cli.main import main
from real.questions import QUESTIONS


@pytest.mark.slow
@pytest.mark.parametrize("samples", [0, 500])
def test_verify(
    samples: int, smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"turns": [question]}) + "\n" for question in QUESTIONS[:2])
    )
    words = [
        "verify",
        "--model",
        str(smollm2),
        "--prompts",
        str(prompts),
        "--max-tokens",
        "12",
        "--json",
        "-",
    ]
    words += ["--samples", str(samples)]
    words += [word for name in ("suffix", "recycling") for word in ("--drafter", name)]
    with pytest.raises(SystemExit) as stop:
        main(words)
    report = json.loads(capsys.readouterr().out)
    assert stop.value.code == 0, report
    assert {drafter["drafter"] for drafter in report["drafters"] if drafter["accepted"]} >= {
        "suffix",
        "recycling",
    }
