"""The documentation: links, generated blocks, plots, one page per drafter, and the navigation of
the site.
"""

import importlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from pronk import SamplingParams
from pronk.base import declared_options
from pronk.drafting import REGISTRY, make_drafter
from pronk.serving import LLMOptions

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "benchmarks", "src", "models", "data", "tests")
PAGES = [
    *ROOT.glob("*.md"),
    *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")),
]


@pytest.fixture(scope="module")
def tools() -> Iterator[list[str]]:
    sys.path.insert(0, str(ROOT / "tools" / "docs"))
    yield sys.path
    sys.path.remove(str(ROOT / "tools" / "docs"))


@pytest.fixture
def links(tools: list[str]) -> ModuleType:
    return importlib.import_module("links")


def faults(links: ModuleType, page: Path) -> Iterator[str]:
    """Yield the relative links of a page whose file or heading does not exist."""
    for target, anchor in links.relative_links(page.read_text(encoding="utf-8")):
        path = page.parent / target if target else page
        if not path.exists():
            yield f"{target}: no such file"
        elif (
            anchor
            and path.suffix == ".md"
            and anchor not in links.anchors(path.read_text(encoding="utf-8"))
        ):
            yield f"{target}#{anchor}: no such heading"


def test_links_of_all_pages_resolve(links: ModuleType) -> None:
    found = {str(page.relative_to(ROOT)): [*faults(links, page)] for page in PAGES}
    assert len(found) > 50
    assert {page: lines for page, lines in found.items() if lines} == {}


def reachable(links: ModuleType, start: Path) -> set[Path]:
    """Return the pages that a reader reaches from a page by relative links, the page included.

    Links in the changelog do not count: it has the pages of the last changes only.
    """
    found = set[Path]()
    pending = [start.resolve()]
    while pending:
        page = pending.pop()
        is_page = page.suffix == ".md" and page.is_file() and page.name != "CHANGELOG.md"
        if page in found or not is_page:
            continue
        found.add(page)
        targets = links.relative_links(page.read_text(encoding="utf-8"))
        pending += [(page.parent / target).resolve() for target, _ in targets if target]
    return found


def test_every_page_is_reached_from_the_readme(links: ModuleType) -> None:
    pages = {path.resolve() for path in (ROOT / "docs").rglob("*.md")}
    assert len(pages) > 40
    missing = pages - reachable(links, ROOT / "README.md")
    assert {str(page.relative_to(ROOT)) for page in missing} == set()


def test_pages_without_links_to_them_are_found(links: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "start.md").write_text("[a](a.md#x) [the web](https://example.org/c.md)\n")
    (tmp_path / "a.md").write_text("# X\n\n[back](start.md)\n\n```\n[c](c.md)\n```\n")
    (tmp_path / "c.md").write_text("[a](a.md)\n")
    found = reachable(links, tmp_path / "start.md")
    assert {page.name for page in found} == {"start.md", "a.md"}


def test_broken_links_are_found(links: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page, twice?\n\n[a](page.md#a-page-twice) [b](#nothing) "
        "[c](gone.md)\n\n```\n[d](x.md)\n```\n"
    )
    assert [*faults(links, page)] == ["#nothing: no such heading", "gone.md: no such file"]


def test_means_of_the_plots_are_those_of_the_tables(tools: list[str]) -> None:
    plots = importlib.import_module("plots")
    results = ROOT / "benchmarks" / "results"
    for path in results.glob("*-policy-wall-*.json"):
        table = path.with_suffix(".md").read_text(encoding="utf-8")
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            assert f"| geometric mean | | | {plots.mean(cell):.3f} |" in table


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("Where do I find …?", "where-do-i-find-"),
        ("`auto`: the drafters", "auto-the-drafters"),
        ("What is `pronk bench`'s S?", "what-is-pronk-benchs-s"),
        ("4 bits, 8_bits", "4-bits-8_bits"),
    ],
)
def test_anchors_are_those_of_github(links: ModuleType, heading: str, anchor: str) -> None:
    assert links.slugify(heading) == anchor


