"""Graphs that are built once and replayed with other arrays, without a C++ compiler on a CPU.

A step of a model is some 400 operations, and calling them from Python takes longer than a fast device takes to
run them. On a GPU, `mx.compile` keeps the graph, and fuses elementwise operations into kernels.

On a CPU, `mx.compile` fuses them with `g++`, which takes a second or more for each expression; it loads a
library of a predictable name from the shared temporary folder, which another user may have put there; and
without a compiler it does nothing. So on a CPU the C++ extension replays graphs, without fusing, and
`keep_compiler_out` disables `mx.compile`: functions that MLX and mlx-lm have decorated with it run as they
are written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import mlx.core as mx

from afm_mlx.kernels import dispatch
from afm_mlx.kernels.cpu import extension

_SERIALS = itertools.count()
_is_compiler_out = False


def keep_compiler_out() -> None:
    """Disable `mx.compile` in this process if MLX runs on a CPU; enable it again if MLX runs on a GPU.

    Call it before work begins: the default device may have changed.
    """
    global _is_compiler_out
    if dispatch.device() == "cpu":
        mx.disable_compile()
        _is_compiler_out = True
    elif _is_compiler_out:
        mx.enable_compile()
        _is_compiler_out = False


def is_available() -> bool:
    """True if `Replay` can run on MLX's default device."""
    return dispatch.device() == "gpu" or extension.module() is not None


class Replay:
    """A function of arrays, whose graph is built once for each set of constants, shapes and types.

    Use an instance in one thread only: MLX's streams belong to threads.

    Args:
        function: called as `function(*trees, *constants)`; returns a tree of arrays, and evaluates none.
            Arrays that change from call to call must come from `trees` or `state`.
        state: nested dicts and lists, such as `Module.state`, whose arrays `function` uses, looked up by each
            call.
    """

    def __init__(self, function: Callable[..., Any], state: Any):
        self._function = function
        self._state = state
        self._graphs: dict[Hashable, list[tuple[Any, Any]]] = {}
        # MLX keeps compiled graphs by thread and by the function's address. Another function may have had the
        # address, whose graphs another thread still keeps.
        self._serial = next(_SERIALS)
        self._compiled: Any = None

    def __call__(self, *trees: Any, constants: tuple[Any, ...] = ()) -> Any:
        """Return the function's result, not evaluated.

        `trees` are arrays, or lists and tuples of arrays; `constants`, strings and ints, are passed after them.
        """
        if dispatch.device() == "gpu":
            if self._compiled is None:
                function = self._function
                self._compiled = mx.compile(lambda serial, *all: function(*all), [self._state])
            return self._compiled(self._serial, *trees, *constants)
        inputs = (trees, self._state)
        for graph, like in self._graphs.get(constants, ()):
            outputs = graph(inputs)
            if outputs is not None:
                return _filled(like, iter(outputs))
        graph, like = self._built(trees, constants)
        self._graphs.setdefault(constants, []).append((graph, like))
        return _filled(like, iter(graph(inputs)))

    def _built(self, trees: tuple[Any, ...], constants: tuple[Any, ...]) -> tuple[Any, Any]:
        """Build a call's graph; also return the function's result as a template of its outputs' tree."""
        native: Any = extension.module()
        held = native.leaves(self._state)
        given, put = native.placeholders(trees), native.placeholders(held)
        try:
            _put(self._state, iter(put))
            outputs = self._function(*_filled(trees, iter(given)), *constants)
        finally:
            _put(self._state, iter(held))
        graph = native.Replay((trees, held), (given, put), outputs)
        return graph, _filled(outputs, itertools.repeat(None))


def _filled(tree: Any, leaves: Iterator[Any]) -> Any:
    """Copy a tree of lists and tuples, with its leaves replaced in order."""
    if isinstance(tree, (list, tuple)):
        return type(tree)([_filled(item, leaves) for item in tree])
    return next(leaves)


def _put(tree: Any, arrays: Iterator[mx.array]) -> None:
    """Replace the arrays in nested dicts and lists, in the extension's order of leaves."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(items):
        if isinstance(value, mx.array):
            tree[key] = next(arrays)
        elif isinstance(value, (dict, list, tuple)):
            _put(value, arrays)
