"""``pronk datastore`` from outside: what it writes, says and refuses, and that it leaves nothing
half done.
"""

import gzip
import json
import sys
from functools import partial
from pathlib import Path

import pytest

import pronk.lab.cli.datastore as module
from checkpoints import MakeCheckpoint
from command_line import Command as Run
from command_line import assert_mistake
from pronk.checkpoint.hub.clone_models import tiny_model
from pronk.lab.drafters.datastore import builder as datastore_build
from pronk.lab.drafters.datastore.reader import HEADER, SUFFIXES, TOKENS, Datastore
from pronk.models.loader import read_config
from pronk.text.tokenizer import Tokenizer

CODE = "def add(a, b):\n    return a + b\n"
PROSE = "Ünïcode, too: the quick brown fox.\r\n"


@pytest.fixture
def run(command: Run) -> Run:
    return partial(command, "datastore")


@pytest.fixture
def model(checkpoint: MakeCheckpoint) -> Path:
    return checkpoint("llama")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder ``text`` with a folder of code, a note, and JSON lines, plain and compressed."""
    folder = tmp_path / "text"
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "a.py").write_text(CODE)
    (folder / "code" / "b.md").write_text(PROSE, encoding="utf-8", newline="")
    (folder / "code" / "ignored.bin").write_bytes(b"\xff")
    (folder / "notes.c").write_text("int main;\n")
    rows = "".join(
        json.dumps({"text": each}) + "\n" for each in ("first row", "", "half \ud800 a character")
    )
    (folder / "rows.jsonl").write_text(rows)
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    return folder


def documents(folder: Path, tokenizer: Tokenizer) -> list[str]:
    """The text of a datastore."""
    store = Datastore.open(folder)
    found = list[str]()
    ids = list[int]()
    assert store.header.vocabulary == tokenizer.fingerprint
    for number in store._token_array.tolist():
        if number == store.header.separator:
            found.append(tokenizer.decode(ids, skip_special_tokens=False))
            ids = []
        else:
            ids.append(number)
    assert not ids
    return found


def test_build_and_info(run: Run, model: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "store"
    given = [text / name for name in ("code", "notes.c", "rows.jsonl", "rows.jsonl.gz")]
    code, stdout, stderr = run("build", out, *given, "--model", model)
    assert (code, stdout) == (0, "")
    tokenizer = Tokenizer.load(model, read_config(model).vocab_size)
    rows = ["first row", "half ? a character"]
    assert documents(out, tokenizer) == [
        CODE,
        PROSE.replace("\r\n", "\n"),
        "int main;\n",
        *rows,
        *rows,
    ]
    assert sorted(path.name for path in out.iterdir()) == [HEADER, SUFFIXES, TOKENS]
    assert sorted(path.name for path in out.parent.iterdir()) == ["store"]
    size = sum((out / name).stat().st_size for name in (TOKENS, SUFFIXES))
    tokens = Datastore.open(out).header.tokens
    assert stderr == f"{out}: {tokens:,} tokens of 7 documents, {size:,} bytes\n"

    code, stdout, stderr = run("info", out)
    assert (code, stderr) == (0, "")
    assert stdout == (
        f"{out}: {tokens:,} tokens of 7 documents, {size:,} bytes, undamaged\ntokenizer "
        f"{tokenizer.fingerprint}\n"
        "from code\nfrom notes.c\nfrom rows.jsonl\nfrom rows.jsonl.gz\n"
    )


def test_limit(run: Run, model: Path, text: Path, tmp_path: Path) -> None:
    assert (
        run("build", tmp_path / "s", text / "code", "--model", model, "--limit-tokens", 5)[0] == 0
    )
    assert Datastore.open(tmp_path / "s").header.tokens == 5


def test_pronk_tiny_by_default(run: Run, text: Path, tmp_path: Path) -> None:
    assert run("build", tmp_path / "s", text / "code")[0] == 0
    assert documents(tmp_path / "s", Tokenizer.load(tiny_model()))[0] == CODE


def test_long_texts_are_cut_at_line_ends(
    run: Run, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_PIECE", 12)
    monkeypatch.setattr(module, "_DOCUMENTS_PER_CALL", 2)
    assert list(module._split_text(CODE)) == ["def add(a, b", "):\n", "    return a", " + b\n"]
    assert list(module._split_text("a\nb\n" * 5)) == ["a\nb\n" * 3, "a\nb\n" * 2]
    assert list(module._split_text("")) == [""]
    assert (
        run("build", tmp_path / "s", text / "code", text / "rows.jsonl", "--model", model)[0] == 0
    )
    found = documents(tmp_path / "s", Tokenizer.load(model))
    assert found == [CODE, PROSE.replace("\r\n", "\n"), "first row", "half ? a character"]


def test_mistakes(
    run: Run, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    (text / "bad.txt").write_bytes(b"\xff\xfe")
    (text / "bad.jsonl").write_text('{"content": 1}\n')
    (text / "empty.txt").write_text("")
    at = ("--model", model)
    assert_mistake(
        run("build", out, tmp_path / "nowhere", *at),
        "expected text files, folders or JSON lines, found no",
    )
    assert_mistake(
        run("build", out, text / "bad.txt", *at), "bad.txt: expected text in UTF-8, found"
    )
    assert_mistake(run("build", out, text / "bad.jsonl", *at), "expected a string under 'text'")
    assert_mistake(
        run("build", out, text / "empty.txt", *at), "expected documents with tokens, found none"
    )
    assert_mistake(
        run("build", out, text / "code", "--model", tmp_path),
        "expected a model folder with config.json",
    )
    assert_mistake(run("build", out, text / "code", *at, "--limit-tokens", 0), "--limit-tokens")
    assert_mistake(
        run("build", text, text / "code", *at),
        f"expected a new or empty folder, found {text} in use",
    )
    assert_mistake(
        run("build", text / "notes.c", text / "code", *at), "expected a new or empty folder"
    )
    assert_mistake(
        run("info", out), "expected a datastore with datastore.json, found none; make one with"
    )
    monkeypatch.setitem(sys.modules, "pydivsufsort", None)
    assert_mistake(
        run("build", out, text / "code", *at), "run pip install '.[datastore]' in a clone of pronk"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text"]


def test_info_notices_damage(run: Run, model: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "s"
    assert run("build", out, text / "code", "--model", model)[0] == 0
    data = bytearray((out / TOKENS).read_bytes())
    data[1] ^= 1
    (out / TOKENS).write_bytes(data)
    assert_mistake(run("info", out), "tokens.bin: expected sha256 ")


@pytest.mark.parametrize("when", ["tokenizing", "sorting"])
def test_an_interrupt_leaves_nothing(
    when: str, run: Run, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        (partial,) = (path for path in tmp_path.iterdir() if path != text)
        assert partial.name == "s.partial"
        assert (partial / TOKENS).exists()
        assert not (partial / HEADER).exists()
        raise KeyboardInterrupt

    if when == "tokenizing":
        monkeypatch.setattr(module, "_encode", interrupt)
    else:
        monkeypatch.setattr(datastore_build.np, "fromfile", interrupt)
    code, out, err = run("build", tmp_path / "s", text / "code", "--model", model)
    assert (code, out, err) == (130, "", "interrupted; no partial datastore was kept\n")
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_progress(model: Path, text: Path, tmp_path: Path) -> None:
    """Progress runs from 0 to the total: in tokens with a limit, otherwise in bytes of text."""
    paths = [text / name for name in ("code", "rows.jsonl.gz", "rows.jsonl")]
    total = sum(map(module._text_bytes, paths))
    for limit, whole in ((None, total), (10, 10)):
        seen = list[tuple[str, int, int]]()
        module._build(
            tmp_path / str(limit),
            paths,
            str(model),
            limit,
            lambda *each, seen=seen: seen.append(each),
        )
        *steps, last = seen
        assert last == ("sorting", 0, 0)
        assert {(name, end) for name, _, end in steps} == {("tokenizing", whole)}
        done = [each[1] for each in steps]
        assert done == sorted(done)
        assert done[-1] <= whole


def test_bar_on_a_terminal(
    run: Run, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    code, out, err = run("build", tmp_path / "s", text / "code", "--model", model)
    assert (code, out) == (0, "")
    assert "sorting" in err
    assert "tokens of 2 documents" in err


@pytest.mark.parametrize("words", [(), ("build",), ("info",)])
def test_help(words: tuple[str, ...], run: Run) -> None:
    code, out, err = run(*words, "--help")
    assert (code, err) == (0, "")
    assert "Usage: pronk datastore" in out
    assert not words or "Examples" in out
