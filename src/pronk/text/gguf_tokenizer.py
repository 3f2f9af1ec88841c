"""Conversion of a GGUF file's tokenizer to a tokenizer of the Hugging Face library ``tokenizers``.

Two values of ``tokenizer.ggml.model`` are supported. ``gpt2`` is a byte-level BPE; the file gives
only the name of its pre-tokenizer (``tokenizer.ggml.pre``). ``llama`` is a SentencePiece BPE; its
merges are computed from the scores of the tokens. An unknown pre-tokenizer raises an error, since a
wrong one would change token ids and degrade the output.

Sources: ``llama-vocab.cpp`` of llama.cpp for names and default settings; the ``tokenizer.json`` of
the models for steps that llama.cpp omits (Unicode normalization NFC for Qwen).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from pronk.base.errors import TokenizerError, describe_error
from pronk.checkpoint.gguf.checkpoint import GgufCheckpoint
from pronk.checkpoint.gguf.reader import GgufFile
from pronk.checkpoint.gguf.vocabulary import (
    ADDED_KINDS,
    TokenKind,
    Vocabulary,
    read_array,
    read_flag,
    refuse_tokens,
)
from pronk.text.patterns import PRE_TOKENIZERS

# special tokens of Phi-3 after which white space is kept
_KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")
# Metadata keys of the chat templates, by the names that they have in model folders.
_TEMPLATE_KEYS = {
    "default": "tokenizer.chat_template",
    "tool_use": "tokenizer.chat_template.tool_use",
}
# Limits for the pairs of a vocabulary without merges. One of 262,144 tokens needs a tenth.
_MAX_SPLIT_CHARACTERS = 2**27
_MAX_PAIRS = 2**22
# Limit for the tokens that are found before a text is split: the automaton for them takes 4 µs a
# character. Well-known models have up to 80,000 characters.
_MAX_ADDED_CHARACTERS = 2**20
_VISIBLE_SPACE = "\u2581"  # character that stands for a space in SentencePiece tokens


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Pause Python's garbage collector, which would scan hundreds of thousands of lists many times."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_garbage_collection()
def read_tokenizer(
    checkpoint: GgufCheckpoint,
) -> tuple[tokenizers.Tokenizer, int, dict[str, str], dict[str, str]]:
    """Convert the tokenizer of a file.

    Raise a TokenizerError if it is absent, unsupported or damaged.

    Returns:
        The tokenizer; its largest id, -1 without tokens; the texts of special tokens, by their
        names in chat templates, such as ``bos_token``; and the Jinja sources of the chat templates
        ``default`` and ``tool_use``, if the file has them.
    """
    file = checkpoint.header
    model = file.get("tokenizer.ggml.model")
    if model not in _MODELS:
        found = "none" if model in (None, "no_vocab", "none") else f"{model!r:.40}"
        allowed = " or ".join(_MODELS)
        remedy = "use the original model folder"
        refuse_tokens(
            file, f"expected tokenizer.ggml.model to be {allowed}, found {found}; {remedy}"
        )
    vocabulary = checkpoint.vocabulary
    templates = _chat_templates(file)
    try:
        backend = _MODELS[model](file, vocabulary)
        # Phi-3's SentencePiece tokenizers strip white space after special tokens; the file does not
        # record that.
        takes_space = model == "llama" and file.get("general.architecture") == "phi3"
        added = _special_tokens(vocabulary, takes_space=takes_space)
        if sum(len(token.content) for token in added) > _MAX_ADDED_CHARACTERS:
            expected = (
                f"expected at most {_MAX_ADDED_CHARACTERS} characters of special and user-defined "
                "tokens"
            )
            refuse_tokens(file, f"{expected}, found more")
        backend.add_tokens(added)
    except TokenizerError:
        raise
    except Exception as error:  # the library tokenizers raises Exception itself, no subclass
        reason = describe_error(error)[:200]
        msg = (
            f"{file.path}: expected merges that match the tokens, found a mismatch ({reason}); "
            "download it again"
        )
        raise TokenizerError(msg) from error
    template_names = {
        "bos": "bos_token",
        "eos": "eos_token",
        "unknown": "unk_token",
        "padding": "pad_token",
    }
    special = {key: vocabulary.special_text(name) for name, key in template_names.items()}
    used = (i for i in reversed(range(len(vocabulary.tokens))) if vocabulary.tokens[i] is not None)
    return (
        backend,
        next(used, -1),
        {key: text for key, text in special.items() if text is not None},
        templates,
    )


def _chat_templates(file: GgufFile) -> dict[str, str]:
    """Return the sources of the chat templates; :data:`_TEMPLATE_KEYS` has their names."""
    templates = {}
    for name, key in _TEMPLATE_KEYS.items():
        source = file.get(key)
        if isinstance(source, str):
            templates[name] = source
        elif source is not None:
            refuse_tokens(file, f"{key}: expected a string, found {type(source).__name__}")
    return templates


def _byte_level_bpe(file: GgufFile, vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    name = file.get("tokenizer.ggml.pre")
    settings = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if settings is None:
        remedy = "use the model's original folder, or convert it again with a current llama.cpp"
        known = ", ".join(PRE_TOKENIZERS)
        refuse_tokens(
            file, f"expected tokenizer.ggml.pre to be one of {known}, found {name!r:.40}; {remedy}"
        )
    merges = _parse_merges(read_array(file, "merges", str))
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary.ids_by_text, merges, ignore_merges=settings.ignore_merges)
    )
    if settings.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in settings.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    _add_bos_eos(backend, file, vocabulary, add_bos=settings.add_bos)
    return backend


def _sentencepiece_bpe(file: GgufFile, vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    vocab = vocabulary.ids_by_text
    count = len(vocabulary.tokens)
    scores = read_array(file, "scores", float, count)
    if len(scores) != count or not all(map(math.isfinite, scores)):
        refuse_tokens(
            file,
            f"tokenizer.ggml.scores: expected a finite number for each of {count} tokens, "
            "found others",
        )
    # merges to tokens with higher scores are applied first
    merges = _merges_from_scores(file, vocab, scores)
    unknown = vocabulary.special_text("unknown")
    model = models.BPE(
        vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback="<0x00>" in vocab
    )
    backend = tokenizers.Tokenizer(model)
    # Whether a space is prepended to the text and, as in llama.cpp, to each part of it that follows
    # a special token.
    add_space = read_flag(file, "add_space_prefix", default=True)
    spaces: list[Any] = [normalizers.Replace(" ", _VISIBLE_SPACE)]
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_VISIBLE_SPACE), *spaces] if add_space else spaces
    )
    steps: list[Any] = [
        decoders.Replace(_VISIBLE_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    backend.decoder = decoders.Sequence(
        [*steps, decoders.Strip(" ", left=1, right=0)] if add_space else steps
    )
    _add_bos_eos(backend, file, vocabulary, add_bos=True)
    return backend


_MODELS: dict[str, Callable[[GgufFile, Vocabulary], tokenizers.Tokenizer]] = {
    "gpt2": _byte_level_bpe,
    "llama": _sentencepiece_bpe,
}


def _parse_merges(merges: Sequence[str]) -> list[tuple[str, str]]:
    """Split each merge by :func:`_parse_merge`; all at once if every merge has one space inside."""
    text = "\n".join(merges)
    one_space = text.count(" ") == len(merges) and all(" " in merge for merge in merges)
    if one_space and text.count("\n") == len(merges) - 1 and "\n " not in f"\n{text}":
        parts = text.replace(" ", "\n").split("\n")
        return list(zip(parts[::2], parts[1::2], strict=True))
    return [_parse_merge(merge) for merge in merges]


def _parse_merge(merge: str) -> tuple[str, str]:
    """Split a merge at the first space after its first character: ``"  a"`` gives ``(" ", "a")``."""
    first, _, second = merge[1:].partition(" ")
    return merge[:1] + first, second


def _merges_from_scores(
    file: GgufFile, vocab: dict[str, int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Return all pairs of tokens whose concatenation is a token, by descending score of that token.

    Equal scores are ordered as by ``generate_merges`` of transformers, which wrote these models'
    ``tokenizer.json``.
    """
    work = sum(len(token) ** 2 for token in vocab)  # characters of all splits
    if work > _MAX_SPLIT_CHARACTERS:
        refuse_tokens(
            file, "expected tokens that a second suffices to split, found too many long ones"
        )
    scored_pairs = []
    for token, token_id in vocab.items():
        splits = [(token[:length], token[length:]) for length in range(1, len(token))]
        pairs = [(left, right) for left, right in splits if left in vocab and right in vocab]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        scored_pairs += [(scores[token_id], left, right) for left, right in pairs]
        if len(scored_pairs) > _MAX_PAIRS:
            refuse_tokens(
                file,
                f"expected at most {_MAX_PAIRS} pairs of tokens that are a token together, "
                "found more",
            )
    scored_pairs.sort(key=lambda entry: (entry[0], len(entry[1]), len(entry[2])), reverse=True)
    return [(left, right) for _, left, right in scored_pairs]


