"""``pronk train heads``."""

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
from pronk.errors import OptionError
from pronk.train.options import DataOptions, StudentOptions

__all__ = ["HEAD_KIND", "HEAD_ORDER", "UNEMBEDDINGS", "heads"]

HEAD_KIND = "A head's layer: transformer or linear."
HEAD_ORDER = "parallel; causal: each head reads the nearer one's output; anticausal: the further one's."
# Higher than a language model's: heads that begin with the target's norm have much to unlearn.
_LR = 0.02
_MOST = 63
UNEMBEDDINGS = "shared: the model's own; replicated: one for each head."


@shares(text=text_options, student=student_options, loop=loop_options, without=("lr", "num_tokens", "compile"))
def heads(
    context: typer.Context,
    text: Callable[..., DataOptions],
    loop: Callable[[], dict[str, Any]],
    student: Callable[..., StudentRun],
    *,
    heads: Annotated[int, model_option("Heads; the first guesses the token after the next.")] = 3,
    layer: Annotated[
        int | None, model_option("Layer of the target whose output they read.", show_default="the last")
    ] = None,
    kind: Annotated[str, model_option(HEAD_KIND)] = "transformer",
    order: Annotated[str, model_option(HEAD_ORDER)] = "parallel",
    unembeddings: Annotated[str, model_option(UNEMBEDDINGS)] = "shared",
    mlp: Annotated[
        int | None, model_option("Width of a head's MLP.", show_default="1.2 times the target's hidden size")
    ] = None,
    num_tokens: Annotated[
        int | None, loop_option("Guesses per step when the engine measures them; 0 does not.", show_default="all")
    ] = None,
    lr: Annotated[float, loop_option("Peak learning rate.")] = _LR,
) -> None:
    """Train heads on a frozen target that guess several tokens in one pass (drafter multi_token).

    The finished heads are in OUT/export, the latest ones in OUT/latest; both are folders for the drafter multi_token.
    Ctrl-C saves; the same command continues.

    [bold]Examples[/]

    pronk train heads --source python=0.6 --source prose.jsonl.gz=0.4 --out run

    pronk train heads --target ./checkpoint --heads 4 --order causal --source notes/=1 --out run --minutes 60
    """
    _check_heads(heads)
    settings, run = loop() | {"rate": lr}, student(num_tokens=heads if num_tokens is None else num_tokens)

    def objective() -> Any:
        from pronk.train.heads import Heads

        return Heads

    def options(teacher: Any) -> StudentOptions:
        from pronk.drafters.from_target.modules.heads import HeadsShape
        from pronk.train.heads import check_guesses, check_lengths

        config = teacher.llm.config
        width = 6 * config.hidden_size // 5 if mlp is None else mlp
        shape = HeadsShape(heads, config.num_layers if layer is None else layer, width, kind, order, unembeddings)
        shape.check(config)
        made = StudentOptions(**student_settings(settings, run, teacher), shape=shape)
        check_lengths(made, shape)
        check_guesses(made.num_tokens, shape)
        return made

    train_student(context, text, settings, run, objective, options)


def _check_heads(heads: int) -> None:
    """Raise :class:`~pronk.errors.OptionError` for so many heads."""
    if not 1 <= heads <= _MOST:
        msg = f"heads: expected 1 to {_MOST}, found {heads}"
        raise OptionError(msg)
