"""Options of ``pronk serve`` are those of the library."""

from __future__ import annotations

import pytest

from cli.test_declared_options import (
    NAMES,
    OF_LLM,
    SERVED,
    WRITTEN,
    assert_same,
    check_range,
    options_of,
)
from command_line import Command
from pronk.base.options import DeclaredOption
from pronk.cli.options import NOT_ON_THE_COMMAND_LINE
from pronk.server.cli.serve import serve

# Defaults for many requests.
DEFAULTS = {"max_batch": 32, "prefix_cache": True}
OF_A_MODEL = [name for name in OF_LLM if name != "model"]  # several, which may have names
OPTIONS = options_of(serve)


@pytest.mark.parametrize("name", OF_A_MODEL)
def test_options_of_a_model_are_those_of_the_library(name: str) -> None:
    declared = OF_LLM[name]
    default = DEFAULTS.get(name, WRITTEN.get(name, declared.default))
    assert_same(declared, OPTIONS[NAMES.get(name, name)], default)


def test_no_other_option_of_the_library_is_given() -> None:
    assert not NOT_ON_THE_COMMAND_LINE.keys() & OPTIONS.keys()


@pytest.mark.parametrize(
    "declared",
    [OF_LLM[name] for name in sorted(SERVED) if OF_LLM[name].option.low is not None],
    ids=lambda each: each.name,
)
def test_ranges_are_checked_before_a_model_is_loaded(
    declared: DeclaredOption, command: Command
) -> None:
    check_range(declared, command, "serve")
