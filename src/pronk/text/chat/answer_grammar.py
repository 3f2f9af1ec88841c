r"""Grammar of an answer: thoughts, then tool calls, text or a required form such as JSON.

The grammar is written in llguidance's dialect of Lark. The rules fix every character of a call
except the name of the tool and the arguments, which fit the tool's schema. If calls are optional,
the grammar allows any text up to the beginning of a call, but then requires the call. Tools with
equal schemas (below, ``f`` and ``g``) share their rules, so that a grammar of a thousand tools
stays small.

Example: optional calls of Qwen3. The added tokens ``<tool_call>``, ``<think>`` and ``</think>``,
with the ids 7, 8 and 9, are not special. Token 5 is another added token that llguidance matches
only by its id. The rules of text are::

    start: (<[8]> thoughts GAP)? answer
    thoughts: text <[9]> | (TEXT <[5]>)* thoughts_marker
    thoughts_marker[lazy]: TEXT "</think>"
    answer: (call_start body){0,16} text
    call_start: text <[7]> | (TEXT <[5]>)* call_start_marker
    call_start_marker[lazy]: TEXT "<tool_call>"
    text: (TEXT <[5]>)* TEXT
    TEXT: /(.|\n)*/

The second alternatives of ``thoughts`` and ``call_start`` match markers that the model writes with
ordinary tokens. ``lazy`` makes a marker end at its first occurrence.

If a call without markers may be the whole answer (:class:`~pronk.text.chat.calls.BareCallReader`),
text does not begin like such a call, so that only the rule ``bare`` continues one::

    answer: bare | first_call body (call_start body){0,15} text | first
    bare: OPENING_0_0 SPACE? arguments_0 SPACE? "}" SPACE? | …
    OPENING_0_0: OPENING_0 NAME_0 AFTER_NAME
    NAME_0: /"(?:f|g)"/
    BARE: (OPENING_0 | OPENING_1 | OPENING_2) (NAME_0 | NAME_1) AFTER_NAME TEXT
    first: PLAIN? | PLAIN? <[5]> (TEXT <[5]>)* TEXT
    PLAIN: TEXT & ~BARE
    first_call: first <[7]> | first_call_marker | PLAIN? <[5]> (TEXT <[5]>)* call_start_marker
    first_call_marker[lazy]: MARKED
    MARKED: (TEXT "<tool_call>") & ~BARE
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

from pronk.base.errors import OptionError, refuse
from pronk.text.chat.calls import AFTER_NAME, BEFORE_NAME, OPENINGS
from pronk.text.chat.dialects import MAX_IDENT, ReasoningFormat, ToolDialect
from pronk.text.chat.symbols import TokenSymbols
from pronk.text.guide import MAX_SIZE, Guide, schema_text
from pronk.text.json_schema.relax import Relaxed, check, relax
from pronk.text.json_schema.translation import TYPES

# Where thoughts may be in an answer: nowhere, or at its beginning. ``"open"``: the prompt ends with
# the begin marker of thoughts, so the answer begins within them.
Thinking = Literal["never", "optional", "open"]

# Maximum characters of the rules for the arguments of all tools in a grammar. The other half of the
# grammar is left to names of tools and to a form of the text.
_MAX_SCHEMAS_SIZE = MAX_SIZE // 2
_RULES_SIZE = 500  # maximum characters of a tool's other rules, besides those of its arguments
# Maximum characters of white space at one place of a call without markers. Without a limit, a model
# could write white space for ever.
_MAX_SPACE = 16
MAX_CALLS = 16  # maximum number of calls in an answer; a small model may repeat calls without end
# Lark's numbers of repetitions: 0 to MAX_CALLS calls, and as many after the first call.
_CALLS = f"{{0,{MAX_CALLS}}}"
_MORE_CALLS = f"{{0,{MAX_CALLS - 1}}}"
_SPACES = r"[ \t\r\n]*"
# An escaped character, or a slash; Lark needs a slash escaped.
_SLASH = re.compile(r"(\\.)|/", re.DOTALL)


@dataclass(frozen=True)
class AnswerGrammar:
    """Builder of the grammars that force the answers of one model.

    Attributes:
        symbols: symbols of the model's tokens.
        dialect: format of calls; ``None`` for answers without calls.
        reasoning: format of thoughts; ``None`` if the model does not think.
    """

    symbols: TokenSymbols
    dialect: ToolDialect | None
    reasoning: ReasoningFormat | None

    def guide(
        self,
        schemas: Mapping[str, str],
        *,
        form: Guide | None = None,
        allow_text: bool = True,
        allow_multiple: bool = True,
        thinking: Thinking = "never",
        begun: bool = False,
    ) -> Guide | None:
        """Return the guide of an answer; ``None`` if the answer may be any text.

        Args:
            schemas: schema of the arguments (:func:`arguments_schema`) of each allowed tool, by the
                tool's name.
            form: required form of the text; ``None`` for any text.
            allow_text: allow text, in the required form, instead of calls.
            allow_multiple: allow more than one call.
            thinking: place of thoughts in the answer.
            begun: whether the prompt has the beginning of the text, header included.

        Raises:
            OptionError: the schemas and the form are too large together. Schemas that
                :func:`relax_tools` returned never are without a form.
        """
        # Whether an answer without calls may have anything in addition to its text: thoughts, or a
        # header.
        has_headers = self.reasoning is not None and (
            thinking != "never" or (bool(self.reasoning.before_text) and not begun)
        )
        if not schemas and (form is None or not has_headers):
            return form
        rules = [self._start(thinking)]
        if thinking != "never" and self.reasoning is not None:
            rules += self._until("thoughts", self.reasoning.end)
        rules += ["TEXT: /(.|\\n)*/", f"text: {self._others} TEXT"]
        rules += self._answer(
            schemas, form, allow_text=allow_text, allow_multiple=allow_multiple, begun=begun
        )
        grammar = "\n".join(rules)
        if schemas and len(grammar) > MAX_SIZE:
            expected = f"tools and a form whose grammar has at most {MAX_SIZE} characters"
            refuse(
                "tools",
                f"expected {expected}, found {len(grammar)}; use fewer or smaller ones",
                OptionError,
            )
        return Guide(grammar=grammar)

    @property
    def _other_ids(self) -> str:
        """Expression for the tokens that llguidance matches by id only, except markers: ``<[5]>``.

        Empty if the tokenizer has no such tokens.
        """
        markers = [self.dialect.begin] if self.dialect else []
        if self.reasoning is not None:
            markers += [self.reasoning.begin, self.reasoning.end]
        return self.symbols.other_ids(*markers)

    @property
    def _others(self) -> str:
        """Expression for text up to and including its last token that is matched by id only.

        It is ``(TEXT <[5]>)*``, or empty if the tokenizer has no such tokens.
        """
        return f"(TEXT {self._other_ids})*" if self._other_ids else ""

    @property
    def _first_others(self) -> str:
        """Grammar expression for the beginning of an answer that contains added tokens.

        llguidance matches these tokens only by their ids. The expression covers the answer up to
        the last of them, at least one, and excludes text that begins like a tool call without
        markers.
        """
        return f"PLAIN? {self._other_ids} {self._others}"

    def _first_text(self) -> list[str]:
        """Return the rules of ``first``: text at the beginning of an answer that is no bare call.

        A bare call is one without markers; the terminal ``BARE`` matches texts that begin like one,
        and must be among the rules as well.
        """
        more = f" | {self._first_others} TEXT" if self._other_ids else ""
        return ["PLAIN: TEXT & ~BARE", f"first: PLAIN?{more}"]

    def _start(self, thinking: Thinking) -> str:
        """Return the rule ``start``: thoughts, if ``thinking`` allows them, then the answer."""
        reasoning = self.reasoning
        if thinking == "never" or reasoning is None:
            return "start: answer"
        gap = self.symbols.grammar(reasoning.after_end) or '("\\n\\n" | "\\n")?'
        if thinking == "open":
            return f"start: (thoughts {gap}) answer"
        return f"start: ({self.symbols.grammar(reasoning.begin)} thoughts {gap})? answer"

    def _until(self, rule: str, marker: str) -> list[str]:
        """Return the rules for free text that ends with a marker, under the name ``rule``."""
        alternatives = []
        rules = []
        if marker in self.symbols.id_only:
            alternatives.append(f"text {self.symbols.grammar(marker)}")
        if marker not in self.symbols.of_marker:
            alternatives.append(f"{self._others} {rule}_marker")
            rules.append(f"{rule}_marker[lazy]: TEXT {json.dumps(marker)}")
        return [f"{rule}: {' | '.join(alternatives)}", *rules]

    def _answer(
        self,
        schemas: Mapping[str, str],
        form: Guide | None,
        *,
        allow_text: bool,
        allow_multiple: bool,
        begun: bool,
    ) -> list[str]:
        """Return the rule ``answer``, for the part after the thoughts, and the rules that it needs.

        The arguments are those of :meth:`guide`.
        """
        rules = []
        dialect = self.dialect
        if form is not None:
            rules.append(f"form: {_form(form)}")
        header = ""
        if begun:
            header = ""
        elif dialect is not None:
            header = dialect.before_text
        elif self.reasoning is not None:
            header = self.reasoning.before_text
        content = f"{self.symbols.grammar(header)} {'text' if form is None else 'form'}"
        if not schemas or dialect is None:
            return [f"answer: {content}", *rules]
        rules += self._calls(dialect, schemas, allow_multiple=allow_multiple)
        if allow_text and form is None and not header:
            return [*self._text_and_calls(dialect, schemas, allow_multiple=allow_multiple), *rules]
        call = "body" if dialect.marker_optional else f"{self.symbols.grammar(dialect.begin)} body"
        if allow_multiple and dialect.repeats_markers:
            call += f" ({self.symbols.grammar(dialect.between_calls)} {call}){_MORE_CALLS}"
        return [f"answer: {call} | {content}" if allow_text else f"answer: {call}", *rules]

    def _calls(
        self, dialect: ToolDialect, schemas: Mapping[str, str], *, allow_multiple: bool
    ) -> list[str]:
        """Return the rules for what follows the begin marker of calls: ``body``, and its parts.

        ``body`` is one call, or several if the format has several within one pair of markers.
        """
        text = self.symbols.grammar
        more = ""
        if dialect.separator is not None and allow_multiple:
            more = f" ({text(dialect.separator)} call){_MORE_CALLS}"
        end = f"{text(dialect.before_end)} {text(dialect.end)}"
        rules = [f"body: {text(dialect.after_begin)} call{more} {end}"]
        rules.append(f"call: {text(dialect.before_name)} tool {text(dialect.after_arguments)}")
        groups = _names_by_schema(schemas)
        tools = [f"tool_{number}" for number in range(len(groups))]
        rules.append(f"tool: {' | '.join(tools)}")
        ident = ""
        if dialect.before_ident:
            ident = f"({text(dialect.before_ident)} /[a-zA-Z0-9]{{1,{MAX_IDENT}}}/)?"
        before_arguments = text(dialect.before_arguments)
        values = dict[str, str]()
        rules += dialect.arguments.shared_rules(self.symbols)
        for number, (schema, names) in enumerate(groups.items()):
            arguments = f"arguments_{number}"
            name = f"/{_one_of(names)}/"
            rules.append(f"{tools[number]}: {name} {ident} {before_arguments} {arguments}")
            rules += dialect.arguments.rules(arguments, schema, values, self.symbols)
        return rules

    def _text_and_calls(
        self, dialect: ToolDialect, schemas: Mapping[str, str], *, allow_multiple: bool
    ) -> list[str]:
        """Return the rule ``answer`` for text that may contain calls, and rules that it needs."""
        if dialect.marker_optional:
            begin = f" ({self.symbols.grammar(dialect.begin)} body)?" if dialect.begin else ""
            bare = f"BARE: {json.dumps(dialect.before_name)} TEXT"
            return [f"answer: body | first{begin}", bare, *self._first_text()]
        several = allow_multiple and dialect.repeats_markers
        rules = self._until("call_start", dialect.begin)
        if not dialect.allows_bare:
            answer = f"(call_start body){_CALLS} text" if several else "call_start body | text"
            return [f"answer: {answer}", *rules]
        rest = f" (call_start body){_MORE_CALLS} text" if several else ""
        rules += [*self._first_text(), *self._first_call(dialect.begin), *_bare_calls(schemas)]
        return [f"answer: bare | first_call body{rest} | first", *rules]

    def _first_call(self, marker: str) -> list[str]:
        """Return the rule ``first_call``: text up to and including the first marker of calls.

        The text is the beginning of an answer. It does not begin like a call without markers.
        """
        alternatives = []
        rules = []
        if marker in self.symbols.id_only:
            alternatives.append(f"first {self.symbols.grammar(marker)}")
        if marker not in self.symbols.of_marker:
            alternatives.append("first_call_marker")
            if self._other_ids:
                alternatives.append(f"{self._first_others} call_start_marker")
            rules.append("first_call_marker[lazy]: MARKED")
            rules.append(f"MARKED: (TEXT {json.dumps(marker)}) & ~BARE")
        return [f"first_call: {' | '.join(alternatives)}", *rules]


def _bare_calls(schemas: Mapping[str, str]) -> list[str]:
    """Return the rules for a call without markers as a whole answer.

    The rule ``bare`` matches such a call, and ``BARE`` every text that begins like one.
    """
    groups = list(_names_by_schema(schemas).values())
    openings = [f"OPENING_{number}" for number in range(len(OPENINGS))]
    names = [f"NAME_{number}" for number in range(len(groups))]
    rules = [f"SPACE: /[ \\t\\r\\n]{{1,{_MAX_SPACE}}}/", f"AFTER_NAME: /{_spaced(AFTER_NAME)}/"]
    for name, group in zip(names, groups, strict=True):
        rules.append(f'{name}: /"{_one_of(group)}"/')
    rules.append(f"BARE: ({' | '.join(openings)}) ({' | '.join(names)}) AFTER_NAME TEXT")
    bare = list[str]()
    for opening, (before, after) in zip(openings, OPENINGS.items(), strict=True):
        rules.append(f"{opening}: /{_spaced(before + BEFORE_NAME)}{_SPACES}/")
        end = f"SPACE? {json.dumps(after)} SPACE?" if after else "SPACE?"
        for number, name in enumerate(names):
            rules.append(f"{opening}_{number}: {opening} {name} AFTER_NAME")
            bare.append(f'{opening}_{number} SPACE? arguments_{number} SPACE? "}}" {end}')
    return [*rules, f"bare: {' | '.join(bare)}"]


def _one_of(names: Collection[str]) -> str:
    """Return a regular expression that matches any of the names, such as ``get(?:_a|_b)?``.

    Names share their common beginnings (a trie), because a lexer follows each branch of an
    expression at every byte.
    """
    # Sorted names have a common beginning if the first and the last one have it.
    first = min(names)
    last = max(names)
    size = 0
    while size < len(first) and first[size] == last[size]:
        size += 1
    prefix = first[:size]
    rests = sorted(name.removeprefix(prefix) for name in names)
    groups = groupby(filter(None, rests), key=itemgetter(0))
    branches = [_one_of([*group]) for _, group in groups]
    escaped = re.escape(prefix).replace("/", r"\/")
    if not branches:
        return escaped
    optional = "" if rests[0] else "?"
    return f"{escaped}(?:{'|'.join(branches)}){optional}"


def _names_by_schema(schemas: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the names of the tools that share a schema, by schema.

    ``schemas`` are the schemas of the tools' arguments, by the tools' names.
    """
    groups = dict[str, list[str]]()
    for name, schema in schemas.items():
        groups.setdefault(schema, []).append(name)
    return groups


