"""Which variant runs, and why others don't."""

import mlx.core as mx
import pytest

from afm_mlx import kernels
from afm_mlx.kernels import PackedWeight, ProductOptions, dispatch
from afm_mlx.kernels.dispatch import Case, Variant
from afm_mlx.kernels.selftest import specs
from afm_mlx.kernels.selftest.problems import make

CASE = Case("cpu", mx.float32, rows=3, mode="balanced")


@pytest.fixture
def variants(monkeypatch):
    """Three variants and the reference, for every operation, and a record of those that ran."""
    ran = []

    def listed(op):
        def variant(name, obstacle):
            def run(*args, **options):
                ran.append((op, name))
                return getattr(kernels.reference, op)(*args, **options)

            return Variant(op, name, run, obstacle)

        return (
            variant("metal/vector", lambda case: None),
            variant("cpu/one_row", lambda case: "takes one row" if case.rows > 1 else None),
            variant("cpu/rows", lambda case: None),
            variant("reference", lambda case: None),
        )

    monkeypatch.setattr(dispatch, "variants", listed)
    monkeypatch.setattr(dispatch, "_disabled", {})
    monkeypatch.delenv(dispatch.SWITCH, raising=False)
    dispatch.select.cache_clear()
    yield ran
    dispatch.select.cache_clear()


def chosen(case=CASE):
    return dispatch.select("packed_matmul", case).name


def test_the_first_without_an_obstacle_runs(variants):
    assert chosen(CASE._replace(rows=1)) == "cpu/one_row"
    assert chosen() == "cpu/rows"
    reasons = [reason for _, reason in dispatch.explain("packed_matmul", CASE)]
    assert reasons == ["runs on metal only", "takes one row", None, None]


def test_metal_runs_where_mlx_has_it(variants, monkeypatch):
    case = CASE._replace(device="gpu")
    for available, name in ((True, "metal/vector"), (False, "reference")):
        monkeypatch.setattr(mx.metal, "is_available", lambda answer=available: answer)
        dispatch.select.cache_clear()
        assert chosen(case) == name


def test_a_disabled_variant_gives_way_to_the_next(variants):
    dispatch.disable("cpu/rows", "failed")
    assert chosen() == "reference"
    assert dispatch.disabled() == {"cpu/rows": "failed"}
    assert ("cpu/rows", "failed") in [
        (v.name, reason) for v, reason in dispatch.explain("packed_matmul", CASE)
    ]
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
    dispatch.select.cache_clear()
    assert chosen() == "reference"
    reasons = [reason for _, reason in dispatch.explain("packed_matmul", CASE)]
    assert reasons == [*["reference was asked for"] * 3, None]


def test_a_backend_that_does_not_exist_is_an_error(variants, monkeypatch):
    monkeypatch.setenv(dispatch.SWITCH, "mettal")
    with pytest.raises(ValueError, match=r"AFM_MLX_KERNELS is 'mettal'; allowed are metal, cpu"):
        chosen()


def test_operations_run_the_variant_of_their_case(variants, rng):
    """And `case_of` is the case by which they choose."""
    for op in dispatch.OPS:
        for spec in [spec for spec in specs.full_specs() if spec.op == op][:9]:
            problem = make(spec, rng)
            variants.clear()
            result = getattr(kernels, op)(*problem.args)
            assert variants == [(op, dispatch.select(op, problem.case).name)]
            assert problem.case.rows == spec.batch * spec.tokens
            assert problem.case.dtype == spec.dtype
            assert problem.error(result) <= problem.bound, spec.label


def test_every_operation_has_a_reference_last():
    for op in dispatch.OPS:
        listed = dispatch.variants(op)
        assert listed[-1].name == "reference"
        assert all(v.backend in dispatch.BACKENDS for v in listed)
        assert len({v.name for v in listed}) == len(listed)


def test_options_that_an_operation_lacks_are_refused():
    x, weight = (
        mx.zeros((1, 64)),
        PackedWeight(mx.zeros((8, 4), mx.uint32), 2, "balanced", mx.ones(())),
    )
    for name, given in (("residual", x), ("adapters", (x,))):
        with pytest.raises(ValueError, match=f"packed_argmax takes no {name}; packed_matmul does"):
            kernels.packed_argmax(x, weight, ProductOptions(**{name: given}))
    with pytest.raises(ValueError, match="packed_swiglu takes no residual"):
        kernels.packed_swiglu(x, weight, weight, ProductOptions(residual=x))
