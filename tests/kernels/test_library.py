"""Loading and self-check of the compiled kernels; errors are one line."""

import ctypes
import platform
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import MakeCheckpoint
from pronk import LLM, OptionError, SamplingParams
from pronk.base.arrays import Array
from pronk.kernels import build, library
from pronk.kernels.library import INSTRUCTION_SETS, VERSION, Kernels, KernelsError, candidates
from pronk.kernels.structures import STRUCTURES, CForward, COp, CWeights
from pronk.kernels.threads import set_threads
from pronk.models import kernels as loading
from pronk.models.kernels import load_kernels, self_check

EVERY = pytest.mark.parametrize("kernels", candidates(), ids=lambda kernels: kernels.name)
OPTIONS = SamplingParams(max_tokens=12, ignore_eos=True)
# batch sizes of the self-check for libraries that are built without optimization
FEW_ROWS = (1, 4, 20, 40)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return the path of a copy of the installed library, which this process has not loaded yet."""
    return Path(shutil.copy(candidates()[0].path, tmp_path / "another.so"))


def one_line(error: pytest.ExceptionInfo[Exception], *words: str) -> None:
    said = str(error.value)
    assert "\n" not in said
    assert all(word in said for word in words), said


def test_candidates_are_ordered_best_first() -> None:
    names = [each.name for each in candidates()]
    assert names == list(reversed(INSTRUCTION_SETS[: len(names)]))
    assert names[-1] == "portable"
    for name in names:
        assert [each.name for each in candidates(name)] == [name]


def test_a_missing_library(tmp_path: Path) -> None:
    with pytest.raises(KernelsError) as caught:
        candidates(path=tmp_path / "none.so")
    one_line(caught, "found no compiled kernels at", "none.so", "install pronk again")


@pytest.mark.parametrize(
    "content", [b"", b"\x7fELF", b"text\nand more text\n" * 1000], ids=["empty", "start", "text"]
)
def test_a_damaged_library(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "damaged.so").write_bytes(content)
    with pytest.raises(KernelsError) as caught:
        candidates(path=tmp_path / "damaged.so")
    expected = "found a part of the file" if content.startswith(b"\x7fELF") else "cannot be loaded"
    one_line(caught, "damaged.so", expected, "install pronk again")


def test_an_unrelated_library() -> None:
    # The shared library of a Python module can be loaded, but has none of the kernels' functions.
    with pytest.raises(KernelsError) as caught:
        candidates(path=Path(np.random.mtrand.__file__))
    one_line(caught, "expected pronk's kernels", "install pronk again")


def test_another_version(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "VERSION", 99)
    with pytest.raises(KernelsError) as caught:
        candidates(path=copy)
    one_line(
        caught, f"expected kernels of version 99, found version {VERSION}", "install pronk again"
    )


@pytest.mark.parametrize("changed", STRUCTURES, ids=lambda each: each.__name__)
def test_structures_of_another_size(
    changed: Any, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library with this version, but a structure of another size, is refused."""

    class TokenView(changed):
        _fields_ = (("more", ctypes.c_int64),)

    monkeypatch.setattr(
        library, "STRUCTURES", [TokenView if each is changed else each for each in STRUCTURES]
    )
    with pytest.raises(KernelsError) as caught:
        candidates(path=copy)
    one_line(caught, "expected structures of", "install pronk again")


@pytest.mark.parametrize("choice", ["sse", "", "AVX2"])
def test_unknown_instruction_sets(choice: str) -> None:
    with pytest.raises(OptionError) as caught:
        candidates(choice)
    one_line(caught, "kernels: expected one of auto, portable, avx2", f"found {choice!r}")


def test_an_instruction_set_that_the_processor_lacks(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library.open_library(copy), "pronk_detect", lambda: 1)
    assert [each.name for each in candidates("auto", copy)] == ["avx2", "portable"]
    with pytest.raises(OptionError) as caught:
        candidates("amx", copy)
    one_line(caught, "kernels: expected one that this processor has (portable, avx2), found 'amx'")


def test_supported_head_sizes() -> None:
    assert [
        size for size in (2, 3, 16, 64, 80, 575, 576, 578) if Kernels.supports_head_dim(size)
    ] == [2, 16, 64, 80, 576]


@pytest.mark.few(1)
@EVERY
def test_every_instruction_set_passes_its_self_check(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, *, is_sanitized: bool
) -> None:
    counts = (1, 3)
    if is_sanitized:
        monkeypatch.setattr(loading, "_BATCH_SIZES", FEW_ROWS)
        counts = (2,)  # three would wait for each other beside another process
    for threads in counts:
        set_threads(threads, 1)
        assert self_check(kernels) is None


def first_number(address: int | None) -> Any:
    return ctypes.cast(address or 0, ctypes.POINTER(ctypes.c_int16))


def nudge(address: int | None) -> None:
    """Flip the last bit of a bf16 number, or a middle bit of a float32."""
    first_number(address)[1] ^= 1


