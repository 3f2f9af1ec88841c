"""The chat page at ``/`` in Chromium, used by pointer, keyboard and touch."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import Route, expect

from pronk.llm import LLM
from server import browsing
from server.browsing import (
    CHAT,
    CHROMIUM,
    REPEAT,
    SharedPage,
    Visits,
    answer_with,
    ask,
    chunk,
    end,
    number,
    settle,
)
from server.serving import KEY, Running, hold_requests, running
from waiting import eventually

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="expected Chromium, found none; set $CHROMIUM"),
]


@pytest.fixture(scope="module")
def here() -> Iterator[Running]:
    """Server without a key, with the suffix drafter."""
    model = LLM(prefix_cache=True, max_batch=8, threads=1, budget="all", drafter="suffix")
    with running(model, keys=(), allowed_drafters=("draft_model",)) as made:
        yield made


def test_draft_tokens_are_marked_and_counted(visit: Visits) -> None:
    page = visit()
    expect(page.locator("#model")).to_contain_text("tiny context 2,048 · suffix")
    replies = list[str]()

    def overhear(route: Route) -> None:
        reply = route.fetch()
        replies.append(reply.text())
        route.fulfill(response=reply)

    page.route(CHAT, overhear)
    ask(page)
    events = [
        json.loads(line[6:]) for line in replies[0].splitlines() if line.startswith("data: {")
    ]
    usage = events[-1]["usage"]
    leaps = [
        leap for event in events for choice in event["choices"] for leap in choice.get("leaps", ())
    ]
    assert number(page, "tokens") == str(usage["completion_tokens"]) == str(len(leaps))
    assert number(page, "passes") == str(usage["steps"])
    assert number(page, "perPass") == f"{usage['completion_tokens'] / usage['steps']:.2f}"
    assert number(page, "accepted") == f"{usage['accepted']} of {usage['drafted']}"
    assert number(page, "prompt") == str(usage["prompt_tokens"])
    text = page.locator(".answer .text")
    assert text.evaluate("text => text.textContent") == "".join(leap["text"] for leap in leaps)
    drafted = [leap for leap in leaps if leap["source"] is not None]
    assert len(drafted) > 10
    expect(text.locator(".draft")).to_have_count(len(drafted))
    expect(page.locator('.legend [data-source="suffix"] b')).to_have_text(str(len(drafted)))
    sizes = [sum(leap["step"] == step for leap in leaps) for step in range(usage["steps"])]
    shown = text.locator(".pass").evaluate_all("all => all.map(each => each.childElementCount)")
    assert shown == sizes
    counts = text.locator(".count").evaluate_all(
        "all => all.map(each => Number(each.dataset.count))"
    )
    assert counts == [size for size in sizes if size > 1]
    own, draft = (text.locator(which).first for which in (".token:not(.draft)", ".draft"))
    look = "each => getComputedStyle(each).backgroundImage + getComputedStyle(each).backgroundColor"
    assert own.evaluate(look) != draft.evaluate(look)
    assert page.locator(".strip path.s0").get_attribute("d")
    page.click("#marks")
    assert own.evaluate(look) == draft.evaluate(look)


def test_plain_decoding_beside_it_shows_the_same_text(visit: Visits) -> None:
    page = visit(settings={"temperature": "0.7", "drafter": "draft_model", "seed": "9"})
    ask(page, "Write a Python function.")
    tokens = number(page, "tokens")
    page.click("text=Compare with plain decoding")
    expect(page.locator(".verdict.agrees .same")).to_have_text(
        f"Same text: all {tokens} tokens are equal."
    )
    settle(page)
    left, right = page.locator(".answer .text").evaluate_all(
        "all => all.map(each => each.textContent)"
    )
    assert left == right
    assert page.locator(".perPass").all_inner_texts()[1] == "1.00"
    expect(page.locator(".verdict .gain")).to_contain_text(
        re.compile(r"× the speed: .* tokens per second instead of")
    )
    expect(page.locator("#compared")).to_have_text(
        re.compile(r"^The same text, at [0-9.]+× the speed\.$")
    )
    expect(page.locator("#comparison")).to_be_in_viewport()
    expect(page.locator(".lane")).to_have_count(2)
    boxes = [each.bounding_box() for each in page.locator(".answer").all()]
    assert boxes[0]["y"] == boxes[1]["y"]  # type: ignore[index]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]  # type: ignore[index]


def test_an_earlier_answer_is_compared_as_well(visit: Visits) -> None:
    """The page stays at the earlier answer; the line above the composer is of the last one."""
    page = visit(viewport={"width": 1000, "height": 500})
    ask(page)
    ask(page, "Write a Python function.")
    first, last = page.locator(".turn").all()
    expect(last.locator(".compare")).to_be_hidden()
    bodies = list[dict[str, Any]]()
    page.on("request", lambda each: bodies.append(json.loads(each.post_data or "{}")))
    first.locator(".compare").click()
    settle(page)
    expect(first.locator(".verdict.agrees")).to_be_visible()
    expect(first.locator(".verdict")).to_be_in_viewport()
    expect(page.locator(".verdict")).to_have_count(1)
    expect(page.locator("#compared")).to_be_empty()
    (body,) = bodies
    assert body["drafter"] == "autoregressive"
    assert [each["content"] for each in body["messages"]] == [REPEAT]
    page.click("#compare")
    settle(page)
    expect(last.locator(".verdict.agrees")).to_be_visible()
    expect(page.locator("#compared")).not_to_be_empty()


def test_an_answer_in_one_read_has_a_speed(visit: Visits) -> None:
    """A fast server or a slow browser may leave no time between the first and the last read of the
    stream.
    """
    page = visit()
    answer_with(page, chunk(["one", " two"], 0), chunk([" three"], 1), *end(3, 2))
    ask(page)
    assert float(number(page, "rate").replace(",", "")) > 0
    page.click("text=Compare with plain decoding")
    settle(page)
    expect(page.locator(".verdict .gain")).to_contain_text(
        re.compile(r"[0-9]× the speed: [0-9.,]+ tokens per second")
    )
    expect(page.locator(".verdict .note")).to_contain_text("from the request on")
    page.unroute(CHAT)
    page.click("text=Compare again")  # now with a stream of several reads
    settle(page)
    expect(page.locator(".verdict .gain")).to_contain_text("× the speed")


def test_different_texts_are_marked(visit: Visits) -> None:
    page = visit()
    answer_with(page, chunk(["one", " two"], 0), *end(2, 1))
    ask(page)
    page.unroute(CHAT)
    answer_with(page, chunk(["one"], 0), chunk([" too"], 1, ids=9), *end(2, 2))
    page.click("text=Compare with plain decoding")
    settle(page)
    expect(page.locator(".verdict.differs .same")).to_have_text(
        "The texts differ from token 2 on: “␣two” with draft tokens, “␣too” in plain decoding."
    )
    expect(page.locator(".token.differs")).to_have_count(2)


def test_candidates_open_by_pointer_keyboard_and_touch(visit: Visits) -> None:
    page = visit(has_touch=True)
    ask(page)
    card = page.locator("#candidates")
    tokens = page.locator(".answer .token")
    page.locator(".answer .draft").first.hover()
    expect(card).to_contain_text("drafted by suffix")
    expect(card.locator("li")).to_have_count(5)
    expect(card.locator(".chosen")).to_have_count(1)
    shares = [
        float(re.sub(r"[<% ]", "", each)) for each in card.locator(".share").all_inner_texts()
    ]
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 100.1
    page.mouse.move(5, 5)
    expect(card).to_be_hidden()
    tokens.first.focus()
    expect(card).to_contain_text("chosen by the target model")
    expect(card).to_contain_text("the only token of forward pass 1")
    for key, focused in (
        ("ArrowRight", 1),
        ("End", -1),
        ("Home", 0),
        ("ArrowRight", 1),
        ("ArrowLeft", 0),
    ):
        page.keyboard.press(key)
        expect(tokens.nth(focused)).to_be_focused()
        expect(tokens.nth(focused)).to_have_attribute("aria-describedby", "candidates")
    assert page.locator('.answer .token[tabindex="0"]').count() == 1
    page.keyboard.press("ArrowDown")
    expect(card).to_contain_text("forward pass 2")
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()
    tokens.nth(12).tap()
    expect(card).to_be_visible()


def test_stopping_ends_the_request(
    visit: Visits, here: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_requests(here.llm, monkeypatch)
    page = visit(settings={"max_tokens": "1800", "drafter": "autoregressive"}, own=True)
    page.fill("#message", REPEAT)
    page.click("#send")
    for stop in (
        lambda: page.keyboard.press("Escape"),
        lambda: page.click("#stop"),
        page.context.close,
    ):
        expect(page.locator(".answer .token").nth(2)).to_be_attached()
        stop()
        assert here.drained
        if stop != page.context.close:
            settle(page)
            expect(page.locator(".ending")).to_have_text("Stopped.")
            assert int(number(page, "tokens").replace(",", "")) < 1800
            page.get_by_role("button", name="Regenerate", exact=True).click()


def test_texts_are_never_rendered_as_markup(visit: Visits) -> None:
    page = visit()
    attack = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>"
    source = '"><svg onload=window.hacked=1>'
    answer_with(
        page, chunk([attack, "&amp;", "</div>", "<svg/onload=hacked=1>"], 0, source), *end(4, 1)
    )
    ask(page, attack)
    expect(page.locator(".question")).to_have_text(attack)
    expect(page.locator(".answer .text")).to_have_text(f"{attack}&amp;</div><svg/onload=hacked=1>")
    page.locator(".answer .token").first.hover()
    expect(page.locator("#candidates")).to_contain_text("<img")
    expect(page.locator("#candidates")).to_contain_text(source)
    expect(page.locator(".legend")).to_contain_text(source)
    page.click("text=Edit the message")
    expect(page.locator(".edited textarea")).to_have_value(attack)
    assert (
        page.locator(
            "main img, main script, .answer .text svg, .legend svg, #candidates img"
        ).count()
        == 0
    )
    assert page.evaluate("window.hacked") is None


def test_page_asks_for_the_api_key(visit: Visits, served: Running) -> None:
    page = visit(served.url, expected="401")
    dialog = page.locator("#key-dialog")
    expect(dialog).to_contain_text("Bearer KEY")
    page.fill("#key", "another-key")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("found none or another")
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#model b")).to_have_text("tiny")
    expect(dialog).to_be_hidden()
    ask(page)
    assert int(number(page, "tokens")) > 0
    assert page.evaluate("sessionStorage.getItem('pronk.key')") == KEY
    assert KEY not in page.evaluate("JSON.stringify(localStorage)")
    page.evaluate("sessionStorage.clear()")
    page.reload()
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    page.fill("#message", "Hello")
    page.keyboard.press("Enter")
    expect(page.locator(".problem")).to_contain_text("The server refused the request.")
    page.fill("#key", KEY)
    page.click("text=Use this key")
    expect(page.locator(".answer .token").first).to_be_attached()
    expect(page.locator(".problem")).to_be_empty()
    settle(page)


def test_errors_are_shown(visit: Visits) -> None:
    page = visit(expected="400|ERR_FAILED")
    for trouble, text, said in (
        (browsing.mistaken_seed, "Hi", ["The server refused the request.", "seed"]),
        (browsing.lost_network, "Hi", ["The server does not answer."]),
        (browsing.broken_stream, "Hi", ["The connection ended before the answer was complete."]),
        (browsing.failed_stream, "Hi", ["The server failed during the answer.", "no more"]),
        (browsing.refused_drafter, "Hi", ["found 'retrieval'", "Choose another drafter"]),
        (browsing.own_drafter, "many words " * 2000, ["(context 2048)", "Shorten the message"]),
    ):
        trouble(page)
        ask(page, text)
        for part in said:
            expect(page.locator(".problem").last).to_contain_text(part)
        page.unroute_all()
    page.locator(".turn").last.get_by_text("Edit the message").click()
    page.fill(".edited textarea", "Hi")
    page.keyboard.press("Enter")
    expect(page.locator(".turn").last.locator(".token").first).to_be_attached()
    settle(page)
    expect(page.locator(".problem").last).to_be_empty()


def test_page_fits_a_narrow_screen(visit: Visits) -> None:
    page = visit(viewport={"width": 360, "height": 640}, has_touch=True)
    width = "document.documentElement.scrollWidth"
    answer_with(page, chunk(["x" * 90, " y", "\n    " * 9], 0), chunk(["z" * 300], 1), *end(4, 2))
    ask(page, "w" * 500)
    assert page.evaluate(width) == 360
    page.locator(".answer .token").nth(1).tap()
    box = page.locator("#candidates").bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360
    page.click("text=Compare with plain decoding")
    settle(page)
    assert page.evaluate(width) == 360
    page.click("#open-settings")
    assert page.evaluate(width) == 360
    page.keyboard.press("Escape")
    expect(page.locator("#settings")).to_be_hidden()


def test_sampling_starts_at_what_is_recommended(shared_page: SharedPage) -> None:
    """The fields show the recommended values until other ones are entered; clearing a field
    restores its value.
    """
    model = LLM(threads=1, drafter="suffix")
    model.config = replace(
        model.config, sampling={"temperature": 0.3, "top_p": 0.9, "repetition_penalty": 1.1}
    )
    with running(model, keys=()) as made, Visits(shared_page, made.url) as visits:
        page = visits(settings={"max_tokens": "8"}, own=True)
        bodies = list[dict[str, Any]]()
        page.on(
            "request",
            lambda each: each.method == "POST" and bodies.append(json.loads(each.post_data or "")),
        )
        expect(page.locator("#summary")).to_contain_text("temperature 0.3")
        assert page.input_value("[name=temperature]") == "0.3"
        assert page.input_value("[name=top_p]") == "0.9"
        ask(page)
        assert (bodies[-1]["temperature"], bodies[-1]["top_p"]) == (0.3, 0.9)
        page.click("#open-settings")
        page.fill("[name=temperature]", "0")
        page.keyboard.press("Escape")
        expect(page.locator("#summary")).to_contain_text("temperature 0 ")
        ask(page)
        assert (bodies[-1]["temperature"], bodies[-1]["top_p"]) == (0, 0.9)
        page.reload()
        expect(page.locator("#summary")).to_contain_text("temperature 0 ")
        page.click("#open-settings")
        page.fill("[name=temperature]", "")
        page.keyboard.press("Escape")
        expect(page.locator("#summary")).to_contain_text("temperature 0.3")
        ask(page)
        assert bodies[-1]["temperature"] == 0.3


def test_colours_follow_the_system_or_the_setting(visit: Visits) -> None:
    page = visit(color_scheme="dark")
    look = (
        "[document.body, document.querySelector('.draft')].map(each => "
        "getComputedStyle(each).color).join()"
    )
    system_dark = page.evaluate(look)
    page.emulate_media(color_scheme="light")
    system_light = page.evaluate(look)
    assert system_dark != system_light
    for expected in (system_dark, system_light, system_light):  # each click: dark, light, automatic
        page.click("#theme")
        assert page.evaluate(look) == expected
    page.click("#theme")
    page.reload()
    assert page.evaluate(look) == system_dark  # the setting is stored


def test_scrolling_up_stops_automatic_scrolling(visit: Visits) -> None:
    page = visit(settings={"max_tokens": "300"}, viewport={"width": 400, "height": 400})
    page.fill("#message", REPEAT)
    page.keyboard.press("Enter")
    assert eventually(lambda: page.evaluate("scrollY") > 300)
    page.mouse.move(200, 150)
    page.mouse.wheel(0, -150)
    expect(page.locator("#latest")).to_be_visible()
    before = page.evaluate("scrollY")
    settle(page)
    assert page.evaluate("scrollY") <= before
    page.click("#latest")
    expect(page.locator("#latest")).to_be_hidden()
    assert page.evaluate("document.documentElement.scrollHeight - innerHeight - scrollY") < 2


def test_conversation_of_several_messages(visit: Visits) -> None:
    page = visit(
        settings={"system": "Be brief.", "temperature": "0.5", "max_tokens": "16"},
        permissions=["clipboard-read", "clipboard-write"],
    )
    bodies = list[dict[str, Any]]()
    page.on(
        "request",
        lambda request: (
            request.method == "POST" and bodies.append(json.loads(request.post_data or ""))
        ),
    )
    page.fill("#message", "One")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("more")
    page.keyboard.press("Enter")
    settle(page)
    first = page.locator(".answer .text").evaluate("text => text.textContent")
    ask(page, "Two")
    assert [each["role"] for each in bodies[-1]["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert [each["content"] for each in bodies[-1]["messages"]] == [
        "Be brief.",
        "One\nmore",
        first,
        "Two",
    ]
    last = page.locator(".answer .text").last
    kept = last.evaluate("text => text.textContent")
    page.locator(".turn").last.get_by_text("Copy").click()
    assert eventually(lambda: page.evaluate("navigator.clipboard.readText()") == kept)
    page.get_by_role("button", name="Regenerate", exact=True).last.click()
    settle(page)
    assert {**bodies[-1]} == {**bodies[-2]}
    assert last.evaluate("text => text.textContent") == kept  # the same seed
    page.click("text=Regenerate with a new seed >> visible=true")
    settle(page)
    assert bodies[-1]["seed"] != bodies[-2]["seed"]
    page.click("text=Edit the message >> visible=true")
    page.fill(".edited textarea", "Three")
    page.keyboard.press("Enter")
    settle(page)
    assert bodies[-1]["messages"][-1]["content"] == "Three"
    assert len(bodies[-1]["messages"]) == 4
    page.reload()
    assert page.input_value("[name=seed]") == str(bodies[-1]["seed"])


def test_code_tokens_have_the_font_of_code(visit: Visits) -> None:
    page = visit()
    answer_with(page, chunk(["a", "\n```py\n", "x", " = 1", "\n```\n", "b"], 0), *end(6, 1))
    ask(page)
    assert page.locator(".code").all_inner_texts() == ["\n```py\n", "x", " = 1", "\n```\n"]
