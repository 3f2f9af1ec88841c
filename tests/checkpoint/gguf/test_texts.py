"""Texts of a GGUF file as bytes: the list of texts that they stand for."""

import numpy as np
import pytest

from pronk.checkpoint.gguf.texts import Texts

WORDS = ["", "a", "▁▁", "été", "ab", "a", "😀b", "", "▁"]


def test_the_texts() -> None:
    texts = Texts.of(WORDS)
    assert list(texts) == WORDS
    assert [texts[number] for number in range(len(texts))] == WORDS
    assert texts[1:4] == WORDS[1:4]
    assert texts.sizes.tolist() == [len(word.encode()) for word in WORDS]
    assert not list(Texts.of([]))


@pytest.mark.parametrize("text", [*WORDS, "b", "▁▁▁", "\u2582"])
def test_find(text: str) -> None:
    texts = Texts.of(WORDS)
    expected = [number for number, word in enumerate(WORDS) if word.startswith(text)]
    assert texts.begin_with(text).tolist() == expected
    assert texts.find(text) == (WORDS.index(text) if text in WORDS else None)


def test_replaced_and_without() -> None:
    texts = Texts.of(WORDS)
    assert list(texts.replaced({2: "long ▁", 7: "c"})) == [
        *("", "a", "long ▁", "été", "ab", "a", "😀b", "c", "▁")
    ]
    assert list(texts.without(np.array([1, 6]))) == ["", "", "▁▁", "été", "ab", "a", "", "", "▁"]
    assert list(texts) == WORDS
