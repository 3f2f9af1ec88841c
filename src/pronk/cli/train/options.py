"""Options that the commands of ``pronk train`` share: what is read, how it is trained, what it guesses for.

typer wants the real types of the options: no postponed annotations here.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from pronk.errors import OptionError
from pronk.train.options import DataOptions, LoopOptions, OnPolicyOptions, StudentOptions, fit_lengths
from pronk.train.sources import parse_source

__all__ = [
    "HEAD_KIND",
    "HEAD_ORDER",
    "INTERRUPTED",
    "UNEMBEDDINGS",
    "StudentRun",
    "command_line",
    "loop_option",
    "loop_options",
    "model_option",
    "refuse",
    "student_options",
    "text_options",
]

INTERRUPTED = 130

# Of the options that both a language model's heads and heads on a frozen target have.
HEAD_KIND = "A head's layer: transformer or linear."
HEAD_ORDER = "parallel; causal: each head reads the nearer one's output; anticausal: the further one's."
UNEMBEDDINGS = "shared: the model's own; replicated: one for each head."


def text_option(help: str, **more: Any) -> Any:  # noqa: A002 - typer's word
    """An option about what is read."""
    return typer.Option(help=help, rich_help_panel="Text", **more)


def model_option(help: str, **more: Any) -> Any:  # noqa: A002 - typer's word
    """An option about what is trained."""
    return typer.Option(help=help, rich_help_panel="Model", **more)


def loop_option(help: str, **more: Any) -> Any:  # noqa: A002 - typer's word
    """An option about how it is trained."""
    return typer.Option(help=help, rich_help_panel="Training", **more)


def text_options(
    vocab: int = DataOptions.vocab_size,
    seed: int = 0,
    *,
    source: Annotated[
        list[str],
        text_option(
            "A .jsonl(.gz) file, a text file or folder, python, or python:FOLDER; with its weight.",
            metavar="WHAT=WEIGHT",
        ),
    ],
    valid: Annotated[list[Path] | None, text_option("JSONL file to measure the loss on.", metavar="FILE")] = None,
    exclude: Annotated[
        list[Path] | None,
        text_option("JSONL file of prompts; text that shares 13 words with them is dropped.", metavar="FILE"),
    ] = None,
    dialogues: Annotated[float, text_option("Share of dialogues in the mixture.")] = DataOptions.dialogues,
) -> DataOptions:
    """What to read; the options of every command that reads text."""
    sources = tuple(parse_source(text) for text in source)
    return DataOptions(sources, tuple(valid or ()), tuple(exclude or ()), dialogues, vocab, seed=seed)


def loop_options(
    *,
    steps: Annotated[int, loop_option("Optimizer steps at most.")] = LoopOptions.steps,
    minutes: Annotated[
        float | None,
        loop_option("End after so many minutes from the command's start, text and evaluations and all, on schedule."),
    ] = None,
    patience: Annotated[
        int | None,
        loop_option("End when so many validations in a row are no better than the best one.", show_default="never"),
    ] = None,
    batch: Annotated[int, loop_option("Tokens per step.")] = LoopOptions.batch,
    micro: Annotated[
        int | None,
        loop_option(
            "Tokens per pass; gradients are accumulated.",
            show_default=f"{LoopOptions.micro}, or the most below that divides --batch into whole sequences",
        ),
    ] = None,
    length: Annotated[
        int | None,
        loop_option(
            "Sequence length of the first part.",
            show_default=f"{LoopOptions.length}, or the most below that fits the context and divides --micro",
        ),
    ] = None,
    final_length: Annotated[
        int | None,
        loop_option(
            "Sequence length of the last part.",
            show_default=f"{LoopOptions.final_length}, or the most below that fits the context and divides --micro",
        ),
    ] = None,
    final_share: Annotated[float, loop_option("Share of the run that the last part takes.")] = LoopOptions.final_share,
    optimizer: Annotated[str, loop_option("muon or adamw.")] = LoopOptions.optimizer,
    lr: Annotated[float, loop_option("Peak learning rate.")] = LoopOptions.rate,
    warmup: Annotated[int, loop_option("Warm-up steps.")] = LoopOptions.warmup,
    weight_decay: Annotated[float, loop_option("Weight decay of the matrices.")] = LoopOptions.weight_decay,
    compile: Annotated[bool, loop_option("Compile the model; worth it for long runs.")] = False,  # noqa: A002
    device: Annotated[
        str, loop_option("Where to train: cpu, or cuda, which is one GPU per process of torchrun.")
    ] = LoopOptions.device,
    threads: Annotated[int | None, loop_option("CPU threads.", show_default="torch's choice")] = None,
    evaluate_every: Annotated[int, loop_option("Steps between validations.")] = LoopOptions.evaluate_every,
    save_every: Annotated[int, loop_option("Steps between checkpoints.")] = LoopOptions.save_every,
    seed: Annotated[int, loop_option("Decides weights, mixture and order of the text.")] = LoopOptions.seed,
) -> dict[str, Any]:
    """The loop's settings; the options of every command that trains.

    Lengths that were not given are ``None``, for :func:`~pronk.train.options.fit_lengths` to choose.
    """
    return {
        "steps": steps,
        "minutes": minutes,
        "patience": patience,
        "batch": batch,
        "micro": micro,
        "length": length,
        "final_length": final_length,
        "final_share": final_share,
        "optimizer": optimizer,
        "rate": lr,
        "warmup": warmup,
        "weight_decay": weight_decay,
        "compile": compile,
        "device": device,
        "threads": threads,
        "evaluate_every": evaluate_every,
        "save_every": save_every,
        "seed": seed,
    }


@dataclass(frozen=True)
class StudentRun:
    """What every drafter that learns from a target is trained with; the kind decides a ``num_tokens`` of ``None``."""

    out: Path
    target: str | None
    name: str | None
    on_policy: int
    share: float
    hard: float
    num_tokens: int | None

    def settings(self, loop: dict[str, Any], context: int, longest: int) -> dict[str, Any]:
        """The fields of :class:`~pronk.train.options.StudentOptions` that do not depend on the kind of drafter.

        Args:
            loop: the loop's settings.
            context: of the target, in tokens.
            longest: text that the drafter can read, in tokens; sequences fit both.
        """
        return {
            **fit_lengths(loop, min(context, longest)),
            "share": self.share if self.on_policy else 0.0,
            "hard": self.hard,
            "num_tokens": self.num_tokens,
            "context": context,
        }


def student_options(
    *,
    out: Annotated[Path, typer.Option(help="Folder of the run; an unfinished run in it is continued.")],
    target: Annotated[
        str | None,
        typer.Option(help="Model to guess for: a folder, or its id on the Hub.", show_default="in a clone: pronk-tiny"),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the drafter in its card.", show_default="by target and kind")
    ] = None,
    on_policy: Annotated[
        int,
        text_option(
            "Tokens that the target writes itself, to learn from.",
            show_default=f"{OnPolicyOptions.tokens}, or what a third of --minutes is enough for",
        ),
    ] = OnPolicyOptions.tokens,
    share: Annotated[float, text_option("Share of the target's own text in the training text.")] = StudentOptions.share,
    hard: Annotated[
        float, loop_option("Weight of the text's own next token in the loss; the rest is the target's distribution.")
    ] = StudentOptions.hard,
    num_tokens: Annotated[
        int | None, loop_option("Guesses per step when the engine measures the drafter; 0 does not.")
    ] = StudentOptions.num_tokens,
) -> StudentRun:
    """What to guess for and what to learn from; the options of every command that trains a drafter."""
    return StudentRun(out, target, name, on_policy, share, hard, num_tokens)


def refuse(options: Mapping[str, object], reason: str) -> None:
    """Raise :class:`~pronk.errors.OptionError` if one of the options, by name, is given (not ``None``) without use."""
    for name, value in options.items():
        if value is not None:
            msg = f"{name}: expected none {reason}, found {value!r}; leave it out"
            raise OptionError(msg)


def command_line(context: typer.Context) -> str:
    """The command as it was given, text first, with file names only: a reader of the card has other folders."""
    words, order = ["pronk", "train", str(context.info_name)], {"Text": 0, None: 1}
    panels = ((order.get(getattr(each, "rich_help_panel", None), 2), each) for each in context.command.params)
    for _, parameter in sorted(panels, key=lambda each: each[0]):
        source = context.get_parameter_source(str(parameter.name))
        if source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[str(parameter.name)]
        flag = parameter.opts[0]
        if isinstance(value, bool):
            words.append(flag if value else parameter.secondary_opts[0])
            continue
        for item in value if isinstance(value, (list, tuple)) else [value]:
            words += [flag, _without_folder(item)]
    return shlex.join(words)


def _without_folder(value: object) -> str:
    """``a/b.jsonl=1`` to ``b.jsonl=1``, ``python:a/b=1`` to ``python:b=1``; the id of a model on the Hub stays."""
    if isinstance(value, Path):
        return value.name
    what, equals, weight = str(value).rpartition("=")
    if not equals:
        return Path(weight).name if Path(weight).exists() else weight
    prefix, colon, path = what.rpartition(":")
    return f"{prefix}{colon}{Path(path).name}{equals}{weight}"
