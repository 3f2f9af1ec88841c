"""``pronk train eagle3``: an EAGLE-3 or MTP head for a target as it is deployed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from pronk import OptionError
from pronk.base.checks import require_extra
from pronk.commands import INTERRUPTED, option, shares
from pronk.train.cli.options import (
    LoopSettings,
    command_line,
    loop_option,
    model_option,
    refuse,
    text_option,
)
from pronk.train.options import EagleOptions

# tokens per forward pass, which needs 0.3 GB of intermediate values for a head of SmolLM2
_MICRO = 2048


@dataclass(frozen=True, kw_only=True)
class HeadLoopSettings(LoopSettings):
    """Options of the training loop, with defaults for EAGLE-3 and MTP heads."""

    batch: Annotated[int | None, loop_option("Tokens per step.", show_default="as --micro")] = None  # type: ignore[assignment]
    micro: Annotated[
        int | None,
        loop_option(
            "Tokens per forward and backward pass; gradients are accumulated.",
            show_default=f"about {_MICRO}",
        ),
    ] = None
    length: Annotated[
        int | None,
        loop_option(
            "Tokens of a sequence; longer dialogues are cut.",
            show_default=f"{_MICRO}, or the target's context",
        ),
    ] = None
    rate: Annotated[float, loop_option("Peak learning rate.", "--lr")] = 0.0015
    warmup: Annotated[int, loop_option("Warm-up steps.")] = 50
    save_every: Annotated[int, loop_option("Steps between checkpoints.")] = 50


@shares(loop=HeadLoopSettings, without=("steps", "final_length", "final_share", "compile"))
def eagle3(
    context: typer.Context,
    loop: Callable[[], HeadLoopSettings],
    *,
    model: Annotated[
        str | None,
        option(
            "Target, as deployed: a name, a folder, or a GGUF file.",
            show_default="in a clone: pronk-tiny",
        ),
    ] = None,
    data: Annotated[
        list[Path],
        text_option(
            "File of the target's own answers, from pronk train texts; repeatable.", metavar="FILE"
        ),
    ],
    other_data: Annotated[
        list[Path] | None,
        text_option(
            "File of the answers of another model with the same tokenizer, which are trained on, "
            "too: a smaller model writes them in less time; repeatable.",
            metavar="FILE",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        text_option(
            "Tokens of answers to train on, those of --data first. The last dialogue is whole.",
            min=1,
            show_default="all",
        ),
    ] = None,
    out: Annotated[Path, option("Folder of the run; an unfinished run in it is continued.")],
    name: Annotated[
        str | None, option("Name of the head in its card.", show_default="by target and kind")
    ] = None,
    kind: Annotated[
        str,
        model_option(
            "eagle3, or mtp: the layer reads the target's last output, and the target's own LM "
            "head reads the layer."
        ),
    ] = EagleOptions.kind,
    depth: Annotated[int, loop_option("Draft tokens in training-time test.")] = EagleOptions.depth,
    weighting: Annotated[
        str,
        loop_option(
            "Weights of the draft tokens in the loss: decay, or dpace (by the acceptance so far)."
        ),
    ] = EagleOptions.weighting,
    decay: Annotated[
        float, loop_option("With decay: weight of a draft token relative to the one before it.")
    ] = EagleOptions.decay,
    chains: Annotated[
        float,
        loop_option(
            "Fraction of the positions that draft further tokens after their first one; a smaller "
            "one takes less time."
        ),
    ] = EagleOptions.chains,
    bits: Annotated[
        int | None,
        model_option(
            "Train for weights of 8 or 4 bits, and export these.",
            show_default="not rounded",
        ),
    ] = None,
    init: Annotated[
        str | None,
        option(
            "Head to train further: a folder, or the name of a head that comes with pronk (pronk "
            "list --drafters).",
            show_default="a linear fit",
        ),
    ] = None,
    draft_vocab: Annotated[
        int,
        model_option(
            "Tokens in the loss, the most frequent ones of the answers; eagle3 proposes only these."
        ),
    ] = EagleOptions.draft_vocab,
    mlp: Annotated[
        int | None, model_option("Width of the gated MLP.", show_default="the target's")
    ] = None,
    layers: Annotated[
        str | None,
        model_option(
            "Layers of the target to read, from 1.",
            metavar="N,N,…",
            show_default="2, the middle, last but 3",
        ),
    ] = None,
    num_tokens: Annotated[
        int,
        loop_option("Draft tokens per step when the engine measures the head; 0: no measurement."),
    ] = EagleOptions.num_tokens,
    epochs: Annotated[float, loop_option("Times that the answers are read.")] = 3.0,
    states: Annotated[
        Path | None,
        text_option(
            "Folder that keeps what the target computes for the answers, several kB per token, for "
            "later epochs and other runs.",
            show_default="computed in every epoch",
        ),
    ] = None,
) -> None:
    """Train an EAGLE-3 head for a model as it is deployed, quantized or not, on its answers.

    With --kind mtp it is an MTP head. OUT/export has the finished head, OUT/latest the head at the
    last evaluation or interruption, in the layout speculators, for the drafter of this kind. Ctrl-C
    saves and ends at once; the same command continues.

    [bold]Examples[/]

    pronk train texts --model model.gguf --data notes/ --out notes.answers

    pronk train eagle3 --model model.gguf --data notes.answers --out run --minutes 180
    """
    require_extra("train", "train", "torch")
    if kind == "mtp":
        refuse({"layers": layers}, "for mtp")

    from pronk.train.clock import Clock

    settings = dict(vars(loop()))
    # before torch is imported below, because --minutes includes that time
    clock = Clock(settings["minutes"])

    from pronk.train.checkpoint import CHECKPOINT
    from pronk.train.dialogues import copy_answers, steps_of
    from pronk.train.distributed import join_processes
    from pronk.train.initial_head import InitialHead, find_initial_head
    from pronk.train.run import Run, train_head
    from pronk.train.teacher import Teacher

    own: dict[str, Any] = {
        "kind": kind,
        "depth": depth,
        "weighting": weighting,
        "decay": decay,
        "chains": chains,
        "bits": bits,
        "init": None if init is None else str(find_initial_head(init)),
        "draft_vocab": draft_vocab,
        "mlp": mlp,
        "num_tokens": num_tokens,
        "tokens": tokens,
        "states": states,
    }
    # Mistakes in these are reported before the target is loaded.
    EagleOptions(**own)
    if init is not None and not (out / CHECKPOINT).exists():
        InitialHead(find_initial_head(init), kind)
    teacher = Teacher(model, settings["device"], settings["threads"])
    length = settings["length"] or min(_MICRO, teacher.llm.config.context)
    micro = settings["micro"] or max(1, _MICRO // length) * length
    batch = settings["batch"] or micro
    settings |= {
        "length": length,
        "final_length": length,
        "final_share": 0.0,
        "micro": micro,
        "batch": batch,
    }
    with join_processes(settings["device"]) as processes:
        processes.from_main(lambda: copy_answers(out, data, other_data or (), teacher.fingerprint))
    settings["steps"] = steps_of(out, epochs, batch, length, settings["seed"], tokens)
    options = EagleOptions(
        **settings,
        **own,
        sources=None if layers is None else _layers(layers, teacher.llm.config.num_layers),
        context=teacher.llm.config.context,
    )
    title = name or f"{teacher.name.rpartition('/')[2]}-{kind}"
    if not train_head(Run(out, title, command_line(context), Console(), clock), options, teacher):
        raise typer.Exit(INTERRUPTED)


def _layers(text: str, num_layers: int) -> tuple[int, ...]:
    """Return the numbers in a text such as ``"2,15,27"``, the target's layers that a head reads.

    Layers count from 1 to ``num_layers``; raise OptionError for other texts.
    """
    parts = [part.strip() for part in text.split(",")]
    numbers = [int(part) if part.isdecimal() else 0 for part in parts]
    if not all(1 <= number <= num_layers for number in numbers):
        msg = (
            f"layers: expected numbers from 1 to {num_layers} with commas, as in 2,{num_layers}; "
            f"found {text!r}"
        )
        raise OptionError(msg)
    return tuple(numbers)
