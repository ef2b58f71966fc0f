"""What coremltools is asked for, by its own signatures; what it would do needs a Mac."""

from pathlib import Path
from unittest.mock import create_autospec

import pytest

from afm_mlx.coreml import functions
from afm_mlx.coreml.availability import import_coremltools
from afm_mlx.errors import AFMError


@pytest.fixture
def tools(monkeypatch):
    """coremltools, whose calls into Core ML are recorded and checked against its signatures."""
    pytest.importorskip("coremltools", reason="pip install '.[coreml]'")
    models = import_coremltools().models
    monkeypatch.setattr(functions, "obstacle", lambda: None)
    for owner, name in (
        (models.utils, "compile_model"),
        (models, "CompiledMLModel"),
        (models.compute_plan.MLComputePlan, "load_from_path"),
    ):
        monkeypatch.setattr(owner, name, create_autospec(getattr(owner, name)))
    models.utils.compile_model.side_effect = lambda package, compiled: (
        Path(compiled).mkdir() or compiled
    )
    return import_coremltools()


def test_functions_are_loaded(tools, tmp_path):
    package = functions.CompiledPackage(tmp_path / "my.mlpackage")
    source, compiled = tools.models.utils.compile_model.call_args.args
    assert (source, Path(compiled).name) == (str(tmp_path / "my.mlpackage"), "my.mlmodelc")
    assert len(package.load(("prefill", "decode"), "CPU_AND_NE")) == 2
    units = tools.ComputeUnit.CPU_AND_NE
    calls = tools.models.CompiledMLModel.call_args_list
    assert [call.args for call in calls] == [(compiled, units)] * 2
    assert [call.kwargs for call in calls] == [{"function_name": n} for n in ("prefill", "decode")]
    plan = tools.models.compute_plan.MLComputePlan.load_from_path
    assert package.plan("CPU_AND_NE") is plan.return_value
    plan.assert_called_once_with(compiled, units)
    assert Path(compiled).exists()
    del package
    assert not Path(compiled).parent.exists()


def test_what_core_ml_refuses(tools, tmp_path):
    package = functions.CompiledPackage(tmp_path / "my.mlpackage")
    with pytest.raises(AFMError, match="compute_units is 'GPU'; allowed are CPU_ONLY, CPU_AND_GPU"):
        package.load(("prefill",), "GPU")
    tools.models.CompiledMLModel.side_effect = RuntimeError("{\n    no memory\n}")
    with pytest.raises(AFMError, match=r"can't load prefill, decode of .* for ALL: { no memory }"):
        package.load(("prefill", "decode"), "ALL")
    tools.models.utils.compile_model.side_effect = RuntimeError("bad op")
    with pytest.raises(AFMError, match=r"Core ML can't compile .*my\.mlpackage: bad op"):
        functions.CompiledPackage(tmp_path / "my.mlpackage")
