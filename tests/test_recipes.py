"""Recipes of Homebrew and conda: finished by ``tools/recipes.py``, with pronk's own requirements."""

import shutil
import subprocess
import sys
import tomllib
from hashlib import sha256
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
CONTENT = b"a source archive"


def run_tool(archive: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools" / "recipes.py", archive, "--out", out]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the recipes of a version 9.8.7."""
    folder = tmp_path_factory.mktemp("recipes")
    archive = folder / "pronk-9.8.7.tar.gz"
    archive.write_bytes(CONTENT)
    assert run_tool(archive, folder).returncode == 0
    return folder


def test_conda_states_the_requirements_of_pyproject(recipes: Path) -> None:
    recipe = yaml.safe_load((recipes / "conda" / "recipe.yaml").read_text())
    assert recipe["context"]["version"] == "9.8.7"
    assert recipe["source"]["sha256"] == sha256(CONTENT).hexdigest()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # conda has underscores where PyPI's names have hyphens.
    wanted = {
        f"{requirement.name.replace('-', '_')} {requirement.specifier}"
        for requirement in map(Requirement, project["dependencies"])
    }
    assert {*recipe["requirements"]["run"]} == {*wanted, f"python {project['requires-python']}"}
    assert recipe["about"]["license"] == project["license"]


def test_homebrew(recipes: Path) -> None:
    formula = (recipes / "homebrew" / "pronk.rb").read_text()
    assert f'sha256 "{sha256(CONTENT).hexdigest()}"' in formula
    assert "pronk-9.8.7.tar.gz" in formula
    assert "@" not in formula.replace("python@3.13", "")
    if ruby := shutil.which("ruby"):
        subprocess.run([ruby, "-c", recipes / "homebrew" / "pronk.rb"], check=True)


@pytest.mark.parametrize(
    ("name", "found"),
    [("pronk.zip", "found pronk.zip"), ("pronk-1.0.tar.gz", "run make wheels")],
)
def test_wrong_archives(name: str, found: str, tmp_path: Path) -> None:
    result = run_tool(tmp_path / name, tmp_path)
    assert result.returncode == 1
    assert found in result.stderr
    assert result.stderr.count("\n") == 1
