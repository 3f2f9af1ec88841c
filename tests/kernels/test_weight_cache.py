"""Packed weights in a cache file: the bits of packing, in every later load; a worthless file is
replaced.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import MakeCheckpoint
from gguf_files import convert
from pronk import LLM, SamplingParams
from pronk.base.arrays import Array, as_bytes
from pronk.base.errors import OptionError
from pronk.kernels.weight_cache import WeightCache, remove_orphans

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}
KINDS = {
    "": "Q4_K",
    "attn_v": "Q6_K",
    "attn_output": "Q5_0",
    "token_embd": "Q8_0",
    "ffn_down": "F16",
}


@pytest.fixture
def model(checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    return convert(checkpoint("llama", **SIZES), tmp_path / "model.gguf", KINDS)


def packed(llm: LLM) -> list[Array]:
    decoder = llm.engine.runner.decoder
    assert decoder.table is not None
    return [as_bytes(linear.packed.data) for linear in (decoder.table, *decoder.linears())]


def same(one: LLM, other: LLM) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(packed(one), packed(other), strict=True))


def no_packing(*_: object) -> None:
    raise AssertionError


def test_a_later_load_maps_the_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LLM(model)
    folder = tmp_path / "cache"
    first = LLM(model, weight_cache=folder)
    (file,) = folder.iterdir()
    written = file.stat()
    matrices = sum(data.nbytes for data in packed(plain))
    # F16 matrices are not kept
    assert matrices / 2 < written.st_size < matrices + 4096 * (2 + len(packed(plain)))
    monkeypatch.setattr(
        plain.engine.runner.decoder.kernels.library, "pronk_pack_blocks", no_packing
    )  # type: ignore[union-attr]
    with pytest.raises(AssertionError):
        LLM(model)
    later = LLM(model, weight_cache=str(folder))
    monkeypatch.undo()
    assert same(plain, first)
    assert same(plain, later)
    texts = [
        llm.generate("a b c", PARAMS, drafter="autoregressive").text
        for llm in (plain, first, later)
    ]
    assert texts[0] == texts[1] == texts[2]
    assert file.stat().st_mtime_ns == written.st_mtime_ns


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:5000])


def long_header(file: Path) -> None:
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])


def other_header(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'{"source"', b'{"sourc!"', 1))


def no_json(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'{"source"', b'{source""', 1))


def nested(file: Path) -> None:
    text = b"[" * 100_000
    file.write_bytes(len(text).to_bytes(8, "little") + text)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def far_matrices(file: Path) -> None:
    """Move the first matrix behind the end of the file."""
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    next(iter(header["matrices"].values()))[0] = (len(data) // 4096 + 1) * 4096
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + len(text) :])


@pytest.mark.parametrize(
    "damage", [truncated, long_header, other_header, no_json, nested, empty, far_matrices]
)
def test_a_damaged_file_is_replaced(
    model: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    plain = LLM(model)
    folder = tmp_path / "cache"
    LLM(model, weight_cache=folder)
    (file,) = folder.iterdir()
    good = file.read_bytes()
    damage(file)
    assert same(plain, LLM(model, weight_cache=folder))
    assert file.read_bytes() == good
    assert list(folder.iterdir()) == [file]


def test_weights_of_a_changed_model_are_packed_again(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    LLM(model, weight_cache=folder)
    data = bytearray(model.read_bytes())
    data[-100] ^= 1  # a code of the last matrix
    model.write_bytes(data)
    os.utime(model, ns=(1, 1))
    assert same(LLM(model), LLM(model, weight_cache=folder))
    assert len(list(folder.iterdir())) == 1


def test_a_full_disk_is_a_warning(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.write_text("a file, not a folder")
    with pytest.warns(UserWarning, match="cannot keep the packed weights"):
        llm = LLM(model, weight_cache=folder)
    assert same(llm, LLM(model))


def identity(path: Path) -> list[tuple[str, int, int, int]]:
    return [(str(path), 1, 2, 3)]


def test_matrices_are_found_by_name_and_size(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, identity(tmp_path))
    cache.add("a", np.arange(100, dtype=np.uint8))
    cache.save()
    found = WeightCache(tmp_path, identity(tmp_path))
    assert found.find("a", 99) is None
    assert found.find("b", 100) is None
    matrix = found.find("a", 100)
    assert matrix is not None
    assert matrix.tolist() == list(range(100))
    assert WeightCache(tmp_path, [(str(tmp_path), 1, 2, 4)]).find("a", 100) is None


def test_new_matrices_join_those_of_the_file(tmp_path: Path) -> None:
    for number in range(3):
        cache = WeightCache(tmp_path, identity(tmp_path))
        cache.add(f"m{number}", np.full(5000, number, np.uint8))
        cache.save()
    found = WeightCache(tmp_path, identity(tmp_path))
    for number in range(3):
        matrix = found.find(f"m{number}", 5000)
        assert matrix is not None
        assert np.unique(matrix).tolist() == [number]


def write_packed(folder: Path, name: str, size: int = 1 << 49) -> Path:
    """Write 20,000 packed bytes of a model file ``name`` beside the folder; return their file."""
    source = folder.parent / name
    source.touch()
    cache = WeightCache(folder, identity(source), size)
    cache.add("a", np.zeros(20_000, np.uint8))
    cache.save()
    return cache.path


def test_the_least_recently_used_files_make_room(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    files = [write_packed(folder, name) for name in "abc"]
    for number, file in enumerate(files):
        os.utime(file, ns=(number, number))
    # the first file is used again
    assert WeightCache(folder, identity(tmp_path / "a")).find("a", 20_000) is not None
    last = write_packed(folder, "d", size=75_000)
    assert sorted(folder.iterdir()) == sorted([files[0], files[2], last])


def test_weights_larger_than_the_folder_are_not_kept(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    other = write_packed(folder, "a")
    with pytest.warns(UserWarning, match="not kept: expected at most 20000 bytes, found 20480"):
        write_packed(folder, "b", size=20_000)
    assert list(folder.iterdir()) == [other]


def test_files_of_removed_models_are_orphans(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    kept = write_packed(folder, "a")
    orphan = write_packed(folder, "b")
    size = orphan.stat().st_size
    (tmp_path / "b").unlink()
    damaged = folder / "0.packed"
    damaged.write_bytes(b"\xff" * 100)
    (folder / "another file").touch()
    assert remove_orphans(folder) == size + 100
    assert sorted(folder.iterdir()) == sorted([kept, folder / "another file"])
    assert remove_orphans(tmp_path / "missing") == 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"weight_cache_size": "1GiB"}, "weight_cache_size: expected weight_cache with it"),
        (
            {"weight_cache_size": "much", "weight_cache": True},
            "weight_cache_size: expected a positive number of bytes",
        ),
    ],
)
def test_invalid_sizes(model: Path, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        LLM(model, **options)


def test_models_without_blocks_are_refused(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="weight_cache: expected a GGUF file"):
        LLM(checkpoint("llama"), weight_cache=tmp_path)


@pytest.mark.parametrize("value", ["", None, 5])
def test_invalid_values(model: Path, value: object) -> None:
    with pytest.raises(OptionError, match="weight_cache: expected True, False or a folder, found "):
        LLM(model, weight_cache=value)  # type: ignore[arg-type]
