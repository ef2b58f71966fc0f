"""Whether an installed afm-mlx works from any folder: what a user does first, on what pip has put there.

    python .ci/try_wheel.py

It has to be run by the interpreter of the environment, and needs nothing but what is installed there.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

PROMPT = "Make this formal:\nhey Hana, can't make it to the Film Lecture"


def said(*arguments: str) -> str:
    """What `afm-mlx` prints; this program ends where it fails."""
    command = [sys.executable, "-P", "-m", "afm_mlx", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)
    return done.stdout


def main() -> None:
    installed = metadata.distribution("afm-mlx")
    tops = {file.parts[0] for file in installed.files or () if file.parts[0] != ".."}
    others = {top for top in tops if not top.endswith(".dist-info")} - {"afm_mlx"}
    if others or "afm_mlx" not in tops:
        sys.exit(f"the wheel must install afm_mlx alone, and has {sorted(tops)}")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        start = time.perf_counter()
        text = said("generate", "--prompt", PROMPT).strip()
        print(
            f"{text}\n{time.perf_counter() - start:.1f} s to generate this, with the start of Python"
        )
        if "Film Lecture" not in text:
            sys.exit("the embedded model did not make its message formal")
        report = Path("report.json")
        print(said("doctor", "--quick", "--report", str(report)))
        native = json.loads(report.read_text(encoding="utf-8"))["native_extension"]
    if isinstance(native, str):
        sys.exit(f"the CPU kernels are {native}")


if __name__ == "__main__":
    main()
