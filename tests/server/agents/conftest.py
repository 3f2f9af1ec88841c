"""A small model that calls tools, behind a server, and the recorded bodies of agents."""

import json
from collections.abc import Iterator

import pytest

from checkpoints import make_checkpoint
from pronk.llm import LLM
from server.serving import Running, running
from server.tool_models import write_tool_model

CONTEXT = 65536  # tokens; agents ask for answers of up to 32000


@pytest.fixture(scope="module", params=["hermes", "qwen3"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Serve a random model with the tokenizer of pronk-tiny; "qwen3" writes thoughts, too."""
    folder = tmp_path_factory.mktemp(request.param)
    write_tool_model(folder, request.param)
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
    with running(LLM(folder, prefix_cache=True, max_batch=4, threads=1, budget="all")) as made:
        yield made
