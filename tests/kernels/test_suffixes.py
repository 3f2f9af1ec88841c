"""Suffix automata in C++: memory and errors; ``tests/drafting`` compares trees with the Python
code.
"""

import gc
import random
from pathlib import Path
from typing import Any

import pytest

from pronk.kernels import library
from pronk.kernels.library import KernelsError
from pronk.kernels.suffixes import (
    CompiledSuffixes,
    NativeTreeBuilder,
    TreeLimits,
    open_suffix_library,
)

LIBRARY: Any = open_suffix_library()


def grown(*texts: str, max_match: int = 4) -> CompiledSuffixes:
    made = CompiledSuffixes(LIBRARY, max_match)
    for text in texts:
        made.extend(text.encode())
        made.end_text()
    return made


def test_equality() -> None:
    assert grown("abcabd") == grown("abcabd")
    pieces = grown("abc")
    assert pieces != grown("abcabd")
    for other in (
        grown("abcabc"),
        grown("abc", "abd"),
        grown("abcabd", max_match=5),
        grown("abcabda"),
    ):
        assert other != grown("abcabd")
    assert grown("abc") != "abc"
    assert repr(grown("abc")) == "CompiledSuffixes(max_match=4, num_tokens=3)"


@pytest.mark.parametrize(("letters", "most"), [(1, 45), (2, 75), (8, 75), (4096, 200)])
def test_bytes_per_token(letters: int, most: int) -> None:
    dice = random.Random(letters)
    made = CompiledSuffixes(LIBRARY, 16)
    made.extend(dice.randrange(letters) for _ in range(8192))
    assert 20 < made.nbytes / made.num_tokens < most
    before = made.nbytes
    made.end_text()
    again = random.Random(letters)
    made.extend(again.randrange(letters) for _ in range(8192))
    assert made.nbytes == before
    assert made.num_tokens == 2 * 8192


def test_memory_is_freed() -> None:
    freed = list[int]()

    class Counting:
        """Records the handles that the library frees."""

        def __getattr__(self, name: str) -> Any:
            return getattr(LIBRARY, name)

        def pronk_suffixes_free(self, handle: int) -> None:
            freed.append(handle)
            LIBRARY.pronk_suffixes_free(handle)

    handles = [CompiledSuffixes(Counting(), 4).handle for _ in range(3)]
    gc.collect()
    assert sorted(freed) == sorted(handle for handle in handles if handle is not None)


def test_exceptions_of_a_prior_propagate() -> None:
    """A value that could not be computed is not cached: the next call computes it."""
    made = grown("abcabc")
    raised = list[int]()
    fails = True

    def prior(way: int, depth: int) -> float:
        if fails:
            raised.append(depth)
            raise KeyError(depth)
        return 0.5

    builder = NativeTreeBuilder(LIBRARY, prior, 4.0)
    limits = TreeLimits(3, 3, 1, 4.0, 0.0)
    with pytest.raises(KeyError, match="1"):
        builder.build([made], b"abc", limits)
    assert raised == [1, 2, 3], "the library calls the prior again after an exception"
    fails = False
    assert builder.build([made], b"abc", limits).gains == [1.0, 0.5, 0.25, 0.125]


def test_tokens_are_appended_once_after_an_interruption() -> None:
    """Ctrl-C may come after the library has appended tokens, and before Python counts them."""
    made, want = CompiledSuffixes(LIBRARY, 4), CompiledSuffixes(LIBRARY, 4)
    made.extend(b"abc")
    want.extend(b"abcabc")
    builder = NativeTreeBuilder(LIBRARY, lambda way, depth: 0.5, 4.0)
    limits = TreeLimits(3, 3, 1, 4.0, 0.0)
    first = builder.build([made], b"cab", limits, b"ab")
    assert (made.num_known, made.num_tokens) == (5, 5)
    assert first.tokens == [*b"bcab"]
    made.num_known = 3
    again = builder.build([made], b"abc", limits, b"abc")
    assert (made.num_known, made.num_tokens) == (6, 6)
    assert made == want
    assert again.tokens == [*b"cabc"]


def test_failed_allocations_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    class FullMemory:
        """A library whose allocations fail."""

        def __getattr__(self, name: str) -> Any:
            return {"pronk_suffixes_new": lambda _: None}.get(name) or getattr(LIBRARY, name)

    with pytest.raises(MemoryError):
        CompiledSuffixes(FullMemory(), 4)
    made = grown("abc")
    monkeypatch.setattr(
        made, "_library", type("Full", (), {"pronk_suffixes_extend": lambda *_: -1})()
    )
    with pytest.raises(MemoryError):
        made.extend((1,))


def test_a_missing_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "installed_library", lambda: tmp_path / "libpronk.so")
    with pytest.raises(KernelsError, match=r"found no compiled kernels at .*libpronk_suffix\.so"):
        open_suffix_library()
