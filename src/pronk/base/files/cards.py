"""Model cards from templates."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def render_card(package: str, card: str, **facts: Any) -> str:
    """Return a model card in Markdown, made from a template.

    Args:
        package: package with the folder ``cards``, such as ``pronk.train``.
        card: name of the template, without ``.md.j2``.
        **facts: values of the template's variables.
    """
    environment = Environment(  # noqa: S701 - Markdown, from files of the package
        loader=PackageLoader(package, "cards"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "cell": lambda text: str(text).replace("|", "/"),
        "count": lambda tokens: f"{tokens / 1e6:.2f} M" if tokens >= 1e5 else f"{tokens:.0f}",
    }
    environment.filters["percent"] = lambda share, digits=0: f"{share:.{digits}%}"
    return environment.get_template(f"{card}.md.j2").render(facts)
