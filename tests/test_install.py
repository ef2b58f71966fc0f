"""The wheel, and that an ordinary install works from anywhere, the clone's own root included."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROBE = """
import json, sys, time
start = time.perf_counter()
import afm_mlx
seconds = time.perf_counter() - start
heavy = sorted({"mlx", "numpy", "transformers", "mlx_lm", "torch"} & set(sys.modules))
import afm_mlx.kernels, afm_mlx.converters, afm_mlx.adapters
from afm_mlx import load, generate
print(json.dumps({"heavy": heavy, "seconds": seconds, "kernels": afm_mlx.kernels.__name__,
                  "blas": afm_mlx.blas.status()}))
"""


def test_import_is_light():
    """Nothing heavy is imported with the package; each name is loaded when it is first used."""
    answer = json.loads(
        subprocess.run(
            [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True
        ).stdout
    )
    assert answer["heavy"] == []
    assert answer["kernels"] == "afm_mlx.kernels"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), "."]
    subprocess.run(command, cwd=ROOT, check=True)
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_installs_one_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"afm_mlx"}
    for name in (
        "kernels/__init__.py",
        "converters/__init__.py",
        "adapters/__init__.py",
        "py.typed",
    ):
        assert f"afm_mlx/{name}" in names
    assert "afm_mlx/models/afm-nano/config.json" in names
    assert not [name for name in names if name.endswith((".c", ".pyc"))]
    assert wheel.stat().st_size < 12e6


@pytest.mark.slow
def test_an_ordinary_install_works_from_anywhere(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env" / "bin" / "python")
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(command, check=True)
    # Its dependencies are those of this very interpreter; the editable finder of ours must not come along.
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["PYTHONPATH"] = os.pathsep.join([site, sysconfig.get_path("platlib")])
    for folder in (ROOT, tmp_path):
        for arguments in (["-c", PROBE], ["-m", "afm_mlx", "info", "--json"]):
            result = subprocess.run(
                [python, *arguments],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert result.returncode == 0, result.stderr
            json.loads(result.stdout)
            if sys.platform == "linux":
                assert "NumPy's OpenBLAS" in result.stdout
