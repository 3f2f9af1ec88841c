"""Command line of pronk: ``generate``, ``chat``, ``serve``, ``batch``, ``bench``, ``verify`` and more.

The module of a command is imported when the command runs, and NumPy only when a model is loaded, so
``--help`` answers at once. A mistake in the options prints one line on standard error and exits
with code 2; Ctrl-C exits with code 130.
"""

import sys
import warnings
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand
from typer.main import get_command

from pronk.base.errors import OptionError, PronkError, describe_error
from pronk.base.guests import Command, guests, load_guest
from pronk.cli.mistakes import usage_message
from pronk.cli.plain_options import PlainCommand, PlainGroup
from pronk.cli.progress import INTERRUPTED
from pronk.cli.streams import watch_streams

_TRACEBACK = "--traceback"

# The engine's own commands in the order of ``--help``. Those of guests follow.
_COMMANDS = {
    "generate": Command("pronk.cli.generate:generate", "Generate text that continues a prompt."),
    "chat": Command("pronk.cli.generate:chat", "Chat with the model."),
    "pull": Command(
        "pronk.cli.models:pull",
        "Download a model from the Hugging Face Hub, or update it; print its path.",
    ),
    "list": Command(
        "pronk.cli.models:list_models",
        "List the models on this machine, and the drafters that make them faster; "
        "--json also has the paths.",
    ),
    "rm": Command("pronk.cli.models:remove", "Remove a model from this machine."),
}


def _all_commands() -> dict[str, Command]:
    """Return the commands by name.

    A guest that cannot be imported has one whose only effect is the error.
    """
    found = dict(_COMMANDS)
    for name in guests("pronk.commands"):
        try:
            found[name] = load_guest("pronk.commands", name, name)
        except OptionError as error:
            found[name] = Command("", str(error))
    return found


class _LazyCommand(TyperCommand):
    """A command of which only the summary is known until the command runs."""

    def __init__(self, name: str, command: Command) -> None:
        super().__init__(name, help=command.summary)
        self._command = command

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Import the command, and return the context in which it runs."""
        if not self._command.home:
            raise OptionError(self._command.summary)
        command = resolve_name(self._command.home)
        if not isinstance(command, typer.Typer):  # a function
            function = command
            command = typer.Typer(add_completion=False, rich_markup_mode="rich")
            command.command(self.name, cls=PlainCommand)(function)
        return get_command(command).make_context(info_name, args, parent, **extra)


class _CommandError(Exception):
    """An exception of a command that typer would turn into a silent exit.

    It is the cause of this one.
    """


class _Commands(PlainGroup):
    """The commands of the engine and of its guests."""

    def __init__(self, **settings: Any) -> None:
        commands = {name: _LazyCommand(name, command) for name, command in _all_commands().items()}
        super().__init__(**settings | {"commands": commands})

    def invoke(self, ctx: Any) -> Any:
        """Run the command.

        Errors of files and connections are raised as the cause of a _CommandError.
        """
        try:
            return super().invoke(ctx)
        except PronkError:
            raise
        except (OSError, EOFError) as error:
            raise _CommandError from error


app = typer.Typer(cls=_Commands, add_completion=False, rich_markup_mode="rich")


def _show_version(wanted: bool) -> None:
    if wanted:
        from pronk import __version__

        typer.echo(f"pronk {__version__}")
        raise typer.Exit


@app.callback()
def _pronk(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, metavar="", help="Show the version."
        ),
    ] = False,
    traceback: Annotated[
        bool,
        typer.Option(_TRACEBACK, metavar="", help="Show the traceback of an unexpected error."),
    ] = False,
) -> None:
    """Run language models with lossless speculative decoding: the same text in fewer forward passes."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: entry point of ``pronk``."""
    arguments = list(sys.argv[1:] if args is None else args) or ["--help"]
    with watch_streams() as output:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _warn
                code = app(arguments, prog_name="pronk", standalone_mode=False)
        except typer.TyperException as error:
            code = _fail(usage_message(error), error.exit_code)
        except typer.Abort:
            code = INTERRUPTED
        except PronkError as error:
            code = _fail(str(error), 2)
        except Exception as error:  # noqa: BLE001 - becomes one line, or is raised again with --traceback
            if output.finish() is None:
                code = _unexpected(error, arguments)
        if (failure := output.finish()) is not None:
            code = _output_failed(failure)
    raise SystemExit(code or 0)


def _unexpected(error: Exception, arguments: Sequence[str]) -> int:
    """Print an unexpected error as one line, or with ``--traceback`` raise it.

    Return the exit code.
    """
    cause = error.__cause__ if isinstance(error, _CommandError) and error.__cause__ else error
    if arguments[0] == _TRACEBACK:
        raise cause
    names = {*_COMMANDS, *guests("pronk.commands")}
    command = next((word for word in arguments if word in names), "pronk")
    found = f"{type(cause).__name__}: {describe_error(cause)}"
    return _fail(
        f"{command}: expected no error, found {found}; pronk {_TRACEBACK} ... shows where", 1
    )


def _output_failed(error: OSError) -> int:
    """Report that standard output cannot be written, and return the exit code.

    A reader that has read enough, such as ``head``, gets no message, as usual for programs in a
    pipe.
    """
    if isinstance(error, BrokenPipeError):
        return 1
    found = describe_error(error)
    return _fail(
        f"stdout: expected room for the output, found {found}; make room or write elsewhere", 1
    )


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    """Print a library's warning as one line."""
    sys.stderr.write(f"pronk: warning: {' '.join(str(message).split())}\n")


def _fail(message: str, code: int) -> int:
    if message:
        sys.stderr.write(f"pronk: error: {' '.join(message.split())}\n")
    return code
