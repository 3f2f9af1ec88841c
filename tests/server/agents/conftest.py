"""A small model that calls tools, behind a server, and the recorded bodies of agents."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from checkpoints import make_checkpoint
from pronk.llm import LLM
from server.serving import Running, running
from server.tool_models import write_tool_model

CONTEXT = 65536  # tokens; agents ask for answers of up to 32000


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Running]]:
    """Return a function that starts the server of a family once: a random model with the tokenizer
    of pronk-tiny.
    """
    with ExitStack() as stack:

        @cache
        def start(family: str) -> Running:
            return stack.enter_context(
                running(random_model(tmp_path_factory.mktemp(family), family))
            )

        yield start


@pytest.fixture
def served(request: pytest.FixtureRequest, servers: Callable[[str], Running]) -> Running:
    """Return the server of the family that the test asks for."""
    return servers(request.param)


def random_model(folder: Path, family: str) -> LLM:
    write_tool_model(folder, family)
    tokens = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = {name: tokens[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")}
    make_checkpoint(
        folder,
        "llama",
        tokenizer=False,
        max_position_embeddings=CONTEXT,
        num_hidden_layers=1,
        **shape,
    )
    return LLM(folder, prefix_cache=True, max_batch=4, threads=1, budget="all")
