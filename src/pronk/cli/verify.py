"""``pronk verify``: check that drafters leave the output of a model unchanged.

Torch is imported when the command runs. typer reads annotations at run time, so none are postponed.
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

# Default number of prompts from the sample suite, spread over its tasks.
_LIMIT = 8


@shares(load=model_options, without=("drafter", "budget"))
def verify(
    load: "partial[LLM]",
    *,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="Drafter to verify: a name, or a name with options; repeatable.",
            show_default="all that support the model",
            metavar="D",
        ),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="File of prompts.", show_default="sample suite of pronk bench", metavar="FILE")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            help="Number of prompts, spread over their tasks.",
            min=1,
            show_default=f"{_LIMIT} of the sample suite, all of a file",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Number of tokens per text.", min=1)] = 64,
    samples: Annotated[
        int,
        typer.Option(
            help="Strings to sample per drafter for the test of the distribution, 100 or more; 0 is none.", min=0
        ),
    ] = 2000,
    seed: Annotated[int, typer.Option(help="Seed; the same seed gives the same verdicts.", min=0)] = 0,
    rule: Annotated[
        str, typer.Option(help="Acceptance of draft tokens in sampled texts: coupled, rejection or block.")
    ] = "coupled",
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print one JSON object instead of the table.")
    ] = False,
) -> None:
    """Verify that speculative decoding does not change the output of the model.

    [bold]Same tokens[/]: each drafter's texts, greedy and sampled, alone and in
    a batch, are compared with plain decoding. pronk's kernels must give the same
    bits. With torch's, near ties that rounding explains are shown and allowed.

    [bold]Same log-probs[/]: log-probabilities of a text are compared with those
    of one forward pass over prompt and text.

    [bold]Law[/]: strings sampled with many seeds are tested against the exact
    distribution of the model's logits (chi-square).

    With [bold]--rule rejection[/] or [bold]block[/] sampled tokens depend on
    the draft tokens: only greedy texts are compared, and the test of the
    distribution covers the sampled ones.

    [bold]Accepted[/]: accepted draft tokens. Without any, nothing was tested,
    and the table says so.

    [bold]Exit codes[/]: 0 verified; 1 not verified: a check failed, or a drafter
    given with --drafter (without the option: every drafter) had no draft token
    accepted in any check; 2 a mistake in the options; 130 interrupted, after the
    results so far.

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
            make_drafter(spec)  # raises before the model is loaded
        texts = _select(prompts, limit)
        llm = load(loading, budget="all")  # "auto" would leave draft tokens unverified
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
    required = drafters is not None
    yield from verify_steps(llm, names, prompts, settings, required=required, left_out=reasons, progress=progress)


def _select(file: Path | None, limit: int | None) -> list[Any]:
    """Return ``limit`` prompts of the file or of the sample suite, spread evenly over the tasks."""
    from pronk.bench.prompts import load_prompts, sample_prompts

    found = sample_prompts() if file is None else load_prompts(file)
    if limit is None:
        limit = _LIMIT if file is None else len(found)
    tasks: dict[str, list[Any]] = defaultdict(list)
    for prompt in found:
        tasks[prompt.task].append(prompt)
    ranked = [(rank, prompt) for group in tasks.values() for rank, prompt in enumerate(group)]
    ranked.sort(key=lambda pair: pair[0])  # stable: the first prompt of each task, then the second of each, …
    return [prompt for _, prompt in ranked[:limit]]


def _encode(llm: "LLM", prompts: Sequence[Any]) -> "list[NamedPrompt]":
    from pronk.bench.prompts import encode
    from pronk.verification import NamedPrompt

    return [NamedPrompt(prompt.id, encode(llm, prompt)) for prompt in prompts]


def _console(stream: Any) -> "Console":
    from rich.console import Console

    if hasattr(stream, "reconfigure"):  # a character outside the terminal's encoding must not raise
        stream.reconfigure(errors="replace")
    return Console(file=stream, highlight=False)


@contextmanager
def _bar() -> Iterator[Callable[[str, int, int], None] | None]:
    """Show a progress bar on standard error; yield ``None`` without a terminal."""
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
            # A new label is drawn at once, also if its work ends before the next refresh.
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
