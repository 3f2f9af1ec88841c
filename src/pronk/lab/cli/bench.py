"""``pronk bench``: measure drafters and other engines on a model and prompts."""

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from pronk import OptionError, PromptError
from pronk.base import describe_error, refuse
from pronk.commands import (
    INTERRUPTED,
    announce,
    given_options,
    model_options,
    panel,
    shares,
    status_bar,
)
from pronk.lab.bench.outputs import Outputs

if TYPE_CHECKING:
    from pronk import LLM
    from pronk.lab.bench.peers.process import PeerSpec
    from pronk.lab.bench.records import Trace
    from pronk.lab.bench.run import Plan

_what = panel("What to measure")
_how = panel("How to measure")
_peers = panel("Other engines", show_default=False)
_output = panel("Output", show_default=False)

# Values that --quick gives to options that the user has not set. A benchmark of smollm2 then takes
# seconds on two threads.
_QUICK: dict[str, Any] = {"limit": 1, "max_tokens": 32, "temperature": [0.0], "repeats": 1}
_QUICK_NOTE = "rough figures of one run per prompt; pronk bench without --quick measures more\n"

_DEFAULT_BATCH = 16  # of ``pronk.LLM``: the option ``max_batch``


def plan(
    drafters: Sequence[str],
    models: Sequence[str] | None,
    *,
    suite: Annotated[
        list[str] | None,
        _what(
            "Name of a file NAME.jsonl in --data, or sample (built in); repeatable.",
            show_default="sample",
        ),
    ] = None,
    data: Annotated[
        Path | None, _what("Folder of suites (NAME.jsonl).", metavar="FOLDER", show_default=False)
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        _what(
            "File of prompts: JSON lines with prompt, turns or messages, or text with one prompt "
            "per line; repeatable.",
            metavar="FILE",
        ),
    ] = None,
    limit: Annotated[
        int | None, _what("Number of prompts per task.", min=1, show_default="all")
    ] = None,
    max_tokens: Annotated[int, _how("Number of tokens per output.", min=1)] = 128,
    temperature: Annotated[
        list[float],
        _how("0 is greedy; above 0 outputs are sampled with --seed; repeatable.", min=0, max=100),
    ] = [0.0, 0.8],  # noqa: B006
    repeats: Annotated[
        int, _how("Runs per method and prompt, from which the spread is computed.", min=1)
    ] = 3,
    batch: Annotated[int, _how("Prompts per forward pass, 1..1024.", min=1, max=1024)] = 1,
    seed: Annotated[
        int, _how("Seed; the same seed gives the same tokens, 0..2^63-1.", min=0, max=2**63 - 1)
    ] = 7,
    ignore_eos: Annotated[
        bool, _how("Continue after the end-of-text token.", "--ignore-eos", metavar="")
    ] = False,
    chat: Annotated[
        bool,
        _how(
            "Use the model's chat template for turns and messages.", "--chat/--no-chat", metavar=""
        ),
    ] = True,
    fit: Annotated[
        bool,
        _how(
            "Cut the middle out of prompts that are too long, instead of skipping them.",
            "--fit",
            metavar="",
        ),
    ] = False,
    minutes: Annotated[
        float | None,
        _how("Time limit per model; at least one prompt is measured.", min=0, show_default="none"),
    ] = None,
    peer: Annotated[
        list[str] | None,
        _peers(
            "transformers, openvino or llama_cpp, each also with the suffix _prompt_lookup; "
            "llama_server, also with the suffix _ngram_simple, _ngram_map_k, _ngram_map_k4v, "
            "_ngram_mod or _ngram_cache; or "
            "all, which is all that read the model (transformers: folders, the others: GGUF "
            "files); repeatable."
        ),
    ] = None,
    peer_python: Annotated[
        list[str] | None,
        _peers("Python interpreter with the engine installed; repeatable.", metavar="ENGINE=PATH"),
    ] = None,
) -> "Plan":
    """Return the drafters, peers, prompts and settings to measure.

    Raises PronkError if one of them is invalid.
    """
    from pronk.lab.bench.measure import Options
    from pronk.lab.bench.prompts import load_tasks
    from pronk.lab.bench.run import Plan, check

    options = Options(
        max_tokens=max_tokens,
        temperatures=tuple(dict.fromkeys(temperature)),
        repeats=repeats,
        batch=batch,
        seed=seed,
        ignore_eos=ignore_eos,
        chat=chat,
        fit=fit,
        minutes=minutes,
    )
    bench_plan = Plan(
        drafters=tuple(drafters),
        tasks=load_tasks(suite, data, prompts or [], limit),
        options=options,
        peers=_choose_peers(peer, models),
        interpreters=_interpreters(peer_python or []),
    )
    check(bench_plan)
    return bench_plan


