"""`python -m afm_mlx.fm script.py [arguments]`: runs a script that imports `apple_fm_sdk` on this package."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from afm_mlx.fm.stand_in import stand_in

USAGE = """usage: python -m afm_mlx.fm SCRIPT [ARGUMENTS]

Runs a Python script in which `import apple_fm_sdk` gives afm_mlx.fm. The environment variable
AFM_MLX_MODEL names the model that it runs on: a folder or a hub id; afm-nano, which this package carries, if
it is not set.
"""


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
