r"""Translation of regular expressions in JSON schemas to the syntax of Rust's crate ``regex``.

Expressions in schemas have the syntax of ECMA-262. The two dialects differ in more than syntax: in
ECMA-262, ``.`` matches no line separator, ``\s`` has other characters, and ``[a&&b]`` is a set of
the characters ``a``, ``b`` and ``&`` instead of an intersection. Expressions that no finite
automaton matches (look-around, back-references, word boundaries) have no translation.

In llguidance's JSON strings, a set with NUL, such as ``[^"]``, also matches an escaped quotation
mark or backslash, by mistake. Hence NUL is left out of sets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NoReturn

_DIGITS = "0-9"
_LETTERS = "0-9A-Z_a-z"
_SPACES = (
    r"\t\n\x0b\x0c\r \xa0\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"
)
_SETS = {"d": _DIGITS, "w": _LETTERS, "s": _SPACES}
_ANY_BUT_LINE_ENDS = r"[^\n\r\x{2028}\x{2029}]"
# any character; unlike in a set, NUL does no harm here, because a quotation mark is allowed
_ANY = r"[\x{0}-\x{10ffff}]"
_NOTHING = r"[^\x{0}-\x{10ffff}]"
_NUL = r"\x{0}"
_CONTROLS = {"t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r"}
_QUANTIFIER = re.compile(r"(?:[*+?]|\{(\d+)(?:(,)(\d*))?\})\??")
_PROPERTY = re.compile(r"\{[A-Za-z_]+(?:=[A-Za-z_]+)?\}")
_GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_$][\w$]*>|(?!\?))")
_HEX_ESCAPE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
_LOW_SURROGATE = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")


def to_rust(pattern: str) -> str:
    """Return a regular expression of a JSON schema in Rust's syntax.

    Raises:
        ValueError: the expression is invalid, or has look-around, back-references or word
            boundaries. The message says what is expected instead.
    """
    return _Translation(pattern).expression()


def other_than(names: Iterable[str]) -> str:
    """Return an expression, in Rust's syntax, that matches all texts except ``names``."""
    return f"^{_other_than(sorted(set(names)))}$"


def _other_than(names: list[str]) -> str:
    """Return an expression without anchors for all texts except ``names``.

    The expression branches at the first character, and within each branch at the next one.
    """
    if not names:
        return "(?s:.*)"
    rests: dict[str, list[str]] = {}
    for name in names:
        if name:
            rests.setdefault(name[0], []).append(name[1:])
    firsts = "".join(map(_literal, rests))
    options = [f"[^{firsts}{_NUL}](?s:.*)" if rests else "(?s:.+)"]
    options += [f"{_literal(first)}{_other_than(rest)}" for first, rest in rests.items()]
    optional = "" if "" in names else "?"
    return f"(?:{'|'.join(options)}){optional}"


def _refuse(expected: str) -> NoReturn:
    raise ValueError(expected)


def _literal(character: str) -> str:
    """Return a regular expression for one character, valid alone and within a set (``[…]``)."""
    if character.isascii() and character.isalnum():
        return character
    return rf"\x{{{ord(character):x}}}"


