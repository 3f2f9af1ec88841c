"""``pronk serve``: an OpenAI-compatible server."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pronk.cli.options import Progress, model_options, shares
from pronk.cli.replicas import replica_options
from pronk.errors import OptionError

if TYPE_CHECKING:
    from pronk.cli.console import TerminalOutput
    from pronk.cli.replicas import ReplicaOptions
    from pronk.llm import LLM
    from pronk.server.guardrails import Reflection
    from pronk.server.served_engine import ServedEngine
    from pronk.server.settings import ServerSettings
    from pronk.tokenization.tokenizer import Tokenizer

__all__ = ["needs_serve", "serve"]

_LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")


def _server(help: str, *names: str, **more: Any) -> Any:  # noqa: A002 - typer's word
    return typer.Option(*names, help=help, rich_help_panel="Server", **more)


def _limit(help: str, **more: Any) -> Any:  # noqa: A002 - typer's word
    return typer.Option(help=help, rich_help_panel="RequestLimits", **more)


@shares(load=model_options, options=model_options, spread=replica_options)
def serve(
    load: "Callable[[Progress | None, int, bool], LLM]",
    options: "Callable[[int, bool], dict[str, Any]]",
    spread: "Callable[[], ReplicaOptions]",
    *,
    host: Annotated[str, _server("Address to listen at; 0.0.0.0 is all of this machine.")] = "127.0.0.1",
    port: Annotated[int, _server("Port to listen at; 0 is any that is free.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        list[str], _server("A key that clients must have; may be repeated.", envvar="PRONK_API_KEY", metavar="KEY")
    ] = [],  # noqa: B006 - typer needs a list, and nobody changes it
    api_key_file: Annotated[
        Path | None, _server("Keys, one a line; better than --api-key, which others see in the list of processes.")
    ] = None,
    open_to_all: Annotated[
        bool, _server("Listen beyond this machine without any key.", "--open-to-all", metavar="")
    ] = False,
    name: Annotated[str | None, _server("What clients call the model.", show_default="its folder's name")] = None,
    allow_host: Annotated[
        list[str], _server("A further name that clients may call the server by; may be repeated.", metavar="NAME")
    ] = [],  # noqa: B006
    also: Annotated[
        list[str], _server("A further drafter that requests may ask for; may be repeated.", metavar="DRAFTER")
    ] = [],  # noqa: B006
    guardrails: Annotated[
        str | None,
        _server('A system prompt in front of every conversation: "mistral", or a file with your own.', metavar="WHICH"),
    ] = None,
    moderation_prompt: Annotated[
        Path | None,
        _server("What /v1/moderations asks the model, with {text}, {categories} and {kind}.", show_default="built in"),
    ] = None,
    page: Annotated[bool, _server("A page at / to chat with the model.")] = True,
    prefix_cache: Annotated[bool, _server("Keep what the cache has of texts, for those that begin alike.")] = True,
    max_batch: Annotated[int, _server("Most requests in one pass.", min=1, max=1024)] = 32,
    access_log: Annotated[bool, _server("A line for each request, without its text.")] = False,
    drain: Annotated[float, _server("Seconds that requests have to end in after SIGTERM.", min=0.0)] = 60.0,
    max_requests: Annotated[int, _limit("Most samples at a time, waiting ones included.", min=1)] = 256,
    max_tokens: Annotated[
        int | None, _limit("Most tokens of an answer.", min=1, show_default="the model's context")
    ] = None,
    max_n: Annotated[int, _limit("Most samples of a prompt.", min=1)] = 16,
    max_body: Annotated[int, _limit("Most bytes of a request's body.", min=1024)] = 4 * 2**20,
    max_connections: Annotated[int, _limit("Most open connections.", min=1)] = 512,
    timeout: Annotated[float, _limit("Seconds from a request's arrival to its end.", min=1.0)] = 600.0,
) -> None:
    r"""Serve the model to OpenAI clients, with a page at / to look at.

    [bold]Examples[/]

    pronk serve

    pronk serve --model Qwen/Qwen3-0.6B --host 0.0.0.0 --api-key-file keys.txt

    pronk serve --replicas 2

    curl http://localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "def fib(n):"}'
    """
    from pronk.cli.console import TerminalOutput

    needs_serve("serve")
    from pronk.async_llm import AsyncLLM
    from pronk.parallel.worker_group import is_launched
    from pronk.server.run import Server, check_free
    from pronk.server.service import Service
    from pronk.server.settings import RequestLimits, ServerSettings, read_keys, read_text

    keys = (*api_key, *(() if api_key_file is None else read_keys(api_key_file)))
    near = host in _LOOPBACK
    if not near and not keys and not open_to_all:
        msg = f"host: expected --api-key or --api-key-file beside {host!r}, found none; or say --open-to-all"
        raise OptionError(msg)
    system = _guardrails(guardrails)
    question = None if moderation_prompt is None else read_text("moderation-prompt", moderation_prompt)
    limits = RequestLimits(
        requests=max_requests,
        max_tokens=max_tokens,
        n=max_n,
        body=max_body,
        connections=max_connections,
        seconds=timeout,
    )
    screen = TerminalOutput()
    wanted, own = spread(), options(max_batch, prefix_cache)
    if not is_launched(own["workers"]):  # of torchrun's processes one listens, once all have come
        check_free(host, port)
    with ExitStack() as ends:
        engine: ServedEngine
        if wanted:
            engine = ends.enter_context(wanted.front(screen, own, also=also, max_requests=limits.requests, drain=drain))
        else:
            with screen.loading() as bar:
                llm = load(bar, max_batch, prefix_cache)
            engine = AsyncLLM(llm, max_requests=limits.requests)
        settings = ServerSettings(
            name=name or engine.llm.path.name,
            keys=keys,
            hosts={*_LOOPBACK, *map(str.lower, allow_host)} if near else None,
            limits=limits,
            drafters=tuple(also),
            guardrails=system,
            page=page,
        )
        service = Service(engine, settings, reflection=_reflection(engine.llm.tokenizer, question))
        Server(
            service,
            host=host,
            port=port,
            drain_seconds=drain,
            access_log=access_log,
            on_start=lambda address, at: _greet(screen, settings, address, at),
        ).run()


def needs_serve(command: str) -> None:
    """Hold a command to what it needs.

    Raises:
        OptionError: the extra ``serve`` is not installed.
    """
    from importlib.util import find_spec

    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        msg = f"{command}: expected {', '.join(missing)}, found no such package; run: pip install 'pronk[serve]'"
        raise OptionError(msg)


def _greet(screen: "TerminalOutput", settings: "ServerSettings", host: str, port: int) -> None:
    with suppress(OSError):  # a full disk below the log is no reason to serve nobody
        _say(screen, settings, host, port)


def _say(screen: "TerminalOutput", settings: "ServerSettings", host: str, port: int) -> None:
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    screen.say(f"{settings.name} · {where}/v1" + (f" · a page to look at: {where}/" if settings.page else ""))
    if not settings.keys and settings.hosts is None:
        screen.note("open to whoever can reach this machine: no key is asked for")


def _guardrails(which: str | None) -> str | None:
    if which is None:
        return None
    from pronk.server.guardrails import MISTRAL_PROMPT
    from pronk.server.settings import read_text

    if which == "mistral":
        return MISTRAL_PROMPT
    text = read_text("guardrails", Path(which)).strip()
    if not text:
        msg = f"guardrails: expected a prompt, found an empty file, {which}"
        raise OptionError(msg)
    return text


def _reflection(tokenizer: "Tokenizer", question: str | None) -> "Reflection":
    from pronk.server.guardrails import Reflection

    return Reflection(tokenizer) if question is None else Reflection(tokenizer, question)
