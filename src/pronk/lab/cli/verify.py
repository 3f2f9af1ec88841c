"""``pronk verify``: check that drafters leave texts unchanged, or a server's determinism."""

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from pronk import OptionError
from pronk.base import refuse
from pronk.base.checks import check_writable
from pronk.commands import (
    INTERRUPTED,
    announce,
    given_options,
    model_options,
    one_model,
    option,
    panel,
    shares,
    status_bar,
)

if TYPE_CHECKING:
    from pronk import LLM
    from pronk.lab.bench.prompts import Prompt
    from pronk.lab.verification import NamedPrompt, VerifyReport, VerifySettings
    from pronk.lab.verification.remote import RemoteReport, RemoteServer, RemoteSettings
    from pronk.serving import Rule

_EXIT_NOT_VERIFIED = 1
_EXIT_NOT_TESTED = 2
_NUM_SAMPLE_PROMPTS = 8  # number of prompts of the sample suite without --limit

# Options of ``pronk verify`` that need ``--url``, and the others that may be given with it.
_REMOTE_ONLY = {"api_key_file", "rounds", "tolerance", "timeout"}
_SHARED = {"url", "model", "as_json", "prompts", "limit", "max_tokens", "seed"}
# Options that may be given with ``--published``: they do not change a model's outputs.
_WITH_PUBLISHED = {"published", "model", "kernels", "threads"}
_server = panel("Server")


