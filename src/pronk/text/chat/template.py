"""Chat templates: Jinja sources in checkpoints that convert a conversation to a prompt.

A template comes with the model and is not trusted. The messages, the tools and the special tokens
are given to the template as plain data. Jinja's sandbox keeps a template from files and from
Python's internals, but not from running forever. One child process with limits renders all
templates of this process, because starting a child process takes longer (0.1 s) than rendering
(1 ms).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from pronk.base.errors import OptionError, PromptError, TokenizerError, describe_error, refuse
from pronk.text.chat.generic_tools import have_calls, write_tools
from pronk.text.chat.messages import (
    Messages,
    TemplateOptions,
    Tools,
    check_messages,
    join_parts,
    number_ids,
    shorten_ids,
    write_calls,
)
from pronk.text.chat.system_messages import has_system_role
from pronk.text.limited_process import LimitedProcess


class Renderer:
    """Compiles and renders chat templates in a child process, for any thread.

    Args:
        seconds: limit of the processor time of a request. An ordinary prompt takes 1 ms, a prompt
            of a million tokens 1 s.
        memory: maximum size of the child's address space in bytes
            (:class:`~pronk.text.limited_process.LimitedProcess`).
    """

    def __init__(self, seconds: float = 10.0, memory: int = 2**30) -> None:
        program = Path(__file__).with_name("_child.py")
        self._process = LimitedProcess(
            program, purpose="chat template", needs="jinja2", seconds=seconds, memory=memory
        )

    def ask(self, source: str, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Compile a template, and render it if ``values`` are given.

        Args:
            source: Jinja source of the template.
            values: variables of the template, as nested JSON values.

        Returns:
            ``text``, ``loops_over_content`` (whether the template reads the parts of a message's
            content) and ``reads_tools`` (whether the template reads the variable ``tools``); or
            ``error``, one line; or ``over_limit``, if a limit of time, memory or text length was
            exceeded.

        Raises:
            TokenizerError: the child process does not start, or is ended from outside.
            TypeError, ValueError, RecursionError: ``values`` is not JSON.
        """
        request: dict[str, Any] = {"source": source}
        if values is not None:
            request["values"] = values
        line = json.dumps(request, ensure_ascii=False, default=_to_dict)
        reply = self._process.ask(line.encode("utf-8", "surrogatepass"))
        if reply is None:
            return {"over_limit": True}
        return json.loads(reply.line.decode("utf-8", "surrogatepass"))

    def close(self) -> None:
        """End the child process; the next request of a caller starts another one."""
        self._process.close()


def _to_dict(value: object) -> dict[Any, Any]:
    """Convert a mapping to a ``dict`` for ``json.dumps``; raise a TypeError for another type."""
    if not isinstance(value, Mapping):
        raise TypeError(type(value).__name__)
    return dict(value)


default_renderer = Renderer()


# Efforts of thinking in OpenAI's API that gpt-oss does not know, each with the nearest one that it
# knows.
_NEAREST_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


def in_channels(source: str) -> bool:
    """Return whether a template writes gpt-oss's format harmony, whose messages name a channel.

    ``source`` is the Jinja source of the template.
    """
    return "<|channel|>" in source and "<|message|>" in source


def separate_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with at most one call each, and the result of a call right after it.

    The template of gpt-oss writes one call per message, and fails if a message with a call has both
    thoughts and text. Therefore, such a text is appended to the thoughts. Source: OpenAI's
    cookbook, ``openai-harmony.md``.
    """
    separated = list[dict[str, Any]]()
    at = 0
    while at < len(messages):
        message = dict(messages[at])
        at += 1
        calls = message.get("tool_calls")
        if message.get("role") != "assistant" or not isinstance(calls, (list, tuple)) or not calls:
            separated.append(message)
            continue
        results = list(takewhile(lambda each: each.get("role") == "tool", messages[at:]))
        at += len(results)
        for call in calls[:-1]:
            separated.append(_with_call(message, call))
            # Thoughts and text stay with the first call; the messages of further calls have none.
            message = {"role": "assistant", "content": ""}
            ident = call.get("id") if isinstance(call, Mapping) else None
            of_call = (each for each in results if each.get("tool_call_id") in (None, ident))
            result = next(of_call, None)
            if result is not None:
                results.remove(result)
                separated.append(dict(result))
        separated.append(_with_call(message, calls[-1]))
        separated += map(dict, results)
    return separated


def _with_call(message: Mapping[str, Any], call: object) -> dict[str, Any]:
    """Return a message with one call.

    If the message has both thoughts and text, the text is appended to the thoughts.
    """
    content = message.get("content")
    thoughts = message.get("thinking")
    if content and isinstance(content, str) and isinstance(thoughts, str):
        message = {**message, "thinking": f"{thoughts}\n\n{content}", "content": ""}
    return {**message, "tool_calls": [call]}


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the tools, with the description ``""`` for each tool that has none.

    The template of gpt-oss requires a description.
    """
    described = list[Mapping[str, Any]]()
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and function.get("description") is None:
            described.append({**tool, "function": {**function, "description": ""}})
        else:
            described.append(tool)
    return described


