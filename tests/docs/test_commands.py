"""Every shell command of the README, of CONTRIBUTING.md and of ``docs/`` is understood by the
program that it names.

``tests/docs/test_readme.py`` runs the commands of the README. Here, each command line of all pages
is parsed by the real parser of its program: names of commands, options and their types. ``pronk
generate``, ``explain`` and ``list`` also run, with pronk-tiny and its drafters in place of other
models. A form that no function here knows is an error.
"""

import argparse
import ast
import importlib.util
import json
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import typer

from adapters import write_adapter
from command_line import Command
from fenced_blocks import PAGES, ROOT, SHELL, blocks_of
from pronk import LLM
from pronk.checkpoint.hub.clone_models import tiny_model
from pronk.cli.main import app
from pronk.server.protocol.completions import CompletionRequest
from pronk.server.protocol.infill import InfillRequest
from pronk.server.protocol.ollama import PullRequest
from pronk.server.protocol.small_routes import RerankRequest

Words = list[str]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Programs of other projects: their options cannot be checked here.
FOREIGN = {
    "git",
    "guidellm",
    "transformers",
    "llama_cpp.server",
    "llm",
    "aider",
    "lm_eval",
    "claude",
    "codex",
    "open-webui",
}
PEERS = ("llama_cpp",)  # packages that scripts import before they parse their arguments


def split_lines(text: str) -> list[Words]:
    """Return the words of each command of a block; comments are left out, ``&&`` separates two
    commands.
    """
    commands: list[Words] = []
    for line in text.replace("\\\n", " ").splitlines():
        commands.append([])
        for word in shlex.split(line, comments=True):
            if word == "&&":
                commands.append([])
            else:
                commands[-1].append(word)
    return [words for words in commands if words]


def fenced_commands() -> list[tuple[str, Words]]:
    """Return the commands of all shell blocks, each with its page and line."""
    return [
        (f"{block.place} {shlex.join(words)}", words)
        for page in PAGES
        for block in blocks_of(page)
        if block.language in SHELL
        for words in split_lines(block.text)
    ]


COMMANDS = fenced_commands()


def check_pronk(words: Words) -> None:
    """Parse the arguments of ``pronk``; raise if there is no such command, option or choice."""
    parse(typer.main.get_command(app), "pronk", words)


def parse(found: Any, name: str, words: Words, parent: Any = None) -> None:
    with found.make_context(name, [*words], parent=parent) as context:
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        group = context.command
        if rest and hasattr(group, "commands"):
            name, subcommand, arguments = group.resolve_command(context, rest)
            parse(subcommand, name, arguments, context)


class ParsedError(Exception):
    """A script has parsed its arguments."""


