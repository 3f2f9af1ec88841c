"""Translation between two vocabularies: shared tokens, and re-encoding of a text that grows and
changes.
"""

import random

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken

from drafting.from_draft.vocabularies import OTHER_TEXT, byte_level, metaspace, word_piece
from pronk.base.errors import OptionError
from pronk.checkpoint.hub.clone_models import tiny_model
from pronk.drafting.shared.vocabulary.reencoder import Reencoder
from pronk.drafting.shared.vocabulary.translation import Translation
from pronk.text.spelling import spell
from pronk.text.tokenizer import Tokenizer

TINY = tiny_model()

TOKENIZERS = {
    "bytes": byte_level(),
    "bytes 2": byte_level(440, OTHER_TEXT, "<|endoftext|>"),
    "prefix": byte_level(400, add_prefix_space=True),
    "metaspace": metaspace(),
    "llama 2": metaspace(440, OTHER_TEXT, legacy=True),
    "no bytes": metaspace(fallback=False),
}
TARGETS = ["bytes", "bytes 2", "prefix", "metaspace", "llama 2"]
PIECES = [
    "the", " the", " fox", "es", " sleep", "\n", "\n\n", "    return", " x", "  ", "\t", ".", ", and", "ü", " Köln",
    "—", "🙂", "👩‍👩‍👧", "東京", " 東", "é", "e\u0301", "\r\n", "(10)", " 12", "=", "Ġ", "<0x0A>", "\x00", "\u00a0",
]  # fmt: skip


def between(
    target: Tokenizer,
    draft: Tokenizer,
    target_size: int | None = None,
    draft_size: int | None = None,
) -> Translation:
    return Translation.between(
        "draft", target, target_size or target.vocab_size, draft, draft_size or draft.vocab_size
    )


def encode(translation: Translation, tokens: list[int]) -> list[int]:
    """Return a whole text in the draft's ids; parts that the draft cannot encode are left out."""
    reencoder = translation.make_reencoder()
    if reencoder is None:  # equal vocabularies
        return tokens
    reencoder.update(tokens)
    return reencoder.tokens


def random_text(draw: random.Random, pieces: int = 40) -> str:
    return "".join(draw.choices(PIECES, k=draw.randrange(1, pieces)))


