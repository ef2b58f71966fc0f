"""Commands that install afm-mlx again name where it came from, never a name that no index has."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from afm_mlx import installation
from afm_mlx.installation import ANYWHERE, install_command
from tests.tools.cases import each

ROOT = Path(__file__).parent.parent.parent
PIP = f"{sys.executable} -m pip install"


@pytest.fixture
def recorded(monkeypatch):
    """Replaces the installer's record; None takes the package's metadata away."""

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
