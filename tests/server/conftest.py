"""Fixtures: a server of pronk-tiny for the tests of one file, and its client."""

from collections.abc import Callable, Iterator

import httpx
import pytest
from playwright.sync_api import Browser, sync_playwright

from pronk.llm import LLM
from server.browsing import ARGS, CHROMIUM, SharedPage, Visits
from server.serving import Running, running
from server.tool_models import FEW_LAYERS, write_layers


@pytest.fixture(scope="module", autouse=True)
def no_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let clients look for certificates in an empty folder: each client would read those of all
    authorities.

    All servers of the tests speak HTTP. Reading the certificates takes longer than most tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("certificates")))
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def shared_page(browser: Browser) -> SharedPage:
    return SharedPage(browser)


@pytest.fixture
def visit(shared_page: SharedPage, here: Running) -> Iterator[Visits]:
    """Open pages of the server ``here``, a fixture of the file."""
    with Visits(shared_page, here.url) as visits:
        yield visits


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[[LLM], None]:
    """Return a function that lets the engine of a model fail after three steps."""

    def after_three_steps(llm: LLM) -> None:
        step = type(llm.engine).step
        steps = 0

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
def model(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Return a model with few layers of pronk-tiny; its drafting does not depend on measured
    times.
    """
    folder = tmp_path_factory.mktemp("shallow") / "pronk-tiny"
    folder.mkdir()
    write_layers(folder, FEW_LAYERS)
    return LLM(folder, prefix_cache=True, max_batch=8, threads=1, budget="all")


@pytest.fixture(scope="module")
def served(model: LLM) -> Iterator[Running]:
    with running(model, allowed_drafters=("draft_model",)) as made:
        yield made


@pytest.fixture
def client(served: Running) -> Iterator[httpx.Client]:
    with served.client() as made:
        yield made
