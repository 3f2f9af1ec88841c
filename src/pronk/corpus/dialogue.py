"""Chat format of trained models: recognize dialogues in the text and encode them.

::

    <|user|>Hello<|end|><|assistant|>Hi there<|end|>

The markers are single tokens. Text that spells a marker stays text, so the content of a turn cannot end the turn.
"""

from __future__ import annotations

import re
import zlib

from tokenizers import Tokenizer

from pronk.errors import TokenizerError

__all__ = ["CHAT_TEMPLATE", "SPECIAL_TOKENS", "dialogue_ids", "parse_dialogue", "special_ids", "user_turns"]

END_OF_TEXT, USER, ASSISTANT, END = SPECIAL_TOKENS = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' }}{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_ROLES = {
    "User": "user",
    "Customer": "user",
    "Question": "user",
    "Assistant": "assistant",
    "Barista": "assistant",
    "Answer": "assistant",
}
_LABEL = re.compile(rf"^({'|'.join(_ROLES)}): ?", re.MULTILINE)


def parse_dialogue(text: str) -> list[tuple[str, str]] | None:
    """Return the turns ``(role, content)`` of a dialogue, or ``None`` for other text.

    The roles alternate, beginning with the user. Half of the texts with "Question:" count as other text, so that the
    model also learns them without the chat format.
    """
    if not text.startswith(("User: ", "Customer: ", "Question: ")):
        return None
    if text.startswith("Question: ") and zlib.crc32(text.encode()) % 2:
        return None
    turns = _split(text)
    expected = ("user", "assistant")
    well_formed = all(role == expected[i % 2] and content for i, (role, content) in enumerate(turns))
    return turns if well_formed and len(turns) >= 2 and len(turns) % 2 == 0 else None


def user_turns(text: str) -> list[str]:
    """Return the user's turns of a dialogue, which may end with one, unlike in :func:`parse_dialogue`."""
    return [content for role, content in _split(text) if role == "user"]


def _split(text: str) -> list[tuple[str, str]]:
    """Return ``(role, content)`` of each labelled part of a text."""
    parts = _LABEL.split(text)[1:]
    return [(_ROLES[label], content.strip()) for label, content in zip(parts[::2], parts[1::2], strict=True)]


def dialogue_ids(tokenizer: Tokenizer, turns: list[tuple[str, str]]) -> list[int]:
    """Return the token ids of a dialogue in the format of :data:`CHAT_TEMPLATE`."""
    _, user, assistant, end = special_ids(tokenizer)
    marker = {"user": user, "assistant": assistant}
    ids: list[int] = []
    for role, content in turns:
        ids += [marker[role], *tokenizer.encode(content, add_special_tokens=False).ids, end]
    return ids


def special_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of :data:`SPECIAL_TOKENS`; raise a ``TokenizerError`` if one is missing."""
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    missing = [token for token, number in ids.items() if number is None]
    if missing:
        msg = f"expected a tokenizer with {', '.join(SPECIAL_TOKENS)}; found none of {', '.join(missing)} in it"
        raise TokenizerError(msg)
    return [number for number in ids.values() if number is not None]
