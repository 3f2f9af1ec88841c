"""``pronk train texts``: write a file of dialogues whose answers the target generates."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pronk.commands import INTERRUPTED, announce, option, status_bar
from pronk.train.cli.options import model_option, text_option


def texts(
    *,
    model: Annotated[
        str | None,
        model_option(
            "Name as in pronk pull, folder, or GGUF file: the model as deployed.",
            show_default="smollm2",
        ),
    ] = None,
    data: Annotated[
        list[str],
        text_option(
            "Documents to make questions from: a .jsonl(.gz) file, a text file or folder, or "
            "python; repeatable.",
            metavar="WHAT",
        ),
    ],
    exclude: Annotated[
        list[Path] | None,
        text_option(
            "JSONL file of prompts; questions that share 13 words with them are not asked.",
            metavar="FILE",
        ),
    ] = None,
    out: Annotated[Path, option("File of answers; an existing one is continued.")],
    tokens: Annotated[int, text_option("Tokens of answers in the file.", min=1)] = 1_500_000,
    minutes: Annotated[float | None, text_option("Stop after this many minutes.")] = None,
    max_tokens: Annotated[int, text_option("Maximum length of an answer.", min=16)] = 384,
    seed: Annotated[
        int, text_option("Seed of the questions and of the sampled answers.", min=0)
    ] = 0,
    first: Annotated[
        int,
        text_option(
            "Number of the first dialogue, for one of several files with the same seed.", min=0
        ),
    ] = 0,
    batch: Annotated[int, model_option("Dialogues in one forward pass.", min=1)] = 32,
    threads: Annotated[
        int | None, model_option("CPU threads.", show_default="number of cores", min=1)
    ] = None,
    continuations: Annotated[
        bool,
        text_option(
            "Continue beginnings of documents, not answer questions; always so for a model without "
            "a chat template."
        ),
    ] = False,
    drafter: Annotated[
        str, model_option("Drafter that proposes draft tokens; the text is the same.")
    ] = ("autoregressive"),
) -> None:
    """Let a model answer questions about documents, to train drafters with pronk train eagle3.

    Questions are the real ones of the documents, and instructions about their excerpts and
    headings. A model without a chat template continues beginnings of the documents instead. Half of
    the dialogues are greedy. Ctrl-C keeps the finished dialogues; the same command continues.

    [bold]Examples[/]

    pronk train texts --data prose.jsonl.gz --data math.jsonl.gz --data python --out smollm2.answers

    pronk train texts --model ./model.gguf --data notes/ --out notes.answers --minutes 30
    """
    from pronk.train.clock import Clock

    # before the imports, which take a second, because --minutes includes that time
    clock = Clock(minutes)
    from pronk import LLM
    from pronk.train.corpus.answers import BEGINNINGS, QUESTIONS
    from pronk.train.corpus.beginnings import Beginnings
    from pronk.train.corpus.questions import Questions
    from pronk.train.corpus.sources import SourceSpec, spec_of
    from pronk.train.own_text import answers_header, write_answers

    screen = Console(highlight=False, soft_wrap=True, stderr=True)
    sources: list[SourceSpec] = []
    for what in data:
        if what == "python":
            sources.append(SourceSpec("python", "python", None, 1.0))
        else:
            sources.append(spec_of(Path(what), "data"))
    llm = LLM(model, drafter=drafter, max_batch=batch, threads=threads, calibration=False)
    if llm.tokenizer.chat_template is None and not continuations:
        screen.print("the model has no chat template: it continues documents", markup=False)
        continuations = True
    make = Beginnings if continuations else Questions
    questions = make(sources, exclude or (), seed)
    prompts = BEGINNINGS if continuations else QUESTIONS
    header = answers_header(llm, sources, max_tokens, seed, prompts)
    shown = -1  # number of twentieths of the tokens that the last line of progress has reported
    try:
        with status_bar(screen) as bar:
            shorter = "--tokens 100000, --minutes 30"
            status = announce(screen, bar, f"{tokens} tokens of answers", shorter)
            status("answering", 0, tokens)

            def show(done: int) -> None:
                nonlocal shown
                status("answering", done, tokens)
                twentieths = 20 * done // tokens
                if twentieths > shown:
                    shown = twentieths
                    line = f"{done} tokens of answers, {clock.seconds / 60:.1f} minutes"
                    screen.print(line, markup=False)

            done = write_answers(
                llm,
                questions.ask,
                header,
                out,
                tokens=tokens,
                batch=batch,
                progress=show,
                seconds_left=clock.seconds_left,
                first=first,
            )
    except KeyboardInterrupt:
        screen.print(
            f"interrupted; {out} has the finished dialogues, and the same command continues",
            markup=False,
        )
        raise typer.Exit(INTERRUPTED) from None
    screen.print(f"{out}: {done} tokens of answers", markup=False)
