"""Which variant runs, and why others don't."""

import mlx.core as mx
import pytest

from afm_mlx import kernels
from afm_mlx.kernels import PackedWeight, ProductOptions, dispatch
from afm_mlx.kernels.dispatch import Case, Variant
from afm_mlx.kernels.selftest import specs
from afm_mlx.kernels.selftest.problems import make
from tests.tools.problems import assert_solved

CASE = Case("cpu", mx.float32, rows=3, mode="balanced")


@pytest.fixture
def variants(monkeypatch):
    """Three variants and the reference, for every operation, and a record of those that ran."""
    ran = []

    def listed(op):
        def variant(name, obstacle=lambda case: None):
            def run(*args):
                ran.append((op, name))
                return getattr(kernels.reference, op)(*args)

            return Variant(op, name, run, obstacle)

        return (
            variant("metal/vector"),
            variant("cpu/one_row", lambda case: "takes one row" if case.rows > 1 else None),
            variant("cpu/rows"),
            variant("reference"),
        )

    monkeypatch.setattr(dispatch, "variants", listed)
    return ran


def chosen(case=CASE):
    return dispatch.select("packed_matmul", case).name


def reasons():
    return [reason for _, reason in dispatch.explain("packed_matmul", CASE)]


def test_the_first_without_an_obstacle_runs(variants):
    assert chosen(CASE._replace(rows=1)) == "cpu/one_row"
    assert chosen() == "cpu/rows"
    assert reasons() == ["runs on metal only", "takes one row", None, None]


@pytest.mark.parametrize(("available", "name"), [(True, "metal/vector"), (False, "reference")])
def test_metal_runs_where_mlx_has_it(variants, monkeypatch, available, name):
    monkeypatch.setattr(mx.metal, "is_available", lambda: available)
    assert chosen(CASE._replace(device="gpu")) == name


def test_a_disabled_variant_gives_way_to_the_next(variants):
    before = dispatch.generation()
    dispatch.disable("cpu/rows", "failed")
    assert dispatch.generation() > before
    assert chosen() == "reference"
    assert dispatch.disabled() == {"cpu/rows": "failed"}
    assert reasons()[2] == "failed"
    dispatch.enable("cpu/rows")
    assert chosen() == "cpu/rows"


def test_asking_for_a_backend_or_a_variant(variants, monkeypatch):
    with dispatch.force("metal"):
        assert chosen() == "metal/vector"
        with dispatch.force("cpu/one_row"):  # which can't run three rows
            assert chosen() == "reference"
        assert dispatch.forced() == "metal"
    assert chosen() == "cpu/rows"
    monkeypatch.setenv(dispatch.SWITCH, "reference")
    dispatch.invalidate()
    assert chosen() == "reference"
    assert reasons() == [*["reference is selected"] * 3, None]
    monkeypatch.setenv(dispatch.SWITCH, "mettal")
    dispatch.invalidate()
    with pytest.raises(ValueError, match=r"AFM_MLX_KERNELS is 'mettal'; allowed are metal, cpu"):
        chosen()


def test_operations_run_the_variant_of_their_case(variants, rng):
    """And `case_of` is the case by which they choose."""
    for op in dispatch.OPS:
        for spec in [spec for spec in specs.full_specs() if spec.op == op][:9]:
            problem = make(spec, rng)
            variants.clear()
            assert_solved(problem, getattr(kernels, op))
            assert variants == [(op, dispatch.select(op, problem.case).name)]
            assert problem.case.rows == spec.batch * spec.tokens
            assert problem.case.dtype == spec.dtype


def test_every_operation_has_a_reference_last():
    for op in dispatch.OPS:
        listed = dispatch.variants(op)
        assert listed[-1].name == "reference"
        assert all(v.backend in dispatch.BACKENDS for v in listed)
        assert len({v.name for v in listed}) == len(listed)


@pytest.mark.parametrize(
    ("op", "option"),
    [("packed_argmax", "residual"), ("packed_argmax", "adapters"), ("packed_swiglu", "residual")],
)
def test_options_that_an_operation_lacks_are_refused(op, option):
    x = mx.zeros((1, 64))
    weight = PackedWeight(mx.zeros((8, 4), mx.uint32), 2, "balanced", mx.ones(()))
    matrices = [weight] * (2 if op == "packed_swiglu" else 1)
    with pytest.raises(ValueError, match=f"{op} takes no {option}; packed_matmul does"):
        getattr(kernels, op)(x, *matrices, ProductOptions(**{option: (x,)}))
