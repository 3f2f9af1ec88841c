"""``pronk serve``: an HTTP server with the APIs of OpenAI and Anthropic."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pronk import OptionError
from pronk.base import count_text, read_text, refuse
from pronk.base.checks import refuse_choice, require_extra
from pronk.commands import one_model, panel, serving_options, shares
from pronk.server.cli.replicas import ReplicaOptions

if TYPE_CHECKING:
    from pronk.commands import TerminalOutput
    from pronk.server.model_pool import ModelPool
    from pronk.server.replicas.cluster import ReplicaPlan
    from pronk.server.replicas.dispatcher import Dispatcher
    from pronk.server.settings import ServerSettings

_LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
_MEMORY_FRACTION = 0.75  # fraction of the machine's memory that several models may use by default
_ASSUMED_MEMORY = 8 << 30  # bytes; the machine's memory if the operating system does not report it
# Modules that ``pip install pronk[serve]`` installs.
SERVER_MODULES = ("fastapi", "uvicorn", "prometheus_client")

_models = panel("Models")
_server = panel("Server")
_limit = panel("Limits")


@shares(options=serving_options, replication=ReplicaOptions, without=("model",))
def serve(
    options: "Callable[[], dict[str, Any]]",
    replication: Callable[[], ReplicaOptions],
    *,
    model: Annotated[
        list[str],
        _models(
            "Name as in pronk pull, folder with a checkpoint, GGUF file, NAME=MODEL, or folder of "
            "models; repeatable.",
            show_default="smollm2",
        ),
    ] = [],  # noqa: B006 - typer requires a list; never modified
    pin: Annotated[
        list[str], _models("Load this model at the start and never unload it; repeatable.")
    ] = [],  # noqa: B006
    memory: Annotated[
        str | None,
        _models(
            "Memory for the weights and KV caches of all loaded models, for example 8GiB.",
            show_default="three quarters of the machine's",
        ),
    ] = None,
    idle_minutes: Annotated[
        float | None,
        _models(
            "Unload a model after this time without a request.", show_default="never", min=0.001
        ),
    ] = None,
    host: Annotated[
        str, _server("Address to listen on; 0.0.0.0 is every address of this machine.")
    ] = "127.0.0.1",
    port: Annotated[
        int, _server("Port to listen on; 0 picks a free port.", min=0, max=65535)
    ] = 8000,
    api_key: Annotated[
        list[str],
        _server("Key that clients must send; repeatable.", envvar="PRONK_API_KEY", metavar="KEY"),
    ] = [],  # noqa: B006
    api_key_file: Annotated[
        Path | None,
        _server(
            "File of keys, one per line; unlike --api-key it is not visible in the process list."
        ),
    ] = None,
    open_to_all: Annotated[
        bool, _server("Serve other machines without any key.", "--open-to-all", metavar="")
    ] = False,
    name: Annotated[
        str | None,
        _server("Name of the only model in requests.", show_default="name of its folder"),
    ] = None,
    allow_pull: Annotated[
        bool,
        _server("Let clients download models with Ollama's /api/pull.", "--allow-pull", metavar=""),
    ] = False,
    pull_key: Annotated[
        list[str],
        _server(
            "API key whose clients may download models; repeatable.",
            envvar="PRONK_PULL_KEY",
            metavar="KEY",
        ),
    ] = [],  # noqa: B006
    allow_host: Annotated[
        list[str], _server("Host name to accept besides localhost; repeatable.", metavar="NAME")
    ] = [],  # noqa: B006
    allow_origin: Annotated[
        list[str],
        _server(
            "Origin of web pages that may use the server, such as http://localhost:3000; "
            "repeatable.",
            metavar="URL",
        ),
    ] = [],  # noqa: B006
    also: Annotated[
        list[str], _server("Drafter that requests may select; repeatable.", metavar="DRAFTER")
    ] = [],  # noqa: B006
    guardrails: Annotated[
        str | None,
        _server(
            'System prompt before every conversation: "mistral", or a file with another one.',
            metavar="WHICH",
        ),
    ] = None,
    keep_volatile: Annotated[
        bool,
        _server(
            "Keep the lines of agents' prompts that differ in every request.",
            "--keep-volatile",
            metavar="",
        ),
    ] = False,
    generic_tools: Annotated[
        bool,
        _server("Describe tools in the system prompt if the model's chat template has none."),
    ] = True,
    reasoning_budget_message: Annotated[
        str,
        _server(
            "Text that closes thoughts which have used up the budget of their request.",
            metavar="TEXT",
            show_default="none",
        ),
    ] = "",
    moderation_prompt: Annotated[
        Path | None,
        _server(
            "File with the prompt of /v1/moderations, with {text}, {categories} and {kind}.",
            show_default="built in",
        ),
    ] = None,
    page: Annotated[bool, _server("Serve a chat page at /.")] = True,
    access_log: Annotated[bool, _server("Log one line per request, without its text.")] = False,
    drain: Annotated[
        float, _server("Seconds that running requests have to finish after SIGTERM.", min=0.0)
    ] = 60.0,
    max_requests: Annotated[
        int, _limit("Maximum number of running and waiting samples.", min=1)
    ] = 256,
    max_tokens: Annotated[
        int | None,
        _limit("Maximum number of tokens of an answer.", min=1, show_default="the model's context"),
    ] = None,
    max_n: Annotated[int, _limit("Maximum number of samples per prompt.", min=1)] = 16,
    max_body: Annotated[int, _limit("Maximum size of a request's body in bytes.", min=1024)] = 4
    * 2**20,
    max_connections: Annotated[int, _limit("Maximum number of open connections.", min=1)] = 512,
    timeout: Annotated[
        float, _limit("Seconds from the arrival of a request to its end.", min=1.0)
    ] = 600.0,
) -> None:
    r"""Serve one or more models to clients of OpenAI and Anthropic, with a chat page at /.

    [bold]Examples[/]

    pronk serve

    pronk serve --model Qwen/Qwen3-0.6B --host 0.0.0.0 --api-key-file keys.txt

    pronk serve --model smollm2 --model coder=./qwen2.5-coder-1.5b-q4_k_m.gguf --memory 4GiB
    --idle-minutes 30

    pronk serve --replicas 2

    curl http://localhost:8000/v1/completions -d '{"prompt": "def fib(n):"}'
    """
    from pronk.commands import TerminalOutput

    require_extra("serve", "serve", *SERVER_MODULES)
    from pronk.checkpoint import model_label
    from pronk.server.model_pool import ModelPool
    from pronk.server.moderation import MODERATION_TEMPLATE, ModerationPrompt
    from pronk.server.run import Server, check_free
    from pronk.server.service import Service
    from pronk.server.settings import RequestLimits, ServerSettings, read_keys
    from pronk.serving import check_launched, is_launched

    keys = tuple(api_key)
    if api_key_file is not None:
        keys += read_keys(api_key_file)
    is_local = host in _LOOPBACK
    if not is_local and not keys and not open_to_all:
        msg = (
            f"host: expected --api-key or --api-key-file beside {host!r}, found none; add a key or "
            "--open-to-all"
        )
        raise OptionError(msg)
    pull_keys = _pull_keys(allow_pull, pull_key, needs_keys=bool(keys) or not is_local)
    keys += tuple(pull_key)
    guardrail_prompt = _guardrails(guardrails)
    template = MODERATION_TEMPLATE
    if moderation_prompt:
        template = read_text(moderation_prompt, "moderation-prompt")
    limits = RequestLimits(
        requests=max_requests,
        max_tokens=max_tokens,
        n=max_n,
        body=max_body,
        connections=max_connections,
        seconds=timeout,
    )
    screen = TerminalOutput()
    replicas = replication()
    llm_options = options()
    settings = ServerSettings(
        name=name or "",
        keys=keys,
        pull_keys=pull_keys,
        hosts={*_LOOPBACK, *map(str.lower, allow_host)} if is_local else None,
        origins=tuple(allow_origin),
        limits=limits,
        allowed_drafters=tuple(also),
        guardrails=guardrail_prompt,
        thinking_message=reasoning_budget_message,
        serve_chat_page=page,
        keep_volatile=keep_volatile,
        generic_tools=generic_tools,
    )
    check_launched(llm_options["workers"])
    if not is_launched(llm_options["workers"]):  # under torchrun, only rank 0 opens the port
        check_free(host, port)
    with ExitStack() as stack:
        if replicas:
            refused = {
                "pin": pin,
                "memory": memory,
                "idle-minutes": idle_minutes,
                "allow-pull": allow_pull,
            }
            for option, value in refused.items():
                if value:
                    msg = (
                        f"{option}: expected no such option with --replicas, found {value!r}; "
                        "leave it out"
                    )
                    raise OptionError(msg)
            llm_options["model"] = one_model(model, "leave --replicas out to serve several")
            connection = replicas.connect(
                screen, llm_options, extra_drafters=also, max_requests=max_requests, drain=drain
            )
            path, plan = stack.enter_context(connection)
            dispatcher = _start_replicas(path, plan, stack, shared=settings.is_shared)
            settings = replace(settings, name=name or model_label(dispatcher.llm.path))
            prompt = ModerationPrompt(dispatcher.llm.tokenizer, template)
            pool = ModelPool.of(Service(dispatcher, settings, moderation_prompt=prompt))
        else:
            pool = _open_models(
                screen,
                model,
                llm_options,
                settings,
                template,
                pins=pin,
                memory=memory,
                idle_minutes=idle_minutes,
            )
            stack.callback(pool.finish)
        Server(
            pool,
            host=host,
            port=port,
            drain_seconds=drain,
            access_log=access_log,
            on_start=partial(_print_address, screen, pool),
            on_wait=partial(_print_waiting, screen),
        ).run()


def _start_replicas(
    path: Path, plan: "ReplicaPlan", stack: ExitStack, *, shared: bool
) -> "Dispatcher":
    """Start replicas, and return their dispatcher; the end of ``stack`` stops the replicas."""
    from pronk.server.replicas.cluster import deploy
    from pronk.server.replicas.dispatcher import Dispatcher, ModelReader

    deployed = stack.enter_context(deploy(plan))
    options = plan.options
    fields = {
        "context": options["context"],
        "adapters": tuple(options["adapters"]),
        "share_prefixes": options["prefix_cache"] or options["prompt_cache"] is not None,
    }
    reader = ModelReader(path, options["drafter"], deployed.about(), **fields)
    return Dispatcher(reader, deployed, max_requests=plan.max_requests, shared=shared)


def _open_models(
    screen: "TerminalOutput",
    values: Sequence[str],
    options: dict[str, Any],
    settings: "ServerSettings",
    template: str,
    *,
    pins: Sequence[str],
    memory: str | None,
    idle_minutes: float | None,
) -> "ModelPool":
    """Return the pool of the models to serve, with the pinned models and the first one loaded.

    The others load at their first request. A single model is pinned, unless ``idle_minutes`` is
    set. ``options`` are the arguments of :class:`pronk.LLM`.
    """
    from pronk.backends import machine_memory, parse_memory
    from pronk.server.model_loader import ModelLoader
    from pronk.server.model_pool import ModelPool, PooledModel
    from pronk.server.names import AdapterNames, find_models
    from pronk.server.pulls import Pulls
    from pronk.server.settings import model_key

    options = {name: value for name, value in options.items() if name != "model"}
    allows_pulls = settings.pull_keys is not None
    with screen.loading() as bar:
        found = find_models(values, progress=bar)
        has_several = len(found) > 1 or allows_pulls
        if has_several:
            number = f"{len(found)} and those of --allow-pull" if allows_pulls else str(len(found))
            _check_options(number, settings.name if len(found) > 1 else "", options)
        if settings.name and len(found) == 1:
            found = [(settings.name, path) for _, path in found]
        limit = None if memory is None else parse_memory(memory, "memory")
        if limit is None and has_several:
            limit = int(_MEMORY_FRACTION * (machine_memory() or _ASSUMED_MEMORY))

        def make_model(name: str, path: Path) -> PooledModel:
            names = AdapterNames(name, options["adapters"])
            own_settings = replace(settings, name=name)
            return PooledModel(names, ModelLoader(path, options, own_settings, template, limit))

        models = [make_model(name, path) for name, path in found]
        by_key = {model_key(model.name): model for model in models}
        for name in pins:
            if model_key(name) not in by_key:
                refuse_choice("pin", name, [model.name for model in models])
            by_key[model_key(name)].pinned = True
        models[0].pinned |= len(models) == 1 and idle_minutes is None
        idle_seconds = None if idle_minutes is None else 60.0 * idle_minutes
        first_settings = replace(settings, name=models[0].name)
        pool = ModelPool(models, first_settings, memory=limit, idle_seconds=idle_seconds)
        if allows_pulls:
            pool.pulls = Pulls(pool, make_model)
        for model in sorted(models, key=lambda model: not model.pinned):
            if model.pinned or model is models[0]:
                pool.preload(model, bar)
    return pool


def _pull_keys(
    allow_pull: bool, pull_key: Sequence[str], *, needs_keys: bool
) -> tuple[str, ...] | None:
    """Return the keys whose clients may download models: ``()`` for all clients, None for none.

    Raises:
        OptionError: keys without ``--allow-pull``; or no keys, though the server has API keys or
            listens to other machines.
    """
    if pull_key and not allow_pull:
        msg = "pull-key: expected --allow-pull beside it, found none; add it"
        raise OptionError(msg)
    if allow_pull and needs_keys and not pull_key:
        msg = (
            "allow-pull: expected --pull-key on a server with API keys or for other machines, "
            "found none; add a key"
        )
        raise OptionError(msg)
    return tuple(pull_key) if allow_pull else None


def _check_options(count: str, name: str, options: dict[str, Any]) -> None:
    """Raise OptionError for options that only a single model can have.

    ``count`` says how many models the server has.
    """
    if name:
        problem = f"expected one model, found {count}; name each: --model NAME=MODEL"
        refuse("name", problem, OptionError)
    if options["adapters"]:
        msg = (
            f"adapter: expected one model, found {count}; "
            "serve the adapters' model with a server of its own"
        )
        raise OptionError(msg)
    if options["workers"] > 1:
        problem = f"expected 1 with several models, found {options['workers']}; leave it out"
        refuse("workers", problem, OptionError)
    if not isinstance(options["calibration"], bool):
        found = options["calibration"]
        problem = f"expected on or off with several models, found {found}; leave the file out"
        refuse("calibration", problem, OptionError)


def _print_address(screen: "TerminalOutput", pool: "ModelPool", host: str, port: int) -> None:
    settings = pool.settings
    names = ", ".join(model.name for model in pool.models)
    if host in ("0.0.0.0", "::"):  # noqa: S104 - browsers cannot open the address of all interfaces
        host = "localhost"
    if ":" in host:
        host = f"[{host}]"
    url = f"http://{host}:{port}"
    screen.say(f"{names} · {url}/v1 (clients of Anthropic: {url})")
    page = f"chat page: {url}/ · " if settings.serve_chat_page else ""
    screen.say(f"{page}Ctrl-C stops the server")
    if not settings.keys and settings.hosts is None:
        screen.note("no API key: every client that can reach this machine is served")


def _print_waiting(screen: "TerminalOutput", num_requests: int) -> None:
    screen.say(f"waiting for {count_text(num_requests, 'request')}; press Ctrl-C again to stop now")


def _guardrails(which: str | None) -> str | None:
    if which is None:
        return None
    from pronk.server.moderation import MISTRAL_PROMPT

    if which == "mistral":
        return MISTRAL_PROMPT
    text = read_text(Path(which), "guardrails").strip()
    if not text:
        refuse("guardrails", f"expected a prompt, found an empty file, {which}", OptionError)
    return text
