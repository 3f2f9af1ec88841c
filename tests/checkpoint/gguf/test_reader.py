"""GGUF headers: all values of a good file, and errors of one line for bad files."""

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from gguf_files import file_of, finish, pair, tensor_info, text
from pronk.base.errors import CheckpointError
from pronk.checkpoint.gguf.blocks import ARRAY, STRING, TENSOR_TYPES
from pronk.checkpoint.gguf.reader import GgufFile

VALUES: dict[str, Any] = {
    "u8": 200, "i8": -100, "u16": 60_000, "i16": -30_000, "u32": 4_000_000_000, "i32": -2_000_000_000, "f32": 0.25,
    "u64": 2**63, "i64": -(2**62), "f64": 0.1, "yes": True, "no": False, "text": "naïve",
}  # fmt: skip
ARRAYS: dict[str, Any] = {
    "numbers": [1, -2, 3],
    "floats": [0.5, 1.5],
    "flags": [True, False],
    "texts": ["a", "", "ü"],
}


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """Return a file by llama.cpp's writer with every type of value and some tensors."""
    path = tmp_path / "good.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in VALUES.items():
        kind = {"yes": "bool", "no": "bool", "text": "string"}.get(name, name)
        kind = {"u": "uint", "i": "int", "f": "float"}[kind[0]] + kind[1:] if kind == name else kind
        getattr(writer, f"add_{kind}")(f"x.{name}", value)
    for name, values in ARRAYS.items():
        writer.add_array(f"x.{name}", values)
    writer.add_tensor("a", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("b", np.zeros((2, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("c", np.ones(5, np.float16))
    finish(writer)
    return path


def test_metadata(good: Path) -> None:
    file = GgufFile(good)
    assert file.get("general.architecture") == "llama"
    for name, value in (VALUES | ARRAYS).items():
        found = file.get(f"x.{name}")
        assert found == value
        assert type(found) is type(value)
    assert file.get("x.absent") is None
    assert {f"x.{name}" for name in VALUES | ARRAYS} < set(file._pairs)


def test_tensors(good: Path) -> None:
    file = GgufFile(good)
    found = {name: (info.type.name, info.shape, info.size) for name, info in file.tensors.items()}
    assert found == {"a": ("F32", (3, 4), 48), "b": ("Q8_0", (2, 32), 68), "c": ("F16", (5,), 10)}
    theirs = {tensor.name: int(tensor.data_offset) for tensor in gguf.GGUFReader(good).tensors}
    assert theirs == {name: info.start for name, info in file.tensors.items()}


def test_types_are_those_of_llama_cpp() -> None:
    known = {
        int(kind): (kind.name, *size) for kind, size in gguf.constants.GGML_QUANT_SIZES.items()
    }
    assert known == {number: tuple(kind) for number, kind in TENSOR_TYPES.items()}


def test_every_truncation_is_refused(good: Path, tmp_path: Path) -> None:
    content = good.read_bytes()
    path = tmp_path / "cut.gguf"
    # the last 22 bytes are padding
    for size in [*range(0, len(content) - 22, 7), len(content) - 23]:
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"cut.gguf: .*expected .*found") as caught:
            GgufFile(path)
        assert "\n" not in str(caught.value)


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        GgufFile(tmp_path / "absent.gguf")


MANY = 1 << 60
ONE = tensor_info("a", [4], 0, 0)
ALIGNMENT = "general.alignment"
BAD = {
    "another format": (b"PK\3\4" + bytes(40), "expected a GGUF file, found one that begins with"),
    "version 1": (file_of(version=1), "expected version 2 or 3 of GGUF, found 1"),
    "version 4": (file_of(version=4), "expected version 2 or 3 of GGUF, found 4"),
    "big-endian": (
        b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(8),
        "found a big-endian one; convert",
    ),
    "tensors without end": (
        file_of(counts=(MANY, 0)),
        "expected as many as .* found 1152921504606846976 tensors",
    ),
    "pairs without end": (
        file_of(counts=(0, MANY)),
        "and 1152921504606846976 pairs of metadata announced",
    ),
    "a name without end": (
        file_of([struct.pack("<Q", MANY) + bytes(16)]),
        "name of a value in at most 65535 bytes",
    ),
    "a name of other bytes": (
        file_of([pair(b"\xff\xfe", 4, bytes(4))]),
        "name of a value: expected text in UTF-8",
    ),
    "a name of several lines": (
        file_of([pair("a\nb", 4, bytes(4))]),
        r"printable characters, found 'a\\nb'",
    ),
    "a value of no type": (
        file_of([pair("a", 13, bytes(8))]),
        r"a: expected a value of a known type .* found type 13",
    ),
    "a flag of 2": (file_of([pair("a", 7, b"\2")]), "a: expected 0 or 1 for a bool, found 2"),
    "a text beyond the file": (
        file_of([pair("a", STRING, struct.pack("<Q", 99))]),
        "expected 99 bytes at .* truncated",
    ),
    "a value twice": (
        file_of([pair("a", 0, b"1"), pair("a", 0, b"1")]),
        "expected a once, found it twice",
    ),
    "numbers without end": (
        file_of([pair("a", ARRAY, struct.pack("<IQ", 10, MANY))]),
        "expected 9223372036854775808 ",
    ),
    "texts without end": (
        file_of([pair("a", ARRAY, struct.pack("<IQ", STRING, MANY))]),
        "a: expected as many strings as .* found 1152921504606846976 announced",
    ),
    "texts beyond the file": (
        file_of(
            [pair("a", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + struct.pack("<Q", MANY))]
        ),
        "truncated or damaged",
    ),
    "an array of arrays": (
        file_of(
            [pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1) + struct.pack("<IQ", ARRAY, 1) * 100)]
        ),
        "a: expected an array of numbers or strings, found an array of arrays",
    ),
    "an array of no type": (
        file_of([pair("a", ARRAY, struct.pack("<IQ", 77, 1))]),
        "a: .* array of a known type",
    ),
    "architectures": (
        file_of(
            [pair("general.architecture", ARRAY, struct.pack("<IQ", STRING, 1) + text("llama"))]
        ),
        "general.architecture: expected a string, found an array",
    ),
    "a number of a tokenizer": (
        file_of([pair("tokenizer.ggml.model", 4, bytes(4))]),
        "tokenizer.ggml.model: expected a string, found a value of type 4",
    ),
    "many tensors": (
        b"GGUF" + struct.pack("<IQQ", 3, 100_001, 0) + bytes(1 << 22),
        "expected at most 100000 of each, found 100001 tensors",
    ),
    "an alignment of 0": (
        file_of([pair(ALIGNMENT, 4, bytes(4))]),
        "expected a power of two in 8..1048576, found",
    ),
    "an alignment of 48": (
        file_of([pair(ALIGNMENT, 4, struct.pack("<I", 48))]),
        "found general.alignment = 48",
    ),
    "an alignment in words": (
        file_of([pair(ALIGNMENT, STRING, text("x"))]),
        "found general.alignment = b'x'",
    ),
    "no dimensions": (
        file_of(infos=[tensor_info("a", [], 0, 0)], data=bytes(64)),
        r"expected 1..4 dimensions, found 0",
    ),
    "many dimensions": (
        file_of(infos=[text("a") + struct.pack("<I", 2**31)], data=bytes(64)),
        "found 2147483648",
    ),
    "an unknown type": (
        file_of(infos=[tensor_info("a", [4], 99, 0)], data=bytes(64)),
        r"known type, found type 99 \(no type",
    ),
    "a type that is gone": (
        file_of(infos=[tensor_info("a", [4], 4, 0)], data=bytes(64)),
        r"known type, found type 4 \(Q4_2\)",
    ),
    "half a super-block": (
        file_of(infos=[tensor_info("a", [384], 16, 0)], data=bytes(99)),
        r"whole blocks of 256 \(IQ2_XXS\), found \[384\]",
    ),
    "a tensor shorter than its blocks": (
        file_of(infos=[tensor_info("a", [256, 2], 18, 0)], data=bytes(195)),
        "expected all of tensor a, found its 196 bytes",
    ),
    "half a block": (
        file_of(infos=[tensor_info("a", [33], 8, 0)], data=bytes(64)),
        r"whole blocks of 32 \(Q8_0\)",
    ),
    "an empty tensor": (
        file_of(infos=[tensor_info("a", [0, 4], 0, 0)]),
        r"whole blocks of 1 \(F32\), found \[4, 0\]",
    ),
    "a misaligned tensor": (
        file_of(infos=[tensor_info("a", [4], 0, 8)], data=bytes(64)),
        "a multiple of 32, found 8",
    ),
    "a tensor beyond the file": (
        file_of(infos=[ONE], data=bytes(15)),
        "expected all of tensor a, found its 16 bytes",
    ),
    "a tensor far away": (
        file_of(infos=[tensor_info("a", [4], 0, MANY)], data=bytes(64)),
        "expected all of tensor a",
    ),
    "a tensor of absurd size": (
        file_of(infos=[tensor_info("a", [MANY] * 4, 0, 0)], data=bytes(64)),
        "expected all of",
    ),
    "a tensor twice": (
        file_of(infos=[ONE, ONE], data=bytes(64)),
        "expected tensor a once, found it twice",
    ),
    "tensors on top of each other": (
        file_of(
            infos=[tensor_info("a", [16], 0, 0), tensor_info("b", [4], 0, 32)], data=bytes(128)
        ),
        "tensor b: expected a place of its own",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name: str, tmp_path: Path) -> None:
    content, message = BAD[name]
    (tmp_path / "bad.gguf").write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message) as caught:
            GgufFile(tmp_path / "bad.gguf")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert most < 1 << 20, "memory for sizes that the file only announces"


def test_invalid_utf_8_is_refused_when_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(file_of([pair("a", STRING, text(b"\xff"))]))
    file = GgufFile(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match="a: expected text in UTF-8, found invalid bytes"):
        file.get("a")


@pytest.mark.parametrize(
    "strings",
    [[], [""], ["", ""], ["a\0b", "c"], ["\0", ""], ["ü\n", "", "x" * 300], ["a"] * 1000],
    ids=repr,
)
def test_arrays_of_strings(strings: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(file_of([array_of([each.encode() for each in strings])]))
    assert GgufFile(tmp_path / "a.gguf").get("a") == strings


@pytest.mark.parametrize("strings", [[b"\xff"], [b"\0", b"\xff"], [b"\xc3", b"\xbc"]], ids=repr)
def test_arrays_of_invalid_utf_8_are_refused(strings: list[bytes], tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(file_of([array_of(strings)]))
    with pytest.raises(CheckpointError, match="a: expected text in UTF-8, found invalid bytes"):
        GgufFile(tmp_path / "a.gguf").get("a")


def array_of(strings: list[bytes]) -> bytes:
    return pair("a", ARRAY, struct.pack("<IQ", STRING, len(strings)) + b"".join(map(text, strings)))


def test_long_arrays_are_refused_when_they_are_read(tmp_path: Path) -> None:
    """A list of Python objects needs eight times the memory of such a file."""
    count = (1 << 22) + 1
    (tmp_path / "a.gguf").write_bytes(
        file_of([pair("a", ARRAY, struct.pack("<IQ", 1, count) + bytes(count))])
    )
    file = GgufFile(tmp_path / "a.gguf")
    with pytest.raises(
        CheckpointError, match="a: expected at most 4194304 elements, found 4194305"
    ):
        file.get("a")


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions(version: int, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(
        file_of([pair("a", 0, b"\7")], [ONE], bytes(16), version=version)
    )
    file = GgufFile(tmp_path / "a.gguf")
    assert file.get("a") == 7
    assert file.tensors["a"].shape == (4,)


def test_random_bytes_in_the_header(good: Path, tmp_path: Path) -> None:
    """The file is read, or refused in one line."""
    content = good.read_bytes()
    path = tmp_path / "bad.gguf"
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(content)
        for at in rng.integers(0, len(content) - 150, rng.integers(1, 4)):
            damaged[at] = rng.integers(256)
        path.write_bytes(damaged)
        message = message_of(path)
        refused += message is not None
        assert "\n" not in (message or "")
    assert 50 < refused < 400


def message_of(path: Path) -> str | None:
    try:
        file = GgufFile(path)
        for key in file._pairs:
            file.get(key)
    except CheckpointError as error:
        return str(error)
    return None
