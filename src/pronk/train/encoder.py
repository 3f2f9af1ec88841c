"""How training text becomes token ids: with the tokenizer that the run has trained, or with that of a target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import tokenizers

from pronk.architecture.config import ModelConfig
from pronk.tokenization.tokenizer import Tokenizer
from pronk.train.chat import dialogue_ids, parse_dialogue, special_ids

__all__ = ["Encoder", "Turns"]

Turns = list[tuple[str, str]]


@dataclass(frozen=True)
class Encoder:
    """Texts to token ids; markers spelled out in a text stay text.

    Attributes:
        plain: ids of ordinary texts.
        dialogue: ids of a conversation.
        end: the token that stands between documents.
        vocab_size: ids are below it.
        fingerprint: tells tokenizers apart.
    """

    plain: Callable[[list[str]], list[list[int]]]
    dialogue: Callable[[Turns], list[int]]
    end: int
    vocab_size: int
    fingerprint: str = ""

    @classmethod
    def own(cls, backend: tokenizers.Tokenizer) -> Encoder:
        """For a tokenizer of :mod:`pronk.train.tokenizer`."""

        def plain(texts: list[str]) -> list[list[int]]:
            return [each.ids for each in backend.encode_batch_fast(texts, add_special_tokens=False)]

        end = special_ids(backend)[0]
        return cls(plain, lambda turns: dialogue_ids(backend, turns), end, backend.get_vocab_size())

    @classmethod
    def of_target(cls, tokenizer: Tokenizer, config: ModelConfig) -> Encoder:
        """As the target sees text: with what its tokenizer puts around it, conversations in its chat template."""
        backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
        backend.encode_special_tokens = True

        def plain(texts: list[str]) -> list[list[int]]:
            return [each.ids for each in backend.encode_batch_fast(texts)]

        def dialogue(turns: Turns) -> list[int]:
            if not tokenizer.has_chat_template:
                return plain(["\n\n".join(f"{role.capitalize()}: {content}" for role, content in turns)])[0]
            answered = turns[-1][0] == "assistant"
            messages = [{"role": role, "content": content} for role, content in turns]
            text = tokenizer.chat(messages, add_generation_prompt=not answered)
            return tokenizer.encode(text, add_special_tokens=False)

        end = next(iter((*tokenizer.eos_ids, *config.eos_ids)), 0)
        return cls(plain, dialogue, end, config.vocab_size, tokenizer.fingerprint)

    def encode(self, texts: list[str]) -> Iterator[list[int]]:
        """Ids of documents; those that are dialogues are written as such."""
        for text, ids in zip(texts, self.plain(texts), strict=True):
            turns = parse_dialogue(text)
            yield ids if turns is None else self.dialogue(turns)