def stop_after(parse_arguments: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that parses arguments and then raises ``ParsedError``."""

    def parse_and_stop(*args: Any, **options: Any) -> Any:
        parse_arguments(*args, **options)
        raise ParsedError

    return parse_and_stop


def check_script(path: str, words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a script of the repository until it has parsed its arguments."""
    if not words:
        # it may take no arguments, and would run
        ast.parse((ROOT / path).read_text(encoding="utf-8"))
        return
    for method in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(
            argparse.ArgumentParser, method, stop_after(getattr(argparse.ArgumentParser, method))
        )
    monkeypatch.setattr(sys, "argv", [path, *words])
    monkeypatch.syspath_prepend(str((ROOT / path).parent))
    for package in PEERS:
        if importlib.util.find_spec(package) is None:
            monkeypatch.setitem(sys.modules, package, MagicMock())
    with pytest.raises(ParsedError):
        runpy.run_path(str(ROOT / path), run_name="__main__")


def check_python(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    if words[0] == "-c":
        compile(words[1], "python -c", "exec")
    elif words[:2] == ["-m", "pronk"]:
        check_pronk(words[2:])
    elif words[0] == "-m":
        assert words[1] in FOREIGN
    else:
        check_script(words[0], words[1:], monkeypatch)


def check_pip(words: Words) -> None:
    """Accept this clone with extras that exist: no index has pronk."""
    assert words[0] == "install"
    (target,) = [word for word in words[1:] if word != "-e"]
    found = re.fullmatch(r"\.(?:\[([\w,]+)\])?", target)
    assert found is not None, f"{target}: expected . or .[extra]; pronk is installed from a clone"
    assert {*(found[1] or "").split(",")} - {""} <= PROJECT["optional-dependencies"].keys()


def check_make(words: Words) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = [word for word in words if "=" not in word]
    assert all(
        re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE) for target in targets
    ), targets


def check_curl(words: Words) -> None:
    """Validate the body of a request to a server on this machine."""
    path = re.sub(r"^http://(127\.0\.0\.1:8000|localhost:11434)", "", words[0])
    body = words[words.index("-d") + 1]
    request = {
        "/v1/completions": CompletionRequest,
        "/v1/rerank": RerankRequest,
        "/infill": InfillRequest,
        "/api/pull": PullRequest,
    }[path]
    request.model_validate(json.loads(body))


def check_torchrun(words: Words) -> None:
    check_pronk(words[words.index("-m") + 2 :])


def check_ray_serve(words: Words) -> None:
    """Look for the application of ``serve run MODULE:NAME``, without starting Ray."""
    assert words[0] == "run"
    module, _, name = words[1].partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    defined = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert name in defined
    assert all("=" in word for word in words[2:])


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[Words], None]]:
    """Return the check of each program's arguments."""
    own: dict[str, Callable[[Words], None]] = {
        "pronk": check_pronk,
        "python": lambda words: check_python(words, monkeypatch),
        "pip": check_pip,
        "make": check_make,
        "curl": check_curl,
        "torchrun": check_torchrun,
        "serve": check_ray_serve,
    }
    return own | {program: lambda _: None for program in FOREIGN}


@pytest.mark.parametrize(("place", "words"), COMMANDS, ids=[place for place, _ in COMMANDS])
def test_commands_are_understood(
    checks: dict[str, Callable[[Words], None]], place: str, words: Words
) -> None:
    while "=" in words[0]:  # an environment variable of the command
        words = words[1:]
    assert words[0] in checks, (
        f"{words[0]}: expected a check of this program; add one to the fixture checks"
    )
    checks[words[0]](words[1:])


def test_mistakes_in_commands_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (
        ["generat", "x"],
        ["generate", "x", "--no-such"],
        ["train", "nothing"],
        ["bench", "--limit", "x"],
    ):
        with pytest.raises(typer.TyperException):
            check_pronk(wrong)
    for wrong in (["install", "pronk"], ["install", "pronk[serve]"], ["install", ".[nothing]"]):
        with pytest.raises(AssertionError):
            check_pip(wrong)
    with pytest.raises(SystemExit):
        check_script("benchmarks/repetition.py", ["--no-such"], monkeypatch)
    with pytest.raises(FileNotFoundError):
        check_script("benchmarks/absent.py", [], monkeypatch)


def test_no_page_installs_pronk_from_an_index() -> None:
    assert [
        page.name for page in PAGES if re.search(r"pronk\[\w+\]", page.read_text(encoding="utf-8"))
    ] == []


def test_all_blocks_are_found() -> None:
    """No block of a known language is indented or has another mark, so that it would be left
    out.
    """
    assert len(COMMANDS) > 90
    for page in PAGES:
        content = page.read_text(encoding="utf-8")
        marks = re.findall(
            r"^[ \t>]*(?:```|~~~)[ ]*(?:sh|bash|shell|console|python|py)\b", content, re.MULTILINE
        )
        assert len(marks) == sum(
            block.language in (*SHELL, "python") for block in blocks_of(page)
        ), page


# Folders of pronk-tiny's drafters, by the name of the drafter in a specification such as
# kangaroo(model='run/export').
TINY_DRAFTERS = {
    "draft_model": "pronk-tiny-draft",
    "glide": "pronk-tiny-glide",
    "kangaroo": "pronk-tiny-kangaroo",
    "medusa": "pronk-tiny-medusa",
    "multi_token": "pronk-tiny-multi-token",
}
# Drafters that pronk-tiny has no head for, and an option that it has no tokens for.
WITHOUT_TINY = ("eagle3", "mtp", "gemma4_assistant", "--suffix")
MANY_PROCESSES = "--workers"  # tests/parallel has them
ON_A_GPU = "--device"  # tests/gpu
RUN = {"generate", "explain", "list"}
TO_RUN = [
    (place, words)
    for place, words in COMMANDS
    if words[0] == "pronk" and words[1] in RUN
    if not {MANY_PROCESSES, ON_A_GPU} & {*words}
    and not any(name in word for name in WITHOUT_TINY for word in words)
]


