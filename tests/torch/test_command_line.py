"""The command line with torch: names of devices, and missing kernels."""

import subprocess
import sys

from cli import test_mistakes as mistakes
from command_line import Command


def test_misspelled_devices_get_the_nearest(command: Command) -> None:
    mistakes.test_misspelled_names_get_the_nearest(
        command, ["generate", "x", "--device", "cdua"], "cuda"
    )


def test_missing_kernels_are_one_line_and_no_obstacle() -> None:
    code = """
from pathlib import Path
from pkgutil import resolve_name
from pronk.kernels import library
library.installed_library = lambda: Path("nowhere") / "libpronk.so"
from pronk.cli.main import main
main(["generate", "--model", "pronk-tiny", "--max-tokens", "2", "--stats", "def f"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    warning, figures = done.stderr.splitlines()
    assert warning.startswith("pronk: warning: found no compiled kernels at nowhere")
    assert "torch computes instead" in warning
    assert figures.endswith("kernels torch")
