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


# DeepSeek LLM and V2: words consist of these letters, which most scripts with two cases have.
_CASED_LETTERS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"  # Chinese, Japanese, Korean and others
_DEEPSEEK_LLM_PATTERNS = (
    "[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    # White space at the end of a piece. The original ``\s+$`` has the same matches, but begins to
    # search at each space: its time grows with the square of their number.
    r"(?<!\s)\s++$",
    _CJK,
    r"\p{N}+",
)
_DEEPSEEK_CODER_PATTERNS = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
# Kimi K2: as GPT-4o, but Chinese characters are words of their own, and a line's end may not follow
# a slash.
_HAN = r"\p{Han}"
_KIMI_UPPER = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^{_HAN}]]"
_KIMI_LOWER = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^{_HAN}]]"
_KIMI_PATTERN = (
    rf"[{_HAN}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_OTHER_TEXT}"
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
_GPT2 = PreTokenizer((_GPT2_PATTERN,))
_GPT4O = PreTokenizer((_GPT4O_PATTERN,))
_QWEN2 = PreTokenizer((rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_OTHER_TEXT}",), nfc=True)
_DEEPSEEK3 = PreTokenizer(_DEEPSEEK3_PATTERNS)
PRE_TOKENIZERS = {
    # The name that llama.cpp's converter writes for models whose pre-tokenizer it does not know.
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]")),
    "a.x-4.0": _GPT2,
    "chatglm-bpe": _DBRX,  # the pre-tokenizer of GLM-4
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER_PATTERNS),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM_PATTERNS),  # the pre-tokenizer of DeepSeek-V2-Lite
    "deepseek-r1-qwen": _QWEN2,  # the pre-tokenizer of DeepSeek-R1-Distill-Qwen
    "deepseek-v3": _DEEPSEEK3,
    "glm4": _DBRX,  # the pre-tokenizer of GLM-4.5 and GLM-4.7-Flash
    "dbrx": _DBRX,  # the pre-tokenizer of OLMo 2 and 3, Phi-4, Granite 4
    "f2llmv2": _QWEN2,
    "falcon-h1": _LLAMA3,
    "falcon3": _LLAMA3,
    "gigachat": _GPT2,
    "gpt-2": _GPT2,
    "gpt-4o": _GPT4O,  # the pre-tokenizer of Phi-4-mini and gpt-oss
    "granite-docling": _GPT2,
    "joyai-llm": _DEEPSEEK3,  # the name for new versions of DeepSeek V3's tokenizer.json
    "kanana2": _GPT4O,
    # the pre-tokenizer of Moonlight; tiktoken looks up whole words before it merges bytes
    "kimi-k2": PreTokenizer((_KIMI_PATTERN,), ignore_merges=True),
    "lfm2": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "megrez": _QWEN2,
    "mellum": _GPT2,
    "midm-2.0": _LLAMA3,
    "minerva-7b": _SINGLE_DIGITS,
    "pixtral": _LLAMA3,  # the pre-tokenizer of Nemotron-H and Nemotron 3
    "qwen2": _QWEN2,
    "qwen35": PreTokenizer((_QWEN35_PATTERN,), nfc=True),  # Qwen 3.5, 3.6 and 3.8, Qwen4-Exp
    "refact": _SINGLE_DIGITS,  # the pre-tokenizer of Granite 3
    # The name for Llama 3's vocabulary without BOS, as in SmolLM3. Some of its words are no results
    # of merges. llama.cpp applies the merges nevertheless, so its ids differ for these words.
    "smaug-bpe": _DBRX._replace(ignore_merges=True),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "tekken": PreTokenizer((_TEKKEN_PATTERN,), ignore_merges=True, add_bos=True),
    "trillion": _GPT2,
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
    r"[0-9]",
    r"\d",
    "[\r\n]",  # of DeepSeek Coder: like the one above, with the characters in place of escapes
}
PATTERNS = _OTHER_PATTERNS.union(*(each.patterns for each in PRE_TOKENIZERS.values()))
