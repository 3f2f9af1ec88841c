"""Compilation and rendering of chat templates in a limited child process.

:mod:`pronk.text.chat.template` starts this program, which imports no module of pronk. Requests
(``>``) and replies (``<``) are lines of JSON. A request without ``values`` only compiles the
template::

    > {"source": "{{ x }}", "values": {"x": "a"}}
    < {"text": "a", "loops_over_content": false, "reads_tools": false}
    > {"source": "{{"}
    < {"error": "unexpected 'end of template'"}
    > {"source": "{{ 'x' * 10**8 }}", "values": {}}
    < {"over_limit": true}

``loops_over_content`` is true if the template loops over the parts of a message's content; other
templates expect a string as content. ``reads_tools`` is true if the template reads the variable
``tools``. ``over_limit`` means that memory, recursion or the length of
the text exceeded a limit.

The Jinja environment is that of transformers (``utils/chat_template_utils.py``), so a template
gives the same text as there.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# Maximum characters of a rendered text: some 8 million tokens, more than any context window has.
_MAX_TEXT = 2**25
# Maximum characters of an error message; its text may come from the template, which is untrusted.
_MAX_ERROR = 300


class _DictFunction:
    """Replacement of the class ``dict`` in templates: it creates dictionaries, and nothing else.

    A template could reach Python's internals through the class itself.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _PublicNamespace(Namespace):
    """A namespace of Jinja that refuses names with a leading underscore.

    By such names a template could reach Python's internals.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _check_public(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


class _Generation(Extension):
    """The tag ``{% generation %}``, which marks text for training and renders it unchanged."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _check_public(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        msg = f"a namespace cannot have an attribute {name!r}"
        raise SecurityError(msg)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON text, as the filter ``tojson`` of transformers does.

    Unlike Jinja's own filter, it does not escape characters of HTML.
    """
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005 - without a zone, as in transformers


_JINJA = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
)
_JINJA.filters["tojson"] = _tojson
_JINJA.globals |= {
    "dict": _DictFunction(),
    "namespace": _PublicNamespace,
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}
del _JINJA.globals["lipsum"]  # remove a function that returns random text


@lru_cache(8)  # cache of templates by source; a model has one or two
def _compile(source: str) -> tuple[Template, dict[str, bool]]:
    """Return the compiled template, and the facts of its source that a reply has."""
    tree = _JINJA.parse(source)
    facts = {
        "loops_over_content": any(_is_content(loop.iter) for loop in tree.find_all(nodes.For)),
        "reads_tools": any(name.name == "tools" for name in tree.find_all(nodes.Name)),
    }
    template = Template.from_code(_JINJA, _JINJA.compile(tree), _JINJA.make_globals(None))
    return template, facts


def _is_content(node: nodes.Node) -> bool:
    """Return whether an expression of a template reads a message's content.

    Examples are ``content``, ``m.content``, ``m["content"]`` and ``m["content"][1:] | list``. A
    template that loops over such an expression takes the content as a list of parts.
    """
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _is_content(node.node)
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Filter):
        return node.node is not None and _is_content(node.node)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return getattr(node, "name", None) == "content"


def answer(line: bytes) -> bytes:
    """Return the reply to a request: compile its template, and render it if it has ``values``.

    The request and the reply are JSON in UTF-8.
    """
    reply: dict[str, Any]
    try:
        request = json.loads(line.decode("utf-8", "surrogatepass"))
        template, facts = _compile(request["source"])
        text = template.render(request["values"]) if "values" in request else ""
        over_limit = len(text) > _MAX_TEXT
        reply = {"over_limit": True} if over_limit else {"text": text, **facts}
        return json.dumps(reply, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (MemoryError, RecursionError):
        reply = {"over_limit": True}
    except Exception as error:  # noqa: BLE001 - a template can raise any exception
        lines = str(error).strip().splitlines()
        reply = {"error": lines[0][:_MAX_ERROR] if lines else type(error).__name__}
    return json.dumps(reply).encode()
