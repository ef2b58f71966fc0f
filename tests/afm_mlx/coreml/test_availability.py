"""Why Core ML can't run, and what is said of it."""

import platform
from types import SimpleNamespace

import pytest

from afm_mlx.coreml import availability
from afm_mlx.coreml.coreml_model import CompiledPackage
from afm_mlx.errors import AFMError
from tests.tools.cases import each


def coremltools(version, binary=False):
    return SimpleNamespace(__version__=version), binary


MISSING = ModuleNotFoundError("No module named 'coremltools'", name="coremltools")
BROKEN = ImportError("numpy.core is gone", name="numpy.core")


@each(
    "system, macos, module, words",
    [
        ("Linux", "", None, "Core ML needs macOS 15 or later, and this is Linux: use a Mac"),
        ("Darwin", "14.7.1", None, "need macOS 15 or later, and this is macOS 14.7.1"),
        ("Darwin", "26.0", MISSING, "not installed, .*[coreml]"),
        ("Darwin", "26.0", BROKEN, "can't be imported (numpy.core is gone)"),
        ("Darwin", "15.1", coremltools("8.3.0"), "coremltools is 8.3.0; 9.0 or later is needed"),
        ("Darwin", "15.1", coremltools("9.0b1"), "has no binary part for Python"),
        ("Darwin", "15.1", coremltools("10.0", binary=True), None),
    ],
)
def test_obstacles(monkeypatch, tmp_path, system, macos, module, words):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "mac_ver", lambda: (macos, ("", "", ""), "arm64"))

    def found(name):
        if isinstance(module, ImportError):
            raise module
        return module[0]

    monkeypatch.setattr(availability, "import_module", found)
    monkeypatch.setattr(availability.importlib.util, "find_spec", lambda name: module[1] or None)
    reason = availability.obstacle()
    if words is None:
        assert reason is None
        return
    first, _, last = words.partition(".*")
    assert first in reason
    assert last in reason
    with pytest.raises(AFMError, match=r"x\.mlpackage can't run here: "):
        CompiledPackage(tmp_path / "x.mlpackage")
