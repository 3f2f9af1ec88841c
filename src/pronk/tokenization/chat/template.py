"""Chat templates: Jinja from a checkpoint.

A template comes with the model and is not trusted: it sees the messages, the tools and the names of the special tokens,
as plain data, and a handful of functions; and it has a budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Template, TemplateError, nodes

from pronk.errors import PromptError, TokenizerError
from pronk.tokenization.chat.messages import Messages, Tools, check_messages, join_parts, short_ids
from pronk.tokenization.chat.meter import Meter, OverBudgetError, extent
from pronk.tokenization.chat.sandbox import Sandbox

__all__ = ["ChatTemplate"]

_LONGEST = 100_000  # characters of Jinja; the longest templates of well-known models have a third of that
_SHOWN = 300  # characters of what a template says, which may be as long as it likes
# Units (see ``meter``): for any template, which takes a second or two and some 100 MB to use them up; for each message
# and each tool, for each pair of them (Gemma's template looks for an answer to each message among the rest), and for
# each unit that they have. Well-known templates use up to half of it.
_ANY, _PER_MESSAGE, _PER_PAIR, _PER_UNIT = 2**24, 2**15, 2**9, 32


class ChatTemplate:
    """A compiled template.

    Args:
        source: the template's text.
        special_tokens: ``bos_token``, ``eos_token`` and the like, by the names that templates use.

    Raises:
        TokenizerError: the template is not valid Jinja, or too long.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        if len(source) > _LONGEST:
            msg = f"chat template: expected at most {_LONGEST} characters, found {len(source)}; use another one"
            raise TokenizerError(msg)
        try:
            sandbox = Sandbox(Meter(0))
            tree = sandbox.parse(source)
            self._reads_parts = any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))
            self._code = sandbox.compile_priced(tree)
            self._counts_ids = "[TOOL_CALLS]" in source
        except (TemplateError, SyntaxError, RecursionError, MemoryError, ValueError) as error:
            msg = f"chat template: expected valid Jinja, found an error: {_first_line(error)}"
            raise TokenizerError(msg) from error

    def render(self, messages: Messages, *, add_generation_prompt: bool = True, tools: Tools | None = None) -> str:
        """The text of a conversation.

        Args:
            messages: see :mod:`pronk.tokenization.chat.messages`.
            add_generation_prompt: end with what comes before the assistant's answer.
            tools: that the model may call, as OpenAI's interface has them.

        Raises:
            PromptError: malformed messages, a conversation that the template refuses, or a template that takes too
                long for it.
        """
        plain = check_messages(messages)
        if not self._reads_parts:
            plain = [join_parts(message) for message in plain]
        if self._counts_ids:
            plain = [short_ids(message) for message in plain]
        try:
            sandbox = Sandbox(Meter(_budget([*plain, *(tools or ())])))
            return Template.from_code(sandbox, self._code, sandbox.globals).render(
                messages=plain,
                add_generation_prompt=add_generation_prompt,
                tools=None if tools is None else [*tools],
                documents=None,
                **self._special_tokens,
            )
        except (OverBudgetError, RecursionError) as error:
            msg = (
                "the model's chat template: expected one that ends, found one that loops or repeats for too long with "
                "these messages; use another template, or a model that you trust"
            )
            raise PromptError(msg) from error
        except Exception as error:  # a template is a program: anything can go wrong in it
            msg = f"the model's chat template refuses these messages: {_first_line(error)}"
            raise PromptError(msg) from error


def _budget(given: Sequence[Mapping[str, Any]]) -> int:
    """Units that a template may use up for these messages and tools."""
    number = len(given)
    return _ANY + _PER_MESSAGE * number + _PER_PAIR * number**2 + _PER_UNIT * extent(given)


def _is_content(node: nodes.Node) -> bool:
    """Whether an expression is a message's content, or a part of its parts.

    A template that loops over that knows lists of parts; for one that does not, they are joined. vLLM decides so too.
    """
    if isinstance(node, nodes.Filter) or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)):
        return node.node is not None and _is_content(node.node)
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return getattr(node, "attr" if isinstance(node, nodes.Getattr) else "name", None) == "content"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:_SHOWN] if lines else type(error).__name__
