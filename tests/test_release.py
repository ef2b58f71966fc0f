"""What a release rests on: one version, workflows whose commands exist, a formula, pages for contributors."""

import itertools
import re
import runpy
import shlex
import shutil
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

import afm_mlx
from afm_mlx.cli import _command
from afm_mlx.cli.arguments import parse

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = {
    file.stem: yaml.safe_load(file.read_text())
    for file in (ROOT / ".github" / "workflows").glob("*.yml")
}
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)) | {
    ".venv/.demo",
    ".venv/.test",
}
OF_RUNNERS = {"python", "python3", "sudo", "apt-get", "uv", "gh", "ls", "swift"}
"""Programs that a step may start, and that are not ours; `make` and files are looked up."""
MODULES = {"build", "cibuildwheel", "pip", "pytest"}
"""Of `python -m`; ours are looked up."""


def commands(workflow):
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        rows = [*matrix.get("include", []), {k: v[0] for k, v in matrix.items() if k != "include"}]
        for step in job["steps"]:
            for row in rows:
                text = step.get("run", "").replace("\\\n", " ")
                for key, value in row.items():
                    text = text.replace(f"${{{{ matrix.{key} }}}}", value)
                if "${{ matrix." not in text:
                    for part in re.split(r"\n|&&", text):
                        yield from filter(None, [shlex.split(part.partition(" >")[0])])


def check(words):
    words = [*itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), words)]
    program, *rest = words
    if program == "make":
        assert rest
        assert set(rest) <= TARGETS, words
    elif Path(program).name == "afm-mlx":
        name, module, arguments = _command(rest)
        parse(name, module, arguments)
    elif "/" in program and not program.startswith(".venv/"):
        assert (ROOT / program).stat().st_mode & 0o111, f"{program} is no program"
    else:
        assert program in OF_RUNNERS or program == ".venv/bin/python", words
    if rest[:1] == ["-m"] and rest[1] not in MODULES:
        assert (ROOT / rest[1].replace(".", "/")).with_suffix(".py").is_file(), words
    for word in rest:
        if word.startswith(("tests/", ".ci/")):
            assert (ROOT / word).exists(), words


def test_every_command_of_a_workflow_exists():
    assert set(WORKFLOWS) == {"linux", "macos", "swift", "wheels"}
    found = [words for workflow in WORKFLOWS.values() for words in commands(workflow)]
    for words in [*found, shlex.split(PROJECT["tool"]["cibuildwheel"]["test-command"])]:
        check([word.replace("{project}/", "") for word in words])
    for wanted in (
        ".ci/run",
        "make test",
        ".ci/linux_wheel wheelhouse 3.11",
        ".venv/bin/python -m tests.metal.texts build/metal --compile",
        ".venv/bin/afm-mlx doctor --report doctor.json",
        "swift test --package-path examples/swift",
    ):
        assert shlex.split(wanted) in found, wanted
    for broken in ("make wheels", ".ci/nothing", "python -m tests.nothing", "afm-mlx nothing"):
        with pytest.raises((AssertionError, FileNotFoundError, afm_mlx.errors.AFMError)):
            check(shlex.split(broken))
    # YAML reads the key `on` as true.
    for name in ("swift", "wheels"):
        for path in WORKFLOWS[name][True]["pull_request"]["paths"]:
            assert list(ROOT.glob(path)), path


def test_actions_are_pinned_to_commits():
    steps = [s for w in WORKFLOWS.values() for job in w["jobs"].values() for s in job["steps"]]
    used = [step["uses"] for step in steps if "uses" in step]
    assert used
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action


def test_packages_name_the_repository_that_builds_them():
    with_urls = runpy.run_path(str(ROOT / ".ci" / "project_urls.py"))["with_urls"]
    text = (ROOT / "pyproject.toml").read_text()
    urls = tomllib.loads(with_urls(text, "https://example.org/a/fork"))["project"]["urls"]
    assert {"Homepage", "Documentation", "Source", "Issues", "Changelog"} == set(urls)
    assert all(url.startswith("https://example.org/a/fork") for url in urls.values())
    for name in ("Documentation", "Changelog"):
        assert (ROOT / urls[name].partition("/main/")[2]).exists()
    builds = [
        job
        for job in ("macos", "linux", "sdist")
        if "project_urls" in str(WORKFLOWS["wheels"]["jobs"][job])
    ]
    assert builds == ["macos", "linux", "sdist"]


def test_the_licence_of_pythons_docstrings_comes_with_them():
    folder = Path(afm_mlx.__file__).parent / "embedded" / "afm-nano"
    text = (folder / "LICENSE-PYTHON.txt").read_text()
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in text
    assert "LICENSE-PYTHON.txt" in (folder / "README.md").read_text()
    for file in PROJECT["project"]["license-files"]:
        assert (ROOT / file).is_file()
    assert "PSF-2.0" in PROJECT["project"]["license"]


def test_wheels_are_for_every_python_that_is_promised():
    promised = SpecifierSet(PROJECT["project"]["requires-python"])
    for_linux = WORKFLOWS["wheels"]["jobs"]["linux"]["strategy"]["matrix"]["python"]
    (minors,) = re.findall(r"cp3\{([\d,]+)\}-", PROJECT["tool"]["cibuildwheel"]["build"])
    assert [f"3.{minor}" for minor in minors.split(",")] == for_linux
    assert [f"3.{minor}" for minor in range(8, 15) if f"3.{minor}" in promised] == for_linux


def test_the_version_stands_in_one_place():
    assert metadata.version("afm-mlx") == afm_mlx.__version__
    assert "version" not in PROJECT["project"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1].rstrip(",")
    assert newest == afm_mlx.__version__


def test_the_formula_is_made_from_an_sdist(tmp_path):
    formula = runpy.run_path(str(ROOT / ".ci" / "brew_formula.py"))["formula"]
    sdist = tmp_path / "afm_mlx-1.2.3.tar.gz"
    sdist.write_bytes(b"an archive")
    text = formula(sdist, "https://example.org/afm")
    said = dict(re.findall(r'^  (\w+) "(.*)"$', text, re.M))
    assert said["url"] == "https://example.org/afm/releases/download/v1.2.3/afm_mlx-1.2.3.tar.gz"
    assert said["sha256"] == "9e691d5adacf0e102f203100842ffaba4e2a7dfe3dbd536827d3c0db8c7e88f1"
    assert said["homepage"] == "https://example.org/afm"
    assert len(said["desc"]) < 80  # Homebrew's limit
    # https://github.com/crate-py/rpds/issues/200: relinking the libraries of wheels fails
    assert re.search(r"^  preserve_rpath$", text, re.M)
    assert "{" not in re.sub(r"#\{[^}]*\}", "", text)
    python = said["depends_on"].removeprefix("python@")
    assert python in SpecifierSet(PROJECT["project"]["requires-python"])
    if ruby := shutil.which("ruby"):
        done = subprocess.run([ruby, "-wc"], input=text, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_pages_for_contributors_name_what_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text() + (ROOT / "SECURITY.md").read_text()
    paths = re.findall(
        r"`((?:afm_mlx|kernels|converters|adapters|tests|bench|\.ci)/[\w./]*)`", text
    )
    assert len(paths) > 12
    paths.remove("kernels/metal/NAME.metal")  # the one to write
    for path in (*paths, *re.findall(r"\]\(([\w./]+)", text)):
        assert (ROOT / path).exists(), path
    for target in re.findall(r"(?:\$ |`)make ([\w-]+)", text):
        assert target in TARGETS, target
