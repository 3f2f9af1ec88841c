"""``pronk train glide``."""

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

__all__ = ["glide"]

_LR = 0.012
_BLOCK = 5


@shares(text=text_options, student=student_options, loop=loop_options, without=("lr",))
def glide(
    context: typer.Context,
    text: Callable[..., DataOptions],
    loop: Callable[[], dict[str, Any]],
    student: Callable[[], StudentRun],
    *,
    layers: Annotated[int, model_option("Layers; every one of them costs time for every guess.")] = 1,
    hidden: Annotated[int, model_option("Hidden size.")] = 192,
    heads: Annotated[int, model_option("Heads of the self-attention.")] = 6,
    kv_heads: Annotated[int, model_option("Key/value heads of the self-attention.")] = 2,
    mlp: Annotated[int, model_option("Width of the gated MLP.")] = 512,
    block: Annotated[
        int | None,
        model_option("Tokens by which the target's cache lags behind at most, in training.", show_default=str(_BLOCK)),
    ] = None,
    cache_layer: Annotated[
        int | None,
        model_option(
            "The target's layer whose cache the first layer reads; the next reads the next.",
            show_default="so that the last layer reads the target's last",
        ),
    ] = None,
    vanilla: Annotated[bool, model_option("Without cross-attention, for comparison; for the drafter vanilla.")] = False,
    lr: Annotated[float, loop_option("Peak learning rate.")] = _LR,
) -> None:
    """Distil GLIDE from a target: a small decoder whose layers also read the target's cache.

    The finished drafter is in OUT/export, the latest one in OUT/latest; both are folders for the drafter glide, or
    vanilla. Ctrl-C saves; the same command continues.

    [bold]Examples[/]

    pronk train glide --source python=0.6 --source prose.jsonl.gz=0.4 --out run

    pronk train glide --target ./checkpoint --layers 2 --vanilla --source notes/=1 --out twin --minutes 60
    """
    settings, run = loop() | {"rate": lr}, student()
    if vanilla:
        refuse({"block": block, "cache-layer": cache_layer}, "with --vanilla")

    def kind() -> Any:
        from pronk.train.glide import Glide, Vanilla

        return Vanilla if vanilla else Glide

    def options(teacher: Any) -> StudentOptions:
        from pronk.drafters.from_target.modules.glide import GlideShape

        lag = _BLOCK if block is None else block
        shape = GlideShape(layers, hidden, heads, kv_heads, mlp, lag, cross=not vanilla, cache_layer=cache_layer)
        shape.cache_layers(teacher.llm.config)
        return StudentOptions(**student_settings(settings, run, teacher), shape=shape)

    train_student(context, text, settings, run, kind, options)