def replace_models(words: Words) -> Words:
    """Return the words with pronk-tiny as the model, its drafters as theirs, and a context that it
    has.
    """
    replaced = list[str]()
    for option, word in zip(["", *words], words, strict=False):
        if option == "--model":
            replaced.append("pronk-tiny")
        elif option == "--context":
            replaced.append("256")
        elif option == "--drafter":
            replaced.append(
                re.sub(
                    r"(\w+)\(model='[^']*'",
                    lambda found: f"{found[1]}(model='{TINY_DRAFTERS[found[1]]}'",
                    word,
                )
            )
        else:
            replaced.append(word)
    return replaced


@pytest.fixture(scope="module")
def documented_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the pages name."""
    folder = tmp_path_factory.mktemp("files")
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 4}},
        "required": ["name"],
    }
    (folder / "person.json").write_text(json.dumps(schema))
    (folder / "sums.lark").write_text("start: /[0-9]/")
    (folder / "main.py").write_text("print(1)\n")
    (folder / "store").symlink_to(tiny_model() / "datastore")
    for seed, name in enumerate(("sql-lora", "notes-lora")):
        write_adapter(folder / name, tiny_model(), seed=seed)
    proposer: Any = LLM(threads=1).get_proposer("recycling(shared=True)")
    proposer.save(folder / "table.safetensors")
    return folder


@pytest.mark.parametrize(("place", "words"), TO_RUN, ids=[place for place, _ in TO_RUN])
def test_commands_run(
    command: Command,
    documented_files: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    words: Words,
) -> None:
    monkeypatch.chdir(documented_files)
    max_tokens = () if words[1] == "list" else ("--max-tokens", "8")
    code, out, err = command(*replace_models(words[1:]), *max_tokens)
    assert code == 0, err
    assert out


def inline_commands() -> list[tuple[str, str]]:
    """Return commands in code spans of prose and tables, each with its page."""
    found = []
    for page in PAGES:
        prose = re.sub(
            r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
        )
        spans = re.findall(r"`((?:pronk|pip install|make|python|\.venv/bin/\w+) [^`]+)`", prose)
        found += [(page.relative_to(ROOT).as_posix(), span) for span in dict.fromkeys(spans)]
    return found


def check_span(span: str, checks: dict[str, Callable[[Words], None]]) -> None:
    """Check names only: a span in prose may leave out arguments, or have words in capitals in their
    places.
    """
    words = shlex.split(span.replace("…", "X").partition(" && ")[0])
    if words[0] == "pronk":
        check_names(words[1:])
    elif words[0] == "python" and words[1].endswith(".py"):
        assert (ROOT / words[1]).is_file()
    elif words[0] == "pip" and words[2].startswith((".", "pronk")):
        checks["pip"](words[1:])
    elif words[0] == "make":
        checks["make"](words[1:])


def check_names(words: Words) -> None:
    """Check the names of commands and options of ``pronk``."""
    found: Any = typer.main.get_command(app)
    context = found.make_context("pronk", ["list"])
    while words and words[0] in getattr(context.command, "commands", ()):
        subcommand = context.command.commands[words.pop(0)]
        context = subcommand.make_context(
            subcommand.name, [], parent=context, resilient_parsing=True
        )
    assert context.parent is not None or words[0].isupper() or words[0].startswith("-"), words
    known = {
        name for each in context.command.params for name in (*each.opts, *each.secondary_opts)
    } | {"--help"}
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    assert not [name for name in options if name not in known and not words[0].isupper()], options


INLINE = inline_commands()


@pytest.mark.parametrize(("page", "span"), INLINE, ids=[f"{page} {span}" for page, span in INLINE])
def test_names_in_prose_exist(
    checks: dict[str, Callable[[Words], None]], page: str, span: str
) -> None:
    check_span(span, checks)
