"""Extensions of Griffe: docstrings as Markdown, and the options of :mod:`pronk.base.options`."""

from __future__ import annotations

import inspect
import re
from pkgutil import resolve_name
from typing import Any

from griffe import (
    Attribute,
    Class,
    Docstring,
    ExprSubscript,
    ExprTuple,
    Extension,
    Function,
    Object,
    Parameter,
    ParameterKind,
    Parameters,
)

__all__ = ["Markdown", "Options"]


class Options(Extension):
    """Extension that takes the documentation of declared options from the imported objects.

    Griffe reads the source, in which a class has no description of its options, and a constructor
    none of its arguments.
    """

    def on_class_instance(self, *, cls: Class, **_: Any) -> None:
        """Take the docstring of a class with ``@documented`` from the imported class."""
        if any(str(decorator.value) == "documented" for decorator in cls.decorators):
            _take_docstring(cls)

    def on_function_instance(self, *, func: Function, **_: Any) -> None:
        """Take the arguments of functions with ``@takes(…)`` or ``@_scheduled``.

        With ``@takes(…)``, take the docstring, too.
        """
        decorators = [str(decorator.value) for decorator in func.decorators]
        takes_options = any(each.startswith("takes(") for each in decorators)
        if takes_options:
            _take_docstring(func)
        if takes_options or "_scheduled" in decorators:
            signature = inspect.signature(resolve_name(func.path))
            func.parameters = Parameters(*map(_parameter, signature.parameters.values()))

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """Leave the description of an option out of its type."""
        annotation = attr.annotation
        if not isinstance(annotation, ExprSubscript) or str(annotation.left) != "Annotated":
            return
        if isinstance(annotation.slice, ExprTuple):
            kind = annotation.slice.elements[0]
            attr.annotation = kind.strip("'\"") if isinstance(kind, str) else kind


def _take_docstring(obj: Object) -> None:
    text = inspect.getdoc(resolve_name(obj.path)) or ""
    obj.docstring = Docstring(_as_markdown(text), parent=obj)


def _parameter(parameter: inspect.Parameter) -> Parameter:
    kind = ParameterKind[parameter.kind.name.lower()]
    annotation = parameter.annotation
    default = parameter.default
    return Parameter(
        parameter.name,
        annotation=None if annotation is inspect.Parameter.empty else _type_text(annotation),
        kind=kind,
        default=None if default is inspect.Parameter.empty else repr(default),
    )


def _type_text(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:typing|pathlib|collections\.abc)\.", "", text)


class Markdown(Extension):
    """Extension that replaces ``:class:`~a.b.Name``` by ```Name```, and ``text ::`` by ``text:``.

    A line ``::`` is dropped.
    """

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = _as_markdown(obj.docstring.value)


def _as_markdown(text: str) -> str:
    text = re.sub(r":\w+:`(?:~[\w.]*\.)?([^`]+)`", r"`\1`", text)
    text = re.sub(r"^::\n", "", text, flags=re.MULTILINE)
    return re.sub(r" ?::$", ":", text, flags=re.MULTILINE)
