"""Check the types (mypy), and hold the rooms to their floors (import-linter), as pyproject.toml says.

Both read a package in one folder, so this script links the folders together as the wheel has them.
import-linter asks Python where the package is, so the finder of an editable install is removed first.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from importlinter.cli import lint_imports

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "pyproject.toml"

sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__name__.startswith("ScikitBuild")]
with tempfile.TemporaryDirectory() as folder:
    package = Path(folder, "afm_mlx")
    package.mkdir()
    mapped = (ROOT / name for name in ("kernels", "converters", "adapters"))
    for path in (*(ROOT / "afm_mlx").iterdir(), *mapped):
        (package / path.name).symlink_to(path)
    os.chdir(folder)
    sys.path.insert(0, folder)
    mypy = [sys.executable, "-m", "mypy", "--config-file", CONFIG]
    types = subprocess.run([*mypy, "--cache-dir", ROOT / ".mypy_cache"], check=False).returncode
    floors = lint_imports(str(CONFIG), no_cache=True)
    os.chdir(ROOT)
sys.exit(types or floors)
