"""Conversations of the chat page: stored, opened, renamed, exported and deleted; and axe-core."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from pronk.llm import LLM
from server.browsing import CHROMIUM, REPEAT, Visits, answer_with, ask, chunk, end, number, settle
from server.serving import Running, running

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="expected Chromium, found none; set $CHROMIUM"),
]

# axe-core 4.14.1, unchanged (Mozilla Public License 2.0: axe/LICENSE).
_AXE = Path(__file__).with_name("axe") / "axe.min.js"
_PARTS = ["Some **bold** text:\n\n", "```python\n", "def f(x):\n", "    return x\n", "```\n"]


@pytest.fixture(scope="module")
def here() -> Iterator[Running]:
    model = LLM(prefix_cache=True, threads=1, budget="all", drafter="suffix")
    with running(model, keys=()) as made:
        yield made


def _formatted_answer(page: Page) -> None:
    answer_with(page, chunk(_PARTS, 0), *end(len(_PARTS), 1))
    ask(page, "Write code.")


def _findings(page: Page) -> list[tuple[str, list[Any]]]:
    """Return the rules of axe-core that the page breaks, with the elements, if they are serious."""
    page.evaluate(_AXE.read_text())
    violations = page.evaluate("axe.run().then(({ violations }) => violations)")
    return [
        (each["id"], [node["target"] for node in each["nodes"]])
        for each in violations
        if each["impact"] in ("serious", "critical")
    ]


def test_answers_are_formatted_until_the_marks_are_on(visit: Visits) -> None:
    page = visit(settings={"marks": False})
    _formatted_answer(page)
    expect(page.locator(".rendered strong")).to_have_text("bold")
    expect(page.locator(".hljs-keyword")).to_have_text(["def", "return"])
    expect(page.locator(".code-block code")).to_have_text("def f(x):\n    return x")
    expect(page.locator(".answer .text")).to_be_hidden()
    page.click("#marks")
    expect(page.locator(".answer .text")).to_be_visible()
    expect(page.locator(".rendered")).to_be_hidden()


def test_code_of_unknown_languages_is_plain_and_never_markup(visit: Visits) -> None:
    page = visit(settings={"marks": False})
    attack = "<img src=x onerror=hacked=1>"
    text = f"```nosuch\n{attack}\n```\n\n```html\n{attack}\n```\n"
    answer_with(page, chunk([text], 0), *end(1, 1))
    ask(page)
    expect(page.locator(".code-block code")).to_have_text([attack, attack])
    assert page.locator(".code-block").first.locator("code span").count() == 0
    assert page.locator(".code-block").last.locator("code span").count() > 0
    assert page.locator("main img").count() == 0


def test_a_conversation_survives_a_reload(visit: Visits) -> None:
    page = visit(settings={"system": "Be brief."}, own=True)
    bodies = list[dict[str, Any]]()
    page.on(
        "request",
        lambda each: each.method == "POST" and bodies.append(json.loads(each.post_data or "")),
    )
    ask(page, REPEAT)
    ask(page, "Two")
    text = "all => all.map(each => each.textContent)"
    before = page.locator(".answer .text").evaluate_all(text)
    figures = [number(page, name) for name in ("perPass", "rate", "tokens", "accepted", "wait")]
    drafts = page.locator(".answer .draft").count()
    page.reload()
    expect(page.locator(".question")).to_have_text([REPEAT, "Two"])
    assert page.locator(".answer .text").evaluate_all(text) == before
    assert drafts > 0
    assert page.locator(".answer .draft").count() == drafts
    assert figures == [
        number(page, name) for name in ("perPass", "rate", "tokens", "accepted", "wait")
    ]
    page.click("#compare")
    settle(page)
    expect(page.locator(".verdict.agrees")).to_be_visible()
    assert bodies[-1]["messages"] == bodies[1]["messages"]
    ask(page, "Three")
    roles = [each["role"] for each in bodies[-1]["messages"]]
    assert roles == ["system", *["user", "assistant"] * 2, "user"]


def test_a_message_without_an_answer_survives_too(visit: Visits) -> None:
    page = visit(expected="ERR_FAILED")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page, "Lost")
    page.unroute_all()
    page.reload()
    expect(page.locator(".question")).to_have_text("Lost")
    page.click("text=Try again")
    settle(page)
    expect(page.locator(".answer .token").first).to_be_attached()


def test_conversations_are_listed_renamed_and_deleted(visit: Visits) -> None:
    page = visit()
    choices = page.locator("#conversation-list .choice")
    _formatted_answer(page)
    page.click("#new")
    expect(page.locator("#welcome")).to_be_visible()
    page.locator(".starter").last.click()
    settle(page)
    page.click("#open-conversations")
    expect(choices).to_have_text(["Explain in five short steps how to make tea.", "Write code."])
    expect(choices.first).to_have_attribute("aria-current", "true")
    choices.last.click()
    expect(page.locator(".question")).to_have_text("Write code.")
    page.click("#rename")
    page.fill("#new-title", "A <b>function</b>")
    page.keyboard.press("Enter")
    expect(choices.filter(has_text="A <b>function</b>")).to_have_attribute("aria-current", "true")
    page.reload()
    ask(page, "More")
    page.click("#open-conversations")
    expect(choices.first).to_have_text("A <b>function</b>")
    page.click("#delete")
    page.click("#delete-cancel")
    expect(choices).to_have_count(2)
    page.click("#delete")
    page.click("#delete-confirm")
    expect(choices).to_have_count(1)
    assert page.locator(".turn").count() == 0
    page.reload()
    assert page.locator(".turn").count() == 0


def test_conversations_are_exported(visit: Visits) -> None:
    page = visit(settings={"system": "Be brief."})
    _formatted_answer(page)
    page.click("#open-conversations")
    exported = {}
    for kind in ("markdown", "json"):
        with page.expect_download() as found:
            page.click(f"#export-{kind}")
        exported[kind] = Path(found.value.path()).read_text()
        assert found.value.suggested_filename == f"write-code.{kind.replace('markdown', 'md')}"
    content = "".join(_PARTS)
    head = "# Write code.\n\n## You\n\nWrite code.\n\n## Answer\n\n"
    assert exported["markdown"] == f"{head}{content}\n"
    document = json.loads(exported["json"])
    assert document["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Write code."},
        {"role": "assistant", "content": content},
    ]
    assert document["options"][0]["seed"] == 7


def test_full_storage_is_reported(visit: Visits) -> None:
    page = visit()
    page.evaluate(
        "for (let n = 2 ** 22; n >= 1; n /= 2) try { for (let i = 0; i < 9; i++)"
        " localStorage[`fill${n}.${i}`] = 'x'.repeat(n) } catch {}"
    )
    _formatted_answer(page)
    expect(page.locator("#storage-problem")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_is_accessible(visit: Visits, scheme: Any) -> None:
    page = visit(
        settings={"marks": False},
        color_scheme=scheme,
        viewport={"width": 390, "height": 844},
        reduced_motion="reduce",
    )
    assert _findings(page) == []
    _formatted_answer(page)
    page.click(".figures summary")
    assert _findings(page) == []
    page.click("#compare")
    settle(page)
    page.click("#open-conversations")
    assert _findings(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.keyboard.press("Escape")
    expect(page.locator("#conversations")).to_be_hidden()
    expect(page.locator("#open-conversations")).to_be_focused()
    page.click("#open-settings")
    assert _findings(page) == []


def test_axe_finds_a_planted_mistake(visit: Visits) -> None:
    page = visit()
    page.evaluate("document.querySelector('#message').removeAttribute('aria-label')")
    page.evaluate("document.querySelector('#message').removeAttribute('placeholder')")
    assert [rule for rule, _ in _findings(page)] == ["label"]
