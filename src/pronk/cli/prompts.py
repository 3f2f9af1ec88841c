"""The prompt of a command: an argument, a file, or standard input."""

from typing import Annotated

import typer

from pronk.cli.guides import read_text
from pronk.errors import PromptError

__all__ = ["read_prompt"]


def read_prompt(
    *,
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue, or - to read it from standard input.", show_default=False)
    ] = None,
    prompt_file: Annotated[
        str | None, typer.Option(help="Read the prompt from this file.", metavar="FILE", show_default=False)
    ] = None,
) -> str:
    """Read the prompt from the argument, a file or standard input.

    Raises:
        PromptError: PROMPT and --prompt-file are both given or both missing.
        OptionError: the file cannot be read, or the text is not UTF-8.
    """
    if (prompt is None) == (prompt_file is None):
        msg = f"expected either PROMPT or --prompt-file, found {'neither' if prompt is None else 'both'}"
        raise PromptError(msg)
    if prompt is not None and prompt != "-":
        return prompt
    file = prompt_file or "-"
    return read_text("prompt-file", file, stdin=file == "-")
