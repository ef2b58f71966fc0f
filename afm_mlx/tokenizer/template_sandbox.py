"""The Jinja environment for model folders' templates: they can't run code, and are bounded in time and memory.

Jinja's sandbox keeps templates away from Python's internals, but `{{ 'a' * 10**10 }}` or two nested loops can
take all memory, or hours. Here each loop round, operator, filter and call takes steps from a budget before it
runs, by the size of its result; a template whose budget is used up is refused. Constants are not folded when a
template is compiled, because folding runs outside the budget.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, TypeVar

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, generate_lorem_ipsum
from jinja2.visitor import NodeTransformer

STEPS = 300_000
"""Steps that a rendering may take: loop rounds, operators, calls, values; 64 characters of text are one."""
SECONDS = 5.0
"""Seconds of the thread's processor time that a rendering may take; most take milliseconds."""
TEXT = 16_000_000
"""Characters that a text may have."""
SOURCE = 200_000
"""Characters that a template may have; the longest in use have some 20,000."""
_BITS = 65_536  # largest integer
_WIDTH = 10_000  # widest column, indentation or slice
_CALL = 4  # steps of a call
_BUDGET = " budget"  # no template can have a variable of this name

# Made for web pages, or slow on long texts; no prompt needs them.
_REMOVED_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
_REMOVED_METHODS = ("encode", "from_bytes", "maketrans", "to_bytes", "translate")
_TAKES_A_WIDTH = frozenset(
    "batch center expandtabs indent ljust rjust round slice tojson truncate zfill".split()
)
_WIDTH_PER_LINE = frozenset(("expandtabs", "indent"))
_SPLITS_TEXT = frozenset("batch list reverse rsplit slice sort split splitlines unique".split())

_Value = TypeVar("_Value")


