"""The Dockerfile's steps, outside of a container (``tools/dockerfile.py``)."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from scripts import load_script

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools" / "dockerfile.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """Return the module ``tools/dockerfile.py``."""
    return load_script("tools/dockerfile.py")


def test_instructions(tool: ModuleType) -> None:
    text = "# a comment\nFROM a AS b\n# another\nRUN one \\\n    && two\n\nENV A=1 B=2\n"
    assert [*tool.instructions(text)] == [
        ("FROM", "a AS b"),
        ("RUN", "one      && two"),
        ("ENV", "A=1 B=2"),
    ]


def test_folders_of_the_image_are_replaced(tool: ModuleType) -> None:
    folder = Path("/x")
    assert tool.inside("cp /opt/pronk/bin /models", folder) == "cp /x/opt/pronk/bin /x/models"
    assert tool.inside("/home/pronk /modelsx", folder) == "/home/pronk /modelsx"


def test_the_dockerfile_has_the_steps_that_the_tool_needs(tool: ModuleType) -> None:
    steps = [*tool.instructions((ROOT / "Dockerfile").read_text())]
    names = [name for name, _ in steps]
    assert names.count("ENTRYPOINT") == names.count("HEALTHCHECK") == 1
    run = [
        rest
        for name, rest in steps
        if name == "RUN" and not any(each in rest for each in tool.ONLY_IN_IMAGES)
    ]
    assert len(run) == 1
    assert "pip install" in run[0]
    assert tool.environment_of(steps, Path("/x"))["PATH"].startswith("/x/opt/pronk/bin:")


@pytest.mark.slow
def test_the_server_of_the_image_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRONK_KERNELS", "native")
    command = [sys.executable, TOOL, "--model", ROOT / "models" / "pronk-tiny"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "the server answered" in result.stdout
