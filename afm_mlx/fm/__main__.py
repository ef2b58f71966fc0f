"""`python -m afm_mlx.fm SCRIPT [ARGUMENTS]`: runs a script that imports `apple_fm_sdk` on this package."""

from __future__ import annotations

import pkgutil
import runpy
import sys
from importlib import import_module
from pathlib import Path

from afm_mlx import fm

NAME = "apple_fm_sdk"
# The SDK's modules whose contents are in a module of another name here.
_MERGED = {
    "generable_utils": "generable",
    "generation_guide": "generation_schema",
    "generation_property": "generation_schema",
}

USAGE = """usage: python -m afm_mlx.fm SCRIPT [ARGUMENTS]

Runs a Python script in which `import apple_fm_sdk` gives afm_mlx.fm. The environment variable
AFM_MLX_MODEL names the model: a folder or a hub id. If it is not set, the script runs on afm-nano, which this
package carries.
"""


def stand_in() -> None:
    """Make `import apple_fm_sdk`, and imports of its submodules, give this package and its modules.

    Raises:
        RuntimeError: if another `apple_fm_sdk` was imported before.
    """
    if sys.modules.get(NAME, fm) is not fm:
        raise RuntimeError(
            f"{NAME} was imported before this package could stand in for it. Call stand_in() first."
        )
    sys.modules[NAME] = fm
    for module in pkgutil.iter_modules(fm.__path__):
        # All of them now: Python would load a module's file a second time under the other name.
        if not module.name.startswith("_"):
            sys.modules[f"{NAME}.{module.name}"] = import_module(f"{fm.__name__}.{module.name}")
    for name, here in _MERGED.items():
        sys.modules[f"{NAME}.{name}"] = sys.modules[f"{NAME}.{here}"]
        setattr(fm, name, sys.modules[f"{NAME}.{here}"])  # for `import apple_fm_sdk.NAME as ...`


def main() -> None:
    """Run the script that the command line names."""
    words = sys.argv[1:]
    if words[:1] in ([], ["-h"], ["--help"]):
        print(USAGE, file=sys.stdout if words else sys.stderr)
        sys.exit(0 if words else 2)
    script = Path(words[0])
    if not script.is_file():
        print(f"There is no script {script}.", file=sys.stderr)
        sys.exit(2)
    stand_in()
    sys.argv = words
    sys.path[0] = str(script.resolve().parent)  # as `python script.py` has it
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
