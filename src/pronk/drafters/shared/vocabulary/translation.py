"""Translation between the vocabularies of a target and of a draft model.

Vocabularies are *identical* if every token has the same id in both. Ids are then used as they are; differences in
padding and in added tokens cost only those tokens. Otherwise the draft proposes only tokens that both vocabularies have
(token-level intersection, Timor et al. 2025): tokens of the same bytes, special tokens of the same name, and the end of
text. The draft reads the text re-encoded in its own tokens (:mod:`~pronk.drafters.shared.vocabulary.reencoder`).

The output is never affected: a text that is cut short or encoded otherwise only lowers the acceptance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.drafters.shared.vocabulary.reencoder import Recoding, Reencoder
from pronk.errors import OptionError
from pronk.tokenization.spelling import Spelling, spell, without_prefix
from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["Reencoder", "Translation"]

# Least fraction of the smaller vocabulary's tokens of two bytes or more that the other one must have. Vocabularies of
# 1,024 to 16,384 tokens, trained on licences, documentation, Python and C, share 0.3 or more, which covers at least
# half of a text. With a tenth or less, the common tokens are little more than short pieces of words.
_MIN_SHARE = 0.1


class Translation:
    """Maps between a target's vocabulary and a draft model's; made by :meth:`between`.

    Attributes:
        identical: whether every token has the same id in both, apart from padding and added tokens.
        num_shared: number of tokens that both have.
        is_identity: whether the two sets of ids are equal.
    """

    def __init__(
        self,
        pairs: Mapping[int, int],
        target_size: int,
        draft_size: int,
        recoding: Recoding | None,
        missing_ids: set[int],
    ) -> None:
        self.identical = recoding is None
        self.num_shared = len(pairs)
        self._pairs, self._recoding, self._missing_ids = pairs, recoding, frozenset(missing_ids)
        self._target_size, self._draft_size = target_size, draft_size
        if self.identical:
            self._index = torch.tensor(sorted(i for i in missing_ids if i < target_size), dtype=torch.long)
        else:
            self._index = torch.full((target_size,), draft_size)
            self._index[list(pairs)] = torch.tensor(list(pairs.values()))
        self.is_identity = self.identical and target_size == draft_size and not self._index.numel()

    @classmethod
    def same(cls, target_size: int, draft_size: int) -> Translation:
        """Return a translation for models without known tokenizers, whose ids are taken as equal."""
        return cls({i: i for i in range(min(target_size, draft_size))}, target_size, draft_size, None, set())

    @classmethod
    def between(
        cls, drafter: str, target: Tokenizer, target_size: int, draft: Tokenizer, draft_size: int
    ) -> Translation:
        """Return the translation between two models; errors begin with the name ``drafter``.

        The sizes are the numbers of logits of the models, padding included.

        Raises:
            OptionError: the two share too few tokens.
        """
        missing_ids = _differences(target, draft)
        if missing_ids is not None:
            ids = target.backend.get_vocab(with_added_tokens=True).values()
            same = {i: i for i in ids if i not in missing_ids and i < min(target_size, draft_size)}
            return cls(same, target_size, draft_size, None, missing_ids)
        target_spelling, draft_spelling = spell(target), spell(draft)
        texts = _pair_texts(target_spelling, draft_spelling)
        specials = _pair_specials(target, draft)
        pairs = {t: d for t, d in (texts | specials).items() if t < target_size and d < draft_size}
        if not _share_enough(target_spelling, draft_spelling, texts):
            msg = (
                f"{drafter}: expected a draft model with a similar vocabulary, found {len(pairs)} tokens in common: "
                f"the target's tokenizer has {target.vocab_size} tokens (its model {target_size}), the draft's "
                f"{draft.vocab_size} (its model {draft_size}); choose a draft of the same family"
            )
            raise OptionError(msg)
        return cls(
            pairs,
            target_size,
            draft_size,
            _make_recoding(target, draft, target_spelling, draft_spelling, specials),
            set(),
        )

    def to_target(self, logits: Tensor) -> Tensor:
        """Map logits ``[rows, draft_size]`` to ``[rows, target_size]``, ``-inf`` where the draft has no token."""
        if self.is_identity:
            return logits
        if self._index.device != logits.device:
            self._index = self._index.to(logits.device)
        if not self.identical:
            padded = F.pad(logits, (0, 1), value=-torch.inf)
            return padded.gather(1, self._index.expand(logits.shape[0], -1))
        missing = self._target_size - self._draft_size
        logits = F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, : self._target_size]
        return logits.index_fill(1, self._index, -torch.inf) if len(self._index) else logits

    def to_draft(self, token: int) -> int | None:
        """Return the draft's id of a target's token, or ``None`` if the draft lacks the token."""
        if self.identical:
            return token if token < self._draft_size and token not in self._missing_ids else None
        return self._pairs.get(token)

    def reencoder(self) -> Reencoder | None:
        """Return a converter for one request's text; ``None`` if the target's ids can be used as they are."""
        if self.identical and self._draft_size >= self._target_size and not len(self._index):
            return None
        return Reencoder(self._recoding, self._missing_ids, self._draft_size)

    def encode(self, tokens: Sequence[int]) -> list[int]:
        """Return the draft's tokens for the target's text; tokens that the draft lacks are left out."""
        reencoder = self.reencoder()
        if reencoder is None:
            return list(tokens)
        reencoder.update(tokens)
        return reencoder.tokens


def _differences(target: Tokenizer, draft: Tokenizer) -> set[int] | None:
    """Return the ids that differ; ``None`` if more than added tokens differ: ids must be translated."""
    target_tokens, draft_tokens = (
        {i: t for t, i in x.backend.get_vocab(with_added_tokens=True).items()} for x in (target, draft)
    )
    missing_ids = {i for i in target_tokens.keys() | draft_tokens.keys() if target_tokens.get(i) != draft_tokens.get(i)}
    added = target.backend.get_added_tokens_decoder(), draft.backend.get_added_tokens_decoder()
    if any(
        (i in target_tokens and i not in added[0]) or (i in draft_tokens and i not in added[1]) for i in missing_ids
    ):
        return None
    moved = {target_tokens[i] for i in missing_ids if i in target_tokens} & {
        draft_tokens[i] for i in missing_ids if i in draft_tokens
    }
    return None if moved else missing_ids


def _pair_texts(target: Spelling, draft: Spelling) -> dict[int, int]:
    """Map the target's ids to the draft's ids with the same bytes; of several the first."""
    first: list[dict[bytes, int]] = [{}, {}]
    for found, spelling in zip(first, (target, draft), strict=True):
        for token, text in spelling.texts.items():
            found.setdefault(text, token)
    return {token: first[1][text] for text, token in first[0].items() if text and text in first[1]}


def _pair_specials(target: Tokenizer, draft: Tokenizer) -> dict[int, int]:
    """Map the target's special ids to the draft's: tokens of the same name, and tokens that end a text."""
    names = {draft.backend.id_to_token(i): i for i in sorted(draft.special_ids)}
    pairs = {i: names[name] for i in sorted(target.special_ids) if (name := target.backend.id_to_token(i)) in names}
    for target_eos, draft_eos in zip(target.eos_ids, draft.eos_ids, strict=False):
        if target_eos not in pairs and draft_eos not in pairs.values():
            pairs[target_eos] = draft_eos
    return pairs


def _share_enough(target: Spelling, draft: Spelling, pairs: Mapping[int, int]) -> bool:
    smaller = min(sum(len(text) > 1 for text in spelling.texts.values()) for spelling in (target, draft))
    shared = sum(len(target.texts[token]) > 1 for token in pairs)
    return shared > 0 and shared >= _MIN_SHARE * smaller


def _make_recoding(
    target: Tokenizer,
    draft: Tokenizer,
    target_spelling: Spelling,
    draft_spelling: Spelling,
    specials: Mapping[int, int],
) -> Recoding:
    around = draft.encode("a")
    return Recoding(
        texts=target_spelling.texts,
        special_ids={i: specials.get(i) for i in target.special_ids},
        bos=target.bos_id,
        target_prefix=target_spelling.prefix,
        draft_texts=draft_spelling.texts,
        draft_prefix=draft_spelling.prefix,
        bos_ids=tuple(takewhile(draft.special_ids.__contains__, around)),
        encoder=without_prefix(draft),
        byte_tokens={text[0]: token for token, text in draft_spelling.texts.items() if len(text) == 1},
    )
