"""Lines of agents' prompts that differ in every request, and that no model needs.

Such a line stands at the beginning of the system prompt, so that the prefix cache finds nothing of
a conversation whose earlier turns it has: each turn computes the whole prompt again. The server
leaves these lines out, unless ``--keep-volatile`` is set.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pronk.text import join_parts

# The known lines, by the name under which a dropped line is reported. A pattern matches the line at
# the beginning of a system prompt, with its line end.
VOLATILE_LINES: Mapping[str, re.Pattern[str]] = {
    # First block of the system prompt of Claude Code:
    # x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;
    # The value of cch is a checksum of the request.
    "x-anthropic-billing-header": re.compile(
        r"x-anthropic-billing-header:[^\n]*\bcch=[^\n]*(?:\n|\Z)"
    ),
}


def drop_volatile_lines(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a conversation without the known volatile lines, and the names of the dropped ones.

    Only the beginning of the first message is searched, if its role is ``system``. A system message
    without any other text is left out.

    Args:
        messages: messages in the form of chat templates.
    """
    kept = [dict(message) for message in messages]
    if not kept or kept[0]["role"] != "system":
        return kept, []
    first = join_parts(kept[0])
    text = first["content"]
    names = list[str]()
    while (name := _volatile_line_of(text)) is not None:
        text = VOLATILE_LINES[name].sub("", text, count=1)
        names.append(name)
    if names:
        kept[:1] = [{**first, "content": text}] if text else []
    return kept, names


def _volatile_line_of(text: str) -> str | None:
    """Return the name of the volatile line with which a text begins, or ``None``."""
    for name, pattern in VOLATILE_LINES.items():
        if pattern.match(text):
            return name
    return None
