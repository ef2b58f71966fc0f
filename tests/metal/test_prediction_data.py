"""The counts of `bench.predict` equal today's kernels' counts, and its model meets published speeds."""

import json

import pytest

from bench import predict as prediction
from bench.predict import DATA
from tests.metal import mlx_wheel, prediction_data, published, toolchain
from tests.metal.published import FIGURES

_reason = toolchain.why_unavailable()
pytestmark = pytest.mark.skipif(_reason is not None, reason=str(_reason))


@pytest.fixture(autouse=True)
def wheel():
    try:
        mlx_wheel.headers()
    except mlx_wheel.Unavailable as error:
        pytest.skip(str(error))


def test_the_stored_counts_are_those_of_the_kernels():
    stored = json.loads(DATA.read_text(encoding="utf-8"))
    assert json.loads(prediction_data.text()) == stored, "a kernel has changed: run `make costs`"
    page = prediction_data.DOCS.read_text(encoding="utf-8")
    assert prediction_data.with_tables(page) == page, (
        "the tables of docs/benchmarks.md are old: run `make costs`"
    )
    with pytest.raises(ValueError, match="no marks for the table `published`"):
        prediction_data.with_tables("")


def test_the_model_meets_figures_that_it_was_not_fitted_on():
    assert published.fit() == (prediction.BANDWIDTH_SHARE, prediction.CORNER)
    assert all(abs(figure.off()) < 0.1 for figure in FIGURES if figure.fitted)
    held_out = [figure for figure in FIGURES if not figure.fitted]
    near = [figure for figure in held_out if abs(figure.off()) < 0.2]
    assert len(near) >= 15, [(figure.what, figure.chip, figure.off()) for figure in held_out]
    # Arithmetic is what makes them so: without it, 2 bits on an M1 Pro would be far off.
    slow = next(f for f in held_out if f.chip == "m1-pro")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prediction, "lane_cycles", lambda *_: 0.0)
        assert slow.off() < -0.3
