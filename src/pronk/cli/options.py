"""Options that several commands share: those of the model and those of a request.

Each group is a function that builds the value from its options. :func:`shares` gives a command the options of such a
function and hands it the value still to be built, because the value needs torch and ``--help`` should not. typer wants
the real types of the options: no postponed annotations here.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from pronk.errors import OptionError, PromptError

if TYPE_CHECKING:
    from pronk.llm import LLM
    from pronk.sampling.guide import GuideMode
    from pronk.sampling.params import Rule, SamplingParams

__all__ = ["Progress", "given_options", "model_options", "read_prompt", "sampling_params", "shares"]

Progress = Callable[[int, int], None]


def _model(help: str, **more: Any) -> Any:  # noqa: A002 - typer's word
    return typer.Option(help=help, rich_help_panel="Model", **more)


def _request(help: str, *names: str, **more: Any) -> Any:  # noqa: A002 - typer's word
    return typer.Option(*names, help=help, rich_help_panel="Request", **more)


def _guide(help: str, **more: Any) -> Any:  # noqa: A002 - typer's word
    return typer.Option(help=help, rich_help_panel="Guide", **more)


def shares(
    without: Iterable[str] = (), **builders: Callable[..., Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the keyword options of each builder, except those in ``without``.

    The command's parameter of a builder's name receives that builder with the user's values filled in::

        def bread(*, flour: str = "rye", grams: int = 500) -> Bread: ...
        def oven(*, degrees: int = 220) -> Oven: ...


        @shares(dough=bread, heat=oven, without=("grams",))
        def bake(loaves: int, dough: Callable[[], Bread], heat: Callable[[], Oven], *, degrees: int = 250) -> None:
            heat().bake(dough() for _ in range(loaves))

    has the signature ``bake(loaves: int, *, flour: str = "rye", degrees: int = 250)``. An option that the command and
    a builder have, or two builders, is one option: the first of them says how it looks, the last where it stands (the
    command is before the builders), and all of them receive its value.

    Args:
        without: options that no builder receives. The command may have one of its own by that name.
        builders: what makes the value, by the command's parameter that receives it.
    """
    groups = {
        key: [p for p in inspect.signature(build).parameters.values() if p.kind is p.KEYWORD_ONLY]
        for key, build in builders.items()
    }
    received = {key: [p.name for p in group if p.name not in without] for key, group in groups.items()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command)
        mine = {name: p for name, p in own.parameters.items() if name not in builders}
        shown: dict[str, inspect.Parameter] = {}
        for p in chain(mine.values(), *groups.values()):
            if p.name in mine or p.name not in without:
                shown[p.name] = shown.pop(p.name, p)

        @functools.wraps(command)
        def call(**given: Any) -> None:
            built = {
                key: functools.partial(build, **{name: given[name] for name in received[key]})
                for key, build in builders.items()
            }
            with ExitStack() as ends:
                if "load" in built:
                    load = built["load"]
                    built["load"] = functools.partial(_load, ends, load.func, **load.keywords)
                command(**{name: given[name] for name in mine}, **built)

        call.__signature__ = own.replace(parameters=list(shown.values()))  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in shown.values()}
        return call

    return decorate


def _load(
    ends: ExitStack, options: Callable[..., dict[str, Any]], /, progress: Progress | None, *args: Any, **given: Any
) -> "LLM":
    """Load; what guesses have shown is kept when the command ends, however it does."""
    from pronk.llm import LLM
    from pronk.parallel.worker_group import check_launched

    found = options(*args, **given)
    check_launched(found["workers"])
    llm = LLM(**found, progress=progress)
    ends.callback(llm.calibration.save)
    return llm


def given_options(context: typer.Context) -> list[str]:
    """The options that the user has written, even where they say what would hold anyway."""
    sources = ((name, context.get_parameter_source(name)) for name in context.params)
    return [name for name, source in sources if source is not None and source.name == "COMMANDLINE"]


