"""Conversion of the values of options: guides, prompts, and pairs such as ``NAME=VALUE``."""

import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pronk.base.errors import OptionError, PromptError, describe_reason, refuse
from pronk.base.files.regular import read_stream
from pronk.base.files.text import decode_text, read_text

if TYPE_CHECKING:
    from pronk.text.guide import Guide


def read_guide(
    json_schema: str | None = None,
    regex: str | None = None,
    choice: list[str] | None = None,
    grammar: str | None = None,
) -> "Guide | None":
    """Return the guide of the one option that is set; ``None`` if no option is set.

    Args:
        json_schema: path of a JSON schema; ``"object"`` allows any JSON object, unless a file has
            this name.
        regex: regular expression.
        choice: allowed texts.
        grammar: path of a Lark grammar.

    Raises:
        OptionError: several options are set, a file cannot be read, or its content is not a valid
            guide.
    """
    from pronk.text.guide import MAX_SIZE, Guide

    given = {
        "--json-schema": json_schema,
        "--regex": regex,
        "--choice": choice or None,
        "--grammar": grammar,
    }
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        msg = (
            f"guide: expected at most one of {', '.join(given)}, found {' and '.join(names)}; "
            "give one"
        )
        raise OptionError(msg)
    # Number of bytes to read. A longer file has too many characters: UTF-8 takes at most 4 bytes
    # for each.
    size = 4 * MAX_SIZE + 1
    if json_schema == "object" and not Path(json_schema).exists():
        return Guide(json={"type": "object"})
    if json_schema is not None:
        return Guide(json=read_text(Path(json_schema), "json-schema", max_bytes=size))
    if grammar is not None:
        return Guide(grammar=read_text(Path(grammar), "grammar", max_bytes=size))
    if regex is not None:
        return Guide(regex=regex)
    return Guide(choice=choice) if choice else None


def read_prompt(
    *,
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="Text to continue, or - to read it from standard input.", show_default=False
        ),
    ] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option(help="Read the prompt from this file.", metavar="FILE", show_default=False),
    ] = None,
) -> str:
    """Return the prompt from the argument, a file or standard input.

    Raises:
        PromptError: PROMPT and --prompt-file are both given or both missing.
        OptionError: the file cannot be read, or the text is not UTF-8.
    """
    if (prompt is None) == (prompt_file is None):
        msg = (
            "expected either PROMPT or --prompt-file, found "
            f"{'neither' if prompt is None else 'both'}"
        )
        raise PromptError(msg)
    if prompt is not None and prompt != "-":
        return prompt
    if prompt_file in (None, "-"):
        where = "prompt: standard input"
        try:
            return decode_text(read_stream(sys.stdin.buffer), where)
        except OSError as error:
            refuse(
                where,
                f"expected a text, found {describe_reason(error)}; give a file",
                OptionError,
                error,
            )
    return read_text(Path(prompt_file), "prompt-file")


def read_prediction(path: str | None) -> str | None:
    """Return the text of a file with the expected output; ``None`` without a file."""
    return None if path is None else read_text(Path(path), "prediction")


def parse_switch(value: str) -> bool | str:
    """Return True for ``on``, False for ``off``, and any other text, a path, as it is."""
    return {"on": True, "off": False}.get(value, value)


def parse_adapters(pairs: list[str]) -> dict[str, str]:
    """Return adapters by name: ``{"sql": "./sql-lora"}`` for ``["sql=./sql-lora"]``.

    A repeated name, or a pair without a name or a folder, raises an OptionError.
    """
    adapters: dict[str, str] = {}
    for pair in pairs:
        name, _, folder = pair.partition("=")
        if not name or not folder or name in adapters:
            msg = (
                "adapter: expected NAME=FOLDER with a new name, for example sql=./sql-lora, "
                f"found {pair!r}"
            )
            raise OptionError(msg)
        adapters[name] = folder
    return adapters


def only_adapter(names: Collection[str]) -> str | None:
    """Return the name of the only adapter, or ``None`` without adapters.

    Several adapters raise an OptionError.
    """
    if len(names) > 1:
        refuse(
            "adapter", f"expected one, found {', '.join(names)}; leave the others out", OptionError
        )
    return next(iter(names), None)


def parse_bias(pairs: list[str]) -> dict[int, float] | None:
    """Return biases by token id: ``{7: 1.5}`` for ``["7=1.5"]``; ``None`` for an empty list.

    Raises:
        OptionError: a pair is not ``ID=VALUE`` with an integer and a number.
    """
    bias: dict[int, float] = {}
    for pair in pairs:
        token, _, value = pair.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            msg = f"logit_bias: expected ID=VALUE, for example 13=-100, found {pair!r}"
            raise OptionError(msg) from None
    return bias or None
