"""Links and headings of Markdown files, as GitHub reads them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

__all__ = ["anchors", "map_links", "relative_links", "slugify"]

_LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")
_FENCE = re.compile(r"^(```.*?^```\s*?$)", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


def slugify(text: str, separator: str = "-") -> str:
    """Return GitHub's anchor of a heading: lower case, spaces become hyphens, other punctuation is dropped."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", separator)


def anchors(markdown: str) -> set[str]:
    """Return the anchors of all headings; a repeated heading gets ``-1``, ``-2`` and so on."""
    found: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", markdown)):
        slug = base = slugify(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading))
        number = 0
        while slug in found:
            number += 1
            slug = f"{base}-{number}"
        found.add(slug)
    return found


def map_links(markdown: str, change: Callable[[str], str]) -> str:
    """Return the text with every link's target changed, except in blocks of code and of other sites."""
    def replace(match: re.Match[str]) -> str:
        label, target = match.groups()
        return match[0] if re.match(r"[a-z]+:", target) else f"{label}({change(target)})"

    parts = _FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(replace, part) for part in parts)


def relative_links(markdown: str) -> Iterator[tuple[str, str]]:
    """Yield path and anchor of every relative link; the path of a link within the file is empty."""
    targets: list[str] = []
    map_links(markdown, lambda target: targets.append(target) or target)  # type: ignore[func-returns-value]
    for target in targets:
        path, _, anchor = target.partition("#")
        yield path, anchor
