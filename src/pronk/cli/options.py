"""Options that several commands share: those of the model and those of a request.

A *builder* is a function whose keyword parameters are options and which builds an object from their values.
The decorator :func:`shares` adds a builder's options to a command. The command receives the builder as a function with
the user's values already bound.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pronk.base.errors import OptionError, refuse
from pronk.cli.values import parse_adapters, parse_bias, read_guide

if TYPE_CHECKING:
    from pronk.engine.request_factory import RequestFactory
    from pronk.llm import LLM
    from pronk.sampling.params import SamplingParams

Progress = Callable[[int, int], None]

_SWITCH = {"on": True, "off": False}  # values of options that may also be a path


def given_options(context: typer.Context) -> list[str]:
    """Return the names of all options on the command line, even of those given with their default value."""
    sources = ((name, context.get_parameter_source(name)) for name in context.params)
    return [name for name, source in sources if source is not None and source.name == "COMMANDLINE"]


def panel(title: str | None, **common: Any) -> Callable[..., Any]:
    """Return ``option(text, *names, **settings)``, which makes a typer.Option in the help panel ``title``."""
    return lambda text, *names, **settings: typer.Option(*names, help=text, rich_help_panel=title, **common | settings)


option = panel(None)
_model, _request, _guide = map(panel, ("Model", "Request", "Guide"))


def shares(
    without: Iterable[str] = (), **builders: Callable[..., Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the keyword options of each builder to a command, except those in ``without``.

    The command's parameter with a builder's name receives that builder with the user's values filled in::

        def bread(*, flour: str = "rye", grams: int = 500) -> Bread: ...
        def oven(*, degrees: int = 220) -> Oven: ...


        @shares(dough=bread, heat=oven, without=("grams",))
        def bake(loaves: int, dough: Callable[[], Bread], heat: Callable[[], Oven], *, degrees: int = 250) -> None:
            heat().bake(dough() for _ in range(loaves))

    has the signature ``bake(loaves: int, *, flour: str = "rye", degrees: int = 250)``. Options of the same name in the
    command and in builders are one option, whose value the command and these builders receive. The first definition
    gives the type, default and help, and the last one the position; the command comes before the builders.

    Args:
        without: names of options that no builder receives; the command may define an option of that name itself.
        builders: functions that build a value, by the name of the command's parameter that receives it.
    """
    groups = {
        key: [p for p in inspect.signature(build).parameters.values() if p.kind is p.KEYWORD_ONLY]
        for key, build in builders.items()
    }
    received = {key: [p.name for p in group if p.name not in without] for key, group in groups.items()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        command_parameters = {name: p for name, p in signature.parameters.items() if name not in builders}
        shown: dict[str, inspect.Parameter] = {}
        for parameter in chain(command_parameters.values(), *groups.values()):
            if parameter.name in command_parameters or parameter.name not in without:
                shown[parameter.name] = shown.pop(parameter.name, parameter)

        @functools.wraps(command)
        def call(**values: Any) -> None:
            built = {
                key: functools.partial(build, **{name: values[name] for name in received[key]})
                for key, build in builders.items()
            }
            with ExitStack() as stack:
                if "load" in built:  # model_options, which only builds the arguments of LLM
                    load = built["load"]
                    built["load"] = functools.partial(_load, stack, load.func, **load.keywords)
                command(**{name: values[name] for name in command_parameters}, **built)

        call.__signature__ = signature.replace(parameters=list(shown.values()))  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in shown.values()}
        return call

    return decorate


def _load(
    stack: ExitStack,
    options: Callable[..., dict[str, Any]],
    /,
    progress: Progress | None,
    *args: Any,
    check: Callable[["RequestFactory"], None] | None = None,
    **keywords: Any,
) -> "LLM":
    """Load the model; ``stack`` saves its acceptance statistics when the command ends or fails."""
    from pronk.engine.workers import check_launched
    from pronk.llm import LLM

    llm_options = options(*args, **keywords)
    check_launched(llm_options["workers"])
    llm = LLM(**llm_options, progress=progress, check=check)
    stack.callback(llm.calibration.save)
    return llm


