"""Clients' packages, which are imported when a test uses them: that takes seconds.

Each process of the tests collects all of them, and few run those of clients.
"""

import importlib
from typing import Any


class _Package:
    """A package that is imported with the first access to one of its names."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks for ``__test__`` when it collects
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


anthropic: Any = _Package("anthropic")
openai: Any = _Package("openai")
