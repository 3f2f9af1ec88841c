"""Batches: every request is answered once, with the text of LLM.generate, also after
interruptions.
"""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from pronk.async_llm import AsyncLLM
from pronk.base.errors import OptionError, PronkError
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from pronk.server.batch import BatchOutput, read_batch, run_batch
from pronk.server.service import Service
from pronk.server.settings import ServerSettings


def line(number: int, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}


LINES = [
    *(line(i, prompt=f"def f{i}(x):", max_tokens=6, seed=i, temperature=0.9) for i in range(8)),
    line(
        8,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=4,
        seed=1,
    ),
    line(9, "/v1/responses", input="Hi", max_output_tokens=4, seed=1),
    line(10, "/v1/moderations", input="Hi"),
    line(11, prompt="x", nonsense=1),
    line(12, prompt="", max_tokens=3),
    line(13, prompt="x", stream=True),
    line(14, prompt="x", drafter="draft_model(model='/etc')"),
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in LINES))
    return path


def run(model: LLM, source: Path, target: Path, stop_after: int | None = None) -> int:
    class StopError(Exception):
        pass

    counted = 0

    def progress() -> None:
        nonlocal counted
        counted += 1
        if counted == stop_after:
            raise StopError

    async def main() -> int:
        async with AsyncLLM(model) as engine:
            service = Service(engine, ServerSettings(name="tiny"))
            try:
                with BatchOutput(target) as answers:
                    return await run_batch(
                        service, source, answers, max_concurrent=4, progress=progress
                    )
            finally:
                service.close()

    try:
        return asyncio.run(main())
    except StopError:
        return -1


def answers(target: Path) -> dict[str, Any]:
    rows = [json.loads(text) for text in target.read_text().splitlines()]
    found = {row["custom_id"]: row["response"] for row in rows}
    assert len(found) == len(rows)
    assert all(row["error"] is None for row in rows)
    return found


def test_answers_equal_llm_generate(model: LLM, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    assert run(model, source, target) == 4
    found = answers(target)
    assert set(found) == {each["custom_id"] for each in LINES}
    for i in range(8):
        want = model.generate(
            f"def f{i}(x):", SamplingParams(max_tokens=6, seed=i, temperature=0.9)
        )
        assert found[f"r{i}"]["body"]["choices"][0]["text"] == want.text
    assert [found[f"r{i}"]["status_code"] for i in range(15)] == [200] * 11 + [400] * 4
    assert found["r9"]["body"]["output"][0]["content"][0]["text"]
    assert found["r11"]["body"]["error"]["code"] == "unknown_field"


def test_answers_say_what_was_ignored(model: LLM, tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    bodies = [{**body, "store": True}, body]
    rows = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": each}
        for n, each in enumerate(bodies)
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(model, path, tmp_path / "out.jsonl") == 0
    found = answers(tmp_path / "out.jsonl")
    assert [found[n]["body"].get("x_pronk_ignored") for n in "01"] == [["store"], None]


@pytest.mark.parametrize("stop_after", [1, 5, 9])
def test_interrupted_batch_continues(
    model: LLM, source: Path, tmp_path: Path, stop_after: int
) -> None:
    target = tmp_path / "out.jsonl"
    assert run(model, source, target, stop_after) == -1
    before = target.read_bytes()
    assert stop_after <= before.count(b"\n") < len(LINES)
    with target.open("ab") as file:
        file.write(b'{"id": "batch_req_12", "custo')
    run(model, source, target)
    assert target.read_bytes().startswith(before)
    assert set(answers(target)) == {each["custom_id"] for each in LINES}
    whole = target.read_bytes()
    assert run(model, source, target) == 0
    assert target.read_bytes() == whole


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"custom_id": "\ud800"}, "line 2: custom_id: expected a string"),
        ({"custom_id": ""}, "line 2: custom_id: expected a string that is not empty, found ''"),
        ({"method": "GET"}, "line 2: method: expected 'POST', found 'GET'"),
        ({"url": "/v1/images"}, "line 2: url: expected one of /v1/completions"),
        ({"body": []}, "line 2: body: expected an object"),
        (
            {"custom_id": "r0"},
            "line 2: expected a unique custom_id, found 'r0' for the second time",
        ),
    ],
)
def test_malformed_line_is_refused(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (LINES[0], LINES[1] | row)))
    with pytest.raises(OptionError, match=message):
        list(read_batch(path))


@pytest.mark.parametrize(
    "text",
    [
        "my only notes",
        '{"a": 1}\n{"b": 2}',
        '{"id": "batch_req_1"}\n',
        "\n",
        '{"custom_id": "r1"}\n',
    ],
)
def test_output_file_with_other_content_is_left_unchanged(tmp_path: Path, text: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(text)
    with pytest.raises(OptionError, match="line 1: expected answers of a batch"):
        BatchOutput(path)
    assert path.read_text() == text


def test_output_file_in_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="expected a file to write to"):
        BatchOutput(tmp_path / "nowhere" / "out.jsonl")


def test_output_file_is_locked_for_one_run(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with BatchOutput(path) as first:
        with pytest.raises(OptionError, match="found another run that writes to it"):
            BatchOutput(path)
        first.write("r1", 200, {})
    with BatchOutput(path) as second:
        assert second.answered_ids == {"r1"}


def test_batch_from_a_pipe_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OptionError, match="write its lines to a file first"):
        next(read_batch(path))


def test_an_error_of_a_batch_keeps_its_cause(
    model: LLM, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise PronkError("no room") from OSError("disk full")

    monkeypatch.setattr(BatchOutput, "write", fail)
    with pytest.raises(PronkError, match="no room") as caught:
        run(model, source, tmp_path / "out.jsonl")
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_full_disk_raises_an_error(tmp_path: Path) -> None:
    with BatchOutput(tmp_path / "out.jsonl") as answers, Path("/dev/full").open("wb") as full:
        os.dup2(full.fileno(), answers._file.fileno())
        with pytest.raises(PronkError, match="expected room for an answer, found No space left"):
            answers.write("r1", 200, {})
