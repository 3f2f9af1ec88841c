"""Conversion of training text to token ids, with the run's own tokenizer or the target's.

Models that are trained from scratch have this chat format, whose markers are single tokens. A
marker in the content of a turn is encoded as ordinary text, so the content cannot end the turn::

    <|user|>Hello<|end|><|assistant|>Hi there<|end|>
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers

from pronk import TokenizerError
from pronk.checkpoint import ModelConfig
from pronk.text import Tokenizer, load_backend

END_OF_TEXT = "<|endoftext|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END = "<|end|>"
# special tokens of a tokenizer that the run trains, in the order of their ids
SPECIAL_TOKENS = (END_OF_TEXT, USER, ASSISTANT, END)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' }}{{ message['content'] "
    "}}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

Turns = list[tuple[str, str]]  # role and content of each turn of a dialogue

_ROLES = {
    "User": "user",
    "Customer": "user",
    "Question": "user",
    "Assistant": "assistant",
    "Barista": "assistant",
    "Answer": "assistant",
}
_LABEL = re.compile(rf"^({'|'.join(_ROLES)}): ?", re.MULTILINE)


def parse_dialogue(text: str) -> Turns | None:
    """Return the turns ``(role, content)`` of a dialogue; ``None`` if ``text`` is no dialogue.

    A dialogue has labels such as "User:" or "Question:"; its roles alternate, beginning with the
    user. Of the texts that begin with "Question:", half are not treated as dialogues, so that the
    model also learns such texts without the chat format.
    """
    if not text.startswith(("User: ", "Customer: ", "Question: ")):
        return None
    if text.startswith("Question: ") and zlib.crc32(text.encode()) % 2:
        return None
    turns = _split(text)
    if len(turns) < 2 or len(turns) % 2:
        return None
    expected = ("user", "assistant")
    for i, (role, content) in enumerate(turns):
        if role != expected[i % 2] or not content:
            return None
    return turns


def user_turns(text: str) -> list[str]:
    """Return the contents of the user's turns in a dialogue, even if it ends with one of these."""
    return [content for role, content in _split(text) if role == "user"]


def _split(text: str) -> Turns:
    """Split a text at labels such as "User:", and return role and content of each part.

    The text before the first label is left out.
    """
    parts = _LABEL.split(text)[1:]
    labelled = zip(parts[::2], parts[1::2], strict=True)
    return [(_ROLES[label], content.strip()) for label, content in labelled]


def dialogue_ids(tokenizer: tokenizers.Tokenizer, turns: Turns) -> list[int]:
    """Return the token ids of a dialogue in the format of :data:`CHAT_TEMPLATE`."""
    _, user, assistant, end = special_ids(tokenizer)
    marker = {"user": user, "assistant": assistant}
    ids: list[int] = []
    for role, content in turns:
        ids += [marker[role], *tokenizer.encode(content, add_special_tokens=False).ids, end]
    return ids


def special_ids(tokenizer: tokenizers.Tokenizer) -> list[int]:
    """Return the ids of :data:`SPECIAL_TOKENS` in a tokenizer.

    Raise a ``TokenizerError`` if one is missing.
    """
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    missing = [token for token, number in ids.items() if number is None]
    if missing:
        msg = (
            f"expected a tokenizer with {', '.join(SPECIAL_TOKENS)}; found none of "
            f"{', '.join(missing)} in it"
        )
        raise TokenizerError(msg)
    return [number for number in ids.values() if number is not None]


@dataclass(frozen=True)
class Encoder:
    """Converter of training texts to token ids.

    Names of special tokens in a text are encoded as ordinary text.
    """

    encode_plain: Callable[[list[str]], list[list[int]]]  # encodes texts, without the chat format
    # Encodes the turns of one dialogue, in the chat format.
    encode_dialogue: Callable[[Turns], list[int]]
    end_id: int  # id of the end-of-text token, which follows each document
    vocab_size: int  # greater than all token ids
    # Fingerprint of the target's tokenizer; empty for the run's own tokenizer.
    fingerprint: str = ""

    @classmethod
    def of_run(cls, backend: tokenizers.Tokenizer) -> Encoder:
        """Return an encoder with the tokenizer that the run itself has trained."""

        def plain(texts: list[str]) -> list[list[int]]:
            encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
            return [encoding.ids for encoding in encodings]

        def dialogue(turns: Turns) -> list[int]:
            return dialogue_ids(backend, turns)

        end, *_ = special_ids(backend)
        return cls(plain, dialogue, end, backend.get_vocab_size())

    @classmethod
    def of_target(cls, tokenizer: Tokenizer, config: ModelConfig) -> Encoder:
        """Return an encoder with the target's tokenizer, special tokens and chat template."""
        backend = load_backend(tokenizer.backend.to_str())
        backend.encode_special_tokens = True

        def plain(texts: list[str]) -> list[list[int]]:
            return [encoding.ids for encoding in backend.encode_batch_fast(texts)]

        def dialogue(turns: Turns) -> list[int]:
            if tokenizer.chat_template is None:
                labelled = [f"{role.capitalize()}: {content}" for role, content in turns]
                (ids,) = plain(["\n\n".join(labelled)])
                return ids
            answered = turns[-1][0] == "assistant"
            messages = [{"role": role, "content": content} for role, content in turns]
            text = tokenizer.chat(messages, add_generation_prompt=not answered)
            return tokenizer.encode(text, add_special_tokens=False)

        end = next(iter((*tokenizer.eos_ids, *config.eos_ids)), 0)
        return cls(plain, dialogue, end, config.vocab_size, tokenizer.fingerprint)

    def encode(self, texts: list[str]) -> Iterator[list[int]]:
        """Yield the token ids of each text; dialogues are encoded in the chat format."""
        for text, ids in zip(texts, self.encode_plain(texts), strict=True):
            turns = parse_dialogue(text)
            yield ids if turns is None else self.encode_dialogue(turns)


def token_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    """Return the integer type of a token file: uint16 if all token ids fit, otherwise uint32."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32
