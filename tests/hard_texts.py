"""A corpus of texts that are hard to split into tokens, made from a seed.

Each text belongs to a category, which names what is hard about it. All choices come from one
generator with a fixed seed, and properties of characters from Unicode 3.2, whose tables Python
keeps in all versions (``unicodedata.ucd_3_2_0``): so all versions of Python make the same corpus.
"""

from __future__ import annotations

import hashlib
import random
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple

NUM_TEXTS = 5000
_SEED = 69
_UNICODE = unicodedata.ucd_3_2_0

_JOINER = "\u200d"
_EMOJI = [
    "\U0001f642", "\U0001f469", "\U0001f468", "\U0001f467", "\U0001f525", "\u2764", "\u2764\ufe0f",
    "\U0001f3f3\ufe0f", "\U0001f308", "\U0001f4bb", "\U0001f680", "\u2705", "\U0001f999", "\u263a",
    "\U0001f1e9\U0001f1ea", "\U0001f1fa", "3\ufe0f\u20e3", "#\u20e3", "\U0001fae0", "\U0001f9d1",
    "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
]  # fmt: skip
_SKIN_TONES = ["\U0001f3fb", "\U0001f3fd", "\U0001f3ff"]
_LINE_ENDS = [
    "\n",
    "\r\n",
    "\r",
    "\n\n",
    "\r\n\r\n",
    "\n\r",
    "\v",
    "\f",
    "\x85",
    "\u2028",
    "\u2029",
]
_SPACES = [
    " ", "  ", "   ", "\t", "\t\t", " \t", "\n", "\r\n", "\u00a0", "\u1680", "\u2002", "\u2009",
    "\u200b", "\u202f", "\u205f", "\u3000", "\ufeff", "\u2060", "\u180e", "\u2581", "\x1c", "\x1f",
]  # fmt: skip
_WORDS = [
    "the", "Hello", "WORLD", "iPhone", "don", "na\u00efve", "caf\u00e9", "Stra\u00dfe", "\u0130zmir",
    "\u01c5ungla", "\u4f60\u597d", "\u6771\u4eac", "\u304b\u306a", "\u30ab\u30bf", "\ud55c\uad6d",
    "\u043f\u0440\u0438\u0432\u0435\u0442", "\u0395\u03bb\u03bb\u03ac\u03c2",
    "\u05e9\u05dc\u05d5\u05dd", "\u0645\u0631\u062d\u0628\u0627", "\u0928\u092e\u0938\u094d\u0924\u0947",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", "\u1780\u17b6\u1793\u17cb", "\u0bb5\u0ba3\u0b95",
    "\u10d2\u10d0\u10db\u10d0", "\u0531\u0580\u0574", "\u12a0\u121b", "Vi\u1ec7t", "\u2c00\u2c30",
]  # fmt: skip
_CONTRACTIONS = [
    "'s", "'S", "'t", "'T", "'re", "'RE", "'Re", "'ve", "'vE", "'m", "'M", "'ll", "'LL", "'d", "'D",
    "\u2019s", "\u2019ll", "'\u017f", "'x", "''s", "'", "n't", "'l", "'r", "'\u017fs", "'\u212a",
]  # fmt: skip
_CODE = [
    "def ", "return", "self.", "(", ")", "{", "}", "[", "]", "    ", "\t", "\n", "\r\n", "=>", "->",
    "::", "!=", "+=", "<<", "&&", "||", "//", "/*", "*/", "#include <a.h>", '"""', "'''", "\\n",
    "0x1F", "1e-9", "3.14", "camelCase", "HTTPServer", "snake_case", "__init__", "$var", "@app",
    "`x`", "~/", "../", "a/b/c\n", "\\", "%s", "<div>", "</div>", "&nbsp;", ";", ",", ":", " ",
]  # fmt: skip
_SPECIAL_NAMES = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>", "<s>", "</s>",
    "<unk>", "<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|end|>",
    "<|assistant|>", "[INST]", "[/INST]", "<think>", "</think>", "<tool_call>", "<0x0A>", "<0xff>",
    "<|start|>", "<|message|>", "<|channel|>", "<\uff5cUser\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<|fim_prefix|>", "<unused7>", "<|turn>", "<turn|>", "[MASK]", "<mask>", "<2mass>", "[@BOS@]",
    "<|reserved_special_token_3|>", "[PAD17]", "<fim_suffix>", "<|extra_3|>",
]  # fmt: skip
_DIGITS = ["0123456789", "\u0660\u0661\u0669", "\u0966\u0967", "\uff10\uff11\uff19", "\u00b2\u00b3",
           "\u00bd\u2153", "\u2160\u216f\u2188", "\u2460\u2473", "\u3007\u4e00", "\U0001d7ce"]  # fmt: skip