def _add_bos_eos(
    backend: tokenizers.Tokenizer, file: GgufFile, vocabulary: Vocabulary, *, add_bos: bool
) -> None:
    """Make ``backend`` add BOS and EOS to texts, as the file says.

    ``add_bos`` is the default for BOS.
    """
    defaults = {"bos": add_bos, "eos": False}
    names = [
        name
        for name, default in defaults.items()
        if read_flag(file, f"add_{name}_token", default=default)
    ]
    tokens = {name: vocabulary.special_text(name) for name in names}
    missing = [name for name, token in tokens.items() if token is None]
    if missing:
        name = missing[0]
        refuse_tokens(
            file, f"tokenizer.ggml.add_{name}_token: expected {name}_token_id as well, found none"
        )
    if tokens:
        template = [
            *([tokens["bos"]] if "bos" in tokens else []),
            "$A",
            *([tokens["eos"]] if "eos" in tokens else []),
        ]
        special_tokens = [(token, vocabulary.special_ids[name]) for name, token in tokens.items()]
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=special_tokens
        )


def _special_tokens(vocabulary: Vocabulary, *, takes_space: bool) -> list[AddedToken]:
    """Return the tokens to match before pre-tokenization.

    Decoding skips CONTROL and UNKNOWN tokens.

    ``takes_space``: whether they include the white space after them, with the exceptions of
    :data:`_KEEP_SPACE`.
    """
    return [
        AddedToken(
            token,
            special=ADDED_KINDS[TokenKind(kind)],
            normalized=False,
            rstrip=takes_space and token not in _KEEP_SPACE,
        )
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        if token is not None and kind in ADDED_KINDS
    ]
