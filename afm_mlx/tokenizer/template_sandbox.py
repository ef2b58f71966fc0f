"""The Jinja environment that renders templates of model folders: they can't run code, and are bounded.

Jinja's sandbox keeps templates from Python's internals, but `{{ 'a' * 10**10 }}` or two nested loops may take
all memory, or hours. Here each loop round, operator, filter and call takes from a budget before it is carried
out, by the size of what it makes; what would need more than is left is refused. Constants are not folded when a
template is compiled, for that would be outside of the budget.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, generate_lorem_ipsum
from jinja2.visitor import NodeTransformer

STEPS = 300_000
"""Loop rounds, operators, calls and values that a rendering may take; 64 characters of a text count as one."""
SECONDS = 5.0
"""Seconds of the thread's processor time that a rendering may take; most take milliseconds."""
TEXT = 16_000_000
"""Characters that a text may have."""
SOURCE = 200_000
"""Characters that a template may have; the longest in use have some 20,000."""
_BITS = 65_536  # most bits of an integer
_WIDTH = 10_000  # of the widest column, indentation or slice
_CALL = 4  # steps of a call
_BUDGET = " budget"  # no template has a variable of such a name

# Made for web pages, or slow on long texts; no prompt has a use for them.
_REMOVED_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
_REMOVED_METHODS = ("encode", "from_bytes", "maketrans", "to_bytes", "translate")
_TAKES_A_WIDTH = frozenset(
    "batch center expandtabs indent ljust rjust round slice tojson truncate zfill".split()
)
_WIDTH_PER_LINE = frozenset(("expandtabs", "indent"))
_TAKES_TEXT_APART = frozenset(
    "batch list reverse rsplit slice sort split splitlines unique".split()
)


class Budget:
    """The steps and the time that a rendering has left.

    Args:
        size: size of messages and variables, in steps; it is the caller's choice, and adds to the budget.
    """

    def __init__(self, size: int = 0) -> None:
        self._left = STEPS + 16 * size
        self._end = time.thread_time() + SECONDS
        self._next_look = self._left

    def take(self, steps: int) -> None:
        """Take steps, before they are carried out.

        Raises:
            SecurityError: when there are not so many left.
        """
        self._left -= steps
        if self._left < 0:
            raise SecurityError(f"it takes more than {STEPS:,} steps, or a text is too long")
        if self._left < self._next_look:
            self._next_look = self._left - 64
            if time.thread_time() > self._end:
                raise SecurityError(f"it takes more than {SECONDS:.0f} seconds")


