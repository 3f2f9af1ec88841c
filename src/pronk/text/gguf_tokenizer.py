"""Conversion of a GGUF file's tokenizer to a tokenizer of Hugging Face's package ``tokenizers``.

Three values of ``tokenizer.ggml.model`` are supported. ``gpt2`` is a byte-level BPE, of whose
pre-tokenizer the file gives only the name (``tokenizer.ggml.pre``). ``llama`` is a SentencePiece
BPE, whose merges follow from the scores of the tokens. ``gemma4`` is such a BPE with merges
in the file, which does not join tokens across line ends. An unknown pre-tokenizer raises an error,
since a wrong one would change token ids and degrade the output.

Sources: ``llama-vocab.cpp`` of llama.cpp for names and default settings; the ``tokenizer.json`` of
the models for steps that llama.cpp omits (Unicode normalization NFC for Qwen).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from pronk.base.arrays import Array, trim_heap
from pronk.base.errors import TokenizerError, describe_error
from pronk.checkpoint.gguf.checkpoint import GgufCheckpoint
from pronk.checkpoint.gguf.reader import GgufFile
from pronk.checkpoint.gguf.vocabulary import (
    ADDED_KINDS,
    VISIBLE_SPACE,
    TokenKind,
    Vocabulary,
    read_flag,
    read_numbers,
    read_texts,
    refuse_tokens,
)
from pronk.kernels.library import KernelsError
from pronk.kernels.merges import RepeatedTokenError, ScoreMerges
from pronk.text.patterns import LINE_ENDS_PATTERN, PRE_TOKENIZERS
from pronk.text.score_merges import TooManyPairsError, merges_from_scores
from pronk.text.score_tokenizer import ScoreTokenizer

# Special tokens of Phi-3 after which white space is kept.
_KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")
# Metadata keys of chat templates in GGUF files, by the names of these templates in model folders.
_TEMPLATE_KEYS = {
    "default": "tokenizer.chat_template",
    "tool_use": "tokenizer.chat_template.tool_use",
}
# Limits of the computation of merges from scores: the number of characters in all splits of all
# tokens into two, which limits the memory of the pairs, and the number of pairs of tokens that form
# a token. A vocabulary of 262,144 tokens needs a tenth of either.
_MAX_SPLIT_CHARACTERS = 2**27
_MAX_PAIRS = 2**22
# Maximum number of tokens of several characters in a file without merges. Some tokens need none:
# Llama 3 has 588 that no merges make.
_MAX_UNMERGED = 1000
# Maximum number of characters of all added tokens. An automaton finds these tokens before a text is
# split; building it takes 4 µs per character. Well-known models have up to 80,000 characters.
_MAX_ADDED_CHARACTERS = 2**20


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Pause Python's garbage collector within the block.

    The collector would scan hundreds of thousands of lists of tokens and merges many times.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def read_tokenizer(
    checkpoint: GgufCheckpoint,
) -> tuple[tokenizers.Tokenizer | ScoreTokenizer, int]:
    """Convert the tokenizer of a GGUF file.

    A tokenizer of the model ``llama`` is a :class:`ScoreTokenizer`, which needs a tenth of the
    memory. Without compiled kernels, it is one of the package ``tokenizers``, like all others.

    Returns:
        The tokenizer, and its largest token id, or -1 without tokens.

    Raises:
        TokenizerError: the tokenizer is absent, unsupported or damaged.
    """
    file = checkpoint.header
    model = file.get("tokenizer.ggml.model")
    if model not in _MODELS:
        found = "none" if model in (None, "no_vocab", "none") else f"{model!r:.40}"
        allowed = ", ".join(_MODELS)
        remedy = "use the original model folder"
        refuse_tokens(
            file, f"expected tokenizer.ggml.model to be one of {allowed}, found {found}; {remedy}"
        )
    added = _added_tokens(file, checkpoint.vocabulary)
    if sum(len(token.content) for token in added.values()) > _MAX_ADDED_CHARACTERS:
        expected = (
            f"expected at most {_MAX_ADDED_CHARACTERS} characters of special and user-defined "
            "tokens"
        )
        refuse_tokens(file, f"{expected}, found more")
    convert = _score_tokenizer if model == "llama" else _build
    return convert(checkpoint, added), checkpoint.vocabulary.largest_id


def _score_tokenizer(
    checkpoint: GgufCheckpoint, added: dict[int, AddedToken]
) -> tokenizers.Tokenizer | ScoreTokenizer:
    """Return the tokenizer of a file with the model ``llama``."""
    file = checkpoint.header
    vocabulary = checkpoint.vocabulary
    scores = _read_scores(file, vocabulary)
    # Equal scores have equal ranks; the best score has rank 0.
    _, ranks = np.unique(-scores, return_inverse=True)
    tokens = vocabulary.tokens
    unknown = vocabulary.special_text("unknown")
    try:
        merges = ScoreMerges(
            tokens.data,
            tokens.starts,
            tokens.stops,
            ranks.astype(np.int32),
            None if unknown is None else vocabulary.special_ids["unknown"],
        )
    except RepeatedTokenError as error:
        _refuse_repeated(file, tokens[error.token])
    except KernelsError:
        return _build(checkpoint, added)

    def build() -> tokenizers.Tokenizer:
        backend = _build(checkpoint, added)
        # A vocabulary of 262,144 tokens takes 40 MB as Python's objects.
        checkpoint.drop_vocabulary()
        trim_heap()
        return backend

    around = _around_texts(file, vocabulary, add_bos=True)
    return ScoreTokenizer(
        merges,
        tokens,
        added,
        prefix=VISIBLE_SPACE if _has_space_prefix(file, default=True) else "",
        before=[token_id for _, token_id in around.before],
        after=[token_id for _, token_id in around.after],
        decoder=_decoder(file, space_prefix=True),
        build=build,
    )


@_no_garbage_collection()
def _build(checkpoint: GgufCheckpoint, added: dict[int, AddedToken]) -> tokenizers.Tokenizer:
    """Build a file's tokenizer with the package ``tokenizers``."""
    file = checkpoint.header
    try:
        backend = _MODELS[file.get("tokenizer.ggml.model")](file, checkpoint.vocabulary)
        backend.add_tokens(list(added.values()))
    except TokenizerError:
        raise
    except Exception as error:  # the package tokenizers raises plain Exceptions
        reason = describe_error(error)[:200]
        msg = (
            f"{file.path}: expected merges that match the tokens, found a mismatch ({reason}); "
            "download it again"
        )
        raise TokenizerError(msg) from error
    return backend


