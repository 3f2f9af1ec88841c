"""``pronk train``: train the models that pronk ships, or your own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pronk.errors import PronkError

__all__ = ["app"]

app = typer.Typer(help="Train language models and drafters.", no_args_is_help=True)


@app.callback()
def train() -> None:
    """Train language models and drafters."""


@app.command(no_args_is_help=True)
def lm(
    source: Annotated[
        list[str],
        typer.Option(
            help="Text and its weight, WHAT=WEIGHT: a .jsonl(.gz) file, a text file or folder, python, or python:FOLDER."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the run; an unfinished run in it is continued.")],
    valid: Annotated[list[Path] | None, typer.Option(help="JSONL file to measure the loss on.")] = None,
    exclude: Annotated[
        list[Path] | None, typer.Option(help="JSONL file of prompts that no training text may share 13 words with.")
    ] = None,
    dialogues: Annotated[float, typer.Option(help="Share of dialogues in the mixture.")] = 0.05,
    name: Annotated[str, typer.Option(help="Name in the model card.")] = "pronk-tiny",
    steps: Annotated[int, typer.Option(help="Optimizer steps at most.")] = 3000,
    minutes: Annotated[
        float | None, typer.Option(help="End after this many minutes of training, pauses not counted.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Tokens per step.")] = 8192,
    micro: Annotated[int, typer.Option(help="Tokens per pass; gradients are accumulated.")] = 4096,
    length: Annotated[int, typer.Option(help="Sequence length of the first part.")] = 512,
    final_length: Annotated[int, typer.Option(help="Sequence length of the last part.")] = 2048,
    final_share: Annotated[float, typer.Option(help="Share of the run that the last part takes.")] = 0.15,
    optimizer: Annotated[str, typer.Option(help="muon or adamw.")] = "muon",
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-3,
    warmup: Annotated[int, typer.Option(help="Warm-up steps.")] = 60,
    weight_decay: Annotated[float, typer.Option(help="Weight decay of the matrices.")] = 0.1,
    hidden: Annotated[int, typer.Option(help="Hidden size.")] = 320,
    layers: Annotated[int, typer.Option(help="Layers.")] = 8,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 10,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads.")] = 2,
    mlp: Annotated[int, typer.Option(help="Width of the gated MLP.")] = 832,
    vocab: Annotated[int, typer.Option(help="Vocabulary size.")] = 4096,
    context: Annotated[int, typer.Option(help="Positions.")] = 2048,
    compile_: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the model (needs a C++ compiler).")
    ] = False,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    evaluate_every: Annotated[int, typer.Option(help="Steps between validations.")] = 200,
    seed: Annotated[int, typer.Option(help="Decides weights, text order and mixture.")] = 0,
) -> None:
    """Train a tokenizer and a Llama-architecture language model from text.

    Examples:

        pronk train lm --source python=0.6 --source math.jsonl.gz=0.15 --source prose.jsonl.gz=0.25 --out run

        pronk train lm --source notes/=1 --out run --steps 500 --layers 4 --minutes 20

    The finished model is in OUT/export, the latest one in OUT/latest. Ctrl-C saves; the same command continues.
    """
    from pronk.train.data import DataOptions
    from pronk.train.options import Shape, TrainOptions
    from pronk.train.run import generic_command, run
    from pronk.train.sources import parse_source

    with _one_line_errors():
        shape = Shape(hidden, layers, heads, kv_heads, mlp, vocab, context)
        options = TrainOptions(
            shape=shape,
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
            compile=compile_,
            threads=threads,
            seed=seed,
            evaluate_every=evaluate_every,
        )
        sources = tuple(parse_source(text) for text in source)
        data = DataOptions(
            sources, tuple(valid or ()), tuple(exclude or ()), dialogues=dialogues, vocab_size=vocab, seed=seed
        )
        if not run(data, options, out, name, generic_command(sys.argv[1:]), Console()):
            raise typer.Exit(130)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except PronkError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
