import json
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path

import numpy as np
import pytest

from pronk.base.errors import OptionError
from pronk.train.corpus.collection import RUN, Collection, Exclusion, Pool, collect, pack
from pronk.train.corpus.encoder import Encoder, parse_dialogue
from pronk.train.corpus.sources import (
    SourceSpec,
    is_permissive,
    parse_source,
    read_packages,
    read_python,
    read_source,
    wanted_code,
)
from pronk.train.data import load_tokenizer, mix, prepare
from pronk.train.options import DataOptions
from train.tiny import TOKENS, write_jsonl


def collected(options: DataOptions) -> Collection:
    return collect(options.sources, dialogues=options.dialogues, exclude=options.exclude)


def jsonl(folder: Path, name: str, texts: list[str]) -> SourceSpec:
    """Return a source of these texts."""
    return parse_source(f"{write_jsonl(folder / f'{name}.jsonl', texts)}=1")


def test_source_names_what_and_weight(corpus: Path) -> None:
    spec = parse_source(f"{corpus / 'stories.jsonl'}=0.25")
    assert (spec.name, spec.kind, spec.weight) == ("stories", "jsonl", 0.25)
    assert parse_source("python=2").path is None
    assert parse_source(f"python:{corpus}=2").path == corpus


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("prose.jsonl", "prose.jsonl"),
        ("python=", "python="),
        ("python=x", "python=x"),
        ("python=0", "python=0"),
        ("python=-1", "python=-1"),
        ("python=inf", "python=inf"),
        ("=1", "=1"),
        ("nowhere.jsonl=1", "nothing"),
        ("python:nowhere=1", "nothing"),
    ],
)
def test_bad_source_is_named(text: str, found: str) -> None:
    with pytest.raises(OptionError, match=r"expected .*found") as error:
        parse_source(text)
    assert found in str(error.value)


def test_unknown_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(b"")
    with pytest.raises(OptionError, match=r"\.jsonl"):
        parse_source(f"{tmp_path / 'a.pdf'}=1")


def test_document_without_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"content": "x"}\n')
    with pytest.raises(OptionError, match="expected a string under 'text', found NoneType"):
        list(read_source(parse_source(f"{path}=1")))


def test_collect_counts_copies_and_splits_dialogues(
    tmp_path: Path, data_options: DataOptions
) -> None:
    result = collected(data_options)
    pools = {pool.name: pool for pool in result.pools}
    assert set(pools) == {"stories", "code", "dialogues"}
    assert sum(pool.weight for pool in result.pools) == pytest.approx(1)
    assert pools["dialogues"].weight == 0.2
    assert all(parse_dialogue(text) for text in pools["dialogues"].documents)
    assert not any(parse_dialogue(text) for text in pools["stories"].documents)
    assert pools["stories"].held_out
    assert not set(pools["stories"].held_out) & set(pools["stories"].documents)
    assert [record.origin for record in result.origins] == ["owner/name@abc", "code"]
    assert result.origins[0].documents == 360

    twice = jsonl(tmp_path, "a", ["alpha", "beta", "alpha"])
    assert collected(replace(data_options, sources=(twice,))).duplicates == 1


def test_empty_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="source 'empty': expected text"):
        collected(DataOptions((jsonl(tmp_path, "empty", []),)))


def test_empty_validation_file_is_named(tmp_path: Path, data_options: DataOptions) -> None:
    empty = write_jsonl(tmp_path / "empty.jsonl", [])
    with pytest.raises(
        OptionError, match="valid: expected text to measure on in 'empty', found none"
    ):
        prepare(replace(data_options, valid=(empty,)), tmp_path / "data", 100, 64, lambda _: None)


def test_mixture_follows_the_weights_and_the_seed() -> None:
    pools = [
        Pool("a", 0.6, ["a" * 50, "A" * 70]),
        Pool("b", 0.3, ["b" * 10] * 3),
        Pool("c", 0.1, ["c" * 200]),
    ]
    texts = list(islice(mix(pools, seed=1), 3000))
    total = sum(map(len, texts))
    for pool in pools:
        share = sum(len(text) for text in texts if text[0].lower() == pool.name) / total
        assert share == pytest.approx(pool.weight, abs=0.01)
    assert texts == list(islice(mix(pools, seed=1), 3000))
    assert texts != list(islice(mix(pools, seed=2), 3000))


def test_exclusion_finds_every_shared_run_of_13_words() -> None:
    words = [f"w{i}" for i in range(40)]
    exclude = Exclusion([" ".join(words)])
    for start in range(len(words) - RUN + 1):
        for before in range(9):
            shared = [f"x{i}" for i in range(before)] + words[start : start + RUN] + ["y", "z"]
            assert exclude(" ".join(shared))
            del shared[before + 4]
            assert not exclude(" ".join(shared))
    assert exclude(", ".join(words[5:18]).upper())
    assert not Exclusion([])(" ".join(words))


