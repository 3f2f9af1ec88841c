"""Streaming parsers that separate the tool calls in an answer from its text.

A parser withholds text only while that text may be the beginning of a call. A beginning that turns
out to be no call (for instance, with the name of an unknown tool) is emitted as text. The arguments
of a call are emitted as the model writes them, even if the answer ends within the arguments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from secrets import token_hex

from pronk.text.chat.arguments import ArgumentReader, JsonEnd
from pronk.text.chat.dialects import MAX_IDENT, TOOL_NAME, ToolDialect
from pronk.text.chat.symbols import TokenSymbols, plain_text

# Maximum characters from the beginning of a call to the end of the tool's name. The name has up to
# 128; anything longer is text.
_MAX_CALL_START = 264


@dataclass(frozen=True)
class CallPart:
    """Streamed part of a tool call.

    Attributes:
        index: number of the call within the answer, from 0.
        arguments: the next characters of the JSON text of the arguments.
        ident: id of the call; ``None`` except in the call's first part.
        name: name of the tool; ``None`` except in the call's first part.
    """

    index: int
    arguments: str = ""
    ident: str | None = None
    name: str | None = None


def new_call_id() -> str:
    """Return a random id for a call: ``call_`` and 24 hexadecimal digits."""
    return f"call_{token_hex(12)}"


class CallReader:
    """Streaming parser that splits the symbols of one answer into text and tool calls.

    White space at the beginning of the answer or after a call is dropped unless other text follows.
    An answer of white space alone is text.

    Args:
        dialect: format of the model's calls.
        symbols: symbols of the model's tokens.
        schemas: schema of the arguments, as JSON text, of each tool, by the tool's name; a call of
            another tool is text.

    Attributes:
        in_call: whether the text read last is within a call, after the name of the tool.
    """

    def __init__(
        self, dialect: ToolDialect, symbols: TokenSymbols, schemas: Mapping[str, str]
    ) -> None:
        self._dialect = dialect
        self._symbols = symbols
        self._schemas = schemas
        text = symbols.of_text
        # symbols of the begin marker; empty if the format has none
        self._trigger = text(dialect.begin)
        after_begin = text(dialect.after_begin)
        before_name = text(dialect.before_name)
        # Some tokenizers drop a space at the beginning of a text, so a leading space may be
        # missing.
        self._before_name = {after_begin + before_name, after_begin.lstrip(" ") + before_name}
        self._before_ident = text(dialect.before_ident)
        self._before_arguments = text(dialect.before_arguments)
        # Texts between the name of the tool and its arguments, each with the method to call after
        # it.
        opening = self._before_arguments + dialect.arguments.opening
        self._openings = {opening: self._begin_arguments}
        # Texts after the arguments, each with the method to call after it.
        self._endings = {
            text(dialect.after_arguments + dialect.before_end + dialect.end): self._end
        }
        if dialect.separator is not None:
            next_call = text(dialect.after_arguments + dialect.separator + dialect.before_name)
            self._endings[next_call] = self._begin_name
        self._output: list[str | CallPart] = []
        self._num_calls = 0  # number of calls in the answer so far
        # white space that was read and is emitted only if text follows
        self._held_space: list[str] = []
        # Whether all text so far, or since the last call, is white space.
        self._only_space = True
        # The texts one of which must come next, each with the method to call after it.
        self._expected: Mapping[str, Callable[[], None]] = {}
        # What was read so far of one of these texts, and of the name of the tool after it.
        self._seen = ""
        # The begin marker that was read before ``_seen``. It is withheld with ``_seen``: if no call
        # follows, both are text.
        self._before = ""
        self._name = ""  # the characters of the tool's name that were read so far
        self.in_call = False
        self._arguments: ArgumentReader = JsonEnd()
        # State of the parser: the method for the next symbols. It reads the text from an offset on,
        # and returns the next offset.
        self._read: Callable[[str, int], int] = self._read_text
        if dialect.marker_optional:
            self._expect_call("")

    def push(self, symbols: str) -> list[str | CallPart]:
        """Parse the next piece of the answer; return the parts that later pieces cannot change."""
        at = 0
        while at < len(symbols):
            at = self._read(symbols, at)
        return self._take_output()

    def flush(self) -> list[str | CallPart]:
        """End the answer, and return the withheld text.

        An incomplete beginning of a call is text, unless it directly follows another call: then it
        is dropped.
        """
        if not self.in_call and not (self._num_calls and self._only_space):
            while self._read in (self._read_expected, self._read_name):
                self._release()
        if self._held_space and not self._num_calls:
            self._output.append("".join(self._held_space))
        self._held_space = []
        return self._take_output()

    def _take_output(self) -> list[str | CallPart]:
        parts = self._output
        self._output = []
        return [part for part in parts if part != ""]

    def _read_text(self, text: str, at: int) -> int:
        """Read text up to the next character with which the begin marker begins, such as ``<``.

        Return the offset of this character, or of the end of the text.
        """
        stop = text.find(self._trigger[0], at) if self._trigger else -1
        stop = len(text) if stop < 0 else stop
        self._emit_text(text[at:stop])
        if stop < len(text):
            self._expect({self._trigger: lambda: self._expect_call(self._trigger)})
        return stop

    def _emit_text(self, symbols: str) -> None:
        """Emit ``symbols`` as text, without the symbols of special tokens.

        White space at the beginning of the answer and after calls is withheld until other text
        follows.
        """
        symbols = plain_text(symbols)
        if self._only_space:
            stripped = symbols.lstrip()
            self._held_space.append(symbols[: len(symbols) - len(stripped)])
            if stripped:
                self._output += [*self._held_space, stripped]
                self._held_space = []
                self._only_space = False
        elif symbols:
            self._output.append(symbols)

    def _expect(self, expected: Mapping[str, Callable[[], None]], before: str = "") -> None:
        """Wait for one of the texts ``expected``, each with the method to call once it was read.

        ``before`` is the begin marker, if it was read just before and is still withheld. If another
        text follows, ``before`` and that text are emitted as text.
        """
        self._expected = expected
        self._seen = ""
        self._before = before
        self._read = self._read_expected
        if "" in expected:
            expected[""]()

    def _read_expected(self, text: str, at: int) -> int:
        seen = self._seen + text[at]
        if seen in self._expected:
            self._seen = seen
            self._expected[seen]()
        elif any(expected.startswith(seen) for expected in self._expected):
            self._seen = seen
        else:
            self._release()
            return at
        return at + 1

    def _expect_call(self, before: str) -> None:
        """Wait for the text between the begin marker and the name of the tool.

        ``before`` is the begin marker, which is withheld until a call is certain; empty without
        one.
        """
        self._expect(dict.fromkeys(self._before_name, self._begin_name), before)

    def _begin_name(self) -> None:
        self._read = self._read_name
        self._name = ""

    def _read_name(self, text: str, at: int) -> int:
        character = text[at]
        if TOOL_NAME.fullmatch(character) is not None and len(self._seen) <= _MAX_CALL_START:
            self._seen += character
            self._name += character
            return at + 1
        self._name = self._without_ident(self._name)
        starts = (self._before_arguments[:1], self._before_ident[:1])
        ends_name = not self._before_arguments or character in starts
        if not ends_name or self._name not in self._schemas:
            self._release()
            return at
        self._output.append(CallPart(self._num_calls, "", new_call_id(), self._name))
        self._num_calls += 1
        self._held_space = []
        self._only_space = True
        self.in_call = True
        ident = {self._before_ident: self._begin_ident} if self._before_ident else {}
        self._expect({**self._openings, **ident})
        # the character at this offset begins the text before the arguments, or before an id
        return at

    def _without_ident(self, name: str) -> str:
        """Return the name of the tool without an id after it, such as ``f`` for Kimi's ``f:0``.

        In this format, the marker before the id is a character that names may contain.
        """
        marker = self._before_ident
        if name in self._schemas or not marker or TOOL_NAME.fullmatch(marker) is None:
            return name
        return name.rpartition(marker)[0] or name

    def _begin_ident(self) -> None:
        self._read = self._read_ident

    def _read_ident(self, text: str, at: int) -> int:
        """Read and drop the id that the model writes for a call.

        The model may repeat the id of an earlier call, so each call gets a new one instead.
        """
        ident = self._seen.removeprefix(self._before_ident)
        if text[at] == self._before_arguments[0]:
            self._expect(self._openings)
        elif text[at].isalnum() and len(ident) < MAX_IDENT:
            self._seen += text[at]
            return at + 1
        else:
            self._release()
        return at

    def _begin_arguments(self) -> None:
        self._read = self._read_arguments
        syntax = self._dialect.arguments
        schema = json.loads(self._schemas[self._name])
        self._arguments = syntax.reader(schema, self._symbols)
        self._read_arguments(syntax.opening, 0)

    def _read_arguments(self, text: str, at: int) -> int:
        stop, arguments = self._arguments.read(text, at)
        if arguments:
            self._output.append(CallPart(self._num_calls - 1, plain_text(arguments)))
        if self._arguments.found:  # next is the end marker, or another call
            self._expect(self._endings)
        return stop

    def _end(self) -> None:
        self._read = self._read_text
        self.in_call = False

    def _release(self) -> None:
        """Stop waiting for an expected text: what was withheld is no call.

        The begin marker is emitted as text. The text after it is parsed once more, because a call
        may begin within it.
        """
        in_trigger = self._trigger in self._expected
        seen = self._seen
        before = self._before
        self._end()
        self._seen = self._before = ""
        if in_trigger or not self._trigger:
            # No call begins within ``seen``: it is the beginning of a begin marker, and no marker
            # contains its first character twice.
            self._emit_text(before + seen)
        else:
            self._emit_text(before)
            at = 0
            while at < len(seen):
                at = self._read(seen, at)


# Parts of a call without markers, for its reader and for its grammar. White space may stand around
# each part and between characters outside strings; the parts here have none.
OPENINGS = {"": "", "```": "```", "```json": "```"}  # text before the call: text after it
BEFORE_NAME = '{"name":'
AFTER_NAME = ',"arguments":'
SPACE = " \t\r\n"  # characters of white space in JSON


class BareCallReader:
    """Streaming reader of an answer that may be, as a whole, a call without markers.

    Small models of Qwen often write ``{"name": "f", "arguments": {…}}`` as their whole answer,
    alone or as a block of code between three backticks. Such an answer is a call if ``f`` is one of
    ``names``. Only the end of the answer tells whether anything follows the object; until then, the
    reader withholds the answer.
    """

    def __init__(self, names: Collection[str]) -> None:
        # Keys: text of an answer up to the first brace of the arguments. Values: name of the tool,
        # and the text that must follow the arguments.
        self._heads = {
            f'{opening}{BEFORE_NAME}"{name}"{AFTER_NAME}{{': (name, f"}}{closing}")
            for name in names
            for opening, closing in OPENINGS.items()
        }
        self._head = ""  # what was read so far of one of the keys of ``_heads``
        self._symbols: list[str] = []
        self._arguments: list[str] = []
        self._end = JsonEnd()
        self._tail = ""  # what was read so far of the text after the arguments

    @property
    def held(self) -> str:
        """The part of the answer that was read and is withheld, since it may be a call.

        A lone surrogate stands for each special token.
        """
        return "".join(self._symbols)

    def push(self, symbols: str) -> bool:
        """Read the next piece of the answer.

        Return True while the whole answer may still be a call; once False, it is text.
        """
        self._symbols.append(symbols)
        at = 0
        while at < len(symbols):
            if self._head not in self._heads:
                character = symbols[at]
                is_quoted = self._head.count('"') % 2 == 1
                self._head += character if is_quoted or character not in SPACE else ""
                if not any(head.startswith(self._head) for head in self._heads):
                    return False
                at += 1
                if self._head in self._heads:
                    self._read_arguments("{", 0)
            elif not self._end.found:
                at = self._read_arguments(symbols, at)
            else:
                # Leave out white space, and the special token that ends the answer.
                self._tail += plain_text(symbols[at]).strip(SPACE)
                if not self._heads[self._head][1].startswith(self._tail):
                    return False
                at += 1
        return True

    def _read_arguments(self, symbols: str, at: int) -> int:
        stop, arguments = self._end.read(symbols, at)
        self._arguments.append(arguments)
        return stop

    def flush(self) -> list[CallPart]:
        """End the answer, and return the parts of its call, or no parts if it is not one call."""
        arguments = "".join(self._arguments)
        name, tail = self._heads.get(self._head, ("", ""))
        if not name or self._tail != tail:
            return []
        try:
            json.loads(arguments)
        except (ValueError, RecursionError):
            return []
        return [CallPart(0, "", new_call_id(), name), CallPart(0, arguments)]