def model_options(
    max_batch: int = 16,
    prefix_cache: bool = False,
    *,
    model: Annotated[
        list[str],
        _model(
            "Name as in pronk pull (smollm2, owner/name, owner/name:Q4_K_M), folder with a checkpoint, or GGUF file.",
            show_default="smollm2",
        ),
    ] = [],  # noqa: B006 - typer requires a list, so that a second model is refused instead of replacing the first one
    drafter: Annotated[
        str,
        _model('Drafter that proposes draft tokens: a name, or a name with options as in "recycling(num_nodes=7)".'),
    ] = "auto",
    adapter: Annotated[
        list[str],
        _model("LoRA adapter in a folder of PEFT, for example --adapter sql=./sql-lora.", metavar="NAME=FOLDER"),
    ] = [],  # noqa: B006 - typer requires a list; never modified
    device: Annotated[str, _model("Device that the model runs on, for example cpu or cuda.")] = "cpu",
    dtype: Annotated[str, _model("Data type: auto (that of the checkpoint), float32, bfloat16 or float16.")] = "auto",
    weights: Annotated[
        str, _model("plain: as stored in the checkpoint. int8, int4: quantized while loading, smaller and faster.")
    ] = "plain",
    weight_cache: Annotated[
        str,
        _model(
            "Keep the packed weights of a GGUF file, for faster starts: on (in ~/.cache/pronk/weights), off, or a "
            "folder. The file is as large as the model's.",
            metavar="on|off|FOLDER",
        ),
    ] = "off",
    context: Annotated[
        int | None,
        _model(
            "Maximum number of tokens of a text, prompt and output. It selects the rotations of models with longrope, "
            "such as Phi-4-mini.",
            show_default="that of the model",
            min=1,
        ),
    ] = None,
    kv_memory: Annotated[
        str | None, _model("Memory for the KV cache, for example 512MiB.", show_default="fitted to the model")
    ] = None,
    kv_dtype: Annotated[
        str, _model("Data type of the KV cache. auto: that of the model. int8: quantized, half the memory.")
    ] = "auto",
    prompt_cache: Annotated[
        str | None,
        _model(
            "Keep the KV cache of prompts in this folder, for later starts: a known prompt is not computed again.",
            metavar="FOLDER",
            show_default="off",
        ),
    ] = None,
    prompt_cache_size: Annotated[
        str | None,
        _model(
            "Maximum size of the prompt cache; beyond, the least recently used prompts are deleted.",
            metavar="SIZE",
            show_default="4GiB",
        ),
    ] = None,
    threads: Annotated[
        int | None, _model("Number of threads to compute with.", show_default="number of cores", min=1)
    ] = None,
    workers: Annotated[
        int, _model("Number of processes that compute the model together, started by pronk or by torchrun.", min=1)
    ] = 1,
    parallel: Annotated[
        str,
        _model(
            "Split of the work among workers. tree: branches of the draft tree. tensor: heads and columns of the model."
        ),
    ] = "tree",
    kernels: Annotated[
        str,
        _model(
            "CPU kernels. auto: the fastest that this processor supports; or amx, avx512_bf16, avx512, avx2 or "
            "portable. torch: torch's operators, with the extra torch."
        ),
    ] = "auto",
    calibration: Annotated[
        str,
        _model(
            "Start from the acceptance statistics of earlier requests of this process: on, off, or a file, which is "
            "read if it exists and written at the end.",
            metavar="on|off|FILE",
        ),
    ] = "on",
    budget: Annotated[
        str,
        _model(
            "auto: verify only draft tokens that pay for their rows on this machine. all: verify every draft token."
        ),
    ] = "auto",
) -> dict[str, Any]:
    """Return the keyword arguments of :class:`pronk.LLM`.

    A command's parameter ``load`` receives ``load(progress, max_batch, prefix_cache)``, which loads the model. The
    callback ``progress`` gets the bytes read so far and in all; ``check=`` is that of ``LLM``. ``max_batch`` is the
    maximum number of requests in one forward pass; ``prefix_cache`` keeps the KV cache of finished requests for later
    prompts.
    """
    options = dict(locals())
    del options["adapter"]
    options |= {name: _SWITCH.get(options[name], options[name]) for name in ("calibration", "weight_cache")}
    return options | {"model": one_model(model), "adapters": parse_adapters(adapter)}


def one_model(values: list[str], remedy: str = "give one") -> str | None:
    """Return the only value of ``--model``, or ``None`` without one; raise OptionError if there are more."""
    if len(values) > 1:
        refuse("model", f"expected one, found {' and '.join(values)}; {remedy}", OptionError)
    return values[0] if values else None


