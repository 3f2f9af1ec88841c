"""The table of clients' versions: rows are replaced and added, none is lost."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[2] / "tools" / "docs"
PAGE = "a\n\n<!-- versions -->\n| `x` | 1.0 |\n| `z` | 3 |\n<!-- end of versions -->\nb\n"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("client_versions")


def test_versions_of_environments(script: ModuleType, tmp_path: Path) -> None:
    for folder, package, version in (("a", "x", "1.1"), ("b", "@o/y", "2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "version.json").write_text(json.dumps([package, version]))
    versions = script.read_versions(tmp_path)
    updated = script.update_versions(PAGE, versions)
    rows = "| `@o/y` | 2 |\n| `x` | 1.1 |\n| `z` | 3 |\n"
    table = f"| package | version |\n|---|---|\n{rows}"
    assert updated == f"a\n\n<!-- versions -->\n{table}<!-- end of versions -->\nb\n"
    assert script.update_versions(updated, {}) == updated
