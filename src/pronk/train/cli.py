"""``pronk train``: train the models that pronk ships, or your own."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from pronk.train.options import DataOptions, Shape, TrainOptions
from pronk.train.sources import parse_source

__all__ = ["app"]

app = typer.Typer(help="Train language models and drafters.", no_args_is_help=True, rich_markup_mode="rich")

_INTERRUPTED = 130


@app.callback()
def _train() -> None:
    """Train language models and drafters."""


def _text(help: str, **more: Any) -> Any:  # noqa: A002 - typer's word
    return typer.Option(help=help, rich_help_panel="Text", **more)


def _model(help: str) -> Any:  # noqa: A002 - typer's word
    return typer.Option(help=help, rich_help_panel="Model")


def _loop(help: str, **more: Any) -> Any:  # noqa: A002 - typer's word
    return typer.Option(help=help, rich_help_panel="Training", **more)


@app.command(no_args_is_help=True)
def lm(  # noqa: PLR0913, PLR0917 - each is an option of the command
    context: typer.Context,
    source: Annotated[
        list[str],
        _text(
            "A .jsonl(.gz) file, a text file or folder, python, or python:FOLDER; with its weight.",
            metavar="WHAT=WEIGHT",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the run; an unfinished run in it is continued.")],
    name: Annotated[str, typer.Option(help="Name of the model in its card.")] = "pronk-tiny",
    valid: Annotated[list[Path] | None, _text("JSONL file to measure the loss on.", metavar="FILE")] = None,
    exclude: Annotated[
        list[Path] | None,
        _text("JSONL file of prompts; text that shares 13 words with them is dropped.", metavar="FILE"),
    ] = None,
    dialogues: Annotated[float, _text("Share of dialogues in the mixture.")] = DataOptions.dialogues,
    hidden: Annotated[int, _model("Hidden size.")] = Shape.hidden,
    layers: Annotated[int, _model("Layers.")] = Shape.layers,
    heads: Annotated[int, _model("Attention heads.")] = Shape.heads,
    kv_heads: Annotated[int, _model("Key/value heads.")] = Shape.kv_heads,
    mlp: Annotated[int, _model("Width of the gated MLP.")] = Shape.mlp,
    vocab: Annotated[int, _model("Vocabulary size.")] = Shape.vocab,
    positions: Annotated[int, _model("Longest text, in tokens.")] = Shape.context,
    steps: Annotated[int, _loop("Optimizer steps at most.")] = TrainOptions.steps,
    minutes: Annotated[float | None, _loop("End after so many minutes, with the schedule intact.")] = None,
    batch: Annotated[int, _loop("Tokens per step.")] = TrainOptions.batch,
    micro: Annotated[int, _loop("Tokens per pass; gradients are accumulated.")] = TrainOptions.micro,
    length: Annotated[int, _loop("Sequence length of the first part.")] = TrainOptions.length,
    final_length: Annotated[int, _loop("Sequence length of the last part.")] = TrainOptions.final_length,
    final_share: Annotated[float, _loop("Share of the run that the last part takes.")] = TrainOptions.final_share,
    optimizer: Annotated[str, _loop("muon or adamw.")] = TrainOptions.optimizer,
    lr: Annotated[float, _loop("Peak learning rate.")] = TrainOptions.rate,
    warmup: Annotated[int, _loop("Warm-up steps.")] = TrainOptions.warmup,
    weight_decay: Annotated[float, _loop("Weight decay of the matrices.")] = TrainOptions.weight_decay,
    compile: Annotated[bool, _loop("Compile the model; worth it for long runs.")] = False,  # noqa: A002
    device: Annotated[str, _loop("Where to train, for example cpu or cuda.")] = TrainOptions.device,
    threads: Annotated[int | None, _loop("CPU threads.", show_default="torch's choice")] = None,
    evaluate_every: Annotated[int, _loop("Steps between validations.")] = TrainOptions.evaluate_every,
    seed: Annotated[int, _loop("Decides weights, mixture and order of the text.")] = TrainOptions.seed,
) -> None:
    """Train a tokenizer and a Llama-architecture language model from text.

    The finished model is in OUT/export, the latest one in OUT/latest. Ctrl-C saves; the same command continues.

    [bold]Examples[/]

    pronk train lm --source python=0.6 --source math.jsonl.gz=0.15 --source prose.jsonl.gz=0.25 --out run

    pronk train lm --source notes/=1 --out run --steps 500 --layers 4 --minutes 20
    """
    from pronk.train.run import run  # noqa: PLC0415 - needs torch, and --help should not

    sources = tuple(parse_source(text) for text in source)
    data = DataOptions(sources, tuple(valid or ()), tuple(exclude or ()), dialogues, vocab, seed=seed)
    options = TrainOptions(
        shape=Shape(hidden, layers, heads, kv_heads, mlp, vocab, positions),
        steps=steps,
        minutes=minutes,
        batch=batch,
        micro=micro,
        length=length,
        final_length=final_length,
        final_share=final_share,
        optimizer=optimizer,
        rate=lr,
        warmup=warmup,
        weight_decay=weight_decay,
        compile=compile,
        device=device,
        threads=threads,
        seed=seed,
        evaluate_every=evaluate_every,
    )
    if not run(data, options, out, name, _command_line(context), Console()):
        raise typer.Exit(_INTERRUPTED)


def _command_line(context: typer.Context) -> str:
    """The command as it was given, with file names only: a reader of the card has other folders."""
    words = ["pronk", "train", str(context.info_name)]
    for parameter in context.command.params:
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
    """``a/b.jsonl=1`` to ``b.jsonl=1``, ``python:a/b=1`` to ``python:b=1``."""
    if isinstance(value, Path):
        return value.name
    what, equals, weight = str(value).rpartition("=")
    prefix, colon, path = what.rpartition(":")
    return f"{prefix}{colon}{Path(path).name}{equals}{weight}"
