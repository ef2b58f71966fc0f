"""Run a Python file that the user has named, for the objects that it defines."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from afm_mlx.files import read_file

MAX_BYTES = 16 << 20


def run_python_file(path: Path) -> ModuleType:
    """Run a Python file, which may import modules of its folder, and return its module.

    Raises whatever the file's code raises, and OSError or ImportError for what is no Python file.
    """
    name = f"{__name__}.{path.stem}"  # unlike any other module's
    read_file(path, MAX_BYTES)  # refuses devices, which Python would read without an end
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where annotations in quotes are looked up
    with importing_from(path.absolute().parent):
        spec.loader.exec_module(module)
    return module


@contextmanager
def importing_from(folder: Path) -> Iterator[None]:
    """Let modules of a folder be imported, as `python folder/file.py` does."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
