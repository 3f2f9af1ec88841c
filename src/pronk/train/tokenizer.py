"""Byte-level BPE tokenizer with GPT-2's pre-tokenization, trained on the training text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pronk.checks import check_integer
from pronk.corpus.dialogue import ASSISTANT, CHAT_TEMPLATE, END, END_OF_TEXT, SPECIAL_TOKENS, USER
from pronk.errors import OptionError, TokenizerError
from pronk.files.atomic import write_json

__all__ = ["BYTE_VOCAB", "load_tokenizer", "save_tokenizer", "train_tokenizer"]

# Size of a vocabulary without merges: special tokens and the 256 bytes.
BYTE_VOCAB = len(SPECIAL_TOKENS) + 256


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn merges from ``texts``; ids 0..3 are the special tokens, then the 256 bytes, then the merges.

    Raises:
        OptionError: ``vocab_size`` is below ``BYTE_VOCAB`` or above 65,536 (16-bit ids), or the text has too few
            different pairs to merge.
    """
    check_integer("vocabulary size", vocab_size, BYTE_VOCAB, 65536)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    size = tokenizer.get_vocab_size()
    if size != vocab_size:
        msg = f"vocabulary size: the text yields only {size} tokens, expected {vocab_size}; ask for fewer or add text"
        raise OptionError(msg)
    # Encode text that spells a special token, such as "<|end|>", as ordinary text, never as the special token.
    tokenizer.encode_special_tokens = True
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``special_tokens_map.json``."""
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "unk_token": END_OF_TEXT}
    extra = [USER, ASSISTANT, END]
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {str(i): {"content": token, **flags} for i, token in enumerate(SPECIAL_TOKENS)},
        "extra_special_tokens": extra,
        "chat_template": CHAT_TEMPLATE,
        **names,
    }
    write_json(folder / "tokenizer_config.json", config, indent=2)
    write_json(folder / "special_tokens_map.json", {**names, "additional_special_tokens": extra}, indent=2)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a run; text such as "<|end|>" is never encoded as the special token.

    Raises:
        TokenizerError: the file is missing or damaged.
    """
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the tokenizers library raises plain Exception
        msg = f"{path}: expected a tokenizer, found {error}"
        raise TokenizerError(msg) from error
    tokenizer.encode_special_tokens = True
    return tokenizer
