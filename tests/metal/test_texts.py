"""The texts for Apple's compiler: every kernel's, complete; and the exit status if one doesn't compile."""

import re
import sys

import mlx.core as mx
import pytest

from afm_mlx.config import PRESETS
from afm_mlx.kernels.metal import runtime
from afm_mlx.quantization.rule import AFM_EMBEDDING_RULE, AFM_RULE
from tests.metal import texts
from tests.metal.launches import cache_of, record, shapes_only
from tests.metal.test_lint import KERNELS


@pytest.fixture(scope="module")
def found():
    return texts.texts(texts.calls())


def test_every_kernel_has_a_text_that_is_whole(found):
    kernels = {name.rpartition("-")[0] for name in found}
    assert kernels == set(KERNELS)
    for name, text in found.items():
        assert text.startswith(texts.PRELUDE), name
        assert f"[[kernel]] void custom_kernel_afm_{name.rpartition('-')[0]}" in text, name
        # Conditions are decided before: no compiler has to.
        assert set(re.findall(r"^\s*#(\w+)", text, re.MULTILINE)) <= {"include", "define"}, name


def test_conditions_name_what_a_call_decides():
    """What nobody knows counts as 0, a misspelt name as well."""
    known = {name for call in texts.calls() for name, _ in call.options["template"]}
    files = sorted(runtime.FOLDER.glob("*.metal"))
    for file in files:
        known |= {name for name, _ in runtime._CONSTANT.findall(runtime._read(file.stem))}
    for file in files:
        text = runtime._read(file.stem)
        for condition in re.findall(r"^#if (.*)", text, re.MULTILINE):
            assert set(re.findall(r"[A-Za-z_]\w*", condition)) <= known, (file.name, condition)


COMPILER = """
import sys
from pathlib import Path
file = Path(sys.argv[sys.argv.index("-c") + 1])
(version,) = (a.removeprefix("-std=metal") for a in sys.argv if a.startswith("-std=metal"))
assert file.read_text().startswith("#include")
if version > sys.argv[1]:
    sys.exit(f"error: invalid value 'metal{version}' in '-std=metal{version}'")
if version in sys.argv[2:] and "vector" in file.name:
    sys.exit(f"{file.name}: error")
"""


@pytest.fixture
def compiling(tmp_path, monkeypatch, capsys):
    """Compile one text of each kernel in a decode step; return exit status, output and the texts' names.

    The compiler knows versions up to `newest`, and refuses some texts in the versions `refusing`.
    """
    model = shapes_only(PRESETS["afm-3b"], AFM_RULE, AFM_EMBEDDING_RULE)
    cache = cache_of(model, 100, 256)
    step = record(lambda: model.greedy(mx.zeros((1, 1), mx.int32), cache))
    one_of_each = {recorded[0].name: recorded for recorded in step}
    monkeypatch.setattr(texts, "calls", one_of_each.values)
    compiler = tmp_path / "compiler.py"
    compiler.write_text(COMPILER)

    def run(newest, *refusing):
        command = " ".join([sys.executable, "-S", str(compiler), newest, *refusing])
        status = texts.main([str(tmp_path / "texts"), "--compile", "--compiler", command])
        files = (tmp_path / "texts").glob("*.metal")
        return status, capsys.readouterr().out, [file.name for file in files]

    return run


def test_each_text_is_compiled_for_every_version_of_the_language_that_mlx_takes(compiling):
    status, said, names = compiling("4.1")
    assert status == 0
    for version in ("3.1", "3.2", "4.0", "4.1"):
        assert f"Metal {version}: {len(names)} compile, 0 don't" in said


def test_a_text_that_one_version_refuses_is_the_exit_status(compiling):
    status, said, names = compiling("4.1", "4.1")
    refused = [name for name in names if "vector" in name]
    assert refused
    assert status == 1
    assert all(f"{name}: error" in said for name in refused)
    assert f"Metal 4.0: {len(names)} compile, 0 don't" in said
    assert f"Metal 4.1: {len(names) - len(refused)} compile, {len(refused)} don't" in said


def test_versions_that_a_compiler_does_not_know_are_named_and_one_is_needed(compiling):
    status, said, names = compiling("3.2")
    assert status == 0
    assert f"Metal 3.2: {len(names)} compile, 0 don't" in said
    assert "Metal 4.0 is unknown to this compiler" in said
    status, _, _ = compiling("3.0")
    assert status == 1