class _Translation:
    """Parser that translates one regular expression of ECMA-262 to Rust's syntax, in one pass.

    Its methods read the pattern at the offset ``_at``, move it on, and return the translation of
    what they read. They raise a ValueError that says what is expected, if the pattern is invalid or
    has no translation.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0  # offset in the pattern of the next character

    def expression(self) -> str:
        """Return the whole pattern in Rust's syntax."""
        written = list[str]()
        depth = 0
        repeatable = False  # whether a quantifier may follow what was read last
        while self._at < len(self._pattern):
            quantifier = _QUANTIFIER.match(self._pattern, self._at)
            if quantifier is not None:
                if not repeatable:
                    _refuse("an expression before each quantifier")
                written.append(self._quantifier(quantifier))
                repeatable = False
                continue
            character = self._pattern[self._at]
            repeatable = character not in "(|^$"
            if character == "(":
                group = _GROUP.match(self._pattern, self._at)
                if group is None:
                    _refuse("no look-around and no flags")
                self._at = group.end()
                depth += 1
                written.append("(?:")
            elif character == ")" and depth == 0:
                _refuse("a parenthesis '(' for each ')'")
            else:
                depth -= character == ")"
                written.append(self._atom(character))
        if depth:
            _refuse("a parenthesis ')' for each '('")
        return "".join(written)

    def _quantifier(self, match: re.Match[str]) -> str:
        self._at = match.end()
        least = match[1]
        most = match[3]
        if most and int(most) < int(least):
            _refuse("quantifiers whose minimum is not above their maximum")
        return match[0].removesuffix("?") or "?"

    def _atom(self, character: str) -> str:
        """Return the translation of a character, a set or an escape, without its quantifier."""
        if character == "[":
            return self._set()
        if character == "\\":
            return self._escape()
        self._at += 1
        if character == ".":
            return _ANY_BUT_LINE_ENDS
        return character if character in ")|^$" else _literal(character)

    def _escape(self) -> str:
        name = self._pattern[self._at + 1 : self._at + 2]
        if name in {*"dwsDWS"}:
            self._at += 2
            return f"[{'^' if name.isupper() else ''}{_SETS[name.lower()]}]"
        if name in {*"pP"}:
            return self._unicode_property()
        if name in {*"bB"}:
            _refuse("no word boundaries")
        return _literal(self._character())

    def _unicode_property(self) -> str:
        match = _PROPERTY.match(self._pattern, self._at + 2)
        if match is None:
            _refuse("a Unicode property such as \\p{L}")
        name = self._pattern[self._at + 1]
        self._at = match.end()
        return f"\\{name}{match[0]}"

    def _character(self) -> str:
        """Read a character or the escape of one, and return the character that it stands for."""
        if self._pattern[self._at] != "\\":
            self._at += 1
            return self._pattern[self._at - 1]
        name = self._pattern[self._at + 1 : self._at + 2]
        after = self._pattern[self._at + 2 : self._at + 3]
        code = _HEX_ESCAPE.match(self._pattern, self._at + 1)
        if code is not None:
            return self._coded_character(code)
        if name == "c" and after.isascii() and after.isalpha():
            self._at += 3
            return chr(ord(after) % 32)
        if name == "0" and not after.isdigit():
            self._at += 2
            return "\0"
        if not name or (name.isalnum() and name not in _CONTROLS):
            _refuse("known escapes and no back-references")
        self._at += 2
        return _CONTROLS.get(name, name)

    def _coded_character(self, match: re.Match[str]) -> str:
        r"""Return the character of the escape ``match``, such as ``\u0041``.

        The escape may be the first of a pair of surrogates, of which the second is read as well.
        """
        code = int(match[1] or match[2] or match[3], 16)
        self._at = match.end()
        if 0xD800 <= code <= 0xDBFF:
            low = _LOW_SURROGATE.match(self._pattern, self._at)
            if low is not None:
                self._at = low.end()
                code = 0x10000 + (code - 0xD800) * 0x400 + int(low[1], 16) - 0xDC00
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            _refuse("codes of characters")
        return chr(code)

    def _set(self) -> str:
        """Translate a set in brackets, such as ``[^a-z]``."""
        self._at += 1
        negated = self._pattern.startswith("^", self._at)
        self._at += negated
        written = ""
        while not self._pattern.startswith("]", self._at):
            if self._at >= len(self._pattern):
                _refuse("a bracket ']' for each '['")
            written += self._range()
        self._at += 1
        if not written:
            return _ANY if negated else _NOTHING
        return f"[^{written}{_NUL}]" if negated else f"[{written}]"

    def _range(self) -> str:
        r"""Translate an element of a bracket set: a character, a range, or a set such as ``\d``."""
        first = self._element()
        if not self._pattern.startswith("-", self._at) or self._pattern.startswith("-]", self._at):
            return first if len(first) > 1 else _literal(first)
        self._at += 1
        if self._at >= len(self._pattern):
            _refuse("a bracket ']' for each '['")
        last = self._element()
        if len(first) > 1 or len(last) > 1:
            _refuse("ranges between characters")
        if first > last:
            _refuse("ranges whose first character is not above their last")
        if first == "\0" < last:
            first = "\1"
        return f"{_literal(first)}-{_literal(last)}"

    def _element(self) -> str:
        r"""Return one character of a set, or the translation of a set within it, such as ``\d``.

        The result has several characters only in the second case.
        """
        name = self._pattern[self._at : self._at + 2]
        if name in {"\\d", "\\w", "\\s", "\\D", "\\W", "\\S", "\\p", "\\P"}:
            return self._escape()
        if name == "\\b":
            self._at += 2
            return "\b"
        return self._character()
