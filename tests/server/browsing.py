"""Pages in Chromium, and responses that replace those of the server."""

import json
import os
import re
import shutil
from typing import Any, Self

from playwright.sync_api import Browser, ConsoleMessage, Page, expect

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


class Visits:
    """Opens pages; fails on unexpected console messages and on requests to other servers."""

    def __init__(self, browser: Browser, url: str) -> None:
        self._browser = browser
        self._url = url
        self._contexts: list[Any] = []
        self._messages: list[str] = []
        self._foreign_urls: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for context in self._contexts:
            context.close()
        if kind is None:
            assert self._messages == []
            assert self._foreign_urls == []

    def __call__(
        self, url: str = "", *, expected: str = "$^", settings: Any = None, **context: Any
    ) -> Page:
        """Open a page.

        Args:
            url: address of the server, if it is not the usual one.
            expected: regular expression for console messages that are allowed.
            settings: stored settings of an earlier visit; by default, draft tokens are marked.
            context: options of the browser context.
        """
        made = self._browser.new_context(**{"viewport": {"width": 1000, "height": 700}, **context})
        self._contexts.append(made)
        made.set_default_timeout(1000 * HUNG)
        kept = json.dumps(json.dumps({"max_tokens": "40", "marks": True, **(settings or {})}))
        made.add_init_script(f"localStorage['pronk.settings'] ??= {kept}")
        page = made.new_page()
        url = url or self._url

        def check(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning") and not re.search(expected, message.text):
                self._messages.append(message.text)

        page.on("console", check)
        page.on("pageerror", lambda error: self._messages.append(str(error)))
        page.on(
            "request",
            lambda each: each.url.startswith((url, "data:")) or self._foreign_urls.append(each.url),
        )
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
