"""``pronk verify``: does guessing change what the model says? On the user's own model, device, kernels and dtype.

Nothing here needs torch before the command runs, and typer wants the real types: no postponed annotations.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from pronk.cli.options import model_options, shares

if TYPE_CHECKING:
    from rich.console import Console

    from pronk.llm import LLM
    from pronk.sampling.params import Rule
    from pronk.verification import NamedPrompt, VerifyReport

__all__ = ["verify"]

_NOT_VERIFIED = 1
_INTERRUPTED = 130

# Prompts of the package's suite, spread over its tasks.
_LIMIT = 8


@shares(load=model_options, without=("drafter", "budget"))
def verify(
    load: "partial[LLM]",
    *,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="Who guesses: a name, or a name with options; may be repeated.",
            show_default="all that fit the model",
            metavar="D",
        ),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="File of prompts.", show_default="those of pronk bench", metavar="FILE")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            help="Use so many prompts, spread over their tasks.",
            min=1,
            show_default=f"{_LIMIT} of those of pronk bench, all of a file",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens per text.", min=1)] = 64,
    samples: Annotated[
        int, typer.Option(help="Strings per drafter to compare with the model's law, 100 or more; 0 is none.", min=0)
    ] = 2000,
    seed: Annotated[int, typer.Option(help="Same seed, same verdicts.", min=0)] = 0,
    rule: Annotated[
        str, typer.Option(help="How guesses are accepted in sampled texts: coupled, rejection or block.")
    ] = "coupled",
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object instead.")] = False,
) -> None:
    """Prove that guessing does not change what the model says.

    [bold]Same tokens[/]: each drafter's texts, greedy and sampled, alone and in
    a batch, against plain decoding alone. With pronk's own kernels they must be
    the same to the bit; with torch's near ties, which rounding explains, are
    shown and allowed.

    [bold]Same log-probs[/]: those that come with a text against scoring prompt
    and text in one pass.

    [bold]Law[/]: strings drawn with many seeds against the exact law of the
    model's logits (chi-square).

    With [bold]--rule rejection[/] or [bold]block[/] sampled tokens depend on
    the guesses: only greedy texts are compared, and the law is what tests the
    sampled ones.

    [bold]Accepted[/]: guesses that took part. Where none was accepted nothing
    was tested, and the table says so.

    [bold]Exit codes[/]: 0 verified; 1 not verified: a check failed, or no guess
    of a drafter given with --drafter was accepted in any check (without it: of
    no drafter at all); 2 a mistake in the options; 130 interrupted, with what
    was verified so far.

    [bold]Examples[/]

    pronk verify

    pronk verify --drafter "prompt_lookup(num_tokens=12)" --samples 0

    pronk verify --rule rejection

    pronk verify --model ./checkpoint --device cuda --dtype bfloat16
    """
    from pronk.cli.console import TerminalOutput

    with TerminalOutput(stats=False).loading() as loading:
        from pronk.drafters import make_drafter
        from pronk.verification import VerifySettings

        settings = VerifySettings(max_tokens, samples, seed, cast("Rule", rule))
        for spec in drafter or ():
            make_drafter(spec)  # a mistake is told before the model is loaded
        texts = _select(prompts, limit)
        llm = load(loading, budget="all")  # a guess that is not computed is not verified
    named = _encode(llm, texts)
    report: VerifyReport | None = None
    code = 0
    try:
        with _bar() as progress:
            for report in _steps(llm, drafter, named, settings, progress):  # noqa: B007 - the last one is shown
                pass
    except KeyboardInterrupt:
        code = _INTERRUPTED
    _show(report, as_json=as_json)
    raise typer.Exit(code or (0 if report is not None and report.passed else _NOT_VERIFIED))


def _steps(
    llm: "LLM", drafters: list[str] | None, prompts: "list[NamedPrompt]", settings: Any, progress: Any
) -> "Iterator[VerifyReport]":
    from pronk.verification import fitting_drafters, verify_steps
    from pronk.verification.prompts import fitting

    reasons: dict[str, str] = {}
    names = drafters
    if names is None:
        names, reasons = fitting_drafters(llm, fitting(llm, prompts, settings.max_tokens)[0], settings.rule)
    asked = drafters is not None
    yield from verify_steps(llm, names, prompts, settings, required=asked, left_out=reasons, progress=progress)


def _select(file: Path | None, limit: int | None) -> list[Any]:
    """Return ``limit`` prompts of the file, or of the package's suite, spread evenly over the tasks."""
    from pronk.bench.prompts import load_prompts, sample_prompts

    found = sample_prompts() if file is None else load_prompts(file)
    if limit is None:
        limit = _LIMIT if file is None else len(found)
    tasks: dict[str, list[Any]] = defaultdict(list)
    for prompt in found:
        tasks[prompt.task].append(prompt)
    turns = [(turn, prompt) for group in tasks.values() for turn, prompt in enumerate(group)]
    turns.sort(key=lambda pair: pair[0])  # stable: the first of each task, then the second of each …
    return [prompt for _, prompt in turns[:limit]]


def _encode(llm: "LLM", prompts: Sequence[Any]) -> "list[NamedPrompt]":
    from pronk.bench.prompts import encode
    from pronk.verification import NamedPrompt

    return [NamedPrompt(prompt.id, encode(llm, prompt)) for prompt in prompts]


def _console(stream: Any) -> "Console":
    from rich.console import Console

    if hasattr(stream, "reconfigure"):  # a character that the terminal lacks must not end the program
        stream.reconfigure(errors="replace")
    return Console(file=stream, highlight=False)


@contextmanager
def _bar() -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar on standard error; ``None`` where nobody looks."""
    console = _console(sys.stderr)
    if not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (BarColumn(20), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task, shown = bar.add_task("preparing", total=None), "preparing"

        def update(label: str, done: int, total: int) -> None:
            nonlocal shown
            # What is over within a refresh of the screen is seen all the same.
            bar.update(task, description=label, completed=done, total=total, refresh=label != shown)
            shown = label

        yield update


def _show(report: "VerifyReport | None", *, as_json: bool) -> None:
    if report is None:
        sys.stderr.write("interrupted before anything was verified\n")
    elif as_json:
        typer.echo(json.dumps(report.to_dict(), ensure_ascii=False))
    else:
        from pronk.verification.table import show

        show(report, _console(sys.stdout))