def model_options(
    max_batch: int = 16,
    prefix_cache: bool = False,
    *,
    model: Annotated[
        str | None,
        _model(
            "Folder with a checkpoint, its id on the Hub, or a GGUF file. Default in a clone: pronk-tiny.",
            show_default=False,
        ),
    ] = None,
    drafter: Annotated[
        str, _model('How to guess tokens: a name, or a name with options as in "recycling(num_nodes=7)".')
    ] = "auto",
    device: Annotated[str, _model("Where the model runs, for example cpu or cuda.")] = "cpu",
    dtype: Annotated[str, _model("auto (the checkpoint's own), float32, bfloat16 or float16.")] = "auto",
    weights: Annotated[
        str, _model("plain: as the checkpoint has them. int8, int4: rounded as they are loaded, smaller and faster.")
    ] = "plain",
    kv_memory: Annotated[
        str | None, _model("Memory for the KV cache, for example 512MiB.", show_default="chosen for the model")
    ] = None,
    kv_dtype: Annotated[
        str, _model("auto: keys and values as they are computed. int8: rounded to 8 bits, in half the memory.")
    ] = "auto",
    threads: Annotated[int | None, _model("Threads to compute with.", show_default="torch's choice", min=1)] = None,
    workers: Annotated[
        int, _model("Processes that compute the model together: started here, or torchrun's.", min=1)
    ] = 1,
    parallel: Annotated[
        str, _model("tree: workers get branches of the guesses. tensor: each has some heads and columns of the model.")
    ] = "tree",
    kernels: Annotated[
        str,
        _model(
            "auto: the widest of this processor; or amx, avx512_bf16, avx512, avx2 or portable. torch: none of our own."
        ),
    ] = "auto",
    calibration: Annotated[
        str,
        _model(
            "Whether requests begin with what guesses of earlier ones have shown, as counts: on, off, or a file to "
            "begin with, if it is there, and to keep it in.",
            metavar="on|off|FILE",
        ),
    ] = "on",
    budget: Annotated[
        str, _model("auto: only guesses that pay for their rows on this machine. all: every guess of the drafter.")
    ] = "auto",
) -> dict[str, Any]:
    """What :class:`pronk.LLM` is to load, for up to ``max_batch`` requests a pass.

    ``prefix_cache`` keeps what the cache holds of texts that have ended. A command's ``load`` is these options, and
    then the model: ``load(progress, max_batch, prefix_cache)``, where ``progress`` is told the bytes read, and all.
    """
    return {
        "model": model,
        "drafter": drafter,
        "device": device,
        "dtype": dtype,
        "weights": weights,
        "kv_memory": kv_memory,
        "kv_dtype": kv_dtype,
        "max_batch": max_batch,
        "prefix_cache": prefix_cache,
        "threads": threads,
        "workers": workers,
        "parallel": parallel,
        "kernels": kernels,
        "budget": budget,
        "calibration": {"on": True, "off": False}.get(calibration, calibration),
    }


