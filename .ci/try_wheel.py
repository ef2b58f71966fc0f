"""Try an installed afm-mlx from another folder: the first commands of a user, on the files that pip installed.

    python .ci/try_wheel.py

It has to be run by the interpreter of the environment, and needs nothing but what is installed there.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

PROMPT = "Make this formal:\nhey Hana, can't make it to the Film Lecture"


CORES = {"avx2": "Haswell", "portable": "Nehalem"} if platform.machine() == "x86_64" else {}
"""What OpenBLAS calls the processors that have an instruction set and no better one."""


def said(*arguments: str, **environment: str) -> str:
    """Return what `afm-mlx` prints, run with these arguments; end this program if that fails."""
    command = [sys.executable, "-P", "-m", "afm_mlx", *arguments]
    options = {"capture_output": True, "text": True, "env": {**os.environ, **environment}}
    done = subprocess.run(command, check=False, **options)
    if done.returncode:
        said = f"{done.stdout}{done.stderr}"
        sys.exit(f"{environment} {' '.join(command)} ended with {done.returncode}:\n{said}")
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
        for isa in native["instruction_sets"]:
            forced = {"AFM_MLX_ISA": isa}
            if isa in CORES:
                forced["OPENBLAS_CORETYPE"] = CORES[isa]
            said("doctor", "--quick", "--report", str(report), **forced)
            if "Film Lecture" not in said("generate", "--prompt", PROMPT, **forced):
                sys.exit(f"the embedded model did not make its message formal with {forced}")
            print(f"It works with the instruction set {isa} alone.")


if __name__ == "__main__":
    main()
