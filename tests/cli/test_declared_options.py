"""Options of the command line are those of the library: texts, defaults and ranges."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

import pytest
import typer
from typer.main import get_command

from command_line import Command
from pronk import LLM, SamplingParams
from pronk.base.arrays import DTYPES
from pronk.base.options import DeclaredOption, declared_options
from pronk.cli.generate import generate
from pronk.cli.options import NOT_ON_THE_COMMAND_LINE
from pronk.engine.options import LLMOptions
from waiting import HUNG

# Options with another name on the command line, where each value is given by itself.
NAMES = {"adapters": "adapter"}
# Options that only a command for many requests has.
SERVED = {"max_batch", "max_wait", "prefix_cache"}
# Defaults that the command line writes in another way.
WRITTEN: dict[str, Any] = {"weight_cache": "off", "calibration": "on"}
REPEATABLE = (
    "model",
    "adapters",
    "logit_bias",
    "bad_words",
    "stop",
    "stop_token_ids",
    "logprob_token_ids",
)
WRITTEN |= {name: [] for name in REPEATABLE}

OF_LLM = {
    name: each
    for name, each in declared_options(LLMOptions).items()
    if name not in NOT_ON_THE_COMMAND_LINE
}
OF_A_REQUEST = {
    name: each for name, each in declared_options(SamplingParams).items() if name != "guide"
}


def options_of(command: Any) -> Mapping[str, Any]:
    app = typer.Typer(add_completion=False)
    app.command()(command)
    return {each.name: each for each in get_command(app).params}


GENERATE = options_of(generate)


def test_every_option_is_declared_or_a_reason_is_given() -> None:
    assert [each.name for each in fields(LLMOptions)] == [*declared_options(LLMOptions)]
    assert {each.name for each in fields(SamplingParams)} == {*declared_options(SamplingParams)}
    assert all(each.default is not MISSING for each in fields(LLMOptions))
    assert NOT_ON_THE_COMMAND_LINE.keys() < declared_options(LLMOptions).keys()
    assert all(NOT_ON_THE_COMMAND_LINE.values())
    assert not NOT_ON_THE_COMMAND_LINE.keys() & GENERATE.keys()


def assert_same(declared: DeclaredOption, shown: Any, default: object) -> None:
    option = declared.option
    assert shown.help.startswith(option.help)
    assert option.range in ("", "at least 0") or option.range in shown.help.lower()
    assert shown.default == default
    if declared.optional and option.absent:
        assert shown.show_default == option.absent


@pytest.mark.parametrize("name", OF_LLM)
def test_options_of_a_model_are_those_of_the_library(name: str) -> None:
    shown = NAMES.get(name, name)
    declared = OF_LLM[name]
    default = WRITTEN.get(name, declared.default)
    if name in SERVED:
        assert shown not in GENERATE
    else:
        assert_same(declared, GENERATE[shown], default)
    arguments = (LLM.__init__.__doc__ or "").partition("Args:")[2]
    assert f"{name}: {declared.option.help.split()[0]}" in arguments


@pytest.mark.parametrize("name", OF_A_REQUEST)
def test_options_of_a_request_are_those_of_the_library(name: str) -> None:
    declared = OF_A_REQUEST[name]
    assert_same(declared, GENERATE[name], WRITTEN.get(name, declared.default))


@pytest.mark.parametrize(
    "declared",
    [
        each
        for each in (*OF_LLM.values(), *OF_A_REQUEST.values())
        if each.option.low is not None and each.name not in SERVED
    ],
    ids=lambda each: each.name,
)
def test_ranges_are_checked_before_the_model_is_loaded(
    declared: DeclaredOption, command: Command
) -> None:
    """The message names the option as it was typed."""
    check_range(declared, command, "generate", "x")


def check_range(declared: DeclaredOption, command: Command, *words: str) -> None:
    """A value below the range ends a command at once."""
    low = declared.option.low
    assert low is not None
    flag = f"--{declared.name.replace('_', '-')}"
    code, out, err = command(*words, "--model", "no such folder", flag, low - 1)
    assert (code, out) == (2, "")
    assert err.startswith(f"pronk: error: {flag}: expected ")
    assert err.endswith("--help')\n")


def test_data_types_are_those_of_checkpoints() -> None:
    assert declared_options(LLMOptions)["dtype"].choices == ("auto", *DTYPES)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--help"], 0, "Generate text that continues a prompt."),
        (["generate", "--help"], 0, "--threads"),
        (
            [
                "generate",
                "x",
                "--model",
                "./none",
                "--threads",
                "2",
                "--top-p",
                "0.5",
                "--stop",
                "a",
            ],
            2,
            "./none",
        ),
        (
            ["generate", "x", "--threads", "0"],
            2,
            "--threads: expected an integer in 1..4096, found 0",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_plain_values_need_no_pydantic(arguments: list[str], code: int, text: str) -> None:
    """Its import takes longer than all of ``--help``."""
    program = (
        "import sys; sys.modules['pydantic'] = None; from pronk.cli.main import main; "
        "main(sys.argv[1:])"
    )
    words = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HUNG, check=False)
    assert done.returncode == code, done.stderr
    assert text in done.stdout + done.stderr
