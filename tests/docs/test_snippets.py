"""Every snippet of Python in the README, in ``docs/`` and in the docstrings of the API page runs.

The snippets of a page share their names, in the order of the page. pronk-tiny stands in for models
that are not on this machine, and a server at a free port for the one at ``http://127.0.0.1:8000``.
"""

import ast
import asyncio
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import pronk
import pronk.llm
from adapters import write_adapter
from fenced_blocks import PAGES, ROOT, Block, blocks_of
from pronk import LLM
from pronk.checkpoint.hub.clone_models import tiny_model
from server.infill_models import write_coder
from server.serving import running
from server.tool_models import tool_model

SNIPPETS = {
    page: [block for block in blocks_of(page) if block.language == "python"] for page in PAGES
}
WITH_SNIPPETS = [page for page, blocks in SNIPPETS.items() if blocks]
ADDRESS = "http://127.0.0.1:8000"
MAX_NOT_RUN = 4  # number of blocks


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in an empty folder; replace models that are not on this machine by pronk-tiny."""
    resolve = pronk.llm.resolve_model

    def resolve_or_replace(name: str | Path | None, **options: Any) -> Path:
        return resolve(
            name if isinstance(name, Path) or Path(str(name)).exists() else "pronk-tiny", **options
        )

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pronk.llm, "resolve_model", resolve_or_replace)
    return tmp_path


def make_adapters(text: str) -> None:
    """Write the adapters of pronk-tiny whose folders a page names, as in ``"./sql-lora"``."""
    for seed, folder in enumerate(sorted({*re.findall(r'"\./([\w-]+-lora)"', text)})):
        write_adapter(Path(folder), tiny_model(), seed=seed)


def start_server(text: str, folder: Path, stack: ExitStack) -> str:
    """Serve pronk-tiny under the name in a page's requests; return the address. Thoughts need
    another template.
    """
    names = {*re.findall(r'model="([^"]+)"', text)}
    assert len(names) == 1, f"expected one model in the requests of the page, found {sorted(names)}"
    llm = tool_model(folder, "deepseek") if "reasoning" in text else LLM(threads=1)
    return stack.enter_context(
        running(llm, name=names.pop(), keys=(), allowed_drafters=("lookahead",))
    ).url


def run(block: Block, names: dict[str, Any], text: str) -> None:
    """Run a block, which may await at its top level; lines in a traceback are those of the page."""
    padded = "\n" * (block.line - 1) + text
    result = eval(compile(padded, str(block.page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if inspect.iscoroutine(result):
        asyncio.run(result)


@pytest.mark.parametrize("page", WITH_SNIPPETS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_snippets_of_a_page_run(page: Path, here: Path) -> None:
    blocks = SNIPPETS[page]
    text = "\n".join(block.text for block in blocks)
    names: dict[str, Any] = {"__name__": "snippets"}
    make_adapters(text)
    model_folder = here / "served"
    model_folder.mkdir()
    with ExitStack() as stack:
        address = start_server(text, model_folder, stack) if ADDRESS in text else ADDRESS
        for block in blocks:
            if block.reason:
                compile(block.text, block.place, "exec")
            else:
                run(block, names, block.text.replace(ADDRESS, address))


def test_few_snippets_are_not_run() -> None:
    assert len(WITH_SNIPPETS) > 8
    skipped = [block.place for blocks in SNIPPETS.values() for block in blocks if block.reason]
    assert len(skipped) <= MAX_NOT_RUN, skipped


def test_results_in_comments(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The walk in docs/concepts.md prints what its comment says."""
    (block,) = SNIPPETS[ROOT / "docs" / "concepts.md"]
    names: dict[str, Any] = {}
    run(block, names, block.text)
    path, tokens = names["verify_tree"](names["tree"], lambda node: names["target"][node])
    assert path == (4, 5)
    assert tokens == tuple(names[word] for word in ("DOG", "RAN", "OFF"))
    assert str(path) in capsys.readouterr().out


def documented_objects() -> Iterator[tuple[str, Any]]:
    """Yield the objects of docs/api.md and their public members, by name."""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for name in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE):
        module, _, attribute = name.rpartition(".")
        found = getattr(
            importlib.import_module(module), attribute, None
        ) or importlib.import_module(name)
        yield name, found
        for member, value in vars(found).items():
            if not member.startswith("_") and (inspect.isfunction(value) or inspect.isclass(value)):
                yield f"{name}.{member}", value


def literal_blocks(docstring: str) -> Iterator[str]:
    """Yield the indented texts after ``::`` that are Python."""
    for found in re.findall(r"::\n\n((?:[ ]{4}.*\n|\n)+)", inspect.cleandoc(docstring) + "\n"):
        text = textwrap.dedent(found)
        try:
            ast.parse(text)
        except SyntaxError:
            continue  # a drawing
        yield text


EXAMPLES = [
    (name, text)
    for name, found in documented_objects()
    for text in literal_blocks(inspect.getdoc(found) or "")
]


@pytest.mark.parametrize(("name", "text"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_examples_of_docstrings_run(name: str, text: str, here: Path) -> None:
    names = {public: getattr(pronk, public) for public in pronk.__all__} | {
        "llm": LLM(write_coder(here / "coder") if name == "pronk.LLM.infill" else None, threads=1),
        "Path": Path,
    }
    exec(compile(text, name, "exec"), names)


def test_docstrings_have_examples() -> None:
    assert "pronk.LLM" in {name for name, _ in EXAMPLES}
