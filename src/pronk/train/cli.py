"""``pronk train``: train the models that pronk ships, or your own."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from pronk.cli_options import shares
from pronk.train.options import DataOptions, DraftOptions, LoopOptions, OnPolicyOptions, Shape, TrainOptions
from pronk.train.sources import parse_source

__all__ = ["app"]

app = typer.Typer(help="Train language models and drafters.", no_args_is_help=True, rich_markup_mode="rich")

_INTERRUPTED = 130
_DRAFT = Shape(hidden=160, layers=2, heads=5, kv_heads=1, mlp=448)
_DRAFT_LR = 0.012


@app.callback()
def _train() -> None:
    """Train language models and drafters."""


def _text(help: str, **more: Any) -> Any:  # noqa: A002 - typer's word
    return typer.Option(help=help, rich_help_panel="Text", **more)


def _model(help: str, **more: Any) -> Any:  # noqa: A002 - typer's word
    return typer.Option(help=help, rich_help_panel="Model", **more)


def _loop(help: str, **more: Any) -> Any:  # noqa: A002 - typer's word
    return typer.Option(help=help, rich_help_panel="Training", **more)


def text_options(
    vocab: int = DataOptions.vocab_size,
    seed: int = 0,
    *,
    source: Annotated[
        list[str],
        _text(
            "A .jsonl(.gz) file, a text file or folder, python, or python:FOLDER; with its weight.",
            metavar="WHAT=WEIGHT",
        ),
    ],
    valid: Annotated[list[Path] | None, _text("JSONL file to measure the loss on.", metavar="FILE")] = None,
    exclude: Annotated[
        list[Path] | None,
        _text("JSONL file of prompts; text that shares 13 words with them is dropped.", metavar="FILE"),
    ] = None,
    dialogues: Annotated[float, _text("Share of dialogues in the mixture.")] = DataOptions.dialogues,
) -> DataOptions:
    """What to read; the options of every command that reads text."""
    sources = tuple(parse_source(text) for text in source)
    return DataOptions(sources, tuple(valid or ()), tuple(exclude or ()), dialogues, vocab, seed=seed)


def loop_options(  # noqa: PLR0913 - each is an option of the command
    *,
    steps: Annotated[int, _loop("Optimizer steps at most.")] = LoopOptions.steps,
    minutes: Annotated[float | None, _loop("End after so many minutes, with the schedule intact.")] = None,
    batch: Annotated[int, _loop("Tokens per step.")] = LoopOptions.batch,
    micro: Annotated[int, _loop("Tokens per pass; gradients are accumulated.")] = LoopOptions.micro,
    length: Annotated[int, _loop("Sequence length of the first part.")] = LoopOptions.length,
    final_length: Annotated[int, _loop("Sequence length of the last part.")] = LoopOptions.final_length,
    final_share: Annotated[float, _loop("Share of the run that the last part takes.")] = LoopOptions.final_share,
    optimizer: Annotated[str, _loop("muon or adamw.")] = LoopOptions.optimizer,
    lr: Annotated[float, _loop("Peak learning rate.")] = LoopOptions.rate,
    warmup: Annotated[int, _loop("Warm-up steps.")] = LoopOptions.warmup,
    weight_decay: Annotated[float, _loop("Weight decay of the matrices.")] = LoopOptions.weight_decay,
    compile: Annotated[bool, _loop("Compile the model; worth it for long runs.")] = False,  # noqa: A002
    device: Annotated[str, _loop("Where to train, for example cpu or cuda.")] = LoopOptions.device,
    threads: Annotated[int | None, _loop("CPU threads.", show_default="torch's choice")] = None,
    evaluate_every: Annotated[int, _loop("Steps between validations.")] = LoopOptions.evaluate_every,
    seed: Annotated[int, _loop("Decides weights, mixture and order of the text.")] = LoopOptions.seed,
) -> dict[str, Any]:
    """The loop's settings; the options of every command that trains."""
    return {
        "steps": steps,
        "minutes": minutes,
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
        "seed": seed,
    }


