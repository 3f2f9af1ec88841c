"""Jinja's immutable sandbox, where everything that a template does is paid for from a budget.

Jinja keeps a template from what is none of its business, not from running for ever: ``'x' * 10**10`` is one operation,
and loops within loops are two lines. An alarm can interrupt neither the first nor, outside the main thread, the second;
a process of its own could, but takes longer to start than all templates of a day. So nothing is interrupted here.
Instead, whatever a template can do

- takes time and memory in proportion to what it costs, and
- is paid for beforehand.

Once the budget is spent the template ends with :class:`~pronk.tokenization.chat.meter.OverBudgetError`. Bodies that can run
more than once (of loops, macros, blocks) begin by paying for all that is written in them; what depends on values is
paid for where it is done:

=====================================  ======================================================================
comparisons, ``~``, slices, ``{{ }}``  the compiled program pays, by calls that are put into it: :class:`_Priced`
operators, calls, joined output        the environment pays, in the methods that Jinja calls for them
filters, tests                         a function around each of them pays (:mod:`pronk.tokenization.chat.costs`)
=====================================  ======================================================================

Methods that no table of costs knows are refused. Filters that would return a generator return the iterator of a list,
which costs what it holds; to a template both are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from types import CodeType
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS as JINJAS_FILTERS
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.tests import TESTS as JINJAS_TESTS
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from pronk.tokenization.chat.costs import Cost, filter_cost, function_cost, method_cost, percent, test_cost, times
from pronk.tokenization.chat.functions import FILTERS, FUNCTIONS, plain_key
from pronk.tokenization.chat.meter import LIST_ITERATOR, STEP, Meter, count

__all__ = ["Sandbox"]

# No template can write these names.
_BEGIN, _WHOLE, _WITHIN, _SLICED, _KEY = "begin body", "whole value", "searched value", "sliced value", "key of a dict"
_HIDDEN = ("_loop_vars", "_block_vars", "caller")  # what Jinja itself hands to a function


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment for one rendering.

    Args:
        meter: the budget.
    """

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, meter: Meter) -> None:
        # Unoptimized: nothing of the template is computed when it is compiled, where nothing is paid.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[loopcontrols, _GenerationBlock]
        )
        self.meter = meter
        self.filters, self.tests = _FILTERS, _TESTS
        self.globals = {"range": self.globals["range"], **FUNCTIONS}

    def compile_priced(self, tree: nodes.Template) -> CodeType:
        """The program of a template, for all sandboxes; ``tree`` is changed.

        Raises:
            TemplateError: it is not valid Jinja.
        """
        return self.compile(_Priced().visit(tree).set_environment(self))

    def concat(self, pieces: Iterable[str]) -> str:
        """The pieces in one; Jinja joins all that it renders by this."""
        return "".join(self._paid(pieces))

    def _paid(self, pieces: Iterable[str]) -> Iterator[str]:
        for piece in pieces:
            self.meter.charge(len(piece))
            yield piece

    def getitem(self, obj: Any, argument: Any) -> Any:
        """``obj[argument]``."""
        if not isinstance(argument, (str, int)):
            self.meter.whole(argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """``left operator right``."""
        for value in (left, right):
            if operator in {"+", "*"} and isinstance(value, (list, tuple)):
                self.meter.charge(STEP * len(value))  # what is in it is not looked at
            else:
                self.meter.whole(value)
        if operator == "%" and isinstance(left, str):
            self.meter.charge(percent(left, right))
        elif operator == "*":
            self.meter.charge(times(left, right))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self.meter.charge((left.bit_length() * max(0, right)) ** 2 // STEP)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """``obj(*args, **kwargs)``."""
        given = {name: value for name, value in kwargs.items() if name not in _HIDDEN}
        if isinstance(obj, (Macro, BlockReference, LoopContext)):
            self.meter.charge(STEP * (len(args) + len(given)))  # the rest is for their bodies to pay
        elif not isinstance(obj, (Undefined, _Format)):
            owner, cost = self._callable(obj)
            cost(self.meter, (*owner, *args), given)
        return super().call(context, obj, *args, **kwargs)

    def _callable(self, obj: Any) -> tuple[tuple[Any, ...], Cost]:
        """Whose method it is, if it is one, and what it costs."""
        name = next((name for name, function in self.globals.items() if function is obj), None)
        if name is not None:
            return (), function_cost(name)
        owner, method = getattr(obj, "__self__", None), str(getattr(obj, "__name__", type(obj).__name__))
        cost = method_cost(owner, method)
        if cost is None:
            msg = f"a template cannot call {method!r}"
            raise SecurityError(msg)
        return (owner,), cost

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format``, paid for field by field."""
        known = super().wrap_str_format(value)
        return None if known is None else _Format(self, value.__self__, mapped=value.__name__ == "format_map")


class _Format:
    """The method of a text that fills in its fields.

    Args:
        environment: that pays.
        text: with fields.
        mapped: whether it is ``format_map``, which takes the values by name in a mapping.
    """

    def __init__(self, environment: Sandbox, text: str, *, mapped: bool) -> None:
        self._environment, self._text, self._mapped = environment, text, mapped

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        if self._mapped:
            (kwargs,), args = args, ()
        self._environment.meter.whole(self._text, args, kwargs)
        made = _EscapeFormatter(self._environment, escape=self._text.escape) if isinstance(self._text, Markup) else None
        return type(self._text)((made or _Formatter(self._environment)).vformat(self._text, args, kwargs))


class _Formatter(SandboxedFormatter):
    """Pays for each field: the same value may stand there many times, and have any width."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        sandbox = self._env
        assert isinstance(sandbox, Sandbox)
        sandbox.meter.whole(value, format_spec)
        digits = "".join(each if each.isdecimal() else " " for each in format_spec).split()
        sandbox.meter.charge(sum(map(int, digits)))
        return super().format_field(value, format_spec)


class _EscapeFormatter(_Formatter, SandboxedEscapeFormatter):
    pass


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's words for training; here its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Priced(NodeTransformer):
    """Puts calls into a template that pay for what Jinja's environment is not asked about."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja2's names, here and below
        begin = _begin(node)
        self._body(node)
        if node.test is not None:  # asked even where the body is not reached
            node.test = nodes.And(begin, node.test, lineno=node.lineno)
        return node

    def _body(self, node: nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        begin = nodes.ExprStmt(_begin(node), lineno=node.lineno)
        self.generic_visit(node)
        node.body.insert(0, begin)
        return node

    visit_Macro = visit_CallBlock = visit_Block = _body  # noqa: N815

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [n if isinstance(n, nodes.TemplateData) else _paid(_WHOLE, n) for n in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [_paid(_WHOLE, each) for each in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _paid(_WHOLE, node.expr)
        for operand in node.ops:
            operand.expr = _paid(_WITHIN if operand.op in {"in", "notin"} else _WHOLE, operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _paid(_SLICED, node.node)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.key = _paid(_KEY, node.key)
        return node


def _paid(name: str, node: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _begin(node: nodes.Node) -> nodes.Expr:
    """Pays for one run through a body: a step for each of its nodes."""
    size = STEP * sum(1 for _ in node.find_all(nodes.Node))
    return _paid(_BEGIN, nodes.Const(size, lineno=node.lineno))


@pass_context
def _begin_body(context: Context, units: int) -> bool:
    _meter(context).charge(units)
    return True


@pass_context
def _whole_value(context: Context, value: Any) -> Any:
    _meter(context).whole(value)
    return value


@pass_context
def _searched_value(context: Context, value: Any) -> Any:
    """A dictionary finds a key without a search."""
    _meter(context).whole(*([] if isinstance(value, Mapping) else [value]))
    return value


@pass_context
def _sliced_value(context: Context, value: Any) -> Any:
    _meter(context).charge(count(value) * (1 if isinstance(value, str) else STEP))
    return value


@pass_context
def _key_of_a_dict(context: Context, value: Any) -> Any:  # noqa: ARG001 - as the others
    return plain_key(value)


def _meter(context: Context) -> Meter:
    sandbox = context.environment
    assert isinstance(sandbox, Sandbox)
    return sandbox.meter


def _priced(function: Any, cost: Cost) -> Callable[..., Any]:
    """A filter or a test that pays first."""
    # "context", "eval_context" or "environment", which Jinja would hand to it, or nothing.
    wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @wraps(function, updated=())
    @pass_context
    def priced(context: Context, *args: Any, **kwargs: Any) -> Any:
        meter = _meter(context)
        cost(meter, args, kwargs)
        handed = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        result = function(*([] if wanted is None else [handed[wanted]]), *args, **kwargs)
        if not isinstance(result, Iterator) or isinstance(result, (LoopContext, LIST_ITERATOR)):
            return result
        items = list(result)
        meter.charge(STEP * len(items))
        return iter(items)

    return priced


_FILTERS: dict[str, Callable[..., Any]] = {
    **{name: _priced(function, filter_cost(name)) for name, function in (JINJAS_FILTERS | FILTERS).items()},
    _BEGIN: _begin_body,
    _WHOLE: _whole_value,
    _WITHIN: _searched_value,
    _SLICED: _sliced_value,
    _KEY: _key_of_a_dict,
}
_TESTS: dict[str, Any] = {name: _priced(function, test_cost(name)) for name, function in JINJAS_TESTS.items()}
