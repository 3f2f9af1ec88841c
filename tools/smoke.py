"""Check an installation of pronk with a small model: kernels, and drafting that changes no token.

    python tools/smoke.py models/pronk-tiny            # an installation with kernels
    python tools/smoke.py models/pronk-tiny --torch    # one without kernels, where torch computes

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
    parser.add_argument(
        "--torch", action="store_true", help="expect an installation without kernels"
    )
    options = parser.parse_args()
    assert version("pronk") == pronk.__version__, "metadata and package have different versions"
    with warnings.catch_warnings():
        # A package without kernels warns that torch computes.
        warnings.simplefilter("ignore" if options.torch else "error")
        llm = LLM(options.model, threads=1)
    assert (llm.kernels == "torch") == options.torch, f"computed by {llm.kernels}"
    steps = []
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=48, temperature=temperature, seed=7)
        drafted = llm.generate(PROMPT, params, drafter="suffix")
        plain = llm.generate(PROMPT, params, drafter="autoregressive")
        assert len(plain.token_ids) > 0
        assert options.torch or drafted.token_ids == plain.token_ids, "drafting changed the text"
        steps.append(f"{drafted.stats.step_compression:.2f}")
    command = [sys.executable, "-m", "pronk", "--version"]
    printed = subprocess.check_output(command, text=True)  # noqa: S603 - our own command
    assert printed == f"pronk {pronk.__version__}\n"
    label = f"pronk {pronk.__version__} on {sys.platform}, {llm.kernels}"
    print(f"{label}: {', '.join(steps)} tokens per forward pass")


if __name__ == "__main__":
    main()
