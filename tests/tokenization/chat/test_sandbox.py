"""Templates that repeat themselves are stopped before they do; all others say what they say in Jinja's own sandbox."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import Template
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.filters import FILTERS
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS

from pronk.tokenization.chat import costs
from pronk.tokenization.chat.functions import FILTERS as HUGGING_FACES_FILTERS
from pronk.tokenization.chat.meter import Meter, OverBudgetError
from pronk.tokenization.chat.sandbox import Sandbox

BUDGET = 40_000  # units; none of the templates below takes long without it
VALUES: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be <brief> & 'kind'."},
        {"role": "user", "content": "  What is\n2 + 2?\n"},
        {
            "role": "assistant",
            "content": "<think>\nhm\n</think>\n\n4",
            "tool_calls": [{"name": "f", "arguments": {"a": 1}}],
        },
        {"role": "tool", "content": "ok"},
    ],
    "tools": [{"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}],
    "bos_token": "<s>",
}


def render(source: str, units: float = 10**7) -> str:
    sandbox = Sandbox(Meter(0))
    code = sandbox.compile_priced(sandbox.parse(source))
    paying = Sandbox(Meter(units))
    return Template.from_code(paying, code, paying.globals).render(**VALUES)


GROWS = "{% set n = namespace(x='ab', l=[1], t=(1,)) %}{% for i in range(14) %}{% set BODY %}{% endfor %}"
SHARED = "{% set n = namespace(a=[1], b=[1], t=(1,)) %}{% for i in range(14) %}{% set n.a = [n.a, n.a] %}"
SHARED += "{% set n.b = [n.b, n.b] %}{% set n.t = (n.t, n.t) %}{% endfor %}"
VARARGS = "{% macro m() %}{{ varargs | length }}{% endmacro %}"
DEEP = "{% set n = namespace(t=()) %}{% for i in range(200) %}{% set n.t = (n.t,) %}{% endfor %}"
LONG = "{% set s = 'ab' * 3000 %}"
REPEATED = {
    # Bodies that run again and again.
    "loops": "{% for a in range(300) %}{% for b in range(300) %}{% endfor %}{% endfor %}",
    "loops of output": "{% for a in range(9000) %}text{% endfor %}",
    "loops that are passed over": "{% for a in range(300) %}{% for b in range(300) if false %}{% endfor %}{% endfor %}",
    "loops that go on": "{% for a in range(300) %}{% for b in range(300) %}{% continue %}{% endfor %}{% endfor %}",
    "loops with a long body": "{% for a in range(90) %}" + "{% if a %}{% endif %}" * 40 + "{% endfor %}",
    "recursive loops": "{% for a in [9] recursive %}{{ loop([1]) + loop([1]) if loop.depth < 13 }}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(13) }}",
    "defaults": "{% macro m(a=" + "-1" * 90 + ") %}{% endmacro %}{% for i in range(99) %}{{ m() }}{% endfor %}",
    "callers": "{% macro m() %}" + "{{caller()}}" * 99 + "{% endmacro %}{% call m() %}" + "{{1}}" * 49 + "{%endcall%}",
    "blocks": "{% for i in range(400) %}{{ self.b() }}{% endfor %}{% block b %}" + "{{ 1 }}" * 9 + "{% endblock %}",
    # Operators.
    "text times a number": "{{ 'ab' * 100000 }}",
    "a number times text": "{{ 100000 * 'ab' }}",
    "a list times a number": "{{ ([1] * 100000) | length }}",
    "a power": "{{ 2 ** 4000 }}",
    "doubled text": GROWS.replace("BODY", "n.x = n.x + n.x"),
    "joined text": GROWS.replace("BODY", "n.x = n.x ~ n.x"),
    "doubled lists": GROWS.replace("BODY", "n.l = n.l + n.l"),
    "captured text": GROWS.replace("BODY", "x %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = x"),
    "slices of text": LONG + "{% for i in range(20) %}{% set t = s[1:] %}{% endfor %}",
    "slices of lists": "{% set l = [1] * 500 %}{% for i in range(20) %}{% set t = l[1:] %}{% endfor %}",
    "compared text": LONG + "{% set t = s[:] %}{% for i in range(20) %}{% if s == t %}{% endif %}{% endfor %}",
    "searched text": LONG + "{% for i in range(20) %}{% if 'c' in s %}{% endif %}{% endfor %}",
    # What is in a value again and again.
    "shared lists as text": SHARED + "{{ n.a }}",
    "shared lists as JSON": SHARED + "{{ n.a | tojson | length }}",
    "shared lists compared": SHARED + "{% if n.a == n.b %}{% endif %}",
    "shared lists searched": SHARED + "{% if n.a in [n.b] %}{% endif %}",
    "shared lists tested": SHARED + "{% if n.a is eq(n.b) %}{% endif %}",
    "shared lists hashed": SHARED + "{{ {}[n.t] }}",
    "shared lists looked up": SHARED + "{{ {}.get(n.t) }}",
    "shared lists as arguments": SHARED + "{{ [{}] | map(attribute='x', default=n.t) | list | length }}",
    # Widths.
    "%": "{{ '%100000d' % 1 }}",
    "% precision": "{{ '%.100000f' % 1.0 }}",
    "% *": "{{ '%*d' % (100000, 1) }}",
    "% name": "{{ '%(a)100000d' % {'a': 1} }}",
    "% repeated": LONG + "{{ '%(a)s%(a)s%(a)s%(a)s%(a)s%(a)s%(a)s' % {'a': s} }}",
    "% of markup": "{{ ('%100000d' | safe) % 1 }}",
    "format": "{{ '{:100000}'.format(1) }}",
    "format nested": "{{ '{:{}}'.format(1, 100000) }}",
    "format_map": "{{ '{a:100000}'.format_map({'a': 1}) }}",
    "format repeated": LONG + "{{ '{0}{0}{0}{0}{0}{0}{0}'.format(s) }}",
    "format of markup": "{{ ('{:100000}' | safe).format(1) }}",
    "format by attr": "{{ ('{:100000}' | attr('format'))(1) }}",
    "format filter": "{{ '%100000d' | format(1) }}",
    # Methods.
    **{name: f"{{{{ 'x'.{name}(100000) }}}}" for name in ("center", "ljust", "rjust", "zfill")},
    "expandtabs": "{{ '\t'.expandtabs(tabsize=100000) }}",
    "join": LONG + "{{ s.join('abcdefgh') }}",
    "replace": LONG + "{{ 'aaaaaaa'.replace('a', s) }}",
    "replace nothing": LONG + "{{ 'aaaaaa'.replace('', s) }}",
    "split": LONG + "{{ s.split('a') | length }}",
    "split at blanks": LONG + "{{ s.split() | length }}",
    "splitlines": LONG + "{{ s.splitlines() | length }}",
    **{name: LONG + f"{{{{ s.{name}('c' ~ s[:20]) | length }}}}" for name in ("rsplit", "rpartition")},
    "rfind": LONG + "{{ s.rfind('c' ~ s[:20]) }}",
    "strip": LONG + "{{ s.strip('b' * 20 ~ 'a') }}",
    # Filters.
    "center filter": "{{ 'x' | center(100000) }}",
    "center block": "{% filter center(100000) %}x{% endfilter %}",
    "center set": "{% set x | center(100000) %}x{% endset %}",
    "center by map": "{{ range(9) | map('string') | map('center', 10000) | list | length }}",
    "join filter": LONG + "{{ range(9) | join(s) }}",
    "join of a generator": LONG + "{{ range(9) | select('number') | join(s) }}",
    "replace filter": LONG + "{{ 'aaaaaaa' | replace('a', s) }}",
    "indent": "{{ 'a\n\n\n\n' | indent(20000, blank=true) }}",
    "indent by text": LONG + "{{ 'a\u2028\u2028\u2028\u2028\u2028\u2028\u2028' | indent(s, blank=true) }}",
    "tojson indent": "{{ [[1]] | tojson(indent=100000) }}",
    "tojson separators": LONG + "{{ [1, 2, 3, 4, 5, 6, 7, 8] | tojson(separators=(s, s)) }}",
    "batch": "{{ [1] | batch(100000, 'x') | list | length }}",
    "slice": "{{ [1] | slice(100000) | list | length }}",
    "round": "{{ 1 | round(100000, 'ceil') }}",
    "round down": "{{ 1 | round(-100000) }}",
    "sum": "{{ (range(300) | batch(1) | sum(start=[])) | length }}",
    "unique": "{{ range(0, 99 * (2 ** 61 - 1), 2 ** 61 - 1) | unique | list | length }}",
    "list of text": LONG + "{{ s | list | length }}",
    "trim": LONG + "{{ s | trim('b' * 20 ~ 'a') }}",
    "attributes": "{% set n = namespace() %}{% set n.a = n %}{{ [n] | map(attribute='a.' * 30000 ~ 'a') | first }}",
    **{name: LONG + f"{{{{ s | {name} }}}}" for name in ("title", "wordcount", "wordwrap(1)", "striptags", "urlize")},
    # Functions.
    "strftime_now": "{{ strftime_now('%c' * 100) }}",
    "arguments": VARARGS + "{{ m(*range(3000)) }}",
    "the loop as arguments": VARARGS + "{% for i in range(3000) %}{{ m(*loop) }}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("name", REPEATED)
def test_repetition_is_paid_for_before_it_is_done(name: str) -> None:
    with pytest.raises(OverBudgetError):
        render(REPEATED[name], BUDGET)


@pytest.mark.parametrize("name", sorted(set(REPEATED) - {"unique"}))
def test_these_templates_do_repeat_themselves(name: str) -> None:
    """They are stopped for what they do, not by mistakes: with more to spend, each of them ends."""
    render(REPEATED[name], 10**12)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ 'x'.encode() }}", "a template cannot call 'encode'"),
        ("{{ 'x'.translate({120: 'y'}) }}", "a template cannot call 'translate'"),
        ("{{ (1).to_bytes(100000, 'big') }}", "a template cannot call 'to_bytes'"),
        ("{{ 'x'() }}", "a template cannot call 'str'"),
        ("{{ {(1, 2): 3} }}", "expected a text or a small integer as the key of a dictionary, found tuple"),
        ("{{ {2 ** 61: 3} }}", "as the key of a dictionary, found int"),
        ("{{ dict([((1, 2), 3)]) }}", "as the key of a dictionary, found tuple"),
        ("{{ namespace([((1, 2), 3)]) }}", "as the key of a dictionary, found tuple"),
        ("{% for i in [1] %}{{ loop | list }}{% endfor %}", "found the loop itself"),
        ("{{ ('f' * 2000) | int(base=16) + 1 }}", "expected integers of at most 4096 bits, found 8000"),
        (DEEP + "{{ {}[n.t] }}", "levels"),
    ],
)  # fmt: skip
def test_what_no_template_needs(source: str, message: str) -> None:
    with pytest.raises(SecurityError, match=message):
        render(source)


# One template a line.
SAME = r"""
{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}
{% for m in messages if m.role != 'tool' %}{{ loop.index0 }}{{ loop.revindex }}{{ m.content }}{% else %}-{% endfor %}
{% for m in messages[::-1] %}{{ loop.previtem and loop.previtem.role }}-{{ loop.nextitem is defined }}{% endfor %}
{% for m in messages | rejectattr('role', 'in', ['tool']) | list %}{{ m['role'] | title }}{% break %}{% endfor %}
{% for x in [] %}{% else %}empty{% endfor %}{{ messages[1:3][-1].role }}
{% if messages | selectattr('role', 'equalto', 'nobody') %}a generator is true{% endif %}
{{ messages | map(attribute='role') | first }}{{ messages | map(attribute='role') | map('upper') | join(', ') }}
{% set n = namespace(i=0) %}{% for m in messages if m.role == 'user' %}{% set n.i = 9 %}{% endfor %}{{ n.i }}
{{ messages[2].content.split('</think>')[-1].lstrip('\n') }}{{ messages[2]['content'].rsplit('>', 1) }}
{{ '<think>' in messages[2].content and 'tool_calls' in messages[2] }}{{ 'content' not in messages[0] }}
{{ messages[1].content.strip().replace('2', 'two').upper() }}{{ messages[1].content | trim | length }}
{% macro m(v) %}{% for k in v %}{{ k }}{{ m(v[k]) if v[k] is mapping }}{% endfor %}{% endmacro %}{{ m({1: {2: 3}}) }}
{% macro m(a=5) %}{{ caller(a) }}{{ varargs }}{{ kwargs }}{% endmacro %}{% call(x) m(1, 2, t=4) %}{{ x }}{% endcall %}
{% for a in [[1, [2]], [3]] recursive %}{{ loop.depth }}{{ loop(a) if a is iterable else a }}{% endfor %}
{% block b %}{{ bos_token }}{% endblock %}{{ self.b() }}{% filter upper %}abc{% endfilter %}
{% set x %}a{{ 1 }}{% endset %}{{ x }}{% with a = 1 %}{{ a }}{% endwith %}{% raw %}{{ }}{% endraw %}
{% for i in [1, 1, 2] %}{{ loop.cycle('a', 'b') }}{{ loop.changed(i) }}{% endfor %}
{{ messages[0].nothing is defined }}{{ missing }}{{ missing | default('d') }}{{ 'x' if false }}{{ none }}{{ true }}
{{ 7 // 2 }}{{ 7 % 2 }}{{ 2 ** 10 }}{{ -3 + 5 * 2 }}{{ 1 / 4 }}{{ [1] + [2] }}{{ (1,) * 2 }}{{ 'a' * 3 }}{{ 1 < 2 }}
{{ '%s-%03d %5.1f' % ('a', 7, 2.5) }}{{ '{!r:>5}{}'.format('a', 1) }}{{ '{0} {x[a]:>5}'.format('q', x={'a': 1}) }}
{{ '%s' | format('a') }}{{ '{a}'.format_map({'a': 1}) }}{{ ('<b>{}</b>' | safe).format('<') }}
{{ '<' | e }}{{ ('<' | e) ~ '<' }}{{ '<' ~ 'a' }}{% autoescape true %}{{ '<' }}{{ '<' ~ '>' }}{% endautoescape %}
{{ [3, 1, 2] | sort | reverse | list }}{{ {'b': 1, 'a': 2} | dictsort }}{{ [1, 2, 3, 4, 5] | batch(2, 0) | list }}
{{ [1, 2, 3] | slice(2) | list }}{{ 2.567 | round(1) }}{{ 'a' | center(5) }}{{ 'a b' | indent(2, true) }}
{{ messages | groupby('role') | map('first') | list }}{{ [1, 1] | unique | list }}{{ [1, 2] | sum }}{{ [1, 2] | max }}
{{ messages | tojson }}{{ {'a': [1, {'b': '<é>'}]} | tojson(indent=2) }}{{ messages | string | length }}
{{ {2: 3}.get(2) }}{{ {'a': 1} | items | list }}{{ dict(a=1).keys() | list }}{{ messages[0].values() | first }}
{{ tools | pprint }}{{ 'a b' | wordcount }}{{ 'ab d' | truncate(3) }}{{ 'a b' | wordwrap(1) }}{{ 'a.b' | urlize }}
{{ range(3) | list }}{{ range(1, 9, 3) | join }}{{ 'abc'[::-1] }}{{ 'abc' | reverse }}{{ 'a' | first }}{{ '7' | int }}
{{ 1 is odd }}{{ 4 is divisibleby(2) }}{{ 'a' is in(['a']) }}{{ 'A' is upper }}{{ messages is iterable }}{{ x is none }}
""".strip().splitlines()


def jinjas_own(source: str) -> str:
    """The oracle: Jinja's sandbox as Hugging Face's tokenizers set it up, without a budget."""
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    sandbox.filters.update(HUGGING_FACES_FILTERS)
    return sandbox.from_string(source).render(**VALUES)


@pytest.mark.parametrize("source", SAME)
def test_templates_say_what_they_say_in_jinja(source: str) -> None:
    assert render(source) == jinjas_own(source) != ""


def test_every_filter_and_test_of_jinja_has_a_cost() -> None:
    """Without one of its own a filter costs the most that there is, so this is for attention, not for safety."""
    free = {name for name in FILTERS if costs.filter_cost(name) is costs.filter_cost("no such filter")}
    assert free == {"pprint", "striptags", "sum", "unique", "urlize", "wordwrap", "xmlattr"}
    assert len({name for name in TESTS if costs.test_cost(name) is costs.test_cost("no such test")}) > 10


def test_renderings_have_budgets_of_their_own() -> None:
    sandbox = Sandbox(Meter(0))
    code = sandbox.compile_priced(sandbox.parse("{% for i in range(10) %}{{ i }}{% endfor %}"))
    for _ in range(100):
        paying = Sandbox(Meter(2000))
        assert Template.from_code(paying, code, paying.globals).render() == "0123456789"
