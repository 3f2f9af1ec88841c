"""``pronk train``: train language models and drafters."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pronk.base.checks import require_extra
from pronk.commands import INTERRUPTED, given_options, option, shares
from pronk.train.cli.eagle import eagle3
from pronk.train.cli.kinds import KINDS, DrafterKind
from pronk.train.cli.options import (
    HEAD_KIND,
    HEAD_ORDER,
    UNEMBEDDINGS,
    LoopSettings,
    StudentRun,
    command_line,
    model_option,
    refuse,
    text_options,
)
from pronk.train.cli.texts import texts
from pronk.train.options import (
    DataOptions,
    ModelShape,
    OnPolicyOptions,
    TrainOptions,
    fit_lengths,
    option_name,
)

_DEFAULT_KIND = "transformer"
_DEFAULT_ORDER = "parallel"
_DEFAULT_UNEMBEDDINGS = "shared"
# Names of options for a new model. With --init they would have no effect, so they are refused.
_OF_THE_MODEL = {
    "hidden",
    "layers",
    "heads",
    "kv_heads",
    "mlp",
    "vocab",
    "positions",
    "bytes",
    "equal_parameters",
}

app = typer.Typer(
    help="Train language models and drafters.", no_args_is_help=True, rich_markup_mode="rich"
)


@app.command(no_args_is_help=True)
@shares(text=text_options, loop=LoopSettings)
def lm(
    context: typer.Context,
    text: Callable[..., DataOptions],
    loop: Callable[[], LoopSettings],
    *,
    out: Annotated[Path, option("Folder of the run; an unfinished run in it is continued.")],
    name: Annotated[str, option("Name of the model in its card.")] = "pronk-tiny",
    hidden: Annotated[int, model_option("Hidden size.")] = ModelShape.hidden,
    layers: Annotated[int, model_option("Layers.")] = ModelShape.layers,
    heads: Annotated[int, model_option("Attention heads.")] = ModelShape.heads,
    kv_heads: Annotated[int, model_option("Key/value heads.")] = ModelShape.kv_heads,
    mlp: Annotated[int, model_option("Width of the gated MLP.")] = ModelShape.mlp,
    vocab: Annotated[
        int | None, model_option("Vocabulary size.", show_default=str(ModelShape.vocab))
    ] = None,
    positions: Annotated[int, model_option("Longest text, in tokens.")] = ModelShape.context,
    bytes: Annotated[  # noqa: A002
        bool, model_option("Bytes as tokens: a vocabulary of 256 and the special tokens.")
    ] = False,
    init: Annotated[
        str | None,
        model_option("Start from this model: a folder, a GGUF file, or a name as in pronk pull."),
    ] = None,
    future_tokens: Annotated[
        int | None,
        model_option(
            "Tokens to predict at once, each with a head of its own.",
            show_default="1, or those of --init",
        ),
    ] = None,
    equal_parameters: Annotated[
        bool, model_option("Remove one layer of the model for each head after the first.")
    ] = False,
    head_kind: Annotated[str | None, model_option(HEAD_KIND, show_default=_DEFAULT_KIND)] = None,
    head_order: Annotated[str | None, model_option(HEAD_ORDER, show_default=_DEFAULT_ORDER)] = None,
    unembeddings: Annotated[
        str | None, model_option(UNEMBEDDINGS, show_default=_DEFAULT_UNEMBEDDINGS)
    ] = None,
    head_mlp: Annotated[
        int | None, model_option("Width of a head's MLP.", show_default="the model's")
    ] = None,
) -> None:
    """Train a tokenizer and a Llama-architecture language model from text.

    With --future-tokens, heads that predict further tokens are trained with the model, for faster
    decoding. They are in the folder heads of the model, for the drafter multi_token.

    With --init, training goes on from a model, with its tokenizer and its heads. --future-tokens
    then adds heads, or drops those that are not needed.

    The finished model is in OUT/export, the latest one in OUT/latest. Ctrl-C saves; the same
    command continues.

    [bold]Examples[/]

    pronk train lm --source python=0.6 --source math.jsonl.gz=0.15 --source prose.jsonl.gz=0.25
    --out run

    pronk train lm --source notes/=1 --out run --steps 500 --layers 4 --minutes 20

    pronk train lm --source notes/=1 --out run --bytes --future-tokens 8

    pronk train lm --init run/export --future-tokens 1 --source dialogues.jsonl=1 --out tuned
    """
    require_extra("train", "train", "torch")

    from pronk.train.clock import Clock

    settings = vars(loop())
    # before torch is imported below, because --minutes includes that time
    clock = Clock(settings["minutes"])

    from pronk.train.data import BYTE_VOCAB
    from pronk.train.export import InitialModel
    from pronk.train.future import future_shape, without_head_layers
    from pronk.train.run import Run, train_model

    if bytes:
        refuse({"vocab": vocab}, "with --bytes")
    if init is not None:
        refuse(_model_options(context), "with --init, whose model has it")
    initial = None if init is None else InitialModel.read(init)
    num_tokens = future_tokens
    if num_tokens is None:
        num_tokens = 1 if initial is None else initial.tokens
    head_options: dict[str, object] = {
        "head-kind": head_kind,
        "head-order": head_order,
        "unembeddings": unembeddings,
        "head-mlp": head_mlp,
    }
    has_heads = initial is not None and initial.heads is not None
    if num_tokens == 1:
        head_options["equal-parameters"] = equal_parameters or None
        refuse(head_options, "without --future-tokens")
    elif has_heads:
        refuse(head_options, "with --init, whose heads have it")
    if initial is not None:
        shape = initial.shape
    else:
        default_vocab = BYTE_VOCAB if bytes else ModelShape.vocab
        vocab_size = default_vocab if vocab is None else vocab
        shape = ModelShape(hidden, layers, heads, kv_heads, mlp, vocab_size, positions)
    settings = fit_lengths(settings, shape.context)
    data = text(shape.vocab, settings["seed"])
    kind = head_kind or _DEFAULT_KIND
    order = head_order or _DEFAULT_ORDER
    if equal_parameters:
        shape = without_head_layers(shape, num_tokens, kind, order)
    heads_shape = None if initial is None else initial.heads_for(num_tokens)
    if heads_shape is None:
        own_unembeddings = unembeddings or _DEFAULT_UNEMBEDDINGS
        heads_shape = future_shape(shape, num_tokens, kind, order, own_unembeddings, head_mlp)
    options = TrainOptions(**settings, shape=shape, heads=heads_shape)
    run = Run(out, name, command_line(context), Console(), clock)
    if not train_model(run, data, options, initial):
        raise typer.Exit(INTERRUPTED)


def _model_options(context: typer.Context) -> dict[str, object]:
    """Return the given options for a new model, by their names on the command line."""
    given = [name for name in given_options(context) if name in _OF_THE_MODEL]
    return {option_name(name): context.params[name] for name in given}


def _command(kind: type[DrafterKind]) -> Callable[..., None]:
    """Return the function of the command that trains a kind of drafter."""

    @shares(
        kind=kind, text=text_options, student=StudentRun, loop=LoopSettings, without=kind.without
    )
    def train(
        context: typer.Context,
        kind: Callable[[], DrafterKind],
        text: Callable[..., DataOptions],
        student: Callable[[], StudentRun],
        loop: Callable[[], LoopSettings],
    ) -> None:
        require_extra("train", "train", "torch")

        from pronk.train.clock import Clock

        drafter = kind()
        run = student()
        settings = vars(loop())
        # before torch is imported below, because --minutes includes that time
        clock = Clock(settings["minutes"])

        from pronk.train.dialogues import has_answers
        from pronk.train.run import Run, train_student
        from pronk.train.teacher import Teacher

        data = text(seed=settings["seed"])
        given = given_options(context)
        if has_answers(data.sources):
            # the answers are text of the target already
            refused = {*given} & {"on_policy", "share"}
            values = {option_name(name): getattr(run, name) for name in refused}
            refuse(values, "with answers as the source")
            run = replace(run, share=1.0)
        on_policy = OnPolicyOptions(
            tokens=run.on_policy, seed=settings["seed"], at_most="on_policy" not in given
        )
        teacher = Teacher(run.target, settings["device"], settings["threads"])
        target_name = teacher.name.rpartition("/")[2]
        kind_name = str(context.info_name).replace("_", "-")
        name = run.name or f"{target_name}-{kind_name}"
        config = teacher.llm.config
        shared_settings = partial(run.settings, settings, config.context)
        student_class, options = drafter.plan(config, shared_settings)
        place = Run(run.out, name, command_line(context), Console(), clock)
        if not train_student(place, student_class, data, on_policy, options, teacher):
            raise typer.Exit(INTERRUPTED)

    return train


for _name, _kind in KINDS.items():
    _help = f"""{_kind.__doc__}

OUT/export has the finished drafter, OUT/latest the latest one. Ctrl-C saves; the same command
continues.

[bold]Examples[/]

pronk train {_name} --source python=0.6 --source prose.jsonl.gz=0.4 --out run

pronk train {_name} --source notes/=1 --out run {_kind.example}
"""
    app.command(_name, help=_help, no_args_is_help=True)(_command(_kind))


app.command(no_args_is_help=True)(eagle3)
app.command(no_args_is_help=True)(texts)
