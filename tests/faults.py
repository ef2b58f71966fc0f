"""Seed faults in the source and see which test finds each: `make faults`, or with another checkout's tests.

A fault is one small change: of a comparison, an operator, an index, a sign, a condition or a constant. Each is
put into a copy of the tree, where the tests of the mirrored folder run until one fails. A test that fails
without the fault, too, doesn't count. Some faults change nothing that shows: read those that were not found.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("afm_mlx", "kernels", "converters", "adapters")
SECONDS = 600  # a fault that keeps tests from ending is found, too
SWAPS = "Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, Add Sub, Mult Add, Div Mult, FloorDiv Mult, Mod FloorDiv"
SWAPS += ", Pow Mult, LShift RShift, BitAnd BitOr, And Or"
PAIRS = [tuple(getattr(ast, name) for name in pair.split()) for pair in SWAPS.split(", ")]
SWAP = {b: a for a, b in PAIRS} | dict(PAIRS)
# An editable install finds the real tree before anything else, in the processes that tests start as well.
NO_EDITABLE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__name__.startswith("ScikitBuild")]
"""
IDLE = ("TYPE_CHECKING", "__name__ == '__main__'")  # no test runs these


class Fault(NamedTuple):
    file: str
    line: int
    change: str
    source: str  # of the whole file


def change(node: ast.AST, rng: random.Random) -> bool:
    match node:
        case ast.Compare() if type(node.ops[0]) in SWAP:
            node.ops[0] = SWAP[type(node.ops[0])]()
        case ast.BinOp() | ast.BoolOp() if type(node.op) in SWAP:
            node.op = SWAP[type(node.op)]()
        case ast.UnaryOp(op=ast.USub()):
            node.op = ast.UAdd()
        case ast.Constant(value=bool()):
            node.value = not node.value
        case ast.Constant(value=int()):
            node.value += rng.choice([-1, 1])
        case ast.Constant(value=float()):
            node.value = node.value * 2 + 1
        case ast.If() | ast.IfExp() | ast.While():
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case _:
            return False
    return True


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield every node that a fault may change: no annotation, message or import for types."""
    for field, value in ast.iter_fields(tree):
        for child in value if isinstance(value, list) else [value]:
            if field in ("annotation", "returns", "decorator_list") or not isinstance(
                child, ast.AST
            ):
                continue
            idle = isinstance(child, ast.If) and ast.unparse(child.test) in IDLE
            if not idle and not isinstance(child, ast.Raise | ast.JoinedStr):
                yield from [child] if isinstance(child, ast.expr | ast.stmt) else []
                yield from nodes(child)


def draw(path: Path, rng: random.Random) -> Fault | None:
    tree = ast.parse(path.read_text())
    found = list(nodes(tree))
    for node in rng.sample(found, len(found)):
        before = ast.unparse(node).splitlines()[0]
        if change(node, rng):
            source, name = ast.unparse(ast.fix_missing_locations(tree)), path.relative_to(ROOT)
            return Fault(
                str(name), node.lineno, f"{before} -> {ast.unparse(node).splitlines()[0]}", source
            )
    return None


def draw_faults(count: int, seed: int, under: list[str]) -> list[Fault]:
    """As many from each room below some folders, the rooms in an order from the seed."""
    rng = random.Random(seed)
    rooms: dict[Path, list[Path]] = {}
    for folder in under:
        for path in sorted((ROOT / folder).rglob("*.py")):
            rooms.setdefault(path.parent, []).append(path)
    if not rooms:
        sys.exit(
            f"There is no Python file below {', '.join(under)}: name folders such as afm_mlx/engine."
        )
    faults: dict[Fault, None] = {}
    while len(faults) < count:
        for files in rng.sample(list(rooms.values()), len(rooms)):
            sizes = [path.stat().st_size for path in files]
            if fault := draw(rng.choices(files, sizes)[0], rng):
                faults[fault] = None
    return list(faults)[:count]


def mirrored(file: str, tree: Path) -> list[str]:
    """Test files for a source file: the one of its name first, then the others of its folder."""
    tests, room = tree / "tests", Path(file).parent
    folders = [tests / room, tests / room.name, tests / room.parent]
    folder = next(folder for folder in folders if folder.is_dir())
    whole = len(room.parts) > 1 or file.startswith("converters")
    found = folder.rglob("test_*.py") if whole else folder.glob("test_*.py")
    own = f"test_{Path(file).stem}.py"
    return [str(path.relative_to(tree)) for path in sorted(found, key=lambda p: (p.name != own, p))]


def lay_out(tree: Path, tests: Path) -> None:
    """A copy of this checkout with the tests of another: Python files are copied, all others linked."""

    def put(source: str, goal: str) -> None:
        shutil.copy(source, goal) if source.endswith(".py") else os.symlink(source, goal)

    folders = {name: ROOT / name for name in (*PACKAGES, "bench", "docs", "examples")}
    skipped = shutil.ignore_patterns("__pycache__")
    for name, folder in (folders | {"tests": tests}).items():
        shutil.copytree(folder, tree / name, copy_function=put, ignore=skipped)
    for path in filter(Path.is_file, ROOT.iterdir()):
        put(str(path), str(tree / path.name))
    (tree / "sitecustomize.py").write_text(NO_EDITABLE)


def run(tree: Path, tests: list[str]) -> str:
    """The first test that fails; empty when none does."""
    command = [sys.executable, *"-m pytest -q -x -p no:cacheprovider --tb=no".split(), *tests]
    settings = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(
        command, cwd=tree, env=os.environ | settings, start_new_session=True, **pipes
    ) as process:
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"no end within {SECONDS} s"
    if named := re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.M):
        return named[1]
    return f"pytest ended: {output[-300:]}" if process.returncode else ""


def found_by(fault: Fault, trees: Queue[Path]) -> str:
    """The test that finds a fault, and passes without it; empty when none does."""
    tree = trees.get()
    file = tree / fault.file
    clean = file.read_text()
    tests, broken = mirrored(fault.file, tree), []
    try:
        while True:
            file.write_text(fault.source)
            test = run(tree, [*tests, *(f"--deselect={name}" for name in broken)])
            file.write_text(clean)
            if not test.startswith("tests/") or run(tree, [test]) != test:
                return test
            broken.append(test)
    finally:
        trees.put(tree)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", type=Path, help="a folder of tests (default: this one)")
    parser.add_argument(
        "--under", nargs="+", default=PACKAGES, metavar="FOLDER", help="source to put them into"
    )
    parser.add_argument("--seed", type=int, default=0, help="draws the faults (default: 0)")
    parser.add_argument("--count", type=int, default=30, help="of faults (default: 30)")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time (default: 2)")
    chosen = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests send it; shells may ignore it
    faults = draw_faults(chosen.count, chosen.seed, chosen.under)
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(chosen.jobs) as pool:
        trees: Queue[Path] = Queue()
        for tree in (Path(temporary, str(number)) for number in range(chosen.jobs)):
            lay_out(tree, (chosen.tests or ROOT / "tests").resolve())
            trees.put(tree)
        found = 0
        for fault, test in zip(faults, pool.map(lambda f: found_by(f, trees), faults), strict=True):
            found += bool(test)
            columns = f"{fault.file}:{fault.line}".ljust(48), fault.change[:70].ljust(70)
            print(*columns, test or "NOT FOUND", flush=True)
    print(f"{found} of {len(faults)} faults of seed {chosen.seed} were found")


if __name__ == "__main__":
    main()
