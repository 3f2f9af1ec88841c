"""Training of heads for targets without a chat template, and with other layers than a Llama's."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoints import MakeCheckpoint
from pronk import LLM, SamplingParams
from pronk.base.errors import OptionError
from pronk.train.corpus.answers import BEGINNINGS, QUESTIONS, AnswersHeader, read_answers
from pronk.train.corpus.beginnings import Beginnings
from pronk.train.corpus.collection import Exclusion
from pronk.train.corpus.sources import SourceSpec, spec_of
from pronk.train.dialogues import copy_answers
from pronk.train.eagle import EagleTraining
from pronk.train.loop import Trainer
from pronk.train.own_text import answers_header, write_answers
from pronk.train.teacher import Teacher
from train.tiny import EAGLE_OPTIONS, refusal, run_command, write_jsonl

DOCUMENTS = [
    "\n".join(f"{' '.join(f'n{number}w{line}x{word}' for word in range(9))}" for line in range(20))
    for number in range(12)
]


@pytest.fixture
def sources(tmp_path: Path) -> list[SourceSpec]:
    other = [text.replace("n", "m") for text in DOCUMENTS]
    files = [write_jsonl(tmp_path / "a.jsonl", [*DOCUMENTS, "short", DOCUMENTS[0]])]
    files.append(write_jsonl(tmp_path / "b.jsonl", other[:3]))
    return [spec_of(file, "data") for file in files]


def test_beginnings_depend_on_number_and_seed_only(sources: list[SourceSpec]) -> None:
    one = Beginnings(sources)
    first = [one.ask(number) for number in range(60)]
    assert first == [Beginnings(sources).ask(number) for number in range(60)]
    assert first != [Beginnings(sources, seed=1).ask(number) for number in range(60)]
    texts = [text for (text,) in first]
    share = sum(text.startswith("m") for text in texts) / len(texts)
    assert 0.3 < share < 0.7  # a quarter of the documents, but one of two sources
    lengths = [len(text.split()) for text in texts]
    assert min(lengths) >= 20
    assert max(lengths) > 90


def test_the_end_of_a_document_is_left_to_the_model(sources: list[SourceSpec]) -> None:
    beginnings = Beginnings(sources)
    everything = [*DOCUMENTS, *(text.replace("n", "m") for text in DOCUMENTS)]
    for number in range(60):
        (text,) = beginnings.ask(number)
        (document,) = (each for each in everything if text in each)
        assert document.index(text) + len(text) <= 2 * len(document) / 3
        assert text.split()[-1] in document.split(), "the beginning ends with a whole word"


def test_excluded_beginnings_are_skipped(sources: list[SourceSpec], tmp_path: Path) -> None:
    words = " ".join(DOCUMENTS[3].split()[10:30])
    (tmp_path / "eval.jsonl").write_text(json.dumps({"prompt": words}) + "\n", encoding="utf-8")
    beginnings = Beginnings(sources, [tmp_path / "eval.jsonl"])
    texts = [beginnings.ask(number) for number in range(60)]
    assert [] in texts
    excludes = Exclusion([words])
    assert not any(excludes(text) for each in texts for text in each)


def test_a_document_that_begins_with_a_long_word_is_skipped(tmp_path: Path) -> None:
    text = f"{'x' * 2000} {' '.join(f'word{number}' for number in range(40))}"
    beginnings = Beginnings([spec_of(write_jsonl(tmp_path / "d.jsonl", [text]), "data")])
    assert beginnings.ask(0) == []


def test_documents_that_are_too_short_are_refused(tmp_path: Path) -> None:
    spec = spec_of(write_jsonl(tmp_path / "d.jsonl", ["too short"]), "data")
    message = r"data 'd\.jsonl': expected documents of at least 30 words, found none; give others"
    with pytest.raises(OptionError, match=message):
        Beginnings([spec])


def test_a_header_without_prompts_is_that_of_questions(tmp_path: Path) -> None:
    header = AnswersHeader("m", "llama", "ab12", "cd34", 300, (), 24, 7)
    values = {**vars(header), "sources": []}
    del values["prompts"]
    (tmp_path / "old.answers").write_text(json.dumps(values) + "\n", encoding="utf-8")
    assert read_answers(tmp_path / "old.answers")[0].prompts == QUESTIONS


def test_a_model_without_a_chat_template_continues_documents(
    checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder = checkpoint("gemma3_text", max_position_embeddings=512)
    text = "One more line of <|endoftext|> a text with some words.\n" * 12
    data = write_jsonl(tmp_path / "d.jsonl", [text])
    out = tmp_path / "own.answers"
    command = f"texts --model {folder} --data {data} --out {out} --max-tokens 16 --threads 1"
    output = run_command(f"{command} --tokens 100 --batch 2")
    assert "the model has no chat template: it continues documents" in output
    header, dialogues = read_answers(out)
    assert header.prompts == BEGINNINGS
    llm = LLM(folder, threads=1, drafter="autoregressive")
    for dialogue in dialogues:
        ((start, end),) = dialogue.answers
        assert llm.tokenizer.decode(dialogue.ids[:start]).strip() in text
        assert llm.tokenizer.backend.token_to_id("<|endoftext|>") not in dialogue.ids[:start]
        if not dialogue.temperature:
            again = llm.generate(dialogue.ids[:start], SamplingParams(max_tokens=16))
            assert again.token_ids == dialogue.ids[start:end]


def test_a_chat_model_continues_documents_on_request(
    teacher: Teacher, corpus: Path, tmp_path: Path
) -> None:
    command = (
        f"texts --model {teacher.folder} --data {corpus / 'stories.jsonl'} --max-tokens 16 "
        f"--threads 1 --batch 2 --tokens 20 --out {tmp_path / 'a'}"
    )
    run_command(f"{command} --continuations")
    header, dialogues = read_answers(tmp_path / "a")
    assert header.prompts == BEGINNINGS
    user = teacher.llm.tokenizer.backend.token_to_id("<|user|>")
    assert not any(user in dialogue.ids[: dialogue.answers[0][0]] for dialogue in dialogues)
    assert "expected prompts 'beginnings of documents' as before, found 'questions'" in refusal(
        command
    )


def begin(folder: Path, tmp_path: Path) -> Trainer[EagleTraining]:
    """Return a run that has not trained yet, on continuations by the model in ``folder``."""
    teacher = Teacher(folder, threads=1)
    answers = tmp_path / "own.answers"
    header = answers_header(teacher.llm, [], 20, 3, BEGINNINGS)

    def ask(number: int) -> list[str]:
        return [f"The {('cat', 'dog', 'bird')[number % 3]} sees"]

    write_answers(teacher.llm, ask, header, answers, tokens=800, batch=16, progress=lambda _: None)
    copy_answers(tmp_path / "run", [answers], (), teacher.fingerprint)
    return Trainer(EagleTraining(tmp_path / "run", EAGLE_OPTIONS, teacher))


@pytest.mark.parametrize(
    ("family", "activation"), [("gemma3_text", "gelu_tanh"), ("nemotron_h", "relu2")]
)
def test_a_trained_head_is_a_llamas_layer_for_other_mlps(
    family: str, activation: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder = checkpoint(family, max_position_embeddings=128)
    trainer = begin(folder, tmp_path)
    head = trainer.objective
    assert head.teacher.llm.config.activation == activation
    trainer.train(lambda _: None, lambda _: None, lambda: False)
    head.export(tmp_path / "head", "", {})
    config = json.loads((tmp_path / "head" / "config.json").read_text(encoding="utf-8"))
    assert config["transformer_layer_config"]["hidden_act"] == "silu"
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    prompt = [5, 6, 7, 8, 9, 10, 11]
    (plain,) = head.teacher.llm.generate([prompt], params)
    drafter = f"eagle3(model={str(tmp_path / 'head')!r})"
    (found,) = head.teacher.llm.generate([prompt], params, drafter=drafter)
    assert found.token_ids == plain.token_ids
    assert found.stats.drafted > 0


@pytest.mark.parametrize("family", ["gemma2", "granite"])
def test_the_head_learns_scaled_and_capped_logits(
    family: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    cap = {"final_logit_softcapping": 2.0} if family == "gemma2" else {}
    folder = checkpoint(family, max_position_embeddings=128, **cap)
    head = begin(folder, tmp_path).objective
    ids, marks = head.text.batch(0, 1)
    batch = head._prepare(ids, marks)
    assert batch is not None
    first = int((marks[0] > 1).nonzero()[0])
    stop = int((marks[0, 1:] == 0).nonzero()[0]) + 1  # the second dialogue begins there
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        wanted = model(ids[:1, :stop]).logits[0, first - 1 :, head.module.draft_ids]
    found = batch.logits[: len(wanted)].float()
    np.testing.assert_allclose(found, wanted, rtol=0.05, atol=0.05)
    assert wanted.std() > 0.2
