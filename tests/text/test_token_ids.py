"""Token ids of the corpus of hard texts, and the texts of these ids, for several vocabularies.

``token_ids.json`` has digests of the ids by pronk, by the original tokenizer and by llama.cpp,
which ``tools/token_ids.py`` prints. ``docs/families.md`` explains where they differ. A vocabulary
is read from a model in ``models/`` or in the cache, or from the folder of ``--vocabularies``.
"""

import json
import random
import unicodedata
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from tokenizers import pre_tokenizers

from hard_texts import corpus_digest, hard_texts, ids_digest
from pronk.checkpoint.hub.cache import find_cached
from pronk.checkpoint.hub.clone_models import clone_model
from pronk.checkpoint.hub.names import known_models
from pronk.text.stream import IncrementalDecoder
from pronk.text.tokenizer import Tokenizer

TABLE = json.loads((Path(__file__).parent / "token_ids.json").read_bytes())
NAMES = [*TABLE["vocabularies"]]
NUM_STREAMED = 600


class Encoded(NamedTuple):
    """A tokenizer, and its ids of each text of the corpus."""

    tokenizer: Tokenizer
    ids: list[list[int]]


def find_vocabulary(name: str, folder: Path | None) -> Path:
    """Return the model or GGUF file that has a vocabulary; skip the test if there is none."""
    row = TABLE["vocabularies"][name]
    known = known_models().get(row["model"])
    places = [
        clone_model(row["model"]),
        None if known is None else find_cached(known.model),
        None if folder is None else folder / row["file"],
    ]
    for place in places:
        if place is not None and place.exists():
            return place
    pytest.skip(f"NOT COMPARED: {name}: give --vocabularies FOLDER with {row['file']}")


@cache
def encode(path: Path) -> Encoded:
    tokenizer = Tokenizer.load(path)
    texts = [each.text for each in hard_texts()]
    return Encoded(tokenizer, tokenizer.encode_batch(texts, add_special_tokens=False))


@pytest.fixture(params=NAMES)
def vocabulary(request: pytest.FixtureRequest) -> tuple[str, Encoded]:
    name = request.param
    folder = request.config.getoption("--vocabularies")
    return name, encode(find_vocabulary(name, folder))


def test_ids(vocabulary: tuple[str, Encoded]) -> None:
    name, encoded = vocabulary
    assert ids_digest(encoded.ids) == TABLE["vocabularies"][name]["pronk"]


def test_the_table() -> None:
    """Digests belong to this corpus, and pronk follows every original tokenizer."""
    assert corpus_digest(hard_texts()) == TABLE["corpus"]
    rows = TABLE["vocabularies"].values()
    compared = [row for row in rows if "original" in row]
    assert len(compared) >= 5
    assert all(row["original"] == row["pronk"] for row in compared)
    assert len({row["pronk"] for row in rows}) == len(rows)


def test_decoding(vocabulary: tuple[str, Encoded]) -> None:
    """Byte-level ids have the text that was encoded, normalized as the tokenizer does."""
    name, (tokenizer, ids) = vocabulary
    alphabet = {*pre_tokenizers.ByteLevel.alphabet()}
    missing = alphabet - {*tokenizer.backend.get_vocab()}
    if missing:
        pytest.skip(f"{name}: {len(missing)} of 256 bytes have no token")
    # Added tokens of DeepSeek LLM, such as ÿ, which tokenizers decodes as the byte that they spell.
    added = tokenizer.backend.get_added_tokens_decoder().values()
    ambiguous = [token.content for token in added if alphabet.issuperset(token.content)]
    ambiguous = [text for text in ambiguous if not text.isascii()]
    form = "NFC" if tokenizer.backend.normalizer is not None else None
    for each, text_ids in zip(hard_texts(), ids, strict=True):
        expected = each.text if form is None else unicodedata.normalize(form, each.text)
        if not any(character in expected for character in ambiguous):
            assert tokenizer.decode(text_ids, skip_special_tokens=False) == expected


def test_streaming(vocabulary: tuple[str, Encoded]) -> None:
    """A prompt of random length and the streamed rest have the text of all ids together.

    The prompt may end inside a character in byte-level vocabularies. The others decode an
    incomplete run of byte tokens to replacement characters only.
    """
    _, (tokenizer, ids) = vocabulary
    draw = random.Random(0)
    num_inside = 0
    for text_ids in draw.sample(ids, NUM_STREAMED):
        cut = draw.randrange(len(text_ids) + 1)
        known = tokenizer.decode(text_ids[:cut], skip_special_tokens=False)
        while not tokenizer.joins_texts and known.endswith("\ufffd"):
            cut -= 1
            known = tokenizer.decode(text_ids[:cut], skip_special_tokens=False)
        decoder = IncrementalDecoder(tokenizer, text_ids[:cut], shows_names=True)
        rest = [decoder.push(token) for token in text_ids[cut:]]
        streamed = "".join([*rest, decoder.flush()])
        whole = tokenizer.decode(text_ids, skip_special_tokens=False)
        num_inside += known.endswith("\ufffd")
        assert known.rstrip("\ufffd") + streamed == whole
    assert bool(num_inside) == tokenizer.joins_texts
