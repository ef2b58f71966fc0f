"""JSON Schema's official test suite, which jsonschema's source distribution carries."""

import pytest

from bench.json_schemas import Measurement, measure_suite
from tests.tools.package_index import sdist


@pytest.mark.slow
def test_the_official_suite_is_kept_or_refused(rng):
    folder = sdist("jsonschema", "4.26.0") / "json"
    figures = measure_suite(folder, Measurement(int(rng.integers(2**32)), documents=5))
    assert figures.faults == []
    assert figures.wrong == figures.invalid == 0
    assert figures.schemas > 350
    assert figures.honoured >= 0.85 * figures.schemas
    assert figures.honoured > 1.5 * figures.alone
    assert figures.accepted >= 0.9 * (figures.accepted + figures.rejected)
    assert max(figures.seconds) < 20
