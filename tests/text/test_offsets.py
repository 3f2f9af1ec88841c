"""Positions of tokens in a text: ``text[offset:]`` begins with the text of the token."""

import random
import unicodedata
from collections.abc import Callable
from functools import cache

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from pronk.testing import byte_tokenizer
from pronk.text.offsets import output_offsets, prompt_offsets, prompt_text
from pronk.text.spelling import spell
from pronk.text.stream import TextStream
from pronk.text.tokenizer import Tokenizer

NAMES = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]
PIECES = [
    "a",
    "b c",
    " ",
    "  ",
    "\n",
    "e\u0301",
    "é",
    "ß",
    "東京",
    "🙂",
    "👩‍👩‍👧",
    "The dog",
    "12",
    "!",
    "\ufffd",
    *NAMES,
]


class TokenTexts:
    """Text and bytes of each token, as the server shows them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.spelled = spell(tokenizer).texts

    def bytes(self, token: int) -> bytes:
        """Return the bytes of a token; of a special token, its name."""
        spelled = self.spelled.get(token)
        return (
            (self.tokenizer.backend.id_to_token(token) or "").encode()
            if spelled is None
            else spelled
        )

    def name(self, token: int) -> str:
        """Return the text of a token; of bytes that are no text, something that no text has."""
        return self.bytes(token).decode(errors="backslashreplace")


def with_bos(backend: tokenizers.Tokenizer, template: str = "<s> $A") -> Tokenizer:
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in NAMES])
    special = [(name, backend.token_to_id(name)) for name in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return Tokenizer(backend)


def sentencepiece_model() -> models.BPE:
    tokens = [
        "<unk>",
        *NAMES,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghot!12T",
        "▁a",
        "▁b",
        "▁T",
        "he",
    ]
    merges = [("▁", "a"), ("▁", "b"), ("▁", "T"), ("h", "e")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    return models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)


def llama() -> Tokenizer:
    backend = tokenizers.Tokenizer(sentencepiece_model())
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    backend.decoder = decoders.Sequence(steps)
    return with_bos(backend)


def gemma() -> Tokenizer:
    backend = tokenizers.Tokenizer(sentencepiece_model())
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return with_bos(backend, "<s> $A </s>")


def metaspace() -> Tokenizer:
    backend = tokenizers.Tokenizer(sentencepiece_model())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    backend.decoder = decoders.Sequence(steps)
    return with_bos(backend)


def qwen() -> Tokenizer:
    backend = byte_tokenizer()
    backend.normalizer = normalizers.NFC()
    return with_bos(backend, "$A")


def lower_case() -> Tokenizer:
    backend = byte_tokenizer()
    backend.normalizer = normalizers.Lowercase()
    return with_bos(backend)


def trimmed() -> Tokenizer:
    backend = byte_tokenizer()
    backend.normalizer = normalizers.NFC()
    backend.add_special_tokens(NAMES)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    return Tokenizer(backend)


def stripping() -> Tokenizer:
    """Return a tokenizer whose special tokens take the white space after them, as those of
    Phi-3.
    """
    backend = byte_tokenizer()
    backend.add_special_tokens([AddedToken(name, normalized=False, rstrip=True) for name in NAMES])
    return Tokenizer(backend)


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "bytes": lambda: with_bos(byte_tokenizer()),
    "llama": llama,
    "gemma": gemma,
    "metaspace": metaspace,
    "qwen": qwen,
    "lower case": lower_case,
    "trimmed": trimmed,
    "stripping": stripping,
}


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


made = cache(lambda name: FAMILIES[name]())
FAMILY = pytest.mark.parametrize("family", FAMILIES)


# What the normalizers of the families make of a text.
NORMAL: dict[str, Callable[[str], str]] = {"qwen": nfc, "trimmed": nfc, "lower case": str.lower}


def assert_begins(text: str, offset: int, data: bytes, normal: Callable[[str], str] = str) -> None:
    """Check that the text from ``offset`` on begins with the text of a token, or with a character
    of its bytes.
    """
    rest = normal(text[offset:])
    if len(data) == 1 and rest.startswith("\ufffd"):
        return  # a byte that is not valid here, perhaps because of bytes around it
    try:
        own = data.decode()
    except UnicodeDecodeError:
        assert rest[:1] == "\ufffd" or {*data} & {*rest[:1].encode()}
        return
    # a space that the tokenizer adds is not in the text
    options = [own, own[1:]] if own.startswith(" ") else [own]
    assert any(rest.startswith(each) for each in options), (text, offset, own)


@FAMILY
@pytest.mark.parametrize("seed", range(40))
def test_prompts(family: str, seed: int) -> None:
    draw = random.Random(seed)
    tokenizer = made(family)
    texts = TokenTexts(tokenizer)
    prompt = "".join(draw.choices(PIECES, k=draw.randrange(1, 9)))
    encoding = tokenizer.backend.encode(prompt)
    offsets = prompt_offsets(tokenizer, texts.name, prompt)
    assert len(offsets) == len(encoding.ids)
    assert offsets == sorted(offsets)
    following = [*offsets[1:], len(prompt)]
    for i, (token, offset) in enumerate(zip(encoding.ids, offsets, strict=True)):
        if encoding.special_tokens_mask[i]:
            assert offset == following[i] or encoding.ids[i + 1 :] == []
        else:
            assert_begins(prompt, offset, texts.bytes(token), NORMAL.get(family, str))


@FAMILY
@pytest.mark.parametrize("seed", range(40))
def test_prompts_of_ids(family: str, seed: int) -> None:
    """The text has the names of special tokens; random ids give broken characters, too."""
    draw = random.Random(seed)
    tokenizer = made(family)
    texts = TokenTexts(tokenizer)
    ids = [draw.randrange(tokenizer.vocab_size) for _ in range(12)]
    if seed % 2:
        ids = tokenizer.encode("".join(draw.choices(PIECES, k=4))) or [1]
    text = prompt_text(tokenizer, ids)
    if "\ufffd" not in text:
        assert text == tokenizer.decode(ids, skip_special_tokens=False)
    offsets = prompt_offsets(tokenizer, texts.name, ids)
    assert offsets == sorted(offsets)
    for token, offset in zip(ids, offsets, strict=True):
        assert_begins(text, offset, texts.bytes(token))


@FAMILY
@pytest.mark.parametrize("seed", range(40))
def test_outputs(family: str, seed: int) -> None:
    """Special tokens have no text in an output: their position is that of the next text."""
    draw = random.Random(seed)
    tokenizer = made(family)
    texts = TokenTexts(tokenizer)
    prompt = tokenizer.encode("".join(draw.choices(PIECES, k=draw.randrange(1, 4)))) or [1]
    ids = [draw.randrange(tokenizer.vocab_size) for _ in range(12)]
    if seed % 2:
        ids = tokenizer.encode("".join(draw.choices(PIECES, k=4)), add_special_tokens=False)
    stream = TextStream(tokenizer, prompt, ())
    text = "x" * 5 + "".join([*(stream.push(token)[0] for token in ids), stream.flush()[0]])
    counter = output_offsets(tokenizer, texts.name, prompt, 5)
    offsets = [counter.push(token) for token in ids]
    assert offsets == sorted(offsets)
    for token, offset in zip(ids, offsets, strict=True):
        if token not in tokenizer.special_ids:
            assert_begins(text, offset, texts.bytes(token))
        assert 5 <= offset <= len(text)
