"""Questions from documents, the file of answers, and the target that writes it."""

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pronk import LLM
from pronk.base.errors import OptionError
from pronk.sampling.params import SamplingParams
from pronk.train import own_text
from pronk.train.corpus import questions as questions_module
from pronk.train.corpus.answers import (
    AnswersHeader,
    AnswersWriter,
    Dialogue,
    merge_answers,
    read_answers,
)
from pronk.train.corpus.collection import Exclusion
from pronk.train.corpus.questions import WEIGHTS, Questions
from pronk.train.corpus.sources import SourceSpec, SourceText, spec_of
from pronk.train.own_text import answers_header, temperature_of, write_answers
from pronk.train.teacher import Teacher
from train.tiny import refusal, run_command, write_jsonl

# number of dialogues in which each pool of ``sources``, which have no shop, has its share once
ROUND = sum(WEIGHTS.values()) - WEIGHTS["shop"]
HEADER = AnswersHeader("m.gguf", "llama", "ab12", "cd34", 70_000, ("a.jsonl",), 24, 7)
DIALOGUES = [
    Dialogue(0, 0.0, [1, 2, 69_999, 4], [(2, 4)]),
    Dialogue(3, 0.7, [5, 6, 7, 8, 9, 10], [(1, 3), (4, 6)]),
]


@pytest.fixture
def sources(tmp_path: Path) -> list[SourceSpec]:
    prose = [
        f"# Growing of Tall Plants\n\n{' '.join(f'w{j}x{i}' for j in range(200))}"
        for i in range(20)
    ]
    talks = [
        f"User: Why is {i} odd?\n\nAssistant: It is.\n\nUser: And {i + 1}?\n\nAssistant: No."
        for i in range(30)
    ]
    sums = [f"Question: Add {i} and {i}.\nAnswer: {2 * i}" for i in range(30)]
    return [spec_of(write_jsonl(tmp_path / "d.jsonl", [*prose, *talks, *sums]), "data")]


def test_questions_depend_on_number_and_seed_only(sources: list[SourceSpec]) -> None:
    one = Questions(sources)
    same = Questions(sources)
    other = Questions(sources, seed=1)
    first = [one.ask(number) for number in range(200)]
    assert (
        first
        == [same.ask(number) for number in range(200)]
        == [one.ask(number) for number in range(200)]
    )
    assert first != [other.ask(number) for number in range(200)]
    assert {len(turns) for turns in first} == {1, 2}
    assert len({turns[0] for turns in first}) > 100


def test_every_pool_has_its_share(sources: list[SourceSpec]) -> None:
    questions = Questions(sources)
    turns = [questions.ask(number) for number in range(2 * ROUND)]
    asked = [" ".join(each) for each in turns]
    kinds = Counter(
        "math" if "Add " in text else "chat" if "odd?" in text else "other" for text in asked
    )
    assert kinds["math"] == 2 * WEIGHTS["math"]
    assert kinds["chat"] == 2 * WEIGHTS["chat"]
    assert any("w5x" in text for text in asked)
    phrases = json.loads(
        (Path(questions_module.__file__).parent / "questions.json").read_text("utf-8")
    )
    facts = {each.format(name) for each in phrases["fact"] for name in phrases["subjects"]}
    assert sum(first in facts for first, *_ in turns) == 2 * WEIGHTS["fact"]
    assert any("Growing of Tall Plants" in text for text in asked)


def test_documents_are_not_repeated_while_they_last(sources: list[SourceSpec]) -> None:
    """Not all of the 30 sums are asked in a round of all pools, and none of them twice."""
    questions = Questions(sources)
    sums = [turns[0] for number in range(ROUND) if "Add " in (turns := questions.ask(number))[0]]
    assert len(sums) == len(set(sums)) == WEIGHTS["math"]


def test_excluded_questions_are_not_asked(sources: list[SourceSpec], tmp_path: Path) -> None:
    plain = Questions(sources)
    bad = next(
        turns[0] for number in range(200) if len((turns := plain.ask(number))[0].split()) > 60
    )
    words = " ".join(bad.split()[20:40])
    (tmp_path / "eval.jsonl").write_text(json.dumps({"prompt": words}) + "\n", encoding="utf-8")
    filtered = Questions(sources, [tmp_path / "eval.jsonl"])
    texts = [filtered.ask(number) for number in range(200)]
    excludes = Exclusion([words])
    assert any(excludes(plain.ask(number)[0]) for number in range(200))
    assert [] in texts
    assert not any(excludes(turn) for turns in texts for turn in turns)