def test_paths_in_the_source_exist() -> None:
    """Messages and docstrings that name a file of ``docs`` name one that exists."""
    named = {
        name
        for path in (ROOT / "src").rglob("*.py")
        for name in re.findall(r"(?<![\w/`])docs/[\w/-]+\.md", path.read_text(encoding="utf-8"))
    }
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def unknown_files(markdown: str) -> list[str]:
    """Return the files of code that a page names in backticks, and that no folder has."""
    text = re.sub(r"^```.*?^```\s*?$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    names = re.findall(r"`([\w./-]+\.(?:py|pyi|cpp|inc|h))`", text)
    homes = (ROOT, ROOT / "src" / "pronk")
    return [name for name in names if not any((home / name).is_file() for home in homes)]


def test_files_of_code_are_named_with_their_folder() -> None:
    """A path starts at the repository or at ``src/pronk``. Old entries of the log may name others."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    texts = {
        str(page.relative_to(ROOT)): page.read_text(encoding="utf-8")
        for page in pages
        if page.name != "log.md"
    }
    assert sum(text.count(".py`") for text in texts.values()) > 100
    found = {page: unknown_files(text) for page, text in texts.items()}
    assert {page: names for page, names in found.items() if names} == {}


def test_files_without_their_folder_are_found() -> None:
    page = "`engine/engine.py` `ledger.py` `README.md`\n\n```\n`gone.py`\n```\n"
    assert unknown_files(page) == ["ledger.py"]


def test_every_drafter_has_a_page_with_its_options() -> None:
    overview = (ROOT / "docs" / "methods" / "README.md").read_text(encoding="utf-8")
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "methods").glob("*.md")]
    for name in REGISTRY:
        assert f"`{name}`" in overview, f"{name}: expected a row in docs/methods/README.md"
        if name not in {"autoregressive", "vanilla"}:  # no options; those of glide
            assert any(f"<!-- begin: options {name} -->" in page for page in pages), (
                f"{name}: expected a page"
            )


def test_drafters_in_commands_can_be_made() -> None:
    """Every specification after ``--drafter`` names drafters and options that exist."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    specs = {spec or name for spec, name in re.findall(r'--drafter (?:"([^"]+)"|(\w+))', text)} - {
        "echo(times=2)"
    }
    assert len(specs) > 25
    for spec in specs - {"NAME"}:
        make_drafter(spec)


def test_generated_blocks_are_up_to_date(tools: list[str]) -> None:
    blocks = importlib.import_module("blocks")
    advice = "run python tools/docs/blocks.py"
    for path in blocks.pages():
        text = path.read_text(encoding="utf-8")
        assert blocks.update(text) == text, f"{path.relative_to(ROOT)}: {advice}"
    for name, draw in blocks.PLOTS.items():
        assert (ROOT / "docs" / "plots" / name).read_text(encoding="utf-8") == draw(
            blocks.RESULTS
        ), f"{name}: {advice}"


def test_options_are_read_from_docstrings_of_base_classes(tools: list[str]) -> None:
    blocks = importlib.import_module("blocks")
    assert "| `min_confidence` | `0.0` | a chain ends after" in blocks.options("glide")
    assert "| in parentheses | `draft_model` |" in blocks.options("cape")
    assert blocks.options("autoregressive") == "It has no options."


def test_every_object_of_the_api_page_exists() -> None:
    names = re.findall(
        r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(names) > 10
    for name in names:
        module, _, attribute = name.rpartition(".")
        if not hasattr(importlib.import_module(module), attribute):
            importlib.import_module(name)  # a module


def test_drawing_of_a_tree(tools: list[str]) -> None:
    trees = importlib.import_module("trees")
    from pronk import TokenTree

    tree = TokenTree(tokens=(0, 1, 2, 3, 4, 3), parents=(-1, 0, 1, 1, 0, 4))
    words = ["the", " cat", " sat", " ran", " dog"]
    assert trees.order_leaves(tree.parents) == [0, 0, 0, 1, 2, 2]
    svg = trees.draw(tree, (4, 5), " off", words.__getitem__)
    kinds = re.findall(r'<g class="(\w+)">.*?<text[^>]*>([^<]*)<', svg)
    assert [kind for kind, _ in kinds] == ["root", *["rejected"] * 3, *["accepted"] * 2, "bonus"]
    assert kinds[-1] == ("bonus", "␣off")
    places = re.findall(r'<rect x="(\d+)" y="(\d+)"', svg)
    assert len(set(places)) == 7  # no box covers another
    assert svg.count("<path") == 6
    drawn = ROOT / "docs" / "methods" / "trees" / "example.svg"
    assert drawn.read_text(encoding="utf-8") == trees.example(), "run python tools/docs/trees.py"


def test_pages_and_links_of_the_site_exist(tools: list[str], tmp_path: Path) -> None:
    build = importlib.import_module("build")
    links = importlib.import_module("links")
    build.stage(tmp_path)
    nav = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    pages = [page for _, page in build.pages(nav)]
    assert len(set(pages)) == len(pages) > 40
    assert [page for page in pages if not (tmp_path / page).exists()] == []
    assert {place for source, place in build.PAGES.items() if (ROOT / source).exists()} - set(
        pages
    ) == set()
    docs = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert docs - set(pages) == set(), (
        "a page of docs/ is missing in the navigation of zensical.toml"
    )
    found = {page.name: [*faults(links, page)] for page in tmp_path.rglob("*.md")}
    assert {page: lines for page, lines in found.items() if lines} == {}


def test_llms_txt_lists_all_pages(tools: list[str], tmp_path: Path) -> None:
    build = importlib.import_module("build")
    (tmp_path / "a.md").write_text(
        "# A\n\n```sh\nrun\n```\n\nFirst [words](b.md)\nof a page.\n\nMore.\n"
    )
    (tmp_path / "site").mkdir()
    build.write_llms([{"Part": ["a.md"]}], tmp_path, tmp_path / "site")
    listed = (tmp_path / "site" / "llms.txt").read_text(encoding="utf-8")
    assert listed.endswith("\n## Part\n\n- [A](a.md): First words of a page.\n")
    assert (tmp_path / "site" / "a.md").read_text() == (tmp_path / "a.md").read_text()


@pytest.mark.long
@pytest.mark.slow  # the workflow `docs` builds the site
def test_make_docs(tmp_path: Path) -> None:
    """The generator finds no fault; needs the extra docs."""
    pytest.importorskip("zensical", reason="pip install '.[docs]'")
    done = subprocess.run(
        [sys.executable, "tools/docs/build.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (ROOT / "build" / "site" / "methods" / "suffix" / "index.html").exists()
    page = (ROOT / "build" / "site" / "api" / "index.html").read_text(encoding="utf-8")
    for option in (*declared_options(LLMOptions), *declared_options(SamplingParams)):
        assert f">{option}<" in page, "the signature and the text of each option"
    assert "Annotated" not in page


def long_lines(text: str) -> list[int]:
    """Return the numbers of lines of prose above 120 characters.

    Code, tables, pictures and generated blocks may be longer.
    """
    found = []
    in_code = in_block = False
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*(```|~~~)", line):
            in_code = not in_code
        if line.startswith(("<!-- begin", "<!-- end")):
            in_block = line.startswith("<!-- begin")
        is_prose = not line.lstrip().startswith(("|", "!", "<"))
        if is_prose and not in_code and not in_block and len(line) > 120:
            found.append(number)
    return found


def test_lines_of_prose() -> None:
    long = "a " * 61
    assert long_lines(f"{long}\n```\n{long}\n```\n| {long} |\nshort\n{long}\n") == [1, 7]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    found = {
        str(page.relative_to(ROOT)): long_lines(page.read_text(encoding="utf-8")) for page in pages
    }
    assert {page: lines for page, lines in found.items() if lines} == {}
