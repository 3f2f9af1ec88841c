"""Chat templates: Jinja sources in checkpoints that convert a conversation to a prompt.

A template comes with the model and is not trusted. It receives the messages, the tools and the special tokens as plain
data, and is rendered in a child process with limits of time and memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from pronk.errors import PromptError, TokenizerError
from pronk.tokenization.chat.harmony import describe_tools, nearest_effort, separate_calls, uses_harmony
from pronk.tokenization.chat.messages import (
    Messages,
    TemplateOptions,
    Tools,
    check_messages,
    join_parts,
    shorten_ids,
    write_calls,
)
from pronk.tokenization.chat.renderer import Renderer, default_renderer

__all__ = ["ChatTemplate"]

# Templates that describe tools but write no calls: a text of such a template, then the texts before, between and after
# calls, and whether the calls have Python's syntax (LFM2). Granite 3 asks for a list; SmolLM3 for objects between tags.
_LFM2_CALLS = ("<|tool_call_start|>[", ", ", "]<|tool_call_end|>")
_UNWRITTEN_CALLS = (
    ("<|tool_list_start|>", _LFM2_CALLS, True),
    ("List of tools: [", _LFM2_CALLS, True),  # LFM2.5
    ("<|tool_call|>", ("<|tool_call|>[", ", ", "]"), False),
    ("</tool_call>", ("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"), False),
)
_MAX_SOURCE = 100_000  # maximum characters of a template; those of well-known models have up to a third of that


class ChatTemplate:
    """A chat template and the special tokens that it inserts.

    Args:
        source: template in Jinja.
        special_tokens: texts of special tokens by the names that templates use (``bos_token``, ``eos_token``, …).
        renderer: child process for rendering.

    Raises:
        TokenizerError: the template is not valid Jinja, or too long.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, renderer: Renderer = default_renderer
    ) -> None:
        self._source, self._special_tokens, self._renderer = source, dict(special_tokens), renderer
        if len(source) > _MAX_SOURCE:
            msg = f"chat template: expected at most {_MAX_SOURCE} characters, found {len(source)}; use another one"
            raise TokenizerError(msg)
        reply = renderer.ask(source)
        if "text" not in reply:
            reason = reply.get("error", "it takes too long, or too much memory, to compile")
            msg = f"chat template: expected valid Jinja, found an error: {reason}"
            raise TokenizerError(msg)
        self._loops_over_content = reply["loops_over_content"]
        self._in_channels = uses_harmony(source)
        writes_none = "tool_calls" not in source
        forms = ((texts, keywords) for marker, texts, keywords in _UNWRITTEN_CALLS if marker in source and writes_none)
        self._call_form = next(forms, None)

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        options: TemplateOptions | None = None,
    ) -> str:
        """Return the prompt of a conversation; arguments and errors as in :meth:`Tokenizer.chat`."""
        checked = check_messages(messages)
        # Drop keys with the value None, as transformers does: many templates test only whether a key exists.
        prepared = [{key: value for key, value in message.items() if value is not None} for message in checked]
        if self._call_form is not None:
            (begin, separator, end), keywords = self._call_form
            prepared = [write_calls(message, begin, separator, end, keywords=keywords) for message in prepared]
        if not self._loops_over_content:
            prepared = [join_parts(message) for message in prepared]
        if "[TOOL_CALLS]" in self._source:
            prepared = [shorten_ids(message) for message in prepared]
        if self._in_channels:
            prepared, options = separate_calls(prepared), nearest_effort(options or {})
            tools = None if tools is None else describe_tools(tools)
        values = {
            **(options or {}),
            "messages": prepared,
            "add_generation_prompt": add_generation_prompt,
            "tools": None if tools is None else [*tools],
            "documents": None,
            **self._special_tokens,
        }
        try:
            reply = self._renderer.ask(self._source, values)
        except (TypeError, ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())
            msg = f"messages, tools: expected JSON values, found another ({reason:.80}); use texts, numbers and lists"
            raise PromptError(msg) from error
        if "over_limit" in reply:
            msg = (
                "the model's chat template: expected one that ends, found one that loops or repeats for too long with "
                "these messages; use another template, or a model that you trust"
            )
            raise PromptError(msg)
        if "error" in reply:
            msg = f"the model's chat template refuses these messages: {reply['error']}"
            raise PromptError(msg)
        text: str = reply["text"]
        return text
