"""Options that several commands of ``pronk train`` have in common.

The decorator :func:`~pronk.cli.options.shares` adds them to a command.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from pronk import OptionError
from pronk.commands import given_options, option, panel
from pronk.train.corpus.sources import parse_source
from pronk.train.options import (
    DataOptions,
    LoopOptions,
    OnPolicyOptions,
    StudentOptions,
    fit_lengths,
)

# Help texts of the options for multi-token heads, which the commands ``lm`` and ``heads`` share.
HEAD_KIND = "A head's layer: transformer or linear."
HEAD_ORDER = (
    "parallel; causal: a head reads the output of the head before it; anticausal: "
    "of the head after it."
)
UNEMBEDDINGS = "shared: the model's output matrix; replicated: a copy of it for each head."

text_option = panel("Text")
model_option = panel("Model")
loop_option = panel("Training")


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
    valid: Annotated[
        list[Path] | None, text_option("JSONL file to measure the loss on.", metavar="FILE")
    ] = None,
    exclude: Annotated[
        list[Path] | None,
        text_option(
            "JSONL file of prompts; text that shares 13 words with them is dropped.", metavar="FILE"
        ),
    ] = None,
    dialogues: Annotated[
        float, text_option("Share of dialogues in the mixture.")
    ] = DataOptions.dialogues,
) -> DataOptions:
    """Return the options of the training text: sources, validation files, prompts to exclude."""
    return DataOptions(
        tuple(parse_source(text) for text in source),
        tuple(valid or ()),
        tuple(exclude or ()),
        dialogues,
        vocab,
        seed=seed,
    )


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """Options of the training loop on the command line.

    ``None`` for ``micro``, ``length`` and ``final_length`` means a value that fits the other
    options (:func:`~pronk.train.options.fit_lengths`).
    """

    steps: Annotated[int, loop_option("Optimizer steps at most.")] = LoopOptions.steps
    minutes: Annotated[
        float | None,
        loop_option(
            "End the schedule this many minutes after the command's start, evaluations included."
        ),
    ] = None
    patience: Annotated[
        int | None,
        loop_option(
            "End after this many validations in a row without a new best loss.",
            show_default="never",
        ),
    ] = None
    batch: Annotated[int, loop_option("Tokens per step.")] = LoopOptions.batch
    micro: Annotated[
        int | None,
        loop_option(
            "Tokens per forward and backward pass; gradients are accumulated.",
            show_default=f"{LoopOptions.micro}, or the most below that divides --batch into whole "
            "sequences",
        ),
    ] = None
    length: Annotated[
        int | None,
        loop_option(
            "Sequence length of the first part.",
            show_default=f"{LoopOptions.length}, or the most below that fits the context and "
            "divides --micro",
        ),
    ] = None
    final_length: Annotated[
        int | None,
        loop_option(
            "Sequence length of the last part.",
            show_default=f"{LoopOptions.final_length}, or the most below that fits the context and "
            "divides --micro",
        ),
    ] = None
    final_share: Annotated[float, loop_option("Share of the run that the last part takes.")] = (
        LoopOptions.final_share
    )
    optimizer: Annotated[str, loop_option("muon or adamw.")] = LoopOptions.optimizer
    rate: Annotated[float, loop_option("Peak learning rate.", "--lr")] = LoopOptions.rate
    warmup: Annotated[int, loop_option("Warm-up steps.")] = LoopOptions.warmup
    weight_decay: Annotated[float, loop_option("Weight decay of the matrices.")] = (
        LoopOptions.weight_decay
    )
    compile: Annotated[bool, loop_option("Compile the model; worth it for long runs.")] = False
    device: Annotated[
        str, loop_option("Where to train: cpu, or cuda, which is one GPU per process of torchrun.")
    ] = LoopOptions.device
    threads: Annotated[int | None, loop_option("CPU threads.", show_default="torch's choice")] = (
        None
    )
    evaluate_every: Annotated[int, loop_option("Steps between validations.")] = (
        LoopOptions.evaluate_every
    )
    save_every: Annotated[int, loop_option("Steps between checkpoints.")] = LoopOptions.save_every
    seed: Annotated[int, loop_option("Seed of weights, mixture and order of the text.")] = (
        LoopOptions.seed
    )


@dataclass(frozen=True, kw_only=True)
class StudentRun:
    """Options of commands that train a drafter on the output distribution of a target."""

    out: Annotated[Path, option("Folder of the run; an unfinished run in it is continued.")]
    target: Annotated[
        str | None,
        option(
            "Model that the drafter is for: a folder, or its id on the Hub.",
            show_default="in a clone: pronk-tiny",
        ),
    ] = None
    name: Annotated[
        str | None, option("Name of the drafter in its card.", show_default="by target and kind")
    ] = None
    on_policy: Annotated[
        int,
        text_option(
            "Tokens of text that the target generates for the training.",
            show_default=f"{OnPolicyOptions.tokens}, or what a third of --minutes is enough for",
        ),
    ] = OnPolicyOptions.tokens
    share: Annotated[float, text_option("Share of the target's own text in the training text.")] = (
        StudentOptions.share
    )
    hard: Annotated[
        float,
        loop_option(
            "Weight in the loss of the text's next token; the other part is the target's "
            "distribution."
        ),
    ] = StudentOptions.hard
    num_tokens: Annotated[
        int | None,
        loop_option(
            "Draft tokens per step when the engine measures the drafter; 0: no measurement."
        ),
    ] = StudentOptions.num_tokens

    def settings(self, loop: Mapping[str, Any], context: int, longest: int) -> dict[str, Any]:
        """Return the fields of ``StudentOptions`` that all kinds of drafters share.

        ``context`` is the target's context length, ``longest`` the drafter's, in tokens; training
        sequences fit both.
        """
        return {
            **fit_lengths(loop, min(context, longest)),
            "share": self.share if self.on_policy else 0.0,
            "hard": self.hard,
            "num_tokens": self.num_tokens,
            "context": context,
        }


def refuse(options: Mapping[str, object], reason: str) -> None:
    """Raise OptionError if one of ``options`` has a value other than ``None``.

    ``reason`` says in the message why these options have no effect in this run.
    """
    for name, value in options.items():
        if value is not None:
            msg = f"{name}: expected none {reason}, found {value!r}; leave it out"
            raise OptionError(msg)


def command_line(context: typer.Context) -> str:
    """Return the command of a run for the model card, with file names in place of paths.

    Options about the training text come first.
    """
    words = ["pronk", "train", str(context.info_name)]
    given = set(given_options(context))
    for parameter in sorted(context.command.params, key=_panel_number):
        if parameter.name not in given:
            continue
        value = context.params[parameter.name]
        if isinstance(value, bool):
            words.append(parameter.opts[0] if value else parameter.secondary_opts[0])
            continue
        for item in value if isinstance(value, (list, tuple)) else [value]:
            words += [parameter.opts[0], _without_folder(item)]
    return shlex.join(words)


def _panel_number(parameter: object) -> int:
    """Return a sort key for the options of a command: those about the text first.

    0 for options in the panel "Text", 1 for those without a panel, 2 for the others.
    """
    return {"Text": 0, None: 1}.get(getattr(parameter, "rich_help_panel", None), 2)


def _without_folder(value: object) -> str:
    """Return the value of an option without the folders of its path; a Hub id stays as it is.

    ``a/b.jsonl=1`` becomes ``b.jsonl=1``, ``python:a/b=1`` becomes ``python:b=1``.
    """
    if isinstance(value, Path):
        return value.name
    what, equals, weight = str(value).rpartition("=")
    if not equals:  # no WHAT=WEIGHT: the whole value is in ``weight``
        return Path(weight).name if Path(weight).exists() else weight
    prefix, colon, path = what.rpartition(":")
    return f"{prefix}{colon}{Path(path).name}{equals}{weight}"
