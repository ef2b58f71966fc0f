"""Texts of Python's standard library: the plain English that the model reads besides its tasks.

They are read from the sources of the Python that runs this, so nothing is downloaded. Python's
licence (PSF) covers them. A file's path decides whether its docstrings are held out for perplexity.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HELD_OUT_SHARE = 24  # one file in twenty-four
_SKIPPED = {"site-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__", "config-3"}
_TOPICS = "pydoc_data/topics.py"  # the texts of `help("...")`: one large dictionary
_MIN_CHARS, _MAX_CHARS = 40, 1500


@dataclass
class Texts:
    """Texts of the standard library, in the order of the files' names, without repetitions.

    Args:
        docstrings: docstrings for training.
        further: paragraphs of the help topics, of docstrings too long for `docstrings`, and of comments;
            also for training.
        held_out: docstrings of the files that training never reads.
    """

    docstrings: list[str] = field(default_factory=list)
    further: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)


def gather(root: Path | None = None) -> Texts:
    """Collect the texts below `root` (default: the running Python's standard library)."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    texts = Texts()
    seen: set[str] = set()

    def add(texts_of_kind: list[str], text: str) -> None:
        if text not in seen and _MIN_CHARS <= len(text) <= _MAX_CHARS:
            seen.add(text)
            texts_of_kind.append(text)

    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        source = None if _SKIPPED.intersection(name.split("/")) else _parse(path)
        if source is None:
            continue
        held_out = hashlib.sha256(name.encode()).digest()[0] % HELD_OUT_SHARE == 0
        for text in _docstrings(source[1]):
            add(texts.held_out if held_out else texts.docstrings, text)
            if len(text) > _MAX_CHARS and not held_out:
                for paragraph in _paragraphs(text):
                    add(texts.further, paragraph)
        if not held_out:
            for text in (*_comments(source[0]), *(_topics(source[1]) if name == _TOPICS else ())):
                add(texts.further, text)
    return texts


def _parse(path: Path) -> tuple[str, ast.Module] | None:
    """Return a file's source and its tree; None if it is not in this Python's syntax."""
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            # Old sources hold escapes that newer Pythons warn about.
            warnings.simplefilter("ignore")
            return source, ast.parse(source)
    except (UnicodeDecodeError, SyntaxError):
        return None


def _docstrings(tree: ast.Module) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return [inspect.cleandoc(text).strip() for text in found if text]


def _comments(source: str) -> Iterator[str]:
    """Yield comments of three lines or more, without their marks."""
    block: list[str] = []
    for line in (*source.splitlines(), ""):
        stripped = line.strip()
        if stripped.startswith("#"):
            block.append(stripped.lstrip("#").strip())
            continue
        if len(block) >= 3:
            yield "\n".join(block).strip()
        block = []


def _topics(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _paragraphs(node.value)


def _paragraphs(text: str) -> Iterator[str]:
    """Yield pieces of up to `_MAX_CHARS` characters, cut between paragraphs."""
    piece = ""
    for paragraph in text.split("\n\n"):
        if piece and len(piece) + len(paragraph) + 2 > _MAX_CHARS:
            yield piece.strip()
            piece = ""
        piece += paragraph + "\n\n"
    yield piece.strip()
