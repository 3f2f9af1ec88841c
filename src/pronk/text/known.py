"""Check whether a ``tokenizer.json`` is harmless: it needs little time and memory for any text.

The tokenizers package limits nothing. A file may have a regular expression whose search takes
years, normalizers that each make a text a hundred times longer, a table of bytes that is used
without a check of its indices, or a model whose work grows with the square of a word's length.

Nearly all language models use components (normalizer, pre-tokenizer, model, post-processor,
decoder) without these dangers. This module calls such a component *known*: its work is proportional
to the length of the text, it makes the text at most a few times longer, and it does not fail. A
component is known if its type and each of its settings that matters are on the lists of this
module. A regular expression is known if its text is on the list in :mod:`pronk.text.patterns`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pronk.checkpoint.gguf.vocabulary import MAX_TOKEN_CHARACTERS
from pronk.text.patterns import PATTERNS

Component = Mapping[str, Any]

# Maximum number of components of a sequence, of pieces of a post-processor's template, and of token
# ids of one piece.
_MAX_PARTS = 16
# Maximum number of added tokens, and of their characters together: the package builds an automaton
# for them. Well-known models have up to 6,500 added tokens with 60,000 characters.
_MAX_ADDED = 2**14
_MAX_ADDED_CHARACTERS = 2**18


def is_known(file: Component) -> bool:
    """Return whether all components of a parsed ``tokenizer.json`` are known to be harmless."""
    return encodes_as_known(file) and decodes_as_known(file)


def encodes_as_known(file: Component) -> bool:
    """Return whether all components for encoding are known: the model, the added tokens, …."""
    return (
        _has_usual_tokens(file.get("model"))
        and _is_known_model(file.get("model"))
        and _are_known_tokens(file.get("added_tokens"))
        and _is_known(file.get("normalizer"), "normalizers", _NORMALIZERS)
        and _decomposes_once(file.get("normalizer"))
        and _is_known(file.get("pre_tokenizer"), "pretokenizers", _PRE_TOKENIZERS)
        and _is_known(file.get("post_processor"), "processors", _POST_PROCESSORS)
    )


def decodes_as_known(file: Component) -> bool:
    """Return whether the decoder is known, and no token of the vocabulary is very long."""
    is_known_decoder = _is_known(file.get("decoder"), "decoders", _DECODERS)
    return is_known_decoder and _has_usual_tokens(file.get("model"))


def _is_known(
    component: object, members: str, known: Mapping[str, Callable[[Component], bool]]
) -> bool:
    """Return whether a component is absent, known, or a sequence of known components.

    Args:
        component: value of a key of ``tokenizer.json``, such as that of ``normalizer``.
        members: key under which a component of the type Sequence has its parts. Sequences within
            sequences are not known.
        known: known types of components, each with a function that checks the settings.
    """
    if component is None:
        return True
    parts = _parts(component, members)
    return parts is not None and all(_is_known_part(part, known) for part in parts)


def _parts(component: object, members: str) -> list[Any] | None:
    """Return the parts of a component of the type Sequence, or the component itself as a list.

    ``None`` if the value is no component, or the sequence has too many parts.
    """
    if not isinstance(component, Mapping):
        return None
    parts = component.get(members) if component.get("type") == "Sequence" else [component]
    return parts if isinstance(parts, list) and len(parts) <= _MAX_PARTS else None


def _is_known_part(part: object, known: Mapping[str, Callable[[Component], bool]]) -> bool:
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    return isinstance(kind, str) and kind in known and known[kind](part)


def _always(_: Component) -> bool:
    return True


def _decomposes_once(normalizer: object) -> bool:
    """Return whether at most one part of a normalizer decomposes characters; the parts are known.

    Decomposition (NFC, NFD, NFKC, NFKD) may turn one character into 18. If a text replacement lies
    in between, a second decomposition may turn each of the 18 into 18.
    """
    forms = ("NFC", "NFD", "NFKC", "NFKD")
    parts = _parts(normalizer, "normalizers") or ()
    return sum(part["type"] in forms for part in parts) <= 1


def _prepends_one(part: Component) -> bool:
    return _has_length(part.get("prepend"), 1)


def _replaces_text(part: Component) -> bool:
    """Return whether a component replaces a fixed text, and the new text is not longer."""
    pattern = part.get("pattern")
    content = part.get("content")
    text = pattern.get("String") if isinstance(pattern, Mapping) and len(pattern) == 1 else None
    return isinstance(text, str) and isinstance(content, str) and 0 < len(text) >= len(content)


def _splits_at_known(part: Component) -> bool:
    """Return whether a component splits at a fixed text or at matches of a known expression."""
    pattern = part.get("pattern")
    if not isinstance(pattern, Mapping) or len(pattern) != 1:
        return False
    literal = pattern.get("String")
    expression = pattern.get("Regex")
    if isinstance(literal, str):
        return len(literal) > 0
    return isinstance(expression, str) and expression in PATTERNS


def _strips_left(part: Component) -> bool:
    # Stripping at the right end is not known: the tokenizers package fails for texts that are
    # shorter than the part to strip.
    return part.get("stop") == 0


def _is_known_template(part: Component) -> bool:
    """Return whether a post-processor's template adds only a few special tokens to each text.

    The post-processor must define these tokens. The template for pairs of texts may be empty, as
    prompts are single texts.
    """
    special_tokens = part.get("special_tokens")
    if not isinstance(special_tokens, Mapping) or len(special_tokens) > _MAX_PARTS:
        return False
    for token in special_tokens.values():
        ids = token.get("ids") if isinstance(token, Mapping) else None
        tokens = token.get("tokens") if isinstance(token, Mapping) else None
        if (
            not isinstance(ids, list)
            or not isinstance(tokens, list)
            or not len(ids) == len(tokens) <= _MAX_PARTS
        ):
            return False
    single = _texts_of(part.get("single"), special_tokens)
    pair = _texts_of(part.get("pair"), special_tokens)
    return single == ["A"] and pair is not None and sorted(pair) in ([], ["A", "B"])


def _texts_of(pieces: object, special_tokens: Mapping[str, Any]) -> list[str] | None:
    """Return the names of the texts in a template, such as ``["A"]`` in ``<s> $A``.

    ``None`` if a piece of the template is neither a text nor one of ``special_tokens``.
    """
    if not isinstance(pieces, list) or len(pieces) > _MAX_PARTS:
        return None
    texts = list[str]()
    for piece in pieces:
        if not isinstance(piece, Mapping) or len(piece) != 1:
            return None
        ((kind, value),) = piece.items()
        name = value.get("id") if isinstance(value, Mapping) else None
        if not isinstance(name, str):
            return None
        if kind == "Sequence":
            texts.append(name)
        elif kind != "SpecialToken" or name not in special_tokens:
            return None
    return texts


def _has_usual_tokens(model: object) -> bool:
    """Return whether no token of a vocabulary is longer than those of well-known models.

    The decoder's work per token is then limited.
    """
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocabulary, Mapping):
        return max(map(len, vocabulary), default=0) <= MAX_TOKEN_CHARACTERS
    if not isinstance(vocabulary, list):
        return False
    texts = (entry[0] for entry in vocabulary if isinstance(entry, list) and entry)
    return all(isinstance(text, str) and len(text) <= MAX_TOKEN_CHARACTERS for text in texts)


def _is_known_model(model: object) -> bool:
    """Return whether a model is BPE without marks of subwords (``##ing``), or a list of words.

    The time of other models has no small bound per character: that of WordPiece grows with the
    square of a word's length, and that of Unigram with the length of the longest token.
    """
    if not isinstance(model, Mapping):
        return False
    if model.get("type") == "WordLevel":
        return True
    is_bpe = model.get("type") == "BPE" or ("type" not in model and model.keys() <= _BPE_KEYS)
    marks = (model.get("continuing_subword_prefix"), model.get("end_of_word_suffix"))
    return is_bpe and not any(marks)


_BPE_KEYS = {
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
    "vocab",
    "merges",
}


def _are_known_tokens(tokens: object) -> bool:
    """Return whether few tokens are added, and none of them depends on the text before it.

    Tokens with ``lstrip`` take the white space before them, and tokens with ``single_word`` must
    follow the end of a word; both depend on the text before them.
    """
    if tokens is None:
        return True
    if not isinstance(tokens, list) or len(tokens) > _MAX_ADDED:
        return False
    for token in tokens:
        if not isinstance(token, Mapping) or not isinstance(token.get("content"), str):
            return False
    characters = sum(len(token["content"]) for token in tokens)
    looks_back = any(token.get("lstrip") or token.get("single_word") for token in tokens)
    return characters <= _MAX_ADDED_CHARACTERS and not looks_back


def _has_length(text: object, length: int) -> bool:
    return isinstance(text, str) and len(text) == length


_NORMALIZERS: dict[str, Callable[[Component], bool]] = {
    "NFC": _always,
    "NFD": _always,
    "NFKC": _always,
    "NFKD": _always,
    "Lowercase": _always,
    "Strip": _always,
    "StripAccents": _always,
    "Prepend": _prepends_one,
    "Replace": _replaces_text,
}
_PRE_TOKENIZERS: dict[str, Callable[[Component], bool]] = {
    "ByteLevel": _always,
    "Metaspace": _always,
    "Digits": _always,
    "Whitespace": _always,
    "WhitespaceSplit": _always,
    "Punctuation": _always,
    "Split": _splits_at_known,
}
_POST_PROCESSORS: dict[str, Callable[[Component], bool]] = {
    "ByteLevel": _always,
    "TemplateProcessing": _is_known_template,
}
_DECODERS: dict[str, Callable[[Component], bool]] = {
    "ByteLevel": _always,
    "ByteFallback": _always,
    "Fuse": _always,
    "Metaspace": _always,
    "Strip": _strips_left,
    "Replace": _replaces_text,
}
