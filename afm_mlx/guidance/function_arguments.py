"""A function's arguments as a type: what a model has to give to call it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, NotRequired, TypedDict, get_type_hints

from afm_mlx.errors import ConstraintError
from afm_mlx.guidance.type_libraries import Pydantic, library_of

_REFUSED = {
    inspect.Parameter.POSITIONAL_ONLY: "can only be given by position; remove the / behind it",
    inspect.Parameter.VAR_POSITIONAL: "takes any number of arguments; use a parameter of type list",
    inspect.Parameter.VAR_KEYWORD: "takes arguments of any names; use a parameter of type dict",
}


def arguments_type(
    function: Callable[..., Any], read_as: Callable[[inspect.Parameter], Any] | None = None
) -> Any:
    """A `TypedDict` of a function's parameters, with the function's name and docstring.

    Parameters with defaults are not required.

    Args:
        function: with an annotation for each parameter.
        read_as: gives the type that takes the place of a parameter's annotation, in which names are resolved.
            None takes the annotations.

    Raises:
        ConstraintError: for a parameter that a JSON object can't give, or that has no annotation.
    """
    name = getattr(function, "__name__", type(function).__name__)
    signature, hints = _described(function, name)
    fields: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        where = f"The parameter {parameter.name} of {name}"
        if parameter.kind in _REFUSED:
            raise ConstraintError(f"{where} {_REFUSED[parameter.kind]}.")
        if parameter.name not in hints:
            raise ConstraintError(
                f"{where} has no annotation; give its type, such as {parameter.name}: str."
            )
        hint = hints[parameter.name]
        if read_as is not None:
            hint = read_as(parameter.replace(annotation=hint))
        is_required = parameter.default is inspect.Parameter.empty
        fields[parameter.name] = hint if is_required else NotRequired[hint]
    typed_dict: Any = TypedDict
    kind = typed_dict(name, fields)
    if isinstance(library_of(kind), Pydantic):
        # Before Python 3.12 pydantic refuses that of typing.
        typed_dict = import_module("typing_extensions").TypedDict
        kind = typed_dict(name, fields)
    kind.__doc__ = inspect.getdoc(function)
    return kind


def _described(function: Callable[..., Any], name: str) -> tuple[inspect.Signature, dict[str, Any]]:
    """A function's signature and the types in it."""
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    try:
        signature = inspect.signature(function)
        hints = get_type_hints(
            inner if inspect.isroutine(inner) else type(inner).__call__, include_extras=True
        )
    except Exception as error:  # whatever evaluating an annotation meets
        raise ConstraintError(
            f"The annotations of {name} can't be read ({error}); types that they name in quotes have to be "
            "known in its module."
        ) from None
    return signature, hints