def test_excluded_prompts_do_not_reach_the_text(tmp_path: Path, data_options: DataOptions) -> None:
    stories = data_options.sources[0]
    assert stories.path is not None
    prompt = json.loads(stories.path.read_text().splitlines()[7])["text"]
    (tmp_path / "eval.jsonl").write_text(
        json.dumps({"id": "1", "turns": ["Please go on: " + prompt]}) + "\n"
    )
    plain = collected(data_options)
    filtered = collected(replace(data_options, exclude=(tmp_path / "eval.jsonl",)))
    assert any(prompt in pool.documents + pool.held_out for pool in plain.pools)
    assert not any(prompt in pool.documents + pool.held_out for pool in filtered.pools)
    assert filtered.excluded >= 1


def test_prepared_text_is_the_mixture(prepared: Path, data_options: DataOptions) -> None:
    tokenizer = load_tokenizer(prepared)
    tokens = np.fromfile(prepared / "train.bin", dtype=np.uint16).tolist()
    documents = [list(ids) for end, ids in groupby(tokens, lambda token: token == 0) if not end]
    if tokens[-1] != 0:
        documents.pop()  # cut off
    expected = list(islice(mix(collected(data_options).pools, data_options.seed), len(documents)))
    for ids, text in zip(documents, expected, strict=True):
        turns = parse_dialogue(text)
        if turns is None:
            assert tokenizer.decode(ids) == text
        else:
            assert ids[0] == tokenizer.token_to_id("<|user|>")
            assert ids.count(tokenizer.token_to_id("<|end|>")) == len(turns)


def test_spelled_out_markers_stay_text(prepared: Path) -> None:
    tokenizer = load_tokenizer(prepared)
    ids = pack(Encoder.of_run(tokenizer), iter(["a <|endoftext|> b <|user|>"]), 1000)
    assert ids.tolist().count(0) == 1
    assert ids[-1] == 0
    assert tokenizer.decode(ids[:-1].tolist()) == "a <|endoftext|> b <|user|>"


def test_prepared_text_is_kept_and_guarded(prepared: Path, data_options: DataOptions) -> None:
    before = (prepared / "train.bin").stat().st_mtime_ns
    prepare(data_options, prepared, TOKENS, 64, lambda _: None)
    assert (prepared / "train.bin").stat().st_mtime_ns == before
    with pytest.raises(OptionError, match=r"expected dialogues = 0\.2 as before, found 0\.5"):
        prepare(replace(data_options, dialogues=0.5), prepared, TOKENS, 64, lambda _: None)


@pytest.mark.parametrize(
    ("text", "permissive"),
    [
        ("MIT", True),
        ("BSD-3-Clause", True),
        ("BSD 3-Clause License", True),
        ("Apache 2.0 License", True),
        ("Apache License, Version 2.0", True),
        ("Apache-2.0 OR BSD-2-Clause", True),
        ("MIT OR GPL-3.0-only", True),
        ("MIT AND GPL-3.0-only", False),
        ("GPL-2.0 OR (MIT AND LGPL-3.0)", False),
        ("GPL-3.0-or-later", False),
        ("LGPL", False),
        ("MPL-2.0", False),
        ("Proprietary", False),
        ("", False),
    ],
)
def test_permissive_licences(text: str, permissive: bool) -> None:
    assert is_permissive(text) is permissive


def install(folder: Path, name: str, files: dict[str, str], declared: str) -> None:
    """Write a package with its metadata."""
    info = f"{name}-1.0.dist-info"
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n{declared}"
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in files)
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def test_python_source_takes_permissive_code_only(tmp_path: Path) -> None:
    body = "".join(f"def f{chr(97 + i)}(x):\n    return x\n\n" for i in range(20))
    for name, license_name in (("good", "MIT"), ("copyleft", "GPL-3.0-only"), ("silent", None)):
        files = {
            f"{name}/a.py": body + f"# {name}",
            f"{name}/tests/b.py": body,
            f"{name}/_vendor/c.py": body,
        }
        files |= {
            f"{name}/test_d.py": body,
            f"{name}/e.py": "# generated by a tool, do not edit\n" + body,
        }
        install(
            tmp_path,
            name,
            files,
            "" if license_name is None else f"License-Expression: {license_name}\n",
        )
    assert list(read_packages([tmp_path])) == [(body + "# good", "good 1.0", "MIT")]


def test_standard_library_is_read() -> None:
    text, origin, license_name = next(read_python(None))
    assert origin.startswith("CPython 3.")
    assert license_name == "PSF-2.0"
    assert "import" in text


