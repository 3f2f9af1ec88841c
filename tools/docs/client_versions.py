"""Write the versions of clients that the slow tests have run into docs/integrations.

    make test-slow
    python tools/docs/client_versions.py

The tests keep the environments in pytest's cache, each with the name and version of its package.
Rows of clients without an environment on this machine stay as they are.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".pytest_cache" / "d" / "clients"
PAGE = ROOT / "docs" / "integrations" / "README.md"
_ROW = re.compile(r"^\| `(.+)` \| (.+) \|$", re.MULTILINE)
_TABLE = re.compile(r"(<!-- versions -->\n).*?(<!-- end of versions -->)", re.DOTALL)


def read_versions(cache: Path) -> dict[str, str]:
    """Return the version of each package that has an environment."""
    files = cache.glob("*/version.json")
    return dict(json.loads(file.read_text(encoding="utf-8")) for file in files)


def update_versions(text: str, versions: dict[str, str]) -> str:
    """Return the text of the page with these versions in its table."""
    table = _TABLE.search(text)
    assert table is not None, "expected a table of versions, found none"
    known = dict(_ROW.findall(table[0])) | versions
    rows = [f"| `{package}` | {version} |\n" for package, version in sorted(known.items())]
    head = "| package | version |\n|---|---|\n"
    return _TABLE.sub(lambda found: found[1] + head + "".join(rows) + found[2], text)


def main() -> None:
    versions = read_versions(CACHE)
    if not versions:
        sys.exit(f"{CACHE}: expected environments of clients, found none; run `make test-slow`")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(update_versions(page, versions), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len(versions)} versions")


if __name__ == "__main__":
    main()
