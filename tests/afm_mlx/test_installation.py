"""Commands that install afm-mlx again name where it came from, never a name that no index has."""

import importlib
import importlib.abc
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from afm_mlx import installation
from afm_mlx.errors import TokenizerError
from afm_mlx.installation import ANYWHERE, install_command, package_problem
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from tests.tools.cases import each
from tests.tools.cli import process

ROOT = Path(__file__).parent.parent.parent
PIP = f"{sys.executable} -m pip install"


@pytest.fixture
def recorded(monkeypatch):
    def record(source):
        class Distribution:
            def read_text(self, name):
                assert name == "direct_url.json"
                return None if source is None else json.dumps(source)

        monkeypatch.setattr(installation.metadata, "distribution", lambda name: Distribution())
        installation._source.cache_clear()

    yield record
    installation._source.cache_clear()


def test_a_folder_or_wheel_is_named_by_its_path(recorded, tmp_path):
    folder = tmp_path / "two words"
    folder.mkdir()
    recorded({"url": folder.as_uri(), "dir_info": {"editable": True}})
    assert install_command() == f"{PIP} --editable '{folder}'"
    assert install_command("server") == f"{PIP} --editable '{folder}[server]'"
    wheel = tmp_path / "afm_mlx-1.0-cp311-none-any.whl"
    wheel.touch()
    recorded({"url": wheel.as_uri(), "archive_info": {}})
    assert install_command(rebuild=True) == f"{PIP} --force-reinstall --no-deps {wheel}"


@each(
    ("source", "wanted"),
    [
        (
            {"url": "https://example.org/a.git", "vcs_info": {"vcs": "git", "commit_id": "1"}},
            "'afm-mlx[server] @ git+https://example.org/a.git'",
        ),
        ({"url": "https://example.org/a.whl"}, "'afm-mlx[server] @ https://example.org/a.whl'"),
        ({"url": "file:///nowhere/at/all", "dir_info": {}}, f"'{ANYWHERE}[server]'"),
        ({}, f"'{ANYWHERE}[server]'"),
        (None, f"'{ANYWHERE}[server]'"),
    ],
)
def test_other_sources(recorded, source, wanted):
    recorded(source)
    assert install_command("server") == f"{PIP} {wanted}"


@each(
    ("prefix", "has_pip", "wanted"),
    [
        ("/home/u/.local/pipx/venvs/afm-mlx", True, "pipx install --force"),
        ("/home/u/.local/share/uv/tools/afm-mlx", False, "uv tool install --force --reinstall"),
        (
            "/home/u/.venv",
            False,
            "uv pip install --python /home/u/.venv --reinstall-package afm-mlx",
        ),
    ],
)
def test_the_command_is_of_the_tool_that_made_the_environment(
    recorded, monkeypatch, prefix, has_pip, wanted
):
    recorded(None)
    monkeypatch.setattr(sys, "prefix", prefix)
    monkeypatch.setattr(installation, "find_spec", lambda name: has_pip or None)
    assert install_command(rebuild=True) == f"{wanted} {ANYWHERE}"