_DIGIT_SIGNS = [".", ",", "-", "+", " ", "/", ":", "e", "%", "\u20ac", "_", "\u00a0", "\u00d7", "'"]
_MARKS = ["\u0300", "\u0301", "\u0308", "\u030a", "\u0323", "\u0327", "\u0338", "\u0345", "\u20dd"]
_COMPOSED = (
    "\u00e9\u00c5\u212b\u1ec7\u01d7\ud55c\uac01\u0958\u2126\u0344\u1fbe\ufb01\u2460\uf900\u3060"
)
# First and last code points of blocks, also of scripts that are newer than Unicode 3.2.
_BLOCKS = [
    (0x41, 0x5A), (0x61, 0x7A), (0xC0, 0x17F), (0x370, 0x3FF), (0x400, 0x4FF), (0x531, 0x586),
    (0x5D0, 0x5EA), (0x621, 0x652), (0x905, 0x94D), (0x985, 0x9CD), (0xB85, 0xBCD), (0xE01, 0xE4E),
    (0xE81, 0xECD), (0xF40, 0xF84), (0x1000, 0x103F), (0x10A0, 0x10F0), (0x1200, 0x1248),
    (0x13A0, 0x13F5), (0x1780, 0x17D3), (0x1820, 0x1877), (0x1D00, 0x1D7F), (0x1E00, 0x1FBC),
    (0x2C00, 0x2C5E), (0x2D30, 0x2D67), (0x3041, 0x3096), (0x30A1, 0x30FC), (0x3105, 0x312D),
    (0x3400, 0x34FF), (0x4E00, 0x9FA5), (0xA000, 0xA48C), (0xA640, 0xA66D), (0xAC00, 0xD7A3),
    (0xFB00, 0xFB06), (0xFF21, 0xFF9F), (0x10400, 0x1044F), (0x12000, 0x12399), (0x1D400, 0x1D4FF),
    (0x20000, 0x20FFF),
]  # fmt: skip
_CATEGORIES = (
    "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co".split()
)


class HardText(NamedTuple):
    """A text of the corpus and the name of its category."""

    category: str
    text: str


def hard_texts(count: int = NUM_TEXTS) -> list[HardText]:
    """Return the first ``count`` texts; the categories take turns."""
    draw = random.Random(_SEED)
    makers = list(_MAKERS.items())
    texts = []
    for index in range(count):
        category, make = makers[index % len(makers)]
        texts.append(HardText(category, make(draw)))
    return texts


def corpus_digest(texts: Sequence[HardText]) -> str:
    """Return the SHA-256 of the texts, hexadecimal."""
    hashed = hashlib.sha256()
    for each in texts:
        encoded = each.text.encode()
        hashed.update(len(encoded).to_bytes(4, "little"))
        hashed.update(encoded)
    return hashed.hexdigest()


def ids_digest(ids_of_texts: Iterable[Sequence[int]]) -> str:
    """Return the SHA-256 of the token ids of several texts, hexadecimal.

    Each text has its number of tokens and then their ids, as little-endian numbers of 4 bytes.
    """
    hashed = hashlib.sha256()
    for ids in ids_of_texts:
        for number in (len(ids), *ids):
            hashed.update(number.to_bytes(4, "little"))
    return hashed.hexdigest()


def _joined(draw: random.Random, parts: Sequence[str], most: int) -> str:
    return "".join(draw.choices(parts, k=draw.randrange(1, most)))


def _emoji(draw: random.Random) -> str:
    """Sequences with joiners, skin tones, flags, keycaps and tags."""
    pieces = []
    for _ in range(draw.randrange(1, 12)):
        piece = draw.choice(_EMOJI)
        if draw.random() < 0.3:
            piece += draw.choice(_SKIN_TONES)
        pieces.append(piece + draw.choice(["", "", _JOINER, " ", "a", "\ufe0f", ". "]))
    return "".join(pieces)


def _line_ends(draw: random.Random) -> str:
    """CRLF and other ends of lines between words and spaces."""
    return _joined(
        draw, [*_LINE_ENDS, *_LINE_ENDS, "a", "Word", " ", "  ", "\t", "/", ".", "x/\n"], 24
    )


def _digits(draw: random.Random) -> str:
    """Digits in runs of many lengths, of several scripts, with signs between them."""
    pieces = []
    for _ in range(draw.randrange(1, 7)):
        digits = draw.choice(_DIGITS) if draw.random() < 0.4 else _DIGITS[0]
        pieces.append("".join(draw.choices(digits, k=draw.choice([1, 2, 3, 4, 5, 7, 9, 16, 40]))))
        pieces.append(draw.choice([*_DIGIT_SIGNS, "", draw.choice(_WORDS)]))
    return "".join(pieces)


