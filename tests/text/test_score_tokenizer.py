"""A SentencePiece BPE without a table of merges: the ids and texts of the tokenizers package."""

import random
from pathlib import Path

import gguf
import pytest

from pronk.checkpoint.gguf.vocabulary import TokenKind
from pronk.kernels import library
from pronk.text.score_tokenizer import ScoreTokenizer
from pronk.text.tokenizer import Tokenizer

LETTERS = "ab▁é"
dice = random.Random(0)


def random_vocabulary(*, has_bytes: bool, whole: bool) -> dict[str, float]:
    """Return tokens with few different scores, so that the order of equal scores matters.

    Tokens contain names of bytes and the unknown token, which are tokens themselves. If not
    ``whole``, a byte and a letter have no token.
    """
    special = ["<unk>", "<s>", "</s>"]
    last = 256 if whole else 255
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(last)] if has_bytes else []
    singles = [*LETTERS] if whole else [*LETTERS[:-1]]
    longer = ["".join(dice.choices(LETTERS, k=dice.randint(2, 6))) for _ in range(150)]
    mixed = ["<0x21>a", "<0x21><0x21>", "<unk>a", "a<unk>", "aa", "aaa", "aaaa"]
    tokens = dict.fromkeys([*special, *byte_tokens, *singles, *longer, *mixed])
    return {token: float(dice.randint(-4, 0)) for token in tokens}


def write(path: Path, vocabulary: dict[str, float], *, prefix: bool, ends: bool) -> Path:
    """Write a GGUF file with a vocabulary, whose token ``ab`` and run of spaces are added ones."""
    kinds = {"<unk>": TokenKind.UNKNOWN, "<s>": TokenKind.CONTROL, "</s>": TokenKind.CONTROL}
    kinds |= {"bb": TokenKind.USER_DEFINED, "  ": TokenKind.USER_DEFINED}
    vocabulary = {**vocabulary, "bb": -1.0, "  ": -1000.0}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(list(vocabulary))
    writer.add_token_scores(list(vocabulary.values()))
    writer.add_token_types([int(kinds.get(token, TokenKind.NORMAL)) for token in vocabulary])
    writer.add_add_space_prefix(prefix)
    writer.add_add_eos_token(ends)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_text() -> str:
    alphabet = [*"aabb  é!?\n▁😀\xff", "<s>", "</s>", "<unk>", "bb", "aa", "<0x21>"]
    return "".join(dice.choices(alphabet, k=dice.randint(0, 40)))


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize(("has_bytes", "whole"), [(True, True), (True, False), (False, False)])
def test_ids_and_texts_equal_those_of_the_package(
    has_bytes: bool, whole: bool, prefix: bool, tmp_path: Path
) -> None:
    vocabulary = random_vocabulary(has_bytes=has_bytes, whole=whole)
    path = write(tmp_path / "a.gguf", vocabulary, prefix=prefix, ends=whole)
    mine = Tokenizer.load(path).backend
    assert isinstance(mine, ScoreTokenizer)
    theirs = mine._build()
    texts = [random_text() for _ in range(400)]
    lengths = set()
    for text in texts:
        expected = theirs.encode(text)
        found = mine.encode(text)
        assert (found.ids, found.special_tokens_mask) == (
            expected.ids,
            expected.special_tokens_mask,
        ), text
        plain = mine.encode(text, add_special_tokens=False).ids
        assert plain == theirs.encode(text, add_special_tokens=False).ids
        lengths |= {len(mine.id_to_token(number) or "") for number in plain}
        for skips in (True, False):
            decoded = mine.decode(found.ids, skip_special_tokens=skips)
            assert decoded == theirs.decode(found.ids, skip_special_tokens=skips)
    assert len(lengths) > 4, "no merges"
    assert mine.encode(texts[0]).offsets == theirs.encode(texts[0]).offsets
    assert [each.ids for each in mine.encode_batch_fast(texts)] == [
        each.ids for each in theirs.encode_batch(texts)
    ]
    ids = [mine.encode(text).ids for text in texts]
    assert mine.decode_batch(ids) == theirs.decode_batch(ids)


def test_the_vocabulary(tmp_path: Path) -> None:
    vocabulary = random_vocabulary(has_bytes=True, whole=True)
    path = write(tmp_path / "a.gguf", vocabulary, prefix=True, ends=False)
    mine = Tokenizer.load(path).backend
    assert isinstance(mine, ScoreTokenizer)
    theirs = mine._build()
    assert mine.get_vocab() == theirs.get_vocab(with_added_tokens=True)
    assert mine.get_vocab_size() == theirs.get_vocab_size()
    assert mine.to_str() == theirs.to_str()
    for number in (-1, 0, 5, 300, len(vocabulary) + 2):
        expected = theirs.id_to_token(number) if number >= 0 else None
        assert mine.id_to_token(number) == expected
    for token in ("<unk>", "a", "▁▁", "  ", "", "absent"):
        assert mine.token_to_id(token) == theirs.token_to_id(token)
    found = {number: str(token) for number, token in mine.get_added_tokens_decoder().items()}
    added = theirs.get_added_tokens_decoder()
    assert found == {number: str(token) for number, token in added.items()}


def test_without_compiled_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's tokenizer has the same ids."""
    vocabulary = random_vocabulary(has_bytes=True, whole=True)
    path = write(tmp_path / "a.gguf", vocabulary, prefix=True, ends=False)
    texts = [random_text() for _ in range(50)]
    mine = Tokenizer.load(path)
    expected = [mine.encode(text) for text in texts]
    monkeypatch.setattr(library, "installed_library", lambda: tmp_path / "libpronk.so")
    other = Tokenizer.load(path)
    assert not isinstance(other.backend, ScoreTokenizer)
    assert [other.encode(text) for text in texts] == expected
