"""What afm-mlx may weigh: packages of a plain install, modules of an import, bytes of what the wheel carries.

A budget is raised in the commit that needs it, with the reason in docs/dependencies.md where it is a package.
"""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PACKAGES = 53
"""Of a plain install, with those that they need; half are what mlx-lm brings with transformers."""
OF_OURS = 21
"""That pyproject.toml names for a plain install on one platform."""
MODULES = {
    "import afm_mlx": 60,
    "import afm_mlx.cli.generate": 100,
    "import afm_mlx.engine": 410,
    "from afm_mlx import load": 410,
}
"""That are imported beyond those that Python starts with: a number that no busy machine changes."""
MEGABYTES = {"*.safetensors": 10.2, "*.json*": 0.6, "*.py": 3.7}
"""Of files in the wheel by their kind; compiled code comes to it."""


def needed(name, extra=""):
    """What a distribution needs on this machine: names, each with an extra of its own or an empty one."""
    wanted = set()
    for requirement in map(Requirement, metadata.requires(name) or ()):
        if not requirement.marker or requirement.marker.evaluate({"extra": extra}):
            package = canonicalize_name(requirement.name)
            wanted |= {(package, each) for each in (requirement.extras or {""})}
    return wanted


def test_packages_of_a_plain_install():
    found, waiting = set(), {("afm-mlx", "")}
    while waiting:
        package = waiting.pop()
        found.add(package)
        waiting |= needed(*package) - found
    names = {name for name, _ in found} - {"afm-mlx"}
    assert {"mlx", "mlx-lm", "numpy", "transformers"} <= names
    assert len(names) <= PACKAGES, sorted(names)
    assert len(needed("afm-mlx")) <= OF_OURS


def test_modules_of_an_import():
    for statement, budget in MODULES.items():
        code = f"import sys; before = set(sys.modules); {statement}\n"
        code += "import json; print(json.dumps(sorted(set(sys.modules) - before)))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        modules = json.loads(done.stdout)
        assert "afm_mlx" in modules
        assert len(modules) <= budget, (statement, len(modules), modules)


def test_libraries_of_json_schema_are_imported_when_one_is_compiled():
    code = """
import sys
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance import matcher, types
Constraint.regex("a+")
libraries = {"referencing", "jsonschema_specifications", "jsonschema", "pydantic"}
assert not libraries & set(sys.modules), libraries & set(sys.modules)
Constraint.json_schema({"type": "null"})
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bytes_that_the_wheel_carries():
    for pattern, megabytes in MEGABYTES.items():
        rooms = ("afm_mlx", "kernels", "converters", "adapters")
        size = sum(file.stat().st_size for room in rooms for file in (ROOT / room).rglob(pattern))
        assert 0 < size <= megabytes * 1e6, (pattern, size)