def read_templates(checkpoint: GgufCheckpoint) -> tuple[dict[str, str], dict[str, str]]:
    """Return the chat templates of a GGUF file, and the special tokens that they may name.

    Returns:
        The texts of special tokens, by their names in chat templates, such as ``bos_token``; and
        the Jinja sources of the chat templates ``default`` and ``tool_use``, if the file has them.

    Raises:
        TokenizerError: the vocabulary or a template is damaged.
    """
    vocabulary = checkpoint.vocabulary
    template_names = {
        "bos": "bos_token",
        "eos": "eos_token",
        "unknown": "unk_token",
        "padding": "pad_token",
        # parts of a prompt for filling in the middle (pronk.text.infill)
        "fim_pre": "prefix_token",
        "fim_suf": "suffix_token",
        "fim_mid": "middle_token",
        "fim_rep": "repository_token",
        "fim_sep": "file_token",
    }
    special = {key: vocabulary.special_text(name) for name, key in template_names.items()}
    given = {key: text for key, text in special.items() if text is not None}
    return given, _chat_templates(checkpoint.header)


def _chat_templates(file: GgufFile) -> dict[str, str]:
    """Return the Jinja sources of the file's chat templates, by name: ``default`` and ``tool_use``.

    Templates that the file lacks are left out.
    """
    templates = {}
    for name, key in _TEMPLATE_KEYS.items():
        source = file.get(key)
        if isinstance(source, str):
            templates[name] = source
        elif source is not None:
            refuse_tokens(file, f"{key}: expected a string, found {type(source).__name__}")
    return templates


