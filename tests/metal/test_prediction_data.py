"""The counts of `bench.predict` equal today's kernels' counts."""

import json

import pytest

from bench.predict import DATA
from tests.metal import mlx_wheel, prediction_data, toolchain

_reason = toolchain.why_unavailable()
pytestmark = pytest.mark.skipif(_reason is not None, reason=str(_reason))


def test_the_stored_counts_are_those_of_the_kernels():
    try:
        mlx_wheel.headers()
    except mlx_wheel.Unavailable as error:
        pytest.skip(str(error))
    stored = json.loads(DATA.read_text(encoding="utf-8"))
    assert json.loads(prediction_data.text()) == stored, "a kernel has changed: run `make costs`"
    page = prediction_data.DOCS.read_text(encoding="utf-8")
    assert prediction_data.with_tables(page) == page, (
        "the tables of docs/benchmarks.md are old: run `make costs`"
    )
    with pytest.raises(ValueError, match="no marks for the table `published`"):
        prediction_data.with_tables("")
