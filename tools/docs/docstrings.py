"""Extension of Griffe: docstrings with Sphinx's roles and literal blocks become Markdown."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

__all__ = ["Markdown"]


class Markdown(Extension):
    """Replaces ``:class:`~a.b.Name``` by ```Name```, and ``text ::`` by ``text:``. A line ``::`` is dropped."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring is not None:
            text = re.sub(r":\w+:`(?:~[\w.]*\.)?([^`]+)`", r"`\1`", obj.docstring.value)
            text = re.sub(r"^::\n", "", text, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r" ?::$", ":", text, flags=re.MULTILINE)