def _spaced(text: str) -> str:
    """Return a regular expression for a JSON text, with limited white space between its parts."""
    parts = re.findall('"[^"]*"|.', text)
    return "".join(f"{_SPACES}{re.escape(part)}" for part in parts)


def arguments_schema(parameters: Mapping[str, Any] | None) -> str:
    """Return the JSON schema of a tool's arguments as text, without what a grammar cannot enforce.

    ``parameters`` is the schema in the tool's definition; ``None`` for a tool without arguments.
    """
    return json.dumps(relax_arguments(parameters).schema, ensure_ascii=False)


def relax_tools(parameters: Sequence[Mapping[str, Any] | None]) -> list[Relaxed]:
    """Return the schemas of the arguments of all tools of an answer, for one grammar.

    If the schemas are too large for one grammar, the largest ones are left out: the arguments of
    these tools may be any objects.

    Args:
        parameters: schema of the arguments of each tool, an object; ``None`` for a tool without
            arguments.

    Raises:
        OptionError: see :func:`relax_arguments`.
    """
    relaxed = list[Relaxed]()
    multiple = 1
    for each in parameters:
        relaxed.append(relax_arguments(each, multiple))
        multiple = relaxed[-1].multiple
    texts = [json.dumps(each.schema, ensure_ascii=False) for each in relaxed]
    sizes = {text: len(text) + _RULES_SIZE for text in texts}
    left_out = set[str]()
    total = sum(sizes.values())
    for text in sorted(sizes, key=len, reverse=True):
        if total <= _MAX_SCHEMAS_SIZE:
            break
        total -= sizes[text]
        left_out.add(text)
    any_object = replace(relax_arguments({}), dropped=("",))
    pairs = zip(texts, relaxed, strict=True)
    return [any_object if text in left_out else each for text, each in pairs]


