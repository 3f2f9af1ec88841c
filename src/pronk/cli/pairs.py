"""Options of the form ``NAME=VALUE``."""

from collections.abc import Collection

from pronk.errors import OptionError

__all__ = ["only_adapter", "parse_adapters", "parse_bias"]


def parse_adapters(pairs: list[str]) -> dict[str, str]:
    """Parse ``["sql=./sql-lora"]`` into ``{"sql": "./sql-lora"}``; raise an OptionError if a name repeats."""
    adapters: dict[str, str] = {}
    for pair in pairs:
        name, _, folder = pair.partition("=")
        if not name or not folder or name in adapters:
            msg = f"adapter: expected NAME=FOLDER with a new name, for example sql=./sql-lora, found {pair!r}"
            raise OptionError(msg)
        adapters[name] = folder
    return adapters


def only_adapter(names: Collection[str]) -> str | None:
    """Return the name of the only adapter; ``None``: there is none; several raise an OptionError."""
    if len(names) > 1:
        msg = f"adapter: expected one, found {', '.join(names)}; leave the others out"
        raise OptionError(msg)
    return next(iter(names), None)


def parse_bias(pairs: list[str]) -> dict[int, float] | None:
    """Parse ``["7=1.5"]`` into ``{7: 1.5}``; an empty list gives ``None``."""
    bias: dict[int, float] = {}
    for pair in pairs:
        token, _, value = pair.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            msg = f"logit_bias: expected ID=VALUE, for example 13=-100, found {pair!r}"
            raise OptionError(msg) from None
    return bias or None
