"""Report of a verification on a terminal of 80 columns or more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pronk import Autoregressive
from pronk.base.arrays import KV_DTYPES
from pronk.lab.verification.equality import Candidate, Divergence
from pronk.lab.verification.run import DrafterReport, Verdict, VerifyReport

_MAX_DIVERGENCES = 3  # divergences shown per drafter; --json lists all

_WIDTHS = (22, 22, 22, 12, 12)  # characters of the columns after the first, without a terminal

_STYLES: dict[Verdict, str] = {"passed": "green", "failed": "bold red", "vacuous": "yellow"}


def show(report: VerifyReport, console: Console) -> None:
    """Print the configuration and the results."""
    console.print(Text(_heading(report)))
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    first, *others = _columns(report)
    table.add_column(first, overflow="fold", ratio=1)
    for column in others:
        table.add_column(column, overflow="fold")
    for result in report.drafters:
        table.add_row(*_row(result, complete=report.complete or result is not report.drafters[-1]))
    console.print(table)
    _show_notes(report, console)


class ReportPrinter:
    """Prints a report to a pipe or a file: each drafter's row as soon as its checks have run."""

    def __init__(self, drafters: Iterable[str]) -> None:
        longest = max(map(len, (Autoregressive.name, *drafters)))
        self._widths = (longest, *_WIDTHS)
        width = sum(self._widths) + 3 * len(self._widths)
        self._console = Console(highlight=False, width=width)
        self._has_begun = False
        self._num_rows = 0

    def update(self, report: VerifyReport) -> None:
        """Print the rows that were completed since the last call.

        The first call also prints the configuration and the head of the table.
        """
        if not self._has_begun:
            self._has_begun = True
            self._console.print(Text(_heading(report)), soft_wrap=True)
        complete = report.drafters if report.complete else report.drafters[:-1]
        self._print_rows(report, complete)

    def finish(self, report: VerifyReport, console: Console) -> None:
        """Print the remaining rows, an incomplete one included.

        Notes and verdict go to ``console``.
        """
        self._print_rows(report, report.drafters)
        _show_notes(report, console)

    def _print_rows(self, report: VerifyReport, results: Sequence[DrafterReport]) -> None:
        for result in results[self._num_rows :]:
            table = Table(box=SIMPLE_HEAD, show_edge=False, show_header=not self._num_rows)
            for name, width in zip(_columns(report), self._widths, strict=True):
                table.add_column(name, overflow="fold", width=width)
            complete = report.complete or result is not report.drafters[-1]
            table.add_row(*_row(result, complete=complete))
            self._console.print(table)
            self._console.file.flush()
            self._num_rows += 1


def _columns(report: VerifyReport) -> tuple[str, ...]:
    tokens = "same tokens" if report.settings.rule == "coupled" else "same greedy"
    return ("drafter", tokens, "same log-probs", "distribution", "accepted", "verdict")


def _show_notes(report: VerifyReport, console: Console) -> None:
    for result in report.drafters:
        for note in _notes(result):
            console.print(note, soft_wrap=True)
    if report.left_out:
        names = ", ".join(report.left_out)
        console.print(Text(f"left out: {names}; --json has the reasons", style="dim"))
    console.print(_summary(report))


def _heading(report: VerifyReport) -> str:
    promise = "the same tokens to the bit" if report.exact else "the same tokens up to near ties"
    too_long = f" ({report.too_long} too long for the model)" if report.too_long else ""
    if (rule := report.settings.rule) != "coupled":
        promise += (
            f" for greedy texts; of those sampled by {rule}, only the distribution is independent "
            "of the drafter"
        )
    formats = "" if report.weights == report.dtype else f", weights {report.weights},"
    formats += f", cache {report.kv_dtype}," if report.kv_dtype in KV_DTYPES else ""
    model = f"{Path(report.model).name} on {report.device} in {report.dtype}{formats}"
    settings = report.settings
    work = (
        f"{report.prompts} prompts{too_long}, {settings.max_tokens} tokens each, "
        f"seed {settings.seed}"
    )
    return f"{model} with kernels {report.kernels}, which promises {promise}: {work}"


