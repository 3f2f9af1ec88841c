"""Links and headings of Markdown files, as GitHub reads them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

__all__ = ["anchors", "map_links", "relative_links", "slugify", "title"]

_LINK = re.compile(r"(!?\[)([^\]]*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^(```.*?^```\s*?$)", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


def slugify(text: str, separator: str = "-") -> str:
    """Return GitHub's anchor of a heading: small letters, hyphens for spaces, no punctuation."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", separator)


def anchors(markdown: str) -> set[str]:
    """Return the anchors of all headings; a repeated heading gets ``-1``, ``-2`` and so on."""
    found: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", markdown)):
        base = slugify(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading))
        slug = base
        number = 0
        while slug in found:
            number += 1
            slug = f"{base}-{number}"
        found.add(slug)
    return found


def map_links(markdown: str, change: Callable[[str, str], tuple[str, str]]) -> str:
    """Return Markdown with the label and target of every link replaced.

    Links to other sites, and links in blocks of code, stay as they are. ``change`` returns the new
    label and target for the old ones.
    """

    def replace(match: re.Match[str]) -> str:
        if re.match(r"[a-z]+:", match[3]):
            return match[0]
        label, target = change(match[2], match[3])
        return f"{match[1]}{label}]({target})"

    parts = _FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(replace, part) for part in parts)


def relative_links(markdown: str) -> Iterator[tuple[str, str]]:
    """Yield the path and anchor of every relative link; a link within the file has no path."""
    targets: list[str] = []

    def collect(label: str, target: str) -> tuple[str, str]:
        targets.append(target)
        return label, target

    map_links(markdown, collect)
    for target in targets:
        path, _, anchor = target.partition("#")
        yield path, anchor


def title(markdown: str) -> str:
    """Return the first heading of a page."""
    found = _HEADING.search(markdown)
    return found[1] if found else ""