def test_licence_notices_are_cut_off(tmp_path: Path) -> None:
    body = '"""Doc."""\n' + "def f(x):\n    return x\n" * 20
    notice = (
        "#!/usr/bin/env python\n# Copyright 2020 A. Person.\n#\n# Licensed under the MIT "
        "license.\n\n"
    )
    install(tmp_path, "m", {"m.py": notice + body}, "License: MIT\n")
    assert [text for text, _, _ in read_packages([tmp_path])] == [body]


def test_unwanted_code() -> None:
    code = "def f(x):\n    return x\n" * 20
    assert wanted_code(code)
    assert not wanted_code(code + "x = '" + "a" * 400 + "'\n")
    assert not wanted_code("TABLE = [\n" + "    12345, 67890,\n" * 50 + "]\n")
    assert not wanted_code("# Autogenerated\n" + code)
    assert not wanted_code(code + "# see HumanEval\n")


@pytest.mark.parametrize("count", [1, 2, 50])
def test_few_documents_leave_text_to_measure_on(
    tmp_path: Path, data_options: DataOptions, count: int
) -> None:
    texts = [
        f"{i}: " + " ".join(str((i + 1) * j) for j in range(100 + 10 * (i == count // 2)))
        for i in range(count)
    ]
    (pool,) = collected(replace(data_options, sources=(jsonl(tmp_path, "few", texts),))).pools
    assert pool.documents
    assert pool.held_out
    # All text is in exactly one of the two.
    assert sum(map(len, [*pool.documents, *pool.held_out])) == sum(map(len, texts))
    assert sum(map(len, pool.held_out)) <= sum(map(len, texts)) / 3
    for held_out in pool.held_out:
        assert not any(held_out in document for document in pool.documents)


def test_text_shorter_than_a_sequence_is_named(
    prepared: Path, data_options: DataOptions, tmp_path: Path
) -> None:
    encoder = Encoder.of_run(load_tokenizer(prepared))
    options = replace(data_options, valid=(), sources=(jsonl(tmp_path, "short", ["The cat."]),))
    found = len(encoder.encode_plain(["The ca"])[0]) + 1
    message = (
        "text: expected at least 33 tokens, for one sequence and the token after it, found "
        f"{found}; give more"
    )
    with pytest.raises(OptionError, match=message):
        prepare(options, tmp_path / "data", 1000, 64, lambda _: None, encoder, min_source_tokens=33)
    assert not list((tmp_path / "data").iterdir())
    prepare(options, tmp_path / "data", 1000, 64, lambda _: None, encoder, min_source_tokens=found)
    assert (tmp_path / "data" / "train.bin").stat().st_size == 2000


def test_text_may_be_shorter_for_want_of_time(
    prepared: Path, data_options: DataOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pronk.train.corpus.collection._CHUNK", 4)
    said: list[str] = []
    encoder = Encoder.of_run(load_tokenizer(prepared))
    prepare(data_options, tmp_path / "whole", 3073, 64, said.append, encoder)
    prepare(
        data_options,
        tmp_path / "short",
        3073,
        64,
        said.append,
        encoder,
        enough=lambda done: done >= 1000,
    )
    whole, short = (
        np.fromfile(tmp_path / name / "train.bin", dtype=np.uint16) for name in ("whole", "short")
    )
    assert len(whole) == 3073 > len(short) >= 1000
    assert whole[: len(short)].tolist() == short.tolist()
    assert said[-1] == f"tokenized {len(short) / 1e6:.1f} M tokens, for want of time"
    # Without the limit, but with the same options, the shortened text is kept.
    prepare(data_options, tmp_path / "short", 3073, 64, said.append, encoder)
    assert (tmp_path / "short" / "train.bin").stat().st_size == 2 * len(short)


@pytest.mark.parametrize(
    ("tokens", "again"), [(2000, ", going through the text again and again"), (500, "")]
)
def test_sizes_are_said_as_they_are(
    prepared: Path, tmp_path: Path, tokens: int, again: str
) -> None:
    text = "".join(
        f"{i:06} is the number of this line, which is of no use at all.\n" for i in range(9)
    )
    (tmp_path / "notes.txt").write_text(text)
    said: list[str] = []
    options = DataOptions((parse_source(f"{tmp_path / 'notes.txt'}=1"),))
    prepare(
        options,
        tmp_path / "data",
        tokens,
        64,
        said.append,
        Encoder.of_run(load_tokenizer(prepared)),
    )
    assert said[1] == f"read {len(text)} bytes; dropped 0 copies, 0 excluded documents"
    assert said[2] == f"tokenizing 0.0 M tokens{again}"
