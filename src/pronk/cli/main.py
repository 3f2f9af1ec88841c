"""Command line of pronk: ``generate``, ``chat``, ``serve``, ``batch``, ``bench``, ``verify`` and more.

Torch is imported when a command runs, so ``--help`` answers at once. A mistake in the options prints one line on
standard error and exits with code 2; Ctrl-C exits with code 130.
"""

import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from pronk.cli.batch import batch
from pronk.cli.bench import bench
from pronk.cli.datastore import app as datastore_app
from pronk.cli.explain import explain
from pronk.cli.models import list_models, pull, remove
from pronk.cli.options import Progress, given_options, model_options, read_prompt, sampling_params, shares
from pronk.cli.progress import INTERRUPTED, interruptible
from pronk.cli.quantize import quantize
from pronk.cli.removed import refuse_removed
from pronk.cli.serve import serve
from pronk.cli.verify import verify
from pronk.errors import PronkError

if TYPE_CHECKING:
    from pronk.cli.console import TerminalOutput
    from pronk.llm import LLM
    from pronk.outputs import Completion, Piece
    from pronk.sampling.params import SamplingParams

__all__ = ["app", "main"]

_TRACEBACK = "--traceback"
_stats = partial(typer.Option, metavar="", show_default="on a terminal")
_COLOR_DRAFTS = typer.Option(metavar="", help="Colour the accepted draft tokens.")
_COLOR_GUESSES = typer.Option(metavar="", hidden=True)  # deprecated alias of --color-drafts

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


def _show_version(wanted: bool) -> None:
    if wanted:
        from pronk import __version__

        typer.echo(f"pronk {__version__}")
        raise typer.Exit


@app.callback()
def _pronk(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, metavar="", help="Show the version.")
    ] = False,
    traceback: Annotated[
        bool, typer.Option(_TRACEBACK, metavar="", help="Show the traceback of an unexpected error.")
    ] = False,
) -> None:
    """Run language models with lossless speculative decoding: the same text in fewer forward passes."""


@app.command()
@shares(read=read_prompt, load=model_options, request=sampling_params)
def generate(
    load: Callable[[Progress | None], "LLM"],
    request: Callable[[], "SamplingParams"],
    read: Callable[[], str],
    *,
    echo: Annotated[bool, typer.Option("--echo", metavar="", help="Print the prompt before the text.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print one JSON object instead of the text.")
    ] = False,
    stats: Annotated[
        bool | None, _stats(help="Show tokens/s, S (tokens per forward pass) and the accepted draft tokens.")
    ] = None,
    color_drafts: Annotated[bool, _COLOR_DRAFTS] = False,
    color_guesses: Annotated[bool | None, _COLOR_GUESSES] = None,
) -> None:
    r"""Generate text that continues a prompt.

    [bold]Examples[/]

    pronk generate "def fibonacci(n):" --max-tokens 64

    pronk generate --prompt-file main.py --temperature 0.8 --seed 7 --stop $'\n\n'

    git diff | pronk generate - --model ./checkpoint --json
    """
    from pronk.cli.console import TerminalOutput, prepare

    screen = TerminalOutput(stats=stats, color_drafts=color_drafts if color_guesses is None else color_guesses)
    text = read()
    llm, params = prepare(load, request, screen)
    prompt = llm.request_factory.encode_prompt(text)
    if len(prompt) + params.max_tokens > llm.config.context:
        room = llm.config.context - len(prompt)
        screen.note(f"max_tokens: {room} instead of {params.max_tokens}, the rest of the model's context")
        params = replace(params, max_tokens=room, min_tokens=min(room, params.min_tokens))
    with interruptible("interrupted"):
        if as_json:
            typer.echo(json.dumps(llm.generate(prompt, params).to_dict(), ensure_ascii=False))
            return
        if echo:
            screen.echo(text)
        _show_samples(llm.stream(prompt, params), params, screen, llm.kernels)
        if screen.color_drafts and screen.interactive:
            screen.legend()


