"""The emulator's choices where Metal's specification leaves one: accuracy, order of sums, denormals."""

import mlx.core as mx
import numpy as np
import pytest

from tests.metal import toolchain
from tests.metal.emulator import probe
from tests.metal.machine import EmulatorError
from tests.tools.cases import draw
from tests.tools.compare import assert_same

_reason = toolchain.why_unavailable()
pytestmark = pytest.mark.skipif(_reason is not None, reason=str(_reason))

N = 256


def launch(source, *inputs, outputs=1, seed=None):
    return [np.array(x) for x in probe(source, *inputs, n=N, outputs=outputs, seed=seed)]


def off_by(got, wanted):
    """Differences in ulps, of the float32 that is next to each number."""
    ulp = np.exp2(np.floor(np.log2(np.abs(wanted))) - 23)
    return (got.astype(np.float64) - wanted) / ulp


# Name, the function, where it is tested, and the most ulps that it may be off: precise, and fast by argument.
ULPS = [
    ("exp", np.exp, (-20, 20), 4, lambda v: 3 + np.floor(2 * np.abs(v))),
    ("exp2", np.exp2, (-20, 20), 4, lambda v: 3 + np.floor(2 * np.abs(v))),
    ("rsqrt", lambda v: 1 / np.sqrt(v), (0.1, 1e6), 0.5, lambda v: 2),
    ("log", np.log, (2.1, 1e6), 4, lambda v: 3),
    ("log2", np.log2, (2.1, 1e6), 4, lambda v: 2),
    ("atan", np.arctan, (-9, 9), 5, lambda v: 5),
    ("acos", np.arccos, (-0.9, 0.9), 4, lambda v: 5),
    ("tan", np.tan, (-1, 1), 6, None),
    ("tanh", np.tanh, (-3, 3), 5, None),
    ("sin", np.sin, (-4096, 4096), 4, None),
    ("cos", np.cos, (-4096, 4096), 4, None),
    ("sqrt", np.sqrt, (0, 1e6), 0.5, lambda v: 4.5),  # x * rsqrt(x)
]


def assert_off_by(got, wanted, allowed, what):
    """Every value is off by the ulps that are allowed, some to this side and some to that."""
    error = off_by(got, wanted)
    assert (np.abs(error) <= allowed).all(), what
    # A square root is a product, of errors that needn't both be large.
    if np.max(allowed) >= 1 and "sqrt" not in what.replace("rsqrt", ""):
        # Beyond a power of two numbers lie twice as far apart, and what is rounded to them may be nearer.
        crossed = np.frexp(got)[1] != np.frexp(wanted)[1]
        assert ((np.abs(error) >= allowed - 1) | crossed).all(), what
        assert 0.3 < (error > 0).mean() < 0.7, what


def test_functions_are_off_by_as_much_as_the_specification_allows(rng):
    for name, function, span, of_precise, of_fast in ULPS:
        v = rng.uniform(*span, N).astype(np.float32)
        calls = {f"metal::precise::{name}(a[i])": of_precise}
        if of_fast:  # which a function without a namespace may be, too
            calls |= dict.fromkeys((f"metal::fast::{name}(a[i])", f"{name}(a[i])"), of_fast(v))
        sums = zip("xyz", calls, strict=False)
        source = "".join(f"{x}[i] = {call};" for x, call in sums)
        for got, (call, allowed) in zip(
            launch(source, mx.array(v), outputs=len(calls)), calls.items(), strict=True
        ):
            assert_off_by(got, function(v.astype(np.float64)), allowed, call)


def test_fast_sine_and_cosine_have_an_absolute_error_within_pi_and_none_is_promised_outside(rng):
    v = rng.uniform(-np.pi, np.pi, N).astype(np.float32)
    got = launch("x[i] = metal::fast::sin(a[i]); y[i] = cos(a[i]);", mx.array(v), outputs=2)
    for x, wanted in zip(got, (np.sin(v), np.cos(v)), strict=True):
        np.testing.assert_allclose(np.abs(x - wanted), 2.0**-13, rtol=0.01)
    says = r"(sin|cos) of 4.*promises nothing.*probe.source:2:"
    for call in ("metal::fast::sin(a[i])", "cos(a[i])"):
        with pytest.raises(EmulatorError, match=says):
            launch(f"x[i] = {call};", mx.array(v).at[17].add(4 - v[17]))


def test_an_exponential_is_never_negative_and_a_half_is_one_of_the_two_around_it(rng):
    v = mx.array(np.float32([-200, -np.inf, np.inf, 0]).repeat(64))
    tiny, nothing, infinite, one = launch("x[i] = metal::fast::exp2(a[i]);", v)[0].reshape(4, 64)
    assert (tiny >= 0).all()
    assert (tiny < 1e-37).all()
    assert (nothing == 0).all()
    assert np.isinf(infinite).all()
    assert set(off_by(one, np.ones(64)).tolist()) == {-3, 3}
    v = rng.uniform(-2, 2, N).astype(np.float16)
    source = "x[i] = float(exp(a[i])); y[i] = float(metal::precise::exp(a[i]));"
    wanted = np.exp(v.astype(np.float64))
    ulp = np.exp2(np.floor(np.log2(wanted)) - 10)
    for x in launch(source, mx.array(v), outputs=2):
        assert (np.abs(x - wanted) < ulp).all()
        assert (np.abs(x - wanted) > 0.5 * ulp).any()


def test_sums_of_a_simdgroup_come_in_any_order_the_same_for_a_seed(rng):
    a = draw(rng, (N,))
    source = "x[i] = simd_sum(a[i]); y[i] = float(simd_sum(int(i)));"
    found = [launch(source, a, outputs=2, seed=seed) for seed in (*range(8), 3)]
    assert len({x.tobytes() for x, _ in found}) > 1
    assert_same(found[-1][0], found[3][0])
    exact = np.array(a).astype(np.float64).reshape(-1, 32).sum(-1).repeat(32)
    for x, y in found:
        np.testing.assert_allclose(x, exact, atol=1e-4)
        assert_same(y, np.arange(N).reshape(-1, 32).sum(-1).repeat(32).astype(np.float32))


def test_one_of_the_two_runs_flushes_denormals():
    a = mx.full((N,), 1e-38)
    with pytest.raises(EmulatorError, match="denormals, which the second run flushes"):
        launch("x[i] = (a[i] * 0.1f) * 1e38f;", a)
    assert_same(launch("x[i] = a[i] * 0.1f + 1.0f;", a)[0], np.ones(N, np.float32))
    assert (launch("x[i] = a[i] * 0.1f;", a)[0] < 1e-38).all()  # next to nothing, in both