def remote_options(
    model: str | None,
    max_tokens: int,
    seed: int,
    *,
    url: Annotated[
        str | None,
        _server(
            "Address of a server of any engine, which is verified instead of a model.",
            metavar="URL",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        _server(
            "File whose first key is sent to the server.", metavar="FILE", show_default="no key"
        ),
    ] = None,
    rounds: Annotated[int, _server("Number of repetitions of each comparison.", min=1)] = 1,
    tolerance: Annotated[
        float, _server("Largest difference of equal log-probabilities.", min=0.0)
    ] = 1e-5,
    timeout: Annotated[float, _server("Seconds to wait for an answer.", min=0.1)] = 120.0,
) -> "tuple[RemoteServer, RemoteSettings] | None":
    """Return the connection to the server to verify, and settings; ``None`` without ``--url``."""
    if url is None:
        return None
    from pronk.lab.verification.remote import RemoteServer, RemoteSettings
    from pronk.server import read_keys

    settings = RemoteSettings(max_tokens, rounds, tolerance=tolerance, seed=seed)
    key = None if api_key_file is None else read_keys(api_key_file)[0]
    return RemoteServer(url, model, key, timeout), settings


@shares(load=model_options, remote=remote_options, without=("drafter", "adapter", "budget"))
def verify(
    command: typer.Context,
    load: "partial[LLM]",
    remote: "partial[tuple[RemoteServer, RemoteSettings] | None]",
    *,
    published: Annotated[
        bool,
        option("Compare this machine's outputs with the published digests instead.", metavar=""),
    ] = False,
    drafter: Annotated[
        list[str] | None,
        option(
            "Drafter to verify: a name, or a name with options; repeatable.",
            show_default="all that support the model",
            metavar="D",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        option("File of prompts.", show_default="sample suite of pronk bench", metavar="FILE"),
    ] = None,
    limit: Annotated[
        int | None,
        option(
            "Number of prompts, spread over their tasks.",
            min=1,
            show_default=f"{_NUM_SAMPLE_PROMPTS} of the sample suite, all of a file",
        ),
    ] = None,
    max_tokens: Annotated[int, option("Number of tokens per text.", min=1)] = 64,
    samples: Annotated[
        int,
        option(
            "Strings to sample per drafter for the test of the distribution, 100 or more; "
            "0 is none.",
            min=0,
        ),
    ] = 2000,
    seed: Annotated[int, option("Seed; the same seed gives the same verdicts.", min=0)] = 0,
    rule: Annotated[
        str, option("Acceptance of draft tokens in sampled texts: coupled, rejection or block.")
    ] = "coupled",
    as_json: Annotated[
        Path | None,
        option(
            "Write the report as JSON; - is standard output, instead of the table.",
            "--json",
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Verify that speculative decoding does not change the output of the model.

    [bold]Same tokens[/]: each drafter's texts, greedy and sampled, alone and in
    a batch, are compared with plain decoding. pronk's kernels must give the same
    bits. On devices that do not promise this, near ties that rounding explains are
    shown and allowed.

    [bold]Same log-probs[/]: log-probabilities of a text are compared with those
    of one forward pass over prompt and text.

    [bold]Distribution[/]: strings sampled with many seeds are tested
    against the exact distribution of the model's logits (chi-square).

    With [bold]--rule rejection[/] or [bold]block[/] sampled tokens depend on
    the draft tokens: only greedy texts are compared, and the test of the
    distribution covers the sampled ones.

    [bold]Accepted[/]: accepted draft tokens. Without any, nothing was tested,
    and the table says so.

    With [bold]--published[/] the outputs of a known model are compared with
    digests of other machines: log-probabilities of a fixed text, and three
    sampled texts. A model without digests gets the line to contribute.

    With [bold]--url[/] a server of any engine is tested for determinism instead:
    the same text alone and in a batch, with and without a cached prefix, at
    different max_tokens, streamed and not; seeds; log-probabilities. --model is
    then the name on the server (default: its first model).

    [bold]Exit codes[/]: 0 verified; 1 not verified: a check failed, or a drafter
    given with --drafter (without the option: every drafter) had no draft token
    accepted in any check; 2 a mistake in the options, a server that cannot be
    tested, or a model without published digests; 130 interrupted, after the results so far.

    [bold]Examples[/]

    pronk verify

    pronk verify --drafter "prompt_lookup(num_tokens=12)" --samples 0

    pronk verify --rule rejection

    pronk verify --model ./checkpoint --device cuda --dtype bfloat16

    pronk verify --published --model smollm2

    pronk verify --url http://127.0.0.1:8000 --json report.json
    """
    if published:
        _check_with_published(command)
        raise typer.Exit(_verify_published(load))
    if as_json is not None and str(as_json) != "-":
        check_writable("json", as_json)
    connection = remote(one_model(load.keywords["model"]), max_tokens, seed)
    _check_given(command, url=connection is not None)
    if connection is not None:
        server_prompts = _select(prompts, limit) if prompts else None
        _verify_remote(*connection, server_prompts, limit, as_json)
    from pronk.commands import TerminalOutput

    with TerminalOutput(stats=False).loading() as loading:
        from pronk.drafting import make_drafter
        from pronk.lab.bench.prompts import encode
        from pronk.lab.verification import NamedPrompt, VerifySettings

        settings = VerifySettings(max_tokens, samples, seed, cast("Rule", rule))
        for spec in drafter or ():
            make_drafter(spec)  # raises for an unknown drafter, before the model is loaded
        texts = _select(prompts, limit)
        llm = load(loading, budget="all")  # with "auto", some draft tokens would not be verified
    named_prompts = [NamedPrompt(prompt.id, encode(llm, prompt)) for prompt in texts]
    raise typer.Exit(_verify_model(llm, drafter, named_prompts, settings, as_json))


def _check_with_published(command: typer.Context) -> None:
    """Raise OptionError for an option that has no effect on ``--published``, or changes outputs."""
    for name in given_options(command):
        if name not in _WITH_PUBLISHED:
            shown = name.replace("_", "-")
            found = f"--{shown}; leave it out"
            refuse(
                "published",
                f"expected only --model, --kernels, --threads, found {found}",
                OptionError,
            )


def _verify_published(load: "partial[LLM]") -> int:
    """Compare the digests of a model's outputs with the published ones; return the exit code."""
    from pronk import BITS
    from pronk.commands import TerminalOutput
    from pronk.reproducibility import (
        current,
        digests,
        digests_line,
        model_hash,
        published_digests,
    )

    with TerminalOutput(stats=False).loading() as loading:
        llm = load(loading, drafter="autoregressive", bits="portable")
    found = digests(llm)
    sha256 = model_hash(llm.path)
    expected = current(published_digests(sha256))
    typer.echo(f"{llm.path.name}: SHA-256 {sha256}, pronk.BITS {BITS}, kernels {llm.kernels}")
    if not expected:
        sys.stderr.write(
            "published: expected digests of this model, found none; add this line to "
            "src/pronk/checkpoint/hub/digests.json and open a pull request\n"
        )
        typer.echo(digests_line(llm.path, sha256, BITS, found))
        return _EXIT_NOT_TESTED
    for name, digest in found.items():
        is_equal = digest == expected[name]
        verdict = "equal" if is_equal else f"expected {expected[name]}, found {digest}"
        typer.echo(f"{name}: {verdict}")
    return 0 if found == expected else _EXIT_NOT_VERIFIED


def _verify_model(
    llm: "LLM",
    drafters: list[str] | None,
    prompts: "list[NamedPrompt]",
    settings: "VerifySettings",
    as_json: Path | None,
) -> int:
    """Verify drafters, show the report, and return the exit code of the process.

    If ``drafters`` is ``None``, all drafters that can run on the model are verified.
    A terminal shows a progress bar, then the table. A pipe or a file gets each row of the table
    when it is complete.
    """
    from pronk.drafting import REGISTRY
    from pronk.lab.verification.table import ReportPrinter, show

    is_streamed = not Console().is_terminal and str(as_json) != "-"
    printer = ReportPrinter(drafters or REGISTRY) if is_streamed else None
    report: VerifyReport | None = None
    code = 0
    try:
        for report in _reports(llm, drafters, prompts, settings):
            if printer is not None:
                printer.update(report)
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:  # the results so far are not lost after an error
        if report is not None:
            _show(report, as_json, show if printer is None else printer.finish)
    if report is None:
        sys.stderr.write("interrupted before anything was verified\n")
    return code or (0 if report is not None and report.passed else _EXIT_NOT_VERIFIED)


def _reports(
    llm: "LLM", drafters: list[str] | None, prompts: "list[NamedPrompt]", settings: "VerifySettings"
) -> "Iterator[VerifyReport]":
    """Yield the report after each group of texts; show a progress bar and the expected duration."""
    from pronk.lab.verification import fitting_drafters, verify_steps
    from pronk.lab.verification.prompts import select_fitting

    names = drafters
    reasons: dict[str, str] = {}
    screen = Console(stderr=True)
    with status_bar(screen) as status:
        if names is None:
            first_prompt = select_fitting(llm, prompts, settings.max_tokens)[0]
            names, reasons = fitting_drafters(llm, first_prompt, settings.rule)
        work = f"{len(prompts)} prompts × {len(names)} drafters"
        shorter = "--drafter NAME, --limit 1, --max-tokens 16, --samples 0"
        progress = announce(screen, status, work, shorter)
        yield from verify_steps(
            llm,
            names,
            prompts,
            settings,
            required=drafters is not None,
            left_out=reasons,
            progress=progress,
        )


def _select(file: Path | None, limit: int | None) -> "list[Prompt]":
    """Return ``limit`` prompts of the file or of the sample suite, spread evenly over the tasks."""
    from pronk.lab.bench.prompts import builtin_prompts, load_prompts

    all_prompts = builtin_prompts() if file is None else load_prompts(file)
    if limit is None:
        limit = _NUM_SAMPLE_PROMPTS if file is None else len(all_prompts)
    ranks: defaultdict[str, count[int]] = defaultdict(count)
    # Sort by the index of a prompt within its task: the first prompt of each task, then the second
    # of each, …
    return sorted(all_prompts, key=lambda prompt: next(ranks[prompt.task]))[:limit]


def _check_given(command: typer.Context, *, url: bool) -> None:
    """Raise OptionError for an option that has no effect on this verification.

    ``url`` is whether ``--url`` is given. With it, a server is verified, and only options for
    servers may be given; without it, a model is verified, and they may not.
    """
    for name in given_options(command):
        shown = name.replace("_", "-")
        if url and name not in _SHARED | _REMOTE_ONLY:
            refuse(
                "url",
                f"expected only options for servers, found --{shown}; leave it out",
                OptionError,
            )
        if not url and name in _REMOTE_ONLY:
            refuse(
                shown,
                "expected --url beside it, found none; add the address of a server",
                OptionError,
            )


def _verify_remote(
    server: "RemoteServer",
    settings: "RemoteSettings",
    prompts: "list[Prompt] | None",
    limit: int | None,
    as_json: Path | None,
) -> None:
    """Verify a server, show the report, and exit the process.

    The texts are those of ``prompts``, or the first ``limit`` built-in ones.
    """
    from pronk.lab.verification.remote import TEXTS, verify_server_steps
    from pronk.lab.verification.remote.table import show_server

    texts = dict([*TEXTS.items()][:limit])
    if prompts is not None:
        texts = {prompt.id: prompt.text or prompt.turns[0] for prompt in prompts}
    report: RemoteReport | None = None
    code = 0
    try:
        screen = Console(stderr=True)
        with server, status_bar(screen) as status:
            shorter = "--limit 1, --max-tokens 16, --rounds 1"
            progress = announce(screen, status, f"{len(texts)} prompts", shorter)
            for report in verify_server_steps(server, texts, settings, progress):  # noqa: B007 - shown below
                pass
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:
        # The results so far are not lost after an error, such as a server that has ended.
        if report is not None:
            _show(report, as_json, show_server)
    if report is None or not report.tested:
        raise typer.Exit(code or _EXIT_NOT_TESTED)
    raise typer.Exit(code or (0 if report.passed else _EXIT_NOT_VERIFIED))


def _show(report: Any, as_json: Path | None, show: Callable[[Any, Console], None]) -> None:
    """Show the table of a report, and write the report as JSON if ``as_json`` is given.

    ``-`` is one line on standard output, in place of the table.
    """
    if str(as_json) == "-":
        typer.echo(json.dumps(report.to_dict(), ensure_ascii=False))
        return
    if as_json is not None:  # before the table, as standard output may be full
        from pronk.base import save_result

        save_result("json", as_json, json.dumps(report.to_dict(), indent=1) + "\n")
    show(report, Console(highlight=False))