def relax_arguments(parameters: Mapping[str, Any] | None, multiple: int = 1) -> Relaxed:
    """Return the schema of a tool's arguments without the parts that a grammar cannot enforce.

    Args:
        parameters: schema of an object; ``None`` for a tool without arguments.
        multiple: :attr:`~pronk.text.json_schema.relax.Relaxed.multiple` of the other tools'
            schemas.

    Raises:
        OptionError: the schema has values that JSON lacks.
    """
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    value = parameters.get("type", "object")
    names = value if isinstance(value, list) else [value]
    is_valid = bool(names) and all(name in TYPES for name in names)
    allows_objects = is_valid and "object" in names
    relaxed = relax(json.loads(schema_text({**parameters, "type": "object"})), multiple)
    return relaxed if allows_objects else replace(relaxed, dropped=("type", *relaxed.dropped))


def _form(guide: Guide) -> str:
    """Return the right side of a Lark rule that matches exactly the texts that a guide allows."""
    if guide.choice is not None:
        return " | ".join(json.dumps(text, ensure_ascii=False) for text in guide.choice)
    if guide.regex is not None:
        escaped = _SLASH.sub(lambda match: match[1] or "\\/", guide.regex)
        return f"/{escaped}/".replace("\n", "\\n")
    if guide.grammar is not None:
        return f"%lark {{\n{guide.grammar}\n}}"
    schema = check(json.loads(guide.source), whitespace=guide.whitespace)
    return f"%json {json.dumps(schema, ensure_ascii=False)}"