@app.command()
@shares(load=model_options, request=sampling_params, without=("n", "logprobs", "prompt_logprobs", "logprob_token_ids"))
def chat(
    context: typer.Context,
    load: Callable[[Progress | None], "LLM"],
    request: Callable[[], "SamplingParams"],
    *,
    system: Annotated[str, typer.Option(help="System message.", metavar="TEXT", show_default=False)] = "",
    stats: Annotated[
        bool | None, _stats(help="Show tokens/s and S (tokens per forward pass) after each answer.")
    ] = None,
    color_drafts: Annotated[bool, _COLOR_DRAFTS] = True,
    color_guesses: Annotated[bool | None, _COLOR_GUESSES] = None,
) -> None:
    """Chat with the model.

    Ctrl-C stops an answer, Ctrl-D ends the chat, /help lists the commands. Defaults of temperature, top-k, top-p,
    min-p and repetition penalty are those of the model's files; of --max-tokens, 1024 or half the context.

    [bold]Examples[/]

    pronk chat

    pronk chat --model Qwen/Qwen3-0.6B --temperature 0.7 --top-p 0.95

    echo "Hello" | pronk chat --max-tokens 32
    """
    from pronk.cli.console import TerminalOutput, prepare
    from pronk.cli.repl import ChatSession

    screen = TerminalOutput(stats=stats, color_drafts=color_drafts if color_guesses is None else color_guesses)
    llm, params = prepare(load, request, screen)
    llm.chat_ids([{"role": "user", "content": "?"}])  # raises if the model has no chat template
    ChatSession(llm, params, screen, system=system, given=given_options(context)).run()


app.command()(pull)
app.command(name="list")(list_models)
app.command(name="rm")(remove)
app.command()(serve)
app.command()(batch)
app.command()(bench)
app.command()(explain)
app.command()(verify)
app.command()(quantize)
app.add_typer(datastore_app, name="datastore")


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    options_metavar="",
)
def train(context: typer.Context) -> None:
    """Train language models and drafters."""
    from pronk.cli.train.main import app as train_app

    code = train_app(context.args or ["--help"], prog_name="pronk train", standalone_mode=False)
    raise typer.Exit(code or 0)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit: entry point of ``pronk``."""
    with warnings.catch_warnings():
        warnings.showwarning = _warn
        _main(args)


def _main(args: Sequence[str] | None) -> NoReturn:
    arguments = list(sys.argv[1:] if args is None else args) or ["--help"]
    try:
        refuse_removed(arguments)
        code = app(arguments, prog_name="pronk", standalone_mode=False)
    except typer.TyperException as error:
        code = _fail(_usage_message(error), error.exit_code)
    except typer.Abort:
        code = INTERRUPTED
    except PronkError as error:
        code = _fail(str(error), 2)
    except Exception as error:  # print one line, or with --traceback the traceback
        if arguments[0] == _TRACEBACK:
            raise
        code = _fail(f"{type(error).__name__}: {error} (pronk {_TRACEBACK} ... shows where)", 1)
    raise SystemExit(code or 0)


def _usage_message(error: typer.TyperException) -> str:
    """Return the parser's message and a hint at ``--help``; empty if the parser has printed the help."""
    message, context = error.format_message(), getattr(error, "ctx", None)
    rejected: list[Any] = getattr(error.__cause__, "errors", list)()  # an error of pydantic holds the rejected values
    if rejected:
        message += f", found {rejected[0]['input']!r}"
    return f"{message} (try '{context.command_path} --help')" if message and context else message


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    """Print a library's warning as one line."""
    sys.stderr.write(f"pronk: warning: {' '.join(str(message).split())}\n")


def _fail(message: str, code: int) -> int:
    if message:
        sys.stderr.write(f"pronk: error: {' '.join(message.split())}\n")
    return code


def _show_samples(pieces: Iterator["Piece"], params: "SamplingParams", screen: "TerminalOutput", kernels: str) -> None:
    """Stream the first sample, then print the other samples and the statistics of all finished samples."""
    from pronk.cli.console import stats_line

    other_pieces: dict[int, list[Piece]] = {index: [] for index in range(1, params.n)}
    completions: dict[int, Completion] = {}
    try:
        for piece in pieces:
            if piece.index in other_pieces:
                other_pieces[piece.index].append(piece)
            else:
                screen.write(piece.text, drafted=piece.guessed)
            if piece.completion is not None:
                completions[piece.index] = piece.completion
    finally:  # after Ctrl-C, too, show the text so far
        screen.end_line()
        for index, pieces_of_sample in other_pieces.items():
            screen.write(f"--- sample {index + 1} of {params.n} ---\n")
            for piece in pieces_of_sample:
                screen.write(piece.text, drafted=piece.guessed)
            screen.end_line()
        for _, completion in sorted(completions.items()):
            screen.figures(stats_line(completion.stats, kernels, None if params.greedy else completion.seed))
