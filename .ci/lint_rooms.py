"""Hold the rooms to their floors: import-linter, with the contracts of pyproject.toml.

It reads a package that lies in one folder, so links are laid out as the wheel lays the folders out. It asks
Python where the package is, so the finder of an editable install has to go first.
"""

import os
import sys
import tempfile
from pathlib import Path

from importlinter.cli import lint_imports

ROOT = Path(__file__).resolve().parent.parent

sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__name__.startswith("ScikitBuild")]
with tempfile.TemporaryDirectory() as folder:
    package = Path(folder, "afm_mlx")
    package.mkdir()
    for path in (
        *(ROOT / "afm_mlx").iterdir(),
        *map(ROOT.joinpath, ("kernels", "converters", "adapters")),
    ):
        (package / path.name).symlink_to(path)
    os.chdir(folder)
    sys.path.insert(0, folder)
    status = lint_imports(str(ROOT / "pyproject.toml"), no_cache=True)
    os.chdir(ROOT)
sys.exit(status)
