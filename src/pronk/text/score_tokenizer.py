"""A SentencePiece BPE tokenizer in little memory, for vocabularies whose merges follow from scores.

The tokenizers package holds each token of a vocabulary twice, with a table of all merges: 67 MB for
the 262,144 tokens of Gemma 3. Here the vocabulary is 6 MB of arrays
(:class:`~pronk.kernels.merges.ScoreMerges`). The ids are those of the package, whose tokenizer is
built only for what needs all of it, such as the text of its ``tokenizer.json``. The package also
finds the added tokens in a text, because they have rules of their own, and joins tokens to a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, decoders, models

from pronk.checkpoint.gguf.texts import Texts
from pronk.checkpoint.gguf.vocabulary import MAX_TOKEN_CHARACTERS, VISIBLE_SPACE
from pronk.kernels.merges import ScoreMerges

# Name of the only token of the tokenizer that finds added tokens; it stands for all other text. No
# added token is as long.
_OTHER_TEXT = "x" * (MAX_TOKEN_CHARACTERS + 1)
_OTHER_ID = 0


@dataclass(frozen=True)
class ScoreEncoding:
    """Token ids of a text, with the fields of :class:`tokenizers.Encoding` that pronk uses.

    Attributes:
        ids: token ids.
        special_tokens_mask: 1 for tokens that the tokenizer has added around the text, else 0.
    """

    ids: list[int]
    special_tokens_mask: list[int]
    _find_offsets: Callable[[], list[tuple[int, int]]]

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """Begin and end of each token in the text, in characters."""
        return self._find_offsets()


class ScoreTokenizer:
    """A SentencePiece BPE tokenizer; the methods are those of :class:`tokenizers.Tokenizer`.

    Args:
        merges: tokens of texts between added tokens.
        tokens: text of each token; empty for an unused id.
        added: added tokens, by id.
        prefix: text in front of a text and of each part that follows an added token.
        before: tokens that are added before a text.
        after: tokens that are added after a text.
        decoder: makes text of the texts of tokens.
        build: builds the same tokenizer of the tokenizers package.
    """

    def __init__(
        self,
        merges: ScoreMerges,
        tokens: Texts,
        added: Mapping[int, AddedToken],
        *,
        prefix: str,
        before: Sequence[int],
        after: Sequence[int],
        decoder: decoders.Decoder,
        build: Callable[[], tokenizers.Tokenizer],
    ) -> None:
        self.decoder = decoder
        self._merges = merges
        self._tokens = tokens
        self._added = dict(added)
        self._special = {number for number, token in added.items() if token.special}
        self._prefix = prefix
        self._before = list(before)
        self._after = list(after)
        self._build = build
        # Finds added tokens: its other token is all text between two of them.
        self._finder = tokenizers.Tokenizer(
            models.WordLevel({_OTHER_TEXT: _OTHER_ID}, unk_token=_OTHER_TEXT)
        )
        self._finder.add_tokens(list(added.values()))
        ids = {token.content: number for number, token in added.items()}
        self._found_ids = {
            number: ids[token.content]
            for number, token in self._finder.get_added_tokens_decoder().items()
        }

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> ScoreEncoding:
        """Return the tokens of a text, with their offsets and the mask of special tokens."""
        (encoding,) = self.encode_batch_fast([sequence], add_special_tokens=add_special_tokens)
        return encoding

    def encode_batch_fast(
        self, sequences: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[ScoreEncoding]:
        """Return the tokens of each text."""
        parts = self._finder.encode_batch(list(sequences), add_special_tokens=False)
        return [
            self._encode(text, found, add_special_tokens)
            for text, found in zip(sequences, parts, strict=True)
        ]

    def _encode(
        self, text: str, found: tokenizers.Encoding, add_special_tokens: bool
    ) -> ScoreEncoding:
        ids = list[int]()
        for number, (start, stop) in zip(found.ids, found.offsets, strict=True):
            if number == _OTHER_ID:
                part = self._prefix + text[start:stop]
                ids += self._merges.encode(part.replace(" ", VISIBLE_SPACE))
            else:
                ids.append(self._found_ids[number])
        before = self._before if add_special_tokens else []
        after = self._after if add_special_tokens else []

        def find_offsets() -> list[tuple[int, int]]:
            full = self._build()
            return full.encode(text, add_special_tokens=add_special_tokens).offsets

        mask = [1] * len(before) + [0] * len(ids) + [1] * len(after)
        return ScoreEncoding([*before, *ids, *after], mask, find_offsets)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        hidden = self._special if skip_special_tokens else set[int]()
        texts = [text for text in self._texts(ids, hidden) if text is not None]
        return self.decoder.decode(texts)

    def _texts(self, ids: Sequence[int], hidden: set[int]) -> Iterator[str | None]:
        for number in ids:
            yield None if number in hidden else self.id_to_token(number)

    def decode_batch(
        self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = True
    ) -> list[str]:
        """Return the text of each list of token ids."""
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in sequences]

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token; ``None`` if there is no such token."""
        return self._merges.find(token)

    def id_to_token(self, id: int) -> str | None:  # noqa: A002 - the name of the package
        """Return the text of a token as it is stored; ``None`` for an unused id."""
        return self._tokens[id] or None if 0 <= id < len(self._tokens) else None

    def get_vocab(self, *, with_added_tokens: bool = True) -> dict[str, int]:  # noqa: ARG002 - as the package's
        """Return the id of each token, by its text; added tokens belong to the vocabulary."""
        return {token: number for number, token in enumerate(self._tokens) if token}

    def get_vocab_size(self, *, with_added_tokens: bool = True) -> int:  # noqa: ARG002 - as the package's
        """Return the number of tokens."""
        return int((self._tokens.sizes > 0).sum())

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Return the added tokens, by id."""
        return self._added

    def to_str(self, *, pretty: bool = False) -> str:
        """Return the text of ``tokenizer.json``."""
        return self._build().to_str(pretty=pretty)

    def no_truncation(self) -> None:
        """Do nothing: texts are never truncated."""

    def no_padding(self) -> None:
        """Do nothing: texts are never padded."""
