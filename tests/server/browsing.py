"""Pages in Chromium, and responses that replace those of the server."""

import json
import os
import re
import shutil
from collections.abc import Callable
from typing import Any, Self

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect

from waiting import HUNG

CHROMIUM = (
    os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
)
ARGS = (
    "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update "
    "--disable-sync "
    "--no-first-run"
).split()
CHAT = "**/v1/chat/completions"
expect.set_options(timeout=1000 * HUNG)
REPEAT = "Repeat this three times: The quick brown fox jumps over the lazy dog."
VIEWPORT: Any = {"width": 1000, "height": 700}


class SharedPage:
    """A page that the visits of one test after the other use.

    A new context has a new process, which takes a second of processor time.
    """

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        self._page: Page | None = None
        self._script = ""  # identifier of the script of the last visit
        self._visits = 0
        self._is_taken = False

    def take(self) -> Page | None:
        """Return the page until :meth:`give_back`; None if a visit has it."""
        if self._is_taken:
            return None
        if self._page is None or self._page.is_closed():
            self._page = self.browser.new_context(viewport=VIEWPORT).new_page()
            self._page.set_default_timeout(1000 * HUNG)
            self._session = self._page.context.new_cdp_session(self._page)
            self._session.send("Page.enable")
        self._is_taken = True
        return self._page

    def begin(self, script: str) -> None:
        """Let the next documents of the page run a script; the first of them has an empty storage.

        The name of a window stays while the test reloads the page.
        """
        self._visits += 1
        name = json.dumps(f"visit {self._visits}")
        clear = (
            f"if (window.name !== {name}) {{"
            f"window.name = {name}; localStorage.clear(); sessionStorage.clear(); }}"
        )
        added = {"source": f"{clear}\n{script}"}
        made = self._session.send("Page.addScriptToEvaluateOnNewDocument", added)
        self._script = made["identifier"]

    def give_back(self) -> None:
        """Leave the server, which ends the page's requests, and undo what a test may change."""
        self._is_taken = False
        assert self._page is not None
        if self._page.is_closed():
            return
        self._page.unroute_all(behavior="ignoreErrors")
        old = {"identifier": self._script}
        self._session.send("Page.removeScriptToEvaluateOnNewDocument", old)
        self._page.goto("about:blank")
        self._page.mouse.move(0, 0)
        self._page.set_viewport_size(VIEWPORT)
        self._page.context.clear_permissions()


class Visits:
    """Opens pages; fails on unexpected console messages and on requests to other servers."""

    def __init__(self, shared: SharedPage, url: str) -> None:
        self._shared = shared
        self._url = url
        self._page: Page | None = None  # the shared page, if it was taken
        self._listeners: dict[Any, Callable[..., None]] = {}
        self._contexts: list[Any] = []
        self._messages: list[str] = []
        self._foreign_urls: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for context in self._contexts:
            context.close()
        if self._page is not None:
            self._shared.give_back()
            for event, listener in self._listeners.items():
                self._page.remove_listener(event, listener)
        if kind is None:
            assert self._messages == []
            assert self._foreign_urls == []

    def __call__(
        self,
        url: str = "",
        *,
        expected: str = "$^",
        settings: Any = None,
        own: bool = False,
        **context: Any,
    ) -> Page:
        """Open a page.

        Args:
            url: address of the server, if it is not the usual one.
            expected: regular expression for console messages that are allowed.
            settings: stored settings of an earlier visit; by default, draft tokens are marked.
            own: the test adds listeners or closes the context. It gets a page that no other test
                uses, as with options of the context.
            context: options of the browser context.
        """
        kept = json.dumps(json.dumps({"max_tokens": "40", "marks": True, **(settings or {})}))
        script = f"localStorage['pronk.settings'] ??= {kept}"
        url = url or self._url

        def check(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning") and not re.search(expected, message.text):
                self._messages.append(message.text)

        def check_address(request: Request) -> None:
            if not request.url.startswith((url, "data:")):
                self._foreign_urls.append(request.url)

        listeners: dict[Any, Callable[..., None]] = {
            "console": check,
            "pageerror": lambda error: self._messages.append(str(error)),
            "request": check_address,
        }
        shared = None if own or context else self._shared.take()
        if shared is None:
            made = self._shared.browser.new_context(**{"viewport": VIEWPORT, **context})
            self._contexts.append(made)
            made.set_default_timeout(1000 * HUNG)
            made.add_init_script(script)
            page = made.new_page()
        else:
            page = self._page = shared
            self._listeners = listeners
            self._shared.begin(script)
        for event, listener in listeners.items():
            page.on(event, listener)
        page.goto(url)
        return page


def ask(page: Page, text: str = REPEAT) -> None:
    """Send a message and wait for the end of the answer."""
    page.fill("#message", text)
    page.keyboard.press("Enter")
    settle(page)


def settle(page: Page) -> None:
    expect(page.locator(".turn").last).to_be_visible()
    expect(page.locator("body")).not_to_have_class(re.compile("busy"))


def number(page: Page, name: str) -> str:
    """Return a figure of the last answer, also one whose row is folded."""
    return page.locator(f".{name}").last.text_content() or ""


def chunk(
    texts: list[str], step: int, source: str | None = "suffix", ids: int = 0
) -> dict[str, Any]:
    """Return an SSE chunk for one step: accepted draft tokens of ``source``, then the bonus
    token.
    """
    leaps = [
        {
            "id": ids + place,
            "text": text,
            "source": source if place < len(texts) - 1 else None,
            "step": step,
        }
        for place, text in enumerate(texts)
    ]
    shares = [{"token": text, "logprob": -0.5, "bytes": [*text.encode()]} for text in texts]
    content = [
        {**each, "top_logprobs": [each, {"token": "<b>", "logprob": -3, "bytes": [1]}]}
        for each in shares
    ]
    choice = {"index": 0, "delta": {"content": "".join(texts)}, "finish_reason": None}
    return {"choices": [{**choice, "leaps": leaps, "logprobs": {"content": content}}]}


def end(tokens: int, steps: int) -> list[dict[str, Any]]:
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    counts = {"steps": steps, "drafted": tokens, "accepted": tokens - steps}
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    return [last, {"choices": [], "usage": {**usage, **counts}}]


def answer_with(page: Page, *events: dict[str, Any], done: bool = True) -> None:
    """Answer chat requests of the page with these events."""
    lines = [
        *(f"data: {json.dumps(event)}\n\n" for event in events),
        "data: [DONE]\n\n" if done else "",
    ]
    page.route(
        CHAT, lambda route: route.fulfill(content_type="text/event-stream", body="".join(lines))
    )


def refused_drafter(page: Page) -> None:
    page.click("#open-settings")
    page.select_option("select[name=drafter]", "other")
    page.fill("input[name=other]", "retrieval")


def own_drafter(page: Page) -> None:
    page.select_option("select[name=drafter]", "")


def mistaken_seed(page: Page) -> None:
    page.route(
        CHAT, lambda route: route.continue_(post_data=json.dumps({"messages": [], "seed": 0.5}))
    )


def lost_network(page: Page) -> None:
    page.route(CHAT, lambda route: route.abort())


def broken_stream(page: Page) -> None:
    answer_with(page, chunk(["half"], 0), done=False)


def failed_stream(page: Page) -> None:
    answer_with(
        page,
        chunk(["half"], 0),
        {"error": {"message": "no more", "code": "internal_error"}},
        done=False,
    )