def as_text(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """Decode tokens without the space that the tokenizer "prefix" puts before a text."""
    text = tokenizer.decode(tokens)
    return text.removeprefix(" ") if tokenizer is TOKENIZERS["prefix"] else text


def as_bytes(tokenizer: Tokenizer, tokens: list[int]) -> bytes:
    """Return the decoded bytes, also of incomplete characters, without leading spaces."""
    texts = spell(tokenizer).texts
    return b"".join(texts.get(token, b"") for token in tokens).lstrip(b" ")


@pytest.mark.parametrize("draft", TARGETS)
@pytest.mark.parametrize("target", TARGETS)
def test_the_text_is_preserved(target: str, draft: str) -> None:
    target_tokenizer = TOKENIZERS[target]
    draft_tokenizer = TOKENIZERS[draft]
    translation = between(target_tokenizer, draft_tokenizer)
    draw = random.Random(f"{target} {draft}")
    for _ in range(60):
        text = "a" + random_text(draw)
        tokens = target_tokenizer.encode(text)
        found = encode(translation, tokens)
        assert as_text(draft_tokenizer, found) == as_text(target_tokenizer, tokens) == text
        assert found == draft_tokenizer.encode(text)
        assert not translation.identical or found == tokens


@pytest.mark.parametrize(
    ("target", "draft"), [("bytes", "bytes 2"), ("metaspace", "bytes"), ("bytes", "llama 2")]
)
def test_incremental_encoding_is_close_to_encoding_all_at_once(target: str, draft: str) -> None:
    """The text grows by one step or several, and its end changes."""
    target_tokenizer = TOKENIZERS[target]
    draft_tokenizer = TOKENIZERS[draft]
    translation = between(target_tokenizer, draft_tokenizer)
    draw = random.Random(f"{target} {draft}")
    exact = steps = 0
    for _ in range(4):
        reencoder = translation.make_reencoder()
        tokens: list[int] = []
        while len(tokens) < 600:
            before = list(reencoder.tokens)
            known = draw.randrange(len(tokens) + 1)
            del tokens[max(known, len(tokens) - draw.choice((0, 0, 1, 5, 100))) :]
            tokens += target_tokenizer.encode("a" + random_text(draw), add_special_tokens=False)[
                draw.randrange(3) :
            ]
            unchanged = reencoder.update(tokens, known)
            found = reencoder.tokens
            assert before[:unchanged] == found[:unchanged]
            assert (
                before[unchanged : unchanged + 1] != found[unchanged : unchanged + 1]
                or len(before) == unchanged
            )
            assert as_bytes(draft_tokenizer, found) == as_bytes(target_tokenizer, tokens)
            exact += found == encode(translation, tokens)
            steps += 1
    assert exact > 0.9 * steps


def test_the_state_depends_on_the_current_tokens_alone() -> None:
    translation = between(TOKENIZERS["bytes"], TOKENIZERS["metaspace"])
    draw = random.Random(0)
    ids = TOKENIZERS["bytes"].encode("".join(random_text(draw) for _ in range(40)))
    forward = translation.make_reencoder()
    rolled_back = translation.make_reencoder()
    for stop in range(1, 400):
        forward.update(ids[:stop])
        rolled_back.update(ids[:stop] + ids[1000 - stop : 1100 - stop])
        rolled_back.update(ids[:stop])
    assert forward.tokens == rolled_back.tokens == encode(translation, ids[:399])


def test_a_step_re_encodes_only_the_end_of_a_long_text() -> None:
    target = TOKENIZERS["bytes"]
    ids = target.encode(
        "It is the one thing that the other animals in the forest have not. " * 1000
    )
    reencoder = between(target, TOKENIZERS["metaspace"]).make_reencoder()
    reencoder.update(ids)
    assert len(ids) > 20_000
    calls: list[str] = []
    assert reencoder._recoding is not None
    encode = reencoder._recoding.encoder.encode

    def count(text: str, *, add_special_tokens: bool = True) -> list[int]:
        calls.append(text)
        return encode(text, add_special_tokens=add_special_tokens)

    reencoder._recoding.encoder.encode = count  # type: ignore[method-assign]
    for step in range(100):
        ids += ids[step : step + 1]
        reencoder.update(ids, len(ids) - 1)
    assert 100 <= len(calls) < 120
    assert max(map(len, calls)) < 400


@pytest.mark.parametrize("draft", ["bytes 2", "metaspace", "no bytes"])
def test_incomplete_characters(draft: str) -> None:
    """Incomplete characters are encoded byte by byte, or not at all without byte tokens."""
    target = TOKENIZERS["bytes"]
    single = {text[0]: token for token, text in spell(target).texts.items() if len(text) == 1}
    ids = [single[byte] for byte in "a🙂b".encode()]
    reencoder = between(target, TOKENIZERS[draft]).make_reencoder()
    current = []
    for stop in range(1, len(ids) + 1):
        reencoder.update(ids[:stop])
        current.append(reencoder.is_complete)
    whole = draft != "no bytes"
    assert current == [True, whole, whole, whole, True, True]
    if whole:
        assert TOKENIZERS[draft].decode(reencoder.tokens) == "a🙂b"


def test_invalid_utf_8() -> None:
    target = TOKENIZERS["bytes"]
    draft = TOKENIZERS["bytes 2"]
    draw = random.Random(0)
    translation = between(target, draft)
    for _ in range(20):
        tokens = [draw.randrange(1, 257) for _ in range(400)]
        reencoder = translation.make_reencoder()
        for stop in range(0, 401, 7):
            reencoder.update(tokens[:stop])
            assert draft.decode(reencoder.tokens) == target.decode(tokens[:stop])


def test_a_tokenizer_that_normalizes_the_text_is_re_encoded_in_parts() -> None:
    """If lower case changes byte offsets, texts are cut before a character, at least after
    ``_MAX_INTERVAL`` tokens.
    """
    draft = byte_level()
    draft.backend.normalizer = tokenizers.normalizers.Lowercase()
    translation = between(TOKENIZERS["bytes 2"], draft)
    text = "Ein kurzer Satz mit İ und mehr. " * 60
    tokens = TOKENIZERS["bytes 2"].encode(text)
    reencoder = translation.make_reencoder()
    for stop in range(1, len(tokens) + 1):
        reencoder.update(tokens[:stop], stop - 1)
    assert draft.decode(reencoder.tokens) == text.lower()
    assert len(reencoder._marks) > 2


def test_special_tokens_are_mapped_by_name() -> None:
    target = byte_level(specials=("<|user|>", "<|only here|>"))
    draft = byte_level(440, OTHER_TEXT, "<|endoftext|>", specials=("<|user|>",))
    translation = between(target, draft)
    assert [translation.to_draft(i) for i in (0, 1, 2)] == [0, 1, None]
    ids = [1, *target.encode("the fox", add_special_tokens=False), 2, 0]
    assert encode(translation, ids) == [1, *draft.encode("the fox"), 0]
    reencoder = translation.make_reencoder()
    current = []
    for stop in range(len(ids) + 1):
        reencoder.update(ids[:stop])
        current.append(reencoder.is_complete)
    assert current == [False, *[True] * (len(ids) - 2), False, True]
    written = target.encode("<|user|>")
    assert written == [1]
    spelled = [target.backend.token_to_id(c) for c in "<|endoftext|>"]
    assert encode(translation, spelled) != [0]
    assert draft.decode(encode(translation, spelled)) == "<|endoftext|>"


def test_the_draft_gets_its_own_bos_token() -> None:
    bytes_ = TOKENIZERS["bytes"]
    spaced = TOKENIZERS["metaspace"]
    assert encode(between(bytes_, spaced), bytes_.encode("the")) == spaced.encode("the")
    assert spaced.encode("the")[0] == spaced.bos_id
    assert encode(between(spaced, bytes_), spaced.encode("the")) == bytes_.encode("the")
    other = TOKENIZERS["llama 2"]
    assert encode(between(spaced, other), spaced.encode("the")) == other.encode("the")
    reencoder = between(spaced, other).make_reencoder()
    reencoder.update([1])
    assert (reencoder.tokens, reencoder.is_complete) == ([1], True)


@pytest.mark.parametrize("draft", list(TOKENIZERS))
@pytest.mark.parametrize("target", TARGETS)
def test_shared_tokens_have_the_same_text(target: str, draft: str) -> None:
    target_tokenizer = TOKENIZERS[target]
    draft_tokenizer = TOKENIZERS[draft]
    translation = between(
        target_tokenizer,
        draft_tokenizer,
        target_tokenizer.vocab_size + 5,
        draft_tokenizer.vocab_size + 9,
    )
    logits = np.arange(2.0 * (draft_tokenizer.vocab_size + 9), dtype=np.float32).reshape(2, -1)
    found = translation.to_target(logits)
    assert found.shape == (2, target_tokenizer.vocab_size + 5)
    pairs = {
        t: d
        for t in range(target_tokenizer.vocab_size)
        if (d := translation.to_draft(t)) is not None
    }
    assert len(pairs) > 60
    assert len(set(pairs.values())) == len(pairs)
    front = (
        target_tokenizer.encode("a", add_special_tokens=False),
        draft_tokenizer.encode("a", add_special_tokens=False),
    )
    for token, other in pairs.items():
        assert np.array_equal(found[:, token], logits[:, other])
        assert (token in target_tokenizer.special_ids) == (other in draft_tokenizer.special_ids)
        if token not in target_tokenizer.special_ids:
            assert (
                target_tokenizer.decode([*front[0], token]).lstrip()
                == draft_tokenizer.decode([*front[1], other]).lstrip()
            )
    if not translation.identical:
        missing = [token for token in range(target_tokenizer.vocab_size + 5) if token not in pairs]
        assert bool((found[:, missing] == -np.inf).all())


def test_end_tokens_are_mapped_to_each_other() -> None:
    assert between(TOKENIZERS["bytes"], TOKENIZERS["bytes 2"]).to_draft(0) == 0
    assert between(TOKENIZERS["bytes"], TOKENIZERS["metaspace"]).to_draft(0) == 2
    assert between(TOKENIZERS["metaspace"], TOKENIZERS["llama 2"]).to_draft(2) == 2


def test_padded_and_added_tokens_do_not_change_ids() -> None:
    tiny = Tokenizer.load(TINY)
    extended = Tokenizer.load(TINY)
    extended.backend.add_special_tokens([AddedToken("<|image|>", special=True)])
    logits = np.random.default_rng(0).standard_normal((3, 4160), np.float32)

    same = between(tiny, tiny)
    assert same.identical
    assert np.shares_memory(same.to_target(logits[:, :4096]), logits)

    padded = between(tiny, tiny, 4096, 4160)
    assert padded.identical
    assert np.shares_memory(padded.to_target(logits), logits)
    assert np.array_equal(padded.to_target(logits), logits[:, :4096])

    shorter = between(tiny, tiny, 4160, 4096)
    found = shorter.to_target(logits[:, :4096])
    assert np.array_equal(found[:, :4096], logits[:, :4096])
    assert bool((found[:, 4096:] == -np.inf).all())
    assert [shorter.to_draft(i) for i in (0, 4095, 4096)] == [0, 4095, None]

    more = between(extended, tiny, 4160, 4160)
    assert more.identical
    found = more.to_target(logits)
    assert found[0, 4096] == -np.inf
    assert np.array_equal(found[:, :4096], logits[:, :4096])
    assert np.array_equal(found[:, 4097:], logits[:, 4097:])
    assert more.to_draft(4096) is None
    assert between(tiny, extended).identical


def test_identical_vocabularies_skip_tokens_that_the_draft_lacks() -> None:
    tiny = Tokenizer.load(TINY)
    extended = Tokenizer.load(TINY)
    extended.backend.add_special_tokens(["<|image|>"])
    reencoder = between(extended, tiny, 4160, 4096).make_reencoder()
    assert reencoder.update([5, 4096, 6, 4159]) == 0
    assert (reencoder.tokens, reencoder.is_complete) == ([5, 6], False)
    assert reencoder.update([5, 4096, 6, 7, 8], 2) == 2
    assert (reencoder.tokens, reencoder.is_complete) == ([5, 6, 7, 8], True)
    assert reencoder.update([5, 9], 1) == 1
    assert (reencoder.tokens, reencoder.is_complete) == ([5, 9], True)
    draw = random.Random(0)
    tokens = [5]
    for _ in range(200):
        del tokens[draw.randrange(1, len(tokens) + 1) :]
        tokens += draw.choices((1, 2, 3, 4096), k=draw.randrange(1, 600))
        unchanged = reencoder.update(tokens)
        assert reencoder.tokens == [token for token in tokens if token != 4096]
        assert unchanged <= len(reencoder.tokens)


def test_equal_tokens_with_other_ids_are_not_identical() -> None:
    one = byte_level()
    other = byte_level(specials=("<|user|>",))
    translation = between(one, other)
    assert not translation.identical
    token = one.backend.token_to_id("Ġthe")
    assert translation.to_draft(token) == other.backend.token_to_id("Ġthe") == token + 1
    assert Reencoder(None).update([]) == 0


@pytest.mark.parametrize("draft", [word_piece(), byte_level(257, [])])
def test_vocabularies_with_few_shared_tokens_are_refused(draft: Tokenizer) -> None:
    """Too few tokens are shared with WordPiece, and with single bytes, which the target seldom
    chooses.
    """
    target = TOKENIZERS["bytes"]
    with pytest.raises(OptionError) as caught:
        Translation.between("draft", target, 384, draft, 512)
    message = str(caught.value)
    assert message.startswith("draft: expected a draft model with a similar vocabulary, found ")
    for part in (
        "tokens in common",
        "380 tokens (its model 384)",
        f"{draft.vocab_size} (its model 512)",
    ):
        assert part in message
    assert "\n" not in message
