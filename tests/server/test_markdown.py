"""Markdown of the chat page in Chromium: elements, growing texts, and hostile texts."""

import json
import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from playwright.sync_api import Page, Request, expect

from pronk.llm import LLM
from server.browsing import CHROMIUM, SharedPage, Visits, answer_with, ask, chunk, end
from server.serving import Running, running

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="expected Chromium, found none; set $CHROMIUM"),
]

RENDER = """async ([text, growing]) => {
    const { Markdown } = await import("/markdown.js");
    const shown = new Markdown(document.createElement("div"));
    shown.update(text, growing);
    for (const scrollable of shown.element.querySelectorAll("[role=region]")) {
        for (const name of ["tabindex", "role", "aria-label"]) scrollable.removeAttribute(name);
    }
    for (const link of shown.element.querySelectorAll("a")) {
        if (link.rel !== "noopener noreferrer" || link.target !== "_blank") throw Error("unsafe link");
        for (const name of ["rel", "target"]) link.removeAttribute(name);
    }
    return shown.element.innerHTML;
}"""
# Show a text that grows by given sizes, then its end; return the DOM of each step, and that of the
# whole text at once.
GROW = """async ([text, sizes]) => {
    const { Markdown } = await import("/markdown.js");
    const shown = new Markdown(document.createElement("div"));
    const seen = [];
    for (let at = 0, step = 0; at < text.length; step++) {
        at += sizes[step % sizes.length];
        shown.update(text.slice(0, at), true);
        seen.push(shown.element.innerHTML);
    }
    shown.update(text, false);
    const whole = new Markdown(document.createElement("div"));
    whole.update(text, false);
    for (const each of [shown, whole]) each.element.normalize();
    return [seen, shown.element.innerHTML, whole.element.innerHTML];
}"""
SAMPLE = """# Title with `code`

Some **bold *and italic*** text, ~~gone~~, [a link](https://example.org/a_(b) "title") and https://example.org/x?y=1.
Second line with snake_case_names and 2 * 3 * 4.

- one
  - nested **two**
    1. deep

       paragraph
  - three
- [x] done

1. first
   ```python
   def f(x):
       return "*not bold*"
   ```
2. second

> quoted *text*
> - list
lazy

| Name | Value | Note |
|:-----|:-----:|-----:|
| a \\| b | `c` | **d** |
| e | f<br>g | h |

---

~~~
no language
~~~

Ends with ``a ` tick`` and a \\*star\\*.
"""


def code(text: str, language: str = "") -> str:
    head = (
        f'<div class="code-head"><span>{language}</span><button class="copy" '
        'type="button">Copy</button></div>'
    )
    return f'<div class="code-block">{head}<pre><code>{text}</code></pre></div>'


