"""Packages that coremltools' builder makes."""

import importlib.util

import pytest

# coremltools has wheels for few platforms.
if importlib.util.find_spec("coremltools") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def write_package(tmp_path):
    """A function that writes a program as a package, without any of coremltools' passes over it."""
    import coremltools as ct

    def write(program, **options):
        path = tmp_path / "model.mlpackage"
        ct.convert(
            program,
            convert_to="mlprogram",
            minimum_deployment_target=ct.target.iOS18,
            pass_pipeline=ct.PassPipeline.EMPTY,
            compute_units=ct.ComputeUnit.CPU_ONLY,
            skip_model_load=True,
            **options,
        ).save(str(path))
        return path

    return write
