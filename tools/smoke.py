"""Check an installation of pronk with a small model: kernels, and drafting that changes no token.

    python tools/smoke.py models/pronk-tiny

Run the script outside of the repository's ``src``, so that the installed package is imported. The
script prints one line, or fails with an error.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import pronk
from pronk import LLM, SamplingParams

PROMPT = "def fibonacci(n):"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    options = parser.parse_args()
    assert version("pronk") == pronk.__version__, "metadata and package have different versions"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm = LLM(options.model, threads=1)
    steps = []
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=48, temperature=temperature, seed=7)
        drafted = llm.generate(PROMPT, params, drafter="suffix")
        plain = llm.generate(PROMPT, params, drafter="autoregressive")
        assert len(plain.token_ids) > 0
        assert drafted.token_ids == plain.token_ids, "drafting changed the text"
        steps.append(f"{drafted.stats.step_compression:.2f}")
    command = [sys.executable, "-m", "pronk", "--version"]
    printed = subprocess.check_output(command, text=True)  # noqa: S603 - our own command
    assert printed == f"pronk {pronk.__version__}\n"
    label = f"pronk {pronk.__version__} on {sys.platform}, {llm.kernels}"
    print(f"{label}: {', '.join(steps)} tokens per forward pass")


if __name__ == "__main__":
    main()