class RenderingBudget:
    """The steps and the processor time that a rendering has left.

    `size` is the size of messages and variables in steps: the caller chose them, so they add to the budget.
    """

    def __init__(self, size: int = 0) -> None:
        self._left = STEPS + 16 * size
        self._end = time.thread_time() + SECONDS
        self._next_look = self._left

    def take(self, steps: int) -> None:
        """Take steps, before they run; raise `SecurityError` if the steps or the time are used up."""
        self._left -= steps
        if self._left < 0:
            raise SecurityError(f"it takes more than {STEPS:,} steps, or a text is too long")
        if self._left < self._next_look:
            self._next_look = self._left - 64
            if time.thread_time() > self._end:
                raise SecurityError(f"it takes more than {SECONDS:.0f} seconds")

    def checked(self, value: _Value) -> _Value:
        """Take steps for a new value's size, so that no list can hold others many times over."""
        if isinstance(value, str):
            self.take(len(value) // 64)
        elif isinstance(value, Mapping | list | tuple | set | frozenset):
            self.take(size_of(value, STEPS))
        return value

    def take_for(self, name: str, value: object, given: list[object]) -> None:
        """Take steps for the filter or method of `str` called `name`, before it makes its result.

        It is applied to `value` with the arguments `given`. Raises `SecurityError` for a large width, or
        if the budget is used up.
        """
        length = len(value) if isinstance(value, str) else 0
        self.take(length // (1 if name in _SPLITS_TEXT else 64))
        if name in _TAKES_A_WIDTH:
            widths = [len(arg) if isinstance(arg, str) else arg for arg in given]
            width = max((abs(width) for width in widths if isinstance(width, int)), default=0)
            if width > _WIDTH:
                raise SecurityError(f"{name} takes at most {_WIDTH:,}, not {_shown(width)}")
            if name in _WIDTH_PER_LINE:
                self.take(length * width // 64)
        elif name == "replace" and len(given) > 1:
            self.take(str(value).count(str(given[0])) * len(str(given[1])) // 64)
        elif name == "join":
            separator, items = (given[0] if given else "", value)
            if not isinstance(separator, str):  # the method of str has them the other way round
                separator, items = value, separator
            if isinstance(items, str | list | tuple) and isinstance(separator, str):
                texts = sum(len(item) for item in items if isinstance(item, str))
                self.take((texts + len(items) * len(separator)) // 64)
        elif name in ("format", "format_map"):
            self.take(_steps_of_format(str(value), given))


def size_of(value: object, most: float = float("inf")) -> int:
    """Count the steps of a value with all that is in it; stop counting at about `most`."""
    size, stack = 0, [value]
    while stack and size <= most:
        item = stack.pop()
        size += 1
        if isinstance(item, str | bytes):
            size += len(item) // 64
        elif isinstance(item, Mapping):
            stack += item
            stack += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            stack += item
    return size


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Renders templates within a budget, see `render`."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, optimized=False, finalize=_output)
        self.concat = _concat  # type: ignore[method-assign]
        self.globals["namespace"] = _Namespace
        self.filters = {
            name: bounded_filter(name, function)
            for name, function in self.filters.items()
            if name not in _REMOVED_FILTERS
        }
        self.filters |= {"_each": _each, "_joined": _joined, "_made": _made}

    def render(self, template: Template, variables: Mapping[str, object]) -> str:
        """Render a template's text; raise `SecurityError` if that takes too much."""
        budget = RenderingBudget(size_of(variables))
        return _concat(template.generate({**variables, _BUDGET: budget}))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > SOURCE:
            raise SecurityError(f"it has {len(source):,} characters, {SOURCE:,} are allowed")
        return _Metered().visit(super()._parse(source, name, filename))

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        if attr in _REMOVED_METHODS and isinstance(obj, str | int):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def is_safe_callable(self, obj: object) -> bool:
        return obj is not generate_lorem_ipsum and super().is_safe_callable(obj)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget(context)
        budget.take(1 + _steps_of(operator, left, right))
        return budget.checked(self.binop_table[operator](left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(__context)
        budget.take(_CALL)
        # `str.format` comes wrapped.
        method = getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            if method.__name__ == "join":
                args = (list(args[0]), *args[1:])
            budget.take_for(method.__name__, owner, [*args, *kwargs.values()])
        return budget.checked(super().call(__context, __obj, *args, **kwargs))


class _Namespace(Namespace):
    __repr__ = object.__repr__  # the values might hold each other many times over


class _Metered(NodeTransformer):
    """Puts a filter around what Jinja has no hook for: loop rounds, `~`, literal lists and dicts."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filter("_each", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _filter("_joined", nodes.List(node.nodes, lineno=node.lineno))

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Expr:
        self.generic_visit(node)
        return _filter("_made", node)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return _filter("_made", node) if node.ctx == "load" else node


def _filter(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _budget(context: Context) -> RenderingBudget:
    budget: RenderingBudget = context.parent[_BUDGET]
    return budget


@pass_context
def _each(context: Context, values: Iterable[object]) -> Iterator[object]:
    take = _budget(context).take
    for value in values:
        take(1)
        yield value


@pass_context
def _joined(context: Context, values: list[object]) -> str:
    texts = [str(value) for value in values]
    _budget(context).take(1 + sum(map(len, texts)) // 64)
    return "".join(texts)


@pass_context
def _made(context: Context, value: object) -> object:
    return _budget(context).checked(value)


@pass_context
def _output(context: Context, value: object) -> object:
    _budget(context).take(1 + (len(value) // 64 if isinstance(value, str) else 0))
    return value


def _concat(texts: Iterable[str]) -> str:
    """Join output; `texts` may be a generator, which is stopped at the limit."""
    parts, size = [], 0
    for text in texts:
        parts.append(text)
        size += len(text)
        if size > TEXT:
            raise SecurityError(f"it writes more than {TEXT:,} characters")
    return "".join(parts)


def bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the filter `name` so that it takes steps from the budget before it runs."""
    passed = getattr(function, "jinja_pass_arg", None)

    @pass_context
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        budget.take(1)
        if name == "join" and not isinstance(value, str | Mapping) and isinstance(value, Iterable):
            value = list(value)
        budget.take_for(name, value, [*args, *kwargs.values()])
        own = {
            "context": context,
            "eval_context": context.eval_ctx,
            "environment": context.environment,
        }
        first = () if passed is None else (own[passed.name],)
        return budget.checked(function(*first, value, *args, **kwargs))

    return run


def _steps_of_format(pattern: str, values: list[object]) -> int:
    """Count the steps of a format: each field may show all values again, and have a width.

    Raises `SecurityError` for a width that is too large.
    """
    takes_widths = "*" in pattern or re.search(r"\{[^{}]*\{", pattern)
    if re.search(r"\d{5}", pattern) or (
        takes_widths and any(isinstance(v, int) and abs(v) > _WIDTH for v in values)
    ):
        raise SecurityError(f"a format's width is over {_WIDTH:,}")
    width = _WIDTH // 64 if takes_widths or re.search(r"\d{3}", pattern) else 1
    return (pattern.count("%") + pattern.count("{")) * (size_of(values, STEPS) + width)


def _steps_of(operator: str, left: object, right: object) -> int:
    """Count the steps of an operator; raise `SecurityError` for an integer that is too large."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length()
        if operator == "**":
            bits = left.bit_length() * abs(right)
        if bits > _BITS:
            raise SecurityError(f"an integer of {_shown(bits)} bits, and {_BITS:,} are allowed")
    elif operator == "*" and (isinstance(left, int) or isinstance(right, int)):
        count, value = (left, right) if isinstance(left, int) else (right, left)
        length = len(value) if isinstance(value, Sized) else 0
        return max(count, 0) * length // (64 if isinstance(value, str) else 1)  # type: ignore[call-overload]
    elif operator == "%" and isinstance(left, str):
        return _steps_of_format(left, list(right) if isinstance(right, tuple) else [right])
    elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, Sized):
        return (len(left) + len(right)) // (64 if isinstance(left, str) else 1)
    return 0


def _shown(number: int) -> str:
    return f"{number:,}" if number.bit_length() < 64 else "more than 10**18"
