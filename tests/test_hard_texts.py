"""The corpus of hard texts is the same everywhere, and has what its categories promise."""

from collections import Counter

from hard_texts import NUM_TEXTS, corpus_digest, hard_texts


def test_the_corpus_is_the_one_that_was_compared() -> None:
    texts = hard_texts()
    assert len(texts) == NUM_TEXTS
    assert corpus_digest(texts) == (
        "dbc866ed4daa658bccd7f2f9c2b5b15d4612c64c667fb9492986cbca5009b614"
    )
    counts = Counter(each.category for each in texts)
    assert len(counts) == 12
    assert min(counts.values()) >= 416


def test_the_corpus_is_hard() -> None:
    text = "".join(each.text for each in hard_texts())
    wanted = [
        "\u200d\U0001f469",
        "\r\n\r\n",
        "a" * 400,
        "e\u0301",
        "<|im_end|>",
        "'\u017f",
        "\U0010ffff",
    ]
    assert [each for each in wanted if each not in text] == []
