"""Branch positions: where later prompts of a conversation part from this one.

The next prompt of a conversation repeats this one up to a position before its end:

- Templates of thinking models delete earlier thoughts, and write an answer in the past otherwise
  than they begin it. The next question parts the prompts behind the last user message.
- The user changes the last message and sends it again. The prompts part where its content begins.
- A tool returns its result. The prompts part at the header of the answer, or behind it.

Each template has rules of its own for these cases. Therefore the template renders a later
conversation of each, and :class:`~pronk.text.tokenizer.Tokenizer` compares their token ids with
those of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class ChatPrompt(NamedTuple):
    """Token ids of a conversation, and the positions at which later prompts may part from it.

    Attributes:
        token_ids: ids of the whole prompt.
        branch_positions: numbers of first tokens that a later prompt may share, ascending, in
            1..len(token_ids). They only advise the prefix cache: a wrong one costs time and changes
            no token.
    """

    token_ids: list[int]
    branch_positions: tuple[int, ...] = ()


class LaterConversation(NamedTuple):
    """A conversation that may follow another one."""

    messages: list[Mapping[str, Any]]
    begins_answer: bool = True  # whether the rendered text ends with the header of an answer


def later_conversations(messages: Sequence[Mapping[str, Any]]) -> list[LaterConversation]:
    """Return conversations that may follow a conversation; none if no message is of the user.

    1. The last user message has another content, which differs in its first character.
    2. The last user message has another answer and is followed by a further question.
    3. If messages follow the last user message, calls of tools and their results: all messages,
       without the header of an answer.

    Args:
        messages: checked messages (:func:`~pronk.text.chat.messages.check_messages`).
    """
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        return []
    last = len(roles) - 1 - roles[::-1].index("user")
    question = messages[last]
    edited = {**question, "content": _other_content(question["content"])}
    answer = {"role": "assistant", "content": "a"}
    further = {**question, "content": _with_text(question["content"], "a")}
    later = [
        LaterConversation([*messages[:last], edited]),
        LaterConversation([*messages[: last + 1], answer, further]),
    ]
    if last + 1 < len(messages):
        later.append(LaterConversation([*messages], begins_answer=False))
    return later


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the number of first items that two texts or two lists share.

    A binary search compares slices, which takes a thousandth of the time of a loop over items.
    """
    low = 0
    high = min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _other_content(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return a content of one letter, which differs from the first character of ``content``.

    White space at the beginning is skipped, as templates may strip it.
    """
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    begins_with_a = "".join(texts).lstrip().startswith("a")
    return _with_text(content, "b" if begins_with_a else "a")


def _with_text(content: str | list[dict[str, Any]], text: str) -> str | list[dict[str, Any]]:
    """Return a content with another text: a string or a list of one part, as ``content`` is."""
    return text if isinstance(content, str) else [{"type": "text", "text": text}]