def sampling_params(
    *,
    max_tokens: Annotated[int, _request("Most tokens to generate, at least 1.")] = 128,
    min_tokens: Annotated[int, _request("Do not end the text before so many tokens, 0..max-tokens.")] = 0,
    temperature: Annotated[float, _request("0 always takes the likeliest token; higher is more random, 0..100.")] = 0.0,
    top_k: Annotated[int, _request("Choose among so many likeliest tokens; 0 is all of them.")] = 0,
    top_p: Annotated[
        float, _request("Choose among the likeliest tokens that together reach this probability, above 0 to 1.")
    ] = 1.0,
    min_p: Annotated[float, _request("Drop tokens below this share of the likeliest one's probability, 0..1.")] = 0.0,
    repetition_penalty: Annotated[
        float, _request("Above 1 makes tokens of the prompt and the text less likely, above 0 to 100.")
    ] = 1.0,
    presence_penalty: Annotated[float, _request("Subtracted from the logits of tokens in the text, -2..2.")] = 0.0,
    frequency_penalty: Annotated[float, _request("The same once per occurrence, -2..2.")] = 0.0,
    logit_bias: Annotated[
        list[str], _request("Add VALUE, -100..100, to the logit of token ID; may be repeated.", metavar="ID=VALUE")
    ] = [],  # noqa: B006 - typer needs a list, and nobody changes it
    bad_words: Annotated[list[str], _request("A text that is never generated; may be repeated.", metavar="TEXT")] = [],  # noqa: B006
    stop: Annotated[list[str], _request("End before this text; may be repeated.", metavar="TEXT")] = [],  # noqa: B006
    stop_token_ids: Annotated[list[int], _request("End after this token id; may be repeated.", metavar="ID")] = [],  # noqa: B006
    ignore_eos: Annotated[bool, _request("Go on after the model's end-of-text.", "--ignore-eos", metavar="")] = False,
    seed: Annotated[
        int | None, _request("Same seed, same text; 0..2^63-1.", show_default="a fresh one, reported")
    ] = None,
    rule: Annotated[
        str,
        _request(
            "How guesses are accepted when sampling. coupled: same seed, same text whatever the drafter. rejection, "
            "block: only the distribution is the same; the chance is min(1, p/q), of each guess or of a whole chain."
        ),
    ] = "coupled",
    n: Annotated[int, _request("Independent samples of the prompt, 1..1024.")] = 1,
    logprobs: Annotated[
        int | None, _request("With --json: log-probabilities of each token and the so many likeliest, 0..64.")
    ] = None,
    prompt_logprobs: Annotated[int | None, _request("The same for the prompt's tokens, 0..64.")] = None,
    logprob_token_ids: Annotated[
        list[int], _request("With --logprobs: report this token id, too; may be repeated.", metavar="ID")
    ] = [],  # noqa: B006
    json_schema: Annotated[
        str | None,
        _guide("The text is JSON that fits the schema in this file; the word object: any object.", metavar="FILE"),
    ] = None,
    regex: Annotated[str | None, _guide("The whole text matches this expression.", metavar="REGEX")] = None,
    choice: Annotated[list[str], _guide("The text is this, or another choice; repeat it.", metavar="TEXT")] = [],  # noqa: B006
    grammar: Annotated[str | None, _guide("The text fits the Lark grammar in this file.", metavar="FILE")] = None,
    guide_mode: Annotated[
        str,
        _guide(
            "forced: what the guide leaves no choice about is guessed, and costs nothing. plain: not guessed, with the "
            "same text. jump: it is appended without asking the model."
        ),
    ] = "forced",
) -> "SamplingParams":
    """The request's options, checked.

    Raises:
        OptionError: one of them is out of its range, or its file cannot be read.
    """
    from pronk.cli.guides import read_guide
    from pronk.sampling.params import SamplingParams

    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=_parse_bias(logit_bias),
        bad_words=tuple(bad_words),
        stop=tuple(stop),
        stop_token_ids=tuple(stop_token_ids),
        ignore_eos=ignore_eos,
        seed=seed,
        rule=cast("Rule", rule),  # SamplingParams says what is wrong with another
        n=n,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logprob_token_ids=tuple(logprob_token_ids),
        guide=read_guide(json_schema, regex, choice, grammar),
        guide_mode=cast("GuideMode", guide_mode),  # the same
    )


def _parse_bias(pairs: list[str]) -> dict[int, float] | None:
    """``["7=1.5"]`` to ``{7: 1.5}``; no pairs to ``None``."""
    bias: dict[int, float] = {}
    for pair in pairs:
        token, _, value = pair.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            msg = f"logit_bias: expected ID=VALUE, for example 13=-100, found {pair!r}"
            raise OptionError(msg) from None
    return bias or None


def read_prompt(
    *,
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue, or - to read it from standard input.", show_default=False)
    ] = None,
    prompt_file: Annotated[
        str | None, typer.Option(help="Read the prompt from this file.", metavar="FILE", show_default=False)
    ] = None,
) -> str:
    """The prompt of the argument, of a file or of standard input.

    Raises:
        PromptError: not one of them, or no text in UTF-8.
    """
    file = prompt_file
    if (prompt is None) == (file is None):
        msg = f"expected either PROMPT or --prompt-file, found {'neither' if prompt is None else 'both'}"
        raise PromptError(msg)
    if prompt is not None and prompt != "-":
        return prompt
    try:
        return sys.stdin.buffer.read().decode() if file in {None, "-"} else Path(str(file)).read_bytes().decode()
    except OSError as error:
        msg = f"prompt-file: expected a file that can be read at {file or '-'}, found {error.strerror}; check the path"
        raise PromptError(msg) from error
    except UnicodeDecodeError as error:
        msg = f"prompt: expected text in UTF-8, found {error}"
        raise PromptError(msg) from error
