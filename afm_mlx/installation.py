"""Find where afm-mlx was installed from, and the command that installs it again.

afm-mlx is on no package index: a command with its bare name would install somebody else's package.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import sys
import traceback
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

ANYWHERE = "PATH-OR-URL-OF-AFM-MLX"
"""Placeholder in a command if the source is not recorded or no longer exists."""


def install_command(extra: str = "", *, rebuild: bool = False) -> str:
    """Return the shell command that installs afm-mlx again, into this environment, from its source.

    The command is for pip, pipx or uv, whichever made the environment. The source is what the installer
    recorded in `direct_url.json` (PEP 610): a folder, a wheel, an sdist or a URL.

    Args:
        extra: name of an extra of pyproject.toml to install with it; none by default.
        rebuild: True to build and install this version again although it is installed.
    """
    source = _source()
    extras = f"[{extra}]" if extra else ""
    editable = "--editable " if source.get("dir_info", {}).get("editable") else ""
    parts = urlsplit(source.get("url", ""))
    if not source:
        requirement = ANYWHERE + extras
    elif parts.scheme == "file" and "vcs_info" not in source:
        requirement = url2pathname(parts.path) + extras
    else:
        scheme = f"{source['vcs_info']['vcs']}+" if "vcs_info" in source else ""
        requirement = f"afm-mlx{extras} @ {scheme}{source['url']}"
    return f"{_installer(rebuild)} {editable}{shlex.quote(requirement)}"


def package_problem(error: BaseException) -> str:
    """Describe a third-party package that is missing or broken, with the command that installs it.

    If the error names no module, its traceback tells which one was being imported. Returns an empty text if no
    import of a third-party package failed.
    """
    module = (error.name if isinstance(error, ImportError) else None) or _imported_in(error)
    module = module.partition(".")[0]
    if module in ("", "afm_mlx"):
        return ""
    reason = " ".join(str(error).split()) or type(error).__name__
    if module in sys.stdlib_module_names:
        return f"This Python ({sys.executable}) lacks a part of its library: {reason}. Use another Python."
    package = _PACKAGES.get(module, module.replace("_", "-"))
    requirement, extra = _required(package)
    if isinstance(error, ModuleNotFoundError) and find_spec(module) is None:
        command = f"{shlex.quote(sys.executable)} -m pip install {shlex.quote(package)}"
        install = install_command(extra) if requirement else command
        return f"The package {package} is not installed. Install it: {install}"
    again = f"{shlex.quote(sys.executable)} -m pip install --force-reinstall --no-deps"
    return (
        f"The package {package} is broken: it can't be imported ({reason}). Install it again: {again} "
        f"{shlex.quote(requirement or package)}"
    )


def _imported_in(error: BaseException) -> str:
    """Return the innermost installed package that was being imported; empty if there is none."""
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        module = frame.f_globals.get("__name__", "").partition(".")[0]
        if frame.f_code.co_name != "<module>" or module in sys.stdlib_module_names:
            continue
        with suppress(metadata.PackageNotFoundError, ValueError):
            metadata.distribution(_PACKAGES.get(module, module))
            return module
    return ""


# Package names that differ from their modules'.
_PACKAGES = {"google": "protobuf", "yaml": "PyYAML", "prometheus_client": "prometheus-client"}
_FOR_DEVELOPERS = ("test", "docs", "lint", "bench", "tamm")


def _required(package: str) -> tuple[str, str]:
    """Return afm-mlx's requirement of a package (`torch==2.13.0`) and its extra; empty if there is none."""
    try:
        lines = metadata.requires("afm-mlx") or []
    except metadata.PackageNotFoundError:
        lines = []
    for line in lines:
        requirement, _, marker = line.partition(";")
        extra = re.search(r"""extra == ['"](\w+)['"]""", marker)
        name = re.match(r"[\w.-]+", requirement)
        if name is None or name[0].lower().replace("_", "-") != package.lower():
            continue
        if extra is None or extra[1] not in _FOR_DEVELOPERS:
            return requirement.strip(), extra[1] if extra else ""
    return "", ""


def _installer(rebuild: bool) -> str:
    places = {*Path(sys.prefix).parts}
    if "pipx" in places:
        return "pipx install --force"
    if {"uv", "tools"} <= places:
        return "uv tool install --force" + (" --reinstall" if rebuild else "")
    if find_spec("pip") is None:
        again = " --reinstall-package afm-mlx" if rebuild else ""
        return f"uv pip install --python {shlex.quote(sys.prefix)}{again}"
    again = " --force-reinstall --no-deps" if rebuild else ""
    return f"{shlex.quote(sys.executable)} -m pip install{again}"


@functools.cache
def _source() -> dict[str, Any]:
    """Return the installer's record of the source; empty without one, or if its file no longer exists."""
    try:
        text = metadata.distribution("afm-mlx").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        text = None
    source: dict[str, Any] = json.loads(text or "{}")
    parts = urlsplit(source.get("url", ""))
    gone = parts.scheme == "file" and not Path(url2pathname(parts.path)).exists()
    return {} if gone else source
