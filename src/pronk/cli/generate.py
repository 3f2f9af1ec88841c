"""The commands ``pronk generate`` and ``pronk chat``."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from pronk.cli.models import MODEL_NAME
from pronk.cli.options import given_options, model_options, sampling_params, shares
from pronk.cli.panels import option
from pronk.cli.progress import interruptible
from pronk.cli.values import only_adapter, read_prompt

if TYPE_CHECKING:
    from pronk.cli.console import TerminalOutput
    from pronk.engine.outputs import Completion, Piece
    from pronk.llm import LLM
    from pronk.sampling.params import SamplingParams

_stats = partial(typer.Option, metavar="", show_default="on a terminal")
# Options of conversations.
_System = Annotated[str, option("System message.", metavar="TEXT", show_default=False)]
_Thinking = Annotated[
    bool | None,
    option(
        "Think before the answer, or not; for models whose chat template can switch it.", metavar=""
    ),
]
_StatsOfAnswers = Annotated[
    bool | None, _stats(help="Show tokens/s and S (tokens per forward pass) after each answer.")
]
_COLOR_DRAFTS = option("Colour the accepted draft tokens.", metavar="")


@shares(read=read_prompt, load=model_options, request=sampling_params)
def generate(
    load: "partial[LLM]",
    request: Callable[[], "SamplingParams"],
    read: Callable[[], str],
    *,
    suffix: Annotated[
        str | None,
        option(
            "Fill in the text between the prompt and this text, with a model for code.",
            metavar="TEXT",
            show_default=False,
        ),
    ] = None,
    echo: Annotated[
        bool, option("Print the prompt before the text.", "--echo", metavar="")
    ] = False,
    as_json: Annotated[
        bool, option("Print one JSON object instead of the text.", "--json", metavar="")
    ] = False,
    stats: Annotated[
        bool | None,
        _stats(help="Show tokens/s, S (tokens per forward pass) and the accepted draft tokens."),
    ] = None,
    color_drafts: Annotated[bool, _COLOR_DRAFTS] = False,
    cite: Annotated[
        bool,
        option("Print what another needs to repeat the text, besides the prompt.", metavar=""),
    ] = False,
) -> None:
    r"""Generate text that continues a prompt.

    [bold]Examples[/]

    pronk generate "def fibonacci(n):" --max-tokens 64

    pronk generate --prompt-file main.py --temperature 0.8 --seed 7 --stop $'\n\n'

    pronk generate "Once" --temperature 0.8 --cite

    git diff | pronk generate - --model ./checkpoint --json

    pronk generate "$(cat task.txt main.py)" --prediction main.py

    pronk generate "def add(a, b):" --suffix "print(add(1, 2))" --model ./coder.gguf
    """
    from pronk.cli.console import TerminalOutput, prepare
    from pronk.reproducibility import citation
    from pronk.sampling.noise import random_seed

    screen = TerminalOutput(stats=stats, color_drafts=color_drafts)
    text = read()
    llm, params = prepare(load, request, screen, text, suffix)
    if suffix is None:
        prompt = llm.request_factory.encode_prompt(text)
    else:
        prompt = llm.request_factory.encode_infill(text, suffix)
        params = llm.request_factory.end_infill(params)
    adapter = only_adapter(llm.adapters)
    if len(prompt) + params.max_tokens > llm.config.context:
        room = llm.config.context - len(prompt)
        screen.note(
            f"max_tokens: {room} instead of {params.max_tokens}, the rest of the model's context"
        )
        params = replace(params, max_tokens=room, min_tokens=min(room, params.min_tokens))
    if cite and params.seed is None and not params.greedy:
        params = replace(params, seed=random_seed())
    with interruptible("interrupted"):
        if as_json:
            completion = llm.generate(prompt, params, adapter=adapter)
            typer.echo(json.dumps(completion.to_dict(), ensure_ascii=False))
        else:
            if echo:
                screen.echo(text)
            _show_samples(llm.stream(prompt, params, adapter=adapter), params, screen, llm.kernels)
            if screen.color_drafts and screen.interactive:
                screen.legend()
        if cite:
            screen.say(citation(llm, params, load.keywords, adapter))


@shares(
    load=model_options,
    request=sampling_params,
    without=("n", "logprobs", "prompt_logprobs", "logprob_token_ids", "prediction"),
)
def chat(
    command: typer.Context,
    load: Callable[..., "LLM"],
    request: Callable[[], "SamplingParams"],
    *,
    system: _System = "",
    thinking: _Thinking = None,
    stats: _StatsOfAnswers = None,
    color_drafts: Annotated[bool, _COLOR_DRAFTS] = True,
) -> None:
    """Chat with the model.

    Ctrl-C stops an answer, Ctrl-D ends the chat, /help lists the commands. Defaults of temperature,
    top-k, top-p, min-p and the penalties are those recommended for the model; of --max-tokens, 1024
    or half the context.

    [bold]Examples[/]

    pronk chat

    pronk chat --model Qwen/Qwen3-0.6B --temperature 0.7 --top-p 0.95

    echo "Hello" | pronk chat --max-tokens 32
    """
    from pronk.cli.console import TerminalOutput

    screen = TerminalOutput(stats=stats, color_drafts=color_drafts)
    _converse(command, load, request, screen, system, thinking)


@shares(
    load=model_options,
    request=sampling_params,
    without=("model", "n", "logprobs", "prompt_logprobs", "logprob_token_ids"),
)
def run(
    command: typer.Context,
    name: Annotated[str, MODEL_NAME],
    load: Callable[..., "LLM"],
    request: Callable[[], "SamplingParams"],
    *,
    system: _System = "",
    thinking: _Thinking = None,
    stats: _StatsOfAnswers = None,
    color_drafts: Annotated[bool, _COLOR_DRAFTS] = True,
) -> None:
    """Chat with a model, and download it before if it is not on this machine.

    The options are those of pronk chat.

    [bold]Examples[/]

    pronk run smollm2

    pronk run Qwen/Qwen3-0.6B --temperature 0.7
    """
    from pronk.cli.console import TerminalOutput
    from pronk.cli.models import download_missing

    screen = TerminalOutput(stats=stats, color_drafts=color_drafts)
    with interruptible("interrupted; the same command resumes the download"):
        download_missing(screen, name)
    _converse(command, partial(load, model=[name]), request, screen, system, thinking)


def _converse(
    command: typer.Context,
    load: Callable[..., "LLM"],
    request: Callable[[], "SamplingParams"],
    screen: "TerminalOutput",
    system: str,
    thinking: bool | None,
) -> None:
    """Load the model, and answer messages until the input ends."""
    from pronk.cli.console import prepare
    from pronk.cli.repl import ChatSession
    from pronk.text.chat.messages import thinking_options

    llm, params = prepare(load, request, screen)
    options = thinking_options(None, thinking)
    # Raise an error at once if the model has no chat template.
    llm.chat_ids([{"role": "user", "content": "?"}], template_options=options)

    def load_model(name: str) -> "LLM":
        with screen.loading() as progress:
            return load(progress, model=[name])

    session = ChatSession(
        llm,
        params,
        screen,
        system=system,
        given=given_options(command),
        load_model=load_model,
        template_options=options,
    )
    session.run()


def _show_samples(
    pieces: Iterator["Piece"], params: "SamplingParams", screen: "TerminalOutput", kernels: str
) -> None:
    """Stream the first sample, then print the other samples.

    The statistics of all finished samples follow. After Ctrl-C, the texts so far are printed.
    """
    from pronk.cli.console import stats_line

    other_pieces: dict[int, list[Piece]] = {index: [] for index in range(1, params.n)}
    completions: dict[int, Completion] = {}
    try:
        for piece in pieces:
            if piece.index in other_pieces:
                other_pieces[piece.index].append(piece)
            else:
                screen.write(piece.text, drafted=piece.guessed)
            if piece.completion is not None:
                completions[piece.index] = piece.completion
    finally:
        screen.end_line()
        for index, pieces_of_sample in other_pieces.items():
            screen.write(f"--- sample {index + 1} of {params.n} ---\n")
            for piece in pieces_of_sample:
                screen.write(piece.text, drafted=piece.guessed)
            screen.end_line()
        for _, completion in sorted(completions.items()):
            seed = None if params.greedy else completion.seed
            screen.figures(stats_line(completion.stats, kernels, seed))
