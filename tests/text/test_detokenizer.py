"""Text streams: whole characters, equal texts for all chunks, and no part of a stop string."""

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from checkpoints import VOCAB
from pronk.base.errors import OptionError
from pronk.text.stream import IncrementalDecoder, StopScanner, TextStream, prefix_at_end
from pronk.text.tokenizer import Tokenizer

CHARACTERS = "a é ß — 東 京 🙂 \ufffd 👩‍👩‍👧 \n"


@pytest.fixture(scope="module")
def byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    """Return the token id of every byte."""
    alphabet = {token: i for token, i in tokenizer.backend.get_vocab().items() if len(token) == 1}
    known: dict[int, int] = {}
    for text in (chr(point) for point in range(0x800)):
        tokens = [
            alphabet[piece] for token in tokenizer.backend.encode(text).tokens for piece in token
        ]
        known |= dict(zip(text.encode(), tokens, strict=True))
    lone = sorted(set(range(256)) - set(known))
    rest = sorted(
        set(alphabet.values()) - set(known.values()),
        key={i: t for t, i in alphabet.items()}.__getitem__,
    )
    return known | dict(zip(lone, rest, strict=True))


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """Return a tokenizer like Llama 2's: metaspaces, dropped at the start, and byte tokens for
    unknown characters.
    """
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefgh",
        "▁a",
        "▁b",
        "▁the",
    ]
    merges = [("▁", "a"), ("▁", "b")]
    model = models.BPE(
        {token: i for i, token in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend)


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, prompt or [])
    return [*(decoder.push(token) for token in ids), decoder.flush()]


def spell(text: str | bytes, byte_ids: dict[int, int]) -> list[int]:
    return [byte_ids[byte] for byte in (text.encode() if isinstance(text, str) else text)]


@pytest.mark.parametrize("seed", range(40))
def test_streamed_text_equals_the_whole(
    seed: int, tokenizer: Tokenizer, byte_ids: dict[int, int]
) -> None:
    """Random ids give mostly broken characters; some ids are special or unassigned."""
    draw = random.Random(seed)
    prompt = tokenizer.encode("".join(draw.choices(CHARACTERS, k=draw.randrange(12)))) + [
        0
    ] * draw.randrange(3)
    alphabet = [draw.randrange(VOCAB + 3) for _ in range(5)] if seed % 2 else [*range(VOCAB + 3)]
    ids = [draw.choice(alphabet) for _ in range(60)]
    if seed % 4 == 0:
        ids = spell("".join(draw.choices(CHARACTERS, k=30)), byte_ids)
    known = tokenizer.decode(prompt)
    whole = tokenizer.decode(prompt + ids)
    assert whole.startswith(known)
    assert "".join(stream(tokenizer, ids, prompt)) == whole[len(known) :]