def sampling_params(
    *,
    max_tokens: Annotated[int, _request("Maximum number of tokens to generate, at least 1.")] = 128,
    min_tokens: Annotated[int, _request("Minimum number of tokens before the text may end, 0..max-tokens.")] = 0,
    temperature: Annotated[float, _request("0 takes the most likely token; higher is more random, 0..100.")] = 0.0,
    top_k: Annotated[int, _request("Sample from this many most likely tokens; 0 is all tokens.")] = 0,
    top_p: Annotated[
        float, _request("Sample from the most likely tokens that together reach this probability, above 0 to 1.")
    ] = 1.0,
    min_p: Annotated[float, _request("Drop tokens below this fraction of the highest probability, 0..1.")] = 0.0,
    repetition_penalty: Annotated[
        float, _request("Above 1 makes tokens of the prompt and the generated text less likely, above 0 to 100.")
    ] = 1.0,
    presence_penalty: Annotated[
        float, _request("Subtracted once from the logit of each token in the generated text, -2..2.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, _request("Subtracted from a token's logit for each occurrence in the generated text, -2..2.")
    ] = 0.0,
    logit_bias: Annotated[
        list[str], _request("Add VALUE, -100..100, to the logit of token ID; repeatable.", metavar="ID=VALUE")
    ] = [],  # noqa: B006 - typer requires a list; never modified
    bad_words: Annotated[list[str], _request("Text that is never generated; repeatable.", metavar="TEXT")] = [],  # noqa: B006
    stop: Annotated[list[str], _request("Stop before this text; repeatable.", metavar="TEXT")] = [],  # noqa: B006
    stop_token_ids: Annotated[list[int], _request("Stop after this token id; repeatable.", metavar="ID")] = [],  # noqa: B006
    thinking_budget: Annotated[
        int | None,
        _request("Maximum number of tokens that the model thinks before it answers, at least 0."),
    ] = None,
    ignore_eos: Annotated[bool, _request("Continue after the end-of-text token.", "--ignore-eos", metavar="")] = False,
    seed: Annotated[
        int | None, _request("Same seed, same text; 0..2^63-1.", show_default="random, and reported")
    ] = None,
    rule: Annotated[
        str,
        _request(
            "Acceptance of draft tokens when sampling. coupled: same seed, same text, whatever the drafter. rejection, "
            "block: only the distribution is the same; see docs/concepts.md."
        ),
    ] = "coupled",
    n: Annotated[int, _request("Number of independent samples, 1..1024.")] = 1,
    logprobs: Annotated[
        int | None, _request("With --json: log-probabilities of each token and of this many most likely ones, 0..64.")
    ] = None,
    prompt_logprobs: Annotated[int | None, _request("--logprobs for the tokens of the prompt, 0..64.")] = None,
    logprob_token_ids: Annotated[
        list[int], _request("With --logprobs: also report this token id; repeatable.", metavar="ID")
    ] = [],  # noqa: B006
    json_schema: Annotated[
        str | None,
        _guide("The text is JSON that fits the schema in this file; object: any JSON object.", metavar="FILE"),
    ] = None,
    regex: Annotated[str | None, _guide("The whole text matches this regular expression.", metavar="REGEX")] = None,
    choice: Annotated[list[str], _guide("The text is one of the choices; repeatable.", metavar="TEXT")] = [],  # noqa: B006
    grammar: Annotated[str | None, _guide("The text fits the Lark grammar in this file.", metavar="FILE")] = None,
    guide_mode: Annotated[
        str,
        _guide(
            "Tokens that the guide allows no alternative to. forced: proposed as draft tokens, at no cost. plain: "
            "not proposed; the text is the same. jump: appended without a forward pass."
        ),
    ] = "forced",
) -> "SamplingParams":
    """Build the sampling parameters; raise OptionError for a value out of its range or an unreadable file."""
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in locals().items()}

    from pronk.sampling.params import SamplingParams

    for name in ("json_schema", "regex", "choice", "grammar"):
        del given[name]
    given["logit_bias"] = parse_bias(logit_bias)
    given["guide"] = read_guide(json_schema, regex, choice, grammar)
    return SamplingParams(**given)
