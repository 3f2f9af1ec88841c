"""Fixtures: a server of pronk-tiny for the tests of one file, and its client."""

from collections.abc import Iterator

import httpx
import pytest

from pronk.llm import LLM
from server.serving import Running, running


@pytest.fixture(scope="session")
def model() -> LLM:
    return LLM(prefix_cache=True, max_batch=8, threads=1, budget="all")  # drafting does not depend on measured times


@pytest.fixture(scope="module")
def served(model: LLM) -> Iterator[Running]:
    with running(model, allowed_drafters=("draft_model",)) as made:
        yield made


@pytest.fixture
def client(served: Running) -> Iterator[httpx.Client]:
    with served.client() as made:
        yield made
