"""Fill in the version and the checksum of a source archive in the recipes of ``packaging/``.

python tools/recipes.py dist/pronk-0.3.0.tar.gz --out build/recipes
"""

from __future__ import annotations

import argparse
import re
import sys
from hashlib import file_digest
from pathlib import Path

PACKAGING = Path(__file__).resolve().parents[1] / "packaging"
RECIPES = ("homebrew/pronk.rb", "conda/recipe.yaml")


def main() -> None:
    """Write the finished recipes into a folder, and print their paths."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("archive", type=Path, help="source archive, as make wheels names it")
    parser.add_argument("--out", type=Path, required=True, help="folder of the finished recipes")
    arguments = parser.parse_args()
    match = re.fullmatch(r"pronk-(.+)\.tar\.gz", arguments.archive.name)
    if match is None:
        sys.exit(f"recipes: expected pronk-VERSION.tar.gz, found {arguments.archive.name}")
    if not arguments.archive.is_file():
        sys.exit(f"recipes: expected a file, found none at {arguments.archive}; run make wheels")
    with arguments.archive.open("rb") as file:
        checksum = file_digest(file, "sha256").hexdigest()
    for recipe in RECIPES:
        text = (PACKAGING / recipe).read_text(encoding="utf-8")
        finished = arguments.out / recipe
        finished.parent.mkdir(parents=True, exist_ok=True)
        text = text.replace("@VERSION@", match[1]).replace("@SHA256@", checksum)
        finished.write_text(text, encoding="utf-8")
        print(finished)


if __name__ == "__main__":
    main()