def test_characters_are_whole(tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    pieces = stream(tokenizer, spell("é🙂a", byte_ids), spell("ab", byte_ids))
    assert pieces == ["", "é", "", "", "", "🙂", "a", ""]
    assert stream(tokenizer, spell("a🙂".encode()[:-1], byte_ids)) == ["a", "", "", "", "\ufffd"]


def test_prompt_that_ends_inside_a_character(
    tokenizer: Tokenizer, byte_ids: dict[int, int]
) -> None:
    smile = spell("x🙂", byte_ids)
    assert stream(tokenizer, smile[3:], smile[:3]) == ["", "🙂", ""]
    assert stream(tokenizer, spell("!", byte_ids), smile[:3]) == ["!", ""]
    assert stream(tokenizer, [], smile[:3]) == [""]
    # the last five tokens of the prompt begin inside a character
    two = spell("a🙂🙂", byte_ids)
    assert stream(tokenizer, two[-1:], two[:-1]) == ["🙂", ""]


def test_replacement_character_in_the_text(tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    ids = spell("\ufffdb", byte_ids)
    assert "".join(stream(tokenizer, ids, spell("a\ufffd", byte_ids))) == "\ufffdb"


def test_special_tokens_have_no_text(tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    smile = spell("🙂", byte_ids)
    assert stream(tokenizer, [0, smile[0], 0, *smile[1:], VOCAB + 1, 0]) == [
        "",
        "",
        "",
        "",
        "",
        "🙂",
        "",
        "",
        "",
    ]


@pytest.mark.parametrize("junk", [b"\xff", b"\xe2", b"\x80", b"\xe2\x82", b"\xf0\x9f\x98"])
def test_invalid_bytes_do_not_grow_the_window(
    junk: bytes, tokenizer: Tokenizer, byte_ids: dict[int, int]
) -> None:
    """The cost of a token stays bounded, and characters after the invalid bytes are whole."""
    ids = spell(junk * 200 + "🙂".encode() + junk, byte_ids)
    decoder = IncrementalDecoder(tokenizer, spell("a", byte_ids))
    text = ""
    widest = 0
    for token in ids:
        text += decoder.push(token)
        widest = max(widest, len(decoder._window))
    assert text + decoder.flush() == tokenizer.decode(ids)
    assert "🙂" in text
    assert widest < 30


def test_cost_does_not_grow_with_the_text(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = 0
    decode = Tokenizer.decode

    def measured(own: Tokenizer, ids: Sequence[int], *given: Any, **options: Any) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(own, ids, *given, **options)

    monkeypatch.setattr(Tokenizer, "decode", measured)
    decoder = IncrementalDecoder(tokenizer, [5] * 1000)
    for _ in range(1000):
        decoder.push(70)
    assert 0 < longest < 10
    assert len(decoder._window) < 10


@pytest.mark.parametrize("text", ["a the b", "the", " a", "  a  b", "ab é 東京a", "京", "a\nb"])
def test_sentencepiece_spaces(text: str, sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode(text)
    for cut in range(len(ids) + 1):
        known = sentencepiece.decode(ids[:cut])
        if known.endswith("\ufffd"):
            continue
        assert known + "".join(stream(sentencepiece, ids[cut:], ids[:cut])) == text
        assert "".join(stream(sentencepiece, ids[cut:], [1, *ids[:cut]])) == text[len(known) :]


def test_a_word_after_the_prompt_keeps_its_space(sentencepiece: Tokenizer) -> None:
    vocabulary = sentencepiece.backend.get_vocab()
    assert stream(sentencepiece, [vocabulary["▁the"]], [vocabulary["▁a"]]) == [" the", ""]
    assert stream(sentencepiece, [vocabulary["▁the"]], []) == ["the", ""]


def scan(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    scanner = StopScanner(stops)
    shown = ""
    for piece in pieces:
        text, stop = scanner.push(piece)
        shown += text
        if stop is not None:
            assert scanner.push("more") == ("", stop)
            assert scanner.flush() == ""
            return shown, stop
    return shown + scanner.flush(), None


def cut(stops: list[str], text: str) -> tuple[str, str | None]:
    """Cut at the first end of a stop string; of several stop strings that end there, the
    longest.
    """
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("seed", range(300))
def test_all_chunks_are_cut_at_the_same_place(seed: int) -> None:
    draw = random.Random(seed)
    stops = ["".join(draw.choices("ab", k=draw.randint(1, 5))) for _ in range(draw.randint(0, 3))]
    text = "".join(draw.choices("abc" if seed % 2 else "ab", k=draw.randrange(14)))
    expected = cut(stops, text)
    assert scan(stops, [text]) == scan(stops, list(text)) == expected
    for _ in range(5):
        marks = sorted(draw.randrange(len(text) + 1) for _ in range(draw.randrange(5)))
        bounds = [0, *marks, len(text)]
        assert scan(stops, [text[i:j] for i, j in pairwise(bounds)]) == expected


@pytest.mark.parametrize(
    ("stops", "pieces", "returned"),
    [
        (["END"], ["a E", "N", "D b"], [("a ", None), ("", None), ("", "END")]),
        (["END"], ["a E", "x"], [("a ", None), ("Ex", None)]),
        (["ab", "abc"], ["xab"], [("x", "ab")]),
        (["bc", "abc"], ["xab", "c"], [("x", None), ("", "abc")]),
        (["bc", "abcx"], ["abc"], [("a", "bc")]),
        (["\n\n"], ["a\n", "b\n", "\n"], [("a", None), ("\nb", None), ("", "\n\n")]),
        ([], ["abc"], [("abc", None)]),
    ],
)
def test_text_is_withheld_only_while_it_may_be_a_stop_string(
    stops: list[str], pieces: list[str], returned: list[tuple[str, str | None]]
) -> None:
    scanner = StopScanner(stops)
    assert [scanner.push(piece) for piece in pieces] == returned


def test_long_stop_strings_take_time_by_the_length_of_the_text() -> None:
    class Text(str):
        __slots__ = ()
        compared = 0

        def endswith(self, *arguments: Any) -> bool:
            Text.compared += 1
            return super().endswith(*arguments)

    assert prefix_at_end(Text("x a"), "a" * 4000) == "a"
    assert 0 < Text.compared <= len("x a")


def test_empty_stop_string() -> None:
    with pytest.raises(OptionError, match=r"stop: expected non-empty strings, found \['a', ''\]"):
        StopScanner(["a", ""])


def cut_units(stops: list[str], units: list[tuple[str, bool]]) -> tuple[str, str | None]:
    """Cut texts and names (``True``) at the first end of a stop string that begins and ends between
    two of them.

    The result lacks the names. Of several stop strings that end at the same place, the longest
    counts.
    """
    for end in range(len(units) + 1):
        for start in range(end + 1):
            if (found := "".join(text for text, _ in units[start:end])) in stops:
                return "".join(text for text, is_name in units[:start] if not is_name), found
    return "".join(text for text, is_name in units if not is_name), None


@pytest.mark.parametrize("seed", range(400))
def test_names_of_special_tokens_count_as_a_whole(seed: int) -> None:
    """Characters of texts and whole names are the units; texts contain the characters of names,
    too.
    """
    draw = random.Random(seed)
    names = ["<a>", "<b>", "<a><", "b"][: draw.randint(1, 4)]
    alphabet = "ab" if seed % 2 else "ab<>"
    pieces = [
        (draw.choice(names), True) if draw.random() < 0.4 else (draw.choice(alphabet), False)
        for _ in range(14)
    ]
    stops = list[str]()
    for _ in range(draw.randint(0, 3)):
        parts = [
            draw.choice(names) if draw.random() < 0.6 else draw.choice(alphabet)
            for _ in range(draw.randint(1, 4))
        ]
        stops.append("".join(parts))
    scanner = StopScanner(stops)
    shown = ""
    stop = None
    for text, is_name in pieces:
        new, stop = scanner.push_name(text) if is_name else scanner.push(text)
        shown += new
        if stop is not None:
            break
    assert (shown + scanner.flush(), stop) == cut_units(stops, pieces)


@pytest.fixture(scope="module")
def chat_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tests' tokenizer with further special tokens."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.add_special_tokens(["<|im_end|>", "<|file_sep|>", "<think>"])
    return Tokenizer(backend)


@pytest.mark.parametrize(
    ("stops", "text", "shown", "found"),
    [
        (["<|file_sep|>"], "ab<|file_sep|>cd", "ab", "<|file_sep|>"),
        (["<|file_sep|>"], "ab<|im_end|>cd", "abcd", None),
        (["<|im_end|>\n"], "ab<|im_end|>\ncd", "ab", "<|im_end|>\n"),
        (["<|im_end|>\n"], "ab<|im_end|>cd\n", "abcd\n", None),
        (["b<|im_end|>"], "ab<|im_end|>\ncd", "a", "b<|im_end|>"),
        (["b<|im_end|>c"], "ab<|im_end|>b<|im_end|>cd", "ab", "b<|im_end|>c"),
        (["<|im_end|><think>"], "a<|im_end|>b<|im_end|><think>c", "ab", "<|im_end|><think>"),
        (["<", "think", ">"], "ab<think>cd", "abcd", None),  # no part of a name
        (["<think>"], "ab<think>cd", "ab", "<think>"),
        (["🙂<think>"], "a🙂<think>cd", "a", "🙂<think>"),
    ],
)
def test_stop_strings_with_names_of_special_tokens(
    stops: list[str], text: str, shown: str, found: str | None, chat_tokenizer: Tokenizer
) -> None:
    ids = chat_tokenizer.encode(text, add_special_tokens=False)
    stream = TextStream(chat_tokenizer, [5], stops)
    parts = list[str]()
    stop = None
    for token in ids:
        part, stop = stream.push(token)
        parts.append(part)
        if stop is not None:
            break
    else:
        part, stop = stream.flush()
        parts.append(part)
    assert ("".join(parts), stop) == (shown, found)


@pytest.mark.parametrize("name", ["<|im_end|>", "<|file_sep|>"])
def test_a_name_that_is_spelled_with_ordinary_tokens_stops_too(
    name: str, chat_tokenizer: Tokenizer
) -> None:
    spelled = [token for part in name for token in chat_tokenizer.encode(part)]
    assert not chat_tokenizer.special_ids & {*spelled}
    stream = TextStream(chat_tokenizer, [5], [name])
    assert [stream.push(token) for token in spelled] == [("", None)] * (len(name) - 1) + [
        ("", name)
    ]


def test_text_before_a_special_token_is_final_with_that_token(chat_tokenizer: Tokenizer) -> None:
    """Unless a stop string contains both and more: parsers of answers need the text before the
    token.
    """
    letter, end = chat_tokenizer.encode("b<|im_end|>")
    assert TextStream(chat_tokenizer, [5], ["bc"]).push(letter) == ("", None)
    for stop, final in (("bc", "b"), ("b<|im_end|>c", ""), ("<|im_end|>b", "b")):
        stream = TextStream(chat_tokenizer, [5], [stop])
        assert "".join(stream.push(token)[0] for token in (letter, end)) == final


def test_the_name_of_a_token_that_ends_the_text_is_scanned(chat_tokenizer: Tokenizer) -> None:
    """Its text is not part of the output, be it special or not."""
    for name in ("<|im_end|>", "c"):
        first, end = chat_tokenizer.encode(f"b{name}")
        assert TextStream(chat_tokenizer, [5], [f"b{name}"]).push(first) == ("", None)
        for stop, pushed in ((f"b{name}", ("", f"b{name}")), (name, ("", name)), ("x", ("", None))):
            stream = TextStream(chat_tokenizer, [5], [stop])
            stream.push(first)
            assert stream.push(end, is_end=True) == pushed


def test_names_before_min_tokens_do_not_stop(chat_tokenizer: Tokenizer) -> None:
    end = chat_tokenizer.encode("<|im_end|>")[0]
    stream = TextStream(chat_tokenizer, [5], ["<|im_end|>"], min_tokens=3)
    assert [stream.push(end)[1] for _ in range(3)] == [None, None, "<|im_end|>"]
