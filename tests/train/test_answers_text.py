"""Drafters that learn from files of the target's own dialogues."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gguf_files import convert
from pronk import LLM, OptionError, SamplingParams
from pronk.train.corpus.answers import read_answers
from pronk.train.corpus.sources import SourceSpec
from pronk.train.dialogues import hold_out, write_answers_text
from pronk.train.own_text import answers_header, write_answers
from pronk.train.teacher import Teacher
from train.tiny import refusal, run_command

LOOP = (
    "--steps 4 --batch 64 --micro 64 --length 32 --final-length 32 --threads 1 --num-tokens 2 "
    "--evaluate-every 9"
)


@pytest.fixture(scope="module")
def answers(teacher: Teacher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("answers") / "own.answers"

    def ask(number: int) -> list[str]:
        return [f"Does the {('cat', 'dog', 'bird')[number % 3]} number {number} see?", "And then?"][
            : 1 + number % 2
        ]

    write_answers(
        teacher.llm,
        ask,
        answers_header(teacher.llm, [], 12, 3),
        path,
        tokens=1500,
        batch=16,
        progress=lambda _: None,
    )
    return path


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "kind", ["kangaroo --exit-layer 1", "medusa --heads 2", "glide", "draft", "heads"]
)
def test_each_kind_learns_answers(
    kind: str, teacher: Teacher, answers: Path, tmp_path: Path
) -> None:
    """The text is that of the dialogues, in order; those held out are the prompts of the engine's
    measurement.
    """
    output = run_command(
        f"{kind} --target {teacher.folder} --source {answers}=1 --out {tmp_path / 'run'} {LOOP}"
    )
    assert "finished: " in output
    data = tmp_path / "run" / "data"
    training, held_out = hold_out(read_answers(answers)[1])
    text = np.fromfile(data / "on-policy.bin", np.uint16).tolist()
    for each in training:
        assert text[: len(each.ids)] == each.ids
        del text[: len(each.ids)]
        if text and each.ids[-1] != teacher.encoder.end_id:
            assert text.pop(0) == teacher.encoder.end_id
    assert text == []
    prompts = json.loads((data / "prompts.json").read_text())["held_out"]
    assert prompts == [each.ids[: each.answers[0][0]] for each in held_out]
    card = (tmp_path / "run" / "export" / "README.md").read_text()
    assert "tokens of the target's own answers" in card
    assert "T=0.8" in card or "sampled" in card


def test_a_draft_model_of_a_gguf_file_has_its_tokenizer(
    teacher: Teacher, corpus: Path, tmp_path: Path
) -> None:
    path = convert(teacher.folder, tmp_path / "a.gguf", {"": "Q8_0", "ffn_down": "F16"})
    target = LLM(path, threads=1, budget="all")
    out = tmp_path / "run"
    text = f"--source {corpus / 'stories.jsonl'}=1 --on-policy 200"
    assert "finished: " in run_command(
        f"draft --target {path} {text} --out {out} {LOOP} --steps 12"
    )
    params = SamplingParams(max_tokens=24)
    drafter = f"draft_model(model={str(out / 'export')!r})"
    completion = target.generate("The cat", params, drafter=drafter)
    assert completion.stats.drafted
    assert completion.token_ids == target.generate("The cat", params).token_ids
    assert LLM(out / "export", threads=1).generate("The cat", params).token_ids


def test_bad_sources(teacher: Teacher, answers: Path, corpus: Path, tmp_path: Path) -> None:
    command = f"kangaroo --exit-layer 1 --target {teacher.folder} --out {tmp_path / 'run'} {LOOP}"
    both = f"--source {answers}=1 --source {corpus / 'stories.jsonl'}=1"
    assert refusal(f"{command} {both}") == (
        "source: expected files of answers alone, or none, found both; train on one or the other"
    )
    message = refusal(f"{command} --source {answers}=1 --on-policy 200")
    assert message == "on-policy: expected none with answers as the source, found 200; leave it out"
    message = refusal(f"lm --source {answers}=1 --out {tmp_path / 'lm'}")
    assert message.startswith(f"{answers}: expected text, found answers of a model")


def test_a_resumed_run_has_its_old_answers(teacher: Teacher, answers: Path, tmp_path: Path) -> None:
    """Files are told apart by their names, so that they can be moved between the commands."""
    folder = tmp_path / "run" / "data"
    spec = SourceSpec(answers.stem, "answers", answers, 1.0)
    write_answers_text([spec], teacher, folder, held_out=2)
    written = (folder / "on-policy.bin").read_bytes()
    moved = replace(spec, path=tmp_path / "gone" / answers.name)
    write_answers_text([moved], teacher, folder, held_out=2)
    for other in (replace(spec, name="others"), replace(spec, weight=2.0)):
        with pytest.raises(OptionError, match=r"^cannot resume .*expected sources = .* as before"):
            write_answers_text([other], teacher, folder, held_out=2)
    with pytest.raises(OptionError, match=r"^cannot resume .*expected sources = .* as before"):
        write_answers_text([spec, spec], teacher, folder, held_out=2)
    assert (folder / "on-policy.bin").read_bytes() == written
