"""``pronk train medusa``."""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

import typer

from pronk.commands.options import shares
from pronk.commands.train.options import (
    StudentRun,
    loop_option,
    loop_options,
    model_option,
    student_options,
    student_settings,
    text_options,
    train_student,
)
from pronk.train.options import DataOptions, StudentOptions

__all__ = ["medusa"]

_LR = 0.02


@shares(text=text_options, student=student_options, loop=loop_options, without=("lr", "num_tokens"))
def medusa(
    context: typer.Context,
    text: Callable[..., DataOptions],
    loop: Callable[[], dict[str, Any]],
    student: Callable[[], StudentRun],
    *,
    heads: Annotated[int, model_option("Heads: how many tokens are guessed after the target's own.")] = 4,
    blocks: Annotated[int, model_option("Residual blocks of a head.")] = 2,
    unembeddings: Annotated[
        str, model_option("shared is the target's; replicated gives each head a copy to change, many times as large.")
    ] = "shared",
    tree_size: Annotated[
        int, model_option("Guesses of the tree, which is chosen by what the heads get right on held-out text.")
    ] = 15,
    lr: Annotated[float, loop_option("Peak learning rate.")] = _LR,
    num_tokens: Annotated[
        int | None,
        loop_option("Depth of the tree when the engine measures the drafter; 0 does not.", show_default="all heads"),
    ] = None,
) -> None:
    """Train Medusa heads on a frozen target: what follows its next token, guessed from its last hidden state.

    The finished heads are in OUT/export, the latest ones in OUT/latest; both are folders for the drafter medusa. Ctrl-C
    saves; the same command continues.

    [bold]Examples[/]

    pronk train medusa --source python=0.6 --source prose.jsonl.gz=0.4 --out run

    pronk train medusa --target ./checkpoint --source notes/=1 --heads 3 --blocks 1 --out run --minutes 30
    """
    settings = loop() | {"rate": lr}
    run = replace(student(), num_tokens=heads if num_tokens is None else num_tokens)

    def kind() -> Any:
        from pronk.train.medusa import MedusaStudent

        return MedusaStudent

    def options(teacher: Any) -> StudentOptions:
        from pronk.drafters.from_target.modules.medusa import MedusaShape
        from pronk.train.medusa import MedusaOptions

        shape = MedusaShape(heads, blocks, unembeddings)
        return MedusaOptions(**student_settings(settings, run, teacher), shape=shape, tree_size=tree_size)

    train_student(context, text, settings, run, kind, options)
