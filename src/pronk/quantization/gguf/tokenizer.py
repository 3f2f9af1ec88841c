"""Conversion of the tokenizer of a GGUF file to the ``tokenizers`` library.

Two values of ``tokenizer.ggml.model`` are supported: ``gpt2``, a byte-level BPE whose pre-tokenizer is given by name
only (``tokenizer.ggml.pre``), and ``llama``, a SentencePiece BPE whose merges follow from the scores of the tokens. An
unknown pre-tokenizer is refused: a wrong one changes the token ids and silently degrades the output.

Sources: ``llama-vocab.cpp`` of llama.cpp for names and default settings; the ``tokenizer.json`` of the models for
steps that llama.cpp omits (the normal form NFC of Qwen).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from pronk.errors import TokenizerError
from pronk.quantization.gguf.reader import GgufFile
from pronk.quantization.gguf.vocabulary import TokenKind, Vocabulary, flag, scores, texts

__all__ = ["TokenizerParts", "read_tokenizer"]

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_SPACE = "\u2581"  # the space of SentencePiece


@dataclass(frozen=True)
class _Split:
    """Pre-tokenizer of a byte-level BPE.

    Attributes:
        patterns: regular expressions that split a text one after the other; matches and gaps become pieces.
        whole: whether a piece that is a token skips the merges (``ignore_merges``).
        bos: default of ``add_bos_token``.
        nfc: whether the text is normalized to NFC first.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    bos: bool = False
    nfc: bool = False


_LLAMA3 = _Split((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",), whole=True, bos=True)
_DIGITS = _Split((r"\p{N}", _GPT2))
_SPLITS = {
    # Pre-tokenizer of llama.cpp for unknown models.
    "default": _Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _Split((_GPT2,)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _Split((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",), nfc=True),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "tekken": _Split((rf"{_CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",), True, True),
}


@dataclass(frozen=True)
class TokenizerParts:
    """Parts of a :class:`pronk.tokenization.tokenizer.Tokenizer`.

    Attributes:
        backend: tokenizer of the ``tokenizers`` library.
        special_tokens: texts of the special tokens by their names in chat templates (``bos_token``).
        chat_template: Jinja source, or ``None``.
    """

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    chat_template: str | None


def read_tokenizer(file: GgufFile) -> TokenizerParts:
    """Convert the tokenizer of a file; refuse an absent, unsupported or damaged one."""
    model = file.get("tokenizer.ggml.model")
    if model not in _MODELS:
        found = "none" if model in (None, "no_vocab", "none") else f"{model!r:.40}"
        known = " or ".join(_MODELS)
        msg = f"{file.path}: expected tokenizer.ggml.model to be {known}, found {found}; use the original model folder"
        raise TokenizerError(msg)
    vocabulary = Vocabulary.read(file)
    template = file.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        msg = f"{file.path}: tokenizer.chat_template: expected a string, found {type(template).__name__}"
        raise TokenizerError(msg)
    try:
        backend = _MODELS[model](file, vocabulary)
        backend.add_tokens(_special_tokens(vocabulary))
    except TokenizerError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        msg = f"{file.path}: expected merges that match the tokens, found a mismatch ({reason}); download it again"
        raise TokenizerError(msg) from error
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    special = {f"{short}_token": vocabulary.text(name) for name, short in names.items()}
    return TokenizerParts(backend, {name: text for name, text in special.items() if text is not None}, template)


def _byte_level_bpe(file: GgufFile, vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    pre = file.get("tokenizer.ggml.pre")
    split = _SPLITS.get(pre) if isinstance(pre, str) else None
    if split is None:
        msg = (
            f"{file.path}: expected tokenizer.ggml.pre to be one of {', '.join(_SPLITS)}, found {pre!r:.40}; use the "
            "model's original folder, or convert it again with a current llama.cpp"
        )
        raise TokenizerError(msg)
    merges = [_split_merge(merge) for merge in texts(file, "merges")]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary.vocab, merges, ignore_merges=split.whole))
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    pieces = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*pieces, to_bytes])
    backend.decoder = decoders.ByteLevel()
    _add_bos_eos(backend, file, vocabulary, bos=split.bos)
    return backend


def _sentencepiece_bpe(file: GgufFile, vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    # As in llama.cpp, the space prefix is also added to the text after a special token.
    vocab = vocabulary.vocab
    merges = _merges(vocab, scores(file, len(vocabulary.tokens)))
    unknown = vocabulary.text("unknown")
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback="<0x00>" in vocab)
    )
    prefix = flag(file, "add_space_prefix", default=True)
    spaces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), *spaces] if prefix else spaces)
    parts: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    _add_bos_eos(backend, file, vocabulary, bos=True)
    return backend


_MODELS: dict[str, Callable[[GgufFile, Vocabulary], tokenizers.Tokenizer]] = {
    "gpt2": _byte_level_bpe,
    "llama": _sentencepiece_bpe,
}


def _split_merge(merge: str) -> tuple[str, str]:
    """Split a merge into its two tokens; the first may begin with a space."""
    first, _, second = merge[1:].partition(" ")
    return merge[:1] + first, second


def _merges(vocab: dict[str, int], score: Sequence[float]) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece BPE: all splits into two tokens, the highest score first.

    Ties are in the order of ``generate_merges`` of transformers, which writes the ``tokenizer.json`` of these models.
    """
    found = []
    for token, i in vocab.items():
        cuts = [(token[:at], token[at:]) for at in range(1, len(token)) if token[:at] in vocab and token[at:] in vocab]
        cuts.sort(key=lambda cut: (vocab[cut[0]], vocab[cut[1]]))
        found += [(score[i], cut) for cut in cuts]
    found.sort(key=lambda each: (each[0], len(each[1][0]), len(each[1][1])), reverse=True)
    return [cut for _, cut in found]


def _add_bos_eos(backend: tokenizers.Tokenizer, file: GgufFile, vocabulary: Vocabulary, *, bos: bool) -> None:
    """Set the post-processor that adds BOS and EOS; ``bos`` is the default of ``add_bos_token``."""
    around = {"bos": flag(file, "add_bos_token", default=bos), "eos": flag(file, "add_eos_token", default=False)}
    text = {name: vocabulary.text(name) for name, wanted in around.items() if wanted}
    missing = [name for name, token in text.items() if token is None]
    if missing:
        msg = f"{file.path}: tokenizer.ggml.add_{missing[0]}_token: expected {missing[0]}_token_id as well, found none"
        raise TokenizerError(msg)
    if text:
        template = [*([text["bos"]] if "bos" in text else []), "$A", *([text["eos"]] if "eos" in text else [])]
        special = [(text[name], vocabulary.ids[name]) for name in text]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)


def _special_tokens(vocabulary: Vocabulary) -> list[AddedToken]:
    """Return the tokens that are matched before pre-tokenization; decoding skips the special ones."""
    special = {TokenKind.CONTROL: True, TokenKind.UNKNOWN: True, TokenKind.USER_DEFINED: False}
    return [
        AddedToken(token, special=special[TokenKind(kind)], normalized=False)
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        if token is not None and kind in special
    ]