def test_no_documents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match="data: expected documents to ask questions about, found none"
    ):
        Questions([spec_of(write_jsonl(tmp_path / "d.jsonl", ["too short"]), "data")])


def test_python_alone_gives_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that had nothing but a notice of its licence is no text to ask about."""
    files = ["", "\n", "def add(one, two):\n    return one + two\n" * 20]

    def read(_: SourceSpec) -> Iterator[SourceText]:
        return (SourceText(text, "a package", "MIT") for text in files)

    monkeypatch.setattr(questions_module, "read_source", read)
    source = SourceSpec("python", "python", None, 1.0)
    questions = Questions([source])
    turns = [questions.ask(number)[0] for number in range(3000)]  # all tasks and files
    assert any("return one + two" in each for each in turns)
    files.pop()
    with pytest.raises(OptionError, match="data: expected documents to ask questions about"):
        Questions([source])


def test_a_file_of_answers_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "a.answers"
    writer = AnswersWriter(path, HEADER)
    writer.append(DIALOGUES[:1])
    writer.append(DIALOGUES[1:])
    assert read_answers(path) == (HEADER, DIALOGUES)
    assert AnswersWriter(path, HEADER).existing == DIALOGUES
    assert [dialogue.num_answered for dialogue in DIALOGUES] == [2, 4]


def test_a_torn_record_is_dropped_at_every_length(tmp_path: Path) -> None:
    path = tmp_path / "a.answers"
    writer = AnswersWriter(path, HEADER)
    writer.append(DIALOGUES[:1])
    whole = path.stat().st_size
    writer.append(DIALOGUES[1:])
    data = path.read_bytes()
    for size in range(whole, len(data)):
        path.write_bytes(data[:size])
        assert read_answers(path)[1] == DIALOGUES[:1]
        AnswersWriter(path, HEADER).append(DIALOGUES[1:])
        assert path.read_bytes() == data
    damaged = bytearray(data)
    damaged[whole + 20] ^= 1
    path.write_bytes(damaged)
    assert read_answers(path)[1] == DIALOGUES[:1]


def test_other_settings_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.answers"
    AnswersWriter(path, HEADER)
    with pytest.raises(
        OptionError, match="expected seed 7 as before, found 8; choose another file"
    ):
        AnswersWriter(path, replace(HEADER, seed=8))
    for content in (b"", b"{}\n", b'{"format": "other"}\n', gzip.compress(b"text")):
        path.write_bytes(content)
        with pytest.raises(OptionError, match="expected a file of answers"):
            read_answers(path)
    with pytest.raises(
        OptionError, match=r"nothing\.answers: expected a file of answers, found No such file"
    ):
        read_answers(tmp_path / "nothing.answers")


def test_files_of_one_model_are_merged_by_number(tmp_path: Path) -> None:
    one = tmp_path / "one"
    two = tmp_path / "two"
    out = tmp_path / "out"
    AnswersWriter(one, HEADER).append(DIALOGUES[1:])
    # the weights tell models apart, not the names of their files
    moved = replace(HEADER, target="moved.gguf")
    AnswersWriter(two, moved).append([*DIALOGUES, replace(DIALOGUES[0], number=9)])
    merge_answers([one, two], out)
    assert read_answers(out) == (HEADER, [*DIALOGUES, replace(DIALOGUES[0], number=9)])
    AnswersWriter(tmp_path / "other", replace(HEADER, weights="ef56"))
    with pytest.raises(OptionError, match="other: expected weights 'ab12' as before, found 'ef56'"):
        merge_answers([one, tmp_path / "other"], out)


def test_files_of_other_sources_are_merged_if_their_numbers_differ(tmp_path: Path) -> None:
    one = tmp_path / "one"
    two = tmp_path / "two"
    out = tmp_path / "out"
    AnswersWriter(one, HEADER).append(DIALOGUES)
    other = replace(HEADER, sources=("b.jsonl", "a.jsonl"), seed=8, max_tokens=30)
    more = replace(DIALOGUES[0], number=9)
    AnswersWriter(two, other).append([more])
    merge_answers([one, two], out)
    assert read_answers(out) == (
        replace(HEADER, sources=("a.jsonl", "b.jsonl")),
        [*DIALOGUES, more],
    )
    AnswersWriter(two, other).append([replace(DIALOGUES[1], temperature=1.0)])
    with pytest.raises(OptionError, match=r"two: expected numbers .* found 3 twice; .* --first"):
        merge_answers([one, two], out)


def ask(number: int) -> list[str]:
    return [] if number % 5 == 4 else ["What does it see?", "And the cat?"][: 1 + number % 2]


def test_the_target_answers_and_goes_on_after_an_interruption(
    teacher: Teacher, tmp_path: Path
) -> None:
    """The text does not depend on the batch, nor on interruptions between groups."""
    header = answers_header(teacher.llm, [], 12, 3)
    one = tmp_path / "one"
    two = tmp_path / "two"
    shown: list[int] = []
    done = write_answers(teacher.llm, ask, header, one, tokens=150, batch=2, progress=shown.append)
    assert done >= 150
    assert shown[-1] == done

    def interrupt(tokens: int) -> None:
        if tokens >= 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_answers(teacher.llm, ask, header, two, tokens=150, batch=1, progress=interrupt)
    with two.open("ab") as file:
        file.write(b"torn")
    write_answers(teacher.llm, ask, header, two, tokens=150, batch=2, progress=lambda _: None)
    mine, theirs = ({d.number: d for d in read_answers(path)[1]} for path in (one, two))
    common = mine.keys() & theirs.keys()
    assert len(common) > 8
    assert all(mine[number] == theirs[number] for number in common)
    assert not any(number % 5 == 4 for number in mine)
    assert {dialogue.temperature for dialogue in mine.values()} == {
        temperature_of(number) for number in mine
    }


def test_a_short_answer_does_not_end_the_writing(
    teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = answers_header(teacher.llm, [], 12, 3)
    answer = own_text._answer
    silent = range(20)

    def begin_short(llm: LLM, header: AnswersHeader, asked: dict[int, list[str]]) -> list[Dialogue]:
        return answer(llm, header, {n: each for n, each in asked.items() if n not in silent})

    monkeypatch.setattr(own_text, "_answer", begin_short)
    path = tmp_path / "a"
    assert write_answers(
        teacher.llm, lambda _: ["What?"], header, path, tokens=12, batch=1, progress=lambda _: None
    )
    assert min(dialogue.number for dialogue in read_answers(path)[1]) == 20
    silent = range(100)
    with pytest.raises(OptionError, match="expected answers to 33 questions, found none of at le"):
        write_answers(
            teacher.llm, lambda _: ["What?"], header, tmp_path / "b", tokens=12, batch=1,
            progress=lambda _: None,
        )  # fmt: skip


def test_answers_are_those_of_the_target(teacher: Teacher, tmp_path: Path) -> None:
    write_answers(
        teacher.llm, ask, answers_header(teacher.llm, [], 12, 3), tmp_path / "a", tokens=100, batch=4,
        progress=lambda _: None,
    )  # fmt: skip
    header, dialogues = read_answers(tmp_path / "a")
    assert header.weights == teacher.fingerprint.weights
    greedy = [dialogue for dialogue in dialogues if not dialogue.temperature]
    assert greedy
    for dialogue in greedy:
        start, end = dialogue.answers[-1]
        again = teacher.llm.generate(dialogue.ids[:start], SamplingParams(max_tokens=12))
        assert again.token_ids[: end - start] == dialogue.ids[start:end]
        question = teacher.llm.chat_ids([{"role": "user", "content": "What does it see?"}])
        assert dialogue.ids[: len(question)] == question


def test_the_command_writes_and_stops_after_the_minutes(
    teacher: Teacher, corpus: Path, tmp_path: Path
) -> None:
    command = (
        f"texts --model {teacher.folder} --data {corpus / 'stories.jsonl'} --out {tmp_path / 'a'} "
        "--max-tokens 16"
    )
    run_command(f"{command} --tokens 40 --threads 1 --batch 2")
    _, dialogues = read_answers(tmp_path / "a")
    assert sum(dialogue.num_answered for dialogue in dialogues) >= 40
    run_command(f"{command} --tokens 4000 --minutes 0 --threads 1 --batch 2")
    assert read_answers(tmp_path / "a")[1] == dialogues
    assert "expected text files, folders or JSON lines, found no" in refusal(
        command.replace("stories", "none")
    )