def test_nothing_tells_a_user_to_install_a_name_that_is_on_no_index():
    listed = subprocess.run(
        ["git", "grep", "-nIE", r"(pip|pipx|tool) install [^`.]*'?\"?afm-mlx(\[|'|\"|`|$)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode > 1:
        pytest.skip("needs a git checkout")
    found = [line for line in listed.stdout.splitlines() if not line.startswith("tests/")]
    assert not found, found


class Broken(importlib.abc.MetaPathFinder):
    def __init__(self, name):
        self.name = name

    def find_spec(self, name, path=None, target=None):
        if name == self.name:
            raise ImportError("libx.so.1: cannot open shared object file", name=f"{name}._inner")
        return None


@pytest.fixture
def without(monkeypatch):
    def without(name, *, broken=False):
        for known in [known for known in sys.modules if known.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, known)
        if broken:
            monkeypatch.setattr(sys, "meta_path", [Broken(name), *sys.meta_path])
        else:
            monkeypatch.setitem(sys.modules, name, None)

    return without


@each(
    "name, command",
    [
        ("sentencepiece", "-m pip install"),
        ("tokenizers", "-m pip install"),
        ("torch", r"-m pip install .*\[convert\]"),
        ("matplotlib", r"-m pip install .*\[train\]"),
        ("starlette", r"-m pip install .*\[server\]"),
        ("h11", "-m pip install h11"),
        ("llguidance", "-m pip install"),
        ("yaml", "-m pip install"),
    ],
)
def test_a_package_that_cannot_be_imported_is_told_with_what_installs_it(name, command):
    package = {"yaml": "PyYAML"}.get(name, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError) as missing:
            importlib.import_module(name)
        said = package_problem(missing.value)
    assert re.fullmatch(f"The package {package} is not installed. Install it: .*{command}.*", said)
    broken = ImportError("libx.so.1: cannot open", name=f"{name}._inner")
    said = package_problem(broken)
    assert said.startswith(
        f"The package {package} is broken: it can't be imported (libx.so.1: cannot open)."
    )
    assert (
        f"-m pip install --force-reinstall --no-deps {package}".lower()
        in said.replace("'", "").lower()
    )


def test_what_is_no_package_of_others_is_not_told_as_one():
    for name in (None, "afm_mlx.engine", "afm_mlx"):
        assert package_problem(ImportError("x", name=name)) == ""
    assert "lacks a part of its library" in package_problem(ImportError("no _ssl", name="_ssl"))


@pytest.mark.parametrize("broken", [False, True])
def test_imports_of_tokenizers_that_fail_are_no_damage(without, tokenizer_folder, tmp_path, broken):
    words = "is broken: it can't be imported" if broken else "is not installed. Install it: "
    without("sentencepiece", broken=broken)
    with pytest.raises(TokenizerError, match=f"^The package sentencepiece {words}"):
        load_tokenizer(tokenizer_folder)
    for file in tokenizer_folder.iterdir():
        if file.name != "tokenizer.model":
            shutil.copy(file, tmp_path)
    without("tokenizers", broken=broken)
    with pytest.raises(TokenizerError, match=f"^The package tokenizers {words}"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("numpy", ["info"]),
        ("mlx", ["generate", "-m", "2"]),
        ("sentencepiece", ["generate", "-m", "2"]),
        ("llguidance", ["generate", "--regex", "a+", "-m", "3"]),
        ("uvicorn", ["server", "--port", "0"]),
    ],
)
def test_a_package_is_broken_whatever_its_import_raises(tmp_path, package, command):
    kinds = ("ImportError", "OSError", "RuntimeError", "ValueError")
    kinds = kinds[: 4 if package == "sentencepiece" else 1]
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(
        "import builtins, os\nraise getattr(builtins, os.environ['KIND'])('libx.so.1: cannot open')"
    )
    code = f"""
import os, sys
sys.path.insert(0, {str(tmp_path)!r})
for kind in {kinds!r}:
    os.environ["KIND"] = kind
    from afm_mlx.cli import main
    status = main({command!r})
    assert status == 2, status
sys.exit(status)
"""
    done = process(code=code)
    assert done.returncode == 2, done.stderr
    words = f"The package {package} is broken: it can't be imported (libx.so.1: cannot open)."
    said = done.stderr.splitlines()
    assert [words in line for line in said] == [True] * len(kinds), said


def test_errors_outside_imports_are_no_broken_packages():
    import jinja2

    for fails in (lambda: jinja2.Template("{{"), lambda: 1 / 0, lambda: np.ones(2) @ np.ones(3)):
        with pytest.raises((jinja2.TemplateError, ArithmeticError, ValueError)) as error:
            fails()
        assert package_problem(error.value) == ""