def size_of(value: Any, most: float = float("inf")) -> int:
    """Steps that a value counts for, with all that is in it; no more than about `most` are looked at."""
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
    """Renders a template within a budget, see `render`."""

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

    def render(self, template: Any, variables: Mapping[str, Any]) -> str:
        """A template's text.

        Raises:
            SecurityError: when it takes too much.
            Exception: whatever else a template can raise.
        """
        budget = Budget(size_of(variables))
        return _concat(template.generate({**variables, _BUDGET: budget}))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > SOURCE:
            raise SecurityError(f"it has {len(source):,} characters, {SOURCE:,} are allowed")
        return _Metered().visit(super()._parse(source, name, filename))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr in _REMOVED_METHODS and isinstance(obj, str | int):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def is_safe_callable(self, obj: Any) -> bool:
        return obj is not generate_lorem_ipsum and super().is_safe_callable(obj)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = context.parent[_BUDGET]
        budget.take(1 + _steps_of(operator, left, right))
        return _checked(budget, self.binop_table[operator](left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = __context.parent[_BUDGET]
        budget.take(_CALL)
        # `str.format` comes wrapped.
        method = getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            if method.__name__ == "join":
                args = (list(args[0]), *args[1:])
            _before(budget, method.__name__, owner, *args, **kwargs)
        return _checked(budget, super().call(__context, __obj, *args, **kwargs))


class _Namespace(Namespace):
    __repr__ = object.__repr__  # the values might hold each other many times over


class _Metered(NodeTransformer):
    """Has what Jinja gives no hook for pass through a filter: a loop's rounds, `~`, literal lists and dicts."""

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


@pass_context
def _each(context: Context, values: Iterable[Any]) -> Iterator[Any]:
    take = context.parent[_BUDGET].take
    for value in values:
        take(1)
        yield value


@pass_context
def _joined(context: Context, values: list[Any]) -> str:
    budget = context.parent[_BUDGET]
    texts = [str(value) for value in values]
    budget.take(1 + sum(map(len, texts)) // 64)
    return "".join(texts)


@pass_context
def _made(context: Context, value: Any) -> Any:
    return _checked(context.parent[_BUDGET], value)


@pass_context
def _output(context: Context, value: Any) -> Any:
    context.parent[_BUDGET].take(1 + (len(value) // 64 if isinstance(value, str) else 0))
    return value


def _concat(texts: Iterable[str]) -> str:
    """Joined output; `texts` may be generated, and is no further than allowed."""
    parts, size = [], 0
    for text in texts:
        parts.append(text)
        size += len(text)
        if size > TEXT:
            raise SecurityError(f"it writes more than {TEXT:,} characters")
    return "".join(parts)


def _checked(budget: Budget, value: Any) -> Any:
    """A new value, whose size is taken. So no list is built that holds others many times over."""
    if isinstance(value, str):
        budget.take(len(value) // 64)
    elif isinstance(value, Mapping | list | tuple | set | frozenset):
        budget.take(size_of(value, STEPS))
    return value


def bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that takes from the budget."""
    passed = getattr(function, "jinja_pass_arg", None)

    @pass_context
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = context.parent[_BUDGET]
        budget.take(1)
        if name == "join" and not isinstance(value, str | Mapping) and isinstance(value, Iterable):
            value = list(value)
        _before(budget, name, value, *args, **kwargs)
        own = {
            "context": context,
            "eval_context": context.eval_ctx,
            "environment": context.environment,
        }
        first = () if passed is None else (own[passed.name],)
        return _checked(budget, function(*first, value, *args, **kwargs))

    return run


def _before(budget: Budget, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    """Take what a filter or a method of `str` is going to need for its result, which may be long."""
    given = [*args, *kwargs.values()]
    length = len(value) if isinstance(value, str) else 0
    budget.take(length // (1 if name in _TAKES_TEXT_APART else 64))
    if name in _TAKES_A_WIDTH:
        widths = [len(arg) if isinstance(arg, str) else arg for arg in given]
        width = max((abs(width) for width in widths if isinstance(width, int)), default=0)
        if width > _WIDTH:
            raise SecurityError(f"{name} takes at most {_WIDTH:,}, not {_shown(width)}")
        if name in _WIDTH_PER_LINE:
            budget.take(length * width // 64)
    elif name == "replace" and len(given) > 1:
        budget.take(str(value).count(str(given[0])) * len(str(given[1])) // 64)
    elif name == "join":
        separator, items = (given[0] if given else "", value)
        if not isinstance(separator, str):  # the method has them the other way round
            separator, items = value, separator
        if isinstance(items, str | list | tuple) and isinstance(separator, str):
            texts = sum(len(item) for item in items if isinstance(item, str))
            budget.take((texts + len(items) * len(separator)) // 64)
    elif name in ("format", "format_map"):
        budget.take(_steps_of_format(str(value), given))


def _steps_of_format(pattern: str, values: list[Any]) -> int:
    """Steps that a format is going to need: each of its fields may be all values again, and have a width.

    Raises:
        SecurityError: for a width that is too large.
    """
    takes_widths = "*" in pattern or re.search(r"\{[^{}]*\{", pattern)
    if re.search(r"\d{5}", pattern) or (
        takes_widths and any(isinstance(v, int) and abs(v) > _WIDTH for v in values)
    ):
        raise SecurityError(f"a format's width is over {_WIDTH:,}")
    width = _WIDTH // 64 if takes_widths or re.search(r"\d{3}", pattern) else 1
    return (pattern.count("%") + pattern.count("{")) * (size_of(values, STEPS) + width)


def _steps_of(operator: str, left: Any, right: Any) -> int:
    """Steps that an operator is going to need.

    Raises:
        SecurityError: for an integer that is too large.
    """
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length()
        if operator == "**":
            bits = left.bit_length() * abs(right)
        if bits > _BITS:
            raise SecurityError(f"an integer of {_shown(bits)} bits, and {_BITS:,} are allowed")
    elif operator == "*" and (isinstance(left, int) or isinstance(right, int)):
        count, value = (left, right) if isinstance(left, int) else (right, left)
        length = len(value) if isinstance(value, Sized) else 0
        return max(count, 0) * length // (64 if isinstance(value, str) else 1)
    elif operator == "%" and isinstance(left, str):
        return _steps_of_format(left, list(right) if isinstance(right, tuple) else [right])
    elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, Sized):
        return (len(left) + len(right)) // (64 if isinstance(left, str) else 1)
    return 0


def _shown(number: int) -> str:
    return f"{number:,}" if number.bit_length() < 64 else "more than 10**18"
