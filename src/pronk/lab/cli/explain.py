"""``pronk explain``: generate a text and show the decisions of each step."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pronk.base import TimeEstimate
from pronk.base.checks import check_writable, require_extra
from pronk.commands import (
    Progress,
    interruptible,
    model_options,
    option,
    read_prompt,
    sampling_params,
    shares,
)

if TYPE_CHECKING:
    from rich.table import Table

    from pronk import LLM, SamplingParams
    from pronk.commands import TerminalOutput
    from pronk.lab.explain import Explanation
    from pronk.serving import Decision
    from pronk.text import Tokenizer


# ``read``, ``load`` and ``request`` declare options of the command line: ``explain`` receives each
# function with the values of its options filled in.
@shares(
    read=read_prompt,
    load=model_options,
    request=sampling_params,
    without=("adapter", "n", "logprobs", "prompt_logprobs", "logprob_token_ids"),
)
def explain(
    load: Callable[[Progress | None], "LLM"],
    request: Callable[[], "SamplingParams"],
    read: Callable[[], str],
    *,
    as_json: Annotated[
        bool, option("Print one JSON object instead of the table.", "--json", metavar="")
    ] = False,
    plot: Annotated[
        Path | None,
        option("Draw the steps into this SVG file.", metavar="FILE", show_default=False),
    ] = None,
) -> None:
    """Show every step of a generated text: the drafters, their draft tokens and the accepted ones.

    [bold]text[/]: tokens of the step, accepted draft tokens in green. Below,
    for each drafter that proposed: its name, the expected number of tokens of
    the step with its proposal, and its time in ms. A name in parentheses: the
    drafter ran only to measure its acceptance rate.

    [bold]drafted[/]: draft tokens proposed > verified > accepted.

    [bold]gain / cost[/]: expected tokens of the step / expected cost of its
    forward pass, in plain steps (steps without draft tokens).

    [bold]Examples[/]

    pronk explain "def fibonacci(n):" --max-tokens 48

    pronk explain --prompt-file main.py --drafter "auto(kangaroo)" --plot steps.svg

    pronk explain "Once upon a time" --json > steps.json
    """
    from pronk.commands import TerminalOutput, prepare
    from pronk.lab.explain import explain as explain_text

    screen = TerminalOutput(stats=True, color_drafts=True)
    text = read()
    if plot is not None:
        require_extra("plot", "report", "matplotlib")
        check_writable("plot", plot)
    llm, params = prepare(load, request, screen, text)
    with interruptible("interrupted"):
        # The first steps of a process are slower, because drafters are prepared and the weights are
        # read into memory; a short text before the explained one takes this time.
        estimate = TimeEstimate(screen.say, f"{params.max_tokens} tokens", "--max-tokens 32")
        estimate.update(0, params.max_tokens)
        first = llm.generate(text, replace(params, max_tokens=min(16, params.max_tokens)))
        estimate.update(len(first.token_ids), params.max_tokens)
        explanation = explain_text(llm, text, params)
    try:  # an error of the plot must not lose the printed result
        if plot is not None:
            from pronk.base import save_result
            from pronk.lab.bench.plots import draw_steps

            save_result("plot", plot, draw_steps(explanation.steps))
    finally:
        _print(explanation, llm.tokenizer, screen, as_json=as_json)


def _print(
    explanation: "Explanation", tokenizer: "Tokenizer", screen: "TerminalOutput", *, as_json: bool
) -> None:
    """Print an explanation as JSON, or as a table and a summary."""
    from rich.text import Text

    if as_json:
        typer.echo(json.dumps(_to_dict(explanation), ensure_ascii=False))
        return
    screen.result(_table(explanation, tokenizer))
    if screen.interactive:
        screen.say(
            "drafted: proposed > verified > accepted · gain / cost: tokens / time, in plain steps "
            "· green: accepted"
        )
    screen.result(Text(explanation.summary))


def _table(explanation: "Explanation", tokenizer: "Tokenizer") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("text; drafter, expected tokens, ms", overflow="fold", ratio=1)
    for name in ("drafted", "gain / cost"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, steps in _group_steps(explanation.steps):
        first = steps[0]
        draft_tokens = " > ".join(map(str, first.counts))
        table.add_row(
            str(number) if len(steps) == 1 else f"{number}-{number + len(steps) - 1}",
            _step_text(steps, tokenizer),
            draft_tokens if first.proposed.num_draft_tokens else "",
            _gain_per_cost(first),
        )
    return table


def _group_steps(steps: "Sequence[Decision]") -> "Iterator[tuple[int, list[Decision]]]":
    """Yield, for each row of the table, the number of its first step and its steps.

    Consecutive steps without drafting share a row.
    """

    def has_drafts(numbered: "tuple[int, Decision]") -> bool:
        return bool(numbered[1].reports or numbered[1].verified.num_draft_tokens)

    for drafting, group in groupby(enumerate(steps, 1), has_drafts):
        row = list(group)
        if drafting:
            for number, step in row:
                yield number, [step]
        else:
            yield row[0][0], [step for _, step in row]


def _step_text(steps: "Sequence[Decision]", tokenizer: "Tokenizer") -> Any:
    """Return a row's text, with accepted draft tokens in green, and a line for each drafter."""
    from rich.text import Text

    text = Text()
    for step in steps:
        accepted = len(step.path)
        for tokens, style in ((step.tokens[:accepted], "green"), (step.tokens[accepted:], "")):
            escaped = repr(tokenizer.decode(list(tokens)))[1:-1]  # keeps line breaks visible
            text.append(escaped, style)
    for report in steps[0].reports:
        expected = "" if report.after is None else f" {report.after.tokens:.2f},"
        name = f"({report.drafter})" if report.reason == "learns" else report.drafter
        text.append(f"\n  {name}{expected} {1e3 * report.seconds:.2g}", "dim")
    return text


def _gain_per_cost(step: "Decision") -> str:
    """Return ``expected tokens / expected cost = speed-up``; empty without draft tokens."""
    if not step.verified.num_draft_tokens:
        return ""
    if step.value is None or step.plain is None or step.expected is None:
        return ""
    return f"{step.gain:.2f} / {step.expected / step.plain:.2f} = {step.value:.2f}"


def _to_dict(explanation: "Explanation") -> dict[str, Any]:
    return {
        "completion": explanation.completion.to_dict(),
        "summary": explanation.summary,
        "speed": explanation.speed,
        "regret": explanation.completion.stats.regret.to_dict(),
        "drafters": [asdict(share) for share in explanation.shares],
        "steps": [_step_to_dict(step) for step in explanation.steps],
    }


def _step_to_dict(step: "Decision") -> dict[str, Any]:
    reports = [
        {
            "drafter": report.drafter,
            "why": report.reason,
            "seconds": report.seconds,
            "proposed": report.tree.num_draft_tokens,
            "expected_before": None if report.before is None else report.before.tokens,
            "expected_after": None if report.after is None else report.after.tokens,
        }
        for report in step.reports
    ]
    names = ("plain", "expected", "drafting", "seconds", "gain", "value", "allowance")
    verified = {
        "tokens": step.verified.tokens,
        "parents": step.verified.parents,
        "gain": step.verified.gain,
        "drafters": [name for name, _ in step.verified.origin or ()],
    }
    return {
        "tokens": step.tokens,
        "proposals": reports,
        "proposed": step.proposed.num_draft_tokens,
        "verified": verified,
        "accepted": step.path,
        **{name: getattr(step, name) for name in names},
    }
