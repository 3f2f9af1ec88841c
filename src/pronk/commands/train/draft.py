"""``pronk train draft``."""

from collections.abc import Callable
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
from pronk.train.options import DataOptions, DraftOptions, Shape

__all__ = ["draft"]

_DRAFT = Shape(hidden=160, layers=2, heads=5, kv_heads=1, mlp=448)
_DRAFT_LR = 0.012


@shares(text=text_options, student=student_options, loop=loop_options, without=("lr",))
def draft(
    context: typer.Context,
    text: Callable[..., DataOptions],
    loop: Callable[[], dict[str, Any]],
    student: Callable[[], StudentRun],
    *,
    hidden: Annotated[int, model_option("Hidden size.")] = _DRAFT.hidden,
    layers: Annotated[int, model_option("Layers; every one of them costs time for every guess.")] = _DRAFT.layers,
    heads: Annotated[int, model_option("Attention heads.")] = _DRAFT.heads,
    kv_heads: Annotated[int, model_option("Key/value heads.")] = _DRAFT.kv_heads,
    mlp: Annotated[int, model_option("Width of the gated MLP.")] = _DRAFT.mlp,
    positions: Annotated[int | None, model_option("Longest text, in tokens.", show_default="the target's")] = None,
    lr: Annotated[float, loop_option("Peak learning rate.")] = _DRAFT_LR,
) -> None:
    """Distil a small draft model from a target: same tokenizer, and at every position the target's own distribution.

    The finished draft is in OUT/export, the latest one in OUT/latest; both are folders for the drafter draft_model.
    Ctrl-C saves; the same command continues.

    [bold]Examples[/]

    pronk train draft --source python=0.6 --source prose.jsonl.gz=0.4 --out run

    pronk train draft --target ./checkpoint --source notes/=1 --on-policy 200000 --out run --minutes 60
    """
    settings, run = loop() | {"rate": lr}, student()

    def kind() -> Any:
        from pronk.train.draft import Draft

        return Draft

    def options(teacher: Any) -> DraftOptions:
        config = teacher.llm.config
        longest = config.context if positions is None else positions
        shape = Shape(hidden, layers, heads, kv_heads, mlp, config.vocab_size, longest)
        return DraftOptions(**student_settings(settings, run, teacher, longest), shape=shape)

    train_student(context, text, settings, run, kind, options)
