"""A process of ``pronk serve``, its model as a library, and environments of clients."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clients.environments import Environment, Program, install, install_program
from pronk.llm import LLM
from pronk.sampling.params import SamplingParams
from server.serving import KEY
from server.tool_models import FEW_LAYERS, write_tool_model
from waiting import HUNG

Install = Callable[..., Environment]
InstallProgram = Callable[[str, str], Program]
Greedy = Callable[..., str]
CONTEXT = 16384  # tokens; the prompts of agents do not fit in the 2048 of pronk-tiny
LONG_CONTEXT = 65536  # tokens; the first prompt of Claude Code has 26,000 tokens of pronk-tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a copy of pronk-tiny that calls tools."""
    made = tmp_path_factory.mktemp("hermes")
    write_tool_model(made, "hermes", CONTEXT)
    return made


@pytest.fixture(scope="session")
def url(folder: Path) -> Iterator[str]:
    """Serve the model of ``folder`` as ``tiny``; yield the address."""
    with served(folder) as address:
        yield address


@pytest.fixture(scope="session")
def long_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a model that calls tools and has a context for Claude Code; yield the address."""
    made = tmp_path_factory.mktemp("long")
    write_tool_model(made, "hermes", LONG_CONTEXT, FEW_LAYERS)
    with served(made) as address:
        yield address


@pytest.fixture(scope="session")
def brief_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a model like that of ``long_url``, three quarters of whose tokens end a text.

    Codex sets no limit of tokens, and the texts of pronk-tiny have no end.
    """
    made = tmp_path_factory.mktemp("brief")
    write_tool_model(made, "hermes", LONG_CONTEXT, FEW_LAYERS)
    path = made / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["eos_token_id"] = [0, *(each for each in range(4, config["vocab_size"]) if each % 4)]
    path.write_text(json.dumps(config), encoding="utf-8")
    (made / "generation_config.json").unlink()  # has other tokens that end a text
    with served(made) as address:
        yield address


@contextmanager
def served(folder: Path, *more: str, variables: Mapping[str, str] | None = None) -> Iterator[str]:
    """Run a process of ``pronk serve`` with the model of a folder as ``tiny``.

    Args:
        folder: the model.
        more: further options of the command.
        variables: variables of its environment, besides those of this process.
    """
    options = ["--model", f"tiny={folder}", "--port", "0", "--threads", "1", "--api-key", KEY]
    command = [sys.executable, "-m", "pronk", "serve", *options, *more]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environment = {**os.environ, **(variables or {})}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert found is not None, line + process.stdout.read()
            yield found[0]
        finally:
            process.terminate()
        assert process.wait(HUNG) == 0


@pytest.fixture(scope="session")
def library(folder: Path) -> LLM:
    """Return the server's model as a library, the reference for answers of the server."""
    return LLM(folder, threads=1)


@pytest.fixture(scope="session")
def greedy(library: LLM) -> Greedy:
    """Return ``greedy(messages, max_tokens, tools=None)``: the greedy answer to a conversation."""

    def answer(messages: list[dict[str, Any]], max_tokens: int, tools: Any = None) -> str:
        prompt = library.chat_ids(messages, tools=tools)
        return library.generate(prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0)).text

    return answer


@pytest.fixture
def installed(pytestconfig: pytest.Config, tmp_path: Path) -> Install:
    """Return ``installed(requirement)``: the environment with a client at its newest version."""
    assert pytestconfig.cache is not None
    cache = Path(pytestconfig.cache.mkdir("clients"))
    return lambda requirement, **options: install(requirement, cache, tmp_path, **options)


@pytest.fixture
def installed_program(pytestconfig: pytest.Config, tmp_path: Path) -> InstallProgram:
    """Return ``installed_program(package, command)``: a command of npm at its newest version."""
    assert pytestconfig.cache is not None
    cache = Path(pytestconfig.cache.mkdir("clients"))
    return lambda package, command: install_program(package, command, cache, tmp_path)
