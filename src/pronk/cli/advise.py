"""``pronk advise``: what to do for a model, some texts and this machine.

typer wants the real types of the options: no postponed annotations here. torch is imported when the command runs.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pronk.cli.options import Progress, given_options, model_options, shares
from pronk.cli.progress import Status, status_bar
from pronk.errors import PronkError

if TYPE_CHECKING:
    from rich.table import Table

    from pronk.advise.facts import Facts
    from pronk.bench.prompts import Prompt
    from pronk.llm import LLM

__all__ = ["advise"]

_INTERRUPTED = 130
_OF_THE_MODEL = ("device", "dtype", "kv_memory", "kv_dtype", "kernels")


@shares(load=model_options, without=("drafter", "weights", "budget", "calibration", "workers", "parallel"))
def advise(
    context: typer.Context,
    load: Callable[..., "LLM"],
    *,
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder with a checkpoint, its id on the Hub, or a GGUF file. Default in a clone: pronk-tiny.",
            rich_help_panel="Model",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="Texts like yours: JSON lines with prompt, turns or messages; or text, a prompt a line; repeatable.",
            metavar="FILE",
            show_default="those of pronk bench",
        ),
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="Try this one, too, as in \"kangaroo(model='run/export')\"; repeatable.", show_default=False),
    ] = None,
    minutes: Annotated[
        float, typer.Option(help="How long to measure, about; three texts of each drafter are written in any case.")
    ] = 4.0,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each text, at most.", min=8)] = 128,
    temperature: Annotated[
        float, typer.Option(help="Of the texts: take your users'. 0 is greedy.", min=0, max=100)
    ] = 0.0,
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print one JSON object instead of the text.")
    ] = False,
) -> None:
    """Say what to do for a model on this machine: drafter, training, threads, weights, memory.

    For a few minutes everybody who can guess for the model continues your prompts by turns, and whoever falls behind
    is left out; then passes, threads and weights of fewer bits are measured. What a drafter would bring that has yet to
    be trained is estimated from what passes cost here and from the acceptance of pronk-tiny's drafters.

    [bold]Examples[/]

    pronk advise --model ./checkpoint --prompts mine.jsonl --temperature 0.7

    pronk advise --model Qwen/Qwen3-0.6B --minutes 10 --drafter "draft_model(model='./draft')"

    pronk advise --json > advice.json
    """
    from pronk.bench.prompts import load_tasks
    from pronk.drafters import make_drafter

    for name in drafter or []:
        make_drafter(name)
    tasks = load_tasks(None, None, prompts or [], None)
    screen = Console(highlight=False, stderr=True)
    with status_bar(screen) as status:
        from pronk.advise.advice import Adviser, Plan

        plan = Plan(
            prompts=tuple(_in_turns(tasks)),
            drafters=tuple(drafter or ()),
            temperature=temperature,
            max_tokens=max_tokens,
            minutes=minutes,
        )
        llm = load(_loading(status), prefix_cache=True, model=model)
        adviser = Adviser(llm, model, plan, status)
        problem: BaseException | None = None
        try:
            adviser.measure()
        except (KeyboardInterrupt, PronkError) as error:
            problem = error if isinstance(error, PronkError) else typer.Exit(_INTERRUPTED)
            if not adviser.measured:
                raise problem from None
        facts = adviser.facts(interrupted=problem is not None)
    _show(facts, _given(context), as_json=as_json)
    if problem is not None:
        screen.print("it ended early; that is what was known by then", style="yellow")
        raise problem


def _in_turns(tasks: "Mapping[str, Sequence[Prompt]]") -> "list[Prompt]":
    """One of each task, then the next of each: there may not be time for all."""
    return [prompt for row in zip_longest(*tasks.values()) for prompt in row if prompt is not None]


def _loading(status: Status) -> Progress:
    return lambda done, total: status("loading", done, total)


def _given(context: typer.Context) -> list[str]:
    """What the user has said of the model, as the server takes it."""
    names = [name for name in given_options(context) if name in _OF_THE_MODEL]
    return [word for name in names for word in (f"--{name.replace('_', '-')}", str(context.params[name]))]


def _show(facts: "Facts", given: Sequence[str], *, as_json: bool) -> None:
    from pronk.advise.words import advice, command
    from pronk.cli.console import TerminalOutput

    said, line = advice(facts), command(facts, given)
    if as_json:
        typer.echo(json.dumps({"advice": said, "command": line, "facts": asdict(facts)}, ensure_ascii=False))
        return
    screen = TerminalOutput(stats=True)
    where = "{processor}, {cores} cores".format(**facts.hardware)
    screen.paragraph(f"{facts.parameters / 1e9:.2g} B parameters, {facts.dtype}; {where}, kernels {facts.kernels}\n")
    screen.table(_raced(facts))
    if facts.trainable:
        screen.table(_trainable(facts))
    for each in said:
        screen.paragraph(f"{each}\n")
    screen.paragraph(line)


def _new(title: str, *columns: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")
    table.add_column(columns[0], overflow="fold")
    for name in columns[1:]:
        table.add_column(name, justify="right")
    return table


def _raced(facts: "Facts") -> "Table":
    table = _new(
        f"Times as fast as plain decoding, temperature {facts.temperature:g}",
        "drafter",
        "times",
        "90 %",
        "tokens a step",
        "texts",
    )
    for each in facts.raced:
        span = each.times
        table.add_row(
            each.drafter,
            f"{span.middle:.2f}",
            f"{span.low:.2f}-{span.high:.2f}",
            f"{each.tokens:.2f}",
            str(each.texts),
        )
    return table


def _trainable(facts: "Facts") -> "Table":
    from pronk.advise.words import duration, size

    table = _new(
        "What could be trained, estimated", "pronk train", "times", "if so", "guesses", "training here", "memory"
    )
    for each in facts.trainable:
        span = each.times
        table.add_row(
            each.kind,
            f"{span.middle:.2f}",
            f"{span.low:.2f}-{span.high:.2f}",
            str(each.draft_tokens),
            duration(each.seconds),
            size(each.nbytes),
        )
    return table
