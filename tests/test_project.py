"""Rules of the project itself: its public surface, its layout, what its own documents claim."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import pronk
import pronk.drafters

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "pronk"
MODULES = sorted(SOURCE.rglob("*.py"))
MAX_LINES = 400
EXTRAS = {"gguf", "llama_cpp", "openvino", "openvino_genai", "openvino_tokenizers"}  # not installed for the tests

# The first hands its environment on to another program, and reads nothing from it; the second is run by an
# installation, which names its compiler there.
HANDS_ON_ENVIRONMENT = {"bench/peers/process.py", "kernels/build.py"}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def test_public_surface_is_exactly_this() -> None:
    assert set(pronk.__all__) == {
        "LLM", "Completion", "Piece", "SamplingParams", "TokenTree",
        "Autoregressive", "Beam", "Cape", "DraftModel", "Drafter", "FirstOf", "GaussSeidel", "Glide",
        "Jacobi", "Kangaroo", "Lookahead", "Medusa", "Merged", "MultiToken", "PromptLookup", "Recycling", "Retrieval",
        "Staged", "Suffix", "Threshold", "Vanilla",
        "PronkError", "CacheFullError", "CheckpointError", "ConfigError", "OptionError", "PromptError",
        "TokenizerError", "__version__",
    }  # fmt: skip
    for name in pronk.__all__:
        assert getattr(pronk, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        pronk.nonsense  # noqa: B018


def test_drafters_by_name() -> None:
    assert set(pronk.drafters.REGISTRY) == {
        "autoregressive", "beam", "cape", "draft_model", "first_of", "gauss_seidel", "glide", "jacobi", "kangaroo",
        "lookahead", "medusa", "merged", "multi_token", "prompt_lookup", "recycling", "retrieval", "staged", "suffix",
        "threshold", "vanilla",
    }  # fmt: skip
    for name, drafter in pronk.drafters.REGISTRY.items():
        assert drafter.name == name


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_module(path: Path) -> None:
    """Every module says what it is, is short, and exports what it says it exports."""
    assert path.read_text(encoding="utf-8").count("\n") <= MAX_LINES
    assert ast.get_docstring(tree(path)), "a module without docstring"
    name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
    try:
        module: ModuleType = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        pytest.skip(f"{error.name} is not installed")
    for exported in getattr(module, "__all__", ()):
        assert hasattr(module, exported), f"{exported} is in __all__ only"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_library_neither_prints_nor_reads_the_environment(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Name):
            assert node.id != "print"
        if isinstance(node, ast.Attribute):
            assert node.attr not in {"environ", "getenv", "environb", "getenvb"} or (
                relative(path) in HANDS_ON_ENVIRONMENT
            )


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == pronk.__version__
    assert (ROOT / "LICENSE").read_text(encoding="utf-8").strip().startswith(project["license"].split("-")[0])


def test_constraints_pin_what_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *(each for group in project["optional-dependencies"].values() for each in group)]
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in asked} - {"pronk"}  # type: ignore[index]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert names | {"build", "ziglang"} == set(pins)  # with which `make wheels` builds
    assert pins["torch"] == "2.13.0"


def test_readme_names_files_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", readme):
        assert (ROOT / target).exists(), target
    for target in re.findall(r"^make (\w+)", readme, re.MULTILINE):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.skipif(not (SOURCE / "bundled" / "pronk-tiny" / "config.json").exists(), reason="no bundled model yet")
def test_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert "tokens per pass of the model" in capsys.readouterr().out
