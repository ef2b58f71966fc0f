"""Every variable of the environment is checked, and one that is not known is an error."""

import os
import re
from pathlib import Path

import mlx.core as mx
import pytest

from afm_mlx.kernels import dispatch, settings
from afm_mlx.kernels.cpu import extension
from afm_mlx.kernels.selftest import checks
from afm_mlx.kernels.settings import SettingError
from tests.tools.cases import each

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    for name in [name for name in os.environ if name.startswith("AFM_MLX_")]:
        monkeypatch.delenv(name)
    yield
    dispatch.invalidate()


@each(
    "name, value, says",
    [
        *((name, value, "allowed are 0 and 1")
          for name in ("NATIVE", "SELFTEST", "HUGE_PAGES", "BLAS", "HISTORY") for value in ("off", "2", " 0")),
        ("THREADS", "two", "whole number from 1 to 1024"),
        *(("THREADS", n, "whole number from 1 to 1024") for n in ("-1", "0", "1025")),
        ("THREADS", "٣", "whole number from 1 to 1024"),
        ("THREADS", "9" * 5000, "whole number from 1 to 1024"),
        ("ISA", "avx1024", "allowed are avx512, avx2"),
        ("CACHE", __file__, "is no folder"),
        ("THREAD", "3", r"is no variable of afm-mlx \(did you mean AFM_MLX_THREADS\?\); known are"),
    ],
)  # fmt: skip
def test_a_value_that_is_not_known_is_an_error(monkeypatch, name, value, says):
    monkeypatch.setenv(f"AFM_MLX_{name}", value)
    checks.ensure_checked.cache_clear()
    for door in (settings.check, checks.ensure_checked, extension._loaded.__wrapped__):
        with pytest.raises(SettingError, match=f"AFM_MLX_{name} .*{says}"):
            door()
    monkeypatch.delenv(f"AFM_MLX_{name}")
    settings.check()


@each(
    "name, value",
    [
        *((name, value) for name in ("NATIVE", "SELFTEST", "BLAS") for value in ("", "0", "1")),
        ("THREADS", "3"),
        ("ISA", "portable"),
        ("CACHE", "/no/such/folder/yet"),
        ("API_KEY", "x"),
    ],
)
def test_values_that_are_allowed(monkeypatch, name, value):
    monkeypatch.setenv(f"AFM_MLX_{name}", value)
    settings.check()
    monkeypatch.delenv(f"AFM_MLX_{name}")


def test_a_folder_of_temporary_files_that_is_not_there_is_an_error(monkeypatch, tmp_path):
    for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMP", str(tmp_path / "none"))
    with pytest.raises(
        SettingError, match=r"TMP is '.*none', which is no folder.*make it, or unset TMP"
    ):
        settings.check()
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # comes before
    settings.check()


def test_kernels_that_cannot_run_here_are_an_error(monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(extension, "unavailable", lambda: "nobody built it")
    for value, says in {
        "metal": "can't run: MLX has no Metal here. Unset it",
        "cpu": "can't run: nobody built it",
        "cpu/nonsense": "names of variants",
        "cuda": "allowed are metal, cpu, mlx, reference",
    }.items():
        dispatch._problem.cache_clear()
        monkeypatch.setenv(dispatch.SWITCH, value)
        with pytest.raises(SettingError, match=f"AFM_MLX_KERNELS is '{value}'.*{says}"):
            dispatch.forced()
    for value in ("mlx", "reference", "mlx/quantized"):
        monkeypatch.setenv(dispatch.SWITCH, value)
        assert dispatch.forced() == value
    dispatch._problem.cache_clear()


def test_the_table_has_all_variables_that_are_read():
    files = [
        f
        for folder in ("afm_mlx", "kernels", "adapters", "converters")
        for f in (ROOT / folder).rglob("*.py")
    ]
    read = {name for f in files for name in re.findall(r"AFM_MLX_[A-Z_]+[A-Z]", f.read_text())}
    assert read == set(settings.VARIABLES)
    page = (ROOT / "docs" / "doctor.md").read_text()
    missing = {name for name in read if f"`{name}`" not in page}
    assert all(name.startswith("AFM_MLX_REQUIRE_") for name in missing), "of builds and tests"
    native = extension.module()
    assert native is None or {*native.instruction_sets()} <= {*settings.INSTRUCTION_SETS}
