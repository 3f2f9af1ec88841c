"""Entry point of the command line: commands of the engine and of guest packages.

The module of a command is imported when the command runs, and NumPy only when a model is loaded, so
that ``--help`` answers at once. A mistake in the options prints one line on standard error and
exits with code 2. Ctrl-C exits with code 130.
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
    "run": Command(
        "pronk.cli.generate:run",
        "Chat with a model, and download it before if it is not on this machine.",
    ),
    "ps": Command("pronk.cli.ps:ps", "List the loaded models of a running server."),
    "pull": Command(
        "pronk.cli.models:pull",
        "Download a model from the Hugging Face Hub, or update it; print its path.",
    ),
    "list": Command(
        "pronk.cli.models:list_models",
        "List the models on this machine, and their drafters; --json also has the paths.",
    ),
    "info": Command(
        "pronk.cli.info:info",
        "Describe a model: family, sizes, quantization, memory, chat template, drafters.",
    ),
    "doctor": Command(
        "pronk.cli.doctor:doctor",
        "Check this installation, and measure what speed the machine allows.",
    ),
    "rm": Command("pronk.cli.models:remove", "Remove a model from this machine."),
}


def _all_commands() -> dict[str, Command]:
    """Return all commands by name, those of the engine and of guests.

    For a guest that cannot be imported, the command raises the error of the import.
    """
    found = dict(_COMMANDS)
    for name in guests("pronk.commands"):
        try:
            found[name] = load_guest("pronk.commands", name, name)
        except OptionError as error:
            found[name] = Command("", str(error))
    return found


class _LazyCommand(TyperCommand):
    """A command whose module is imported when the command runs.

    The summary of the command, for ``--help``, is known before.
    """

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
        # The command is a function, not a typer application.
        if not isinstance(command, typer.Typer):
            function = command
            command = typer.Typer(add_completion=False, rich_markup_mode="rich")
            command.command(self.name, cls=PlainCommand)(function)
        return get_command(command).make_context(info_name, args, parent, **extra)


class _CommandError(Exception):
    """Wrapper of an exception that typer would turn into a silent exit.

    The exception is the cause (``__cause__``) of the wrapper.
    """


class _Commands(PlainGroup):
    """Group of all commands: those of the engine, and those of guest packages."""

    def __init__(self, **settings: Any) -> None:
        commands = {name: _LazyCommand(name, command) for name, command in _all_commands().items()}
        super().__init__(**settings | {"commands": commands})

    def invoke(self, ctx: Any) -> Any:
        """Run the command; errors of files and connections become the cause of a _CommandError."""
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
    """Run language models with lossless speculative decoding: same text, fewer forward passes."""


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
        except Exception as error:  # noqa: BLE001 - becomes one line, or is raised with --traceback
            if output.finish() is None:
                code = _unexpected(error, arguments)
        failure = output.finish()
        if failure is not None:
            code = _output_failed(failure)
    raise SystemExit(code or 0)


def _unexpected(error: Exception, arguments: Sequence[str]) -> int:
    """Print an unexpected error as one line, and return the exit code.

    With ``--traceback``, raise the error instead.
    """
    cause = error
    if isinstance(error, _CommandError) and isinstance(error.__cause__, Exception):
        cause = error.__cause__
    if arguments[0] == _TRACEBACK:
        raise cause
    names = {*_COMMANDS, *guests("pronk.commands")}
    command = next((word for word in arguments if word in names), "pronk")
    found = f"{type(cause).__name__}: {describe_error(cause)}"
    return _fail(
        f"{command}: expected no error, found {found}; pronk {_TRACEBACK} ... shows where", 1
    )


def _output_failed(error: OSError) -> int:
    """Print that standard output cannot be written, and return the exit code.

    As usual for programs in a pipe, nothing is printed if the reader (``head``) has read enough.
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
    """Print an error as one line, unless the message is empty, and return the exit code."""
    if message:
        sys.stderr.write(f"pronk: error: {' '.join(message.split())}\n")
    return code
