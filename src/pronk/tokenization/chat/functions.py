"""The functions that chat templates are given beside Jinja's own filters: those that Hugging Face's tokenizers give."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

__all__ = ["FILTERS", "FUNCTIONS", "plain_key"]

_LARGEST_KEY = 2**60  # an integer up to here is its own hash value


class _PublicNamespace(Namespace):
    """A namespace without private names, through which a template could reach Python's internals."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = _make_dict(*args, **kwargs)
        for name in values:
            _check_public(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # one may hold another twice, and that one a third twice


def _check_public(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        msg = f"a namespace cannot have an attribute {name!r}"
        raise SecurityError(msg)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    if not args or isinstance(args[0], Mapping):
        return dict(*args, **kwargs)
    pairs = [tuple(pair) for pair in args[0]]
    for pair in pairs:
        plain_key(pair[0] if pair else None)
    return dict(pairs, *args[1:], **kwargs)


def plain_key(key: Any) -> Any:
    """The key of a dictionary, as JSON or a table of numbers has it.

    Others can be chosen so that all have the same hash value, and each is compared with all before it.

    Raises:
        SecurityError: it is none.
    """
    if key is None or isinstance(key, str) or (isinstance(key, int) and abs(key) < _LARGEST_KEY):
        return key
    msg = f"expected a text or a small integer as the key of a dictionary, found {type(key).__name__}"
    raise SecurityError(msg)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


FILTERS: dict[str, Callable[..., Any]] = {"tojson": _tojson}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "dict": _make_dict,
    "namespace": _PublicNamespace,
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}