DEFECTS: dict[str, tuple[Callable[[CForward], bool], str]] = {
    "many rows of a product": (
        lambda call: bool(call.logits) and call.rows > 16,
        "a product of .* rows is not that of",
    ),
    "a product": (lambda call: bool(call.logits), "a product of 96 by 80 is off by"),
    "many rows of a text": (
        lambda call: call.segments > 0 and call.rows > 16,
        "a text in one forward pass is not that text",
    ),
    "branches": (
        lambda call: call.segments > 0 and bool(call.segment[0].parents),
        "a path of a draft tree is not that text",
    ),
    "a layer": (lambda call: call.segments > 0, "a layer with attention is off by"),
    "the argmax": (lambda _: False, "the argmax of 33 logits is not that of NumPy"),
    "the noise": (lambda _: False, "a sample from .* tokens is not that of NumPy"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_self_check_finds_defects(defect: str) -> None:
    applies, said = DEFECTS[defect]

    class Wrong(Kernels):
        def run(self, ops: Any, count: int, call: CForward) -> None:
            super().run(ops, count, call)
            if applies(call) and defect in ("a product", "a layer"):
                rows = first_number(call.logits or call.stream)
                # equal defects in all rows, so that rows are consistent
                for row in range(call.rows):
                    width = 2 * (80 if call.logits else call.hidden)
                    rows[row * width + 1] = 0x7000
            elif applies(call):
                nudge(call.logits or call.stream)

        def choose(self, logits: Array, temperature: float, key: int) -> int:
            if defect == "the argmax":
                logits = -logits
            return super().choose(logits, temperature, key ^ (defect == "the noise"))

    best = candidates()[0]
    found = self_check(Wrong(best.library, best.path, best.isa))
    assert found is not None
    assert re.match(said, found), found


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("convolution", "taps", 2),
        ("convolution", "filter_bias", None),
        ("experts", "normalized", 0),
        ("latent", "scale", 1),
    ],
)
def test_the_self_check_finds_wrong_operations(kind: str, field: str, value: int | None) -> None:
    # PRONK_CONVOLVE, PRONK_ROUTE and PRONK_LATENT
    number = {"convolution": 7, "experts": 6, "latent": 13}[kind]

    class Wrong(Kernels):
        def run(self, ops: Any, count: int, call: CForward) -> None:
            bias = np.full(call.hidden, 1e-3, np.float32)
            for op in ops[:count]:
                if op.kind == number:
                    setattr(op, field, bias.ctypes.data if value is None else value)
            super().run(ops, count, call)

    best = candidates()[0]
    assert re.match(
        f"a layer with {kind} is off by", self_check(Wrong(best.library, best.path, best.isa)) or ""
    )


def test_an_instruction_set_that_fails_its_check_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = load_kernels.__wrapped__
    names = [each.name for each in candidates()]
    for good in names:
        monkeypatch.setattr(
            loading,
            "self_check",
            lambda each, good=good: None if each.name == good else "it is wrong",
        )
        assert load("auto").name == good
    monkeypatch.setattr(loading, "self_check", lambda _: "it is wrong")
    with pytest.raises(KernelsError) as caught:
        load("auto")
    one_line(caught, "the portable kernels fail their self-check: it is wrong")


def test_a_passed_self_check_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Per library, instruction set and processor; failures and unwritable folders are not."""
    load = load_kernels.__wrapped__
    checked = []

    def check(kernels: Kernels) -> str | None:
        checked.append(kernels.name)
        return None if kernels.name == "portable" else "it is wrong"

    monkeypatch.setattr(loading, "_passed_marker", loading._passed_marker.__wrapped__)
    monkeypatch.setattr(loading, "self_check", check)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    names = [each.name for each in candidates()]
    # the second time the last one, portable, has passed before
    for expected in (names, names[:-1]):
        checked.clear()
        assert load("auto").name == "portable"
        assert checked == expected
    monkeypatch.setattr(library, "_processor", lambda: "another processor")
    checked.clear()
    load("portable")
    assert checked == ["portable"]
    (tmp_path / "file").touch()
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "file")
    for _ in range(2):
        assert load("portable").name == "portable"
    assert checked == ["portable"] * 3


def test_a_lower_instruction_set_on_request(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_BATCH_SIZES", FEW_ROWS)
    model = LLM(checkpoint("llama"), kernels="portable")
    assert model.kernels == "portable"
    assert model.exact
    with pytest.raises(OptionError, match=r"kernels: expected one of auto, .*, found 'sse'"):
        LLM(checkpoint("llama"), kernels="sse")


def test_workspace_is_reported() -> None:
    kernels = candidates()[0]
    self_check(kernels)
    assert 0 < kernels.library.pronk_workspace() < 1 << 26
    kernels.read(np.zeros(1 << 16, np.float32))
    assert ctypes.sizeof(COp) % 8 == ctypes.sizeof(CWeights) % 8 == 0


@pytest.mark.parametrize("share", [0.0005, 0.01, 0.5, 0.999])
def test_a_truncated_library_is_refused(tmp_path: Path, share: float) -> None:
    """The dynamic loader would crash the process."""
    whole = library.installed_library().read_bytes()
    path = tmp_path / library.installed_library().name
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(KernelsError, match="found a part of the file; install pronk again"):
        library.candidates("auto", path)


@pytest.mark.long
@pytest.mark.slow  # compiles for ten seconds
@pytest.mark.skipif(build.find_compiler() is None, reason="expected a C++ compiler")
def test_a_build_for_one_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_sanitized: bool
) -> None:
    """It lacks the instruction sets that the processor lacks, and has the best set of the whole
    library.

    Here the processor has AVX2 alone, so that all sets that can be left out are left out.
    """
    if is_sanitized:
        pytest.skip("a library of --library may emulate instruction sets that the processor lacks")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda *_, **__: "flags : fma f16c avx2")
        macros, left_out = build._left_out(build.BuildTarget.current())
    monkeypatch.setattr(build, "_left_out", lambda _: (macros, left_out))
    monkeypatch.setattr(loading, "_BATCH_SIZES", FEW_ROWS)
    path = tmp_path / "libpronk.so"
    build.build(path, extra=["-O0", "-DPRONK_FEW_TILES"], native=True)
    found = candidates(path=path)
    small = {"portable", "avx2"} if platform.machine() == "x86_64" else {*INSTRUCTION_SETS}
    assert [each.name for each in found] == [
        each.name for each in candidates() if each.name in small
    ]
    assert self_check(found[0]) is None  # which compares it with the portable kernels