def nearest_effort(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a template with an effort that gpt-oss knows: low, medium or high.

    gpt-oss always thinks, so options that switch thinking off become the effort low.
    """
    effort = options.get("reasoning_effort")
    if effort is None and options.get("enable_thinking") is False:
        effort = "none"
    if isinstance(effort, str):
        return {**options, "reasoning_effort": _NEAREST_EFFORTS.get(effort, effort)}
    return dict(options)


# Templates that describe tools but render no calls of earlier messages. For each: a text by which
# the template is recognized; the texts before, between and after calls; and whether calls have
# Python's syntax (LFM2). Granite 3 writes a list of objects, SmolLM3 an object between tags for
# each call.
_LFM2_CALLS = ("<|tool_call_start|>[", ", ", "]<|tool_call_end|>")
_UNWRITTEN_CALLS = (
    ("<|tool_list_start|>", _LFM2_CALLS, True),
    ("List of tools: [", _LFM2_CALLS, True),  # for LFM2.5
    ("<|tool_call|>", ("<|tool_call|>[", ", ", "]"), False),
    ("</tool_call>", ("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"), False),
)
# Maximum characters of a template; templates of well-known models have up to a third of that.
_MAX_SOURCE = 100_000


class ChatTemplate:
    """A chat template in Jinja, and the special tokens that the template inserts.

    Args:
        source: Jinja source of the template.
        special_tokens: texts of special tokens by the names that templates use (``bos_token``,
            ``eos_token``, …).
        renderer: child process in which the template runs.

    Attributes:
        reads_tools: whether the template reads the variable ``tools``. If not, tools become text
            of the messages (:mod:`pronk.text.chat.generic_tools`).

    Raises:
        TokenizerError: the source is not valid Jinja, or too long.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        renderer: Renderer = default_renderer,
    ) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._renderer = renderer
        if len(source) > _MAX_SOURCE:
            msg = (
                f"chat template: expected at most {_MAX_SOURCE} characters, found {len(source)}; "
                "use another one"
            )
            raise TokenizerError(msg)
        reply = renderer.ask(source)
        if "text" not in reply:
            reason = reply.get("error", "it takes too long, or too much memory, to compile")
            refuse(
                "chat template", f"expected valid Jinja, found an error: {reason}", TokenizerError
            )
        self._loops_over_content = reply["loops_over_content"]
        self.reads_tools: bool = reply["reads_tools"]
        self._in_channels = in_channels(source)
        self._call_form: tuple[tuple[str, str, str], bool] | None = None
        self._writes_calls = "tool_calls" in source
        for marker, texts, keywords in _UNWRITTEN_CALLS:
            if marker in source and not self._writes_calls:
                self._call_form = (texts, keywords)
                break

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        options: TemplateOptions | None = None,
    ) -> str:
        """Return the prompt of a conversation.

        Arguments and errors are those of :meth:`pronk.text.tokenizer.Tokenizer.chat`. In addition,
        an option raises an OptionError if its name is that of a variable which the conversation or
        the model sets, such as ``messages``.
        """
        self._check_options(options or {})
        checked = check_messages(messages)
        # Drop keys with the value None, as transformers does: many templates test only whether a
        # key exists.
        prepared = [
            {key: value for key, value in message.items() if value is not None}
            for message in checked
        ]
        if not self.reads_tools and (tools or (not self._writes_calls and have_calls(prepared))):
            has_system_role = bool(tools) and self._has_system_role
            prepared = write_tools(prepared, tools or (), has_system_role=has_system_role)
            tools = None
        if self._call_form is not None:
            (begin, separator, end), keywords = self._call_form
            prepared = [
                write_calls(message, begin, separator, end, keywords=keywords)
                for message in prepared
            ]
        if not self._loops_over_content:
            prepared = [join_parts(message) for message in prepared]
        if "[TOOL_CALLS]" in self._source:
            prepared = [shorten_ids(message) for message in prepared]
        if "<|tool_call_argument_begin|>" in self._source:
            prepared = number_ids(prepared)
        if self._in_channels:
            prepared = separate_calls(prepared)
            options = nearest_effort(options or {})
            tools = None if tools is None else describe_tools(tools)
        values = {
            "documents": None,
            **(options or {}),
            "messages": prepared,
            "add_generation_prompt": add_generation_prompt,
            "tools": None if tools is None else [*tools],
            **self._special_tokens,
        }
        try:
            reply = self._renderer.ask(self._source, values)
        except (TypeError, ValueError, RecursionError) as error:
            reason = describe_error(error)
            msg = (
                f"messages, tools: expected JSON values, found another ({reason:.80}); use texts, "
                "numbers and lists"
            )
            raise PromptError(msg) from error
        if "over_limit" in reply:
            msg = (
                "the model's chat template: expected one that ends, found one that loops or "
                "repeats for too long with these messages; "
                "use another template, or a model that you trust"
            )
            raise PromptError(msg)
        if "error" in reply:
            refuse("the model's chat template refuses these messages", reply["error"], PromptError)
        return reply["text"]

    @cached_property
    def _has_system_role(self) -> bool:
        return has_system_role(self.render)

    def _check_options(self, options: TemplateOptions) -> None:
        """Raise an OptionError if an option has the name of a variable that is set otherwise.

        Such variables are those of the conversation, such as ``messages``, and the special tokens.
        """
        if not isinstance(options, Mapping):
            msg = f"template_options: expected names with a value each, found {options!r:.60}"
            raise OptionError(msg)
        reserved = ("messages", "tools", "add_generation_prompt", *self._special_tokens)
        for name in options:
            if name in reserved:
                msg = (
                    f"template_options: expected names other than {', '.join(reserved)}, found "
                    f"{name!r}, which the conversation or the model determines; leave it out"
                )
                raise OptionError(msg)