def _byte_level_bpe(file: GgufFile, vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer, with the pre-tokenizer that the file names."""
    name = file.get("tokenizer.ggml.pre")
    settings = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if settings is None:
        remedy = "use the model's original folder, or convert it again with a current llama.cpp"
        known = ", ".join(PRE_TOKENIZERS)
        refuse_tokens(
            file, f"expected tokenizer.ggml.pre to be one of {known}, found {name!r:.40}; {remedy}"
        )
    merges = _read_merges(file, vocabulary)
    vocab = _ids_by_text(file, vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=settings.ignore_merges))
    if settings.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in settings.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    _add_bos_eos(backend, file, vocabulary, add_bos=settings.add_bos)
    return backend


def _sentencepiece_bpe(file: GgufFile, vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """Return a SentencePiece BPE tokenizer; its merges are computed from the tokens' scores."""
    scores = _read_scores(file, vocabulary)
    tokens = list(vocabulary.tokens)
    num_characters = sum(len(token) ** 2 for token in tokens)
    if num_characters > _MAX_SPLIT_CHARACTERS:
        refuse_tokens(
            file, "expected tokens that a second suffices to split, found too many long ones"
        )
    try:
        merges = merges_from_scores(tokens, scores.tolist(), _MAX_PAIRS)
    except TooManyPairsError:
        refuse_tokens(
            file,
            f"expected at most {_MAX_PAIRS} pairs of tokens that are a token together, found more",
        )
    return _with_visible_spaces(file, vocabulary, merges, prefix_space=True)


def _read_scores(file: GgufFile, vocabulary: Vocabulary) -> Array:
    """Return the score of each token, float64 ``[tokens]``: the best is merged first."""
    count = len(vocabulary.tokens)
    scores = read_numbers(file, "scores", float, count).astype(np.float64)
    if len(scores) != count or not np.isfinite(scores).all():
        refuse_tokens(
            file,
            f"tokenizer.ggml.scores: expected a finite number for each of {count} tokens, "
            "found others",
        )
    # Merges of user-defined tokens come first; converters write scores of -1000 for these tokens.
    scores[vocabulary.kinds == TokenKind.USER_DEFINED] = np.inf
    return scores


def _gemma4_bpe(file: GgufFile, vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """Return the BPE tokenizer of Gemma 4.

    A text is split into runs of line ends and the text between them. A part that is a token is
    split nevertheless if merges do not make this token, as in the original: ``</div>`` in a text
    becomes three tokens.
    """
    merges = _read_merges(file, vocabulary)
    backend = _with_visible_spaces(file, vocabulary, merges, prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(LINE_ENDS_PATTERN), "isolated")
    return backend


def _with_visible_spaces(
    file: GgufFile,
    vocabulary: Vocabulary,
    merges: list[tuple[str, str]],
    *,
    prefix_space: bool,
) -> tokenizers.Tokenizer:
    """Return a BPE tokenizer whose tokens have a visible character for a space.

    A character without a token becomes tokens of its bytes. ``prefix_space``: whether a space is
    prepended to a text if the file does not say.
    """
    vocab = _ids_by_text(file, vocabulary)
    unknown = vocabulary.special_text("unknown")
    model = models.BPE(
        vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback="<0x00>" in vocab
    )
    backend = tokenizers.Tokenizer(model)
    normalizing: list[Any] = [normalizers.Replace(" ", VISIBLE_SPACE)]
    # As in llama.cpp, the space is prepended to the text, and to each part of the text that follows
    # a special token.
    if _has_space_prefix(file, default=prefix_space):
        normalizing.insert(0, normalizers.Prepend(VISIBLE_SPACE))
    backend.normalizer = normalizers.Sequence(normalizing)
    backend.decoder = _decoder(file, space_prefix=prefix_space)
    _add_bos_eos(backend, file, vocabulary, add_bos=True)
    return backend


def _has_space_prefix(file: GgufFile, *, default: bool) -> bool:
    """Return whether a space is prepended to a text; ``default`` if the file does not say."""
    return read_flag(file, "add_space_prefix", default=default)


def _decoder(file: GgufFile, *, space_prefix: bool) -> decoders.Decoder:
    """Return the decoder of tokens that have a visible character for a space.

    ``space_prefix``: whether a space is prepended to a text if the file does not say.
    """
    steps: list[Any] = [
        decoders.Replace(VISIBLE_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if _has_space_prefix(file, default=space_prefix):
        steps.append(decoders.Strip(" ", left=1, right=0))
    return decoders.Sequence(steps)


def _ids_by_text(file: GgufFile, vocabulary: Vocabulary) -> dict[str, int]:
    """Return the id of each token, by its text; refuse a text that two tokens have."""
    ids = vocabulary.ids_by_text
    if len(ids) < np.count_nonzero(vocabulary.tokens.sizes):
        repeated = next(
            token for i, token in enumerate(vocabulary.tokens) if token and ids[token] != i
        )
        _refuse_repeated(file, repeated)
    return ids


def _refuse_repeated(file: GgufFile, token: str) -> NoReturn:
    found = f"{token[:40]!r} twice"
    refuse_tokens(file, f"expected every token once, found {found}; convert the model again")


_MODELS: dict[str, Callable[[GgufFile, Vocabulary], tokenizers.Tokenizer]] = {
    "gpt2": _byte_level_bpe,
    "llama": _sentencepiece_bpe,
    "gemma4": _gemma4_bpe,
}


def _parse_merges(merges: Sequence[str]) -> list[tuple[str, str]]:
    """Return the two tokens of each merge, such as ``("th", "e")`` of ``"th e"``.

    Files have 100,000 merges and more. If each merge has one space, and it is not at the beginning,
    one split of the joined text replaces a call of :func:`_parse_merge` for each.
    """
    text = "\n".join(merges)
    has_one_space = text.count(" ") == len(merges) and all(" " in merge for merge in merges)
    if has_one_space and text.count("\n") == len(merges) - 1 and "\n " not in f"\n{text}":
        parts = text.replace(" ", "\n").split("\n")
        return list(zip(parts[::2], parts[1::2], strict=True))
    return [_parse_merge(merge) for merge in merges]


def _read_merges(file: GgufFile, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return the merges of a BPE tokenizer.

    Raises:
        TokenizerError: the file has none, and too many tokens that need them.
    """
    merges = list(read_texts(file, "merges"))
    if not merges:
        is_normal = (vocabulary.kinds == TokenKind.NORMAL).tolist()
        normal = [token for token, known in zip(vocabulary.tokens, is_normal, strict=True) if known]
        merged = sum(len(token) > 1 for token in normal)
        if merged > _MAX_UNMERGED:
            expected = f"merges, of which {merged} tokens are made"
            remedy = "convert the model again, with its tokenizer"
            refuse_tokens(file, f"tokenizer.ggml.merges: expected {expected}, found none; {remedy}")
    return _parse_merges(merges)


def _parse_merge(merge: str) -> tuple[str, str]:
    """Split a merge at the first space after its first character.

    A token may begin with a space: ``"  a"`` gives ``(" ", "a")``.
    """
    first, _, second = merge[1:].partition(" ")
    return merge[:1] + first, second


class _AroundTexts(NamedTuple):
    """Tokens that are added before and after each text, with their ids."""

    before: list[tuple[str, int]]
    after: list[tuple[str, int]]


def _around_texts(file: GgufFile, vocabulary: Vocabulary, *, add_bos: bool) -> _AroundTexts:
    """Return the BOS and EOS tokens that the file wants around each text.

    If the file does not say, BOS is added if ``add_bos``, and EOS is not.
    """
    around = _AroundTexts([], [])
    for name, default, tokens in (("bos", add_bos, around.before), ("eos", False, around.after)):
        if not read_flag(file, f"add_{name}_token", default=default):
            continue
        token = vocabulary.special_text(name)
        if token is None:
            key = f"tokenizer.ggml.add_{name}_token"
            refuse_tokens(file, f"{key}: expected {name}_token_id as well, found none")
        tokens.append((token, vocabulary.special_ids[name]))
    return around


def _add_bos_eos(
    backend: tokenizers.Tokenizer, file: GgufFile, vocabulary: Vocabulary, *, add_bos: bool
) -> None:
    """Make ``backend`` add BOS and EOS tokens around each text, as :func:`_around_texts` says."""
    before, after = _around_texts(file, vocabulary, add_bos=add_bos)
    if before or after:
        backend.post_processor = processors.TemplateProcessing(
            single=[*[token for token, _ in before], "$A", *[token for token, _ in after]],
            special_tokens=[*before, *after],
        )


def _added_tokens(file: GgufFile, vocabulary: Vocabulary) -> dict[int, AddedToken]:
    """Return the tokens that are found in a text before the pre-tokenizer splits it, by id.

    These are the CONTROL, UNKNOWN and USER_DEFINED tokens; decoding skips the CONTROL and UNKNOWN
    ones.
    """
    # Phi-3's SentencePiece tokenizers strip white space after special tokens. GGUF files do not
    # say so.
    is_llama = file.get("tokenizer.ggml.model") == "llama"
    takes_space = is_llama and file.get("general.architecture") == "phi3"
    return {
        number: AddedToken(
            token,
            special=ADDED_KINDS[TokenKind(vocabulary.kinds[number])],
            normalized=False,
            rstrip=takes_space and token not in _KEEP_SPACE,
        )
        for number, token in vocabulary.added.items()
    }
