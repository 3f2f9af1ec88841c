"""Conversation of ``pronk chat``: read a line, stream the answer, run the ``/`` commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from pronk.cli.console import TerminalOutput, stats_line
from pronk.engine.stats import Stats
from pronk.errors import PronkError

if TYPE_CHECKING:
    from pronk.llm import LLM
    from pronk.outputs import Completion
    from pronk.sampling.params import SamplingParams

__all__ = ["ChatSession"]

Message = dict[str, str]


class ChatSession:
    """One conversation, read from a terminal or a pipe."""

    def __init__(self, llm: LLM, params: SamplingParams, screen: TerminalOutput) -> None:
        self._llm, self._params, self._screen = llm, params, screen
        self._messages: list[Message] = []
        self._total = Stats()
        self._commands: dict[str, tuple[str, Callable[[], None]]] = {
            "/help": ("this list", self._help),
            "/reset": ("forget the conversation", self._reset),
            "/stats": ("statistics of all answers so far", self._show_stats),
            "/colors": ("turn the colour of draft tokens on or off", self._switch_colors),
            "/exit": ("leave; so does Ctrl-D", lambda: None),  # never called: run() ends at this line
        }

    def run(self) -> None:
        """Answer lines until the input ends or ``/exit``."""
        if self._interactive:
            with suppress(ImportError):  # Windows has no readline
                import readline  # noqa: F401 - gives input() editing and history
            self._screen.say("Ctrl-C stops an answer, Ctrl-D ends the chat, /help lists the commands.")
            self._show_legend()
        while (line := self._read()) not in {None, "/exit"}:
            self._run_line(str(line))

    @property
    def _interactive(self) -> bool:
        return sys.stdin.isatty() and self._screen.interactive

    def _read(self) -> str | None:
        try:
            return input("> " if self._interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            if self._interactive:
                self._screen.say("")  # start a new line after the "> "
            return None

    def _run_line(self, line: str) -> None:
        if line in self._commands:
            self._commands[line][1]()
        elif line.startswith("/"):
            self._screen.note(f"unknown command {line.split(maxsplit=1)[0]}; /help lists the commands")
        elif line:
            try:
                self._answer(line)
            except PronkError as error:
                self._screen.note(f"error: {error}")

    def _answer(self, line: str) -> None:
        """Stream the answer and append its shown part to the conversation, even if it was interrupted."""
        conversation = self._fit([*self._messages, {"role": "user", "content": line}])
        shown: list[str] = []
        try:
            for piece in self._llm.stream_chat(conversation, self._params):
                self._screen.write(piece.text, drafted=piece.guessed)
                shown.append(piece.text)
                if piece.completion is not None:
                    self._finish(piece.completion)
        except KeyboardInterrupt:
            self._screen.end_line()
            self._screen.note("stopped")
        if shown:
            self._messages = [*conversation, {"role": "assistant", "content": "".join(shown)}]

    def _fit(self, conversation: list[Message]) -> list[Message]:
        """Drop the oldest turns until the rest and an answer of ``max_tokens`` fit into the model's context."""
        limit = self._llm.config.context - self._params.max_tokens
        forgotten = 0
        while len(conversation) > 1 and len(self._llm.chat_ids(conversation)) > limit:
            conversation = conversation[2:]  # without the oldest question and its answer
            forgotten += 1
        if forgotten:
            self._screen.note(f"the context is full: forgot the oldest {forgotten} of {len(self._messages) // 2} turns")
        return conversation

    def _finish(self, completion: Completion) -> None:
        self._screen.end_line()
        seed = None if self._params.greedy else completion.seed
        self._screen.figures(stats_line(completion.stats, self._llm.kernels, seed))
        self._total.generated_tokens += completion.stats.generated_tokens
        self._total.total_seconds += completion.stats.total_seconds
        self._total.steps += completion.stats.steps

    def _help(self) -> None:
        for name, (meaning, _) in self._commands.items():
            self._screen.say(f"{name:8} {meaning}")

    def _reset(self) -> None:
        self._messages.clear()
        self._screen.say("forgot the conversation")

    def _show_stats(self) -> None:
        self._screen.say(stats_line(self._total, self._llm.kernels))

    def _switch_colors(self) -> None:
        self._screen.color_drafts = not self._screen.color_drafts
        self._show_legend()

    def _show_legend(self) -> None:
        if self._screen.color_drafts:
            self._screen.legend()
        else:
            self._screen.say("draft tokens are not coloured; /colors turns the colour on")
