"""Fixtures: a server of pronk-tiny for the tests of one file, and its client."""

from collections.abc import Callable, Iterator

import httpx
import pytest
from playwright.sync_api import Browser, sync_playwright

from pronk.llm import LLM
from server.browsing import ARGS, CHROMIUM
from server.serving import Running, running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield browser
        browser.close()


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[[LLM], None]:
    """Return a function that lets the engine of a model fail after three steps."""

    def after_three_steps(llm: LLM) -> None:
        step, steps = type(llm.engine).step, 0

        def fail() -> None:
            nonlocal steps
            steps += 1
            if steps > 3:
                msg = "SECRET"
                raise RuntimeError(msg)
            step(llm.engine)

        monkeypatch.setattr(llm.engine, "step", fail)

    return after_three_steps


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
