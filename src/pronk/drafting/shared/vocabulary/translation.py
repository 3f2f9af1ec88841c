"""Translation between the vocabularies of a target and of a draft model.

Two vocabularies are *identical* if every token has the same id in both, apart from padding and
added tokens. Ids then need no translation; the draft neither reads nor proposes the tokens that
differ. For other vocabularies the draft proposes only tokens that both have (token-level
intersection, Timor et al. 2025): tokens with the same bytes, special tokens with the same name, and
the end of text. The draft reads the text re-encoded in its own tokens
(:mod:`~pronk.drafting.shared.vocabulary.reencoder`).

A wrong or incomplete translation cannot change the output. It only lowers the acceptance rate of
draft tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import takewhile

import numpy as np

from pronk.base.arrays import Array
from pronk.base.errors import OptionError
from pronk.drafting.shared.vocabulary.reencoder import Recoding, Reencoder
from pronk.text.spelling import Spelling, spell, without_prefix
from pronk.text.tokenizer import Tokenizer

# A draft model is refused if less than this fraction of the smaller vocabulary is also in the other
# one; only tokens of at least 2 bytes count. Any two of the vocabularies measured (1,024 to 16,384
# tokens, trained on licences, documentation, Python and C) have 0.3 or more in common, and these
# tokens make up at least half of a text. At 0.1 or less the common tokens are mostly fragments of
# words.
_MIN_OVERLAP = 0.1


class Translation:
    """Maps between a target's vocabulary and a draft model's.

    Attributes:
        identical: whether every token has the same id in both, apart from padding and added tokens.
        is_identity: whether padding and added tokens agree, too, so that :meth:`to_target` returns
            its argument.
    """

    def __init__(
        self,
        target_size: int,
        draft_size: int,
        missing_ids: Collection[int] = (),
        recoding: Recoding | None = None,
        pairs: Mapping[int, int] | None = None,
    ) -> None:
        """Create the translation between two vocabularies of these sizes.

        Without ``recoding``, an id is the same token in both, except the ids in ``missing_ids``.
        With it, ``pairs`` maps the target's ids of the common tokens to the draft's.
        """
        self.identical = recoding is None
        self._pairs = pairs or {}
        self._recoding = recoding
        self._missing_ids = frozenset(missing_ids)
        self._target_size = target_size
        self._draft_size = draft_size
        # ``_index`` lists the ids whose tokens differ: the draft must not propose them
        if self.identical:
            self._index = np.array(sorted(i for i in missing_ids if i < target_size), np.intp)
        else:
            # ``_index[target's id]`` is the draft's id, or ``draft_size`` if the draft lacks the
            # token
            self._index = np.full(target_size, draft_size, np.intp)
            self._index[list(self._pairs)] = list(self._pairs.values())
        self._reads_all_ids = self.identical and draft_size >= target_size and not len(self._index)
        self.is_identity = self._reads_all_ids and target_size == draft_size

    @classmethod
    def between(
        cls, drafter: str, target: Tokenizer, target_size: int, draft: Tokenizer, draft_size: int
    ) -> Translation:
        """Return the translation between two models.

        ``target_size`` and ``draft_size`` are the models' numbers of logits, padding included.
        ``drafter`` is the name at the start of the error. Raises ``OptionError`` if the
        vocabularies have too few tokens in common.
        """
        missing_ids = _differences(target, draft)
        if missing_ids is not None:
            return cls(target_size, draft_size, missing_ids)
        target_spelling = spell(target)
        draft_spelling = spell(draft)
        texts = _pair_texts(target_spelling, draft_spelling)
        specials = _pair_specials(target, draft)
        pairs = {t: d for t, d in (texts | specials).items() if t < target_size and d < draft_size}
        vocabularies = target_spelling.texts, draft_spelling.texts
        smaller = min(
            sum(len(text) > 1 for text in vocabulary.values()) for vocabulary in vocabularies
        )
        shared = sum(len(target_spelling.texts[token]) > 1 for token in texts)
        if not shared or shared < _MIN_OVERLAP * smaller:
            msg = (
                f"{drafter}: expected a draft model with a similar vocabulary, found {len(pairs)} "
                "tokens in common: "
                f"the target's tokenizer has {target.vocab_size} tokens (its model {target_size}), "
                "the draft's "
                f"{draft.vocab_size} (its model {draft_size}); choose a draft of the same family"
            )
            raise OptionError(msg)
        recoding = Recoding(
            texts=target_spelling.texts,
            special_ids={i: specials.get(i) for i in target.special_ids},
            bos=target.bos_id,
            target_prefix=target_spelling.prefix,
            draft_texts=draft_spelling.texts,
            draft_prefix=draft_spelling.prefix,
            bos_ids=tuple(takewhile(draft.special_ids.__contains__, draft.encode("a"))),
            encoder=without_prefix(draft),
            byte_tokens={
                text[0]: token for token, text in draft_spelling.texts.items() if len(text) == 1
            },
        )
        return cls(target_size, draft_size, recoding=recoding, pairs=pairs)

    def to_target(self, logits: Array) -> Array:
        """Map logits ``[rows, draft_size]`` to ``[rows, target_size]``.

        ``-inf`` if the draft lacks a token.
        """
        if self._reads_all_ids:
            return logits[:, : self._target_size]
        # If the ids differ, ``_index`` takes the tokens that the draft lacks from an added last
        # column.
        columns = self._target_size if self.identical else self._draft_size + 1
        padded = np.full((len(logits), columns), -np.inf, logits.dtype)
        common = min(columns, self._draft_size)
        padded[:, :common] = logits[:, :common]
        if not self.identical:
            return padded.take(self._index, axis=1)
        padded[:, self._index] = -np.inf
        return padded

    def to_draft(self, token: int) -> int | None:
        """Return the draft's id of a target's token, or ``None`` if the draft lacks the token."""
        if self.identical:
            return token if token < self._draft_size and token not in self._missing_ids else None
        return self._pairs.get(token)

    def make_reencoder(self) -> Reencoder | None:
        """Return a converter for one request's text.

        ``None`` if the draft reads the target's ids unchanged.
        """
        if self._reads_all_ids:
            return None
        return Reencoder(self._recoding, self._missing_ids, self._draft_size)


def _differences(target: Tokenizer, draft: Tokenizer) -> set[int] | None:
    """Return the ids whose tokens differ; ``None`` if the vocabularies are not *identical*.

    The docstring of this module defines identical vocabularies.
    """
    vocabularies = [
        tokenizer.backend.get_vocab(with_added_tokens=True) for tokenizer in (target, draft)
    ]
    target_tokens, draft_tokens = ({i: token for token, i in ids.items()} for ids in vocabularies)
    changed = {
        i
        for i in target_tokens.keys() | draft_tokens.keys()
        if target_tokens.get(i) != draft_tokens.get(i)
    }
    target_only, draft_only = (
        {i: by_id[i] for i in changed if i in by_id} for by_id in (target_tokens, draft_tokens)
    )
    target_added, draft_added = (
        model.backend.get_added_tokens_decoder().keys() for model in (target, draft)
    )
    if not (target_only.keys() <= target_added and draft_only.keys() <= draft_added):
        return None  # a token differs that is no added token, so the vocabularies are not identical
    # added tokens that have another id in the draft
    moved = {*target_only.values()} & {*draft_only.values()}
    return None if moved else changed


def _pair_texts(target: Spelling, draft: Spelling) -> dict[int, int]:
    """Map the target's ids to the draft's ids of the same bytes.

    Of ids with equal bytes, use the first.
    """
    target_ids = dict[bytes, int]()
    draft_ids = dict[bytes, int]()
    for ids, spelling in ((target_ids, target), (draft_ids, draft)):
        for token, text in spelling.texts.items():
            ids.setdefault(text, token)
    return {
        token: draft_ids[text] for text, token in target_ids.items() if text and text in draft_ids
    }


def _pair_specials(target: Tokenizer, draft: Tokenizer) -> dict[int, int]:
    """Map the target's special ids to the draft's of the same name, and end-of-text tokens."""
    names = {draft.backend.id_to_token(i): i for i in sorted(draft.special_ids)}
    pairs = {
        i: names[name]
        for i in sorted(target.special_ids)
        if (name := target.backend.id_to_token(i)) in names
    }
    for target_eos, draft_eos in zip(target.eos_ids, draft.eos_ids, strict=False):
        if target_eos not in pairs and draft_eos not in pairs.values():
            pairs[target_eos] = draft_eos
    return pairs
