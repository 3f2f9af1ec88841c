"""``pronk train kangaroo``."""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from pronk.commands.options import shares
from pronk.commands.train.options import (
    StudentRun,
    loop_option,
    loop_options,
    model_option,
    refuse,
    student_options,
    student_settings,
    text_options,
    train_student,
)
from pronk.train.options import DataOptions, StudentOptions

__all__ = ["kangaroo"]

_LR = 0.01


@shares(text=text_options, student=student_options, loop=loop_options, without=("lr",))
def kangaroo(
    context: typer.Context,
    text: Callable[..., DataOptions],
    loop: Callable[[], dict[str, Any]],
    student: Callable[[], StudentRun],
    *,
    exit_layer: Annotated[
        int | None,
        model_option(
            "The target's layer after which guesses leave it: 1 is the first; the last is too late.",
            show_default="an eighth of its layers",
        ),
    ] = None,
    adapter: Annotated[
        str,
        model_option(
            "What is trained: attention, head (with a head of its own), transformer (a whole layer), or mlp (two "
            "linears and a head, no attention)."
        ),
    ] = "attention",
    heads: Annotated[int | None, model_option("Attention heads.", show_default="the target's")] = None,
    mlp: Annotated[
        int | None, model_option("Width of the transformer's feed-forward network.", show_default="the target's")
    ] = None,
    lr: Annotated[float, loop_option("Peak learning rate.")] = _LR,
) -> None:
    """Train Kangaroo's adapter: the target's own first layers guess, and it makes their output fit the target's head.

    The finished drafter is in OUT/export, the latest one in OUT/latest; both are folders for the drafter kangaroo.
    Ctrl-C saves; the same command continues.

    [bold]Examples[/]

    pronk train kangaroo --source python=0.6 --source prose.jsonl.gz=0.4 --out run

    pronk train kangaroo --exit-layer 3 --target ./checkpoint --source notes/=1 --on-policy 200000 --out run
    """
    settings, run = loop() | {"rate": lr}, student()
    if adapter == "mlp":
        refuse({"heads": heads}, "with --adapter mlp, which has no attention")
    if adapter != "transformer":
        refuse({"mlp": mlp}, f"with --adapter {adapter}; it is for --adapter transformer")

    def kind() -> Any:
        from pronk.train.kangaroo import Kangaroo

        return Kangaroo

    def options(teacher: Any) -> StudentOptions:
        from pronk.drafters.from_target.modules.kangaroo import KangarooShape

        shape = KangarooShape.of_target(teacher.llm.config, exit_layer, adapter, heads, mlp)
        return StudentOptions(**student_settings(settings, run, teacher), shape=shape)

    train_student(context, text, settings, run, kind, options)
