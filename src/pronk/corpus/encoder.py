"""Conversion of training text to token ids, with the run's own tokenizer or the target's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers

from pronk.architecture.config import ModelConfig
from pronk.corpus.dialogue import dialogue_ids, parse_dialogue, special_ids
from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["Encoder", "Turns", "token_dtype"]

Turns = list[tuple[str, str]]


@dataclass(frozen=True)
class Encoder:
    """Converter of texts to token ids; the name of a special token in a text is encoded as plain text."""

    encode_plain: Callable[[list[str]], list[list[int]]]  # encodes texts, without the chat format
    encode_dialogue: Callable[[Turns], list[int]]  # encodes the turns of one dialogue, in the chat format
    end_id: int  # id of the end-of-text token, which follows each document
    vocab_size: int  # number that all token ids are smaller than
    fingerprint: str = ""  # fingerprint of the target's tokenizer; empty for the run's own tokenizer

    @classmethod
    def of_run(cls, backend: tokenizers.Tokenizer) -> Encoder:
        """Return an encoder with the run's own tokenizer, trained by :mod:`pronk.train.tokenizer`."""

        def plain(texts: list[str]) -> list[list[int]]:
            return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]

        end = special_ids(backend)[0]
        return cls(plain, lambda turns: dialogue_ids(backend, turns), end, backend.get_vocab_size())

    @classmethod
    def of_target(cls, tokenizer: Tokenizer, config: ModelConfig) -> Encoder:
        """Return an encoder that adds special tokens as the target's tokenizer and chat template do."""
        backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
        backend.encode_special_tokens = True

        def plain(texts: list[str]) -> list[list[int]]:
            return [encoding.ids for encoding in backend.encode_batch_fast(texts)]

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
        """Yield the token ids of each text; a text that is a dialogue is encoded in the chat format."""
        for text, ids in zip(texts, self.encode_plain(texts), strict=True):
            turns = parse_dialogue(text)
            yield ids if turns is None else self.encode_dialogue(turns)


def token_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    """Return the integer type of the token ids in a token file."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32
