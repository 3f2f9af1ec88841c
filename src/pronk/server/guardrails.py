"""System prompt added to conversations, which asks for careful answers (Mistral 7B, section 5.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pronk.errors import PromptError
from pronk.tokenization.tokenizer import Tokenizer

# System prompt of section 5.1 of the paper, word for word.
MISTRAL_PROMPT = (
    "Always assist with care, respect, and truth. Respond with utmost utility yet securely. Avoid harmful, unethical, "
    "prejudiced, or negative content. Ensure replies promote fairness and positivity."
)


def add_system_prompt(
    messages: Sequence[Mapping[str, Any]], prompt: str | None, *, system: bool
) -> list[dict[str, Any]]:
    """Return a copy of the conversation with ``prompt`` before its system prompt; ``None`` adds nothing.

    ``system`` is the result of :func:`has_system_role`. If False, ``prompt`` is put before the first user message.
    """
    plain = [dict(message) for message in messages]
    if prompt is None:
        return plain
    role = "system" if system else "user"
    first = next((message for message in (plain[:1] if system else plain) if message["role"] == role), None)
    if first is None:
        return [{"role": role, "content": prompt}, *plain]
    content = first["content"]
    first["content"] = (
        f"{prompt}\n\n{content}" if isinstance(content, str) else [{"type": "text", "text": prompt}, *content]
    )
    return plain


def has_system_role(tokenizer: Tokenizer) -> bool:
    """Return whether the chat template renders the text of system messages."""
    word = "Zanzibar"
    try:
        text = tokenizer.chat([{"role": "system", "content": word}, {"role": "user", "content": "?"}])
    except PromptError:
        return False
    return word in text
