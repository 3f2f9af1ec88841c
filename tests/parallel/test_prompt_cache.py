"""Prompt cache on disk: workers read and write it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from drafting.trees import TreeDrafter, oracle_trees
from engine.cases import assert_same, texts, total
from engine.test_drafters_prefixes import AGAIN, conversation
from engine.test_prompt_cache import Server, servers, turn
from parallel.dealt import partition_randomly, tree_parallel_engine
from tiny_models import run_alone, tiny_decoder


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    yield from servers(tmp_path, monkeypatch)


def test_workers_read_and_write(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    partition_randomly(monkeypatch)
    decoder = tiny_decoder()
    prompts = conversation(tiny_decoder())
    want = [run_alone(decoder, prompt, AGAIN) for prompt in prompts]
    made = TreeDrafter(oracle_trees(0.7), texts(want))
    for hits in (False, True):
        with tree_parallel_engine(decoder, 2, share_prefixes=True) as engine:
            server.attach(engine)
            got = [turn(engine, prompt, AGAIN, made)[0] for prompt in prompts]
            assert_same(got, want)
            assert (total(got, "disk_tokens") > 100) == hits
            assert total(got, "accepted") > 0
