"""Fill in the middle: prompts for the text between a prefix and a suffix.

A model for code was trained on files cut into three parts. Special tokens mark the parts, and the
prompt ends where the middle begins::

    <|fim_prefix|>PREFIX<|fim_suffix|>SUFFIX<|fim_middle|>

Codestral has the suffix first, and no mark before the middle::

    [SUFFIX]SUFFIX[PREFIX]PREFIX

Files of context stand before the marks. With tokens for the name of a repository and for the
beginning of a file, they have the form that Qwen2.5-Coder and StarCoder 2 were trained on::

    <|repo_name|>REPOSITORY
    <|file_sep|>NAME
    TEXT<|file_sep|>filename
    <|fim_prefix|>…

Sources: ``llama-vocab.cpp`` (names of tokens) and ``format_prompt_infill`` (files of context) of
llama.cpp; Qwen2.5-Coder Technical Report (arXiv 2409.12186), section 3.2; ``encode_infilling`` of
CodeLlama and ``encode_fim`` of mistral-common.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pronk.base.errors import OptionError
from pronk.text.tokenizer import Tokenizer

# Names of the tokens before each part, of all families. A GGUF file or ``tokenizer_config.json``
# may state the token of a part under the key; the names count for files that do not.
_NAMES = {
    "prefix_token": (
        "<|fim_prefix|>",  # Qwen2.5-Coder, CodeGemma, Granite 4
        "<fim_prefix>",  # StarCoder 2, Granite Code
        "<fim-prefix>",  # SantaCoder
        "<\uff5cfim\u2581begin\uff5c>",  # DeepSeek-Coder
        "\u2581<PRE>",  # CodeLlama
        "<PRE>",
        "[PREFIX]",  # Codestral
        "<|code_prefix|>",  # GLM-4.5
    ),
    "suffix_token": (
        "<|fim_suffix|>",
        "<fim_suffix>",
        "<fim-suffix>",
        "<\uff5cfim\u2581hole\uff5c>",
        "\u2581<SUF>",
        "<SUF>",
        "[SUFFIX]",
        "<|code_suffix|>",
    ),
    "middle_token": (
        "<|fim_middle|>",
        "<fim_middle>",
        "<fim-middle>",
        "<\uff5cfim\u2581end\uff5c>",
        "\u2581<MID>",
        "<MID>",
        "[MIDDLE]",
        "<|code_middle|>",
    ),
    "repository_token": ("<|fim_repo|>", "<|repo_name|>", "<repo_name>", "<reponame>"),
    "file_token": ("<|file_sep|>", "<file_sep>", "<|filename|>", "<filename>"),
}
# Models with this token have the suffix first, and no token before the middle.
_SUFFIX_FIRST = "[SUFFIX]"
# Names of the repository and of the file to fill, which clients do not send; those of llama.cpp.
_REPOSITORY = "myproject\n"
_FILE = "filename\n"
# Text before each file of context, for models without a token for it; that of llama.cpp.
_SNIPPET = "\n\n--- snippet ---\n\n"
# Character that no vocabulary merges with others. After it, a SentencePiece tokenizer puts no space
# before a text.
_SEPARATOR = "\u263a"
_VISIBLE_SPACE = "\u2581"  # character that stands for a space in SentencePiece tokens


@dataclass(frozen=True)
class ContextFile:
    """A file, or a part of one, that the model reads before the text to fill.

    Attributes:
        text: content of the file.
        name: name of the file, which the model reads, too.
    """

    text: str
    name: str = "tmp"


@dataclass(frozen=True)
class InfillFormat:
    """Form of prompts for filling in the middle, with the token ids of one model.

    Attributes:
        tokenizer: tokenizer of the model.
        prefix: id of the token before the prefix.
        suffix: id of the token before the suffix.
        middle: id of the token before the middle; ``None`` if the suffix stands first.
        repository: id of the token before the name of a repository, or ``None``.
        file: id of the token before the name of a file, or ``None``.
    """

    tokenizer: Tokenizer
    prefix: int
    suffix: int
    middle: int | None
    repository: int | None
    file: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> InfillFormat:
        """Return the form of a model's prompts, from the tokens of its vocabulary.

        Raises:
            OptionError: the model has no tokens for filling in the middle.
        """
        ids = {key: _find(tokenizer, key) for key in _NAMES}
        prefix = ids["prefix_token"]
        suffix = ids["suffix_token"]
        middle = ids["middle_token"]
        if suffix is not None and tokenizer.token_name(suffix) == _SUFFIX_FIRST:
            middle = None
        elif middle is None:
            suffix = None
        if prefix is None or suffix is None:
            msg = (
                "suffix: expected a model with tokens for filling in the middle, such as "
                "<|fim_prefix|>, found none in its vocabulary; use a model for code, or leave the "
                "suffix out"
            )
            raise OptionError(msg)
        return cls(tokenizer, prefix, suffix, middle, ids["repository_token"], ids["file_token"])

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that begin another part or file, and so end the middle."""
        tokens = (self.prefix, self.suffix, self.middle, self.repository, self.file)
        return tuple(token for token in tokens if token is not None)

    def encode(
        self, prefix: str | Sequence[int], suffix: str, context: Iterable[ContextFile] = ()
    ) -> list[int]:
        """Return the token ids of a prompt for the text between ``prefix`` and ``suffix``.

        Names of special tokens in the texts become ordinary tokens.

        Args:
            prefix: text before the place to fill, or its token ids.
            suffix: text after the place to fill.
            context: files that the model reads first.
        """
        first = prefix if not isinstance(prefix, str) else self.tokenizer.encode_plain(prefix)
        before = [self.prefix, *first]
        after = [self.suffix, *self._encode_rest(suffix)]
        head = self._bos()
        head += self._encode_context(context)
        if self.middle is None:
            return [*head, *after, *before]
        return [*head, *before, *after, self.middle]

    def _bos(self) -> list[int]:
        """Return the beginning-of-text token, if the tokenizer puts it before a prompt."""
        bos = self.tokenizer.bos_id
        return [bos] if bos is not None and bos in self.tokenizer.encode("")[:1] else []

    def _encode_context(self, context: Iterable[ContextFile]) -> Iterator[int]:
        """Yield the token ids of the files of context, which end with the name of the file to fill.

        Without files there are none, so that a short prompt stays short.
        """
        encode = self.tokenizer.encode_plain
        files = list(context)
        if not files:
            return
        if self.repository is not None:
            yield self.repository
            yield from encode(_REPOSITORY)
        for file in files:
            if self.file is None:
                yield from encode(_SNIPPET)
            else:
                yield self.file
                yield from encode(f"{file.name}\n")
            yield from encode(file.text)
        if self.file is not None:
            yield self.file
            yield from encode(_FILE)

    def _encode_rest(self, text: str) -> list[int]:
        """Return the token ids of a text that goes on, without a space at its beginning.

        A SentencePiece tokenizer puts a space before every text. CodeLlama and Codestral were
        trained on suffixes without it.
        """
        encode = self.tokenizer.encode_plain
        head = encode(_SEPARATOR)
        has_space = bool(head) and self.tokenizer.token_name(head[0]).startswith(_VISIBLE_SPACE)
        ids = encode(_SEPARATOR + text)
        if not has_space or ids[: len(head)] != head:
            return encode(text)
        return ids[len(head) :]


def _find(tokenizer: Tokenizer, key: str) -> int | None:
    """Return the id of the token of a part: the one that the files state, or one of known names."""
    stated = tokenizer.special_tokens.get(key)
    names = _NAMES[key] if stated is None else (stated, *_NAMES[key])
    for name in names:
        token = tokenizer.backend.token_to_id(name)
        if token is not None:
            return token
    return None
