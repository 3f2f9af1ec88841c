"""Real models: SmolLM2, downloaded if it is missing; larger ones on this machine are slow tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pronk.checkpoint.hub.cache import find_cached
from pronk.checkpoint.hub.names import known_models
from pronk.llm import LLM
from pronk.models.resolve import resolve_model

LARGER = ("qwen2.5-coder-0.5b",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder."""
    folder = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if str(item.path).startswith(folder):  # Path.parents would take half a second
            item.add_marker(pytest.mark.real)
            item.add_marker(pytest.mark.xdist_group("real"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return resolve_model("smollm2")


@pytest.fixture(
    scope="session",
    params=["smollm2", *(pytest.param(name, marks=pytest.mark.slow) for name in LARGER)],
)
def name(request: pytest.FixtureRequest) -> str:
    """Return the name of a model that is on this machine."""
    model: str = request.param
    if model == "smollm2":
        resolve_model(model)
    elif find_cached(known_models()[model].model) is None:
        pytest.skip(f"{model} is not on this machine; pronk pull {model}")
    return model


@pytest.fixture(scope="module")
def llm(name: str) -> Iterator[LLM]:
    with_budget = LLM(
        name, budget="all", calibration=False
    )  # "all": the number of draft tokens does not depend on times
    yield with_budget
    with_budget.close()
