"""``pronk batch``: answer a file of requests in OpenAI's batch format."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from pronk import OptionError
from pronk.base import refuse
from pronk.base.checks import require_extra
from pronk.commands import (
    Progress,
    announce,
    interruptible,
    option,
    serving_options,
    shares,
    status_bar,
)
from pronk.server.cli.replicas import ReplicaOptions
from pronk.server.cli.serve import SERVER_MODULES

if TYPE_CHECKING:
    from pronk import LLM
    from pronk.server.batch import BatchOutput


@shares(load=serving_options, options=serving_options, replication=ReplicaOptions)
def batch(
    load: "Callable[[Progress | None], LLM]",
    options: "Callable[[], dict[str, Any]]",
    replication: Callable[[], ReplicaOptions],
    source: Annotated[
        Path,
        typer.Argument(
            help="File of requests, one per line, in OpenAI's batch format.", metavar="IN"
        ),
    ],
    target: Annotated[
        Path, typer.Argument(help="File for the answers, one per line.", metavar="OUT")
    ],
    *,
    name: Annotated[
        str | None, option("Name of the model in requests.", show_default="name of its folder")
    ] = None,
) -> None:
    r"""Answer a file of requests.

    Each answer is written as soon as it is complete. After an interrupt, run the same command
    again: requests with an answer in OUT are skipped.

    [bold]Examples[/]

    pronk batch in.jsonl out.jsonl

    pronk batch --replicas 2 in.jsonl out.jsonl

    echo '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "def
    f("}}' > in.jsonl
    """
    from pronk.commands import TerminalOutput

    require_extra("batch", "serve", *SERVER_MODULES)
    from pronk.checkpoint import model_label
    from pronk.server.batch import BatchOutput, read_batch

    if source.resolve() == target.resolve():
        problem = f"expected another file than IN, found {target} twice; choose another file"
        refuse("OUT", problem, OptionError)
    # The whole file is checked before the model is loaded.
    ids = [line.custom_id for line in read_batch(source)]
    screen = TerminalOutput()
    with BatchOutput(target) as answers:
        done = len(answers.answered_ids.intersection(ids))
        if done == len(ids):
            screen.say(f"nothing to do: {target} has the answers to all {done} requests")
            return
        on_interrupt = (
            "interrupted; the same command continues with the requests that have no answer in "
            f"{target}"
        )
        with interruptible(on_interrupt):
            if replicas := replication():
                cluster = replicas.connect(screen, options())
                with cluster as (path, plan), _progress_bar(done, len(ids)) as progress:
                    from pronk.server.replicas.batch import run_on_replicas

                    lines = read_batch(source)
                    label = name or model_label(path)
                    refused = run_on_replicas(plan, label, lines, answers, progress)
            else:
                with screen.loading() as bar:
                    llm = load(bar)
                label = name or model_label(llm.path)
                with _progress_bar(done, len(ids)) as progress:
                    refused = _run_in_process(llm, label, source, answers, progress)
    report = f"{len(ids) - done} answers in {target}"
    if refused:
        report += f", {refused} of them refusals"
    screen.say(report)


@contextmanager
def _progress_bar(done: int, total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar of the answers; yield a function that counts one more answer."""
    num_answered = count(done + 1)
    screen = Console(stderr=True)
    with status_bar(screen) as status:
        work = f"{total - done} requests"
        bar = announce(screen, status, work, "fewer requests, or a smaller max_tokens in them")
        bar("requests", done, total)
        yield lambda: bar("requests", next(num_answered), total)


def _run_in_process(
    llm: "LLM", name: str, source: Path, answers: "BatchOutput", progress: Callable[[], None]
) -> int:
    import asyncio

    from pronk.server.batch import batch_service, run_batch

    # Twice the engine's batch size, so that a waiting request can start as soon as another ends.
    max_concurrent = 2 * llm.engine.scheduler.max_batch

    async def main() -> int:
        service = batch_service(llm, name)
        try:
            return await run_batch(
                service, source, answers, max_concurrent=max_concurrent, progress=progress
            )
        finally:
            service.close()
            await service.engine.close()

    return asyncio.run(main())
