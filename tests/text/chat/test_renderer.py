"""Hostile templates end within the limits of time and memory, and the next template is rendered all
the same.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from pronk.base.errors import PromptError, TokenizerError
from pronk.text.chat.template import ChatTemplate, Renderer
from waiting import HUNG, eventually, processor_limit

USER = {"role": "user", "content": "Hi"}
TOO_LONG = (
    "chat template: expected one that ends, found one that loops or repeats for too long with "
    "these messages; use"
)
LOOPS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
# BODY runs 90,000 times. ONE is 1, unknown when the template is compiled.
GROWS = (
    "{% set n = namespace(x='ab', l=[1], t=(1,)) %}{% for i in range(90000) %}{% set BODY %}{% "
    "endfor %}"
)
SHARED = GROWS.replace("90000", "60").replace("BODY", "n.l = [n.l, n.l]")
LONG = "{% set s = 'ab' * (10**7 * ONE) %}"
HOSTILE = {
    # Loops.
    "loops": LOOPS,
    "loops that skip": LOOPS.replace("in range(90000) %}{% endfor", "in range(90000) if false %}{% "
        "endfor"),
    "recursive "
    "loops": ("{% for a in [9] recursive %}{{ loop([1]) + loop([1]) if loop.depth < 60 }}{% endfor "
        "%}"),
    "endless macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "macros": ("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) "
        "}}"),
    "blocks": LOOPS.replace("{% endfor %}", "{{ self.b() }}{% endfor %}", 1) + "{% block b %}x{% endblock %}",
    # Single operations.
    "text times a number": "{{ ('ab' * (10**10 * ONE)) | length }}",
    "a list times a number": "{{ ([1] * (10**9 * ONE)) | length }}",
    "a power": "{{ 7 ** (10**9 * ONE) }}",
    "a power that is constant": "{{ (7 ** (10**9)) is odd }}",
    "printf": "{{ '%*d' % (2 * 10**9 * ONE, 1) }}",
    "format": "{{ ('{:' ~ 10**10 * ONE ~ '}').format(1) }}",
    "center": "{{ 'x'.center(10**10 * ONE) }}",
    "center filter": "{{ 'x' | center(10**10 * ONE) }}",
    "indent": "{{ 'a\n\n\n\n' | indent(10**10 * ONE, blank=true) }}",
    "batch": "{{ [1] | batch(10**10 * ONE, 'x') | list | length }}",
    "join": LONG + "{{ range(9000) | join(s) }}",
    "replace": LONG + "{{ s.replace('a', s) }}",
    "split": LONG + "{{ s.split('a') | length }}",
    "list of text": LONG + "{% set l = s | list %}{{ (l + l) | tojson }}",
    "regular "
    "expressions": ("{{ ('<!--' * (10**6 * ONE)) | striptags }}{{ ('www.a' * (10**6 * ONE)) | urlize "
        "}}"),
    "equal hash values": "{{ range(0, 90000 * (2**61 - 1), 2**61 - 1) | unique | list | length }}",
    # Values that grow.
    "doubled text": GROWS.replace("BODY", "n.x = n.x ~ n.x"),
    "captured text": GROWS.replace("BODY", "x %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = x"),
    "doubled lists": GROWS.replace("BODY", "n.l = n.l + n.l"),
    "shared lists as text": SHARED + "{{ n.l }}",
    "shared lists as JSON": SHARED + "{{ n.l | tojson }}",
    "shared lists as an error": SHARED + "{{ raise_exception(n.l) }}",
    "nested tuples": GROWS.replace("BODY", "n.t = (n.t,)") + "{{ n.t }}",
    "long output": "{% for a in range(90000) %}{{ 'ab' * 10000 }}{% endfor %}",
    "long result": "{{ 'ab' * (2**24 * ONE + 1) }}",
}  # fmt: skip


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    made = Renderer(seconds=HUNG, memory=2**28)
    yield made
    made.close()


@pytest.fixture(scope="module")
def hasty() -> Iterator[Renderer]:
    made = Renderer(seconds=0.15, memory=2**28)
    yield made
    made.close()


def render_in_time(hasty: Renderer, source: str, content: str) -> str:
    """Render a short template with a message; again if the machine was too busy for the limit of
    time.
    """
    rendered = list[str]()

    def is_in_time() -> bool:
        with suppress(PromptError, TokenizerError):
            template = ChatTemplate(source, {}, renderer=hasty)
            rendered.append(template.render([{"role": "user", "content": content}]))
        return bool(rendered)

    assert eventually(is_in_time)
    return rendered[0]


@pytest.mark.few(11)
@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_hostile_templates_are_stopped(source: str, hasty: Renderer) -> None:
    with processor_limit(5), pytest.raises((PromptError, TokenizerError)) as caught:
        ChatTemplate(source.replace("ONE", "(messages | length)"), {}, renderer=hasty).render(
            [USER]
        )
    assert TOO_LONG in str(caught.value) or "it takes too long, or too much memory" in str(
        caught.value
    )
    assert "\n" not in str(caught.value)
    assert render_in_time(hasty, "{{ messages[0].content }}", "Hi") == "Hi"


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not enforce the limit")
def test_memory_is_limited() -> None:
    renderer = Renderer(seconds=600, memory=2**28)
    text = "{{ ('ab' * (SIZE * (messages | length))) | length }}"
    assert ChatTemplate(text.replace("SIZE", "10**7"), {}, renderer=renderer).render([USER]) == str(
        2 * 10**7
    )
    for size in ("2**27", "10**12"):
        with pytest.raises(PromptError, match=TOO_LONG):
            ChatTemplate(text.replace("SIZE", size), {}, renderer=renderer).render([USER])
    renderer.close()


def test_threads_share_a_renderer(hasty: Renderer) -> None:
    source = (
        "{% if messages[0].content == 'loop' %}" + LOOPS + "{% endif %}{{ messages[0].content }}"
    )

    def render(content: str) -> str:
        if content != "loop":
            return render_in_time(hasty, source, content)
        with pytest.raises((PromptError, TokenizerError)) as caught:
            ChatTemplate(source, {}, renderer=hasty).render([{"role": "user", "content": content}])
        return str(caught.value)

    contents = ["loop", *map(str, range(40)), "loop", *map(str, range(40))]
    with ThreadPoolExecutor(4) as threads:
        rendered = list(threads.map(render, contents))
    for content, text in zip(contents, rendered, strict=True):
        assert TOO_LONG in text if content == "loop" else text == content


def test_a_child_process_that_ended_is_replaced(renderer: Renderer) -> None:
    template = ChatTemplate("{{ messages[0].content }}", {}, renderer=renderer)
    child = renderer._process._child
    assert child is not None
    child.kill()
    child.wait()
    assert template.render([USER]) == "Hi"
    renderer.close()
    assert template.render([USER]) == "Hi"


def test_a_child_process_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(
        TokenizerError, match=r"found that it ended with code 1; check that this Python has jinja2"
    ):
        Renderer().ask("x")


FORKS = """
import os
from pronk.text.chat.template import default_renderer as renderer
assert renderer.ask("{{ x }}", {"x": 0})["text"] == "0"
pid = os.fork()
for number in range(100):
    x = number + (1000 if pid else 2000)
    assert renderer.ask("{{ x }}", {"x": x})["text"] == str(x)
if pid:
    assert os.waitpid(pid, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
def test_a_fork_has_its_own_child_process() -> None:
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=HUNG)


def test_templates_cannot_reach_files(renderer: Renderer) -> None:
    for source in (
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__class__.__mro__ }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ dict.__class__.__base__.__subclasses__() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ (raise_exception | attr('__globals__')).x }}",
        "{{ '{0.__class__.x}'.format(1) }}",
        "{{ cycler.mro() }}",
    ):
        with pytest.raises(PromptError, match=r"refuses these messages: .") as caught:
            ChatTemplate(source, {}, renderer=renderer).render([USER])
        assert "\n" not in str(caught.value)


def test_requests_do_not_share_values(renderer: Renderer) -> None:
    template = ChatTemplate("{% set x = x | default(0) + 1 %}{{ x }}", {}, renderer=renderer)
    messages: list[dict[str, Any]] = [USER]
    assert [template.render(messages) for _ in range(3)] == ["1"] * 3
