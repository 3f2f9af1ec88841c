"""Build the documentation's site from the Markdown files of the repository: ``make docs``.

    python tools/docs/build.py    # into build/site

The pages are the files that GitHub shows, with their links changed to the places of the site. Files
outside ``docs/`` that a page links to are added: README, results, the page of the kernels, source
files. ``llms.txt`` lists the pages, ``llms-full.txt`` has their text, and the Markdown of each page
is a file of the site, too. A warning of the generator is an error, and nothing is fetched.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from links import map_links, relative_links, title

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "zensical.toml"
PAGES = {  # places in the site; other files of docs/ keep theirs
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "src/pronk/kernels/README.md": "kernels.md",
}
PREFIXES = (("docs/", ""), ("benchmarks/results", "results"), ("", "files/"))


def site_path(source: str) -> str:
    """Return the path in the site of a file or folder of the repository; a folder is a page."""
    if (ROOT / source).is_dir():
        source += "/README.md" if (ROOT / source / "README.md").exists() else ".md"
    prefix, folder = next(each for each in PREFIXES if source.startswith(each[0]))
    return PAGES.get(source, folder + source.removeprefix(prefix))


def read(source: str) -> str:
    """Return the text of a page; a folder without a README is a list of its files."""
    path = ROOT / source
    if not path.is_dir():
        return path.read_text(encoding="utf-8")
    if (path / "README.md").exists():
        return (path / "README.md").read_text(encoding="utf-8")
    lines = list[str]()
    for file in sorted(path.iterdir()):
        link = f"- [{file.name}]({path.name}/{file.name})"
        if file.suffix == ".md":
            lines.append(f"{link}: {file.stem}")
        elif file.suffix in {".py", ".json", ".svg"}:
            lines.append(link)
    return "\n".join([f"# Files of {source}", "", *lines, ""])


def resolve(source: str, target: str) -> str:
    """Return the file of the repository to which a relative link in ``source`` points."""
    return normpath(f"{PurePosixPath(source).parent}/{target}")


def move_links(text: str, source: str) -> str:
    """Return the text of a page with links to the paths of the site.

    A label that is a file's name becomes the title of the file.
    """
    folder = str(PurePosixPath(site_path(source)).parent)

    def change(label: str, target: str) -> tuple[str, str]:
        path, mark, anchor = target.partition("#")
        if not path:
            return label, target
        linked = resolve(source, path)
        if re.fullmatch(r"[\w./-]+\.md", label):
            label = title(read(linked)) or label
        return label, relpath(site_path(linked), folder) + mark + anchor

    return map_links(text, change)


def stage(out: Path) -> None:
    """Write the pages, and all files that they link to, into an empty folder."""
    files = [path for path in (ROOT / "docs").rglob("*") if path.is_file()]
    pending = [path.relative_to(ROOT).as_posix() for path in files]
    pending += [source for source in PAGES if (ROOT / source).exists()]
    seen = set(pending)
    while pending:
        source = pending.pop()
        place = out / site_path(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.suffix != ".md":
            shutil.copyfile(ROOT / source, place)
            continue
        text = read(source)
        place.write_text(move_links(text, source), encoding="utf-8")
        found = {resolve(source, path) for path, _ in relative_links(text) if path}
        pending += sorted(each for each in found - seen if (ROOT / each).exists())
        seen |= found


def pages(nav: list[Any], section: str = "Start") -> Iterator[tuple[str, str]]:
    """Yield the outermost section and the file of every page in the navigation."""
    for each in nav:
        if isinstance(each, str):
            yield section, each
        else:
            ((name, children),) = each.items()
            if isinstance(children, str):
                yield section, children
            else:
                yield from ((name, page) for _, page in pages(children))


def summary(markdown: str) -> str:
    """Return the first paragraph below the title, in one line."""
    for paragraph in markdown.split("\n\n")[1:]:
        is_text = paragraph[:1].isalnum() or paragraph.startswith("`")
        if is_text and not paragraph.startswith("```"):
            line = " ".join(paragraph.split())
            return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line)
    return ""


def write_llms(nav: list[Any], staged: Path, site: Path) -> None:
    """Write ``llms.txt``, ``llms-full.txt``, and the Markdown of every page of the navigation."""
    index = ["# pronk", "", f"> {summary(read('README.md'))}"]
    full = []
    section = ""
    for each, page in pages(nav):
        if each != section:
            index += ["", f"## {each}", ""]
            section = each
        text = (staged / page).read_text(encoding="utf-8")
        (site / page).write_text(text, encoding="utf-8")
        index.append(f"- [{title(text)}]({page}): {summary(text)}")
        full.append(text.strip())
    (site / "llms.txt").write_text("\n".join(index) + "\n", encoding="utf-8")
    (site / "llms-full.txt").write_text("\n\n---\n\n".join(full) + "\n", encoding="utf-8")


def main() -> None:
    staged = ROOT / "build" / "pages"
    site = ROOT / "build" / "site"
    shutil.rmtree(staged, ignore_errors=True)
    stage(staged)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=ROOT, check=False)  # noqa: S603 - fixed arguments
    if done.returncode:
        sys.exit(done.returncode)
    config = tomllib.loads(CONFIG.read_text(encoding="utf-8"))
    write_llms(config["project"]["nav"], staged, site)


if __name__ == "__main__":
    main()
