"""Experiments of *Multi-token Prediction* (Gloeckle et al. 2024) on small models.

    python benchmarks/papers/multi_token.py induction --state runs --minutes 60

The commands are experiments of *Better & Faster LLMs via Multi-token Prediction*:

    induction        figures 7 and S14
    arithmetic       figures 8, S15 and S16
    variants         table S4
    epochs           section 3.5
    finetune         section 3.6 and table S6
    batches          figure S10
    choice_points    appendix L.3
    sizes            figures 1, 3 and S7, tables 1, S3 and S5: loss, S and training time by number
                     of weights and of tokens predicted at once; of bytes with ``--vocab 260``

Each command trains models until all are finished or ``--minutes`` are over, and then writes a
table, a JSON file and a plot to ``--out``. The same command continues the training. If the folder
``--state`` is lost, ``--report`` with the JSON file restores the results of finished models, but
not their weights.

A model with further heads has as many weights as one without: each further head replaces a layer. ±
is half the width of the 95 % interval of the mean over the seeds (Student's t), and ``?`` with one
seed. An unfinished model counts only while no other seed of its row is finished; the table and the
plot mark it. Every training and evaluation uses one thread, and the tables have the processor time,
also of models that are trained on a GPU (``--device cuda``). One such model does not fill a GPU:
``--processes`` trains several at once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

from multi_token_models import SIZES, Cell, Deadline, Heads, Trainable, restore_results, train_cell
from multi_token_results import (
    Interval,
    Line,
    by_group,
    cost,
    interval,
    markdown,
    measured,
    paired,
    seeds_of,
    write_report,
)
from multi_token_tasks import Polynomials, Stories, Task
from multi_token_text import VARIANTS, TextCell, choice_points, measure_batches, prepare_text

from pronk.base import count_text
from pronk.base.errors import OptionError
from pronk.train.checkpoint import load_checkpoint
from pronk.train.data import BYTE_VOCAB
from pronk.train.loop import set_all_threads

Result = dict[str, Any]
# Options that change the training or the measurement of a model with a given name.
_TRAINING = (
    "texts",
    "test",
    "in_domain",
    "out_of_domain",
    "vocab",
    "batch",
    "text_tokens",
    "rate",
    "steps",
)
# Millions of weights of a size, for the axis of a plot.
MILLIONS = {"tiny": 0.05, "0.3M": 0.3, "1M": 1.0, "3M": 3.1, "10M": 10.6}


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def folder_of(options: argparse.Namespace) -> Path:
    """Return the folder of a command's models.

    The commands on text share a folder, except ``epochs``, whose text is small.
    """
    if options.command == "sizes":
        return options.state / f"sizes of {options.vocab} tokens"
    on_text = options.command in {"variants", "finetune", "batches", "choice_points"}
    return options.state / ("text" if on_text else options.command)


def train_all(
    options: argparse.Namespace, cells: Iterable[Trainable], stop: Callable[[], bool]
) -> list[Result]:
    """Train models, ``--processes`` at a time; return the results of all that have begun."""
    train = partial(train_cell, folder_of(options), stop=stop, say=say)
    if options.processes == 1:
        found = list(map(train, cells))
    else:
        with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
            found = list(pool.map(train, cells))
    return [result for result in found if result is not None]


def on_task(
    options: argparse.Namespace, cells: Sequence[Trainable], stop: Callable[[], bool]
) -> list[Result]:
    """Train models, and return the results of the experiment, with those of earlier calls.

    Results with another number of steps or learning rate are left out.
    """
    train_all(options, cells, stop)
    key = (options.steps, options.rate)
    files = sorted(folder_of(options).glob("*/result.json"))
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return [result for result in results if (result["steps"], result["base_rate"]) == key]


def curve_of(result: Result) -> list[tuple[int, dict[str, float]]]:
    """Return the step and the figures of each evaluation of a model."""
    return [(step, figures) for step, figures in result["curve"]]


def best(result: Result, names: Sequence[str]) -> float:
    """Return the highest mean of some figures over the evaluations (the paper's early stopping).

    Without an evaluation, the mean is 0.
    """
    means = [fmean(figures[name] for name in names) for _, figures in curve_of(result)]
    return max(means, default=0.0)


def last(result: Result, name: str) -> float | None:
    """Return a figure of the last evaluation that has the figure, or ``None``."""
    values = [figures[name] for _, figures in curve_of(result) if name in figures]
    return values[-1] if values else None


def tokens_until(result: Result, level: float) -> str:
    """Return the millions of tokens until the accuracy first reaches ``level``, or ``never``."""
    for step, figures in curve_of(result):
        if figures["0"] >= level:
            return f"{step * result['tokens'] / result['step'] / 1e6:.2f}"
    return "never"


def task_cell(
    options: argparse.Namespace, size: str, n: int, task: Task, labels: dict[str, Any]
) -> Cell:
    """Return a model of a size that predicts ``n`` tokens at once, to train on a task."""
    return Cell(
        size,
        Heads(n),
        task,
        options.steps,
        options.texts,
        options.rate,
        options.evaluations,
        options.test,
        labels,
        options.device,
    )


def induction(options: argparse.Namespace, stop: Callable[[], bool]) -> str:
    """Measure the accuracy of the second token of a name, by model size."""
    order = itertools.product(options.seeds, options.new_names, options.sizes, options.heads)
    cells = list[Cell]()
    for seed, share, size, n in order:
        task = Stories(seed=seed, new_names=share)
        cells.append(task_cell(options, size, n, task, {"new_names": share}))
    results = on_task(options, cells, stop)
    rows = []
    lines = []
    by_cell = by_group(results, "new_names", "size", "n")
    for (share, size, n), group in sorted(by_cell.items(), key=_by_size):
        shown = measured(group)
        accuracy = interval([best(result, ["0"]) for result in shown])
        final = interval([last(result, "0") or 0.0 for result in shown])
        until = ", ".join(tokens_until(result, 0.75) for result in shown)
        figures = (accuracy.text(), final.text(), until)
        rows.append((share, size, n, *figures, seeds_of(group), cost(group)))
    for (share, n), group in sorted(by_group(results, "new_names", "n").items()):
        points = list[tuple[float, Interval]]()
        done = True
        by_size = by_group(group, "size")
        for (size,), several in sorted(by_size.items(), key=lambda each: MILLIONS[each[0][0]]):
            accuracies = [best(result, ["0"]) for result in measured(several)]
            points.append((MILLIONS[size], interval(accuracies)))
            done = done and any(result["finished"] for result in several)
        lines.append(Line(f"random names in {share:.0%} of the stories", f"n = {n}", points, done))
    header = ("random names", "size", "n", "best, %", "final, %", "M tokens until 75 %")
    text = markdown((*header, "seeds", "CPU"), rows)
    text += differences(results, lambda result: best(result, ["0"]), "new_names", "size")
    settings = settings_of(
        options, "Parameters (M)", "accuracy", "induction: second tokens of names", "log"
    )
    return write_report(
        options.out, "multi-token-induction", text + total(results), results, settings, lines
    )


def arithmetic(options: argparse.Namespace, stop: Callable[[], bool]) -> str:
    """Measure polynomial arithmetic by number of operations, with and without pause tokens."""
    order = itertools.product(options.seeds, options.pauses, options.sizes, options.heads)
    domain = (options.terms, options.in_domain, options.out_of_domain)
    cells = list[Cell]()
    for seed, pauses, size, n in order:
        task = Polynomials(seed, *domain, pauses)
        labels = {"pauses": pauses, "terms": options.terms}
        cells.append(task_cell(options, size, n, task, labels))
    results = on_task(options, cells, stop)
    groups = [str(number) for number in range(1, options.out_of_domain + 1)]
    inside = groups[: options.in_domain]
    outside = groups[options.in_domain :]
    rows = []
    lines = []
    by_cell = by_group(results, "pauses", "size", "n")
    for (pauses, size, n), group in sorted(by_cell.items(), key=_by_size):
        shown = measured(group)
        means = list[str]()
        for names in (["1"], inside, outside):
            means.append(interval([best(result, names) for result in shown]).text())
        rows.append((pauses, size, n, *means, seeds_of(group), cost(group)))
        reached = [curve_of(result)[-1][1] for result in shown if result["curve"]]
        if reached:
            points = list[tuple[float, Interval]]()
            for name in groups:
                points.append((int(name), interval([figures[name] for figures in reached])))
            done = all(result["finished"] for result in shown)
            lines.append(Line(f"{size}, {pauses} pause tokens", f"n = {n}", points, done))
    header = ("pauses", "size", "n", "1 operation, %", "in domain, %", "out of domain, %")
    text = markdown((*header, "seeds", "CPU"), rows)
    text += "\nThe table has a model's best evaluation (early stopping), the plot its last.\n"
    for label, names in (("in domain", inside), ("out of domain", outside)):
        text += differences(
            results, lambda result, names=names: best(result, names), "pauses", "size", title=label
        )
    settings = settings_of(
        options, "operations", "accuracy", "polynomial arithmetic modulo 7", "linear"
    )
    return write_report(
        options.out, "multi-token-arithmetic", text + total(results), results, settings, lines
    )


def variants(options: argparse.Namespace, stop: Callable[[], bool]) -> str:
    """Measure the variants of heads in table S4, with equal numbers of steps."""
    results = train_all(options, text_cells(options, VARIANTS), stop)
    rows = []
    for (heads,), group in _by_heads(results).items():
        parameters = f"{group[0]['parameters'] / 1e6:.2f}"
        figures = [mean_of(group, name, 1) for name in (text_name(group), "greedy S", "T=0.8 S")]
        rows.append((heads, parameters, *figures, seeds_of(group), cost(group)))
    header = ("heads", "M weights", "loss of the next token, nats", "S, greedy", "S, T = 0.8")
    settings = settings_of(options, "", "", "variants of the heads (table S4)", "linear")
    text = markdown((*header, "seeds", "CPU"), rows) + total(results)
    return write_report(options.out, "multi-token-variants", text, results, settings)


def epochs(options: argparse.Namespace, stop: Callable[[], bool]) -> str:
    """Measure the loss on held-out text over several epochs of a small text."""
    kinds = [Heads(n) for n in options.heads]
    cells = text_cells(options, kinds, evaluations=options.epochs)
    results = train_all(options, cells, stop)
    rows = []
    lines = []
    per_epoch = options.steps / options.epochs
    for (n,), group in sorted(by_group(results, "n").items()):
        by_step: dict[int, list[float]] = {}
        for result in group:
            for step, figures in curve_of(result):
                by_step.setdefault(round(step / per_epoch), []).append(figures[text_name([result])])
        points = [(epoch, interval(values)) for epoch, values in sorted(by_step.items())]
        rows += [(n, epoch, mean.text(1, 3), mean.count) for epoch, mean in points]
        done = all(result["finished"] for result in group)
        lines.append(Line("held-out text", f"n = {n}", points, done))
    settings = settings_of(
        options, "epochs", "loss of the next token, nats", "several epochs (section 3.5)", "linear"
    )
    text = markdown(("n", "epoch", "loss of the next token, nats", "seeds"), rows) + total(results)
    return write_report(options.out, "multi-token-epochs", text, results, settings, lines)


def sizes(options: argparse.Namespace, stop: Callable[[], bool]) -> str:
    """Measure loss, S and training time by number of weights and of tokens predicted at once.

    With the vocabulary of bytes, the loss is in bits per byte.
    """
    kinds = [Heads(n, options.kind) for n in options.heads]
    cells = list[TextCell]()
    for size in options.sizes:
        cells += text_cells(options, kinds, size=size)
    results = train_all(options, cells, stop)
    scale = 1 / math.log(2) if options.vocab == BYTE_VOCAB else 1.0
    unit = "bits per byte" if options.vocab == BYTE_VOCAB else "nats"
    by_cell = by_group(results, "size", "n")
    rows = []
    for (size, n), group in sorted(by_cell.items(), key=_by_weights):
        shown = measured(group)
        loss = mean_of(group, text_name(group), scale)
        figures = [loss, *(mean_of(group, name, 1) for name in ("greedy S", "T=0.8 S"))]
        weights = f"{group[0]['parameters'] / 1e6:.2f}"
        times = [time_per_token(by_cell.get((size, 1), [])), time_per_token(group)]
        ratio = f"{times[1] / times[0]:.2f}" if all(times) else "–"
        progress = f"{fmean(result['tokens'] for result in shown) / 1e6:.2f}"
        rows.append((size, n, weights, progress, *figures, ratio, seeds_of(group), cost(group)))
    header = ("size", "n", "M weights", "M tokens", f"loss, {unit}", "S, greedy", "S, T = 0.8")
    settings = settings_of(
        options, "", "", "loss by weights and tokens predicted at once", "linear"
    )
    text = markdown((*header, "time per token, × n = 1", "seeds", "CPU"), rows) + total(results)
    name = "multi-token-bytes" if options.vocab == BYTE_VOCAB else "multi-token-sizes"
    return write_report(options.out, name, text, results, settings)


def time_per_token(group: Sequence[Result]) -> float:
    """Return the CPU-seconds of training and evaluation per token; 0 without a trained model."""
    tokens = sum(result["tokens"] for result in group)
    return sum(result["cpu_seconds"] for result in group) / tokens if tokens else 0.0


def finetune(options: argparse.Namespace, stop: Callable[[], bool]) -> str:
    """Fine-tune models that predict n tokens with the loss of n' tokens."""
    first = text_cells(options, [Heads(1), Heads(4)])
    results = train_all(options, first, stop)
    trained = {(result["n"], result["seed"]) for result in results if result["finished"]}
    ready = [cell for cell in first if (cell.heads.tokens, cell.seed) in trained]
    tuned = [tuned_cell(options, cell, after) for cell in ready for after in (1, 4)]
    results += train_all(options, tuned, stop)
    rows = []
    tuned_results = [result for result in results if "before" in result]
    for (before, after), group in sorted(by_group(tuned_results, "before", "terms").items()):
        last_figures = group[0]["curve"][-1][1] if group[0]["curve"] else {}
        name = next((name for name in last_figures if " " not in name), "")
        figures = (mean_of(group, name, 1), mean_of(group, "greedy S", 1))
        rows.append((before, after, *figures, seeds_of(group), cost(group)))
    header = ("n", "n'", "loss of the next token, nats", "S, greedy", "seeds", "CPU")
    settings = settings_of(options, "", "", "fine-tuning n to n' (section 3.6, table S6)", "linear")
    text = markdown(header, rows) + total(results)
    return write_report(options.out, "multi-token-finetune", text, results, settings)


def tuned_cell(options: argparse.Namespace, cell: TextCell, after: int) -> TextCell:
    """Return the model that goes on from a finished one, on other text.

    The new model predicts ``after`` tokens at once.
    """
    folder = folder_of(options) / cell.name
    export = folder / "export"
    data = folder_of(options) / "data" / f"tuned {cell.name}"
    if not export.exists():
        trained_model(folder, cell).export(export, "", {"name": cell.name})
    prepare_text(data, options.tune, options.batch * options.tune_steps + 1, 0, say, str(export))
    return TextCell(
        data,
        cell.size,
        Heads(after, equal=False),
        options.tune_steps,
        cell.seed,
        init=str(export),
        batch=options.batch,
        rate=options.rate / 3,
        evaluations=1,
        labels={"before": cell.heads.tokens, "terms": after},
        device=options.device,
    )


def batches(options: argparse.Namespace, stop: Callable[[], bool]) -> str:
    """Measure throughput and latency by batch size and number of heads used."""
    model = options.model
    if model is None:
        cell = text_cells(options, [Heads(4)])[0]
        trained = train_all(options, [cell], stop)
        if not trained or not trained[0]["finished"]:
            return "the model is not trained yet; the same command continues\n"
        folder = folder_of(options) / cell.name
        model = folder / "export"
        trained_model(folder, cell).export(model, "", {"name": cell.name})
    set_all_threads(1)
    rows = measure_batches(
        model, options.batch_sizes, (1, 2, 3, 4), options.tokens, options.rounds, stop
    )
    table = list[tuple[object, ...]]()
    for row in rows:
        names = ("throughput", "latency", "tokens_per_pass")
        table.append((row["batch"], row["k"], *(f"{row[name]:.2f}" for name in names)))
    lines = list[Line]()
    for panel in ("throughput", "latency"):
        for (k,), group in by_group(rows, "k").items():
            points = [(row["batch"], interval([row[panel]])) for row in group]
            lines.append(Line(panel, f"k = {k}", points))
    settings = settings_of(
        options, "batch size", "relative to k = 1", "decoding by batch size (figure S10)", "linear"
    )
    text = markdown(("batch", "k", "throughput", "latency", "tokens per pass"), table)
    return write_report(options.out, "multi-token-batches", text, rows, settings, lines)


def choices(options: argparse.Namespace, stop: Callable[[], bool]) -> str:
    """Measure the weight of choice points with two trained models, n = 1 and n = 4."""
    pair = text_cells(options, [Heads(1), Heads(4)])[:2]
    results = train_all(options, pair, stop)
    if sum(result["finished"] for result in results) < 2:
        return "the models are not trained yet; the same command continues\n"
    models = [trained_model(folder_of(options) / cell.name, cell) for cell in pair]
    found = choice_points(*models)
    rows = list[tuple[str, object]]()
    for name, value in found.items():
        rows.append((name, f"{value:.3f}" if isinstance(value, float) else value))
    settings = settings_of(options, "", "", "choice points (appendix L.3)", "linear")
    text = markdown(("figure", "value"), rows) + total(results)
    return write_report(options.out, "multi-token-choice-points", text, [found, *results], settings)


def text_cells(
    options: argparse.Namespace, kinds: Sequence[Heads], size: str | None = None, **settings: Any
) -> list[TextCell]:
    """Prepare the text; return the models to train on it, one per seed and kind of heads.

    The models have the size ``size``, or ``options.size`` without it.
    """
    data = folder_of(options) / "data" / "text"
    prepare_text(data, options.source, options.text_tokens, options.vocab, say)
    cells = list[TextCell]()
    for seed in options.seeds:
        for heads in kinds:
            cell = TextCell(
                data,
                size or options.size,
                heads,
                options.steps,
                seed,
                options.vocab,
                batch=options.batch,
                rate=options.rate,
                device=options.device,
                **settings,
            )
            cells.append(cell)
    return cells


def trained_model(folder: Path, cell: TextCell) -> Any:
    """Return the objective of a model with the weights of its checkpoint."""
    model = cell.objective(folder, cell.options())
    model.module.load_state_dict(load_checkpoint(folder / "checkpoint.pt")["model"])
    return model


def _by_size(item: tuple[tuple[Any, ...], object]) -> tuple[Any, ...]:
    (label, size, n), _ = item
    return label, MILLIONS[size], n


def _by_weights(item: tuple[tuple[Any, ...], object]) -> tuple[float, int]:
    (size, n), _ = item
    return MILLIONS[size], n


def _by_heads(results: Iterable[Result]) -> dict[tuple[str], list[Result]]:
    groups: dict[tuple[str], list[Result]] = {}
    for result in results:
        groups.setdefault((Heads(**result["heads"]).name,), []).append(result)
    return groups


def text_name(group: Sequence[Result]) -> str:
    """Return the name of the loss on held-out text in the figures: the name of the text."""
    figures = [figures for result in group for _, figures in curve_of(result)]
    return next((name for each in figures for name in each if " " not in name), "")


def mean_of(group: Sequence[Result], name: str, scale: float) -> str:
    """Return mean and interval of a figure of the last evaluations, or a dash without any."""
    found = [last(result, name) for result in measured(group)]
    values = [value for value in found if value is not None]
    return interval(values).text(scale, 3) if values else "–"


def differences(
    results: Sequence[Result], value: Callable[[Result], float], *keys: str, title: str = ""
) -> str:
    """Return lines with the differences between n > 1 and n = 1 of the same seeds.

    Differences are in percentage points. ``title`` stands at the beginning of each line.
    """
    lines = list[str]()
    for key, by_n in paired(results, value, *keys).items():
        labels = [title] if title else []
        labels += [f"{name} {each}" for name, each in zip(keys, key, strict=True)]
        for n, mean in by_n.items():
            points = f"{mean.text()} points, {count_text(mean.count, 'seed')}"
            lines.append(f"- {', '.join(labels)}, n = {n} minus n = 1: {points}\n")
    return "\n" + "".join(lines) if lines else ""


def total(results: Sequence[Result]) -> str:
    """Return a sentence about the processor time of all models."""
    finished = sum(result["finished"] for result in results)
    models = f"{len(results)} models, of which {finished} are finished"
    return f"\nIn all {cost(results)} for {models}.\n"


def settings_of(
    options: argparse.Namespace, x: str, y: str, title: str, scale: str
) -> dict[str, Any]:
    """Return the settings for the JSON file: options without paths, and the texts of the plot."""
    hidden = {"state", "out", "model", "run", "minutes", "source", "tune", "report"}
    hidden |= {"device", "processes"}
    given = {name: value for name, value in vars(options).items() if name not in hidden}
    return {**given, "x": x, "y": y, "title": title, "scale": scale}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = made.add_subparsers(dest="command", required=True)
    runs = {
        "induction": induction, "arithmetic": arithmetic, "variants": variants, "epochs": epochs,
        "finetune": finetune, "batches": batches, "choice_points": choices, "sizes": sizes,
    }  # fmt: skip
    for name, run in runs.items():
        sub = commands.add_parser(name, help=run.__doc__)
        sub.set_defaults(run=run)
        sub.add_argument(
            "--state", type=Path, required=True, help="folder of the trained models; continued"
        )
        sub.add_argument(
            "--out",
            type=Path,
            default=Path("benchmarks/results"),
            help="folder of tables and plots",
        )
        sub.add_argument(
            "--minutes", type=float, default=60.0, help="time of this call (default: 60)"
        )
        # The other commands need the weights, which a report does not have.
        if name in {"induction", "arithmetic", "variants", "epochs", "sizes"}:
            sub.add_argument(
                "--report",
                type=Path,
                help="JSON file of an earlier call, for the results of its models",
            )
        sub.add_argument("--device", default="cpu", help="device of the training, such as cuda")
        sub.add_argument(
            "--processes", type=int, default=1, help="models to train at once (default: 1)"
        )
        is_task = name in {"induction", "arithmetic"}
        sub.add_argument(
            "--seeds",
            type=int,
            nargs="+",
            default=[0, 1, 2] if is_task or name == "variants" else [0],
        )
        rate_help = f"peak learning rate{' at hidden size 128' if is_task else ''}"
        sub.add_argument("--rate", type=float, default=6e-3 if is_task else 3e-3, help=rate_help)
        sub.add_argument(
            "--steps", type=int, default={"arithmetic": 800, "induction": 3000}.get(name, 1000)
        )
        (add_task_options if is_task else add_text_options)(sub, name)
    return made


def add_task_options(sub: argparse.ArgumentParser, name: str) -> None:
    """Add the options of induction and arithmetic."""
    sub.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.3M", "1M", "3M", "10M"])
    sub.add_argument(
        "--heads", type=int, nargs="+", default=[1, 2], help="numbers of tokens predicted at once"
    )
    sub.add_argument(
        "--texts", type=int, default=16 if name == "induction" else 64, help="texts per step"
    )
    sub.add_argument(
        "--test", type=int, default=200, help="test texts, for each number of operations"
    )
    sub.add_argument("--evaluations", type=int, default=8)
    if name == "induction":
        sub.add_argument("--new-names", type=float, nargs="+", default=[0.1, 0.9])
    else:
        sub.add_argument("--pauses", type=int, nargs="+", default=[0, 5])
        sub.add_argument("--terms", type=int, default=Polynomials.terms)
        operations = {
            "--in-domain": Polynomials.in_domain,
            "--out-of-domain": Polynomials.out_of_domain,
        }
        for option, default in operations.items():
            sub.add_argument(
                option, type=int, default=default, help="most operations of an expression"
            )


def add_text_options(sub: argparse.ArgumentParser, name: str) -> None:
    """Add the options of the experiments on text."""
    sub.add_argument("--source", nargs="+", default=["python=1"], help="as in pronk train")
    if name == "sizes":
        sub.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.3M", "1M", "3M", "10M"])
        sub.add_argument(
            "--heads",
            type=int,
            nargs="+",
            default=[1, 2, 4, 6],
            help="numbers of tokens predicted at once; models with too few layers are skipped",
        )
        sub.add_argument(
            "--kind",
            choices=["transformer", "linear"],
            default="transformer",
            help="kind of the heads; linear ones replace no layer, as for 8 and 16 bytes",
        )
    else:
        sub.add_argument("--size", choices=SIZES, default="1M")
    sub.add_argument("--vocab", type=int, default=1024)
    sub.add_argument("--batch", type=int, default=2048, help="tokens per step")
    sub.add_argument("--text-tokens", type=int, default=250_000 if name == "epochs" else 2_100_000)
    if name == "epochs":
        sub.add_argument("--epochs", type=int, default=8)
        sub.add_argument("--heads", type=int, nargs="+", default=[1, 4])
    if name == "finetune":
        sub.add_argument("--tune", nargs="+", default=["docs=1"], help="text of the fine-tuning")
        sub.add_argument("--tune-steps", type=int, default=200)
    if name == "batches":
        sub.add_argument("--model", type=Path, help="model with heads; default: one is trained")
        sub.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
        sub.add_argument("--tokens", type=int, default=64)
        sub.add_argument("--rounds", type=int, default=4)


def main(words: Sequence[str] | None = None) -> None:
    """Run a command."""
    made = parser()
    options = made.parse_args(words)
    if getattr(options, "epochs", None) and isinstance(options.epochs, int):
        options.steps = options.epochs * max(1, options.text_tokens // options.batch)
    if getattr(options, "report", None) is not None:
        values = {name: getattr(options, name, None) for name in _TRAINING}
        given = {name: value for name, value in values.items() if value is not None}
        try:
            restore_results(folder_of(options), options.report, options.command, given)
        except OptionError as error:
            made.error(str(error))
    print(options.run(options, Deadline(options.minutes)))


if __name__ == "__main__":
    main()
