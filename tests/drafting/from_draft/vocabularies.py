"""Small tokenizers of several kinds, trained on the same few lines."""

import json

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from pronk.text.tokenizer import Tokenizer

TEXT = [
    (
        "def add(a, b):\n    return a + b\n\n\ndef mean(values):\n    return sum(values) / "
        "len(values)\n"
    ),
    (
        "The quick brown fox jumps over the lazy dog, and then the dog sleeps in the sun of the "
        "afternoon."
    ),
    (
        "for i in range(10):\n    print(i, i * i)\n\nIt is the one thing that the other animals in "
        "the "
        "forest have not."
    ),
    "Grüße aus Köln — naïve café, 東京と大阪, 🙂🙃",
]
OTHER_TEXT = [
    (
        "The red fox and the brown dog are in the garden; the sun is over the forest and the "
        "values "
        "are in range."
    ),
    "import math\n\ndef area(radius):\n    return math.pi * radius ** 2\n\nprint(area(10))\n",
]


def byte_level(
    size: int = 380,
    text: list[str] | None = None,
    end: str = "<|end|>",
    *,
    specials: tuple[str, ...] = (),
    **options: bool,
) -> Tokenizer:
    """Byte-level BPE as in GPT-2: covers every text; a space belongs to the word after it."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(**({"add_prefix_space": False} | options))
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[end, *specials],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT if text is None else text, trainer)
    return Tokenizer(backend, special_tokens={"eos_token": end})


def metaspace(
    size: int = 420, text: list[str] | None = None, *, legacy: bool = False, fallback: bool = True
) -> Tokenizer:
    """SentencePiece BPE as in Llama 2 (``legacy``) or Mistral: a space first, bytes for unknown
    characters.
    """
    backend = tokenizers.Tokenizer(
        models.BPE(unk_token="<unk>", byte_fallback=fallback, fuse_unk=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    trainer = trainers.BpeTrainer(
        vocab_size=size - 256,
        special_tokens=["<unk>", "<s>", "</s>"],
        limit_alphabet=60,
        show_progress=False,
    )
    backend.train_from_iterator(TEXT if text is None else text, trainer)
    raw = json.loads(backend.to_str())
    if fallback:
        vocabulary = raw["model"]["vocab"]
        raw["model"]["vocab"] = vocabulary | {
            f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)
        }
    backend = tokenizers.Tokenizer.from_str(json.dumps(raw))
    if legacy:
        backend.pre_tokenizer = None
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
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def word_piece(size: int = 200) -> Tokenizer:
    """WordPiece as in BERT: lower case, no spaces."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    return Tokenizer(backend, special_tokens={"eos_token": "[SEP]"})