@shares(load=model_options, make_plan=plan, without=("model", "drafter", "adapter"))
def bench(
    command: typer.Context,
    load: "partial[LLM]",
    make_plan: "partial[Plan]",
    *,
    model: Annotated[
        list[str] | None,
        _what(
            "Name as in pronk pull, folder of a checkpoint, or .gguf file; repeatable.",
            show_default="smollm2",
        ),
    ] = None,
    drafter: Annotated[
        list[str],
        _what(
            'Drafter: a name, or a name with options as in "prompt_lookup(max_ngram=4)"; '
            "repeatable."
        ),
    ] = ["auto"],  # noqa: B006 - typer requires a list; never modified
    as_json: Annotated[
        Path | None,
        _output(
            "Write one JSON document with all results; - is standard output.",
            "--json",
            metavar="FILE",
        ),
    ] = None,
    markdown: Annotated[
        Path | None, _output("Write the tables as Markdown.", metavar="FILE")
    ] = None,
    report: Annotated[
        Path | None, _output("Write an HTML page with plots, FOLDER/index.html.", metavar="FOLDER")
    ] = None,
    trace: Annotated[
        Path | None,
        _output("Write every measurement as JSON lines, as it is made.", metavar="FILE"),
    ] = None,
    resume: Annotated[
        bool,
        _output(
            "Continue the benchmark of --trace, without the prompts that are done.",
            "--resume",
            metavar="",
        ),
    ] = False,
    replay: Annotated[
        Path | None,
        _output("Show the results of a trace again, without measuring.", metavar="FILE"),
    ] = None,
    quick: Annotated[
        bool,
        _how(
            "A rough answer in seconds: one prompt per task, 32 tokens, greedy, one repeat. "
            "Options beside it count.",
            "--quick",
            metavar="",
        ),
    ] = False,
    moderation: Annotated[
        Path | None,
        _what(
            "Measure moderation instead of drafters: JSON lines with text, "
            "and categories or flagged.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measure the gain of speculative decoding on your models and your prompts.

    Every method runs on every prompt, interleaved and repeated, and its tokens are compared with
    those of plain decoding. Failed and skipped (too long) prompts are counted. Ctrl-C shows the
    results so far.

    [bold]Examples[/]

    pronk bench --quick

    pronk bench --limit 2

    pronk bench --model ./checkpoint --prompts mine.jsonl --drafter prompt_lookup --report out

    pronk bench --data suites --suite humaneval --suite gsm8k --limit 10 --peer transformers --json
    figures.json

    pronk bench --replay run.jsonl --report out

    pronk bench --moderation texts.jsonl --model ./checkpoint
    """
    outputs = Outputs(as_json, markdown, report, trace)
    outputs.check()
    if resume and trace is None:
        refuse(
            "resume",
            "expected --trace FILE with it, found none; name the trace to continue",
            OptionError,
        )
    if replay is not None:
        _refuse_ignored(command, "replay", ("replay", "as_json", "markdown", "report"))
        _replay(replay, outputs)
    elif moderation is not None:
        known = ("moderation", "as_json", "markdown", "model", *load.keywords)
        _refuse_ignored(command, "moderation", known)
        _moderate(load, model or [], moderation, outputs)
    else:
        if quick:
            make_plan = _quick_plan(make_plan, command)
        _measure(load, make_plan, drafter, model, outputs, resume=resume, quick=quick)


def _replay(path: Path, outputs: Outputs) -> None:
    """Write the results of the trace file ``path``."""
    from pronk.lab.bench.records import read_trace

    outputs.deliver(read_trace(path))


def _measure(
    load: "partial[LLM]",
    make_plan: "partial[Plan]",
    drafters: list[str],
    models: list[str] | None,
    outputs: Outputs,
    *,
    resume: bool,
    quick: bool,
) -> None:
    """Run the benchmark, and write the results, also if it is interrupted or fails."""
    from pronk.lab.bench.records import Trace
    from pronk.lab.bench.run import run

    records = Trace()
    try:
        screen = Console(stderr=True)
        with status_bar(screen, "MofNCompleteColumn") as bar, ExitStack() as stack:
            bench_plan = make_plan(drafters, models)
            shorter = "--quick, --limit 1, --repeats 1, --max-tokens 32"
            # Methods differ in speed, so each runs once before the estimate.
            status = announce(
                screen, bar, bench_plan.size, shorter, first_part=bench_plan.num_methods
            )
            loaders = _model_loaders(load, models, bench_plan.options.batch)
            arguments = {
                **make_plan.keywords,
                **load.keywords,
                "model": list(loaders),
                "drafter": drafters,
            }
            # The trace stores JSON values, so dumps and loads convert paths to text.
            arguments = json.loads(json.dumps(arguments, default=str))
            records = _open_trace(outputs.trace, arguments if resume else None, stack)
            run(loaders, bench_plan, records, arguments, status)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    finally:
        if records.records:
            outputs.deliver(records.records)
            if quick:
                sys.stderr.write(_QUICK_NOTE)
    _check_measured(records)


def _model_loaders(
    load: "partial[LLM]", models: list[str] | None, batch: int
) -> "dict[str, partial[LLM]]":
    """Return a function for each model that loads it, by the model's name.

    The models take ``batch`` requests at a time, or the default of ``pronk.LLM`` if that is more.
    """
    from pronk.checkpoint import DEFAULT_MODEL

    options: dict[str, Any] = {"max_batch": max(_DEFAULT_BATCH, batch), "drafter": "autoregressive"}
    if not models:
        return {DEFAULT_MODEL: partial(load, model=list[str](), **options)}
    return {name: partial(load, model=[name], **options) for name in models}


def _quick_plan(make_plan: "partial[Plan]", command: typer.Context) -> "partial[Plan]":
    """Return ``make_plan`` with the options of ``--quick`` in place of the defaults."""
    given = given_options(command)
    options = {name: value for name, value in _QUICK.items() if name not in given}
    return partial(make_plan, **options)


def _check_measured(records: "Trace") -> None:
    """Raise PromptError if no prompt was measured."""
    from pronk.lab.bench.records import Sample

    if not any(isinstance(record, Sample) for record in records.records):
        msg = (
            "nothing was measured: expected prompts that fit the model's context with the output, "
            "found none; use --fit"
        )
        raise PromptError(msg)


def _refuse_ignored(command: typer.Context, mode: str, known: Sequence[str]) -> None:
    """Raise OptionError for an option that has no effect with ``--replay`` or ``--moderation``."""
    kinds = "the output" if mode == "replay" else "the model, --json and --markdown"
    for name in given_options(command):
        if name not in known:
            option = name.replace("_", "-")
            refuse(mode, f"expected only options of {kinds}, found --{option}", OptionError)


def _moderate(load: "partial[LLM]", models: Sequence[str], path: Path, outputs: Outputs) -> None:
    """Measure moderation with each model, and write the results."""
    from pronk.base import save_result
    from pronk.lab.bench.moderation import evaluate, read_cases
    from pronk.lab.bench.outputs import STDOUT

    cases = read_cases(path)
    results = []
    screen = Console(stderr=True)
    with status_bar(screen, "MofNCompleteColumn") as bar:
        status = announce(screen, bar, f"{len(cases)} texts", "a file of fewer texts")
        for values in [[name] for name in models] or [list[str]()]:
            llm = load(None, model=values, drafter="autoregressive")
            results.append(evaluate(llm, cases, partial(status, "moderation")))
            llm.close()
    tables = "\n".join(result.to_markdown() for result in results)
    document = {
        "format": "pronk-moderation/1",
        "file": path.name,
        "models": [each.to_dict() for each in results],
    }
    typer.echo(tables if outputs.document != STDOUT else json.dumps(document))
    if outputs.document is not None and outputs.document != STDOUT:
        save_result("json", outputs.document, json.dumps(document) + "\n")
    if outputs.markdown is not None:
        save_result("markdown", outputs.markdown, tables)


def _choose_peers(names: list[str] | None, models: Sequence[str] | None) -> "tuple[PeerSpec, ...]":
    """Return the peers called ``names``; a model on the Hub is downloaded to see its format."""
    from pronk.checkpoint import DEFAULT_MODEL, parse_name, resolve_model
    from pronk.lab.bench.peers.process import choose_peers

    if not names:
        return ()
    paths: list[Path] = []
    for model in models or [DEFAULT_MODEL]:
        is_path = Path(model).exists() or parse_name(model) is None
        paths.append(Path(model) if is_path else resolve_model(model))
    return choose_peers(names, paths)


def _interpreters(pairs: Sequence[str]) -> dict[str, str]:
    """Parse ``["openvino=/opt/python"]`` into ``{"openvino": "/opt/python"}``."""
    interpreters: dict[str, str] = {}
    for pair in pairs:
        engine, _, path = pair.partition("=")
        if not Path(path).is_file():
            refuse(
                "peer-python",
                f"expected ENGINE=PATH with the path of a program, found {pair!r}",
                OptionError,
            )
        interpreters[engine] = path
    return interpreters


def _open_trace(path: Path | None, resumed: dict[str, Any] | None, stack: ExitStack) -> "Trace":
    """Open a trace file for appending; without ``path``, the trace is in memory only.

    If ``resumed``, the options of this command, is given, the file's records of finished prompts
    are kept. Raises OptionError if the benchmark in the file had other options.
    """
    from pronk.lab.bench.records import Trace, read_trace, write_trace
    from pronk.lab.bench.run import resumable_records

    if path is None:
        return Trace()
    try:
        kept = []
        if resumed is not None and path.exists() and path.stat().st_size:
            kept = resumable_records(read_trace(path), resumed, path)
            write_trace(path, kept)
        return Trace(kept, stack.enter_context(path.open("a", encoding="utf-8")))
    except OSError as error:
        msg = (
            f"trace: expected a file that can be written, found: {describe_error(error)}; choose "
            "another path"
        )
        raise OptionError(msg) from error