def table(head: str, body: str = "") -> str:
    return (
        "<div "
        f'class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def link(address: str, text: str) -> str:
    return f'<a href="{address}">{text}</a>'


ELEMENTS = [
    ("", ""),
    ("plain", "<p>plain</p>"),
    ("a\nb  \nc\\\nd", "<p>a<br>b<br>c<br>d</p>"),
    ("a\r\nb\r\n\r\nc", "<p>a<br>b</p><p>c</p>"),
    ("# A\n## B ##\n###### C\n#D", "<h3>A</h3><h4>B</h4><h6>C</h6><p>#D</p>"),
    ("text\n# A\ntext", "<p>text</p><h3>A</h3><p>text</p>"),
    ("*a* _b_ **c** __d__", "<p><em>a</em> <em>b</em> <strong>c</strong> <strong>d</strong></p>"),
    ("~~e~~ ~f~", "<p><del>e</del> ~f~</p>"),
    ("***a***", "<p><em><strong>a</strong></em></p>"),
    ("***a** b*", "<p><em><strong>a</strong> b</em></p>"),
    ("**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"),
    ("**a *b** c", "<p>*<em>a <em>b</em></em> c</p>"),
    ("**\u6ce8\u610f\uff1a**\u8fd9", "<p><strong>\u6ce8\u610f\uff1a</strong>\u8fd9</p>"),
    ("2 * 3 * 4 ** 5, a_b_c, __init__", "<p>2 * 3 * 4 ** 5, a_b_c, <strong>init</strong></p>"),
    ("**open and `open", "<p>**open and `open</p>"),
    ("\\*a\\* \\\\ \\q", "<p>*a* \\ \\q</p>"),
    ("`a*b*` ``a`b`` ` `` `", "<p><code>a*b*</code> <code>a`b</code> <code>``</code></p>"),
    ("a\n\n---\n***\n- - -\n--", "<p>a</p><hr><hr><hr><p>--</p>"),
    ("- a\n- b", "<ul><li>a</li><li>b</li></ul>"),
    ("* a\n  * b\n    * c\n* d", "<ul><li>a<ul><li>b<ul><li>c</li></ul></li></ul></li><li>d</li></ul>"),
    ("1. a\n  - b\n2. c", "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>"),
    ("3) a\n4) b\n\n- c", '<ol start="3"><li>a</li><li>b</li></ol><ul><li>c</li></ul>'),
    ("- a\n\n  b\n- c\nlazy", "<ul><li>a<p>b</p></li><li>c<br>lazy</li></ul>"),
    ("- [ ] a\n- [x] b", "<ul><li>\u2610 a</li><li>\u2611 b</li></ul>"),
    ("in the year\n2024. What\n1. one", "<p>in the year<br>2024. What</p><ol><li>one</li></ol>"),
    ("> a\n> > b\nlazy\n\nc", "<blockquote><p>a</p><blockquote><p>b<br>lazy</p></blockquote></blockquote><p>c</p>"),
    (
        "```py\nx = '<b>'\n\n```\nb",
        code("x = <span class=\"hljs-string\">'&lt;b&gt;'</span>\n", "py") + "<p>b</p>",
    ),
    ("~~~~\n```\n~~~\n~~~~", code("```\n~~~")),
    ("- a\n  ```\n  b\n    c\n  ```", "<ul><li>a" + code("b\n  c") + "</li></ul>"),
    ("a:\n\n    code\n    \tmore\n\nb", "<p>a:</p>" + code("code\n\tmore") + "<p>b</p>"),
    ("```\nall:\n\ttab", code("all:\n\ttab")),
    (
        "| a | b | c |\n|:-|-:|:-:|\n| 1 | *2* | 3 |\nend",
        table(
            '<th>a</th><th class="right">b</th><th class="center">c</th>',
            '<tr><td>1</td><td class="right"><em>2</em></td><td '
            'class="center">3</td></tr><tr><td>end</td></tr>',
        ),
    ),
    ("a | b\n--|--\n`x` \\| y | z", table("<th>a</th><th>b</th>", "<tr><td><code>x</code> | "
        "y</td><td>z</td></tr>")),
    ("a | b\n--\nc", "<p>a | b<br>--<br>c</p>"),
    (("[a "
        "*b*](http://x.org/?a=1&b=2)"), f"<p>{link('http://x.org/?a=1&amp;b=2', 'a <em>b</em>')}</p>"),
    ('[a](<https://x.org> "t") [b](mailto:a@b.c)', (f"<p>{link('https://x.org/', 'a')} "
        f"{link('mailto:a@b.c', 'b')}</p>")),
    ("<https://x.org> (https://x.org/a).", (f"<p>{link('https://x.org/', 'https://x.org')} "
        f"({link('https://x.org/a', 'https://x.org/a')}).</p>")),
    ("![cat](https://x.org/c.png)", f"<p>{link('https://x.org/c.png', 'cat')}</p>"),
    ("[![cat](https://x.org/c.png)](https://x.org)", f"<p>{link('https://x.org/', 'cat')}</p>"),
    ("[a] [b](c [d][e]", "<p>[a] [b](c [d][e]</p>"),
    ("[local](/v1/models)", "<p><span>local</span></p>"),
]  # fmt: skip
HOSTILE = [
    ("<script>window.hacked = 1</script>", "<p>&lt;script&gt;window.hacked = 1&lt;/script&gt;</p>"),
    ("<img src=x onerror=hacked=1>", "<p>&lt;img src=x onerror=hacked=1&gt;</p>"),
    ("&lt;b&gt; <b>", "<p>&amp;lt;b&amp;gt; &lt;b&gt;</p>"),
    ("[a](javascript:hacked=1)", "<p><span>a</span></p>"),
    ("[a](JaVaScRiPt:hacked=1) [b](&#106;avascript:1)", "<p><span>a</span> <span>b</span></p>"),
    ("[a](\x01javascript:hacked=1) [b](vbscript:x)", "<p><span>a</span> <span>b</span></p>"),
    ("[a](data:text/html,<script>)", "<p>[a](data:text/html,&lt;script&gt;)</p>"),
    ("![b](data:image/svg+xml,x) [c](blob:x)", "<p><span>b</span> <span>c</span></p>"),
    ("<javascript:hacked=1>", "<p>&lt;javascript:hacked=1&gt;</p>"),
    ('[a](https://x.org/"onclick="hacked=1)', f"<p>{link('https://x.org/%22onclick=%22hacked=1', 'a')}</p>"),
    ('```"><img src=x>\na\n```', code("a", '"&gt;&lt;img')),
    ("a\0b", "<p>ab</p>"),
]  # fmt: skip
# Texts of 100 kB that a careless parser takes long for, or that nest deeply.
HUGE = [
    "*", "**a ", "*a_ ", "_a* ", "a* ", "[", "](", "[a](", "![a](b", "`", "a`` ` ", "> ", "- ", "1. ", "  - a\n", "|",
    "a|b\n-|-\n",
    "~~~\n", "```\n", "http://a.b/) ", "<http://", "\\", "# ", " ", "\t", "\n", "[a](http://b.c) ", "((", "~~a~~", "x",
    "\U0001f600", "***", "* * * x", "- [ ] ", "<br>", "&lt;", "'\"", "a\n", "\na\n\n    b\n",
]  # fmt: skip


@pytest.fixture(scope="module")
def here() -> Iterator[Running]:
    with running(LLM(threads=1), keys=()) as made:
        yield made


@pytest.fixture
def page(shared_page: SharedPage, here: Running) -> Iterator[Page]:
    with Visits(shared_page, here.url) as visits:
        yield visits(settings={"marks": False})


def test_elements(page: Page) -> None:
    found = {text: page.evaluate(RENDER, [text, False]) for text, _ in ELEMENTS + HOSTILE}
    assert found == dict(ELEMENTS + HOSTILE)
    assert page.evaluate("window.hacked") is None


@pytest.mark.few(1)
@pytest.mark.parametrize("sizes", [[1], [3, 1, 7]])
def test_growing_texts_end_like_whole_ones(page: Page, sizes: list[int]) -> None:
    for text in (
        SAMPLE,
        *(f"{text}\n\n{other}" for (text, _), (other, _) in pairwise(ELEMENTS)),
    ):
        _, shown, whole = page.evaluate(GROW, [text, sizes])
        assert shown == whole, text
    pieces = [
        *"\n\n\n\n  **__``~|>#-[]()!\\",
        "- ",
        "1. ",
        "```\n",
        "a",
        "b c",
        "|-|-|",
        "https://x.org",
        "    ",
        "\t",
        "\U0001f600",
    ]
    draw = random.Random(41)
    for _ in range(80):
        text = "".join(draw.choices(pieces, k=60))
        _, shown, whole = page.evaluate(GROW, [text, sizes])
        assert shown == whole, text


def test_growing_texts_do_not_flicker(page: Page) -> None:
    """Marks that are not closed yet are never shown as text, and elements never disappear."""
    texts = {
        "a **bold word** b": ["<strong>bold</strong>", "**"],
        "a `some code` b": ["<code>some</code>", "`"],
        "a *b* b": ["<em>b</em>", "*"],
        "a [link](https://x.org/abc) b": ["<span>link</span>", "https"],
        "- a\n- b": ["<ul>", "-"],
        "1. a": ["<li>", "1"],
        "# Title": ["<h3>", "#"],
        "```py\nx\n```": ["<pre", "`"],
        "a\n\n---\nb": ["<hr>", "-"],
        "| a | b |\n|---|---|\n| c | d |\n| e | f |": ["<table>", "|"],
    }
    for text, (element, mark) in texts.items():
        seen, _, _ = page.evaluate(GROW, [text, [1]])
        shown = [each.replace(' href="https://x.org', "").replace("code-", "") for each in seen]
        assert any(element in each for each in shown), text
        assert not any(
            f">{mark}" in each or f" {mark}" in each.replace(' class="', "") for each in shown
        ), (
            text,
            shown,
        )
        if element == "<table>":
            assert all(each.count("<table>") == 1 for each in seen)


@pytest.mark.parametrize(
    ("growing", "every"),
    [
        (False, 2),
        (True, 2),
        *(pytest.param(growing, 1, marks=pytest.mark.slow) for growing in (False, True)),
    ],
)
def test_hostile_texts_of_100_kilobytes(page: Page, growing: bool, every: int) -> None:
    """Each text is shown as a whole or as it grows, in turns; the slow tests show each in both
    ways.
    """
    show = """async ([text, growing]) => {
        const { Markdown } = await import("/markdown.js");
        const shown = new Markdown(document.createElement("div"));
        shown.update(text, growing);
        let depth = 0;
        for (let each = shown.element; each; each = each.querySelector(":scope > *")) depth += 1;
        return depth;
    }"""
    texts = [
        *(piece * (100_000 // len(piece)) for piece in HUGE),
        "*a " * 25_000 + "a* " * 25_000,
        "[" * 50_000 + "](b)" * 12_500,
    ]
    texts += [
        "> " * 40_000 + "- " * 10_000,
        " ".join("`" * n for n in range(1, 440)),
        "[a](b " + '"' * 90_000,
    ]
    session = page.context.new_cdp_session(page)
    # processor time, not that of a clock
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def seconds_so_far() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))

    for text in texts[growing % every :: every]:
        start = seconds_so_far()
        depth = page.evaluate(show, [text, growing])
        assert seconds_so_far() - start < 6, text[:20]  # quadratic time would be minutes
        assert depth < 50, text[:20]


def test_marks_are_switched_and_the_choice_is_stored(page: Page) -> None:
    answer_with(page, chunk(["**bold**", " and\n\n```py\nx\n```"], 0), *end(2, 1))
    ask(page, "Hi")
    tokens = page.locator(".answer .text")
    shown = page.locator(".answer .rendered")
    expect(shown.locator("strong")).to_have_text("bold")
    expect(shown).to_be_visible()
    expect(tokens).to_be_hidden()
    page.click("#marks")
    expect(tokens).to_be_visible()
    expect(shown).to_be_hidden()
    expect(tokens).to_contain_text("**bold**")
    assert json.loads(page.evaluate("localStorage['pronk.settings']"))["marks"] is True
    page.click("#marks")
    expect(page.locator("#marks")).to_have_attribute("aria-pressed", "false")
    expect(shown).to_be_visible()
    page.reload()
    expect(page.locator("#marks")).to_have_attribute("aria-pressed", "false")
    expect(shown.locator("strong")).to_be_visible()
    page.click("text=Compare with plain decoding")  # a comparison shows tokens
    expect(tokens.first).to_be_visible()
    expect(tokens.last).to_be_visible()


def test_code_is_copied(page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer_with(page, chunk(["```py\nif x:\n\ty = '<b>'\n```"], 0), *end(1, 1))
    ask(page, "Hi")
    expect(page.locator(".code-head span")).to_have_text("py")
    page.keyboard.press("Shift+Tab")
    page.locator(".code-block .copy").focus()
    page.keyboard.press("Enter")
    expect(page.locator(".code-block .copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "if x:\n\ty = '<b>'"
    expect(page.locator(".code-block .copy")).to_have_text("Copy")


def thinking(texts: list[str], step: int, ids: int, **delta: str) -> list[dict[str, Any]]:
    """Return the chunks of a step as the server sends them: one for each part of ``delta``, the
    first with tokens.
    """
    first = chunk(texts, step, ids=ids)
    parts = [{name: text} for name, text in delta.items()] or [{}]
    others = [
        {"choices": [{"index": 0, "delta": part, "finish_reason": None}]} for part in parts[1:]
    ]
    first["choices"][0]["delta"] = parts[0]
    return [first, *others]


@pytest.mark.few(1)
@pytest.mark.parametrize("marks", [False, True])
def test_thoughts_are_folded(page: Page, marks: bool) -> None:
    if marks:
        page.click("#marks")
    bodies = list[dict[str, Any]]()

    def record(request: Request) -> None:
        if request.method == "POST":
            bodies.append(json.loads(request.post_data or ""))

    page.on("request", record)
    events = [
        *thinking(["<think>"], 0, 0),
        *thinking(["\n", "First, ", "**look**"], 1, 1, reasoning_content="First, **look**"),
        *thinking(
            [".", "</think>", "\n\n", "The ", "*end*"],
            2,
            4,
            reasoning_content=".",
            content="The *end*",
        ),
        *thinking([" is", " near"], 3, 9, content=" is near"),
    ]
    answer_with(page, *events, *end(11, 4))
    ask(page, "Hi")
    details = page.locator(".thoughts")
    view = ".text" if marks else ".rendered"
    expect(details.locator("summary")).to_have_text("Thoughts")
    expect(details.locator(view)).to_be_hidden()
    answer = page.locator(f".body > {view}")
    expect(answer).to_have_text("The *end* is near" if marks else "The end is near")
    details.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(details.locator(view)).to_have_text(
        "<think>\nFirst, **look**.</think>\n\n" if marks else "First, look.", use_inner_text=False
    )
    if marks:
        # the third forward pass is in the thoughts and in the text
        assert page.locator(".body .pass").count() == 5
        assert page.locator('.body .token[tabindex="0"]').count() == 2
        page.locator(".body > .text .token").first.focus()
        page.keyboard.press("ArrowLeft")
        expect(details.locator(".token").last).to_be_focused()
        page.keyboard.press("Escape")
    else:
        expect(details.locator("strong")).to_have_text("look")
        expect(answer.locator("em")).to_have_text("end")
    ask(page, "Again")
    assert [each["content"] for each in bodies[-1]["messages"]] == [
        "Hi",
        "The *end* is near",
        "Again",
    ]
    page.remove_listener("request", record)


def test_an_answer_that_ends_in_its_thoughts(page: Page) -> None:
    answer_with(page, *thinking(["Hm", "m"], 0, 0, reasoning_content="Hmm"), *end(2, 1))
    ask(page, "Hi")
    expect(page.locator(".thoughts summary")).to_have_text("Thoughts")
    expect(page.locator(".thoughts .rendered")).to_have_text("Hmm")
    page.click("#marks")
    assert page.locator(".thoughts .token").count() == 2


def test_answers_have_no_maximum_by_default(shared_page: SharedPage, here: Running) -> None:
    bodies = list[dict[str, Any]]()
    with Visits(shared_page, here.url) as visits:
        page = visits(settings={"max_tokens": None}, own=True)  # not a text, thus the default
        page.on(
            "request",
            lambda each: each.method == "POST" and bodies.append(json.loads(each.post_data or "")),
        )
        answer_with(page, chunk(["a"], 0), *end(1, 1))
        ask(page, "Hi")
    assert "max_tokens" not in bodies[0]


def test_code_and_tables_scroll_but_not_the_page(page: Page) -> None:
    wide = (
        "| "
        + " | ".join(f"column {n}" for n in range(20))
        + " |\n"
        + "|---" * 20
        + "|\n"
        + "| value " * 20
        + "|\n"
    )
    text = f"{SAMPLE}\n\n```\n{'long line ' * 40}\n```\n\n{wide}\n{'w' * 300}\n\n> - {'v' * 200}\n"
    answer_with(page, chunk([text], 0), *end(1, 1))
    for width in (1280, 820, 390):
        page.set_viewport_size({"width": width, "height": 800})
        ask(page, "Hi")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        for name in ("pre", ".table"):
            box = page.locator(f".answer .rendered {name}").last
            assert box.evaluate("box => box.scrollWidth > box.clientWidth"), (name, width)
            assert box.get_attribute("tabindex") == "0"