@app.command(no_args_is_help=True)
@shares(text=text_options, loop=loop_options)
def lm(  # noqa: PLR0913 - each is an option of the command
    context: typer.Context,
    text: Callable[..., DataOptions],
    loop: Callable[[], dict[str, Any]],
    *,
    out: Annotated[Path, typer.Option(help="Folder of the run; an unfinished run in it is continued.")],
    name: Annotated[str, typer.Option(help="Name of the model in its card.")] = "pronk-tiny",
    hidden: Annotated[int, _model("Hidden size.")] = Shape.hidden,
    layers: Annotated[int, _model("Layers.")] = Shape.layers,
    heads: Annotated[int, _model("Attention heads.")] = Shape.heads,
    kv_heads: Annotated[int, _model("Key/value heads.")] = Shape.kv_heads,
    mlp: Annotated[int, _model("Width of the gated MLP.")] = Shape.mlp,
    vocab: Annotated[int, _model("Vocabulary size.")] = Shape.vocab,
    positions: Annotated[int, _model("Longest text, in tokens.")] = Shape.context,
) -> None:
    """Train a tokenizer and a Llama-architecture language model from text.

    The finished model is in OUT/export, the latest one in OUT/latest. Ctrl-C saves; the same command continues.

    [bold]Examples[/]

    pronk train lm --source python=0.6 --source math.jsonl.gz=0.15 --source prose.jsonl.gz=0.25 --out run

    pronk train lm --source notes/=1 --out run --steps 500 --layers 4 --minutes 20
    """
    from pronk.train.run import run  # noqa: PLC0415 - needs torch, and --help should not

    settings = loop()
    data = text(vocab, settings["seed"])
    options = TrainOptions(**settings, shape=Shape(hidden, layers, heads, kv_heads, mlp, vocab, positions))
    if not run(data, options, out, name, _command_line(context), Console()):
        raise typer.Exit(_INTERRUPTED)


@app.command(no_args_is_help=True)
@shares(text=text_options, loop=loop_options, without=("lr",))
def draft(  # noqa: PLR0913 - each is an option of the command
    context: typer.Context,
    text: Callable[..., DataOptions],
    loop: Callable[[], dict[str, Any]],
    *,
    out: Annotated[Path, typer.Option(help="Folder of the run; an unfinished run in it is continued.")],
    target: Annotated[
        str | None,
        typer.Option(help="Model to guess for: a folder, or its id on the Hub.", show_default="the bundled model"),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the draft in its card.")] = "pronk-tiny-draft",
    on_policy: Annotated[int, _text("Tokens that the target writes itself, to learn from.")] = OnPolicyOptions.tokens,
    share: Annotated[float, _text("Share of the target's own text in the training text.")] = DraftOptions.share,
    hidden: Annotated[int, _model("Hidden size.")] = _DRAFT.hidden,
    layers: Annotated[int, _model("Layers; every one of them costs time for every guess.")] = _DRAFT.layers,
    heads: Annotated[int, _model("Attention heads.")] = _DRAFT.heads,
    kv_heads: Annotated[int, _model("Key/value heads.")] = _DRAFT.kv_heads,
    mlp: Annotated[int, _model("Width of the gated MLP.")] = _DRAFT.mlp,
    positions: Annotated[int | None, _model("Longest text, in tokens.", show_default="the target's")] = None,
    hard: Annotated[float, _loop("Weight of the text itself in the loss; the rest is the target's.")] = 0.0,
    lr: Annotated[float, _loop("Peak learning rate.")] = _DRAFT_LR,
    num_tokens: Annotated[
        int, _loop("Guesses per step when the engine measures the draft; 0 does not.")
    ] = DraftOptions.num_tokens,
) -> None:
    """Distil a small draft model from a target: same tokenizer, and at every position the target's own distribution.

    The finished draft is in OUT/export, the latest one in OUT/latest; both are folders for the drafter draft_model.
    Ctrl-C saves; the same command continues.

    [bold]Examples[/]

    pronk train draft --source python=0.6 --source prose.jsonl.gz=0.4 --out run

    pronk train draft --target ./checkpoint --source notes/=1 --on-policy 200000 --out run --minutes 60
    """
    from pronk.train.run import run_draft  # noqa: PLC0415 - needs torch, and --help should not
    from pronk.train.teacher import Teacher  # noqa: PLC0415

    settings = loop() | {"rate": lr}
    seed = settings["seed"]
    data = text(seed=seed)
    own = OnPolicyOptions(tokens=on_policy, seed=seed)
    teacher = Teacher(target, settings["device"], settings["threads"])
    config = teacher.llm.config
    shape = Shape(hidden, layers, heads, kv_heads, mlp, config.vocab_size, positions or config.context)
    share = share if on_policy else 0.0
    options = DraftOptions(**settings, shape=shape, share=share, hard=hard, num_tokens=num_tokens)
    if not run_draft(data, own, options, teacher, out, name, _command_line(context), Console()):
        raise typer.Exit(_INTERRUPTED)


def _command_line(context: typer.Context) -> str:
    """The command as it was given, text first, with file names only: a reader of the card has other folders."""
    words = ["pronk", "train", str(context.info_name)]
    for parameter in sorted(context.command.params, key=lambda each: getattr(each, "rich_help_panel", "") != "Text"):
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