def _runs(draw: random.Random) -> str:
    """Long runs of one character."""
    pieces = []
    for _ in range(draw.randrange(1, 4)):
        one = draw.choice(
            [*"aAzeE1 \t\n.-=_*#'!/", "\u00e0", "\u4e2d", "\U0001f642", "\u2581", "\r\n"]
        )
        pieces.append(one * draw.choice([7, 16, 17, 33, 64, 127, 200, 400]))
    return draw.choice(["", " ", "x"]).join(pieces)


def _normal_forms(draw: random.Random) -> str:
    """Composed and decomposed characters, and marks in orders that NFC changes."""
    pieces = []
    for _ in range(draw.randrange(1, 10)):
        word = draw.choice(_WORDS) if draw.random() < 0.5 else draw.choice(_COMPOSED)
        form = draw.choice(["NFC", "NFD", "NFKC", "NFKD"])
        pieces.append(_UNICODE.normalize(form, word))
        pieces.append(_joined(draw, _MARKS, 4) if draw.random() < 0.4 else draw.choice(["", " "]))
    return "".join(pieces)


def _special_names(draw: random.Random) -> str:
    """Names of special tokens, whole and cut off, among words and spaces."""
    pieces = []
    for _ in range(draw.randrange(1, 7)):
        name = draw.choice(_SPECIAL_NAMES)
        if draw.random() < 0.3:
            name = name[draw.randrange(0, 3) : len(name) - draw.randrange(0, 3)]
        pieces.append(name)
        pieces.append(draw.choice(["", "", " ", "  ", "\n", "a", "\u2581", draw.choice(_WORDS)]))
    return "".join(pieces)


def _rare(draw: random.Random) -> str:
    """Characters that few vocabularies have, so that they become tokens of bytes."""
    pieces = []
    for _ in range(draw.randrange(1, 16)):
        low, high = draw.choice(
            [(0, 0x1F), (0x7F, 0xFF), (0xE000, 0xE0FF), (0xFFF0, 0xFFFF), (0xF0000, 0xF00FF),
             (0x10FFF0, 0x10FFFF), (0x2FF0, 0x2FFB), (0x1D100, 0x1D126), (0xA490, 0xA4C6), (0xFDD0, 0xFDEF)]
        )  # fmt: skip
        pieces.append(chr(draw.randint(low, high)) + draw.choice(["", "", " ", "a", "<0x41>"]))
    return "".join(pieces)


def _scripts(draw: random.Random) -> str:
    """Words of one script beside words of others."""
    pieces = []
    for _ in range(draw.randrange(1, 8)):
        low, high = draw.choice(_BLOCKS)
        letters = [chr(draw.randint(low, high)) for _ in range(draw.randrange(1, 9))]
        pieces.append("".join(letters) + draw.choice(["", " ", " ", "-", ", "]))
    return "".join(pieces)


def _code(draw: random.Random) -> str:
    """Fragments of programs with indentation."""
    return _joined(draw, _CODE, 40)


def _spaces(draw: random.Random) -> str:
    """White space of all kinds, in runs, at both ends and between words."""
    pieces = [draw.choice(_SPACES) for _ in range(draw.randrange(0, 6))]
    for _ in range(draw.randrange(0, 6)):
        pieces += [draw.choice(["a", "Word", ".", "1", "\u4e2d"]), _joined(draw, _SPACES, 6)]
    return "".join(pieces)


def _categories(draw: random.Random) -> str:
    """Characters of all general categories, in random order."""
    pieces = []
    for _ in range(draw.randrange(1, 20)):
        category = draw.choice(_CATEGORIES)
        character = draw.choice(_characters()[category])
        pieces.append(character + draw.choice(["", "", "", " ", "a", "B"]))
    return "".join(pieces)


def _cases(draw: random.Random) -> str:
    """Contractions, and letters of both cases in one word."""
    pieces = []
    for _ in range(draw.randrange(1, 9)):
        word = draw.choice(_WORDS)
        pieces.append(draw.choice([word, word.upper(), word.lower(), word.capitalize()]))
        pieces.append(draw.choice([*_CONTRACTIONS, " ", "", "-"]))
    return "".join(pieces)


@cache
def _characters() -> dict[str, str]:
    """Return the characters of each general category of Unicode 3.2, without surrogates."""
    found = defaultdict[str, list[str]](list)
    for code in (*range(0xD800), *range(0xE000, 0xE100), *range(0xF900, 0x20000)):
        character = chr(code)
        found[_UNICODE.category(character)].append(character)
    return {category: "".join(characters) for category, characters in found.items()}


_MAKERS: dict[str, Callable[[random.Random], str]] = {
    "emoji": _emoji,
    "line ends": _line_ends,
    "digits": _digits,
    "long runs": _runs,
    "normal forms": _normal_forms,
    "special names": _special_names,
    "rare characters": _rare,
    "mixed scripts": _scripts,
    "code": _code,
    "white space": _spaces,
    "categories": _categories,
    "cases and contractions": _cases,
}