def _row(result: DrafterReport, *, complete: bool) -> list[Text]:
    verdicts = result.verdicts()
    equality = result.equality
    scores = result.rescoring
    strings = result.distribution
    cells = ["–", "–", "–"]
    if equality is not None:
        cells[0] = f"{equality.equal}/{equality.texts}"
        if equality.near_ties:
            cells[0] += f", {equality.near_ties} near tie{'s' * (equality.near_ties > 1)}"
    if scores is not None:
        cells[1] = f"{scores.tokens - scores.wrong}/{scores.tokens}"
    if strings is not None:
        cells[2] = "impossible strings" if strings.impossible else f"p = {strings.p_value:.2g}"
    row = [Text(result.drafter)]
    for cell, verdict in zip(cells, verdicts.values(), strict=True):
        # A check that proved nothing is marked beside others that did; if none did, the verdict in
        # the last column says so.
        is_untested = verdict == "vacuous" and result.tested
        words = f"{cell}, not tested" if is_untested else cell
        row.append(Text(words, style=_STYLES.get(verdict, "")))
    row.append(Text("–" if result.plain else f"{result.accepted}/{result.drafted}"))
    return [*row, _verdict(result, complete=complete)]


def _verdict(result: DrafterReport, *, complete: bool) -> Text:
    if result.failed:
        return Text("FAILED", style=_STYLES["failed"])
    if not complete:
        return Text("unfinished", style=_STYLES["vacuous"])
    if not result.tested:
        return Text("not tested", style=_STYLES["vacuous"])
    return Text("verified", style=_STYLES["passed"])


def _notes(result: DrafterReport) -> Iterator[Text]:
    if not result.tested:
        yield Text(
            f"{result.drafter}: not tested: no draft token was accepted (of {result.drafted})",
            style="yellow",
        )
    if result.equality is not None:
        for divergence in result.equality.divergences[:_MAX_DIVERGENCES]:
            yield _explanation(result.drafter, divergence)
        if (more := len(result.equality.divergences) - _MAX_DIVERGENCES) > 0:
            yield Text(f"{result.drafter}: {more} more, which --json lists")
    scores = result.rescoring
    strings = result.distribution
    if scores is not None and scores.failed:
        yield Text(
            f"{result.drafter}: {scores.wrong} log-probabilities differ from scoring the text in "
            f"one forward pass, by up to {scores.worst:.3g} (allowed: {scores.tolerance:.2g}); "
            f"first: {scores.where}"
        )
    if scores is not None and scores.left_out:
        yield Text(
            f"{result.drafter}: {scores.left_out} texts beyond the context of dynamic RoPE were "
            "not re-scored"
        )
    if strings is not None and strings.failed:
        yield Text(
            f"{result.drafter}: {strings.samples} strings after prompt {strings.prompt} do not "
            f"follow the model's distribution: chi-square {strings.statistic:.1f} with "
            f"{strings.freedom} degrees of freedom, p = {strings.p_value:.2g} (fails below "
            f"{strings.threshold:.2g}), {strings.impossible} strings have probability 0"
        )


def _explanation(drafter: str, divergence: Divergence) -> Text:
    batch = ", in a batch" if divergence.batch else ""
    place = f"{drafter}, prompt {divergence.prompt}, {divergence.mode}{batch}"
    verdict = "near tie" if divergence.near_tie else "defect"
    lines = [f"{place}, token {divergence.position}: {divergence.what}: {verdict}"]
    lines += [_candidate("plain", divergence.expected), _candidate("found", divergence.found)]
    if divergence.tolerance is not None:
        gap = "" if divergence.gap is None else f"gap {divergence.gap:.4g}; "
        lines.append(f"    {gap}rounding may move a logit by ± {divergence.tolerance:.2g}")
    text = "\n".join(line for line in lines if line)
    return Text(text, style="" if divergence.near_tie else "red")


def _candidate(label: str, token: Candidate | None) -> str:
    if token is None:
        return ""
    score = "dropped" if token.score is None else f"{token.score:.4f}"
    name = f"{token.token_id:>6} {token.text!r:<14}"
    return f"    {label}  {name} logit {token.logit:.4f}  score {score}"


def _conclusion(report: VerifyReport) -> str:
    if report.settings.rule == "coupled":
        return "changed nothing"
    if any(result.distribution is not None for result in report.drafters):
        return "changed no greedy text and no distribution"
    return "changed no greedy text; the distribution of sampled texts was not tested"


def _summary(report: VerifyReport) -> Text:
    if report.passed:
        accepted = sum(result.accepted for result in report.drafters)
        sentence = "Verified."
        if accepted:
            sentence = f"Verified: {accepted} accepted draft tokens {_conclusion(report)}."
        text = Text(sentence, style="green")
        if report.vacuous:
            text.append(
                f" Not tested, because no draft token was accepted: {', '.join(report.vacuous)}.",
                style="yellow",
            )
        return text
    if report.failed:
        return Text(f"NOT verified: {', '.join(report.failed)}.", style="bold red")
    if not report.complete:
        return Text("Interrupted: the checks above were verified.", style="yellow")
    return Text(
        f"NOT verified: no draft token was accepted of {', '.join(report.vacuous)}.",
        style="bold red",
    )
