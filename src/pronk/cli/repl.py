"""Conversation of ``pronk chat``: messages of the user, streamed answers, and ``/`` commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pronk.base.checks import close_choices
from pronk.base.errors import OptionError, PronkError, describe_json_error, describe_reason, refuse
from pronk.base.files.atomic import write_json
from pronk.base.files.regular import read_input
from pronk.base.files.text import BYTE_ORDER_MARK
from pronk.cli.console import TerminalOutput, stats_line
from pronk.cli.values import only_adapter
from pronk.engine.stats import Stats
from pronk.text.chat.calls import CallPart
from pronk.text.chat.thoughts import Thought

if TYPE_CHECKING:
    from pronk.engine.outputs import Completion
    from pronk.llm import LLM
    from pronk.sampling.params import SamplingParams
    from pronk.text.chat.answers import Part
    from pronk.text.chat.messages import TemplateOptions

Message = dict[str, str]

# Sampling options that ``/set`` changes.
_SETTABLE = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)

_ROLES = ("system", "user", "assistant")
_QUOTES = '"""'  # begins and ends a message of several lines
_MAX_LINE = 2**24  # maximum characters of a line of a file or pipe
# Maximum number of tokens of an answer by default; half the context if that is less.
_MAX_TOKENS = 1024


class ChatSession:
    """One conversation, read from a terminal or a pipe.

    Args:
        llm: the model.
        params: sampling parameters of the answers.
        screen: output of the command.
        system: system message; empty for none.
        given: names of the sampling options that the user has set. The model's recommendations
            replace all other options.
        load_model: function that loads another model by its name or path, for ``/model``.
        template_options: variables of the chat template.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        screen: TerminalOutput,
        *,
        system: str = "",
        given: Collection[str] = (),
        load_model: Callable[[str], LLM] | None = None,
        template_options: TemplateOptions | None = None,
    ) -> None:
        self._screen = screen
        self._system = system
        self._template_options = template_options
        self._given = {*given}
        self._load_model = load_model
        self._use_model(llm, params)
        self._messages: list[Message] = []
        self._total = Stats()
        self._commands: dict[str, tuple[str, Callable[[str], None]]] = {
            "/help": ("this list", self._help),
            "/reset": ("forget the conversation", self._reset),
            "/system": ("TEXT: set the system message; without TEXT, show it", self._set_system),
            "/set": ("NAME VALUE: set a sampling option; without NAME, show all", self._set),
            "/retry": ("answer the last message again", self._retry),
            "/undo": ("forget the last message and its answer", self._undo),
            "/model": ("NAME: continue with another model", self._switch_model),
            "/save": ("FILE: save the conversation as JSON", self._save),
            "/load": ("FILE: continue a saved conversation", self._load),
            "/stats": ("statistics of all answers so far", self._show_stats),
            "/colors": ("turn the colour of draft tokens on or off", self._switch_colors),
            # The method run() ends at this line, so that the function is never called.
            "/exit": ("leave; so does Ctrl-D", lambda _: None),
        }

    def _use_model(self, llm: LLM, params: SamplingParams) -> None:
        """Answer with a model, whose recommendations replace options that the user has not set."""
        context = llm.config.context
        recommended: dict[str, Any] = {
            name: value for name, value in llm.config.sampling.items() if name not in self._given
        }
        is_given = "max_tokens" in self._given
        limit = params.max_tokens if is_given else min(_MAX_TOKENS, context // 2)
        self._llm = llm
        self._adapter = only_adapter(llm.adapters)
        self._original = params
        self._params = replace(params, **recommended, max_tokens=min(limit, context - 1))
        if limit >= context:
            self._screen.note(
                f"max_tokens: {context - 1} instead of {limit}, because the model's context is "
                f"{context} tokens"
            )

    def run(self) -> None:
        """Answer messages until the input ends or ``/exit``."""
        if self._interactive:
            with suppress(ImportError):  # Windows has no readline
                import readline  # noqa: F401 - gives input() editing and history
            self._screen.say(
                f"Ctrl-C stops an answer, Ctrl-D ends the chat, {_QUOTES} begins and ends a "
                "message of several lines, /help lists the commands."
            )
            self._show_legend()
        line = self._read()
        while line is not None and line != "/exit":
            self._run_line(line)
            line = self._read()

    @property
    def _interactive(self) -> bool:
        return sys.stdin.isatty() and self._screen.interactive

    @property
    def _system_message(self) -> list[Message]:
        return [{"role": "system", "content": self._system}] if self._system else []

    def _read(self) -> str | None:
        """Return the next message or command; ``None`` at the end of the input.

        A message of several lines keeps its first quotes, so that it is not taken for a command. On
        a terminal, Ctrl-C discards the lines typed so far.
        """
        lines: list[str] = []
        while True:
            try:
                line = self._read_line("... " if lines else "> ").removeprefix(BYTE_ORDER_MARK)
            except EOFError:
                if self._interactive:
                    self._screen.say("")  # start a new line after the "> "
                return "\n".join(lines).strip() if lines else None
            except KeyboardInterrupt:
                if not self._interactive:
                    return None
                self._screen.say("\nCtrl-D ends the chat; /save FILE keeps it")
                lines = []
                continue
            lines.append(line)
            text = "\n".join(lines).strip()
            if not text.startswith(_QUOTES):
                return text
            if text.endswith(_QUOTES) and len(text) >= 2 * len(_QUOTES):
                return text

    def _read_line(self, prompt: str) -> str:
        """Return a line of standard input; raise an EOFError at its end.

        On a terminal, ``prompt`` is printed before the line.
        """
        if self._interactive:
            return input(prompt)
        line = sys.stdin.readline(_MAX_LINE)
        if not line:
            raise EOFError
        if len(line) == _MAX_LINE and not line.endswith("\n"):
            found = f"one of {_MAX_LINE} characters or more"
            refuse(
                "chat: standard input",
                f"expected lines of text, found {found}; give a text file",
                OptionError,
            )
        return line.removesuffix("\n")

    def _run_line(self, line: str) -> None:
        """Run a command or answer a message; print errors."""
        name, _, argument = line.partition(" ")
        message = line.removeprefix(_QUOTES).removesuffix(_QUOTES).strip()
        try:
            if name in self._commands:
                _, run = self._commands[name]
                run(argument.strip())
            elif line.startswith("/"):
                near = close_choices(name, self._commands)
                remedy = f"did you mean {near}?" if near else "/help lists the commands"
                self._screen.note(f"{name}: expected a command, found an unknown one; {remedy}")
            elif message:
                self._answer(message)
        except PronkError as error:
            self._screen.note(f"error: {error}")

    def _answer(self, line: str) -> None:
        """Stream the answer to a message, and append both to the conversation.

        After Ctrl-C, the answer is the text that was shown.
        """
        conversation = self._messages
        shown = list[str]()
        try:
            conversation = self._fit([*self._messages, {"role": "user", "content": line}])
            messages = [*self._system_message, *conversation]
            options = self._template_options
            answers = self._llm.request_factory.answer_format
            reader = answers.reader({}, opened=answers.opened_by(self._chat_ids(conversation)))
            for piece in self._llm.stream_chat(
                messages, self._params, adapter=self._adapter, template_options=options
            ):
                parts = reader.push(piece.text, piece.token_id)
                if piece.completion is not None:
                    parts += reader.flush()
                for part in parts:
                    shown.append(self._show(part, drafted=piece.guessed))
                if piece.completion is not None:
                    self._finish(piece.completion)
        except KeyboardInterrupt:
            self._screen.end_line()
            self._screen.note("stopped")
        finally:
            self._screen.end_line()
        if shown:
            self._messages = [*conversation, {"role": "assistant", "content": "".join(shown)}]

    def _show(self, part: Part, *, drafted: bool) -> str:
        """Print a part of the answer, and return its text for later prompts.

        For thoughts, the returned text is empty, because later prompts leave earlier thoughts out.
        """
        assert not isinstance(part, CallPart)  # the chat offers the model no tools
        if isinstance(part, Thought):
            self._screen.write(part.text, drafted=drafted, is_thought=True)
            return ""
        self._screen.write(part, drafted=drafted)
        return part

    def _fit(self, conversation: list[Message]) -> list[Message]:
        """Return the conversation without the oldest turns, as far as the context is too short.

        An answer of ``max_tokens`` tokens fits into the model's context after the rest.
        """
        limit = self._llm.config.context - self._params.max_tokens
        forgotten = 0
        while len(conversation) > 1 and len(self._chat_ids(conversation)) > limit:
            conversation = conversation[2:]  # without the oldest question and its answer
            forgotten += 1
        if forgotten:
            self._screen.note(
                f"the context is full: forgot the oldest {forgotten} of {len(self._messages) // 2} "
                "turns"
            )
        return conversation

    def _chat_ids(self, conversation: list[Message]) -> list[int]:
        messages = [*self._system_message, *conversation]
        return self._llm.chat_ids(messages, template_options=self._template_options)

    def _finish(self, completion: Completion) -> None:
        """Print notes and statistics of a complete answer."""
        self._screen.end_line()
        seed = None if self._params.greedy else completion.seed
        if completion.finish_reason == "length":
            self._screen.note(
                f"stopped after {self._params.max_tokens} tokens; --max-tokens sets another limit"
            )
        self._screen.figures(stats_line(completion.stats, self._llm.kernels, seed))
        self._total.generated_tokens += completion.stats.generated_tokens
        self._total.total_seconds += completion.stats.total_seconds
        self._total.steps += completion.stats.steps

    def _help(self, _: str) -> None:
        for name, (meaning, _run) in self._commands.items():
            self._screen.say(f"{name:8} {meaning}")

    def _set(self, text: str) -> None:
        """Set a sampling option to a value, which is JSON or else a text."""
        name, _, written = text.partition(" ")
        if not name:
            shown = {each: getattr(self._params, each) for each in _SETTABLE}
            self._screen.say(", ".join(f"{each} {value}" for each, value in shown.items()))
            return
        if name not in _SETTABLE or not written:
            expected = f"expected one of {', '.join(_SETTABLE)} and a value"
            refuse("/set", f"{expected}, found {text!r}; /set shows the values", OptionError)
        try:
            value = json.loads(written)
        except ValueError:
            value = written
        self._params = replace(self._params, **{name: value})
        self._original = replace(self._original, **{name: value})
        self._given.add(name)
        self._screen.say(f"{name}: {value}")

    def _retry(self, _: str) -> None:
        messages = self._messages
        if not messages:
            refuse("/retry", "expected an earlier message, found none; write one", OptionError)
        self._messages = messages[:-2]
        try:
            self._answer(messages[-2]["content"])
        finally:
            if self._messages == messages[:-2]:
                self._messages = messages  # there is no new answer

    def _undo(self, _: str) -> None:
        if not self._messages:
            refuse("/undo", "expected an earlier message, found none; write one", OptionError)
        forgotten = self._messages[-2]["content"]
        self._messages = self._messages[:-2]
        self._screen.say(f"forgot: {forgotten:.60}")

    def _switch_model(self, name: str) -> None:
        """Load another model, which continues the conversation; an error keeps the present one."""
        if not name or self._load_model is None:
            refuse("/model", "expected the name or path of a model, found none", OptionError)
        llm = self._load_model(name)
        llm.chat_ids([{"role": "user", "content": "?"}], template_options=self._template_options)
        self._use_model(llm, self._original)
        self._screen.say(f"model: {name}")

    def _reset(self, _: str) -> None:
        self._messages.clear()
        self._screen.say("forgot the conversation")

    def _set_system(self, text: str) -> None:
        if text:
            self._system = text
        self._screen.say(f"system: {self._system}" if self._system else "no system message")

    def _save(self, file: str) -> None:
        path = _path("/save", file)
        if path.exists():
            _read_messages(path)  # raises an error for a file that is no saved conversation
        write_json(path, {"messages": [*self._system_message, *self._messages]}, indent=1)
        self._screen.say(f"saved {len(self._messages) // 2} turns in {path}")

    def _load(self, file: str) -> None:
        path = _path("/load", file)
        messages = _read_messages(path)
        is_system = bool(messages) and messages[0]["role"] == "system"
        self._system = messages.pop(0)["content"] if is_system else ""
        self._messages = messages
        self._screen.say(f"loaded {len(messages) // 2} turns from {path}")

    def _show_stats(self, _: str) -> None:
        self._screen.say(stats_line(self._total, self._llm.kernels))

    def _switch_colors(self, _: str) -> None:
        self._screen.color_drafts = not self._screen.color_drafts
        self._show_legend()

    def _show_legend(self) -> None:
        if self._screen.color_drafts:
            self._screen.legend()
        else:
            self._screen.say("draft tokens are not coloured; /colors turns the colour on")


def _path(command: str, file: str) -> Path:
    """Return the path that the user has given after ``/save`` or ``/load``."""
    if not file:
        refuse(command, "expected a file name after it, found none", OptionError)
    try:
        return Path(file).expanduser()
    except RuntimeError as error:
        refuse(
            command,
            f"expected the path of a file, found {file}, of an unknown user; write it out",
            OptionError,
            error,
        )


def _read_messages(path: Path) -> list[Message]:
    """Return the messages of a file that ``/save`` wrote.

    A system message, if any, is the first one. Pairs of a user message and an answer follow.
    """
    try:
        document = json.loads(read_input(path))
    except OSError as error:
        found = describe_reason(error)
        refuse(
            path,
            f"expected a conversation that /save wrote, found: {found}; check the path",
            OptionError,
            error,
        )
    except (ValueError, RecursionError) as error:
        found = describe_json_error(error)
        refuse(
            path,
            f"expected JSON as /save writes it, found {found}; choose another file",
            OptionError,
            error,
        )
    messages = document.get("messages") if isinstance(document, dict) else None
    if not isinstance(messages, list):
        _refuse_conversation(path, "an object with a list of messages", document)
    for number, message in enumerate(messages, 1):
        is_valid = isinstance(message, dict) and message.get("role") in _ROLES
        if not is_valid or not isinstance(message.get("content"), str):
            _refuse_conversation(path, f"a role and a text in message {number}", message)
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if turns != ["user", "assistant"] * (len(turns) // 2):
        expected = "pairs of user and assistant, after at most one message of the system"
        _refuse_conversation(path, expected, roles)
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _refuse_conversation(path: Path, expected: str, found: object) -> NoReturn:
    shown = json.dumps(found, ensure_ascii=False)
    refuse(
        path,
        f"expected {expected}, found {shown:.60}; /load reads files that /save wrote",
        OptionError,
    )
