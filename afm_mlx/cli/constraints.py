"""What an answer must look like: the arguments that say it, and the constraint that they make."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from afm_mlx.cli.argument_table import Argument, flag_of
from afm_mlx.cli.parser import UsageError
from afm_mlx.errors import reason_of, shown

if TYPE_CHECKING:
    from afm_mlx.guidance.constraint import Constraint

# fmt: off
ARGUMENTS = [
    Argument("--json-schema", None,
             "a JSON value under this schema: a file, or a type, module:Class or path/to/file.py:Class, whose "
             "code is run. A chat shows the schema to the model",
             metavar="FILE.json|TYPE"),
    Argument("--regex", None, "a text that this pattern matches as a whole", metavar="PATTERN"),
    Argument("--choices", None, "one of these texts", nargs="+", metavar="TEXT"),
    Argument("--grammar", None, "a text of this grammar: Lark's or, in .gbnf, llama.cpp's",
             metavar="FILE.lark|FILE.gbnf"),
    Argument("--at-limit", ["error", "complete"],
             "what an answer becomes that --max-tokens cuts off: an error, or the shortest that begins like it",
             "error"),
]
# fmt: on

MAX_BYTES = 16 << 20
"""Bytes of the file of a schema, a grammar or a type."""

_NAMES = ("json_schema", "regex", "choices", "grammar")
ALTERNATIVES = [
    (one, other, "what the answer must look like")
    for i, one in enumerate(_NAMES)
    for other in _NAMES[i + 1 :]
]
_TYPE = re.compile(r"(?P<file>.+\.py)?(?P<module>[\w.]+)?:(?P<name>[\w.]+)")


@dataclass(frozen=True)
class Asked:
    """What an answer must look like.

    Args:
        constraint: the constraint.
        response_format: what a chat shows of it to the model; None for nothing.
        check: raises `ConstraintError` for an answer that is no instance of the type; None without a type.
    """

    constraint: Constraint
    response_format: dict[str, Any] | None = None
    check: Callable[[str], Any] | None = None


def asked_of(args: argparse.Namespace) -> Asked | None:
    """What the arguments say; None when they say nothing.

    Raises:
        UsageError: for a file or a type that can't be read.
        ConstraintError: for what can't be honoured.
    """
    from afm_mlx.guidance.constraint import Constraint

    if args.json_schema is not None:
        return _of_schema(args.json_schema)
    if args.regex is not None:
        return Asked(Constraint.regex(args.regex))
    if args.choices is not None:
        return Asked(Constraint.choices(args.choices))
    if args.grammar is not None:
        kinds = {".lark": Constraint.lark, ".gbnf": Constraint.gbnf}
        path = Path(args.grammar)
        if path.suffix not in kinds:
            raise UsageError(f"--grammar is {path}; a .lark or .gbnf file is needed.")
        return Asked(kinds[path.suffix](_read(path, "--grammar")))
    if args.at_limit != "error":
        flags = ", ".join(map(flag_of, _NAMES))
        raise UsageError(f"--at-limit needs one of {flags}: other answers may end anywhere.")
    return None


def _read(path: Path, flag: str) -> str:
    from afm_mlx.files import read_file

    try:
        # Editors write the mark of UTF-8, too.
        return read_file(path, MAX_BYTES, pipes=True).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise UsageError(f"{flag}: {path} can't be read ({reason_of(error)}).") from None


# -- schemas


def _of_schema(text: str) -> Asked:
    from afm_mlx.guidance.constraint import Constraint
    from afm_mlx.guidance.types import answer_type

    if text.endswith(".json"):
        return _of_file(Path(text))
    kind = _type(text)
    if getattr(kind, "_generable", False) is True:  # of afm_mlx.fm
        try:
            schema = kind.generation_schema().to_dict()
        except Exception as error:  # what afm_mlx.fm raises is no AFMError
            raise UsageError(f"--json-schema: {text} can't be generated: {error}") from error
        return Asked(Constraint.json_schema(schema), _response_format(schema))
    answers = answer_type(kind)
    return Asked(answers.constraint, answers.response_format, answers.instance)


def _of_file(path: Path) -> Asked:
    from afm_mlx.guidance.constraint import Constraint

    text = _read(path, "--json-schema")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--json-schema: {path} is no JSON ({error}).") from None
    if not isinstance(schema, dict | bool):
        raise UsageError(
            f"--json-schema: {path} holds {shown(schema)}; a JSON schema is an object."
        )
    shown_schema = _response_format(schema) if isinstance(schema, dict) else None
    return Asked(Constraint.json_schema(schema), shown_schema)


def _response_format(schema: dict[str, Any]) -> dict[str, Any]:
    described = {"description": schema["description"]} if "description" in schema else {}
    named = {"name": schema.get("title", "Response"), **described, "schema": schema}
    return {"type": "json_schema", "json_schema": named}


# -- types


def _type(text: str) -> Any:
    """The type that a text names, `module:Class` or `file.py:Class`; its module is run."""
    found = _TYPE.fullmatch(text)
    if found is None or (found["file"] is None) == (found["module"] is None):
        raise UsageError(
            f"--json-schema is {shown(text)}; a .json file, module:Class or path/to/file.py:Class is needed."
        )
    source = found["file"] or found["module"]
    try:
        # Standard output is for the answer.
        with redirect_stdout(sys.stderr):
            kind: Any = _run(Path(source)) if found["file"] else _import(source)
            for name in found["name"].split("."):
                if not hasattr(kind, name):
                    raise UsageError(f"--json-schema: {source} has no {name}.")
                kind = getattr(kind, name)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # whatever the code raises
        raise UsageError(
            f"--json-schema: {source} can't be run ({type(error).__name__}: {error})."
        ) from error
    return kind


def _import(name: str) -> ModuleType:
    """A module of the current folder, or an installed one."""
    with _importing_from(Path.cwd()):
        return importlib.import_module(name)


def _run(path: Path) -> ModuleType:
    from afm_mlx.files import read_file

    name = f"{__name__}.{path.stem}"  # no other module's
    read_file(path, MAX_BYTES)  # Python would read a device without an end
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where annotations in quotes are looked up
    with _importing_from(path.absolute().parent):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Modules of a folder are found, as they are by `python folder/file.py`."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
