"""Regular expressions with which the pre-tokenizers of well-known models split a text into words.

The search of each expression takes time proportional to the length of the text, also for texts of
spaces, line breaks or digits only. Sources: llama-vocab.cpp of llama.cpp; the ``tokenizer.json`` of
the models.
"""

from __future__ import annotations

from typing import NamedTuple

# Parts of regular expressions that several pre-tokenizers have in common.
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_OTHER_TEXT = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"  # upper-case letters, letters without case, marks
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"  # lower-case letters, letters without case, marks
_CASED_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_CASED_OTHER_TEXT = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN_PATTERN = rf"{_CASED_WORD}|\p{{N}}|{_CASED_OTHER_TEXT}"
_GPT4O_PATTERN = (
    "|".join(f"{word}{_CONTRACTIONS}?" for word in _CASED_WORD.split("|"))
    + rf"|\p{{N}}{{1,3}}|{_CASED_OTHER_TEXT}"
)
# Qwen 3.5: as Qwen 2, but combining marks (``\p{M}``) belong to words like letters.
_QWEN35_PATTERN = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


# Gemma 4: tokens do not contain both line ends and other characters.
LINE_ENDS_PATTERN = r"\n+"


# DeepSeek V3: digits, then Chinese characters and kana, then all others.
_DEEPSEEK3_PATTERNS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    (
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
    ),
)


class PreTokenizer(NamedTuple):
    """Settings of a byte-level BPE tokenizer that depend on its pre-tokenizer.

    A GGUF file has only the name of the pre-tokenizer.
    """

    # Regular expressions, applied in order: each splits every piece into its matches and the texts
    # between matches.
    patterns: tuple[str, ...]
    # Whether a word that is in the vocabulary becomes one token, without applying merges.
    ignore_merges: bool = False
    # Whether BOS is added to texts if the file lacks ``tokenizer.ggml.add_bos_token``.
    add_bos: bool = False
    # Whether the text is normalized to Unicode NFC before it is split.
    nfc: bool = False


_DBRX = PreTokenizer((rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_OTHER_TEXT}",))
_LLAMA3 = _DBRX._replace(ignore_merges=True, add_bos=True)
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2_PATTERN))
PRE_TOKENIZERS = {
    # The name that llama.cpp's converter writes for models whose pre-tokenizer it does not know.
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]")),
    "deepseek-v3": PreTokenizer(_DEEPSEEK3_PATTERNS),
    "glm4": _DBRX,  # the pre-tokenizer of GLM-4.7-Flash
    "dbrx": _DBRX,  # the pre-tokenizer of OLMo 2 and 3, Phi-4, Granite 4
    "gpt-2": PreTokenizer((_GPT2_PATTERN,)),
    "gpt-4o": PreTokenizer((_GPT4O_PATTERN,)),  # the pre-tokenizer of Phi-4-mini
    "lfm2": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": PreTokenizer((rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_OTHER_TEXT}",), nfc=True),
    "qwen35": PreTokenizer((_QWEN35_PATTERN,), nfc=True),  # Qwen 3.5, 3.6 and 3.8, Qwen4-Exp
    "refact": _SINGLE_DIGITS,  # the pre-tokenizer of Granite 3
    "smaug-bpe": _DBRX,  # the pre-tokenizer of SmolLM3
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "tekken": PreTokenizer((_TEKKEN_PATTERN,), ignore_merges=True, add_bos=True),
}

# Pattern cl100k of GPT-4, with possessive quantifiers, which never backtrack.
_POSSESSIVE_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
# Regular expressions of models whose pre-tokenizers have no supported name in GGUF files. The
# ``\s+$`` of DeepSeek LLM is left out: its time grows with the square of the number of spaces.
_OTHER_PATTERNS = {
    LINE_ENDS_PATTERN,
    _POSSESSIVE_PATTERN,
    # of GPT-2, as tiktoken writes it
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"\s?\p{L}+",  # of DeepSeek Coder
    r"\s?\p{P}+",
    # of DeepSeek Coder: Chinese, Japanese, Korean and others
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"[0-9]",
    r"\d",
    r"[\r\n]",
    "[\r\n]",  # of DeepSeek Coder: like the one above, with the characters in place of escapes
}
PATTERNS = _OTHER_PATTERNS.union(*(each.patterns for each in PRE_TOKENIZERS.values()))
